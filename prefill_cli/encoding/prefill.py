"""The prefill engine: each distinct token of a shard goes through the model once, without padding.

Equal prompts are encoded once; prefixes that many share are computed first, and their keys and values serve every
prompt below them (prefix.py). What is left is packed end to end into rows (packing.py) that go through the layers
with attention per prompt (attention.py, decoders.py). Rows run side by side, one thread each, because threads that
share a product wait for the slowest at its end.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.encoding.attention import PackedAttention, PrefixStates, Run
from prefill_cli.encoding.batching import TokenLimit, halves, spread
from prefill_cli.encoding.budget import fastest, lanes, row_tokens
from prefill_cli.encoding.decoders import Decoder, PackedRow
from prefill_cli.encoding.encoder import Encoded, OnBatch
from prefill_cli.encoding.kernels import Kernels
from prefill_cli.encoding.loading import is_out_of_memory
from prefill_cli.encoding.packing import Ids, Packing, distinct, packing_of
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.encoding.pooling import POOLINGS, finish
from prefill_cli.encoding.prefix import Sharing, nothing_shared
from prefill_cli.encoding.varlen import load_varlen
from prefill_cli.machine import threads

log = logging.getLogger(__name__)


class _Shard(Packing):
    """What is being encoded, with the states of the prefixes."""

    def __init__(self, prompts: Sequence[Ids], sharing: Sharing) -> None:
        super().__init__(prompts, sharing)
        self.states = PrefixStates()

    def own_tokens(self, i: int) -> Ids:
        return self.prompts[i][self.starts[i] :]

    def with_context(self, run: Run, own: Tensor) -> Tensor:
        """Hidden states of all positions, [start + length, hidden], from those of the last `length`."""
        return own if run.context < 0 else torch.cat([self.states.hidden[run.context], own])


@dataclass(frozen=True)
class _Part:
    """Vectors [m, d] of the distinct prompts `members`, or None where the memory did not suffice."""

    members: list[int]
    vectors: npt.NDArray[np.float32] | None
    rows: int  # of the packed row, filling included
    prefixes: Sequence[int] = ()
    sec: float = 0.0


@dataclass(frozen=True)
class Rehearsed:
    """A packed row that was computed to see how long it takes, among as many others as in a run; vectors [m, d]."""

    cells: int  # tokens, filling included
    pairs: int  # (query, key) pairs of attention
    sec: float
    of_prefixes: bool
    vectors: npt.NDArray[np.float32]


class PrefillEncoder:
    """An Encoder over packed rows. A vector that is not finite is tried once more by `plain`, alone and in float32.

    decoder: the model's layers. pooling: last, mean or first. max_batch_tokens: tokens of a packed row, rounded to whole
    chunks. share: whether equal prompts and shared prefixes are computed once; the vectors are the same bits either way.
    kernels: attention's own, where there are any.
    """

    name = "packed"

    def __init__(
        self,
        decoder: Decoder,
        plain: PlainEncoder,
        *,
        pooling: str,
        dims: int | None,
        normalize: bool,
        max_batch_tokens: int,
        share: bool = True,
        kernels: Kernels | None = None,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._varlen = load_varlen(plain.device)
        self._plain = plain
        self._pooling = pooling
        self._dims = dims
        self._normalize = normalize
        self.max_batch_tokens = max_batch_tokens
        self._limit = TokenLimit(row_tokens(max_batch_tokens, decoder.chunk))
        self._share = share
        self.lanes = lanes(plain.device.type)
        self._pool = ThreadPoolExecutor(self.lanes, "prefill", torch.set_num_threads, (max(1, threads() // self.lanes),))

    def without_sharing(self) -> "PrefillEncoder":
        """The same encoder, which computes equal prompts and shared prefixes again and again."""
        other = copy.copy(self)
        other._share = False
        return other

    def probe(self, budgets: Sequence[int], prompts: Sequence[Ids]) -> None:
        """Take the budget whose rows are fastest: the first layers, all lanes at work, over `prompts` again and again."""
        decoder, by_length = self._decoder.shallow(), sorted(prompts, key=len)
        if decoder is None or not prompts:
            return
        other = copy.copy(self)
        other._decoder = decoder

        def seconds(tokens: int) -> float:
            row: list[Ids] = []
            while tokens:
                row.append(by_length[len(row) % len(by_length)][:tokens])
                tokens -= len(row[-1])
            shard = _Shard(row, nothing_shared(len(row)))
            began = time.perf_counter()
            for lane in [self._pool.submit(other._vectors, shard, [*range(len(row))]) for _ in range(self.lanes)]:
                lane.result()
            return time.perf_counter() - began

        self.max_batch_tokens = fastest(budgets, seconds)
        self._limit = TokenLimit(self.max_batch_tokens)

    def encode(self, input_ids: Sequence[Ids], on_batch: OnBatch) -> Encoded:
        """See Encoder."""
        found = distinct(input_ids, self._share)
        prompts, of_row, copies = found.prompts, found.of_row, found.copies

        shard, parts = self._begin(prompts)
        for part in parts:
            self._tell(part, copies, prompts, on_batch)
        plan = self._own_rows(shard, parts)
        waiting = {self._pool.submit(self._compute, shard, members) for members in plan}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for part in (part for future in done for part in future.result()):
                    parts.append(part)
                    self._tell(part, copies, prompts, on_batch)
        finally:  # an error or an interrupt: what has not begun need not begin
            for future in waiting:
                future.cancel()

        computed = [(part.members, part.vectors) for part in parts if part.vectors is not None]
        failed = [i for part in parts if part.vectors is None for i in part.members]
        vectors = np.full((len(prompts), computed[0][1].shape[1] if computed else 0), np.nan, np.float32)
        for members, part_vectors in computed:
            vectors[members] = part_vectors
        retried = self._plain.retry(prompts, vectors, except_for=failed)
        return Encoded(
            vectors[of_row],
            batches=len(computed),
            computed_tokens=sum(part.rows for part in parts) + sum(len(prompts[i]) for i in retried),
            retried_rows=int(copies[retried].sum()),
            out_of_memory=np.flatnonzero(np.isin(of_row, failed)),
        )

    @staticmethod
    def _tell(part: _Part, copies: npt.NDArray[np.int64], prompts: Sequence[Ids], on_batch: OnBatch) -> None:
        rows = copies[part.members]
        on_batch(int(rows.sum()), int((rows * [len(prompts[i]) for i in part.members]).sum()))

    def _begin(self, prompts: Sequence[Ids]) -> tuple[_Shard, list[_Part]]:
        """The shard with its prefixes computed, and prompts that filled up their row."""
        shard, parts = _Shard(prompts, packing_of(prompts, self._share).sharing), []
        try:
            for chain, members in shard.prefix_rows(self._limit.tokens, self._decoder.chunk):
                parts.append(self._pool.submit(self._vectors, shard, members, chain).result())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("out of memory for the prefixes that prompts share; they are computed with every prompt")
            return _Shard(prompts, nothing_shared(len(prompts))), []
        return shard, parts

    def _own_rows(self, shard: _Shard, parts: Sequence[_Part]) -> Iterator[list[int]]:
        done = [i for part in parts for i in part.members]
        return shard.own_rows(done, self._limit.tokens, self._decoder.chunk, self.lanes)

    def rehearse(self, input_ids: Sequence[Ids], enough: Callable[[], bool]) -> Iterator[Rehearsed]:
        """Compute rows that `encode` would: those of the prefixes, then some all over its plan until it is `enough`."""
        shard, parts = self._begin(distinct(input_ids, self._share).prompts)
        plan = list(self._own_rows(shard, parts))
        waiting: set[Future[list[_Part]]] = set()
        rows = iter(spread(len(plan)))
        while True:
            for part in parts:
                if part.vectors is not None:
                    _, pairs = shard.work(part.members, part.prefixes)
                    yield Rehearsed(part.rows, pairs, part.sec, bool(part.prefixes), part.vectors)
            while len(waiting) < self.lanes and not enough() and (row := next(rows, None)) is not None:
                waiting.add(self._pool.submit(self._compute, shard, plan[row]))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            parts = [part for future in done for part in future.result()]

    def _compute(self, shard: _Shard, members: list[int]) -> list[_Part]:
        """Vectors of some prompts; where memory runs out, in halves, and a prompt that does not fit alone has none."""
        tokens = int(shard.lengths[members].sum())
        if tokens <= self._limit.tokens or len(members) == 1:
            try:
                return [self._vectors(shard, members)]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the except clause, whose error holds the tensors that filled the memory.
            if self._plain.device.type == "cuda":
                torch.cuda.empty_cache()
            if len(members) == 1:
                return [_Part(members, None, 0)]
            self._limit.lower(tokens, self._decoder.chunk)
        return [part for half in halves(members) for part in self._compute(shard, half)]

    def _vectors(self, shard: _Shard, members: list[int], prefixes: Sequence[int] = ()) -> _Part:
        """Vectors of some prompts, in one packed row. Before them in the row: prefixes whose states are to be filled."""
        began = time.perf_counter()

        def shape(i: int) -> tuple[int, int]:
            return int(shard.sharing.of_prompt[i]), int(shard.lengths[i])

        members = sorted(members, key=shape)  # prompts of one shape lie side by side and are one run
        runs, start = [], 0
        for i in prefixes:
            prefix = shard.sharing.prefixes[i]
            runs.append(Run(start, 1, len(prefix.input_ids), prefix.start, context=prefix.parent, prefix=i))
            start = runs[-1].stop
        for (context, length), same in groupby(members, key=shape):
            begin = shard.sharing.prefixes[context].end if context >= 0 else 0
            runs.append(Run(start, len(list(same)), length, begin, context))
            start = runs[-1].stop
        ids = np.concatenate(
            [shard.sharing.prefixes[i].input_ids for i in prefixes] + [shard.own_tokens(i) for i in members]
        )
        begins = [(run, row) for run in runs[len(prefixes) :] for row in range(run.row, run.stop, run.length)]
        with torch.inference_mode():
            if self._pooling == "last":
                pooled = self._forward(shard, runs, ids, wanted=[row + run.length - 1 for run, row in begins]).float()
            else:
                hidden = self._forward(shard, runs, ids, wanted=None)
                for run in runs[: len(prefixes)]:
                    shard.states.hidden[run.prefix] = shard.with_context(run, hidden[run.row : run.stop])
                pool = POOLINGS[self._pooling]
                whole = [shard.with_context(run, hidden[row : row + run.length])[None] for run, row in begins]
                empty = hidden[:0].float()
                pooled = torch.cat([empty, *(pool(x, torch.tensor([x.shape[1]], device=x.device)) for x in whole)])
            vectors = finish(pooled, self._dims, self._normalize).numpy()
        return _Part(members, vectors, len(ids) + self._filling(len(ids)), prefixes, time.perf_counter() - began)

    def _forward(self, shard: _Shard, runs: list[Run], ids: Ids, wanted: list[int] | None) -> Tensor:
        """Hidden states of the wanted rows (None: all) of runs that lie end to end."""
        filling = self._filling(len(ids))
        positions = [np.tile(np.arange(run.start, run.start + run.length), run.count) for run in runs]

        def on_device(array: Any) -> Tensor:
            tensor = torch.from_numpy(np.asarray(array, np.int64))
            cuda = self._plain.device.type == "cuda"
            return (tensor.pin_memory() if cuda else tensor).to(self._plain.device, non_blocking=cuda)

        return self._decoder(
            PackedRow(
                input_ids=on_device(np.pad(ids, (0, filling))),
                positions=on_device(np.pad(np.concatenate(positions), (0, filling))),
                longest=max(run.start + run.length for run in runs),
                attention=PackedAttention(runs, shard.states, self._kernels, self._varlen),
                wanted=None if wanted is None else on_device(wanted),
            )
        )

    def _filling(self, tokens: int) -> int:
        return -tokens % self._decoder.chunk
