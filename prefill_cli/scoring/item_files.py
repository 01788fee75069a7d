"""The file formats of item embeddings, read into one shape. What is in them is judged in items.py."""

import glob
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli.arrow import is_binary, is_list, is_text, working_type
from prefill_cli.config import RunConfig
from prefill_cli.errors import ItemsError, UsageError, first_line, nearest
from prefill_cli.matrices import IDS_DIGEST, IDS_FILE, MATRIX_SUFFIXES, TENSOR, Rows, ids_digest, open_matrix
from prefill_cli.parquet import FAULTS, open_parquet
from prefill_cli.places import local

PROVENANCE_KEY = "prefill-score"  # of the file's metadata; the value is a JSON object
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npz")


@dataclass(frozen=True)
class RawItems:
    """N rows as the file has them.

    `vectors` [N, d] of the file's float type, bfloat16 as uint16; rows in `null_rows` are zeros here. `numbered`: ids are
    row numbers.
    """

    ids: pa.Array
    vectors: Rows
    sha256: str
    null_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    bias: npt.NDArray[np.float32] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    mapped: tuple[Path, int, int] | None = None  # the stamp of the file where `vectors` are read from it as they are needed
    numbered: bool = False


def stamp(path: Path) -> tuple[Path, int, int]:
    """Path, size and mtime: what changes when a file is written over."""
    found = path.stat()
    return path, found.st_size, found.st_mtime_ns


def read(config: RunConfig) -> RawItems:
    """Read the item file of a run.

    Raises:
        ItemsError: missing, unreadable, a format or type that is not supported.
    """
    assert config.items is not None
    path = str(config.items)
    suffix = Path(path).suffix.lower()
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):  # a pipe would make us wait for a writer
        raise ItemsError(f"{path}: not a regular file")
    if suffix in PICKLES:
        raise ItemsError(
            f"{path}: pickled files can run code when they are read and are refused; save the matrix as .safetensors "
            f"(tensor {TENSOR!r}), .npy, or Parquet"
        )
    if suffix in MATRIX_SUFFIXES:
        return _read_matrix(config, path)
    if config.item_ids:
        raise UsageError(
            f"--item-ids goes with .safetensors or .npy; {path} has its ids in column {config.item_id_column!r}"
        )
    return _read_parquet(config, _parts(path))


def _parts(path: str) -> list[str]:
    if Path(path).is_dir():
        visible = (p for p in Path(path).rglob("*.parquet") if not _is_hidden(p.relative_to(path)))
        found = sorted(map(str, visible))
    elif Path(path).exists():
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise ItemsError(f"--items {path}: no such file" + (", and no file matches" if glob.has_magic(path) else ""))
    return found


def _is_hidden(inside: Path) -> bool:
    """Of a path inside the folder that was named: `_rejects/part-00000.parquet` is no part of the catalogue."""
    return any(name.startswith((".", "_")) for name in inside.parts)


def _read_parquet(config: RunConfig, parts: list[str]) -> RawItems:
    names = [config.item_id_column, config.embedding_column, *([config.item_bias_column] if config.item_bias_column else [])]
    tables = []
    made_with: dict[str, list[Any]] = {}
    for part in parts:
        try:
            file = open_parquet(part)
            for name in names:
                _check_once(name, file.schema_arrow.names, part)
            tables.append(file.read(columns=names))
        except FAULTS as error:
            raise ItemsError(f"{part}: not readable as Parquet: {first_line(error)}") from None
        for name, value in provenance(part, (file.schema_arrow.metadata or {}).get(PROVENANCE_KEY.encode())).items():
            if value not in made_with.setdefault(name, []):
                made_with[name].append(value)
    ids = _joined([(p, c) for p, t in zip(parts, tables, strict=True) for c in _ids(t[config.item_id_column], p)])
    vectors, null_rows = _matrix([(p, t[config.embedding_column]) for p, t in zip(parts, tables, strict=True)])
    bias = None
    if config.item_bias_column:
        bias = np.concatenate(
            [_bias(t[config.item_bias_column], config.item_bias_column, p) for p, t in zip(parts, tables, strict=True)]
        )
    # Where parts disagree the value is none of theirs, so that it differs from whatever the run uses.
    stored = {name: v[0] if len(v) == 1 else " and ".join(map(str, v)) for name, v in made_with.items()}
    return RawItems(ids, vectors, _digest(parts), null_rows, bias, stored)


def _check_once(name: str, columns: list[str], part: str) -> None:
    if columns.count(name) > 1:
        raise ItemsError(f"{part}: column {name!r} stands in the schema more than once")
    if name not in columns:
        raise ItemsError(f"{part}: no column {name!r}{nearest(name, columns)}")


def _ids(column: pa.ChunkedArray, part: str) -> list[pa.Array]:
    chunks = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in column.chunks]
    kind = working_type(column.type)
    if not (pa.types.is_integer(kind) or is_text(kind) or is_binary(kind)):
        raise ItemsError(f"{part}: item ids are {kind}; they must be integers, text or binary")
    return [c.cast(kind) for c in chunks] or [pa.array([], kind)]


def _joined(chunks: list[tuple[str, pa.Array]]) -> pa.Array:
    """The ids of all parts as one array, in a type that holds each part's."""
    kinds = {chunk.type for _, chunk in chunks}
    if len(kinds) == 1:
        return pa.concat_arrays([chunk for _, chunk in chunks])
    wide = ((is_text, pa.large_string()), (is_binary, pa.large_binary()), (pa.types.is_signed_integer, pa.int64()))
    for fits, kind in wide:
        if all(map(fits, kinds)):
            return pa.concat_arrays([chunk.cast(kind) for _, chunk in chunks])
    (first, chunk), (other, odd) = chunks[0], next(c for c in chunks if c[1].type != chunks[0][1].type)
    raise ItemsError(f"item ids are {chunk.type} in {first}, but {odd.type} in {other}; all parts need one type")


def _matrix(columns: list[tuple[str, pa.ChunkedArray]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Embedding columns → [N, d] and the rows that are null, ragged or hold nulls. d is the commonest width."""
    chunks: list[pa.Array] = []
    for part, column in columns:
        kind = column.type
        if not is_list(kind) or not pa.types.is_floating(kind.value_type):
            raise ItemsError(f"{part}: the embedding column is {kind}; it must be a list of float16, float32 or float64")
        chunks += [chunk for chunk in column.cast(pa.large_list(kind.value_type)).chunks if len(chunk)]
    if not chunks:
        return np.empty((0, 0), np.float32), np.empty(0, np.int64)
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    lengths[np.concatenate([chunk.is_null().to_numpy(zero_copy_only=False) for chunk in chunks])] = 0
    widths, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if not len(widths):
        raise ItemsError(f"{columns[0][0]}: every embedding is null or empty")
    width = int(widths[counts.argmax()])
    # The widest float type of all parts: rounding a part to another's float16 would change scores.
    vectors = np.zeros((len(lengths), width), np.result_type(*(c.type.value_type.to_pandas_dtype() for c in chunks)))
    good, row = lengths == width, 0
    for chunk in chunks:
        _copy_rows(chunk, vectors[row : row + len(chunk)], good[row : row + len(chunk)])
        row += len(chunk)
    return vectors, np.flatnonzero(~good)


def _copy_rows(chunk: pa.Array, vectors: npt.NDArray[Any], good: npt.NDArray[np.bool_]) -> None:
    """Fill [n, d] `vectors` from a chunk of n lists where `good`, which loses the rows that hold nulls."""
    offsets, width = chunk.offsets.to_numpy(), vectors.shape[1]
    values = chunk.values.to_numpy(zero_copy_only=False)  # nulls become NaN
    if good.all():
        vectors[:] = values[offsets[0] : offsets[-1]].reshape(-1, width)
    else:
        vectors[good] = values[offsets[:-1][good][:, None] + np.arange(width)]
    if chunk.values.null_count:
        nulls = np.concatenate([[0], np.cumsum(chunk.values.is_null().to_numpy(zero_copy_only=False))])
        good &= nulls[offsets[1:]] == nulls[offsets[:-1]]
        vectors[~good] = 0


def _bias(column: pa.ChunkedArray, name: str, part: str) -> npt.NDArray[np.float32]:
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise ItemsError(f"{part}: bias column {name!r} is {column.type}; it must be a number")
    wide = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # null becomes NaN
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinity, which is refused like NaN
        bias: npt.NDArray[np.float32] = wide.astype(np.float32)
    return bias


def _read_matrix(config: RunConfig, path: str) -> RawItems:
    """[N, d] from safetensors or npy, ids from --item-ids or row numbers."""
    if config.item_bias_column:
        raise UsageError(f"--item-bias-column needs a Parquet item file; {path} has no columns")
    try:
        mapped = stamp(Path(path))
        vectors, metadata = open_matrix(Path(path), TENSOR, ItemsError)
    except FileNotFoundError:
        raise ItemsError(f"--items {path}: no such file") from None
    stored = provenance(path, metadata.get(PROVENANCE_KEY))
    written_with = metadata.get(IDS_FILE)
    if not config.item_ids:
        if written_with:
            raise ItemsError(f"{path}: its ids are in {written_with}, which was written with it; give --item-ids")
        numbers = pa.array(np.arange(len(vectors), dtype=np.int64))
        return RawItems(numbers, vectors, _digest([path]), provenance=stored, mapped=mapped, numbered=True)
    if written_with and metadata.get(IDS_DIGEST) != ids_digest(local(config.item_ids)):
        raise ItemsError(f"{config.item_ids}: not the ids that were written with {path}, which are in {written_with}")
    ids = id_column(local(config.item_ids), config.item_id_column)
    if len(ids) != len(vectors):
        raise ItemsError(f"{config.item_ids} has {len(ids)} ids, but {path} has {len(vectors)} rows")
    return RawItems(ids, vectors, _digest([path, str(config.item_ids)]), provenance=stored, mapped=mapped)


def id_column(path: Path, name: str) -> pa.Array:
    """The ids in a Parquet file: column `name`, or the only column there is.

    Raises:
        ItemsError: missing, unreadable, no such column, a type that is no id.
    """
    try:
        file = open_parquet(path)
        columns = file.schema_arrow.names
        if name not in columns and len(columns) == 1:
            name = columns[0]
        _check_once(name, columns, str(path))
        column = file.read(columns=[name])[name]
    except FileNotFoundError:
        raise ItemsError(f"{path}: no such file") from None
    except FAULTS as error:
        raise ItemsError(f"{path}: not readable as Parquet: {first_line(error)}") from None
    return _joined([(str(path), chunk) for chunk in _ids(column, str(path))])


def provenance(path: str, stored: bytes | str | None) -> dict[str, Any]:
    """What a file's metadata says of what made its vectors.

    Raises:
        ItemsError: it is not JSON.
    """
    try:
        value = json.loads(stored) if stored else {}
    except (ValueError, RecursionError):
        raise ItemsError(f"{path}: the metadata {PROVENANCE_KEY!r} is not JSON") from None
    return value if isinstance(value, dict) else {}


def _digest(paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
