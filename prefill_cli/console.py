"""What is printed, and how. stdout: the result alone. stderr: messages and progress, plain where nobody watches."""

import contextlib
import json
import logging
import os
import re
import select
import sys
import time
from datetime import UTC, datetime
from typing import IO, Any

from prefill_cli.errors import OutputError

LINE_EVERY_SEC = 30.0
LAST_WORDS_SEC = 0.5
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # names of files may hold them, a line of a log may not


def say(line: str) -> None:
    """One line on stderr. There may be none, and whoever listened may leave; the work goes on."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def give(text: str) -> None:
    """Text on stdout, at once: a reader that left or a full disk shows here and not when the process ends.

    Raises:
        BrokenPipeError: the reader left. OutputError: stdout is a file that cannot be written.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_stdout()
        raise OutputError(f"stdout: cannot be written: {error.strerror}") from None


def give_up_stdout() -> None:
    """Send what stdout still holds nowhere, so that the end of the process does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


class Messages(logging.Handler):
    """The package's log on stderr: text for people, one JSON object a line for machines.

    dated: where nobody watches, text begins with time and level. A record's `figures` are fields of its JSON object.
    """

    def __init__(self, log_format: str, dated: bool = False) -> None:
        super().__init__()
        self._json = log_format == "json"
        self._dated = dated
        self.bar: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        figures = getattr(record, "figures", {})
        if self.bar is not None:
            if figures:  # the bar tells them
                return
            self.bar.clear()
        say(self.format_line(record.levelname.lower(), record.getMessage(), **figures))
        if self.bar is not None:
            self.bar.refresh()

    def format_line(self, level: str, message: str, **fields: Any) -> str:
        now, message = datetime.now(UTC), CONTROL.sub(" ", message)
        if self._json:
            told = {"time": now.isoformat(timespec="seconds"), "level": level, "message": message, **fields}
            return json.dumps(told, ensure_ascii=False)
        if self._dated and not on_terminal(sys.stderr):
            return f"{now:%Y-%m-%dT%H:%M:%SZ} {level} {message}"
        return message if level == "info" else f"{level}: {message}"


def listen(log_format: str = "text", quiet: bool = False, dated: bool = False) -> Messages:
    """Send the package's messages to stderr; `quiet` leaves warnings and errors. dated: see Messages."""
    messages = Messages(log_format, dated)
    logger = logging.getLogger("prefill_cli")
    logger.handlers[:] = [messages]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    return messages


class Progress:
    """Rows done, rate and time left: a live bar on a terminal, a plain line every 30 s elsewhere, nothing when quiet."""

    def __init__(self, messages: Messages, quiet: bool = False) -> None:
        self._messages, self._quiet = messages, quiet
        self._bar: Any = None
        self._rows = self._done = self._tokens = self._done_before = 0
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._messages.bar = None
            self._bar.close()

    def start(self, rows: int, done: int) -> None:
        """`rows` in all, `done` of them by an earlier run."""
        self._rows, self._done, self._done_before = rows, done, done
        self._began = self._last_line = time.monotonic()
        if not self._quiet and on_terminal(sys.stderr) and not self._messages._json:
            from tqdm import tqdm

            self._bar = tqdm(total=rows, initial=done, unit=" rows", file=sys.stderr, dynamic_ncols=True, leave=False)
            self._messages.bar = self._bar

    def advance(self, rows: int, tokens: int) -> None:
        self._done += rows
        self._tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._tokens_per_sec():,.0f} tokens/s", refresh=False)
            self._bar.update(rows)
        elif not self._quiet and time.monotonic() - self._last_line >= LINE_EVERY_SEC:
            self._last_line = time.monotonic()
            rate, tokens_per_sec = self._per_sec(self._done - self._done_before), self._tokens_per_sec()
            left = f"{(self._rows - self._done) / rate:.0f} s left" if rate else "time left unknown"
            text = f"{self._done:,} of {self._rows:,} rows, {tokens_per_sec:,.0f} tokens/s, {left}"
            fields = {"rows_done": self._done, "rows": self._rows, "rows_per_sec": round(rate, 1)}
            say(self._messages.format_line("info", text, **fields, tokens_per_sec=round(tokens_per_sec)))

    def _tokens_per_sec(self) -> float:
        return self._per_sec(self._tokens)

    def _per_sec(self, count: int) -> float:
        return count / max(time.monotonic() - self._began, 1e-9)


def print_error(message: str, log_format: str = "text") -> None:
    """One line on stderr, whatever the message holds."""
    say(Messages(log_format).format_line("error", " ".join(message.split())))


def last_words(message: str) -> None:
    """An error's line on stderr from a process that ends now and waits for nobody, not for a lock and not for a reader."""
    handlers = logging.getLogger("prefill_cli").handlers
    as_json = any(isinstance(handler, Messages) and handler._json for handler in handlers)
    line = Messages("json" if as_json else "text").format_line("error", message)
    with contextlib.suppress(OSError):
        if select.select([], [2], [], LAST_WORDS_SEC)[1]:
            os.write(2, line.encode(errors="backslashreplace") + b"\n")
