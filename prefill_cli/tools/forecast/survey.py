"""What an input holds and what a run would compute of it: rows read, tokenised and packed as the run does, no model.

A group is what is encoded together: a shard, or rows of a sample that stand for one.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefill_cli.data.cache import VectorCache, keys_of
from prefill_cli.data.inputs import Shard
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rows import ShardRows, read_rows
from prefill_cli.data.tokenization import Ids
from prefill_cli.encoding.batching import padded_batches
from prefill_cli.encoding.budget import CHUNK, lanes, row_tokens
from prefill_cli.encoding.packing import distinct, packing_of
from prefill_cli.encoding.vllm import SHARING
from prefill_cli.job import Job
from prefill_cli.machine import Stopwatch

STRETCHES = 32  # of a sample that is smaller than a shard
OBJECT_BYTES = 400  # of a prompt's array beside its ids, its row's place in lists, and what freed memory keeps


@dataclass(frozen=True)
class Batch:
    """A forward pass: its tokens, filling or padding included, and the (query, key) pairs of its attention."""

    cells: int
    pairs: int


@dataclass(frozen=True)
class Batches:
    """Of a group, as the encoder takes them: those of prefixes one after another, then the others by all lanes."""

    prefixes: tuple[Batch, ...]
    own: tuple[Batch, ...]
    tokens: int  # of both, without filling
    prefix_tokens_saved: int
    kept_tokens: int  # whose keys and values stay while the group is at work


@dataclass(frozen=True)
class Loaded:
    """A group's rows in memory, and which of them no cache knows."""

    shards: tuple[Shard, ...]
    rows: tuple[ShardRows, ...]  # of each
    fresh: list[Ids]
    read_sec: float
    read_work_sec: float  # of the processor
    cache_sec: float

    @property
    def input_ids(self) -> list[Ids]:
        return [ids for part in self.rows for ids in part.input_ids]


@dataclass(frozen=True)
class Group:
    """What was counted in a group; `lengths` [n] of its prompts."""

    rows: int
    shards: tuple[Shard, ...]
    shard_tokens: tuple[int, ...]  # of each of the shards
    lengths: npt.NDArray[np.int64]
    reasons: Counter[str]
    truncated_rows: int
    control_token_rows: int
    cached_rows: int
    fresh_tokens: int
    copies: int  # rows that are equal to an earlier one of the group, among those that are not cached
    copied_tokens: int
    batches: Batches
    held_bytes: int  # while the group is at work
    read_sec: float
    read_work_sec: float
    cache_sec: float
    pack_sec: float

    @property
    def prompts(self) -> int:
        return len(self.lengths)


def groups_of(job: Job, sample: int | None) -> list[tuple[Shard, ...]]:
    """All shards, or of `sample` rows as many whole shards as they are, else stretches, spread evenly over the input."""
    rows, shards = job.plan.rows, job.shards
    if sample is None or sample >= rows:
        return [(shard,) for shard in shards]
    size = job.config.shard_rows
    if sample >= size:
        number = sample // size
        return [(shards[(2 * i + 1) * (rows // size) // (2 * number)],) for i in range(number)]
    number = min(sample, STRETCHES)
    parts = [(_share(rows, number, i), _share(sample, number, i)) for i in range(number)]
    # Of each of as many equal parts of the input, the rows in its middle.
    some = [min(of_sample, of_input) for (_, of_input), (_, of_sample) in parts]
    starts = [first + (of_input - n) // 2 for ((first, of_input), _), n in zip(parts, some, strict=True)]
    return [tuple(Shard(i, start, n) for i, (start, n) in enumerate(zip(starts, some, strict=True)) if n)]


def _share(whole: int, number: int, i: int) -> tuple[int, int]:
    """Where part i of `number` equal ones begins, and its size."""
    return whole * i // number, whole * (i + 1) // number - whole * i // number


class Surveyor:
    """Reads groups and counts what is in them.

    plain: whether the encoder is the plain one. max_batch_tokens: as the job says, or as a probe found.
    """

    def __init__(self, job: Job, cache: VectorCache | None) -> None:
        self._job, self._cache = job, cache
        self._reader = ShardReader(job.plan, job.config)
        self._seen: set[bytes] = set()
        self.copies = 0  # rows that are equal to an earlier one of all rows
        self.plain = job.encoder == "plain"
        self.max_batch_tokens = job.max_batch_tokens

    def load(self, shards: tuple[Shard, ...]) -> Loaded:
        """Raises: InputError."""
        job, watch = self._job, Stopwatch()
        parts = tuple(read_rows(self._reader, job.tokenize, job.plan, job.config.id_column, shard) for shard in shards)
        read_sec, read_work_sec, began = watch.sec, watch.work_sec, time.perf_counter()
        input_ids = [ids for part in parts for ids in part.input_ids]
        fresh = input_ids
        if self._cache is not None:
            fresh = [input_ids[i] for i in np.flatnonzero(~self._cache.look_up(input_ids).found)]
        return Loaded(shards, parts, fresh, read_sec, read_work_sec, time.perf_counter() - began)

    def known_vectors(self, loaded: Loaded) -> npt.NDArray[np.float32]:
        """[m, d] what the cache knows of a group."""
        assert self._cache is not None
        known = self._cache.look_up(loaded.input_ids)
        return known.vectors[known.found]

    def count(self, loaded: Loaded) -> Group:
        input_ids = loaded.input_ids
        for key in keys_of(input_ids):
            self.copies += (name := key.tobytes()) in self._seen
            self._seen.add(name)
        began = time.perf_counter()
        found = distinct(loaded.fresh)
        batches = self.batches(loaded.fresh, found.prompts)
        pack_sec = time.perf_counter() - began
        lengths = np.fromiter(map(len, input_ids), np.int64, len(input_ids))
        fresh_tokens = sum(map(len, loaded.fresh))
        return Group(
            rows=sum(shard.rows for shard in loaded.shards),
            shards=loaded.shards,
            shard_tokens=tuple(part.tokens for part in loaded.rows),
            lengths=lengths,
            reasons=Counter(reason for part in loaded.rows for reason in part.rejects["reason"].to_pylist()),
            truncated_rows=sum(part.truncated_rows for part in loaded.rows),
            control_token_rows=sum(part.control_token_rows for part in loaded.rows),
            cached_rows=len(input_ids) - len(loaded.fresh),
            fresh_tokens=fresh_tokens,
            copies=len(loaded.fresh) - len(found.prompts),
            copied_tokens=fresh_tokens - sum(map(len, found.prompts)),
            batches=batches,
            held_bytes=sum(map(_held_bytes, loaded.rows)),
            read_sec=loaded.read_sec,
            read_work_sec=loaded.read_work_sec,
            cache_sec=loaded.cache_sec,
            pack_sec=pack_sec,
        )

    def batches(self, fresh: Sequence[Ids], prompts: Sequence[Ids]) -> Batches:
        """Of prompts as they are, and of the distinct ones among them."""
        if self.plain:
            lengths = np.fromiter(map(len, fresh), np.int64, len(fresh))
            sizes = [(len(rows), int(lengths[rows[0]])) for rows in padded_batches(lengths, self.max_batch_tokens)]
            padded = tuple(Batch(rows * longest, rows * longest * longest) for rows, longest in sizes)
            return Batches((), padded, int(lengths.sum()), 0, 0)
        if self._job.encoder == "vllm":
            return self._steps(prompts if self._job.config.share else fresh)
        share, chunk = self._job.config.share, CHUNK[self._job.device.partition(":")[0]]
        packing = packing_of(prompts if share else fresh, share)
        row, side_by_side = row_tokens(self.max_batch_tokens, chunk), lanes(self._job.device.partition(":")[0])

        def batch(members: list[int], prefixes: list[int]) -> Batch:
            tokens, pairs = packing.work(members, prefixes)
            return Batch(-(-tokens // chunk) * chunk, pairs)

        first = list(packing.prefix_rows(row, chunk))
        done = [i for _, members in first for i in members]
        own = tuple(batch(members, []) for members in packing.own_rows(done, row, chunk, side_by_side))
        prefixes = tuple(batch(members, chain) for chain, members in first)
        saved = sum(map(len, packing.prompts)) - packing.tokens
        kept = sum(prefix.end for prefix in packing.sharing.prefixes)
        return Batches(prefixes, own, packing.tokens, saved, kept)

    def _steps(self, prompts: Sequence[Ids]) -> Batches:
        """Of vLLM, about: its cache of prefixes has whole blocks, and a step ends where a prompt does not fit."""
        share = self._job.config.share and self._job.folder is not None and self._job.folder.pooling in SHARING
        packing = packing_of(prompts, share)
        full, rest = divmod(packing.tokens, self.max_batch_tokens)
        steps = tuple(Batch(cells, 0) for cells in [self.max_batch_tokens] * full + [rest] * (rest > 0))
        return Batches((), steps, packing.tokens, sum(map(len, prompts)) - packing.tokens, 0)


def _held_bytes(rows: ShardRows) -> int:
    columns = [rows.columns, *(c for c in (rows.exclude, rows.candidates) if c is not None)]
    ids = sum(ids.nbytes for ids in rows.input_ids)
    return ids + OBJECT_BYTES * len(rows.input_ids) + sum(int(column.nbytes) for column in columns)
