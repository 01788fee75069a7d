"""Vectors at rest: an array, a memory-mapped file, or a file read piece by piece.

A Matrix gives float32 rows, cut and scaled as the run asks, the same bits wherever they lie.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.machine import free_memory
from prefill_cli.matrices import FileRows, Rows, map_again, mapped_from, to_float32

BLOCK_ROWS = 65_536
SHARE_OF_MEMORY = 0.25  # that a float32 copy may take, where the source is not float32 or is scaled


@dataclass(frozen=True)
class Matrix:
    """[N, width] float32: the first `width` columns of the `kept` rows (None: all) of `source`, over `lengths` where given.

    bfloat16 files come as a uint16 source.
    """

    source: Rows
    width: int
    kept: npt.NDArray[np.int64] | None = None
    lengths: npt.NDArray[np.float64] | None = None  # [N]

    def __reduce__(self) -> Any:
        """A mapped file goes to another process by its name."""
        again = mapped_from(self.source)
        if again is None:
            return Matrix, (self.source, self.width, self.kept, self.lengths)
        return _mapped_matrix, (again, self.width, self.kept, self.lengths)

    def __len__(self) -> int:
        return len(self.source) if self.kept is None else len(self.kept)

    @property
    def resident(self) -> npt.NDArray[np.float32] | None:
        """[N, width], where the source is just that, in memory or mapped."""
        source = self.source
        plain = isinstance(source, np.ndarray) and source.dtype == np.float32 and source.flags.c_contiguous
        whole = self.kept is None and self.lengths is None and source.shape[1] == self.width
        return source if plain and whole and isinstance(source, np.ndarray) else None

    def block(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start … stop - 1, C-contiguous."""
        rows = slice(start, min(stop, len(self)))
        if self.kept is None:
            return self._finished(self.source[rows], rows)
        return self._finished(_take(self.source, self.kept[rows]), rows)

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """[m, width] rows in any order."""
        return self._finished(_take(self.source, rows if self.kept is None else self.kept[rows]), rows)

    def blocks(self, rows: int = BLOCK_ROWS) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """All rows in order, some at a time, each block with its first row."""
        for start in range(0, len(self), rows):
            yield start, self.block(start, start + rows)

    def in_memory(self) -> "Matrix":
        """The same as an array of float32, where the memory has plenty of room for it or it is one already."""
        if self.resident is not None or 4.0 * len(self) * self.width > SHARE_OF_MEMORY * free_memory():
            return self
        whole = np.empty((len(self), self.width), np.float32)
        for start, block in self.blocks():
            whole[start : start + len(block)] = block
        return Matrix(whole, self.width)

    def _finished(self, raw: npt.NDArray[Any], rows: Any) -> npt.NDArray[np.float32]:
        vectors = to_float32(raw[:, : self.width])
        if self.lengths is not None:
            vectors = (vectors / self.lengths[rows, None]).astype(np.float32)
        return np.ascontiguousarray(vectors)


def _mapped_matrix(again: tuple[Any, ...], *rest: Any) -> Matrix:
    return Matrix(map_again(*again), *rest)


def _take(source: Rows, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    return source.take(rows) if isinstance(source, FileRows) else source[rows]
