"""The job, told once: prompts in Parquet → tokens → one prefill pass → vectors → exact top-k → Parquet.

`run` plans and checks everything, takes up what an earlier run left, lets an engine do the shards, and publishes.
A `Worker` does a shard in three steps, `read`, `encode` and `finish`, which an engine may overlap over shards.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prefill_cli.config import RunConfig
from prefill_cli.data import expected, manifest, results
from prefill_cli.data.cache import Known
from prefill_cli.data.inputs import Shard
from prefill_cli.data.lengths import histogram
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rows import ShardRows, read_rows
from prefill_cli.data.staging import Receipt
from prefill_cli.data.tokenization import Ids
from prefill_cli.encoding.encoder import Encoded, Encoder, OnBatch
from prefill_cli.encoding.loading import load_base_model
from prefill_cli.encoding.stored import StoredVectors
from prefill_cli.errors import ModelError, OutputError, TooManyRejectsError, os_errors_as
from prefill_cli.job import CHECKED_PROMPTS, Job
from prefill_cli.machine import threads
from prefill_cli.outcome import only_finite, outcome_of
from prefill_cli.places import beside
from prefill_cli.planning import plan_embed, plan_job, plan_search
from prefill_cli.summary import manifest_of, totals_of

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Whoever watches a run."""

    def start(self, rows: int, done: int) -> None: ...

    def advance(self, rows: int, tokens: int) -> None: ...


class Engine(Protocol):
    """Who runs which shard: yields each with its receipt once its files are in place."""

    def __call__(self, job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]: ...


__all__ = ["plan_embed", "plan_job", "plan_search", "run"]
Plan = Callable[[RunConfig], tuple[Job, manifest.Fingerprint]]


def run(config: RunConfig, engine: Engine, progress: Progress, plan: Plan = plan_job) -> dict[str, Any]:
    """Do the whole job and publish it; returns the totals. plan: which of the three jobs it is.

    Raises:
        PrefillScoreError: one of its kinds; what is done is kept for the same command.
    """
    began = time.perf_counter()
    job, fingerprint = plan(config)
    staging = job.staging
    with staging.locked():
        with os_errors_as(OutputError, "--output"):
            choices = staging.begin(fingerprint, job.choices, config.overwrite)
        if choices is None:
            log.info("%s holds this very result already; nothing to do", staging.out)
            return staging.totals() | {"status": "unchanged", "output": str(staging.out)}
        job = replace(job, **choices)
        receipts = {shard: receipt for shard in job.shards if (receipt := staging.receipt(shard))}
        expectation = None if receipts else expected.find(fingerprint, job.pace)  # of a run that does everything itself
        if receipts:
            budget = next(iter(receipts.values())).get("max_batch_tokens", job.max_batch_tokens)
            job = replace(job, max_batch_tokens=budget, probe=False)  # what a probe found before is not asked again
            log.info("going on after an earlier run: %d of %d shards are done", len(receipts), len(job.shards))
        progress.start(job.plan.rows, sum(shard.rows for shard in receipts))
        reasons: Counter[str] = sum((Counter(receipt["reasons"]) for receipt in receipts.values()), Counter())
        fresh: Counter[str] = Counter()  # what this run did itself
        try:
            _check_rejects(job, reasons)
            # Closed in any case, so that nothing of it still writes when the lock goes.
            with contextlib.closing(engine(job, [s for s in job.shards if s not in receipts], progress)) as doing:
                for shard, receipt in doing:
                    staging.commit(shard, receipt)
                    receipts[shard] = receipt
                    fresh.update({name: receipt[name] for name in ("rows", "tokens")})
                    _tell(job, shard, receipt, fresh, max(time.perf_counter() - began, 1e-9))
                    reasons.update(receipt["reasons"])
                    _check_rejects(job, reasons)
        except BaseException:
            if not staging.has_receipts():  # nothing to take up, so nothing to leave
                with contextlib.suppress(OutputError):  # what ended the run is told, not that its leftovers resist
                    staging.discard()
            raise
        in_order = [receipts[shard] for shard in job.shards]
        totals = totals_of(job, in_order, time.perf_counter() - began)
        staging.publish(manifest_of(job, fingerprint, in_order, totals, expectation))
    return totals


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
    """A loaded model, a reader and an index: does shards, each in three steps that take shards in the same order."""

    def __init__(self, job: Job) -> None:
        began = time.perf_counter()
        self._job = job
        self._reader = ShardReader(job.plan, job.config)
        self._encoder: Encoder | None = None if job.folder else StoredVectors(job.config.dims, job.normalizes)
        self._outcome = outcome_of(job)
        self._cache = job.open_cache()
        self._start_sec = time.perf_counter() - began

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
        job, staging, shard, encoded = self._job, self._job.staging, done.read.shard, done.encoded
        began = time.perf_counter()
        if self._cache is not None and done.read.known:
            self._cache.add(done.read.known.keys[done.fresh], encoded.vectors[done.fresh])
        cache_sec = time.perf_counter() - began
        began = time.perf_counter()
        finite = only_finite(done.read.rows, encoded.vectors, encoded.out_of_memory, job.user_width)
        rows, vectors = self._outcome.fit(*finite)
        written = self._outcome.write(staging.part(shard), rows, vectors)
        results.write_rejects(staging.rejects(shard), rows.rejects)
        self._outcome.check_unchanged()
        if job.folder:
            job.folder.check_unchanged()
        return {
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
            "threads": threads(),
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


def _tell(job: Job, shard: Shard, receipt: Receipt, fresh: Counter[str], sec: float) -> None:
    """That a shard is committed, and how fast this run has been so far."""
    told = {name: receipt[name] for name in ("rows", "cached_rows", "rejects")}
    rates = {"rows_per_sec": round(fresh["rows"] / sec, 1), "tokens_per_sec": round(fresh["tokens"] / sec)}
    log.info(
        "shard %d of %d done: %s rows, %s rows/s, %s tokens/s, %s cached, %s rejected",
        shard.index + 1,
        len(job.shards),
        f"{told['rows']:,}",
        f"{rates['rows_per_sec']:,.0f}",
        f"{rates['tokens_per_sec']:,}",
        f"{told['cached_rows']:,}",
        f"{told['rejects']:,}",
        extra={"figures": {"shard": shard.index, "shards": len(job.shards), **told, **rates}},
    )


def _check_rejects(job: Job, reasons: Counter[str]) -> None:
    """Stop as soon as there are more rejects than allowed: what is done is kept for a higher limit."""
    allowed = job.config.allowed_rejects(job.plan.rows)
    if reasons.total() > allowed:
        raise TooManyRejectsError(
            f"{reasons.total()} of {job.plan.rows} rows are rejected so far ({_counted(reasons)}), more than --max-rejects "
            f"{job.config.max_rejects} allows ({allowed}); nothing was published, the rejects are in "
            f"{beside(job.staging.result, results.REJECTS_FOLDER)}, and the same command with a higher limit goes on "
            "from here"
        )


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
