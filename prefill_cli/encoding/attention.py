"""Attention of a packed row: every sequence to itself and to the prefix that it goes on from, and to nothing else.

Queries are cut into tiles of TILE positions that are counted from the prompt's beginning, not from the batch's. A tile
is one call of scaled_dot_product_attention for exactly TILE queries over the keys up to the tile's end; where a sequence
begins or ends inside a tile, the tile is filled up. So the shape of a call depends on the tile's number alone, and with
it the kernel and the order of every sum: a position's bits are the same in any prompt that begins with the same tokens,
alone, among neighbours, and computed as part of a shared prefix. Exact shapes would save about 12 % of attention, but
their bits differ: a kernel for 57 queries is another than that for 64.

In bfloat16 on a CPU with tile units the same is done by a kernel of this project's own (kernels.cpp, kernels.py) in
about half the time, where compiling is wanted. On CUDA in half precision PyTorch's variable-length attention takes all
sequences of a row at once (varlen.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from prefill_cli.encoding.kernels import Kernels
from prefill_cli.encoding.varlen import Layout, Varlen

TILE = 64
NO_WINDOW = 1 << 40


@dataclass(frozen=True)
class Run:
    """Sequences of equal shape that lie end to end in a packed row.

    Sequence i has its own tokens at rows `row + i * length` and on, `length` of them, which are the positions from
    `start` of its prompt. `context` is the prefix that the positions before are in, -1 where `start` is 0. A run that
    is itself a prefix (`prefix` >= 0) has `count` 1.
    """

    row: int
    count: int
    length: int
    start: int = 0
    context: int = -1
    prefix: int = -1

    @property
    def stop(self) -> int:
        return self.row + self.count * self.length

    def of(self, packed: Tensor) -> Tensor:
        """The run's part of a packed tensor [R, ...], as [count, length, ...]."""
        return packed[self.row : self.stop].view(self.count, self.length, *packed.shape[1:])


@dataclass
class PrefixStates:
    """What later batches need of the shared prefixes: keys and values by layer, and final hidden states.

    Each prefix is kept together with its parents, from position 0 on. Written while the prefixes are computed, read
    only afterwards.
    """

    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (layer, prefix) → [end, KV heads, head size]
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)  # prefix → [end, hidden], where pooling wants all positions


class PackedAttention:
    """Attention for one packed row, called once per layer."""

    def __init__(
        self, runs: Sequence[Run], states: PrefixStates, kernels: Kernels | None = None, varlen: Varlen | None = None
    ) -> None:
        self._runs = runs
        self._states = states
        self._kernels = kernels
        self._varlen = varlen
        self._packed: dict[bool, _Packed] = {}  # for varlen: by last_tile_only, made at the first layer
        if kernels:
            sequences = [(run.row + i * run.length, run) for run in runs for i in range(run.count)]
            # What kernels.cpp calls a Sequence: row, length, start, then addresses that differ by layer.
            self._sequences = np.array([(row, run.length, run.start, 0, 0) for row, run in sequences], np.int64)
            contexts = np.array([run.context for _, run in sequences])
            self._contexts, self._context_of = np.unique(contexts, return_inverse=True)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        last_tile_only: bool = False,
    ) -> Tensor:
        """[R, heads * head size] for query [R, heads, head size] and key, value [R, KV heads, head size].

        window: a position sees this many positions, itself included. softcap: scores are bent to ±softcap by tanh.
        last_tile_only: only the rows of each sequence's last tile are computed. Rows of no sequence are 0.
        """
        size = query.shape[-1]
        if self._kernels and query.dtype == torch.bfloat16 and not softcap and not size % 32 and value.shape[-1] == size:
            return self._by_kernel(self._kernels, layer, query, key, value, scale, window, last_tile_only)
        if self._varlen and self._varlen.serves(query, value, window, softcap):
            return self._by_varlen(self._varlen, layer, query, key, value, scale, window, last_tile_only)
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        for run in self._runs:
            end = run.start + run.length
            first, filling = run.start % TILE, -end % TILE  # cells of the first and last tile that are not the run's own
            keys = self._with_context(self._states.keys, layer, run, key, filling)
            values = self._with_context(self._states.values, layer, run, value, filling)
            queries = F.pad(run.of(query), (0, 0, 0, 0, first, filling)) if first or filling else run.of(query)
            results = run.of(out)
            begin = (end - 1) // TILE * TILE if last_tile_only else run.start - first
            for low in range(begin, end, TILE):
                here = slice(low - run.start + first, low - run.start + first + TILE)
                since = 0 if window is None else max(0, low - window + 1)
                seen = slice(since, low + TILE)
                tile = _attend(queries[:, here], keys[:, seen], values[:, seen], low - since, scale, window, softcap)
                skip = max(run.start - low, 0)
                own = slice(low + skip - run.start, min(low + TILE, end) - run.start)
                results[:, own] = tile[:, skip : skip + own.stop - own.start]
        return out.flatten(1)

    def _by_kernel(
        self,
        kernels: Kernels,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        last: bool,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        states = self._states
        self._keep_prefixes(layer, key, value)
        sequences = self._sequences.copy()
        for column, kept in ((3, states.keys), (4, states.values)):
            addresses = [kept[layer, int(c)].data_ptr() if c >= 0 else 0 for c in self._contexts]
            sequences[:, column] = np.array(addresses, np.int64)[self._context_of]
        return kernels.attend(query, key, value, sequences, scale, window or NO_WINDOW, last).flatten(1)

    def _by_varlen(
        self,
        varlen: Varlen,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        last: bool,
    ) -> Tensor:
        self._keep_prefixes(layer, key, value)
        if last not in self._packed:
            self._packed[last] = _Packed(self._runs, len(query), last, query.device)
        packed, states = self._packed[last], self._states
        keys, values = (
            torch.cat([own, *(kept[layer, c] for c in packed.contexts)])[packed.key_rows]
            for own, kept in ((key, states.keys), (value, states.values))
        )
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        out[packed.query_rows] = varlen(query[packed.query_rows], keys, values, packed.layout, scale, window)
        return out.flatten(1)

    def _keep_prefixes(self, layer: int, key: Tensor, value: Tensor) -> None:
        for run in self._runs:
            if run.prefix >= 0:
                self._with_context(self._states.keys, layer, run, key, 0)
                self._with_context(self._states.values, layer, run, value, 0)

    def _with_context(
        self, states: dict[tuple[int, int], Tensor], layer: int, run: Run, packed: Tensor, filling: int
    ) -> Tensor:
        """Keys or values of all positions of a run, [count, start + length + filling, KV heads, head size]."""
        own = run.of(packed)
        parts = [own, own.new_zeros(1, filling, *own.shape[2:])]
        if run.context >= 0:
            parts.insert(0, states[layer, run.context][None])
        whole = torch.cat([part.expand(run.count, -1, -1, -1) for part in parts], 1)
        if run.prefix >= 0:
            states[layer, run.prefix] = whole[0, : run.start + run.length].clone()  # no view: it is kept, the rest is not
        return whole


class _Packed:
    """Which rows of a packed row variable-length attention takes, on the device.

    query_rows: [Tq] rows that are computed. key_rows: [Tk] rows of the packed keys followed by those of `contexts`, the
    prefixes that sequences go on from, end to end.
    """

    def __init__(self, runs: Sequence[Run], rows: int, last_only: bool, device: torch.device) -> None:
        """rows: of the packed row, filling included. last_only: of each sequence the last row only."""
        ends = {run.context: run.start for run in runs if run.context >= 0}
        self.contexts = sorted(ends)
        begins = dict(zip(self.contexts, rows + np.cumsum([0, *(ends[c] for c in self.contexts)]), strict=False))
        queries, keys, numbers = [], [], []
        for run in runs:
            before = np.arange(run.start) + begins.get(run.context, 0)
            for row in range(run.row, run.stop, run.length):
                own = np.arange(row, row + run.length)
                queries.append(own[-1:] if last_only else own)
                keys += [before, own]
                numbers.append((len(queries[-1]), run.start + run.length))
        counts = np.array(numbers)

        def on_device(values: npt.NDArray[np.int64], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        query_ends, key_ends = (np.concatenate([[0], np.cumsum(counts[:, i])]) for i in (0, 1))
        self.query_rows = on_device(np.concatenate(queries), torch.int64)
        self.key_rows = on_device(np.concatenate(keys), torch.int64)
        self.layout = Layout(
            on_device(query_ends, torch.int32), on_device(key_ends, torch.int32), *(int(n) for n in counts.max(0))
        )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[n, TILE, heads, size] for a tile of queries, the first of which stands at key `offset`."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = _mask(offset, window, query.dtype, query.device)
    if softcap is None:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * scale
        scores = softcap * torch.tanh(scores / softcap) + mask
        attended = torch.softmax(scores, -1).to(q.dtype) @ v
    return attended.transpose(1, 2)


_MASKS: dict[tuple[int | None, torch.dtype, torch.device], Tensor] = {}


def _mask(offset: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[TILE, offset + TILE] to be added to scores: 0 where query i, at key `offset + i`, may see a key, else -inf.

    All masks of a kind are the last columns of one: keys of earlier tiles, then a triangle.
    """
    whole = _MASKS.get((window, dtype, device))
    if whole is None or whole.shape[1] < offset + TILE:
        before = max(1_024, 1 << offset.bit_length()) if window is None else window
        i = torch.arange(TILE, device=device)[:, None]
        j = torch.arange(before + TILE, device=device) - before
        sees = j <= i if window is None else (j <= i) & (i - j < window)
        whole = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(~sees, float("-inf"))
        _MASKS[window, dtype, device] = whole
    return whole[:, whole.shape[1] - TILE - offset :]
