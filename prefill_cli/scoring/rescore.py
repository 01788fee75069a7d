"""Exact scores of (user, item) pairs, and the k best of them. Each way gives the same bits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from prefill_cli.scoring.kernels import Kernels
from prefill_cli.scoring.matrix import Matrix

STRANDS = 8  # of a sum, as in scan.cpp
CELLS = 1 << 20  # float64 numbers at work at once
GATHERED = 1 << 24  # numbers of item vectors that are read from a file at once
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def pair_scores(
    queries: Floats, matrix: Matrix, bias: Floats | None, users: Rows, rows: Rows, kernels: Kernels | None,
    pool: ThreadPoolExecutor | None = None, lanes: int = 1,
) -> Floats:  # fmt: skip
    """[m] scores of m pairs: the float64 dot product of the float32 vectors, plus the item's bias, rounded to float32.

    The products are exact in float64; they are summed in STRANDS sums that depend on the width alone, so that a pair has
    the same bits whatever else is scored beside it, and in scan.cpp as in NumPy.
    """
    scores = np.empty(len(users), np.float32)
    resident = matrix.resident
    step = max(1, -(-len(users) // lanes) if resident is not None else GATHERED // matrix.width)

    def some(start: int) -> None:
        part = slice(start, start + step)
        mine = users[part], rows[part]
        if resident is not None:
            vectors, at = resident, mine[1]
        else:
            distinct, at = np.unique(mine[1], return_inverse=True)
            vectors = matrix.take(distinct)
        if kernels:
            scores[part] = kernels.pair_scores(queries, vectors, mine[0], at, bias, mine[1])
        else:
            scores[part] = _pair_scores(queries, vectors, mine[0], at, bias, mine[1])

    starts = range(0, len(users), step)
    list(pool.map(some, starts) if pool and kernels else map(some, starts))
    return scores


def _pair_scores(queries: Floats, vectors: Floats, users: Rows, at: Rows, bias: Floats | None, rows: Rows) -> Floats:
    width = queries.shape[1]
    padded = -(-width // STRANDS) * STRANDS
    step = max(1, CELLS // padded)
    scores = np.empty(len(users), np.float32)
    products = np.zeros((min(step, len(users)), padded))
    for start in range(0, len(users), step):
        part = slice(start, start + step)
        here = products[: len(users[part])]
        np.multiply(queries[users[part]], vectors[at[part]], out=here[:, :width], dtype=np.float64)
        sums = np.zeros((len(here), STRANDS))
        for first in range(0, padded, STRANDS):
            sums += here[:, first : first + STRANDS]
        a, b, c, d, e, f, g, h = sums.T
        totals = ((a + e) + (c + g)) + ((b + f) + (d + h))
        scores[part] = totals if bias is None else totals + bias[rows[part]]
    return scores


def best(
    offsets: Rows, rows: Rows, scores: Floats, k: int, kernels: Kernels | None, pool: ThreadPoolExecutor | None = None,
    lanes: int = 1,
) -> tuple[Rows, Rows, Floats]:  # fmt: skip
    """The k best of each user's pairs, user i's being [offsets[i] : offsets[i + 1]]: score descending, then row ascending.

    Returns offsets, rows and scores of the lists.
    """
    if kernels:
        n = len(offsets) - 1
        step = max(1, -(-n // (4 * lanes)))
        some = [offsets[start : min(start + step, n) + 1] for start in range(0, n, step)] or [offsets]
        parts = (pool.map if pool else map)(lambda part: kernels.best(part, rows, scores, k), some)
        lengths, best_rows, best_scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        return np.concatenate([[0], np.cumsum(lengths)]), best_rows, best_scores
    counts = np.diff(offsets)
    users = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((rows, -scores, users))
    kept = order[np.arange(len(users)) - np.repeat(offsets[:-1], counts) < k]
    return np.concatenate([[0], np.cumsum(np.minimum(counts, k))]), rows[kept], scores[kept]
