"""The file of --metrics-file: what a run did, in the text format that Prometheus' node_exporter collects.

A run that fails tells its exit code and when; figures and time of the last success are carried over from the old file,
so that a graph has no hole and an alert on their age needs no memory.
"""

import contextlib
import importlib
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.data.disk import replacing
from prefill_cli.errors import OutputError, UsageError, first_line
from prefill_cli.places import Place, place, result_name

log = logging.getLogger(__name__)
Samples = dict[str, list[tuple[str, float]]]  # family → (value of its second label or "", value)

PREFIX = "prefill_score_"
SECOND_LABEL = {"rejects": "reason", "stage_seconds": "stage"}
COUNTS = {
    "rows": "Input rows of the last success.",
    "rows_out": "Rows with a list in the last success.",
    "tokens": "Tokens of the prompts of the last success.",
    "computed_tokens": "Tokens that went through the model in the last success.",
    "cached_rows": "Rows of the last success whose vectors came from the cache.",
    "truncated_rows": "Rows of the last success whose prompts were cut.",
    "retried_rows": "Rows of the last success that were encoded again with more care or in smaller batches.",
    "empty_lists": "Rows of the last success for which the filters left no item.",
    "unknown_ids": "Ids in filters of the last success that are not in the catalogue.",
}
FIGURES = {
    **COUNTS,
    "rejects": "Rejected rows of the last success by reason.",
    "stage_seconds": "Time that a stage of the last success took, all shards together; stages overlap.",
    "wall_seconds": "Time that the last success took.",
    "peak_rss_bytes": "The most memory that the last success held.",
}
ALWAYS = {
    "exit_code": "Exit code of the last run.",
    "start_timestamp_seconds": "When the last run began.",
    "last_run_timestamp_seconds": "When the last run ended.",
    "last_success_timestamp_seconds": "When the last run with exit code 0 ended; 0 where none has.",
}
STAGES = ("start", "read", "cache", "encode", "search", "write")
NOT_METRICS = {".parquet", ".npy", ".safetensors", ".toml", ".json"}


class Report:
    """Writes the file at the end of the block, also where an error that has an `exit_code` leaves it.

    suffix: of a result without a name. file, output: what the command line says; `open` tells what holds once all options
    are known. Until then only a file of ours is replaced.
    """

    def __init__(self, file: str | None, output: str | None, suffix: str = ".topk") -> None:
        where, out = _place(file), _place(output)
        self._file = where if isinstance(where, Path) and out and where.suffix not in NOT_METRICS else None
        self._output = _text(out or "")
        self._suffix = suffix
        self._opened = False
        self._began = time.time()

    def open(self, config: RunConfig) -> None:
        """Where to write, and that it can be done.

        Raises:
            UsageError: prometheus-client is missing, or the name is that of data.
        """
        file, self._file = config.metrics_file, None
        if file is None:
            return
        if file.suffix in NOT_METRICS or file in (config.allow, config.deny):
            raise UsageError(
                f"--metrics-file {file} would write over data or options; name a file of its own, like rec.prom"
            )
        try:
            importlib.import_module("prometheus_client")
        except ImportError:
            raise UsageError("--metrics-file needs prometheus-client: pip install 'prefill-score[metrics]'") from None
        self._output = _text(config.output or result_name(place(config.inputs[0]), self._suffix))
        self._file, self._opened = file, True

    def succeed(self, totals: dict[str, Any]) -> None:
        """Tell of a run whose result is published."""
        self._write(0, _figures(totals))

    def fail(self, exit_code: int) -> None:
        """Tell of a run that failed."""
        self._write(exit_code, {})

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with contextlib.suppress(KeyboardInterrupt):  # a second signal: the first one's exit code holds
                self.fail(getattr(error, "exit_code", 1))

    def _write(self, exit_code: int, figures: Samples) -> None:
        if self._file is None:
            return
        try:
            old = self._old(self._file)
            now = time.time()
            last_success = old.get("last_success_timestamp_seconds", [("", 0.0)])
            new: Samples = {
                **(figures or {name: old[name] for name in FIGURES if name in old}),
                "exit_code": [("", exit_code)],
                "start_timestamp_seconds": [("", self._began)],
                "last_run_timestamp_seconds": [("", now)],
                "last_success_timestamp_seconds": [("", now)] if exit_code == 0 else last_success,
            }
            text = _exposition(self._output, new)
            with replacing(self._file) as file:
                file.write(text)
        except _NotOursError:
            pass
        except Exception as error:  # whatever it is, the run's own end counts for more
            log.warning("--metrics-file %s", first_line(error))

    def _old(self, path: Path) -> Samples:
        """What the file says that is there; nothing where there is none or it is damaged."""
        try:
            if path.exists() and not path.is_file():
                raise OutputError(f"{path}: no regular file")
            return _parse(path.read_bytes(), self._output)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise OutputError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            if not self._opened:
                raise _NotOursError from None
            log.warning("--metrics-file %s: what was there is replaced, not carried over: %s", path, first_line(error))
            return {}


class _NotOursError(Exception):
    """There is a file that may be anybody's."""


def _figures(totals: dict[str, Any]) -> Samples:
    """A result's totals as samples. One that an older version made may lack some."""
    return {
        **{name: [("", totals.get(name, 0))] for name in COUNTS},
        "rejects": list(totals.get("reject_reasons", {}).items()),
        "stage_seconds": [(stage, totals.get(f"{stage}_sec", 0.0)) for stage in STAGES],
        "wall_seconds": [("", totals.get("wall_sec", 0.0))],
        "peak_rss_bytes": [("", totals.get("peak_rss_bytes", 0))],
    }


def _parse(content: bytes, output: str) -> Samples:
    """The samples of a whole file of ours about `output`.

    Raises:
        ValueError: it is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: Samples = {}
    text = content.decode("utf-8")
    if not text.endswith("\n"):
        raise ValueError("its last line is not whole")
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except Exception as error:  # the parser raises what it happens to
        raise ValueError(f"not readable ({first_line(error)})") from None
    for sample in samples:
        name = sample.name.removeprefix(PREFIX)
        second = SECOND_LABEL.get(name)
        labels = {"output", second} if second else {"output"}
        if name not in FIGURES | ALWAYS or sample.labels.keys() != labels or not math.isfinite(sample.value):
            raise ValueError(f"{sample.name} is none of its metrics")
        if sample.labels["output"] != output:
            raise ValueError(f"it tells of {sample.labels['output']}, and each output needs a file of its own")
        found.setdefault(name, []).append((sample.labels[second] if second else "", sample.value))
    if missing := ALWAYS.keys() - found.keys():
        raise ValueError(f"{PREFIX}{min(missing)} is missing")
    return found


def _exposition(output: str, samples: Samples) -> bytes:
    """Families that have samples, in the text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    for name, help in (FIGURES | ALWAYS).items():
        if samples.get(name):
            more = (SECOND_LABEL[name],) if name in SECOND_LABEL else ()
            gauge = Gauge(PREFIX + name, help, ("output", *more), registry=registry)
            for label, value in samples[name]:
                gauge.labels(output, *((label,) if more else ())).set(value)
    return generate_latest(registry)


def _place(text: str | None) -> Place | None:
    """What the command line means, as config.resolve takes it; None where it would refuse it."""
    try:
        where = place(text) if text else None
    except UsageError:
        return None
    return where.expanduser() if isinstance(where, Path) else where


def _text(where: Place | str) -> str:
    """A place as the format can hold it: names of files need not be text."""
    return os.fsencode(where).decode("utf-8", "backslashreplace")
