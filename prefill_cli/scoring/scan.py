"""The pass over all items: which pairs could be in the answer. topk.py says why none is missed.

KernelScan is the fast one on a CPU (scan.cpp); TorchScan serves other devices, and CPUs without a compiler.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.machine import free_memory, threads
from prefill_cli.scoring.filters import Filters, Pairs
from prefill_cli.scoring.heads import PairHead, tensor
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.kernels import FOUND, MOST_QUERIES, TILE, Kernels, Scan
from prefill_cli.scoring.matrix import SHARE_OF_MEMORY

Floats = npt.NDArray[np.float32]
UNIT_ROUNDOFF = 2.0**-24  # of float32
TINY = float(np.finfo(np.float32).tiny)
ROOM = 1_024  # places of a query's list beside 2 k: what a scan keeps before it looks for the k best of it
GROUP_BYTES = 1 << 20  # of a group's queries, which stay in a core's cache while the items pass by
GROUP_QUERIES = 256
STREAM_BYTES = 64 << 20  # of items that are converted at once where the memory does not hold all
SIFT_ROWS = 4_096
BLOCK_ITEMS = 16_384
PAIR_BLOCK = 2_048  # items whose parts for one user stay in a core's cache
EXACT_PAIRS = 16_384
SCAN_CELLS = 1 << 26  # scores of a block: 256 MB
RUN = 64  # neighbouring scores whose largest decides first
LARGEST = 1e37  # length of a vector with which bounds, and sums in bfloat16, stay finite


class Survivors(NamedTuple):
    """Pairs that may be in the answer: user i's item rows are [offsets[i] : offsets[i + 1]]; `gone` users had too many."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    gone: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ErrorOf:
    """[n] each: the scanned score of item x is off by at most of_norm |x| + of_residual |x - x'| + constant."""

    of_norm: Floats
    of_residual: Floats
    constant: Floats


def error_of(queries: Floats, scanned: Floats, items: Items, padded: int, result_error: float = 0.0) -> ErrorOf:
    """The E of the proof. scanned: the queries as they are multiplied. result_error: relative, of a rounded result."""
    wide, low = queries.astype(np.float64), scanned.astype(np.float64)
    lost, kept, whole = (np.sqrt(np.square(x).sum(1)) for x in (wide - low, low, wide))
    gamma = (2 * padded + 16) * UNIT_ROUNDOFF / (1 - (2 * padded + 16) * UNIT_ROUNDOFF) + result_error
    largest = np.abs(wide).max(1, initial=0) + items.largest_norm
    up = 1 + 1e-5  # for rounding these themselves
    with np.errstate(over="ignore"):  # _too_large sees to it
        rounded = (
            np.nextafter((up * x).astype(np.float32), np.float32(np.inf))  # up, among subnormals too
            for x in (
                lost + gamma * kept + 16 * UNIT_ROUNDOFF * whole,
                kept * (1 + gamma),
                16 * UNIT_ROUNDOFF * items.largest_bias + 4 * padded * TINY * (1 + largest),
            )
        )
        return ErrorOf(*rounded)


class KernelScan:
    """A catalogue ready to be scanned by the kernels: in bfloat16 where the machine multiplies that, else in float32.

    The bfloat16 copy is made once and kept where the memory has room for it, else block by block in each pass.
    """

    def __init__(self, items: Items, allowed: npt.NDArray[np.bool_] | None, kernels: Kernels, dtype: str | None) -> None:
        self._items, self._kernels = items, kernels
        self.lanes = threads()
        self.pool = ThreadPoolExecutor(self.lanes, "search", torch.set_num_threads, (1,))
        self.dtype = dtype or ("bfloat16" if torch.cpu._is_amx_tile_supported() else "float32")
        self._padded = -(-items.width // 32) * 32 if self.dtype == "bfloat16" else items.width
        self._bias = items.bias
        if allowed is not None:  # what nobody may get scores less than anything
            self._bias = np.where(allowed, np.float32(0) if items.bias is None else items.bias, -np.inf).astype(np.float32)
        self._norms = _tile_maxima(items.norms)
        self._places = np.empty(0, FOUND)

    @cached_property
    def _whole(self) -> tuple[Any, Floats] | None:
        """All items in bfloat16 [N, padded] and the largest residual of each tile; None where there is no room."""
        if len(self._items) * self._padded * 2 > SHARE_OF_MEMORY * free_memory():
            return None
        return self._converted(0, len(self._items))

    def _converted(self, first: int, stop: int) -> tuple[Any, Floats]:
        out = np.empty((stop - first, self._padded), np.uint16)
        residuals = np.empty(stop - first)

        def some(start: int) -> None:
            part = slice(start, min(start + step, stop - first))
            residuals[part] = self._kernels.convert(self._items.matrix.block(first + start, first + part.stop), out[part])

        step = min(8_192, -(-(stop - first) // self.lanes))
        list(self.pool.map(some, range(0, stop - first, step)))
        return out, _tile_maxima(residuals)

    def _blocks(self) -> Iterator[tuple[int, Any, Floats]]:
        """First row, items and largest residuals by tile; one block where all are in memory."""
        n = len(self._items)
        if self.dtype == "float32":
            yield 0, None, np.zeros_like(self._norms)
        elif self._whole:
            yield 0, *self._whole
        else:
            step = max(1, STREAM_BYTES // (2 * self._padded * TILE)) * TILE
            for first in range(0, n, step):
                yield first, *self._converted(first, min(first + step, n))

    def room(self, k: int, times: int = 1) -> int:
        """Places of a query's list."""
        return min(times * (2 * k + ROOM), len(self._items) + 1)

    def survivors(self, queries: Floats, k: int, filters: Filters, times: int = 1) -> Survivors:
        """Of n queries [n, d], after the filters. times: how often the usual room a list has."""
        n, room = len(queries), self.room(k, times)
        size = min(GROUP_QUERIES, MOST_QUERIES, max(64, GROUP_BYTES // (2 * self._padded) // 64 * 64))
        groups = [slice(start, min(start + size, n)) for start in range(0, n, size)]
        parts = max(1, -(-self.lanes // len(groups)))
        if len(self._places) < parts * n * room:
            self._places = np.empty(parts * n * room, FOUND)  # kept: the system takes its time to give new memory
        found = self._places[: parts * n * room].reshape(parts, n, room)
        counts = np.zeros((parts, n), np.int64)
        too_large = _too_large(queries, self._items)
        counts[:, too_large] = -1
        queries = np.where(too_large[:, None], np.float32(0), queries)
        prepared = [self._prepare(queries[group]) for group in groups]
        lists = filters.exclude.lists(n), filters.candidates.lists(n)
        tasks = []
        for group, (multiplied, error) in zip(groups, prepared, strict=True):
            for part in range(parts):
                state = _State(
                    error, k, found[part, group], counts[part, group], lists, filters.limited, group, self._kernels
                )
                tasks.append((part, multiplied, state))
        for first, items, residuals in self._blocks():
            rows = len(self._items) if items is None else len(items)
            share = -(-rows // (parts * TILE)) * TILE
            scans = [
                (state, multiplied, first, items, residuals, slice(part * share, min((part + 1) * share, rows)))
                for part, multiplied, state in tasks
            ]
            list(self.pool.map(lambda scan: self._scan(*scan), scans))
        left = list(self.pool.map(lambda group: self._kernels.survivors(found, counts, k, group), groups))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for lengths, _ in left]))])
        return Survivors(offsets, np.concatenate([rows for _, rows in left]), np.asarray((counts < 0).any(0)))

    def _scan(self, state: "_State", queries: Any, first: int, items: Any, residuals: Floats, part: slice) -> None:
        if part.start >= part.stop:
            return
        bias = None if self._bias is None else self._bias[first + part.start :]
        norms, residuals = self._norms[(first + part.start) // TILE :], residuals[part.start // TILE :]
        if items is not None:
            self._kernels.scan(state.scan, items[part], first + part.start, queries, bias, norms, residuals)
            return
        scores = torch.empty(SIFT_ROWS, queries.shape[1])
        for start in range(part.start, part.stop, SIFT_ROWS):
            block = tensor(self._items.matrix.block(start, min(start + SIFT_ROWS, part.stop)))
            product = torch.mm(block, queries, out=scores[: len(block)])
            tile = (start - part.start) // TILE
            self._kernels.sift(
                state.scan, product.numpy(), start, None if bias is None else bias[start - part.start :], norms[tile:],
                residuals[tile:],
            )  # fmt: skip

    def _prepare(self, queries: Floats) -> tuple[Any, ErrorOf]:
        """The queries as the products want them, their number rounded up, and their errors."""
        n, width = queries.shape
        filled = np.zeros((-(-n // 16) * 16, self._padded), np.float32)
        filled[:n, :width] = queries
        if self.dtype == "float32":
            return torch.from_numpy(filled).T, error_of(filled, filled, self._items, self._padded)
        low = torch.from_numpy(filled).bfloat16()
        pairs = np.ascontiguousarray(low.view(torch.int16).numpy().view(np.uint32).T)
        return pairs, error_of(filled, low.float().numpy(), self._items, self._padded)


class _State:
    """A group of queries on its way through the items; owns the arrays that `scan` points to."""

    def __init__(
        self, error: ErrorOf, k: int, found: Any, counts: Any, lists: Sequence[tuple[Any, Any]], limited: Any, group: slice,
        kernels: Kernels,
    ) -> None:  # fmt: skip
        """lists: offsets and items of what all users must not get, and of what they may get."""
        n, own = len(error.of_norm), len(counts)
        self.floors = np.full(n, -np.finfo(np.float32).max / 2, np.float32)
        self.floors[own:] = np.inf  # filling
        self.floors[:own][counts < 0] = np.inf  # nothing is kept for them
        limits = None if limited is None else np.ascontiguousarray(limited[group], np.uint8)
        pointed: list[Any] = [error.of_norm, error.of_residual, error.constant, self.floors, counts, found]
        for (offsets, items), asked in zip(lists, (len(lists[0][1]) > 0, limits is not None), strict=True):
            of_group = offsets[group.start : group.stop + 1]
            pointed += [of_group, items, kernels.marks(of_group, items)] if asked else [None] * 3
        self._owned = (*pointed, limits)
        self.scan = Scan(n, k, found.shape[1], *(None if x is None else x.ctypes.data for x in self._owned))


def _too_large(queries: Floats, items: Items) -> npt.NDArray[np.bool_]:
    """[n] queries that a scan can prove nothing of: they, or an item, are so long that a bound would be infinite."""
    lengths = np.sqrt(np.square(queries, dtype=np.float64).sum(1))
    return np.asarray((lengths > LARGEST) | (items.largest_norm > LARGEST))


def _tile_maxima(values: npt.NDArray[np.float64]) -> Floats:
    """The largest of each TILE neighbours, rounded up."""
    largest = np.maximum.reduceat(values, np.arange(0, len(values), TILE)) * (1 + 1e-6)
    with np.errstate(over="ignore"):  # _too_large sees to it
        return np.nextafter(largest.astype(np.float32), np.float32(np.inf))


class TorchScan:
    """The same by PyTorch's own operations: on CUDA in bfloat16, the catalogue kept there where its memory has room."""

    def __init__(self, items: Items, allowed: npt.NDArray[np.bool_] | None, device: str, dtype: str | None) -> None:
        self._items, self._device = items, device
        cuda = device.startswith("cuda")
        native = cuda and torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
        self.dtype = dtype or ("bfloat16" if native else "float32")
        self._denied = None if allowed is None else torch.from_numpy(~allowed).to(device)
        self._largest = items.largest_norm
        half = self.dtype == "bfloat16"
        itemsize = 2 if half else 4
        self._keep = cuda and len(items) * items.width * itemsize < SHARE_OF_MEMORY * free_memory(device)
        self._block = BLOCK_ITEMS if not cuda else 4 * BLOCK_ITEMS
        self._kept: dict[int, Tensor] = {}
        self._residual = 0.0
        if half:  # of the whole catalogue
            for _, block in items.matrix.blocks():
                lost = tensor(block) - tensor(block).bfloat16().float()
                self._residual = max(self._residual, float(lost.double().square().sum(1).max().sqrt()))
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def room(self, k: int, times: int = 1) -> int:
        """Pairs of a query that are held at once."""
        return times * (2 * k + ROOM)

    def survivors(self, queries: Floats, k: int, filters: Filters, times: int = 1) -> Survivors:
        """See KernelScan."""
        items, device, n = self._items, self._device, len(queries)
        too_large = _too_large(queries, items)
        prepared, bound = self._prepare(np.where(too_large[:, None], np.float32(0), queries))
        margin = torch.from_numpy(2 * bound * (1 + 1e-5)).float().to(device)[:, None]
        mask = _Mask(filters, device)
        best = torch.full((n, 1), -torch.inf, device=device)
        floor = best - margin
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        held = torch.zeros(n, dtype=torch.int64, device=device)
        gone = torch.from_numpy(too_large).to(device)
        step = self._block if self._keep or self._kept else max(RUN, min(self._block, SCAN_CELLS // n // RUN * RUN))
        for first in range(0, len(items), step):
            stop = min(first + step, len(items))
            scores = self._scores(prepared, first, stop)
            if items.bias is not None:
                scores += tensor(items.bias[first:stop]).to(device)
            if self._denied is not None:
                scores[:, self._denied[first:stop]] = -torch.inf
            mask.apply(scores, first, stop)
            scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % RUN), value=-torch.inf)
            runs = scores.view(n, -1, RUN).amax(2)
            # Different items, so the k-th largest of them is a lower bound of the k-th largest of all.
            best = torch.cat([best, runs], 1)
            best = best.topk(min(k, best.shape[1])).values
            if best.shape[1] == k:
                floor = torch.where(gone[:, None], torch.inf, torch.maximum(floor, best[:, -1:] - margin))
            users, hot = ((runs >= floor) & (runs > -torch.inf)).nonzero(as_tuple=True)
            kept = scores.view(n, -1, RUN)[users, hot]  # [m, RUN]
            which, lane = ((kept >= floor[users]) & (kept > -torch.inf)).nonzero(as_tuple=True)
            found = users[which], hot[which] * RUN + lane + first, kept[which, lane]
            pairs.append(found)
            held += torch.bincount(found[0], minlength=n)
            if bool((held > self.room(k, times)).any()):
                pairs = [self._cut_back(pairs, k, margin, floor, n)]
                held = torch.bincount(pairs[0][0], minlength=n)
                gone |= held > self.room(k, times) * 3 // 4
        left = self._cut_back(pairs, k, margin, floor, n)
        whose, rows = left[0].cpu().numpy(), left[1].cpu().numpy()
        gone_users: npt.NDArray[np.bool_] = gone.cpu().numpy()
        stay = ~gone_users[whose]
        counts = np.bincount(whose[stay], minlength=n)
        return Survivors(np.concatenate([[0], np.cumsum(counts)]), rows[stay], gone_users)

    def _prepare(self, queries: Floats) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """The queries as they are multiplied, and [n] the E of the proof."""
        on_device = tensor(queries).to(self._device)
        half = self.dtype == "bfloat16"
        multiplied = on_device.bfloat16() if half else on_device
        error = error_of(queries, multiplied.float().cpu().numpy(), self._items, self._items.width, 2.0**-8 if half else 0.0)
        of_norm, of_residual, constant = (x.astype(np.float64) for x in (error.of_norm, error.of_residual, error.constant))
        return multiplied, self._largest * of_norm + self._residual * of_residual + constant

    def _scores(self, prepared: Tensor, first: int, stop: int) -> Tensor:
        """[n, stop - first] scanned scores, without the bias."""
        return (prepared @ self._on_device(first, stop).T).float()

    def _cut_back(
        self, pairs: Sequence[tuple[Tensor, Tensor, Tensor]], k: int, margin: Tensor, floor: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs less those that k others of their user are above of by more than the margin; sorted by user."""
        users, rows, scores = (torch.cat(column) for column in zip(*pairs, strict=True))
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(users[order], stable=True)]
        users, rows, scores = users[order], rows[order], scores[order]
        ends = torch.bincount(users, minlength=n).cumsum(0)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        enough = counts >= k
        kth = torch.full((n,), -torch.inf, device=scores.device)
        kth[enough] = scores[(ends - counts)[enough] + k - 1]
        floor.copy_(torch.maximum(floor, kth[:, None] - margin))
        keep = scores >= floor[users, 0]
        return users[keep], rows[keep], scores[keep]

    def _on_device(self, first: int, stop: int) -> Tensor:
        if first in self._kept:
            return self._kept[first]
        block = tensor(self._items.matrix.block(first, stop))
        block = (block.pin_memory() if self._device.startswith("cuda") else block).to(self._device, non_blocking=True)
        block = block.bfloat16() if self.dtype == "bfloat16" else block
        if self._keep:
            self._kept[first] = block
        return block


class PairScan(TorchScan):
    """The same for a head that scores pairs. The items' parts are computed once where the memory has room for them."""

    def __init__(self, items: Items, allowed: npt.NDArray[np.bool_] | None, device: str, head: PairHead) -> None:
        super().__init__(items, allowed, device, "float32")
        self._head, self._scanner = head, head.on(device)
        self.lanes = threads() if device == "cpu" else 1
        self.pool = ThreadPoolExecutor(self.lanes, "search", torch.set_num_threads, (1,))
        self._block = PAIR_BLOCK if device == "cpu" else 4 * BLOCK_ITEMS
        room = 4 * len(items) * head.hidden <= SHARE_OF_MEMORY * free_memory(device)
        self._largest_part = np.zeros(head.hidden)
        for first in range(0, len(items), self._block):
            part = head.items(items.matrix.block(first, first + self._block))
            self._largest_part = np.maximum(self._largest_part, part.abs().amax(0).double().numpy())
            if room:
                self._kept[first] = part.to(device)

    def overflowing(self, queries: Floats) -> npt.NDArray[np.bool_]:
        """[n] users whose scores might leave the range of float32."""
        reach = self._head.reach_and_error(self._head.users(queries), self._largest_part)[0] + self._items.largest_bias
        too_far: npt.NDArray[np.bool_] = ~(reach < np.finfo(np.float32).max / 4)
        return too_far

    def pair_scores(self, queries: Floats, users: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Floats:
        """[m] exact scores of m pairs."""
        parts, scores = self._head.users(queries), np.empty(len(users), np.float32)
        for start in range(0, len(users), EXACT_PAIRS):
            some = slice(start, start + EXACT_PAIRS)
            distinct, at = np.unique(rows[some], return_inverse=True)
            bias = None if self._items.bias is None else self._items.bias[rows[some]]
            items = self._head.items(self._items.matrix.take(distinct))
            scores[some] = self._head.exact(parts[users[some]], items[at], bias)
        return scores

    def _prepare(self, queries: Floats) -> tuple[Tensor, npt.NDArray[np.float64]]:
        parts = self._head.users(queries)
        reach, error = self._head.reach_and_error(parts, self._largest_part)
        return parts.to(self._device), error + 16 * UNIT_ROUNDOFF * (reach + self._items.largest_bias) + TINY

    def _scores(self, prepared: Tensor, first: int, stop: int) -> Tensor:
        items = self._on_device(first, stop)
        scores = items.new_empty(len(prepared), len(items))

        def some(lane: int) -> None:
            buffer = torch.empty_like(items)
            for user in range(lane, len(prepared), self.lanes):
                scores[user] = self._scanner.scanned(prepared[user], items, buffer)

        list(self.pool.map(some, range(self.lanes)))
        return scores

    def _on_device(self, first: int, stop: int) -> Tensor:
        if first in self._kept:
            return self._kept[first]
        return self._head.items(self._items.matrix.block(first, stop)).to(self._device)


class _Mask:
    """Sets scores of pairs that are not allowed to -inf."""

    def __init__(self, filters: Filters, device: str) -> None:
        self._device = device
        self._exclude, self._candidates = filters.exclude.by_item(), filters.candidates.by_item()
        limited = None if filters.limited is None else np.flatnonzero(filters.limited)
        self._limited = None if limited is None or not len(limited) else torch.from_numpy(limited).to(device)

    def apply(self, scores: Tensor, first: int, stop: int) -> None:
        """scores: [n, C] of items first … stop - 1, changed in place."""
        users, columns = self._within(self._exclude, first, stop)
        scores[users, columns] = -torch.inf
        if self._limited is not None:
            out = torch.zeros(scores.shape, dtype=torch.bool, device=self._device)
            out[self._limited] = True
            users, columns = self._within(self._candidates, first, stop)
            out[users, columns] = False
            scores.masked_fill_(out, -torch.inf)

    def _within(self, pairs: Pairs, first: int, stop: int) -> tuple[Tensor, Tensor]:
        a, b = np.searchsorted(pairs.items, (first, stop))
        users, columns = pairs.users[a:b], pairs.items[a:b] - first
        return torch.from_numpy(users).to(self._device), torch.from_numpy(columns).to(self._device)
