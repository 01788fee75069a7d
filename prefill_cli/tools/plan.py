"""`prefill-score plan` and `run --dry-run`: what a run would do, in tokens, batches, bytes and seconds, before it does any.

Everything that `run` checks first is checked. Rows are read and tokenised as the run does, and a short probe of the model
on this device tells what a batch costs. Nothing is written but the expected time, into the user's cache folder, where the
run finds it and says in its manifest how wrong it was.
"""

import glob
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prefill_cli import machine
from prefill_cli.config import RunConfig, seconds
from prefill_cli.data import expected, manifest
from prefill_cli.data.lengths import histogram
from prefill_cli.data.staging import Outlook
from prefill_cli.encoding.budget import lanes
from prefill_cli.errors import OutputError, TooManyRejectsError, os_errors_as
from prefill_cli.job import Job
from prefill_cli.machine import threads
from prefill_cli.outcome import Outcome
from prefill_cli.planning import plan_embed, plan_job
from prefill_cli.tools.forecast import estimate, probe
from prefill_cli.tools.forecast.survey import Group, Loaded, Surveyor, groups_of

log = logging.getLogger(__name__)
MOST_ROWS = 200_000  # that are read where nobody says how many
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Found:
    """What surveying and probing came to."""

    groups: list[Group]
    surveyor: Surveyor
    encoding: probe.Encoding | None
    finishing: probe.Finishing | None
    start_sec: float  # opening the cache, making lists ready
    probe_sec: float


def plan(config: RunConfig, rows: int | None = None, probe_sec: float = 10.0, dry_run: bool = False) -> dict[str, Any]:
    """What the run of `config` would do.

    rows: how many are read at most, None: all up to MOST_ROWS. probe_sec: how long batches are encoded for a trial, 0: no
    model is loaded. dry_run: whether what is in the way at the output is an error, as it is for the run; else it is told.

    Raises:
        PrefillScoreError: what the run would raise before its model is loaded.
    """
    launch_sec, began = machine.process_sec(), time.perf_counter()
    named = dry_run or bool(config.items and not _names_no_result(config))
    config = config if named else replace(config, output=Path("unnamed"))
    job, fingerprint = plan_job(config) if config.items else plan_embed(config.without("from_lm_head"))
    plan_sec = time.perf_counter() - began
    state, job, done_rows = _outlook(job, fingerprint, dry_run) if named else ({"status": "new", "output": None}, job, 0)
    told: dict[str, Any] = state | {"rows": job.plan.rows, "files": len(job.plan.files), "shards": len(job.shards)}
    if state["status"] == "unchanged" and dry_run:
        return told
    if probe_sec and job.encoder == "vllm":
        log.info("no time is told of --backend vllm, which takes minutes to start; bench --peer vllm measures it")
        probe_sec = 0.0
    base_bytes = machine.resident_bytes()
    found = _look(job, _sample(job, rows), probe_sec)
    told |= _counts(job, found) | _work(job, found)
    told["memory"] = _memory(job, found, base_bytes)
    told["expected"] = None
    if probe_sec and job.plan.rows:
        time_of = _seconds(job, found, plan_sec, (job.plan.rows - done_rows) / job.plan.rows)
        told["expected"] = time_of | {"launch_sec": launch_sec, "command_sec": launch_sec + time_of["wall_sec"]}
        if state["status"] == "new" and job.scoring:
            expected.keep(fingerprint, job.pace, time_of)
    _warn(job, told)
    return told


def too_many_rejects(config: RunConfig, told: dict[str, Any]) -> TooManyRejectsError | None:
    """What the run would end with after all, as far as every row was read."""
    allowed = config.allowed_rejects(told["rows"])
    if told.get("rejects", 0) <= allowed or told["sampled_rows"] < told["rows"]:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in told["reject_reasons"].items())
    return TooManyRejectsError(
        f"{told['rejects']} of {told['rows']} rows would be rejected ({reasons}), more than --max-rejects "
        f"{config.max_rejects} allows ({allowed}); the run would publish nothing"
    )


def _names_no_result(config: RunConfig) -> bool:
    """Whether the run would ask for --output, which a plan can do without."""
    return config.output is None and (len(config.inputs) > 1 or glob.has_magic(config.inputs[0]))


def _outlook(job: Job, fingerprint: manifest.Fingerprint, dry_run: bool) -> tuple[dict[str, Any], Job, int]:
    """What a run would find at its output, the job as it would then be done, and the rows that are done already."""
    told: dict[str, Any] = {"status": "refused", "output": str(job.staging.out), "why": ""}
    try:
        with os_errors_as(OutputError, "--output"):
            outlook: Outlook = job.staging.outlook(fingerprint, job.config.overwrite)
    except OutputError as error:
        if dry_run:
            raise
        return told | {"why": str(error), "done_shards": 0}, job, 0
    job = replace(job, **outlook.choices)
    done = {}
    if outlook.state == "resume":
        done = {shard: receipt for shard in job.shards if (receipt := job.staging.receipt(shard))}
        budget = next(iter(done.values())).get("max_batch_tokens", job.max_batch_tokens) if done else job.max_batch_tokens
        job = replace(job, max_batch_tokens=budget, probe=job.probe and not done)
    return told | {"status": outlook.state, "done_shards": len(done)}, job, sum(shard.rows for shard in done)


def _sample(job: Job, rows: int | None) -> int | None:
    """How many rows to read, None for all."""
    most = MOST_ROWS if rows is None else rows
    return None if most >= job.plan.rows else most


def _look(job: Job, sample: int | None, probe_sec: float) -> Found:
    """Survey the groups; the first that has something to encode is what the probe encodes some of."""
    if probe_sec:
        probe.build_kernels(job)
    outcome, start_sec = probe.prepare(job)
    began = time.perf_counter()
    cache = job.open_cache() if job.cached else None  # opening would make one
    start_sec += time.perf_counter() - began
    surveyor = Surveyor(job, cache)
    groups: list[Group] = []
    encoding = finishing = None
    spent = 0.0
    for shards in groups_of(job, sample):
        loaded = surveyor.load(shards)
        if probe_sec and encoding is None and loaded.fresh:
            began = time.perf_counter()
            encoding = probe.rehearse_encoding(job, loaded.fresh, len(loaded.fresh) / len(loaded.input_ids), probe_sec)
            surveyor.plain, surveyor.max_batch_tokens = encoding.encoder == "plain", encoding.max_batch_tokens
            if job.scoring:
                finishing = probe.rehearse_finishing(outcome, loaded.rows[0], encoding.vectors)
            spent = time.perf_counter() - began
        groups.append(surveyor.count(loaded))
    if probe_sec and finishing is None and cache is not None and job.scoring:
        finishing = _of_known(outcome, surveyor, groups)
    return Found(groups, surveyor, encoding, finishing, start_sec, spent)


def _of_known(outcome: Outcome, surveyor: Surveyor, groups: Sequence[Group]) -> probe.Finishing | None:
    """Where a cache has all vectors there is no model to load, but still something to search for."""
    group = next((g for g in groups if g.cached_rows), None)
    if group is None:
        return None
    loaded: Loaded = surveyor.load(group.shards)
    return probe.rehearse_finishing(outcome, loaded.rows[0], surveyor.known_vectors(loaded))


def _counts(job: Job, found: Found) -> dict[str, Any]:
    """What is in the input, for all of it: counts of a sample are multiplied, and rounded."""
    groups = found.groups
    sampled = sum(group.rows for group in groups)
    scale = job.plan.rows / sampled if sampled else 1.0
    lengths = np.concatenate([np.empty(0, np.int64), *(group.lengths for group in groups)])
    reasons: Counter[str] = sum((group.reasons for group in groups), Counter())

    def of_all(count: float) -> int:
        return round(scale * count)

    return {
        "sampled_rows": sampled,
        "sampling_error": _sampling_error(groups) if scale > 1 else 0.0,
        "rejects": of_all(reasons.total()),
        "reject_reasons": {reason: of_all(count) for reason, count in reasons.most_common()},
        "truncated_rows": of_all(sum(group.truncated_rows for group in groups)),
        "control_token_rows": of_all(sum(group.control_token_rows for group in groups)),
        "tokens": of_all(lengths.sum()),
        "max_length": job.tokenize.limit,
        "lengths": {
            "histogram": {str(bound): of_all(count) for bound, count in histogram(lengths.tolist()).items()},
            "mean": round(float(lengths.mean()), 1) if len(lengths) else 0.0,
            "quantiles": {f"{q:g}": int(np.quantile(lengths, q, method="inverted_cdf")) for q in QUANTILES}
            if len(lengths)
            else {},
        },
    }


def _sampling_error(groups: Sequence[Group]) -> float | None:
    """Half of a 95 % interval of the tokens, as a share of them, by how far stretches differ; None of one alone."""
    rows = np.array([shard.rows for group in groups for shard in group.shards], np.float64)
    tokens = np.array([count for group in groups for count in group.shard_tokens], np.float64)
    if len(rows) < 2 or not tokens.sum():
        return None
    of_mean = np.std(tokens / rows, ddof=1) / np.sqrt(len(rows))
    return round(1.96 * float(of_mean) / float(tokens.sum() / rows.sum()), 4)


def _work(job: Job, found: Found) -> dict[str, Any]:
    """What the run would compute."""
    groups = found.groups
    sampled = sum(group.rows for group in groups)
    scale = job.plan.rows / sampled if sampled else 1.0

    def of_all(counts: Iterable[int]) -> int:
        return round(scale * sum(counts))

    batches = [batch for group in groups for batch in (*group.batches.prefixes, *group.batches.own)]
    return {
        "copies": of_all([found.surveyor.copies]),
        "copies_in_shards": of_all(group.copies for group in groups),
        "copied_tokens": of_all(group.copied_tokens for group in groups) if job.config.share else 0,
        "prefix_tokens_saved": of_all(group.batches.prefix_tokens_saved for group in groups),
        "cached_rows": of_all(group.cached_rows for group in groups),
        "tokens_to_compute": of_all(group.batches.tokens for group in groups),
        "computed_tokens": of_all(batch.cells for batch in batches),
        "batches": of_all([len(batches)]),
        "encoder": _encoder(job, found),
        "max_batch_tokens": found.surveyor.max_batch_tokens,
        "compiled": job.compile,
        "device": job.device,
        "dtype": job.dtype,
    }


def _encoder(job: Job, found: Found) -> str:
    if found.encoding or job.encoder == "vllm":
        return found.encoding.encoder if found.encoding else "vllm"
    return "plain" if found.surveyor.plain else "packed"


def _memory(job: Job, found: Found, base_bytes: int) -> dict[str, Any]:
    side_by_side = 1 if found.surveyor.plain or job.encoder == "vllm" else lanes(job.device.partition(":")[0])
    parts = estimate.memory(job, found.groups, base_bytes, side_by_side, found.surveyor.max_batch_tokens)
    on_device = 0 if job.device == "cpu" else parts["weights"] + parts["batches"]
    return {"bytes": sum(parts.values()) - on_device, "device_bytes": on_device, "parts": parts}


def _seconds(job: Job, found: Found, plan_sec: float, share_left: float) -> dict[str, Any]:
    """The expected time. share_left: of the rows, those that no earlier run has done."""
    groups, encoding, finishing = found.groups, found.encoding, found.finishing
    cost = estimate.fit(encoding.batches) if encoding else None
    scale = share_left * job.plan.rows / max(1, sum(group.rows for group in groups))
    side_by_side = 1 if found.surveyor.plain else lanes(job.device.partition(":")[0])
    of_row = finishing.search_sec + finishing.write_sec if finishing else 0.0
    stages = [
        estimate.Stages(
            group.read_sec + group.cache_sec,
            cost.of_group(group, side_by_side) if cost and group.fresh_tokens else 0.0,
            group.prompts * of_row,
        )
        for group in groups
    ]
    read_sec, encode_sec = scale * sum(s.read for s in stages), scale * sum(s.encode for s in stages)
    reading = sum(group.read_work_sec for group in groups) / max(1e-9, sum(group.read_sec for group in groups))
    busy = (reading, encoding.busy if encoding else 0.0, finishing.busy if finishing else 0.0)
    shares = estimate.Stages(*(min(1.0, threads_at_work / threads()) for threads_at_work in busy))
    once = (finishing.once_sec if finishing else 0.0) * (share_left > 0)
    start_sec = found.start_sec + (encoding.start_sec if encoding else 0.0)
    prompts = scale * sum(group.prompts for group in groups)
    return {
        "wall_sec": plan_sec + start_sec + once + scale * estimate.wall_sec(stages, shares),
        "plan_sec": plan_sec,
        "start_sec": start_sec,
        "read_sec": read_sec,
        "encode_sec": encode_sec,
        "search_sec": once + (prompts * finishing.search_sec if finishing else 0.0),
        "write_sec": prompts * finishing.write_sec if finishing else 0.0,
        "probe": {
            "sec": found.probe_sec,
            "batches": len(encoding.batches) if encoding else 0,
            "spread": cost.spread if cost else None,
            "searched_rows": finishing.rows if finishing else 0,
            "busy": shares._asdict(),
        },
    }


def _warn(job: Job, told: dict[str, Any]) -> None:
    """What somebody who starts this run should know first."""
    if error := too_many_rejects(job.config, told):
        log.warning("%s", error)
    wall_sec, limit = (told["expected"] or {}).get("wall_sec", 0.0), job.config.time_limit
    if limit and wall_sec > seconds(limit, "--time-limit"):
        log.warning("the run may take %.0f s, more than --time-limit %s", wall_sec, limit)
    memory = told["memory"]
    if memory["bytes"] - memory["parts"]["program_and_items"] > machine.free_memory():
        log.warning(
            "the run may need %.1f GB of memory, more than is free; lower --shard-rows or --max-batch-tokens",
            memory["bytes"] / 1e9,
        )
