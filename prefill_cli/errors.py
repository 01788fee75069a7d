"""Everything that can go wrong, by who must act, with one exit code each.

PrefillScoreError        1   a bug of ours, if it ever surfaces as itself
├── UsageError           2   whoever wrote the command line, the environment or prefill-score.toml
├── InputError           3   whoever makes the prompts (also exclude and candidates columns)
├── ItemsError           4   whoever makes the item embeddings
├── ModelError           5   whoever makes or places the model
├── OutputError          6   whoever owns the output folder and its disk
└── TooManyRejectsError       7   whoever makes the prompts; the work done is kept

Interrupted          128+n   signal n ended the run; a KeyboardInterrupt, so that no `except Exception` swallows it
└── TimeLimitError     124   --time-limit ended it

A message is one sentence or two that say what is wrong, where, and what to do. It never holds a prompt's text.
"""

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator


class PrefillScoreError(Exception):
    """Base of every error that prefill-score raises on purpose."""

    exit_code = 1


class UsageError(PrefillScoreError):
    """An option, variable or configuration key is wrong, or two of them contradict each other."""

    exit_code = 2


class InputError(PrefillScoreError):
    """An input is missing, unreadable, lacks a column, or has one of the wrong type."""

    exit_code = 3


class ItemsError(PrefillScoreError):
    """The item embeddings (or a list of item ids) cannot be used as they are."""

    exit_code = 4


class ModelError(PrefillScoreError):
    """The model is missing, incomplete, would run code of its own, or does not fit the memory."""

    exit_code = 5


class OutputError(PrefillScoreError):
    """The output cannot be written, is locked, or belongs to something else."""

    exit_code = 6


class TooManyRejectsError(PrefillScoreError):
    """More input rows were rejected than --max-rejects allows; nothing was published."""

    exit_code = 7


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; the same command line goes on where it stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; the same command goes on where this one ended")
        self.exit_code = 128 + signum


class TimeLimitError(Interrupted):
    """--time-limit ended the run."""

    def __init__(self) -> None:
        super().__init__(signal.SIGALRM)
        self.args = ("stopped by --time-limit; the same command goes on where this one ended",)
        self.exit_code = 124  # what timeout(1) says


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest of the known names, or a list of them where none is close."""
    names = sorted(map(_printable, known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there are: {', '.join(names[:12])}{', …' if len(names) > 12 else ''})" if names else ""


@contextlib.contextmanager
def os_errors_as(kind: type[PrefillScoreError], what: str) -> Iterator[None]:
    """What the system refuses inside the block (permissions, names too long) as an error of the kind that must act."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} {error.filename or ''}: {error.strerror or error}") from None


def first_line(error: BaseException) -> str:
    """The first line of a library's error: for most the sentence, while the rest is hints and traces.

    What a damaged file put in it stands there escaped.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return _printable(line)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
