"""One writer of an output at a time, or several slices of one (--shard-of).

`.OUT.lock` is held by flock, which the system frees when the process dies, however it dies, and says who holds it. Where a
file system knows no flock, what the file says decides. A slice holds `.OUT.slice-3-of-16.lock`. Whoever wants the whole
takes its lock first and looks for slices then, and a slice the other way round, so that never both are at work.
"""

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefill_cli.data.disk import writing
from prefill_cli.errors import OutputError

log = logging.getLogger(__name__)
TURN_WITHIN_SEC, TURN_LOOK_SEC = 60.0, 0.05
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def lock_path(out: Path, part: str = "") -> Path:
    return out.parent / (f".{out.name}.{part}.lock" if part else f".{out.name}.lock")


@contextlib.contextmanager
def locked(out: Path, part: str = "") -> Iterator[None]:
    """Hold the lock of an output folder, or of a slice of the run that makes it, for the block.

    Raises:
        OutputError: another living process holds it, or the other kind of lock; its folder cannot be written.
    """
    with _held(lock_path(out, part), out):
        if part:
            check_free(lock_path(out))
        elif others := slices_at_work(out):
            raise OutputError(f"{out}: {', '.join(others)} of a run are being done; wait for them")
        yield


@contextlib.contextmanager
def taking_turns(out: Path) -> Iterator[None]:
    """Hold a lock that slices take for an instant each, one after the other.

    Raises:
        OutputError: another holds it for longer.
    """
    until = time.monotonic() + TURN_WITHIN_SEC
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_held(lock_path(out, "turn"), out))
                break
            except OutputError:
                if time.monotonic() > until:
                    raise
                time.sleep(TURN_LOOK_SEC)
        yield


def slices_at_work(out: Path, but: str = "") -> list[str]:
    """Names of the slices whose processes live, less one."""
    found = []
    for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.slice-*.lock")):
        part = path.name.removeprefix(f".{out.name}.").removesuffix(".lock")
        try:
            check_free(path)
        except OutputError:
            found += [part] if part != but else []
    return found


@contextlib.contextmanager
def _held(path: Path, out: Path) -> Iterator[None]:
    with writing(path):
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    try:
        with writing(path):
            os.truncate(descriptor, os.pwrite(descriptor, _our_name(), 0))  # in this order never empty, once it was not
        yield
    finally:
        _release(path, descriptor)


def check_free(path: Path) -> None:
    """That nobody who lives holds a lock, which is left as it is.

    Raises:
        OutputError: somebody does.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError):  # a place that cannot be written is told elsewhere
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{path}: {_holder(path)[1]} is writing this output; wait for it, or stop it first") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _refuse_unless_left(path)
        finally:
            os.close(descriptor)


def _our_name() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _release(path: Path, descriptor: int) -> None:
    """Remove the name while it is held: whoever waits finds that it is gone and takes a new file."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:  # else somebody removed ours, and this is another's
            path.unlink()
    os.close(descriptor)


def _acquire(path: Path) -> int:
    """The lock's file, held. One that a dead process left is taken over, whichever host it ran on."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            holder, who = _holder(path)
        except FileNotFoundError:  # the former holder removed it between our two calls
            os.close(descriptor)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{path}: {who} is writing this output; wait for it, or stop it first") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_LOCKS:
                raise
            return _acquire_without_flock(path)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                if holder:
                    log.info("%s: %s left this lock and lives no more; taken over", path, who)
                return descriptor
        os.close(descriptor)  # the former holder removed the file between our two calls


def _holder(path: Path) -> tuple[dict[str, Any], str]:
    """What a lock's file says, nothing where it was left without a name; and in words.

    Raises:
        FileNotFoundError.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    holder: dict[str, Any] = found if isinstance(found, dict) else {}
    return holder, f"process {holder.get('pid', '?')} on {holder.get('host', 'this machine')}"


def _acquire_without_flock(path: Path) -> int:
    """The same on a file system that knows no locks: what the file says decides, and whether that process lives.

    The file appears with its content or not at all. Whoever removes one that was left holds a lock of the same kind
    meanwhile, so that no two remove each other's.
    """
    own = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, _our_name())
        while True:
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
                return descriptor
            with contextlib.suppress(FileNotFoundError):  # it was given back meanwhile
                _refuse_unless_left(path)
                claim = path.with_name(f"{path.name}.claim")
                claimed = _acquire_without_flock(claim)
                try:
                    holder, who = _refuse_unless_left(path)
                    path.unlink()
                    if holder:
                        log.info("%s: %s left this lock and lives no more; taken over", path, who)
                finally:
                    _release(claim, claimed)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        own.unlink(missing_ok=True)


def _refuse_unless_left(path: Path) -> tuple[dict[str, Any], str]:
    """The holder of a lock that may be taken over: nobody, or a dead process of this host.

    Raises:
        OutputError: it may live.
    """
    holder, who = _holder(path)
    if holder.get("host") == socket.gethostname() and _lives(holder.get("pid")):
        raise OutputError(
            f"{path}: {who} is writing this output; wait for it, or, if that process is another program by now, remove the "
            "file and give the same command again"
        )
    if holder and holder.get("host") != socket.gethostname():
        raise OutputError(
            f"{path}: {who} left this lock, and its file system cannot tell whether it still runs; make sure that it does "
            "not, remove the file, and give the same command again"
        )
    return holder, who


def _lives(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()  # a process that bears our number has left it
