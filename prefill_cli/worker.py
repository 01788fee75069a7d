"""Who does a shard: a loaded model, a reader and an index, in this process or in one of several.

Three steps, `read`, `encode` and `finish`, which may overlap over shards.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli import machine
from prefill_cli.data import manifest, results
from prefill_cli.data.cache import Known
from prefill_cli.data.inputs import Shard
from prefill_cli.data.lengths import histogram
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rejects import Reject
from prefill_cli.data.rows import ShardRows, read_rows
from prefill_cli.data.staging import Receipt
from prefill_cli.data.tokenization import Ids, Tokenized
from prefill_cli.encoding.encoder import Encoded, Encoder, OnBatch
from prefill_cli.encoding.loading import load_base_model
from prefill_cli.encoding.stored import StoredVectors
from prefill_cli.errors import ModelError
from prefill_cli.job import CHECKED_PROMPTS, Job
from prefill_cli.outcome import only_finite, outcome_of


@dataclass(frozen=True)
class Read:
    """A shard's rows, tokenised."""

    shard: Shard
    rows: ShardRows
    known: Known | None  # what a cache knows of them
    sec: float
    cache_sec: float


@dataclass(frozen=True)
class Vectors:
    """The same, with vectors. `start_sec`: loading, checking and compiling before it, where it is the first."""

    read: Read
    encoded: Encoded
    encoder: str
    max_batch_tokens: int
    sec: float
    start_sec: float
    fresh: npt.NDArray[np.int64]  # rows that were encoded now


class Worker:
    """Does shards. name: for the manifest, where there are several."""

    def __init__(self, job: Job, name: str = "") -> None:
        began = time.perf_counter()
        self._job, self._name = job, name
        self._drafts = job.staging.drafts
        self._turns = {step: threading.Lock() for step in ("read", "encode", "finish")}
        self._reader = ShardReader(job.plan, job.config)
        self._encoder: Encoder | None = None if job.folder else StoredVectors(job.config.dims, job.normalizes)
        self._outcome = outcome_of(job)
        self._cache = job.open_cache()
        self._start_sec = time.perf_counter() - began

    def do(self, shard: Shard, on_batch: OnBatch) -> Receipt:
        """All of a shard. Where several threads do one each, each of the three steps is taken by one at a time."""
        with self._turns["read"]:
            read = self.read(shard)
        with self._turns["encode"]:
            vectors = self.encode(read, on_batch)
        with self._turns["finish"]:
            machine.use_all_threads()
            return self.finish(vectors)

    def give_up(self, shard: Shard, why: str) -> Receipt:
        """A shard whose rows are all rejected, unless they are for a reason of their own."""

        def refuse(prompts: pa.Array) -> Tokenized:
            return Tokenized([None] * len(prompts), dict.fromkeys(range(len(prompts)), Reject("worker_died", why)))

        rows = read_rows(self._reader, refuse, self._job.plan, self._job.config.id_column, shard)
        nothing = Encoded(np.empty((0, self._job.user_width), np.float32), 0, 0, 0, np.empty(0, np.int64))
        read = Read(shard, rows, None, 0.0, 0.0)
        return self.finish(Vectors(read, nothing, "", self._job.max_batch_tokens, 0.0, 0.0, np.empty(0, np.int64)))

    def read(self, shard: Shard) -> Read:
        """Read, tokenise, and look up what is known."""
        began = time.perf_counter()
        rows = read_rows(self._reader, self._job.tokenize, self._job.plan, self._job.config.id_column, shard)
        middle = time.perf_counter()
        known = self._cache.look_up(rows.input_ids) if self._cache is not None else None
        return Read(shard, rows, known, middle - began, time.perf_counter() - middle)

    def encode(self, read: Read, on_batch: OnBatch) -> Vectors:
        """The prefill pass, for what is not known. The first prompts of all also decide whether the fast encoder serves."""
        job, input_ids, known = self._job, read.rows.input_ids, read.known
        fresh = np.arange(len(input_ids)) if known is None else np.flatnonzero(~known.found)
        if len(fresh) < len(input_ids):
            on_batch(len(input_ids) - len(fresh), 0)
        if not len(fresh):
            start_sec, self._start_sec = self._start_sec, 0.0
            empty = np.empty((0, job.user_width), np.float32) if known is None else known.vectors
            nothing = Encoded(empty, 0, 0, 0, np.empty(0, np.int64))
            return Vectors(read, nothing, "", job.max_batch_tokens, 0.0, start_sec, fresh)
        missing = [input_ids[i] for i in fresh]
        if self._encoder is None:
            began = time.perf_counter()
            self._encoder = self._choose_encoder(missing[:CHECKED_PROMPTS], len(missing) / len(input_ids))
            self._start_sec += time.perf_counter() - began
        start_sec, self._start_sec = self._start_sec, 0.0  # told with the first shard
        began = time.perf_counter()
        encoded = self._encoder.encode(missing, on_batch)
        sec = time.perf_counter() - began
        if job.folder and encoded.vectors.shape[1] != job.user_width and len(encoded.out_of_memory) < len(missing):
            raise ModelError(
                f"{job.folder.path}: the model gives vectors of {encoded.vectors.shape[1]}, not of "
                f"{job.folder.hidden_size} as its config.json says"
            )
        if known is not None:
            encoded = _among_known(known, fresh, encoded)
        return Vectors(read, encoded, self._encoder.name, self._encoder.max_batch_tokens, sec, start_sec, fresh)

    def close(self) -> None:
        """Leave word in the cache of what was used."""
        if self._cache is not None:
            self._cache.close()

    def finish(self, done: Vectors) -> Receipt:
        """Search (or not), and write the part and the rejects; returns what the shard's receipt says."""
        job, shard, encoded = self._job, done.read.shard, done.encoded
        began = time.perf_counter()
        if self._cache is not None and done.read.known:
            self._cache.add(done.read.known.keys[done.fresh], encoded.vectors[done.fresh])
        cache_sec = time.perf_counter() - began
        began = time.perf_counter()
        finite = only_finite(done.read.rows, encoded.vectors, encoded.out_of_memory, job.user_width)
        rows, vectors = self._outcome.fit(*finite)
        written = self._outcome.write(self._drafts.part(shard), rows, vectors)
        results.write_rejects(self._drafts.rejects(shard), rows.rejects)
        sizes = self._drafts.deliver(shard)
        self._outcome.check_unchanged()
        if job.folder:
            job.folder.check_unchanged()
        return {
            **sizes,
            **({"worker": self._name, "peak_rss_bytes": manifest.peak_rss_bytes()} if self._name else {}),
            "rows": shard.rows,
            "rows_out": len(rows.input_ids),
            "rejects": rows.rejects.num_rows,
            "reasons": Counter(rows.rejects["reason"].to_pylist()),
            "part_rows": written.rows,
            "tokens": rows.tokens,
            "computed_tokens": encoded.computed_tokens,
            "truncated_rows": rows.truncated_rows,
            "control_token_rows": rows.control_token_rows,
            "retried_rows": encoded.retried_rows,
            "cached_rows": len(done.read.rows.input_ids) - len(done.fresh),
            "empty_lists": written.empty_lists,
            "unknown_ids": written.unknown_ids,
            "batches": encoded.batches,
            "encoder": done.encoder,
            "max_batch_tokens": done.max_batch_tokens,
            "threads": machine.threads(),
            "start_sec": done.start_sec,
            "read_sec": done.read.sec,
            "cache_sec": done.read.cache_sec + cache_sec,
            "encode_sec": done.sec,
            "search_sec": written.search_sec,
            "write_sec": time.perf_counter() - began - written.search_sec,
            "lengths": histogram(map(len, rows.input_ids)) if job.folder else {},
        }

    def _choose_encoder(self, prompts: Sequence[Ids], share: float) -> Encoder:
        from prefill_cli.encoding.choice import choose_encoder, choose_vllm, plain_encoder

        job = self._job
        assert job.folder
        output, remote_code = job.config.from_lm_head, job.config.trust_remote_code
        if output is not None:
            from prefill_cli.encoding.token_rows import load_token_rows

            return load_token_rows(job.folder, output, job.config.dims, job.normalizes, remote_code)
        options = job.encoder_options(job.folder, share)
        if job.encoder == "vllm":
            return choose_vllm(job.folder, options, prompts, job.device, job.tokenize.limit, remote_code)
        model = load_base_model(job.folder, job.device, job.dtype, remote_code)
        if job.encoder == "plain":
            return plain_encoder(model, options)
        return choose_encoder(model, options, prompts)


def _among_known(known: Known, fresh: npt.NDArray[np.int64], encoded: Encoded) -> Encoded:
    """What was encoded now and what was known before, together in the order of the shard's rows."""
    vectors = known.vectors
    if len(encoded.out_of_memory) < len(fresh):  # else there is no vector, and so no width
        vectors[fresh] = encoded.vectors
    return replace(encoded, vectors=vectors, out_of_memory=fresh[encoded.out_of_memory])
