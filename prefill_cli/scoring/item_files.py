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
import pyarrow.parquet as pq

from prefill_cli.arrow import is_binary, is_list, is_text
from prefill_cli.config import RunConfig
from prefill_cli.errors import ItemsError, UsageError, nearest

PROVENANCE_KEY = "prefill-score"  # of the file's metadata; the value is a JSON object
TENSOR = "embeddings"
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npz")


@dataclass(frozen=True)
class RawItems:
    """N rows as the file has them. `vectors` [N, d] of the file's float type; rows in `null_rows` are zeros here."""

    ids: pa.Array
    vectors: npt.NDArray[Any]
    sha256: str
    null_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    bias: npt.NDArray[np.float32] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


def read(config: RunConfig) -> RawItems:
    """Read the item file of a run.

    Raises:
        ItemsError: missing, unreadable, a format or type that is not supported.
    """
    assert config.items is not None
    path = str(config.items)
    suffix = Path(path).suffix.lower()
    if suffix in PICKLES:
        raise ItemsError(
            f"{path}: pickled files can run code when they are read and are refused; save the matrix as .safetensors "
            f"(tensor {TENSOR!r}), .npy, or Parquet"
        )
    if suffix in (".safetensors", ".npy"):
        return _read_matrix(config, path, suffix)
    if config.item_ids:
        raise UsageError(
            f"--item-ids goes with .safetensors or .npy; {path} has its ids in column {config.item_id_column!r}"
        )
    return _read_parquet(config, _parts(path))


def _parts(path: str) -> list[str]:
    if Path(path).is_dir():
        found = sorted(str(p) for p in Path(path).rglob("*.parquet") if not p.name.startswith((".", "_")))
    elif Path(path).exists():
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise ItemsError(f"--items {path}: no such file" + (", and no file matches" if glob.has_magic(path) else ""))
    return found


def _read_parquet(config: RunConfig, parts: list[str]) -> RawItems:
    names = [config.item_id_column, config.embedding_column, *([config.item_bias_column] if config.item_bias_column else [])]
    tables, provenance = [], {}
    for part in parts:
        try:
            file = pq.ParquetFile(part)
            for name in names:
                if name not in file.schema_arrow.names:
                    raise ItemsError(f"{part}: no column {name!r}{nearest(name, file.schema_arrow.names)}")
            tables.append(file.read(columns=names))
        except (OSError, pa.ArrowException) as error:
            raise ItemsError(f"{part}: not readable as Parquet: {str(error).splitlines()[0]}") from None
        provenance = _provenance(part, (file.schema_arrow.metadata or {}).get(PROVENANCE_KEY.encode()))
    ids = pa.concat_arrays([c for part, t in zip(parts, tables, strict=True) for c in _ids(t[config.item_id_column], part)])
    vectors, null_rows = _matrix([(p, t[config.embedding_column]) for p, t in zip(parts, tables, strict=True)])
    bias = None
    if config.item_bias_column:
        bias = np.concatenate(
            [_bias(t[config.item_bias_column], config.item_bias_column, p) for p, t in zip(parts, tables, strict=True)]
        )
    return RawItems(ids, vectors, _digest(parts), null_rows, bias, provenance)


def _ids(column: pa.ChunkedArray, part: str) -> list[pa.Array]:
    chunks = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in column.chunks]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string_view(kind):
        kind = pa.large_string()
    if not (pa.types.is_integer(kind) or is_text(kind) or is_binary(kind)):
        raise ItemsError(f"{part}: item ids are {kind}; they must be integers, text or binary")
    return [c.cast(kind) for c in chunks] or [pa.array([], kind)]


def _matrix(columns: list[tuple[str, pa.ChunkedArray]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Embedding columns → [N, d] and the rows that are null, ragged or hold nulls. d is the first good row's."""
    width, total, null_rows, row = 0, sum(len(c) for _, c in columns), [], 0
    vectors: npt.NDArray[Any] = np.empty((0, 0), np.float32)
    for part, column in columns:
        kind = column.type
        if not is_list(kind) or not pa.types.is_floating(kind.value_type):
            raise ItemsError(f"{part}: the embedding column is {kind}; it must be a list of float16, float32 or float64")
        for chunk in column.cast(pa.large_list(kind.value_type)).chunks:
            lengths = np.diff(chunk.offsets.to_numpy())
            lengths[chunk.is_null().to_numpy(zero_copy_only=False)] = -1
            if not width and (lengths > 0).any():
                width = int(lengths[lengths > 0][0])
                vectors = np.zeros((total, width), kind.value_type.to_pandas_dtype())
            good = lengths == width
            flat, starts = chunk.values, chunk.offsets.to_numpy()[:-1]
            values = flat.to_numpy(zero_copy_only=False)  # nulls become NaN
            if good.all() and width:
                block = values[starts[0] : starts[0] + width * len(chunk)].reshape(-1, width) if len(chunk) else None
            else:
                block = values[starts[good][:, None] + np.arange(width)]
            if block is not None and width:
                vectors[row : row + len(chunk)][good] = block
            holds_null = np.zeros(len(chunk), bool)
            if flat.null_count:
                nulls = np.concatenate([[0], np.cumsum(flat.is_null().to_numpy(zero_copy_only=False))])
                holds_null = nulls[chunk.offsets.to_numpy()[1:]] > nulls[starts]
            bad = np.flatnonzero(~good | holds_null)
            vectors[row + bad] = 0
            null_rows.append(row + bad)
            row += len(chunk)
    if total and not width:
        raise ItemsError(f"{columns[0][0]}: every embedding is null or empty")
    return vectors, np.concatenate([np.empty(0, np.int64), *null_rows])


def _bias(column: pa.ChunkedArray, name: str, part: str) -> npt.NDArray[np.float32]:
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise ItemsError(f"{part}: bias column {name!r} is {column.type}; it must be a number")
    bias: npt.NDArray[np.float32] = column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float32)
    return bias  # where it was null it is NaN now


def _read_matrix(config: RunConfig, path: str, suffix: str) -> RawItems:
    """[N, d] from safetensors or npy, ids from --item-ids or row numbers."""
    if config.item_bias_column:
        raise UsageError(f"--item-bias-column needs a Parquet item file; {path} has no columns")
    try:
        vectors, provenance = (np.load(path, mmap_mode="r"), {}) if suffix == ".npy" else _safetensors(path)
    except FileNotFoundError:
        raise ItemsError(f"--items {path}: no such file") from None
    except ItemsError:
        raise
    except Exception as error:  # safetensors and NumPy have their own kinds for a damaged file
        raise ItemsError(f"{path}: not readable as {suffix[1:]}: {str(error).splitlines()[0]}") from None
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise ItemsError(f"{path}: expected a matrix of floats [items, width], found {vectors.dtype} {list(vectors.shape)}")
    if not config.item_ids:
        return RawItems(pa.array(np.arange(len(vectors), dtype=np.int64)), vectors, _digest([path]), provenance=provenance)
    ids = id_column(config.item_ids, config.item_id_column)
    if len(ids) != len(vectors):
        raise ItemsError(f"{config.item_ids} has {len(ids)} ids, but {path} has {len(vectors)} rows")
    return RawItems(ids, vectors, _digest([path, str(config.item_ids)]), provenance=provenance)


def _safetensors(path: str) -> tuple[npt.NDArray[Any], dict[str, Any]]:
    """The embeddings [N, d] (bfloat16 becomes float32, which NumPy has) and the provenance."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        names = list(file.keys())
        if TENSOR not in names:
            raise ItemsError(f"{path}: no tensor {TENSOR!r}{nearest(TENSOR, names)}")
        provenance = _provenance(path, (file.metadata() or {}).get(PROVENANCE_KEY))
        if file.get_slice(TENSOR).get_dtype() != "BF16":
            return file.get_tensor(TENSOR), provenance
    return _bfloat16(path), provenance


def _bfloat16(path: str) -> npt.NDArray[np.float32]:
    import torch
    from safetensors.torch import load_file

    matrix: torch.Tensor = load_file(path)[TENSOR]
    return matrix.float().numpy()


def id_column(path: Path, name: str) -> pa.Array:
    """The ids in a Parquet file: column `name`, or the only column there is.

    Raises:
        ItemsError: missing, unreadable, no such column, a type that is no id.
    """
    try:
        table = pq.ParquetFile(path).read()
    except FileNotFoundError:
        raise ItemsError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise ItemsError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None
    if name not in table.column_names:
        if table.num_columns != 1:
            raise ItemsError(f"{path}: no column {name!r}{nearest(name, table.column_names)}")
        name = table.column_names[0]
    return pa.concat_arrays(_ids(table[name], str(path)))


def _provenance(path: str, stored: bytes | str | None) -> dict[str, Any]:
    try:
        value = json.loads(stored) if stored else {}
    except ValueError:
        raise ItemsError(f"{path}: the metadata {PROVENANCE_KEY!r} is not JSON") from None
    return value if isinstance(value, dict) else {}


def _digest(paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
