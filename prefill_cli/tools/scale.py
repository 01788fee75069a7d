"""`prefill-score plan --nodes`: hours, cost and requests of so many prompts on so many workers, simulated.

A worker's pace comes from a finished run (--measured), else from the probe of `plan`. What nobody measured is assumed, and
every figure says which it is. docs/scale.md has the model.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from prefill_cli.config import RunConfig, seconds
from prefill_cli.errors import UsageError
from prefill_cli.tools.forecast.cluster import MOST_SHARDS, Forecast, Pace, Work, forecast
from prefill_cli.tools.forecast.pace import Figure, Measured, figure, of_probe, of_run
from prefill_cli.tools.forecast.requests import Layout, Requests, requests_of, times_read
from prefill_cli.tools.plan import plan

PROMPTS, MTBF, LAUNCH, COST = "1M,100M,1B", "1000h", "10s", "1"
TRIED = tuple(1 << power for power in range(10, 17))  # rows of a shard
TRIED_SHARDS, TRIED_OF_WORKER, TRIED_CELLS = 130_000, 64, 200_000
WORTH = 0.02  # a share of the hours for which another shard size is advised
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
MOST_WORKERS, MOST_PROMPTS = 100_000, 10**12


@dataclass(frozen=True)
class Question:
    """How many workers and prompts, and what is assumed; `given`: the names of what the user gave."""

    workers: tuple[int, ...]
    prompts: tuple[int, ...]
    mtbf_sec: float
    launch_sec: float
    cost: float  # of a worker's hour
    cores: int | None
    given: frozenset[str]


def ask(texts: Mapping[str, Any]) -> Question:
    """The question that the options of the command line ask; a value of None is one that was not given.

    Raises:
        UsageError: one of them cannot be read.
    """
    failures, launch = texts["failures"] or MTBF, texts["launch"] or LAUNCH
    cost = texts["cost"] or COST
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", cost):
        raise UsageError(f"--cost must be what a worker's hour costs, a number like 2.5, not {cost!r}")
    return Question(
        _counts(texts["nodes"], "--nodes", "numbers of workers like 1,8,64", MOST_WORKERS),
        _counts(texts["prompts"] or PROMPTS, "--prompts", "numbers of prompts like 2000,1M,1B", MOST_PROMPTS),
        math.inf if failures == "0" else seconds(failures, "--failures"),
        0.0 if launch in ("0", "0s") else seconds(launch, "--launch"),
        float(cost),
        texts["cores"],
        frozenset(name for name, text in texts.items() if text is not None),
    )


def _counts(text: str, what: str, form: str, most: int) -> tuple[int, ...]:
    found = []
    for part in text.upper().split(","):
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)([KMB]?)\s*", part)
        number = Fraction(match[1]) * UNITS[match[2]] if match else Fraction(0)
        if not 1 <= number <= most or number.denominator != 1:
            raise UsageError(f"{what} must be {form}, each from 1 to {most:,}, not {text!r}")
        found.append(int(number))
    return tuple(dict.fromkeys(found))


def scale_measured(question: Question, output: Path, shard_rows: int | None) -> dict[str, Any]:
    """The answer from a finished run's figures. shard_rows: None for the run's own.

    Raises:
        OutputError: no whole result of ours, or one that tells no pace. UsageError: too many shards.
    """
    return _answer(question, of_run(output), shard_rows)


def scale_probed(question: Question, config: RunConfig, rows: int | None, probe_sec: float) -> dict[str, Any]:
    """The answer from a probe on this machine; see tools.plan.

    Raises:
        PrefillScoreError: what `plan` raises. UsageError: nothing to encode, or too many shards.
    """
    told = plan(config, rows, probe_sec)
    if not told["expected"] or not told["expected"]["encode_sec"]:
        raise UsageError("--nodes needs the pace of a worker: a --probe that has prompts to encode, or --measured OUT")
    return _answer(question, of_probe(config, told), config.shard_rows)


def _answer(question: Question, found: Measured, shard_rows: int | None) -> dict[str, Any]:
    size = shard_rows or found.shard_rows
    pace = _with_cores(question, found)
    if (shards := -(-max(question.prompts) // size)) > MOST_SHARDS:
        raise UsageError(
            f"--prompts {max(question.prompts):,} in shards of {size:,} rows are {shards:,} shards, more than the "
            f"{MOST_SHARDS:,} that are simulated; give a larger --shard-rows"
        )
    at_work = question.cores or found.threads
    return {
        "worker": {"as": found.source, "device": found.device, "dtype": found.dtype, "threads": at_work,
                   "shard_rows": found.most_rows},
        "shard_rows": size,
        "figures": _figures(question, found, pace),
        "forecasts": [
            _told(question, found.layout, _launched(pace, question, found, workers),
                  Work(workers, prompts, size, question.mtbf_sec))
            for prompts in question.prompts
            for workers in question.workers
        ],
    }  # fmt: skip


def _launched(pace: Pace, question: Question, found: Measured, workers: int) -> Pace:
    """With the launch of workers that are processes of their own; one alone is the command itself, as it was measured."""
    if found.launched:
        return replace(pace, launch_sec=question.launch_sec, once_sec=max(0.0, pace.once_sec - question.launch_sec))
    return pace if workers == 1 else replace(pace, launch_sec=question.launch_sec)


def _with_cores(question: Question, found: Measured) -> Pace:
    """The pace of a worker with another number of cores. Assumed: encoding and search in proportion; lanes have one each."""
    if question.cores is None or question.cores == found.threads:
        return found.pace
    if found.device != "cpu":
        raise UsageError(f"--cores is of workers on CPUs, and the measured one is on {found.device}; leave it out")
    times = found.threads / question.cores
    return replace(found.pace, encode_sec=times * found.pace.encode_sec, finish_sec=times * found.pace.finish_sec)


def _figures(question: Question, found: Measured, pace: Pace) -> dict[str, Figure]:
    """Every figure that the forecasts stand on, and where it is from."""

    def asked(name: str, value: float) -> dict[str, Any]:
        return figure(value, "given" if name in question.given else "assumed")

    scaled = "measured" if pace == found.pace else f"measured with {found.threads} threads, in proportion"
    hours = None if math.isinf(question.mtbf_sec) else question.mtbf_sec / 3600
    return {
        "tokens_per_sec": figure(found.row_tokens / pace.encode_sec, scaled),
        "tokens_per_prompt": figure(found.row_tokens, "measured"),
        **found.figures,
        "read_sec_per_prompt": figure(pace.read_sec, "measured"),
        "encode_sec_per_prompt": figure(pace.encode_sec, scaled),
        "finish_sec_per_prompt": figure(pace.finish_sec, scaled),
        "start_sec": figure(pace.start_sec, "measured"),
        "commit_sec": figure(pace.commit_sec, "assumed"),
        "launch_sec": asked("launch", question.launch_sec),
        "hours_between_failures": asked("failures", hours) if hours else figure(math.nan, "given") | {"value": None},
        "cost_per_hour": asked("cost", question.cost),
    }


def _told(question: Question, layout: Layout, pace: Pace, work: Work) -> dict[str, Any]:
    """A forecast, and what other shard sizes would give."""
    found, sent = forecast(pace, work), _sent(layout, work)
    # Where workers are busy all the time no other size can save anything.
    others = _sizes(work) if found.busy < 1 - WORTH else [work.shard_rows]
    sizes = [_tried(pace, layout, replace(work, shard_rows=size)) for size in others]
    return {
        "prompts": work.rows,
        "workers": work.workers,
        "shards": work.shards,
        "hours": found.sec / 3600,
        "hours_low": found.low / 3600,
        "hours_high": found.high / 3600,
        "replicates": found.replicates,
        "error": found.error,
        "efficiency": found.busy,
        "lost": found.lost,
        "idle": found.idle,
        "given_up_shards": found.given_up,
        "cost": work.workers * found.sec / 3600 * question.cost,
        "requests": {**vars(sent), "total": sent.total},
        "times_read": times_read(layout, work.rows, work.shard_rows, work.workers),
        "shard_sizes": sizes,
        "advised_shard_rows": advise(work.shard_rows, sizes),
    }


def _sent(layout: Layout, work: Work) -> Requests:
    return requests_of(layout, work.rows, work.shard_rows, work.workers)


def _sizes(work: Work) -> list[int]:
    """Sizes worth a trial: not so small that there is nothing to gain, and of those that make one shard the smallest."""
    most = max(TRIED_SHARDS, TRIED_OF_WORKER * work.workers)
    sizes = sorted({*TRIED, work.shard_rows})
    one = next((size for size in sizes if size >= work.rows), sizes[-1])
    fit = [size for size in sizes if size <= one and work.rows // size <= min(most, MOST_SHARDS)]
    return sorted({*fit, work.shard_rows})


def _tried(pace: Pace, layout: Layout, work: Work) -> dict[str, Any]:
    found: Forecast = forecast(pace, work, replicates=max(3, min(40, TRIED_CELLS // work.shards)))
    return {
        "shard_rows": work.shard_rows,
        "hours": found.sec / 3600,
        "idle": found.idle,
        "requests": _sent(layout, work).total,
    }


def advise(asked: int, sizes: Sequence[Mapping[str, Any]]) -> int:
    """Of the sizes within WORTH of the fewest hours the one nearest to that which was asked for."""
    least = min(size["hours"] for size in sizes)
    near = [int(size["shard_rows"]) for size in sizes if size["hours"] <= (1 + WORTH) * least]
    return min(near, key=lambda rows: abs(math.log(rows / asked)))
