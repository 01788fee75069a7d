"""Files elsewhere: s3://, gs://, abfs://, hdfs:// and hf:// through pyarrow.fs.

Credentials come from each system's own chain (environment, profile, role), never from a URI. Whatever does not answer is
given up within a minute or so. An upload is one write of a whole file, whose size is checked: closing a stream after an
error would publish what was sent so far.
"""

import atexit
import contextlib
import functools
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath

import pyarrow as pa
from pyarrow import fs

from prefill_cli.errors import PrefillScoreError, first_line
from prefill_cli.places import Place, Uri, beside

CONNECT_SEC, SILENT_SEC, ATTEMPTS = 5, 20, 3
GCS_RETRY = timedelta(seconds=60)
AWS_ERROR = re.compile(r"AWS Error ([A-Z_]+)(?: \(HTTP status (\d+)\))?")
ABSENT = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID")
AWAY = ("NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SLOW_DOWN", "SERVICE_UNAVAILABLE", "INTERNAL_FAILURE")


@dataclass(frozen=True)
class Remote:
    """A file system and a path there; `uri_of` gives paths back as users write them."""

    system: fs.FileSystem
    path: str
    root: str  # scheme and host
    root_path: str  # what the system calls that
    query: str

    def uri_of(self, path: str) -> Uri:
        inside = path.removeprefix(self.root_path).lstrip("/")
        return Uri(f"{self.root}/{inside}{'?' + self.query if self.query else ''}")


def remote(uri: Uri) -> Remote:
    """The file system of a URI, made once, and the path there: as it stands, nothing is decoded."""
    bare, _, query = uri.partition("?")
    scheme, _, rest = bare.partition("://")
    host, _, path = rest.partition("/")
    root = f"{scheme}://{host}"
    system, root_path = _system(root, query)
    inside = "/".join(part for part in path.split("/") if part)
    return Remote(system, f"{root_path.rstrip('/')}/{inside}".rstrip("/") or "/", root, root_path, query)


@functools.cache
def _system(root: str, query: str) -> tuple[fs.FileSystem, str]:
    if root.startswith("hf://"):
        from huggingface_hub import HfFileSystem

        return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem())), root.removeprefix("hf://")
    system, path = fs.FileSystem.from_uri(root + ("?" + query if query else ""))
    if isinstance(system, fs.S3FileSystem):
        # A URI takes no time-outs, and the defaults are minutes. What the URI and the environment said is kept.
        options = system.__reduce__()[1][0] | {"connect_timeout": CONNECT_SEC, "request_timeout": SILENT_SEC}
        system = fs.S3FileSystem(**options, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))
    elif isinstance(system, fs.GcsFileSystem) and "retry_limit_seconds" not in query:
        system = fs.GcsFileSystem(anonymous="//anonymous@" in root, retry_time_limit=GCS_RETRY)
    return system, path


@contextlib.contextmanager
def reaching(uri: str, kind: type[PrefillScoreError]) -> Iterator[None]:
    """Turn whatever a remote system says inside the block into one sentence about `uri`."""
    try:
        yield
    except PrefillScoreError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise kind(f"{uri}: {_why(error)}") from None
    except Exception as error:
        if not uri.startswith("hf://"):  # the hub's client has errors of its own kinds
            raise
        raise kind(f"{uri}: {first_line(error)}") from None


def _why(error: BaseException) -> str:
    found = AWS_ERROR.search(str(error))
    code, status = (found[1], found[2] or "") if found else ("", "")
    if isinstance(error, FileNotFoundError) or code in ABSENT:
        return "no such file, folder or bucket"
    if code in DENIED or status in ("401", "403"):
        return "access is denied; look at the credentials that this process finds in its environment"
    if code in AWAY or status.startswith("5"):
        return f"cannot be reached, or the connection broke ({code.lower().replace('_', ' ')}); try again later"
    if "libjvm" in str(error) or "libhdfs" in str(error):
        return f"{first_line(error)}; hdfs:// needs Java and Hadoop's client: set JAVA_HOME, HADOOP_HOME and CLASSPATH"
    return first_line(error)


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written over."""

    size_bytes: int
    mtime_ns: int
    etag: str = ""


def stamp(uri: Uri) -> Stamp:
    """Of a remote file. Object stores know a time to the second only, but S3 tells a digest too.

    Raises:
        FileNotFoundError, OSError, pa.ArrowException.
    """
    there = remote(uri)
    info = there.system.get_file_info(there.path)
    if info.type != fs.FileType.File:
        raise FileNotFoundError(str(uri))
    etag = ""
    if isinstance(there.system, fs.S3FileSystem):
        with there.system.open_input_file(there.path) as file:
            etag = (file.metadata() or {}).get("ETag", b"").decode()
    return Stamp(info.size, info.mtime_ns or 0, etag)


def is_file(uri: Uri) -> bool:
    there = remote(uri)
    return bool(there.system.get_file_info(there.path).type == fs.FileType.File)


def open_input(uri: Uri) -> pa.NativeFile:
    there = remote(uri)
    return there.system.open_input_file(there.path)


def listing(folder: Uri) -> dict[str, int]:
    """Path inside the folder → size of every file in it; none where there is no such folder."""
    there = remote(folder)
    found = there.system.get_file_info(fs.FileSelector(there.path, allow_not_found=True, recursive=True))
    files = (info for info in found if info.type == fs.FileType.File)
    return {PurePosixPath(info.path).relative_to(there.path).as_posix(): info.size for info in files}


def read(uri: Uri) -> bytes:
    with open_input(uri) as file:
        return bytes(file.read())


def write(uri: Uri, content: bytes | pa.Buffer) -> None:
    """A whole file, or an error. What was there under the name before stays then: nothing is taken away.

    All is sent in one piece, so that an interrupt comes before or after it, and a stream that broke publishes nothing.

    Raises:
        OSError, pa.ArrowException.
    """
    there = remote(uri)
    if not isinstance(there.system, fs.S3FileSystem | fs.GcsFileSystem | fs.AzureFileSystem):
        there.system.create_dir(str(PurePosixPath(there.path).parent), recursive=True)
    size = len(content) if isinstance(content, bytes) else content.size
    with there.system.open_output_stream(there.path, compression=None) as sink:
        if size:
            sink.write(content)
    if (found := there.system.get_file_info(there.path).size) != size:
        raise OSError(f"{found} bytes are there after {size} were sent")


def upload(path: Path, uri: Uri) -> None:
    """The same for a local file."""
    with pa.memory_map(str(path)) as source:
        write(uri, source.read_buffer() if source.size() else b"")


def delete(uri: Uri) -> None:
    there = remote(uri)
    with contextlib.suppress(FileNotFoundError):
        there.system.delete_file(there.path)


def delete_folder(uri: Uri) -> None:
    there = remote(uri)
    with contextlib.suppress(FileNotFoundError):
        there.system.delete_dir(there.path)


def download(uri: Uri, path: Path) -> None:
    """A whole file under its name, or an error and none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open_input(uri) as source, temporary.open("wb") as sink:
            while block := source.read(16 << 20):
                sink.write(block)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


_fetched: dict[str, Uri] = {}  # local copy → where it came from


def fetch(wanted: Place | None, kind: type[PrefillScoreError]) -> Path | None:
    """A local copy of a remote file, or of a folder or glob of them, for the life of this process; a local path as it is.

    Raises:
        `kind`: it is not there or cannot be had.
    """
    if wanted is None or isinstance(wanted, Path):
        return wanted
    with reaching(wanted, kind):
        there = remote(wanted)
        info = there.system.get_file_info(there.path)
        name = PurePosixPath(there.path).name
        target = scratch() / f"{len(_fetched)}" / (name if "*" not in name else "parts")
        if info.type == fs.FileType.File:
            download(wanted, target)
        elif info.type == fs.FileType.Directory:
            for inside in listing(wanted):
                download(beside(wanted, inside), target / inside)
        elif matches := matching(wanted):
            for number, uri in enumerate(sorted(matches)):  # in folders of their own: files of several may have one name
                download(uri, target / f"{number:06d}" / PurePosixPath(remote(uri).path).name)
        else:
            raise kind(f"{wanted}: no such file or folder")
    _fetched[str(target)] = wanted
    return target


def matching(pattern: Uri) -> list[Uri]:
    """Files and folders that a glob stands for."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    there = remote(pattern)
    if not re.search(r"[*\[]", there.path):
        return []
    return [there.uri_of(path) for path in ArrowFSWrapper(there.system).glob(there.path)]


@functools.cache
def scratch() -> Path:
    """A folder of this process's own, which goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="prefill-score-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def naming_origins() -> Iterator[None]:
    """Errors inside the block name where a file came from, not its local copy."""
    try:
        yield
    except PrefillScoreError as error:
        text = str(error)
        for copy, origin in _fetched.items():
            text = text.replace(copy, origin)
        raise type(error)(text) from None
