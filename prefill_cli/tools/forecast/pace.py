"""What a worker does in a second: as a finished run tells it in its manifest, or a probe of this machine.

Beside what was measured stands what is assumed; every figure says which it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.manifest import damage, read_manifest
from prefill_cli.errors import OutputError
from prefill_cli.machine import threads
from prefill_cli.tools.forecast import estimate
from prefill_cli.tools.forecast.cluster import Pace, Spread, spread_of
from prefill_cli.tools.forecast.requests import Layout

SPREAD, COMMIT_SEC = 0.05, 0.02
FILE_ROWS, GROUP_ROWS = 1 << 20, 1 << 17
LIST_ENTRY_BYTES = 10  # of a part, for an item of a list
Figure = dict[str, Any]  # a value, and where it is from


@dataclass(frozen=True)
class Measured:
    """A worker as it was measured. figures: name → value and where it is from, as the output tells them."""

    pace: Pace
    row_tokens: float
    threads: int
    device: str
    dtype: str
    shard_rows: int  # as the run was asked for
    most_rows: int  # of a shard that was measured
    layout: Layout
    source: str
    launched: bool  # whether its workers were processes of their own, whose launch is in what the run took beside them
    figures: dict[str, Figure]


def of_run(output: Path) -> Measured:
    """What the manifest of a finished run tells of a worker.

    Raises:
        OutputError: see scale_measured.
    """
    manifest = read_manifest(output)
    if manifest is None or (missing := damage(output, manifest)):
        raise OutputError(f"--measured {output}: not the whole result of a run{'' if manifest is None else f': {missing}'}")
    shards, totals, options = manifest.get("shards", {}), manifest["totals"], manifest["options"]
    if not totals.get("encode_sec") or not totals.get("tokens") or not shards.get("encode_sec"):
        raise OutputError(f"--measured {output}: the run encoded nothing, or does not tell how long; name another one")
    rows, workers, starts = totals["rows"], _workers(manifest), [sec for sec in shards["start_sec"] if sec]
    read, encode = (totals[name] / rows for name in ("read_sec", "encode_sec"))
    finish = sum(totals.get(name, 0.0) for name in ("cache_sec", "search_sec", "write_sec")) / rows
    start = sum(starts) / len(starts) if starts else 0.0
    spread = spread_of(shards["encode_sec"], shards["rows"], SPREAD)
    steps = [max(times) for times in zip(shards["read_sec"], shards["encode_sec"], strict=True)]
    first, last = shards["read_sec"][0], shards["search_sec"][-1] + shards["write_sec"][-1]
    once = totals["wall_sec"] - start - first - estimate.makespan(steps, workers) - last
    of_shards = [number for number in shards.get("threads", ()) if number]
    at_work = round(sum(of_shards) / len(of_shards)) if of_shards else int(manifest["environment"].get("cpus") or 1)
    layout, of_layout = _layout_of_run(manifest)
    return Measured(
        Pace(read, encode, finish, start, 0.0, COMMIT_SEC, max(0.0, once), spread),
        totals["tokens"] / rows,
        at_work,
        str(totals["device"]),
        str(totals["dtype"]),
        int(options["shard_rows"]),
        max(shards["rows"]),
        layout,
        str(output),
        workers > 1 or options.get("engine", "local") != "local",
        {
            "workers": figure(workers, "measured"),
            "threads": figure(at_work, "measured" if of_shards else "assumed"),
            "once_sec": figure(max(0.0, once), "measured" if once >= 0 else "assumed"),  # a resumed run's wall tells none
            "shard_spread": _spread_figure(spread, len(shards["rows"])),
            **of_layout,
        },
    )


def _workers(manifest: Mapping[str, Any]) -> int:
    """How many workers did the run, as far as it tells."""
    return max(1, len(manifest.get("workers") or ()))


def _layout_of_run(manifest: Mapping[str, Any]) -> tuple[Layout, dict[str, Figure]]:
    files, parts, options = manifest["inputs"]["files"], manifest.get("parts", {}), manifest["options"]
    rows = max(1, sum(file["rows"] for file in files))
    row_bytes = sum(file["size_bytes"] for file in files) / rows
    names = ("keep_columns", "exclude_column", "candidates_column")
    columns = 2 + sum(len(found) if isinstance(found := options.get(name), list) else bool(found) for name in names)
    part_bytes = sum(parts.values()) / rows or float(LIST_ENTRY_BYTES * options["top_k"])
    figures = _layout_figures("assumed", "measured", "measured" if parts else "assumed")
    return _told_layout(Layout(FILE_ROWS, GROUP_ROWS, row_bytes, columns, part_bytes), figures)


def _layout_figures(files: str, row: str, part: str) -> dict[str, str]:
    return {"file_rows": files, "group_rows": files, "row_bytes": row, "part_row_bytes": part}


def _told_layout(layout: Layout, sources: dict[str, str]) -> tuple[Layout, dict[str, Figure]]:
    return layout, {name: figure(getattr(layout, name), source) for name, source in sources.items()}


def of_probe(config: RunConfig, told: Mapping[str, Any]) -> Measured:
    """What a plan found of a worker like this machine."""
    expected, all_rows = told["expected"], told["rows"]
    rows = all_rows - min(told.get("done_shards", 0) * config.shard_rows, all_rows - 1)
    busy = expected["probe"]["busy"]
    finish = expected["search_sec"] + expected["write_sec"]
    work = sum(sec * busy[name] for name, sec in
               (("read", expected["read_sec"]), ("encode", expected["encode_sec"]), ("finish", finish)))  # fmt: skip
    encode = max(expected["encode_sec"], work)  # steps that want all cores gain nothing from overlapping
    spread = Spread((), SPREAD)
    files = plan_inputs(config).files
    many = all_rows > config.shard_rows  # else it is a sample, and says nothing of the files of all prompts
    file_rows = round(all_rows / len(files)) if many else FILE_ROWS
    group_rows = max(1, round(all_rows / sum(len(file.group_rows) for file in files))) if many else GROUP_ROWS
    columns = 2 + len(config.keep_columns) + bool(config.exclude_column) + bool(config.candidates_column)
    row_bytes = sum(file.size_bytes for file in files) / all_rows
    layout, of_layout = _told_layout(
        Layout(file_rows, group_rows, row_bytes, columns, float(LIST_ENTRY_BYTES * config.top_k)),
        _layout_figures("measured" if many else "assumed", "measured", "assumed"),
    )
    return Measured(
        Pace(expected["read_sec"] / rows, encode / rows, finish / rows, expected["start_sec"], 0.0, COMMIT_SEC,
             expected["plan_sec"], spread),
        told["tokens"] / all_rows,
        threads(),
        told["device"],
        told["dtype"],
        config.shard_rows,
        config.shard_rows,
        layout,
        "a probe",
        False,
        {
            "threads": figure(threads(), "measured"),
            "once_sec": figure(expected["plan_sec"], "measured"),
            "shard_spread": _spread_figure(spread, 0),
            **of_layout,
        },
    )  # fmt: skip


def figure(value: float, source: str) -> Figure:
    return {"value": value, "from": source}


def _spread_figure(spread: Spread, shards: int) -> Figure:
    """The standard deviation, as a share of the mean."""
    if not spread.shares:
        return figure(spread.sigma, "assumed")
    n = len(spread.shares)
    return figure(math.sqrt(sum((share - 1) ** 2 for share in spread.shares) / n), "measured") | {"shards": shards}
