"""The job, told once: prompts in Parquet → tokens → one prefill pass → vectors → exact top-k → Parquet.

`run` plans and checks everything, takes up what an earlier run left, lets an engine do the shards, and publishes.
`finish` publishes what slices of a run (--shard-of) have done. Who does a shard is a Worker (worker.py).
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from prefill_cli.config import RunConfig, from_dict
from prefill_cli.data import expected, results
from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.errors import OutputError, TooManyRejectsError, os_errors_as
from prefill_cli.job import Job
from prefill_cli.places import Place, beside
from prefill_cli.planning import PLANS, staging_of
from prefill_cli.summary import manifest_of, totals_of

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Whoever watches a run."""

    def start(self, rows: int, done: int) -> None: ...

    def advance(self, rows: int, tokens: int) -> None: ...


class Engine(Protocol):
    """Who runs which shard: yields each with its receipt once its files are in place."""

    def __call__(self, job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]: ...


def run(config: RunConfig, engine: Engine, progress: Progress, kind: str = "run") -> dict[str, Any]:
    """Do the whole job and publish it, or a slice of it, which is not published; returns the totals. kind: see PLANS.

    Raises:
        PrefillScoreError: one of its kinds; what is done is kept for the same command.
    """
    began = time.perf_counter()
    job, fingerprint = PLANS[kind](config)
    staging = job.staging
    with staging.locked():
        command = {"kind": kind, "options": config.without("shard_of").as_dict(), "folder": os.getcwd()}
        with os_errors_as(OutputError, "--output"):
            choices = staging.begin(fingerprint, job.choices, config.overwrite, command)
        if choices is None:
            log.info("%s holds this very result already; nothing to do", staging.out)
            return staging.totals() | {"status": "unchanged", "output": str(staging.out)}
        job = replace(job, **choices)
        found = {shard: receipt for shard in job.own_shards if (receipt := staging.receipt(shard))}
        # A shard that was given up is tried again, unless by `finish`, which does nothing.
        as_it_is = engine is _none_missing
        receipts = {shard: kept for shard, kept in found.items() if as_it_is or "worker_died" not in kept["reasons"]}
        expectation = None if receipts else expected.find(fingerprint, job.pace)  # of a run that does everything itself
        if receipts:
            budget = next(iter(receipts.values())).get("max_batch_tokens", job.max_batch_tokens)
            job = replace(job, max_batch_tokens=budget, probe=False)  # what a probe found before is not asked again
            log.info("going on after an earlier run: %d of %d shards are done", len(receipts), len(job.own_shards))
        try:
            _do_missing(job, engine, progress, receipts, began)
        except BaseException:
            if not staging.has_receipts() and not config.slice:  # nothing to take up, so nothing to leave
                with contextlib.suppress(OutputError):  # what ended the run is told, not that its leftovers resist
                    staging.discard()
            raise
        in_order = [receipts[shard] for shard in job.own_shards]
        totals = totals_of(job, in_order, time.perf_counter() - began)
        if config.slice:
            missing = sum(staging.receipt(shard) is None for shard in job.shards)
            return totals | {"status": "slice done", "slice": config.shard_of, "missing_shards": missing}
        staging.publish(manifest_of(job, fingerprint, in_order, totals, expectation))
    return totals


def _do_missing(job: Job, engine: Engine, progress: Progress, receipts: dict[Shard, Receipt], began: float) -> None:
    """Let the engine do the shards that have no receipt, and commit each."""
    progress.start(sum(shard.rows for shard in job.own_shards), sum(shard.rows for shard in receipts))
    reasons: Counter[str] = sum((Counter(receipt["reasons"]) for receipt in receipts.values()), Counter())
    fresh: Counter[str] = Counter()  # what this run did itself
    _check_rejects(job, reasons)
    # Closed in any case, so that nothing of it still writes when the lock goes.
    with contextlib.closing(engine(job, [s for s in job.own_shards if s not in receipts], progress)) as doing:
        for shard, receipt in doing:
            job.staging.commit(shard, receipt)
            receipts[shard] = receipt
            fresh.update({name: receipt[name] for name in ("rows", "tokens")})
            _tell(job, shard, receipt, fresh, max(time.perf_counter() - began, 1e-9))
            reasons.update(receipt["reasons"])
            _check_rejects(job, reasons)


def finish(out: Place, progress: Progress, max_rejects: str | None = None) -> dict[str, Any]:
    """Publish what slices of a run have done; returns the totals.

    Raises:
        OutputError: nothing was begun there; a shard is missing. PrefillScoreError: what `run` raises.
    """
    command = staging_of(out, with_files=True).command()
    if command is None:
        raise OutputError(f"{out}: no run that was begun is waiting there; `run --shard-of` begins one")
    where = out.absolute() if isinstance(out, Path) else out
    if command["folder"] != os.getcwd():
        log.info("going on in %s, where the run was begun", command["folder"])
        with os_errors_as(OutputError, str(out)):
            os.chdir(command["folder"])
    config = replace(from_dict(command["options"]), output=where)
    config = config if max_rejects is None else replace(config, max_rejects=max_rejects)
    return run(config, _none_missing, progress, command["kind"])


def _none_missing(job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]:
    """The engine of `finish`, which does nothing.

    Raises:
        OutputError: there is something to do.
    """
    if shards:
        numbers = ", ".join(str(shard.index) for shard in shards[:5]) + (", …" if len(shards) > 5 else "")
        raise OutputError(
            f"{job.staging.out}: {len(shards)} of {len(job.shards)} shards are not done (from 0: {numbers}); start the "
            "slices again that did not end, or do the rest with the same command without --shard-of, which publishes too"
        )
    yield from ()


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
