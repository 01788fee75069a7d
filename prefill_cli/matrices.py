"""Matrices in files: .npy and .safetensors, memory-mapped, or read piece by piece where the address space has no room."""

import hashlib
import json
import mmap
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.errors import PrefillScoreError, first_line, nearest
from prefill_cli.machine import MAPPED

TENSOR = "embeddings"
IDS_FILE, IDS_DIGEST = "ids_file", "ids_sha256"  # of a .safetensors file's metadata: whose rows these are
MATRIX_SUFFIXES = (".npy", ".safetensors")
WIDEST = 1 << 24
SAFETENSORS_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # NumPy has no bfloat16


class FileRows:
    """[N, d] numbers of a file from `offset` on, read when they are asked for."""

    def __init__(self, path: Path, offset: int, dtype: Any, shape: tuple[int, int], error: type[PrefillScoreError]) -> None:
        self.path, self.dtype, self.shape, self._error = path, np.dtype(dtype), shape, error
        self._offset = offset
        self._row_bytes = shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        return self._read(start, max(0, stop - start))

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """[m, d] rows in any order: neighbours are read together."""
        order = np.argsort(rows, kind="stable")
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        apart = np.flatnonzero(np.diff(rows[order]) > 1) + 1
        for run in np.split(order, apart):
            if len(run):
                first = int(rows[run[0]])
                out[run] = self._read(first, int(rows[run[-1]]) - first + 1)[rows[run] - first]
        return out

    def _read(self, start: int, rows: int) -> npt.NDArray[Any]:
        try:
            found = np.fromfile(self.path, self.dtype, rows * self.shape[1], offset=self._offset + start * self._row_bytes)
        except OSError as fault:
            raise self._error(f"{self.path}: the file was there when the run began: {fault.strerror or fault}") from None
        if found.size != rows * self.shape[1]:
            raise self._error(f"{self.path}: the file became shorter while the run was using it; start the run again")
        return found.reshape(rows, self.shape[1])


Rows = npt.NDArray[Any] | FileRows


def open_matrix(path: Path, tensor: str, error: type[PrefillScoreError]) -> tuple[Rows, dict[str, str]]:
    """The numbers [N, d] of a .npy or of a tensor of a .safetensors file, and the metadata of the latter.

    Raises:
        FileNotFoundError: there is no such file. `error`: it cannot be read, or is no matrix of floats.
    """
    try:
        return (_npy(path, error), {}) if path.suffix.lower() == ".npy" else _safetensors(path, tensor, error)
    except (FileNotFoundError, PrefillScoreError):
        raise
    except Exception as fault:  # safetensors and NumPy have their own kinds for a damaged file
        raise error(f"{path}: not readable as {path.suffix[1:].lower()}: {first_line(fault)}") from None


def safetensors_header(rows: int, width: int, metadata: dict[str, str]) -> bytes:
    """What stands before the rows of a .safetensors file with one float32 matrix, which may be larger than the memory."""
    tensor = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}
    header = json.dumps({"__metadata__": metadata, TENSOR: tensor}, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def ids_digest(path: Path) -> str:
    """Of a file of ids, for the metadata of the matrix that goes with it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a .safetensors file; none where it cannot be read, which whoever reads it will tell."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _npy(path: Path, error: type[PrefillScoreError]) -> Rows:
    with path.open("rb") as file:
        if file.read(4) == b"PK\3\4":
            raise error(f"{path}: a zip of arrays (.npz), not one .npy array")
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read_header(file)
        offset = file.tell()
    _check(path, shape, dtype, dtype.kind == "f", error)
    size, wanted = path.stat().st_size, offset + shape[0] * shape[1] * dtype.itemsize
    if size != wanted:  # a longer one too: the shape may be what is damaged
        raise error(f"{path}: the file has {size:,} bytes, but its header says {wanted:,}")
    if by_columns:  # rows are not together in the file
        return np.ascontiguousarray(np.load(path, allow_pickle=False))
    return _rows_of_file(path, offset, dtype, (shape[0], shape[1]), error)


def _safetensors(path: Path, tensor: str, error: type[PrefillScoreError]) -> tuple[Rows, dict[str, str]]:
    """The library checks the header; where a tensor begins is in the format: 8 bytes of its size, the header, data."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        names = list(opened.keys())
        if tensor not in names:
            raise error(f"{path}: no tensor {tensor!r}{nearest(tensor, names)}")
        metadata: dict[str, str] = opened.metadata() or {}
        kind, shape = opened.get_slice(tensor).get_dtype(), opened.get_slice(tensor).get_shape()
    _check(path, shape, kind, kind in SAFETENSORS_FLOATS, error)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin = json.loads(file.read(header_bytes))[tensor]["data_offsets"][0]
    return _rows_of_file(path, 8 + header_bytes + begin, SAFETENSORS_FLOATS[kind], (shape[0], shape[1]), error), metadata


def _check(path: Path, shape: Sequence[int], dtype: Any, is_float: bool, error: type[PrefillScoreError]) -> None:
    if len(shape) != 2 or not is_float:
        raise error(f"{path}: expected a matrix of floats [rows, width], found {dtype} {list(shape)}")
    if not 0 < shape[1] <= WIDEST:
        raise error(f"{path}: its vectors are {shape[1]} wide, of {list(shape)}; a width is from 1 to {WIDEST:,}")


def _rows_of_file(path: Path, offset: int, dtype: Any, shape: tuple[int, int], error: type[PrefillScoreError]) -> Rows:
    """The numbers memory-mapped where the address space has room, else read piece by piece."""
    rows = FileRows(path, offset, dtype, shape, error)
    size = offset + shape[0] * shape[1] * rows.dtype.itemsize
    if path.stat().st_size < size:
        raise error(f"{path}: the file is shorter than its header says")
    MAPPED[path] = size, error
    try:
        return np.memmap(path, dtype, "r", offset, shape) if shape[0] and shape[1] else rows[:]
    except (OSError, MemoryError):
        return rows


def mapped_from(rows: Rows) -> tuple[Any, ...] | None:
    """The arguments with which another process gets the same rows by `map_again`; None where they are in memory."""
    if not isinstance(rows, np.memmap) or not isinstance(rows.base, mmap.mmap) or rows.filename is None:
        return None
    path = Path(rows.filename)
    return path, int(rows.offset), rows.dtype, rows.shape, MAPPED[path][1]


def map_again(path: Path, offset: int, dtype: Any, shape: tuple[int, int], error: type[PrefillScoreError]) -> Rows:
    """See mapped_from.

    Raises:
        `error`: there is no such file here, or it is shorter.
    """
    if not path.exists():
        raise error(f"{path}: no such file on {socket.gethostname()}; every worker must see it under this path")
    return _rows_of_file(path, offset, dtype, shape, error)


def to_float32(raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Any float type as float32; uint16 is bfloat16, the upper half of one."""
    if raw.dtype == np.uint16:
        widened: npt.NDArray[np.float32] = (raw.astype(np.uint32) << 16).view(np.float32)
        return widened
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, which is looked for and refused
        return raw.astype(np.float32, copy=False)
