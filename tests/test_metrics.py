"""--metrics-file: a file for Prometheus at every end of a run, which never costs the run anything."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import random_prompts, write_items, write_prompts
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from prefill_cli import cli, metrics, pipeline
from prefill_cli.data.manifest import is_finished

COUNTS = {
    "rows", "rows_out", "tokens", "computed_tokens", "cached_rows", "truncated_rows", "retried_rows", "empty_lists",
    "unknown_ids",
}  # fmt: skip
STAGES = {"start", "read", "cache", "encode", "search", "write"}
CHANGES = {"exit_code", "start_timestamp_seconds", "last_run_timestamp_seconds"}  # what a failing run changes
PATIENCE_SEC = 60


@pytest.fixture
def line(job) -> list[str]:
    given = ["run", job.inputs, "-m", job.model, "-i", job.items, "-o", job.out, "-k", 5, "--device", "cpu"]
    return [*map(str, given), "--dtype", "float32", "--metrics-file", "rec.prom"]


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def read(path: str | Path = "rec.prom") -> dict[object, float]:
    """Name, or (name, value of its second label), → value; every sample has the same output."""
    found, outputs = {}, set()
    for family in text_string_to_metric_families(Path(path).read_text()):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            outputs.add(labels.pop("output"))
            name = sample.name.removeprefix("prefill_score_")
            assert name != sample.name
            found[(name, *labels.values()) if labels else name] = sample.value
    assert len(outputs) == 1
    return found


def output_in(path: str | Path = "rec.prom") -> str:
    return next(s.labels["output"] for f in text_string_to_metric_families(Path(path).read_text()) for s in f.samples)


def names_in(found: dict[object, float]) -> set[str]:
    return {name[0] if isinstance(name, tuple) else name for name in found}


def alone(folder: Path) -> bool:
    """Whether no temporary file was left."""
    return not [p for p in folder.iterdir() if "rec.prom" in p.name and p.name != "rec.prom"]


def break_items(job) -> None:
    job.items.rename(job.items.with_name("moved.parquet"))


def mend_items(job) -> None:
    job.items.with_name("moved.parquet").rename(job.items)


# --- what a run tells -------------------------------------------------------------------------------------------------


def test_a_success_tells_its_summary_its_stages_and_when_it_was(line, job, tmp_path):
    write_prompts(job.inputs, [*job.prompts[:28], None, ""])
    before = time.time()
    result = invoke(*line, "--max-rejects", "2", "--cache", "vectors")
    after = time.time()
    assert result.exit_code == 0
    totals, told = json.loads(result.stdout), read()
    assert {name: told[name] for name in COUNTS} == {name: totals[name] for name in COUNTS}
    assert {k[1]: v for k, v in told.items() if k[0] == "rejects"} == totals["reject_reasons"]
    assert {k[1]: v for k, v in told.items() if k[0] == "stage_seconds"} == {s: totals[f"{s}_sec"] for s in STAGES}
    assert (told["wall_seconds"], told["peak_rss_bytes"]) == (totals["wall_sec"], totals["peak_rss_bytes"])
    assert told["exit_code"] == 0
    assert before <= told["start_timestamp_seconds"] < told["last_run_timestamp_seconds"] <= after
    assert told["last_success_timestamp_seconds"] == told["last_run_timestamp_seconds"]
    assert names_in(told) == metrics.FIGURES.keys() | metrics.ALWAYS.keys()
    assert output_in() == str(job.out)
    assert alone(tmp_path)


def test_names_are_as_prometheus_wants_them():
    """One prefix, base units last and in the plural, no suffix that says another type."""
    for name in metrics.FIGURES | metrics.ALWAYS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created"))
        assert not re.search(r"_(sec|ms|minutes|kb|mb|percent)(_|$)", name)
    assert metrics.PREFIX == "prefill_score_"


def test_search_tells_its_figures_too(line, job, tmp_path):
    users = write_items(tmp_path / "users.parquet", n=7)  # vectors of users look like those of items
    result = invoke("search", users, "-i", job.items, "-o", "found", "--id-column", "item_id", "--metrics-file", "rec.prom")
    assert result.exit_code == 0, result.stderr
    assert (read()["rows"], read()["rows_out"], output_in()) == (7, 7, "found")


def test_a_second_run_that_finds_nothing_to_do_is_a_success_with_the_result_s_figures(line):
    assert invoke(*line).exit_code == 0
    first = read()
    result = invoke(*line)
    assert json.loads(result.stdout)["status"] == "unchanged"
    second = read()
    newer = {name for name in first if second[name] != first[name]}
    assert newer == (CHANGES - {"exit_code"}) | {"last_success_timestamp_seconds"}
    assert second["last_success_timestamp_seconds"] == second["last_run_timestamp_seconds"]


def test_without_an_output_the_label_is_the_name_that_the_result_gets(line, tmp_path):
    at = line.index("-o")
    result = invoke(*line[:at], *line[at + 2 :])
    assert (result.exit_code, output_in()) == (0, json.loads(result.stdout)["output"])


@pytest.mark.parametrize(
    ("name", "told"), [(b'night-\xff "\\n"', 'night-\\xff "\\n"'), ("nuit-é".encode(), "nuit-é"), (b"a\nb", "a\nb")]
)
def test_an_output_whose_name_is_not_text_or_needs_quotes_is_told_and_carried_over(job, name, told):
    report = metrics.Report(None, None)
    report.open(job.config(output=Path(os.fsdecode(name)), metrics_file=Path("rec.prom")))
    report.succeed({"rows": 7})
    report.fail(4)
    assert (output_in(), read()["rows"], read()["exit_code"]) == (told, 7, 4)


def test_two_outputs_have_two_files(line, job, tmp_path):
    assert invoke(*line).exit_code == 0
    other = [*line, "-k", 3, "-o", tmp_path / "other", "--metrics-file", "other.prom"]
    assert invoke(*other).exit_code == 0
    break_items(job)
    assert invoke(*other).exit_code == 4
    assert (output_in(), read()["exit_code"]) == (str(job.out), 0)
    assert (output_in("other.prom"), read("other.prom")["exit_code"]) == (str(tmp_path / "other"), 4)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_run_tells_its_exit_code_and_keeps_the_figures_of_the_last_success(line, job, tmp_path):
    write_prompts(job.inputs, [*job.prompts[:29], None])
    assert invoke(*line, "--max-rejects", "1").exit_code == 0
    before = read()
    break_items(job)
    result = invoke(*line, "--max-rejects", "1")
    assert (result.exit_code, result.stdout) == (4, "")
    assert re.fullmatch(r"error: .*items\.parquet: no such file.*\n", result.stderr)
    told = read()
    assert told["exit_code"] == 4
    assert {name for name in before if told.get(name) != before[name]} == CHANGES
    assert told.keys() == before.keys()
    assert told["last_run_timestamp_seconds"] > before["last_run_timestamp_seconds"]
    mend_items(job)
    assert invoke(*line, "--max-rejects", "1").exit_code == 0
    assert read()["last_success_timestamp_seconds"] > told["last_run_timestamp_seconds"]
    assert alone(tmp_path)


def test_a_first_run_that_fails_tells_that_there_was_no_success_and_no_figures(line, job):
    break_items(job)
    assert invoke(*line).exit_code == 4
    told = read()
    assert told.keys() == metrics.ALWAYS.keys()
    assert (told["exit_code"], told["last_success_timestamp_seconds"]) == (4, 0)


def test_too_many_rejects_are_told_by_the_exit_code(line, job):
    assert invoke(*line).exit_code == 0
    write_prompts(job.inputs, [*job.prompts[:25], *[None] * 5])
    assert invoke(*line, "--overwrite").exit_code == 7
    told = read()
    assert (told["exit_code"], told["rows_out"]) == (7, 30)


def test_a_bug_is_told_by_its_exit_code_too(line, monkeypatch):
    def broken(*_):
        raise ValueError

    monkeypatch.setattr(pipeline, "run", broken)
    assert invoke(*line).exit_code == 1
    assert read()["exit_code"] == 1


def test_a_summary_that_cannot_be_printed_is_no_success(line, job, command):
    with open("/dev/full", "w") as full:
        result = command(*line, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert result.returncode == 6
    assert (read()["exit_code"], read()["last_success_timestamp_seconds"]) == (6, 0)


def test_a_wrong_option_is_told_where_the_line_names_file_and_output(line):
    assert invoke(*line).exit_code == 0
    before = read()
    Path("prefill-score.toml").write_text("topk = 3")
    line[line.index("-o") + 1] += "/"
    assert invoke(*line).exit_code == 2
    assert (read()["exit_code"], read()["rows"]) == (2, before["rows"])


def test_a_wrong_option_leaves_a_file_alone_that_is_not_ours(line):
    Path("prefill-score.toml").write_text("topk = 3")
    Path("rec.prom").write_text("my notes\n")
    assert invoke(*line).exit_code == 2
    assert Path("rec.prom").read_text() == "my notes\n"


@pytest.mark.parametrize("name", ["in/prompts.parquet", "prefill-score.toml", "allowed.txt"])
def test_a_name_that_is_one_of_data_or_options_is_refused(line, job, tmp_path, name):
    Path("allowed.txt").write_text("i1\n")
    old = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
    result = invoke(*line, "--metrics-file", name, "--allow", "allowed.txt")
    assert (result.exit_code, "would write over data" in result.stderr) == (2, True)
    assert old == ((tmp_path / name).read_bytes() if old is not None else None)
    assert not job.out.exists()


@pytest.mark.parametrize("name", ["s3://bucket/rec.prom", "nowhere://rec.prom"])
def test_a_file_elsewhere_is_refused_as_an_option(line, job, name):
    result = invoke(*line, "--metrics-file", name)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert not job.out.exists()


# --- processes --------------------------------------------------------------------------------------------------------


def test_sigterm_is_told(line, job):
    write_prompts(job.inputs, random_prompts(150))
    process = subprocess.Popen(
        [sys.executable, "-m", "prefill_cli", *line, "--shard-rows", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    receipts, until = job.out.with_name(".out.staging") / "receipts", time.monotonic() + PATIENCE_SEC
    while not (receipts.exists() and any(receipts.iterdir())):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 143
    assert stderr.splitlines()[-1].startswith(b"error: stopped by SIGTERM")
    assert (read()["exit_code"], read()["last_success_timestamp_seconds"]) == (143, 0)


def test_a_time_limit_is_told(line, command):
    result = command(*line, "--time-limit", "1s")  # which passes while libraries are being imported
    assert result.returncode == 124, result.stderr
    assert read()["exit_code"] == 124


def test_a_process_that_a_long_batch_keeps_tells_before_it_is_ended(line):
    code = (
        "import sys, time; from concurrent.futures import ThreadPoolExecutor\n"
        "from prefill_cli import cli, pipeline, signals\n"
        "def run(*_):\n"
        "    with ThreadPoolExecutor(1) as pool:\n"
        # Ready a little later: before submit has come back, the pool does not know its thread and would not wait for it.
        "        batch = lambda: (time.sleep(0.3), print('ready', file=sys.stderr, flush=True), time.sleep(100))\n"
        "        pool.submit(batch).result()\n"
        "signals.STOP_WITHIN_SEC = 0.2; pipeline.run = run; cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *line], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_SEC)
    assert (process.returncode, "before the current batch ended" in stderr) == (130, True)
    assert read()["exit_code"] == 130


def test_where_the_package_is_missing_nothing_begins_and_the_error_says_what_to_install(line, job):
    code = "import sys; sys.modules['prometheus_client'] = None; from prefill_cli.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: .*pip install 'prefill-score\[metrics\]'\n", result.stderr)
    assert not job.out.exists()
    assert not Path("rec.prom").exists()
    without = [sys.executable, "-c", code, *line[:-2]]
    assert subprocess.run(without, capture_output=True, timeout=100, check=False).returncode == 0, "it is not needed else"


# --- the file ---------------------------------------------------------------------------------------------------------


def file_in_a_folder_that_is_not_there(tmp_path: Path) -> Path:
    return tmp_path / "gone" / "rec.prom"


def folder_of_that_name(tmp_path: Path) -> Path:
    (tmp_path / "rec.prom").mkdir()
    return tmp_path / "rec.prom"


def device(tmp_path: Path) -> Path:
    return Path("/dev/full")


@pytest.mark.parametrize("place", [file_in_a_folder_that_is_not_there, folder_of_that_name, device])
def test_a_file_that_cannot_be_written_is_a_warning_and_hides_no_error(line, job, tmp_path, place):
    file = place(tmp_path)
    line[-1] = str(file)
    was = file.stat().st_mode if file.exists() else None
    result = invoke(*line, "--quiet")
    assert (result.exit_code, json.loads(result.stdout)["status"]) == (0, "done")
    assert re.fullmatch(rf"\S+ warning --metrics-file {file}: .*\n", result.stderr)
    assert is_finished(job.out)
    break_items(job)
    result = invoke(*line, "--quiet")
    assert result.exit_code == 4
    assert re.search(r"^error: .*items\.parquet: no such file", result.stderr, re.M)
    assert was == (file.stat().st_mode if file.exists() else None)


def cut(text: bytes) -> bytes:
    return text[: text.rindex(b"\n", 0, -1) + 1]


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lambda text: text[:-3],
        lambda text: text[: len(text) // 2],
        lambda text: b"",
        lambda text: bytes(100),
        lambda text: b"\xff" + text,
        lambda text: text.replace(b"exit_code{", b"exit_cold{"),
        lambda text: text + b'prefill_score_rows{output="x"} NaN\n',
        lambda text: text.replace(b'reason="', b'reasons="'),
    ],
)
def test_a_damaged_file_is_replaced_with_a_warning(line, job, damage):
    write_prompts(job.inputs, [*job.prompts[:29], None])
    line += ["--max-rejects", "1"]
    assert invoke(*line).exit_code == 0
    whole = Path("rec.prom").read_bytes()
    Path("rec.prom").write_bytes(damage(whole))
    break_items(job)
    result = invoke(*line)
    assert result.exit_code == 4
    assert re.search(r"warning --metrics-file rec\.prom: what was there is replaced, not carried over: .", result.stderr)
    assert read().keys() == metrics.ALWAYS.keys()
    assert not set(result.stderr) & ({*map(chr, range(32))} - {"\n"})


def test_a_file_of_another_output_is_replaced_with_a_warning(line, job, tmp_path):
    assert invoke(*line).exit_code == 0
    result = invoke(*line, "-o", tmp_path / "other")
    assert result.exit_code == 0
    assert f"it tells of {job.out}, and each output needs a file of its own" in result.stderr
    assert output_in() == str(tmp_path / "other")


def test_no_instant_has_half_a_file(line, job, monkeypatch):
    assert invoke(*line).exit_code == 0
    whole = Path("rec.prom").read_bytes()

    def stopped(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", stopped)
    result = invoke(*line)
    assert (result.exit_code, "No space left on device" in result.stderr) == (0, True)
    assert Path("rec.prom").read_bytes() == whole
    assert alone(Path())


def test_every_value_is_a_finite_number_and_none_is_negative(line):
    assert invoke(*line).exit_code == 0
    assert all(math.isfinite(value) and value >= 0 for value in read().values())
