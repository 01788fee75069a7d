"""How the process ends: by signals, within seconds, and with its last words said."""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from prefill_cli import console, machine
from prefill_cli.errors import Interrupted, TimeLimitError

STOP_WITHIN_SEC, LAST_WORDS_SEC = 9.0, 0.7  # from the first signal on; for last_words, where that was not enough
EXIT_CODES: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGALRM: TimeLimitError().exit_code}
heard: list[Interrupted] = []  # what the first signal raised
last_words: list[Callable[[int], None]] = []  # who wants to know the exit code of a process that does not end by itself


def listen() -> None:
    """From now on, signals end the process in order, or after STOP_WITHIN_SEC without it."""
    for signum in EXIT_CODES:
        signal.signal(signum, _stop_once)
    ctypes.CDLL(None).signal(signal.SIGBUS, BUS_ERROR)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed stdin, stdout or stderr: without this, a
        pass  # file of the result would take its number, and get what a library prints
    os.close(descriptor)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(wake,), daemon=True).start()


def end_after(seconds: float) -> None:
    """Stop the run so long from now, as a signal does."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def leave(code: int) -> None:
    """End the process when all is in order. Python's own way would take PyTorch apart first, which is most of a second, and
    wait for threads that hang.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be none, or nobody who reads it
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def as_heard() -> Iterator[None]:
    """In Ray's calls a KeyboardInterrupt of its own stands in place of what a handler raised; here it is that again."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted) or not heard:
            raise
        raise heard[0] from None


def stop(signum: int, _: FrameType | None) -> None:
    raise TimeLimitError if signum == signal.SIGALRM else Interrupted(signum)


def _stop_once(signum: int, frame: FrameType | None) -> None:
    """The first signal ends the run in order. Of the next ones, which find that under way, _end_in_time hears."""
    for number in EXIT_CODES:
        signal.signal(number, _stopping)
    try:
        stop(signum, frame)
    except Interrupted as error:
        heard.append(error)
        raise


def _stopping(*_: object) -> None:
    pass


def _end_in_time(wake: int) -> None:
    """End the process where a signal alone does not: a batch may take long. Nothing is lost that SIGKILL would not lose."""
    code, until = None, float("inf")
    while (left := until - time.monotonic()) > 0:
        if not select.select([wake], [], [], min(left, threading.TIMEOUT_MAX))[0]:
            continue
        if (heard := EXIT_CODES.get(os.read(wake, 1)[0])) is None:  # a signal that a library asked to hear of
            continue
        if code is not None:  # a second one waits for nothing
            break
        code, until = heard, time.monotonic() + STOP_WITHIN_SEC
    _end_now("stopped before the current batch ended; the same command goes on with the shards that are done", code or 1)


def _end_now(message: str, code: int) -> None:
    console.last_words(message)
    for tell in last_words:
        telling = threading.Thread(target=tell, args=(code,), daemon=True)
        telling.start()
        telling.join(LAST_WORDS_SEC)  # a disk that hangs must not keep the process
    machine.end_children()  # last, or whoever waits for them would say that they failed
    os._exit(code)


def _bus_error(_: int) -> None:
    """A mapped file became shorter under the hands of whoever reads it."""
    _end_now(*machine.shortened())


# For C, because Python's own handlers run after the access that fails, which therefore fails for ever.
BUS_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_int)(_bus_error)
