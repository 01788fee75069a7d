"""The job, told once: prompts in Parquet → tokens → one prefill pass → vectors → exact top-k → Parquet.

`run` plans and checks everything, takes up what an earlier run left, lets an engine do the shards, and publishes.
`Worker.score` does one shard and is all that an engine calls.
"""

import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli.config import RunConfig
from prefill_cli.data import manifest, results
from prefill_cli.data.inputs import InputPlan, Shard, plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rejects import Reject
from prefill_cli.data.rows import ShardRows, read_rows
from prefill_cli.data.staging import Receipt, Staging, locked, output_folder
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.encoding.encoder import Encoder
from prefill_cli.encoding.loading import ModelFolder, choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.errors import PrefillScoreError, TooManyRejects
from prefill_cli.scoring.filters import Filters, ItemIndex
from prefill_cli.scoring.items import Items, check_provenance, load_items
from prefill_cli.scoring.topk import overflowing, search

log = logging.getLogger(__name__)
AUTO_BATCH_TOKENS = {"cpu": 8_192, "mps": 16_384, "cuda": 65_536}


class Progress(Protocol):
    """Whoever watches a run."""

    def start(self, rows: int, done: int) -> None: ...

    def advance(self, rows: int, tokens: int) -> None: ...


class Engine(Protocol):
    """Who runs which shard: yields each with its receipt once its files are in place."""

    def __call__(self, job: "Job", shards: Sequence[Shard], progress: Progress) -> Iterator[tuple[Shard, Receipt]]: ...


@dataclass(frozen=True)
class Job:
    """Everything that is the same for all shards of a run."""

    config: RunConfig
    plan: InputPlan
    folder: ModelFolder
    items: Items
    allowed: npt.NDArray[np.bool_] | None  # [N] items that anybody may get; None: all
    unknown_ids: int  # in --allow and --deny
    form: results.Format
    device: str
    dtype: str
    max_batch_tokens: int
    staging: Staging

    @property
    def shards(self) -> list[Shard]:
        return self.plan.shards(self.config.shard_rows)


def run(config: RunConfig, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Do the whole job and publish it; returns the totals.

    Raises:
        PrefillScoreError: one of its kinds; what is done is kept for the same command.
    """
    began = time.perf_counter()
    job, fingerprint = _plan(config)
    staging = job.staging
    with locked(staging.out):
        choices = staging.begin(fingerprint, {"max_batch_tokens": job.max_batch_tokens}, config.overwrite)
        if choices is None:
            return _already_there(staging.out)
        job = replace(job, **choices)
        receipts = {shard: receipt for shard in job.shards if (receipt := staging.receipt(shard))}
        if receipts:
            log.info("going on after an earlier run: %d of %d shards are done", len(receipts), len(job.shards))
        progress.start(job.plan.rows, sum(shard.rows for shard in receipts))
        try:
            _check_rejects(job, receipts.values())
            for shard, receipt in engine(job, [s for s in job.shards if s not in receipts], progress):
                staging.commit(shard, receipt)
                receipts[shard] = receipt
                _check_rejects(job, receipts.values())
        except BaseException:
            if not staging.has_receipts():  # nothing to take up, so nothing to leave
                staging.discard()
            raise
        totals = _totals(job, [receipts[shard] for shard in job.shards], time.perf_counter() - began)
        staging.publish(_manifest(job, fingerprint, totals))
    return totals


class Worker:
    """A loaded model, a reader and an index: scores shards, one at a time."""

    def __init__(self, job: Job) -> None:
        config, folder = job.config, job.folder
        self._job = job
        self._reader = ShardReader(job.plan, config)
        tokenizer = load_tokenizer(str(folder.path), config)
        self._tokenize = PromptTokenizer(tokenizer, config, folder.positions, folder.vocabulary)
        self._encoder = _load_encoder(job)
        self._index = ItemIndex(job.items.ids)

    def score(self, shard: Shard, progress: Progress) -> Receipt:
        """Write the part and the rejects of a shard; returns what its receipt says."""
        job, staging = self._job, self._job.staging
        rows = read_rows(self._reader, self._tokenize, job.plan, job.config.id_column, shard)
        encode_began = time.perf_counter()
        encoded = self._encoder.encode(rows.input_ids, progress.advance)
        encode_sec = time.perf_counter() - encode_began
        progress.advance(shard.rows - len(rows.input_ids), 0)
        rows, vectors = _only_scorable(rows, encoded.vectors, job)
        filters = self._index.filters(rows.exclude, rows.candidates)
        found = _Lists(job, rows.columns, vectors, filters)
        entries = results.write_part(staging.part(shard), job.form, found)
        results.write_rejects(staging.rejects(shard), rows.rejects)
        return {
            "rows": shard.rows,
            "rows_out": len(rows.input_ids),
            "rejects": rows.rejects.num_rows,
            "reasons": Counter(rows.rejects["reason"].to_pylist()),
            "part_rows": entries,
            "tokens": rows.tokens,
            "computed_tokens": encoded.computed_tokens,
            "truncated_rows": rows.truncated_rows,
            "control_token_rows": rows.control_token_rows,
            "retried_rows": encoded.retried_rows,
            "empty_lists": found.empty_lists,
            "unknown_ids": filters.unknown_ids,
            "batches": encoded.batches,
            "encode_sec": encode_sec,
            "search_sec": found.search_sec,
        }


class _Lists:
    """The row groups of a part, searched as they are written; counts on the way."""

    def __init__(self, job: Job, columns: pa.Table, vectors: npt.NDArray[np.float32], filters: Filters) -> None:
        self._job, self._columns, self._vectors, self._filters = job, columns, vectors, filters
        self.empty_lists = 0
        self.search_sec = 0.0

    def __iter__(self) -> Iterator[tuple[pa.Table, results.Lists]]:
        job = self._job
        k = min(job.config.top_k, len(job.items))
        step = results.group_rows(k)
        for start in range(0, len(self._vectors), step):
            began = time.perf_counter()
            vectors = self._vectors[start : start + step]
            filters = self._filters.of_users(start, start + step)
            top = search(vectors, job.items, k, filters, job.allowed, job.device)
            lists = results.Lists(top.offsets, job.items.ids.take(pa.array(top.rows)), top.scores)
            self.empty_lists += int((np.diff(top.offsets) == 0).sum())
            self.search_sec += time.perf_counter() - began
            yield self._columns.slice(start, step), lists


def _only_scorable(
    rows: ShardRows, vectors: npt.NDArray[np.float32], job: Job
) -> tuple[ShardRows, npt.NDArray[np.float32]]:
    """Rows and vectors less those whose vector has no score; [n, d] each."""
    checks = (
        ("the model gives a vector that is not finite, in float32 and alone too", lambda v: ~np.isfinite(v).all(axis=1)),
        ("its scores would leave the range of float32", lambda v: overflowing(v, job.items)),
        ("its vector has zero length and so no direction", lambda v: ~v.any(axis=1) & _normalizes(job.config)),
    )
    for detail, is_bad in checks:
        bad = is_bad(vectors)
        rows, vectors = rows.without(bad, Reject("not_finite", detail)), vectors[~bad]
    return rows, vectors


def _normalizes(config: RunConfig) -> bool:
    return config.normalize or config.score == "cosine"


def _load_encoder(job: Job) -> Encoder:
    from prefill_cli.encoding.plain import PlainEncoder

    config = job.config
    return PlainEncoder(
        load_base_model(job.folder, job.device, job.dtype, config.trust_remote_code),
        pooling=job.folder.pooling,
        dims=config.dims,
        normalize=_normalizes(config),
        max_batch_tokens=job.max_batch_tokens,
    )


def _plan(config: RunConfig) -> tuple[Job, manifest.Fingerprint]:
    """Find and check everything that can be wrong, cheapest first, before any weight is read."""
    out = output_folder(config)
    plan = plan_inputs(config)
    folder = open_model_folder(config)
    items = load_items(config, folder.hidden_size)
    form = results.plan_format(config, plan, items.ids.type)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    made_with = {"model_sha256": folder.weights_sha256, "pooling": folder.pooling, "dims": config.dims}
    if "model_sha256" not in items.provenance:
        made_with |= {"model": config.model, "revision": config.revision}
    check_provenance(items, config, made_with)
    allowed, unknown, digests = _allowed_items(config, items)
    job = Job(
        config=config,
        plan=plan,
        folder=folder,
        items=items,
        allowed=allowed,
        unknown_ids=unknown,
        form=form,
        device=device,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or AUTO_BATCH_TOKENS[device.partition(":")[0]],
        staging=Staging(out),
    )
    log.info("%d rows in %d files, %d items, %s in %s on %s", plan.rows, len(plan.files), len(items), config.model, dtype,
             device)
    return job, _fingerprint(job) | digests


def _allowed_items(config: RunConfig, items: Items) -> tuple[npt.NDArray[np.bool_] | None, int, dict[str, str]]:
    """--allow and --deny as one mask, their unknown ids, and digests of which items they named."""
    if not (config.allow or config.deny):
        return None, 0, {}
    index, allowed, unknown = ItemIndex(items.ids), np.ones(len(items), bool), 0
    if config.allow:
        rows, missing = index.rows_in_file(config.allow, config.item_id_column)
        allowed[:] = False
        allowed[rows] = True
        unknown += missing
    if config.deny:
        rows, missing = index.rows_in_file(config.deny, config.item_id_column)
        allowed[rows] = False
        unknown += missing
    return allowed, unknown, {"allow_and_deny_sha256": manifest.digest(allowed.tobytes())}


def _fingerprint(job: Job) -> manifest.Fingerprint:
    """What the answer depends on, by names that users know."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in job.config.answer_options().items()}
    return options | {
        "device": job.device.partition(":")[0],
        "dtype": job.dtype,
        "pooling": job.folder.pooling,
        "inputs_sha256": manifest.input_fingerprint(job.plan),
        "model_weights_sha256": job.folder.weights_sha256,
        "model_files_sha256": job.folder.files_sha256,
        "items_sha256": job.items.sha256,
    }


def _check_rejects(job: Job, receipts: "Sequence[Receipt] | Any") -> None:
    """Stop as soon as there are more rejects than allowed: what is done is kept for a higher limit."""
    reasons: Counter[str] = Counter()
    for receipt in receipts:
        reasons.update(receipt["reasons"])
    allowed = job.config.allowed_rejects(job.plan.rows)
    if reasons.total() > allowed:
        raise TooManyRejects(
            f"{reasons.total()} of {job.plan.rows} rows are rejected so far ({_counted(reasons)}), more than --max-rejects "
            f"{job.config.max_rejects} allows ({allowed}); nothing was published, the rejects are in "
            f"{job.staging.result / results.REJECTS_FOLDER}, and the same command with a higher limit goes on from here"
        )


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def _totals(job: Job, receipts: list[Receipt], wall_sec: float) -> dict[str, Any]:
    """The summary: sums over the shards, whichever run did them."""
    summed = ("rows", "rows_out", "rejects", "tokens", "computed_tokens", "truncated_rows", "control_token_rows",
              "retried_rows", "empty_lists", "unknown_ids", "batches", "part_rows", "encode_sec", "search_sec")
    sums = {name: sum(receipt[name] for receipt in receipts) for name in summed}
    if sums["rows"] != job.plan.rows or sums["rows"] != sums["rows_out"] + sums["rejects"]:
        raise PrefillScoreError(f"rows are unaccounted for: {job.plan.rows} in, {sums['rows_out']} out, {sums['rejects']} rejected")
    return {
        "status": "done",
        "output": str(job.staging.out),
        **sums,
        "unknown_ids": sums["unknown_ids"] + job.unknown_ids,
        "dropped_items": job.items.dropped,
        "shards": len(receipts),
        "wall_sec": wall_sec,
        "tokens_per_sec": sums["tokens"] / sums["encode_sec"] if sums["encode_sec"] else 0.0,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "device": job.device,
        "dtype": job.dtype,
    }


def _manifest(job: Job, fingerprint: manifest.Fingerprint, totals: dict[str, Any]) -> dict[str, Any]:
    folder, items = job.folder, job.items
    return {
        "made_by": "prefill-score",
        "format_version": manifest.FORMAT_VERSION,
        "options": job.config.as_dict(),
        "fingerprint": fingerprint,
        "versions": manifest.versions(),
        "inputs": manifest.describe_inputs(job.plan),
        "model": {
            "name": folder.name,
            "revision": job.config.revision,
            "architecture": type(folder.config).__name__,
            "hidden_size": folder.hidden_size,
            "pooling": folder.pooling,
            "weights_sha256": folder.weights_sha256,
            "max_batch_tokens": job.max_batch_tokens,
        },
        "items": {"path": str(job.config.items), "items": len(items), "width": items.width, "sha256": items.sha256},
        "environment": manifest.environment(),
        "totals": totals,
    }


def _already_there(out: Path) -> dict[str, Any]:
    log.info("%s holds this very result already; nothing to do", out)
    totals: dict[str, Any] = (manifest.read_manifest(out) or {})["totals"]
    return totals | {"status": "unchanged"}
