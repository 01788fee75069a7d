"""Small files that are whole or absent, and one sentence for whatever a disk refuses."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from prefill_cli.errors import OutputError

SEAL = "sha256"  # of the rest of a JSON file of ours, so that a damaged one is known as such


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an OutputError about `path`."""
    try:
        yield
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                message += f" ({shutil.disk_usage(path.parent).free:,} bytes are free)"
            message += "; free some space and give the same command again, which goes on with the shards that are done"
        elif error.errno == errno.ENOENT and not path.parent.exists():
            message += "; its folder was removed meanwhile, so give the same command again"
        raise OutputError(message) from None


def check_writable(folder: Path) -> None:
    """That a folder, which need not be there yet, can be made and written, as far as the system tells.

    Raises:
        OutputError: it cannot.
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    with writing(folder):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under `path` when the block ends well: temporary name, sync, rename.

    Raises:
        OutputError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # two runs may write one segment of a cache
    try:
        with writing(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(to_json(value))


def to_json(value: dict[str, Any]) -> bytes:
    """A JSON file's content, with its seal."""
    text = json.dumps(value | {SEAL: _seal(value)}, indent=1, ensure_ascii=False)
    # What UTF-8 cannot hold (bytes of a file's name) becomes \udcXX, which is JSON's own way to write it.
    return text.encode(errors="backslashreplace") + b"\n"


def read_json(path: Path, *, sealed: bool = True) -> dict[str, Any] | None:
    """The object that write_json wrote, or None where there is no such file or it holds something else.

    sealed: False for an object that another hand wrote.
    """
    try:
        return from_json(path.read_bytes(), sealed=sealed)
    except OSError:
        return None


def from_json(content: bytes, *, sealed: bool = True) -> dict[str, Any] | None:
    """The object in a JSON file's content, None where it is none or its seal is broken."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or (sealed and value.pop(SEAL, None) != _seal(value)):
        return None
    return value


def _seal(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
