"""Exact top-k over the whole catalogue, by a low-precision scan with a proof that nothing was missed.

The score of a (user, item) pair is the float64 dot product of the two float32 vectors, plus the item's bias, rounded to
float32 (rescore.py). It depends on the pair alone: not on the block, the batch, the scan or k. Order: score descending,
then item row ascending.

Computing all scores that way would cost too much, so all items are scanned in the fastest type that the machine
multiplies, and only what could be in the answer is rescored. Let q', x' be the vectors as they are multiplied (rounded
to bfloat16, or themselves), u = 2^-24, m the padded width. Then

    |q x - q' x'| <= |q - q'| |x| + |q'| |x - x'|                                            (Cauchy-Schwarz, twice)

with the lengths of what rounding really lost, not a worst case. Products of bfloat16 numbers are exact in float32, and
a sum of m products in float32, in any order and with or without fused multiply-add, is off by at most g |q'| |x'|, g =
2 m u / (1 - 2 m u), twice what Higham has (Accuracy and Stability of Numerical Algorithms, 2002, section 3.1), because
matrix units may round the sum of two products on its own. They may also take numbers below 2^-126 for zero, which
moves a score by at most 2^-126 (1 + |q|max + |x|max) for each of 2 m roundings. Adding the bias, rounding the exact
score to float32, and rounding the bounds themselves each move a score by at most u (|q| |x| + |b|); 16 such terms are
taken. E, the sum of all this, is linear in |x| and |x - x'|, so that a run of 64 items has one bound from its longest
item and largest loss: one huge item costs its neighbours, not the catalogue.

A scanned score s then says that the exact one lies within s - E and s + E. Let t be the k-th largest s - E of items
seen so far: k items have exact scores of at least t, so one with s + E < t is below k others and no tie with any of
them. The scan keeps a list of the others for each user and cuts it back when it is full, which raises t. What is left
at the end is rescored, ties and all. A user whose list stays full is scanned again with a wider one, and where that
is not enough either (a catalogue of equal items, say) scored exactly against every item.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from prefill_cli.scoring.filters import Filters, Pairs
from prefill_cli.scoring.heads import PairHead
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.kernels import FOUND, Kernels
from prefill_cli.scoring.rescore import best, pair_scores
from prefill_cli.scoring.scan import KernelScan, PairScan, TorchScan

PASS_BYTES = 256 << 20  # of lists that a pass over the items fills
PASS_QUERIES = 4_096
SHORT_SHARE = 20  # a candidate list of at most 1 / 20 of the catalogue is scored alone, at about what a scan costs
SHORT_LIST = 1_024
WIDER = 16  # times the room of a list, for users whose list was full
PAIRS_AT_ONCE = 8_000_000  # that are rescored


@dataclass(frozen=True)
class TopK:
    """Lists of n users: list i is [offsets[i] : offsets[i + 1]] of `rows` (item rows) and `scores`, best first."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Catalogue:
    """What is searched: N items, a mask [N] of those that anybody may get (None: all), the device that scans them.

    head: scores pairs instead of the dot product. kernels: those that scan on a CPU; None: PyTorch does. scan_dtype:
    bfloat16 or float32, None: what the device is fast in. The answer is the same.
    """

    items: Items
    allowed: npt.NDArray[np.bool_] | None = None
    device: str = "cpu"
    kernels: Kernels | None = None
    scan_dtype: str | None = None
    head: PairHead | None = None

    @cached_property
    def scan(self) -> KernelScan | TorchScan:
        """The items, ready to be scanned: made at the first search."""
        if self.head:
            return PairScan(self.items, self.allowed, self.device, self.head)
        if self.kernels and self.device == "cpu":
            return KernelScan(self.items, self.allowed, self.kernels, self.scan_dtype)
        return TorchScan(self.items, self.allowed, self.device, self.scan_dtype)

    def pair_scores(
        self, queries: npt.NDArray[np.float32], users: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """[m] exact scores of m pairs."""
        if isinstance(self.scan, PairScan):
            return self.scan.pair_scores(queries, users, rows)
        return pair_scores(queries, self.items.matrix, self.items.bias, users, rows, *self.hands)

    @property
    def hands(self) -> tuple[Kernels | None, ThreadPoolExecutor | None, int]:
        """Kernels, and threads to run them in."""
        scan = self.scan
        return (self.kernels, scan.pool, scan.lanes) if isinstance(scan, KernelScan) else (self.kernels, None, 1)

    def overflowing(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """[n] users whose scores might leave the range of float32, where no order could be told any more."""
        if self.head and isinstance(self.scan, PairScan):
            return self.scan.overflowing(queries)
        with np.errstate(over="ignore"):
            reach = (
                np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)) * self.items.largest_norm + self.items.largest_bias
            )
        too_far: npt.NDArray[np.bool_] = ~(reach < np.finfo(np.float32).max / 4)
        return too_far


def search(queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters) -> TopK:
    """The k best items of each user after the filters; fewer where fewer are left.

    queries: [n, d] finite, d = catalogue.items.width, or the head's. filters: of the same n users.
    """
    torch.set_float32_matmul_precision("highest")  # TF32 or bfloat16 products, which somebody may have set, break the bound
    k = min(k, len(catalogue.items))
    queries = np.ascontiguousarray(queries, np.float32)
    starts = _passes(len(queries), catalogue, k, filters)
    parts = [
        _search_some(queries[start:stop], catalogue, k, filters.of_users(start, stop)) for start, stop in pairwise(starts)
    ]
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(p.offsets) for p in parts)])
    return TopK(
        np.cumsum(lengths),
        np.concatenate([np.empty(0, np.int64), *(p.rows for p in parts)]),
        np.concatenate([np.empty(0, np.float32), *(p.scores for p in parts)]),
    )


def _passes(n: int, catalogue: Catalogue, k: int, filters: Filters) -> list[int]:
    """Where groups of users begin and the last ends, so that lists, survivors and candidates of a group fit the memory."""
    if not n:
        return [0]
    most = _queries_of_a_pass(catalogue, k, 1)
    pairs = np.cumsum(2 * k + np.diff(filters.candidates.lists(n)[0]))
    starts = [0]
    while starts[-1] < n:
        done = pairs[starts[-1] - 1] if starts[-1] else 0
        fitting = int(np.searchsorted(pairs, done + PAIRS_AT_ONCE, "right"))
        starts.append(min(n, starts[-1] + most, max(fitting, starts[-1] + 1)))
    return starts


def _queries_of_a_pass(catalogue: Catalogue, k: int, times: int) -> int:
    return max(1, min(PASS_QUERIES, PASS_BYTES // (FOUND.itemsize * catalogue.scan.room(k, times))))


def _search_some(queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters) -> TopK:
    """Users with a short list of candidates are scored on those; all others by the scan; whom it gives up, on everything."""
    n = len(queries)
    short = np.zeros(n, bool)
    if filters.limited is not None:
        longest = max(SHORT_LIST, len(catalogue.items) // SHORT_SHARE)
        short = filters.limited & (np.diff(filters.candidates.lists(n)[0]) <= longest)
    scanned = np.flatnonzero(~short)
    users = rows = gone = np.empty(0, np.int64)
    if len(scanned):
        users, rows, gone = _scanned(scanned, queries, catalogue, k, filters)
    if short.any():
        listed = _allowed_candidates(np.flatnonzero(short), catalogue, filters)
        users, rows = np.concatenate([users, listed.users]), np.concatenate([rows, listed.items])
    scores = catalogue.pair_scores(queries, users, rows)
    for user in gone.tolist():
        all_rows, all_scores = _against_all(queries[user : user + 1], catalogue, k, filters.of_users(user, user + 1))
        users = np.concatenate([users, np.full(len(all_rows), user)])
        rows, scores = np.concatenate([rows, all_rows]), np.concatenate([scores, all_scores])
    if (np.diff(users) < 0).any():
        order = np.argsort(users, kind="stable")
        users, rows, scores = users[order], rows[order], scores[order]
    offsets = np.searchsorted(users, np.arange(n + 1))
    return TopK(*best(offsets, rows, scores, k, *catalogue.hands))


def _scanned(
    users: npt.NDArray[np.int64], queries: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What survives the scan for some users: pairs of user and item row, by user; and users who have too many."""
    found = catalogue.scan.survivors(queries[users], k, filters.take(users))
    owners, rows, gone = [np.repeat(users, np.diff(found.offsets))], [found.rows], users[found.gone]
    # Scores that lie close together fill a list with what may be in the answer; most lists are wide enough the next time.
    step = _queries_of_a_pass(catalogue, k, WIDER)
    left = []
    for start in range(0, len(gone), step):
        some = gone[start : start + step]
        found = catalogue.scan.survivors(queries[some], k, filters.take(some), WIDER)
        owners.append(np.repeat(some, np.diff(found.offsets)))
        rows.append(found.rows)
        left.append(some[found.gone])
    return np.concatenate(owners), np.concatenate(rows), np.concatenate([gone[:0], *left])


def _allowed_candidates(users: npt.NDArray[np.int64], catalogue: Catalogue, filters: Filters) -> Pairs:
    """The candidates of some users, less what they or all must not get."""
    n, pairs = len(catalogue.items), filters.candidates
    listed = np.zeros(int(pairs.users[-1]) + 1 if len(pairs.users) else 0, bool)
    listed[users[users < len(listed)]] = True
    inside = listed[pairs.users]
    if catalogue.allowed is not None:
        inside &= catalogue.allowed[pairs.items]
    keys = pairs.users[inside] * n + pairs.items[inside]
    excluded = filters.exclude.users * n + filters.exclude.items  # ascending, as keys are
    at = np.minimum(np.searchsorted(excluded, keys), max(0, len(excluded) - 1))
    left = keys[excluded[at] != keys] if len(excluded) else keys
    return Pairs(*np.divmod(left, n))


def _against_all(
    query: npt.NDArray[np.float32], catalogue: Catalogue, k: int, filters: Filters
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Rows and exact scores of the k best items of one user, query [1, d], by scoring every one."""
    n = len(catalogue.items)
    allowed = np.ones(n, bool) if catalogue.allowed is None else catalogue.allowed.copy()
    if filters.limited is not None and filters.limited[0]:
        listed = np.zeros(n, bool)
        listed[filters.candidates.items] = True
        allowed &= listed
    allowed[filters.exclude.items] = False
    rows = np.flatnonzero(allowed)
    scores = catalogue.pair_scores(query, np.zeros(len(rows), np.int64), rows)
    if len(rows) > k:
        kth = np.partition(scores, len(rows) - k)[len(rows) - k]
        above = np.flatnonzero(scores > kth)
        kept = np.concatenate([above, np.flatnonzero(scores == kth)[: k - len(above)]])  # of equals, the first rows
        rows, scores = rows[kept], scores[kept]
    return rows, scores
