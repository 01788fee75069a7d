"""Exact top-k over the whole catalogue, by blocks, with a proof that nothing was missed.

The score of a (user, item) pair is the float64 dot product of the two float32 vectors, plus the item's bias, rounded to
float32. It depends on the pair alone: not on the block, the batch or k. Order: score descending, then item row ascending.

Computing all scores that way would cost too much, so blocks of items are scanned by a float32 matrix product, whose
rounding depends on shapes, and only what could be in the answer is rescored. With u = 2^-24 and width d, a float32
product (not TF32) in any order of summation, with fused multiply-add or without, is off by at most g |q||x|, g = d u
/ (1 - d u) (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1, and Cauchy-Schwarz). Adding
the bias and rounding the exact score add at most u (|q||x| + |b|) each, and a third such term pays for rounding the
comparison itself. Let E be that sum for the longest item and the largest bias, and t the k-th largest scanned score.
The k items at t or above have exact scores of at least t - E; an item scanned below t - 2 E has an exact score below
t - E, so it is below k others. What is scanned at t - 2 E or above is rescored, ties and all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.scoring.filters import Filters, Pairs
from prefill_cli.scoring.items import Items

BLOCK_ITEMS = 16_384
QUERY_ROWS = 1_024
SCAN_CELLS = 1 << 24  # of a block of scanned scores: 64 MB
SURVIVOR_LIMIT = 4_000_000  # pairs held for rescoring; above it the queries are taken in halves
RESCORE_CELLS = 1 << 22
UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class TopK:
    """Lists of n users: list i is [offsets[i] : offsets[i + 1]] of `rows` (item rows) and `scores`, best first."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


def overflowing(queries: npt.NDArray[np.float32], items: Items) -> npt.NDArray[np.bool_]:
    """[n] users whose scores might leave the range of float32, where no order could be told any more."""
    longest, bias = _extremes(items)
    with np.errstate(over="ignore"):
        reach = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)) * longest + bias
    too_far: npt.NDArray[np.bool_] = ~(reach < np.finfo(np.float32).max / 4)
    return too_far


@dataclass(frozen=True)
class Catalogue:
    """What is searched: N items, a mask [N] of those that anybody may get (None: all), the device that scans them."""

    items: Items
    allowed: npt.NDArray[np.bool_] | None = None
    device: str = "cpu"


def search(queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters) -> TopK:
    """The k best items of each user after the filters; fewer where fewer are left.

    queries: [n, d] finite, d = catalogue.items.width. filters: of the same n users.
    """
    torch.set_float32_matmul_precision("highest")  # TF32 or bfloat16 products would break the bound
    rows = max(1, min(QUERY_ROWS, SURVIVOR_LIMIT // (2 * k)))
    parts = [
        part
        for start in range(0, len(queries), rows)
        for part in _search_rows(queries[start : start + rows], catalogue, k, filters.of_users(start, start + rows))
    ]
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(p.offsets) for p in parts)])
    return TopK(
        np.cumsum(lengths),
        np.concatenate([np.empty(0, np.int64), *(p.rows for p in parts)]),
        np.concatenate([np.empty(0, np.float32), *(p.scores for p in parts)]),
    )


def _search_rows(queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters) -> Iterator[TopK]:
    """Users together, or in halves where too many pairs survive the scan (a catalogue of equal items, say)."""
    scan, mask, n = _Scan(queries, catalogue, k), _Mask(filters, catalogue), len(queries)
    block = max(1, min(BLOCK_ITEMS, SCAN_CELLS // n))
    for first in range(0, len(catalogue.items), block):
        scan.add(first, min(first + block, len(catalogue.items)), mask)
        if scan.survivors > SURVIVOR_LIMIT and n > 1:
            for a, b in ((0, n // 2), (n // 2, n)):
                yield from _search_rows(queries[a:b], catalogue, k, filters.of_users(a, b))
            return
    yield scan.finish()


class _Scan:
    """The pass over all items for n users: the k best scanned scores so far, and the pairs that may be in the answer."""

    def __init__(self, queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int) -> None:
        items, device = catalogue.items, catalogue.device
        self._queries, self._items, self._k, self._device = queries, items, k, device
        self._on_device = _tensor(queries).to(device)
        self._best = torch.full((len(queries), 1), -torch.inf, device=device)
        self._margin = torch.from_numpy(2 * _error_bound(queries, items)).float().to(device)
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # user, item row, scanned score
        self.survivors = 0

    def add(self, first: int, stop: int, mask: "_Mask") -> None:
        """Scan items first … stop - 1."""
        block = _tensor(self._items.vectors[first:stop]).to(self._device)
        scanned = self._on_device @ block.T  # [n, C]
        if self._items.bias is not None:
            scanned += _tensor(self._items.bias[first:stop]).to(self._device)
        mask.apply(scanned, first, stop)
        block_best = scanned.topk(min(self._k, stop - first), sorted=False).values
        both = torch.cat([self._best, block_best], 1)
        self._best = both.topk(min(self._k, both.shape[1])).values
        floor = self._floor()
        users, columns = ((scanned >= floor[:, None]) & (scanned > -torch.inf)).nonzero(as_tuple=True)
        self._pairs.append((users, columns + first, scanned[users, columns]))
        self.survivors += len(users)
        if self.survivors > SURVIVOR_LIMIT:
            self._prune()

    def _floor(self) -> Tensor:
        """[n] scanned score below which an item cannot be in the answer; -inf (of the start) until k have been seen."""
        return self._best[:, -1] - self._margin

    def _prune(self) -> tuple[Tensor, Tensor]:
        """Drop the pairs that the floor has overtaken since; returns users and item rows of the others."""
        users, rows, scanned = (torch.cat(column) for column in zip(*self._pairs, strict=True))
        keep = scanned >= self._floor()[users]
        self._pairs = [(users[keep], rows[keep], scanned[keep])]
        self.survivors = int(keep.sum())
        return users[keep], rows[keep]

    def finish(self) -> TopK:
        """Rescore the survivors, order them, keep k a user."""
        found_users, found_rows = self._prune()
        users, rows = found_users.cpu().numpy(), found_rows.cpu().numpy()
        scores = _pair_scores(self._queries, self._items, users, rows)
        order = np.lexsort((rows, -scores, users))
        users, rows, scores = users[order], rows[order], scores[order]
        counts = np.bincount(users, minlength=len(self._queries))
        starts = np.cumsum(counts) - counts
        kept = np.arange(len(users)) - starts[users] < self._k
        offsets = np.concatenate([[0], np.cumsum(np.minimum(counts, self._k))])
        return TopK(offsets, rows[kept], scores[kept])


class _Mask:
    """Sets scanned scores of pairs that are not allowed to -inf."""

    def __init__(self, filters: Filters, catalogue: Catalogue) -> None:
        allowed, device = catalogue.allowed, catalogue.device
        self._device = device
        self._denied = None if allowed is None else torch.from_numpy(~allowed).to(device)
        self._exclude = _by_item(filters.exclude)
        self._candidates = _by_item(filters.candidates)
        limited = None if filters.limited is None else np.flatnonzero(filters.limited)
        self._limited = None if limited is None or not len(limited) else torch.from_numpy(limited).to(device)

    def apply(self, scanned: Tensor, first: int, stop: int) -> None:
        """scanned: [n, C] scores of items first … stop - 1, changed in place."""
        if self._denied is not None:
            scanned[:, self._denied[first:stop]] = -torch.inf
        users, columns = self._within(self._exclude, first, stop)
        scanned[users, columns] = -torch.inf
        if self._limited is not None:
            out = torch.zeros(scanned.shape, dtype=torch.bool, device=self._device)
            out[self._limited] = True
            users, columns = self._within(self._candidates, first, stop)
            out[users, columns] = False
            scanned.masked_fill_(out, -torch.inf)

    def _within(self, pairs: Pairs, first: int, stop: int) -> tuple[Tensor, Tensor]:
        a, b = np.searchsorted(pairs.items, (first, stop))
        users, columns = pairs.users[a:b], pairs.items[a:b] - first
        return torch.from_numpy(users).to(self._device), torch.from_numpy(columns).to(self._device)


def _tensor(array: npt.NDArray[np.float32]) -> Tensor:
    """The same memory, or a copy where it is read-only, as a memory-mapped file is: torch does not take that."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _by_item(pairs: Pairs) -> Pairs:
    order = np.argsort(pairs.items, kind="stable")
    return Pairs(pairs.users[order], pairs.items[order])


def _extremes(items: Items) -> tuple[float, float]:
    """Length of the longest item vector and magnitude of the largest bias."""
    return float(items.norms.max()), 0.0 if items.bias is None else float(np.abs(items.bias).max())


def _error_bound(queries: npt.NDArray[np.float32], items: Items) -> npt.NDArray[np.float64]:
    """[n] the E of the proof, raised a little for its own rounding and for products that underflow."""
    d, (longest, bias) = items.width, _extremes(items)
    lengths = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1))
    relative = d * UNIT_ROUNDOFF / (1 - d * UNIT_ROUNDOFF) + 3 * UNIT_ROUNDOFF
    bound: npt.NDArray[np.float64] = 1.01 * relative * (lengths * longest + bias) + 2 * d * float(np.finfo(np.float32).tiny)
    return bound


def _pair_scores(
    queries: npt.NDArray[np.float32], items: Items, users: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """[m] exact scores of m pairs."""
    scores = np.empty(len(users), np.float32)
    step = max(1, RESCORE_CELLS // items.width)
    for a in range(0, len(users), step):
        # The product of two float32 numbers is exact in float64.
        products = queries[users[a : a + step]].astype(np.float64) * items.vectors[rows[a : a + step]]
        totals = products.sum(axis=1)
        if items.bias is not None:
            totals += items.bias[rows[a : a + step]]
        scores[a : a + step] = totals
    return scores
