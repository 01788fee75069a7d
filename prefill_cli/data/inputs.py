"""From what the user named to a plan: which files, which columns with which types, which shards.

Every footer is read and all schemas are reconciled here, before a model is loaded. Files come in the order given, those
of a folder or glob in natural order (part-2 before part-10). Names that start with "." or "_" are skipped inside folders,
as Spark, Hive and Arrow do. Hive folder names (`country=BR`) serve as text columns for --keep-columns alone.
"""

import fnmatch
import glob
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from prefill_cli import storage
from prefill_cli.arrow import is_binary, is_list, is_text, plain_type
from prefill_cli.config import RunConfig, option
from prefill_cli.errors import InputError, UsageError, first_line, nearest
from prefill_cli.matrices import IDS_DIGEST, IDS_FILE, MATRIX_SUFFIXES, TENSOR, ids_digest, open_matrix
from prefill_cli.parquet import FAULTS, group_rows, open_parquet
from prefill_cli.places import Uri, beside, is_uri, place

log = logging.getLogger(__name__)
MATRIX_HEAD_BYTES = 65_536  # which tell one file from another, beside its size and time
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")


@dataclass(frozen=True)
class InputFile:
    """One Parquet file as its footer described it."""

    path: str  # as found from what the user typed; rejects and manifest say the same. A Uri where it lies elsewhere
    group_rows: tuple[int, ...]  # rows of each row group
    schema: pa.Schema
    size_bytes: int
    mtime_ns: int
    footer_sha256: str
    data_bytes: int  # of all columns, encoded but not compressed
    etag: str = ""  # a digest that some object stores tell

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    @property
    def identity(self) -> dict[str, object]:
        """What has to be the same for the file to be the same."""
        return {
            "path": self.path,
            "rows": self.rows,
            "size_bytes": self.size_bytes,
            "mtime_ns": self.mtime_ns,
            "footer_sha256": self.footer_sha256,
            **({"etag": self.etag} if self.etag else {}),
        }


@dataclass(frozen=True)
class Shard:
    """A fixed run of input rows: `rows` of them from `start`, counted over all files in order."""

    index: int
    start: int
    rows: int


@dataclass(frozen=True)
class InputPlan:
    """All files and the types that their columns were reconciled to.

    `columns` are all that the run reads; of them, `id_type` and `kept` are the types of the output. A type is null where
    the column holds nothing else in any file.
    """

    files: tuple[InputFile, ...]
    columns: pa.Schema
    id_type: pa.DataType
    kept: tuple[pa.Field, ...]

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)

    def shards(self, shard_rows: int) -> list[Shard]:
        """At least one, so that an input of zero rows still makes a part with a schema."""
        starts = range(0, max(self.rows, 1), shard_rows)
        return [Shard(i, start, min(shard_rows, self.rows - start)) for i, start in enumerate(starts)]


def plan_inputs(config: RunConfig) -> InputPlan:
    """Find the input files, read their footers and reconcile the columns that the run uses.

    Raises:
        InputError: nothing found, unreadable file, missing column, types that do not go together.
    """
    paths = find_files(config.inputs)
    if config.vector_column and (matrices := [path for path in paths if is_matrix(path)]):
        if len(paths) > 1:
            raise UsageError(f"{matrices[0]}: a .npy or .safetensors file goes alone; {len(paths)} files are named")
        return matrix_plan(matrices[0], config)
    if config.user_ids:
        raise UsageError("--user-ids goes with a .npy or .safetensors file; Parquet has its ids in a column")
    with ThreadPoolExecutor(8) as pool:
        files = tuple(pool.map(read_footer, paths))
    types = {config.id_column: _reconcile(files, config.id_column, "an id", _is_id)}
    if config.vector_column:
        what, fits = "vectors (a list of floats)", is_vectors
    elif config.messages_column:
        what, fits = "chat messages (a list of role and content, both text)", _is_messages
    elif config.token_ids_column:
        what, fits = "token ids (a list of integers)", _is_token_ids
        if config.from_lm_head is not None:
            what, fits = "an item's token ids (a list of integers, or one)", _is_tokens_of_an_item
    else:
        what, fits = "prompt text", is_text
    types[config.text_column] = _reconcile(files, config.text_column, what, fits)
    for name in (config.exclude_column, config.candidates_column):
        if name:
            types[name] = _reconcile(files, name, "a list of item ids", is_list)
    types |= {name: _reconcile(files, name, "a kept column", lambda _: True) for name in config.keep_columns}
    kept = tuple(pa.field(name, types[name]) for name in config.keep_columns)
    return InputPlan(files, pa.schema(list(types.items())), types[config.id_column], kept)


def find_files(inputs: Iterable[str]) -> list[str]:
    """Paths of all Parquet files that `inputs` (files, folders, globs, URIs) stand for, each once."""
    found: dict[str, str] = {}
    for text in inputs:
        where = place(text)
        if is_uri(where):
            paths: dict[str, str] = {uri: uri for uri in _expand_elsewhere(where)}
        else:
            paths = _expand_here(text, str(where))
        for real, path in paths.items():
            if re.search("[\ud800-\udfff]", path):  # how Python shows foreign bytes; the rejects could not name the file
                raise InputError(f"{path!a}: the file's name is not UTF-8; rename it")
            if real in found:
                log.warning("%s was named twice and is read once", path)
            found.setdefault(real, path)
    return list(found.values())


def _expand_here(text: str, path: str) -> dict[str, str]:
    """Real path → path as found, in order."""
    try:
        paths = {os.path.realpath(found): found for found in reversed(_expand(text, path))}  # a glob may match twice
    except OSError as error:
        raise InputError(f"{text}: cannot be searched: {error}") from None
    return dict(reversed(paths.items()))


def _expand(text: str, path: str) -> list[str]:
    if os.path.isdir(path):
        files = _parquet_files(path)
        if not files:
            raise InputError(f"{text}: the folder holds no Parquet file ({', '.join(PARQUET_SUFFIXES)})")
        return files
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        matches = sorted((m for m in glob.glob(path, recursive=True) if _is_meant(m, path)), key=natural)
        # A glob that matches a folder means the files in it.
        files = [f for m in matches for f in (_parquet_files(m) if os.path.isdir(m) else [m])]
        if not files:
            raise InputError(f"no file matches {text!r}")
        return files
    parent = os.path.dirname(path) or "."
    names = os.listdir(parent) if os.path.isdir(parent) else []
    close = nearest(os.path.basename(path), [n for n in names if n.endswith(PARQUET_SUFFIXES)])
    raise InputError(f"{text}: no such file or folder{close}")


def _expand_elsewhere(uri: Uri) -> list[Uri]:
    """The same on another system."""
    with storage.reaching(uri, InputError):
        if storage.is_file(uri):
            return [uri]
        matches = sorted(storage.matching(uri), key=natural)
        meant = [m for m in matches if _is_meant(m.partition("?")[0], uri.partition("?")[0])]
        files = [m for m in meant if storage.is_file(m)] or [f for m in meant for f in _parquet_files_elsewhere(m)]
        if matches and not files:
            raise InputError(f"no file matches {str(uri)!r}")
        if files := files or _parquet_files_elsewhere(uri):
            return files
    raise InputError(f"{uri}: no such file, no Parquet file in such a folder ({', '.join(PARQUET_SUFFIXES)}), no match")


def _parquet_files_elsewhere(folder: Uri) -> list[Uri]:
    inside = (name.split("/") for name in storage.listing(folder) if name.endswith(PARQUET_SUFFIXES))
    visible = (parts for parts in inside if not any(map(_hidden, parts)))
    return [beside(folder, *parts) for parts in sorted(visible, key=lambda parts: [natural(part) for part in parts])]


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _is_meant(match: str, pattern: str) -> bool:
    """Whether every hidden name on the way to a match was spelled out, at least its first character."""
    spelled = [part for part in pattern.split(os.sep) if _hidden(part)]
    hidden = filter(_hidden, match.split(os.sep))
    return all(any(fnmatch.fnmatchcase(name, part) for part in spelled) for name in hidden)


def _parquet_files(folder: str) -> list[str]:
    return [path for path in _walk(folder) if path.endswith(PARQUET_SUFFIXES)]


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:  # a link back to a folder that leads here
        return
    for entry in sorted(os.scandir(folder), key=lambda e: natural(e.name)):
        if not _hidden(entry.name):
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            else:
                yield entry.path


def natural(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Sort key under which part-2 comes before part-10; the name itself decides between part-1 and part-01."""
    pieces = filter(None, re.split(r"([0-9]+)", name))
    return [(0, int(piece)) if re.fullmatch(r"[0-9]+", piece) else (1, piece) for piece in pieces], name


def read_footer(path: str) -> InputFile:
    """Schema, row groups and identity of one Parquet file.

    Raises:
        InputError: it cannot be opened, or is not Parquet.
    """
    if is_uri(path):
        with storage.reaching(path, InputError):
            stamp = storage.stamp(path)
            with storage.open_input(path) as file:
                return _footer(path, file, stamp)
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would make us wait for a writer
            raise InputError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            return _footer(path, file, storage.Stamp(stat.st_size, stat.st_mtime_ns))
    except FAULTS as error:
        raise InputError(f"{path}: not readable as Parquet: {first_line(error)}") from None


def _footer(path: str, file: Any, stamp: storage.Stamp) -> InputFile:
    if stamp.size_bytes == 0:
        raise InputError(f"{path}: the file is empty (0 bytes); was it still being written?")
    parquet = open_parquet(file)  # first: the last bytes of another kind of file may mean any length
    metadata, schema = parquet.metadata, parquet.schema_arrow
    file.seek(max(0, stamp.size_bytes - 8))
    tail = file.read(8)
    footer_bytes = int.from_bytes(tail[:4], "little")
    file.seek(max(0, stamp.size_bytes - 8 - footer_bytes))
    digest = hashlib.sha256(file.read(footer_bytes + 8)).hexdigest()
    data_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    size, mtime, etag = stamp.size_bytes, stamp.mtime_ns, stamp.etag
    return InputFile(path, group_rows(metadata), schema, size, mtime, digest, data_bytes, etag)


def check_unchanged(file: InputFile) -> None:
    """That a file is still the one whose footer the run was planned with.

    Raises:
        InputError: it is not, or is gone.
    """
    planned = storage.Stamp(file.size_bytes, file.mtime_ns, file.etag)
    if is_uri(file.path):
        with storage.reaching(file.path, InputError):
            now = storage.stamp(file.path)
    else:
        try:
            stat = os.stat(file.path)
        except OSError as error:
            raise InputError(f"{file.path}: the file was there when the run began: {error.strerror}") from None
        now = storage.Stamp(stat.st_size, stat.st_mtime_ns)
    if now != planned:
        raise InputError(f"{file.path}: the file changed while the run was reading it; start the run again")


def is_matrix(path: str) -> bool:
    """Whether a file holds one matrix, by its name."""
    return (
        path.partition("?")[0].lower().endswith(MATRIX_SUFFIXES) if is_uri(path) else path.lower().endswith(MATRIX_SUFFIXES)
    )


def matrix_plan(path: str, config: RunConfig) -> InputPlan:
    """A .npy or .safetensors file of users' vectors: a column of them, and their ids (--user-ids, else row numbers).

    Raises:
        InputError: unreadable. UsageError: options that need columns which such a file has not.
    """
    for name in ("keep_columns", "exclude_column", "candidates_column"):
        if getattr(config, name):
            raise UsageError(f"{option(name)} needs Parquet input; {path} has no such column")
    if is_uri(path):
        raise UsageError(f"{path}: such a file is memory-mapped and so read from this machine; fetch it first")
    if config.id_column == config.text_column:
        raise UsageError(f"--id-column and --vector-column are both {config.id_column!r}")
    if not os.path.isfile(path):  # a pipe would make us wait for a writer
        raise InputError(f"{path}: not a regular file")
    rows, metadata = open_matrix(Path(path), TENSOR, InputError)
    if written_with := metadata.get(IDS_FILE):
        if config.user_ids is None:
            raise InputError(f"{path}: its ids are in {written_with}, which was written with it; give --user-ids")
        if metadata.get(IDS_DIGEST) != ids_digest(config.user_ids):
            raise InputError(f"{config.user_ids}: not the ids that were written with {path}, which are in {written_with}")
    ids = pa.int64() if config.user_ids is None else user_ids(config.user_ids, config.id_column, len(rows)).type
    stat = os.stat(path)
    with open(path, "rb") as file:
        head = hashlib.sha256(file.read(MATRIX_HEAD_BYTES)).hexdigest()
    schema = pa.schema([(config.id_column, ids), (config.text_column, pa.list_(pa.float32(), rows.shape[1]))], metadata)
    size = int(rows.shape[0] * rows.shape[1] * rows.dtype.itemsize)
    found = InputFile(path, (len(rows),), schema, stat.st_size, stat.st_mtime_ns, head, size)
    return InputPlan((found,), pa.schema([(config.id_column, ids), (config.text_column, schema.types[1])]), ids, ())


def user_ids(path: Path, name: str, rows: int) -> pa.Array:
    """The ids of the rows of a .npy or .safetensors file: column `name` of a Parquet file.

    Raises:
        InputError: unreadable, no such column, a type that is no id, another number of rows.
    """
    kind = _reconcile((read_footer(str(path)),), name, "an id", _is_id)
    try:
        ids = open_parquet(path).read(columns=[name])[name].combine_chunks().cast(kind)
    except FAULTS as error:
        raise InputError(f"{path}: not readable as Parquet: {first_line(error)}") from None
    if len(ids) != rows:
        raise InputError(f"{path} has {len(ids)} ids, but the input has {rows} rows")
    return ids


def hive_columns(path: str) -> dict[str, str]:
    """`.../country=BR/day=03/x.parquet` → {'country': 'BR', 'day': '03'}; values stay text."""
    pairs = (part.partition("=") for part in Path(path).parts[:-1] if "=" in part)
    return {key: unquote(value) for key, _, value in pairs if key}


def _reconcile(files: tuple[InputFile, ...], name: str, what: str, fits: Callable[[pa.DataType], bool]) -> pa.DataType:
    """The one type that column `name` has in all files, dictionaries decoded and null columns ignored.

    Text kinds and integer widths may differ between files; the wider one is taken.
    """
    merged, source = pa.null(), ""
    for file in files:
        columns = file.schema.names
        if columns.count(name) > 1:
            raise InputError(f"{file.path}: column {name!r} stands in the schema more than once")
        if name in columns:
            kind = plain_type(file.schema.field(name).type)
        elif what == "a kept column" and name in hive_columns(file.path):
            kind = pa.string()
        else:
            raise InputError(f"{file.path}: no column {name!r}{nearest(name, columns)}")
        if not pa.types.is_null(kind) and not fits(kind):
            raise InputError(f"{file.path}: column {name!r} is {kind}, which is not {what}")
        wider = _wider(merged, kind)
        if wider is None:
            raise InputError(f"column {name!r} is {merged} in {source} but {kind} in {file.path}")
        if wider != merged:
            merged, source = wider, file.path
    return merged


def _wider(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if is_text(a) and is_text(b):
        return pa.large_string()
    if is_list(a) and is_list(b):
        inner = _wider(plain_type(a.value_type), plain_type(b.value_type))
        return None if inner is None else pa.large_list(inner)
    if pa.types.is_integer(a) and pa.types.is_integer(b):
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
            if all(_holds(kind, other) for other in (a, b)):
                return kind
    return None


def _holds(kind: pa.DataType, other: pa.DataType) -> bool:
    signed, other_signed = pa.types.is_signed_integer(kind), pa.types.is_signed_integer(other)
    if signed == other_signed:
        return bool(kind.bit_width >= other.bit_width)
    return bool(signed and kind.bit_width > other.bit_width)


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or is_binary(kind) or bool(pa.types.is_integer(kind) or pa.types.is_date(kind))


def _is_token_ids(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))


def _is_tokens_of_an_item(kind: pa.DataType) -> bool:
    return _is_token_ids(kind) or bool(pa.types.is_integer(kind))


def is_vectors(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_floating(kind.value_type) or pa.types.is_null(kind.value_type))


def _is_messages(kind: pa.DataType) -> bool:
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = [field for field in kind.value_type.fields if field.name in ("role", "content")]
    return len(fields) == 2 and all(is_text(plain_type(f.type)) or pa.types.is_null(f.type) for f in fields)
