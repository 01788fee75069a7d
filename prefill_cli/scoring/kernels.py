"""scan.cpp, called by ctypes: the inner loops of exact search on a CPU."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.machine import built

SOURCE = Path(__file__).with_name("scan.cpp")
TILE = 64  # items that share a bound of their lengths
MOST_QUERIES = 512  # of a scan
MARKS = 64
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
FOUND = np.dtype([("lower", np.float32), ("upper", np.float32), ("item", np.int64)])
Array = npt.NDArray[Any]


class Scan(ctypes.Structure):
    """What scan.cpp calls so. The arrays are owned by whoever makes it and have to live as long."""

    _fields_ = [
        *((name, NUMBER) for name in ("n", "k", "room")),
        *((name, POINTER) for name in ("of_norm", "of_residual", "constant", "floors", "counts", "found")),
        *((f"{name}_{part}", POINTER) for name in ("exclude", "candidate") for part in ("offsets", "items", "marks")),
        ("limited", POINTER),
    ]


class Kernels:
    """The functions of scan.cpp over C-contiguous arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        scan, number, pointer = ctypes.POINTER(Scan), NUMBER, POINTER
        for name, arguments in {
            "scan": [scan, pointer, number, number, number, *[pointer] * 4],
            "sift": [scan, pointer, number, number, *[pointer] * 3],
            "mark": [pointer, pointer, number, pointer],
            "survivors": [pointer, pointer, *[number] * 6, pointer, pointer],
            "pair_scores": [pointer, pointer, number, number, *[pointer] * 4, number, pointer],
            "best": [*[pointer] * 3, number, number, *[pointer] * 2],
            "convert": [pointer, *[number] * 3, pointer, pointer],
        }.items():
            function = getattr(library, name)
            function.restype, function.argtypes = None, arguments
        self._library = library

    def scan(
        self, state: Scan, items: Array, first: int, queries: Array, bias: Array | None, norms: Array, residuals: Array
    ) -> None:
        """Scan bfloat16 items [rows, width], which are the catalogue's from `first` on; queries [width / 2, n] of pairs."""
        self._library.scan(
            ctypes.byref(state), _at(items), *items.shape, first, *map(_at, (queries, bias, norms, residuals))
        )

    def sift(self, state: Scan, scores: Array, first: int, bias: Array | None, norms: Array, residuals: Array) -> None:
        """The same for scores [rows, n] that are there."""
        self._library.sift(ctypes.byref(state), _at(scores), len(scores), first, *map(_at, (bias, norms, residuals)))

    def marks(self, offsets: Array, items: Array) -> Array:
        """What tells most items that are in none of n users' lists apart, without a search; offsets [n + 1]."""
        marks = np.empty((len(offsets) - 1, MARKS), np.uint64)
        self._library.mark(_at(offsets), _at(items), len(marks), _at(marks))
        return marks

    def survivors(self, found: Array, counts: Array, k: int, queries: slice) -> tuple[Array, Array]:
        """Of some queries: lengths and item rows, end to end, of what may be in the answer.

        found [parts, n, room] and counts [parts, n] of all queries.
        """
        begin, end = queries.start, queries.stop
        lengths = np.empty(end - begin, np.int64)
        items = np.empty(int(np.maximum(counts[:, begin:end], 0).sum()), np.int64)
        self._library.survivors(
            _at(found), _at(counts), *counts.shape, found.shape[2], k, begin, end, _at(lengths), _at(items)
        )
        return lengths, items[: lengths.sum()]

    def pair_scores(self, queries: Array, vectors: Array, users: Array, at: Array, bias: Array | None, rows: Array) -> Array:
        """[m] float32: see rescore.pair_scores; vectors[at] are the items'."""
        scores = np.empty(len(users), np.float32)
        self._library.pair_scores(
            _at(queries),
            _at(vectors),
            queries.shape[1],
            len(vectors),
            *map(_at, (users, at, bias, rows)),
            len(users),
            _at(scores),
        )
        return scores

    def best(self, offsets: Array, rows: Array, scores: Array, k: int) -> tuple[Array, Array, Array]:
        """Lengths, rows and scores of the lists of some users, whose pairs are at offsets [n + 1] in rows and scores."""
        n = len(offsets) - 1
        lengths = np.minimum(np.diff(offsets), k)
        out = lengths, np.empty(lengths.sum(), np.int64), np.empty(lengths.sum(), np.float32)
        self._library.best(*(_at(array) for array in (offsets, rows, scores)), n, k, *(_at(array) for array in out[1:]))
        return out

    def convert(self, vectors: Array, out: Array) -> Array:
        """vectors [m, d] float32 into out [m, width] bfloat16 (uint16), then zeros; returns [m] lengths of what is lost."""
        residuals = np.empty(len(vectors))
        self._library.convert(_at(vectors), *vectors.shape, out.shape[1], _at(out), _at(residuals))
        return residuals


def _at(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def load_kernels() -> Kernels | None:
    """Those of this machine, or None where there is no compiler."""
    library = built(SOURCE)
    return Kernels(library) if library else None
