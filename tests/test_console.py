"""What is printed where: the result on stdout, all else on stderr, and nothing that a log file cannot hold."""

import io
import json
import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from conftest import random_prompts, write_prompts
from typer.testing import CliRunner

from prefill_cli import cli, console, views
from prefill_cli.data.manifest import is_finished

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
LINE = re.compile(r"[\d,]+ of 30 rows, [\d,]+ tokens/s, (\d+ s left|time left unknown)")
SHARD = re.compile(
    r"shard (\d+) of (\d+) done: ([\d,]+) rows, [\d,]+ rows/s, [\d,]+ tokens/s, ([\d,]+) cached, ([\d,]+) rejected"
)


@pytest.fixture
def line(job) -> list[str]:
    given = ["run", job.inputs, "-m", job.model, "-i", job.items, "-o", job.out, "-k", 5, "--device", "cpu"]
    return [*map(str, given), "--dtype", "float32"]


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def environment(**changes: str) -> dict[str, str]:
    """The process's own, less what describes a terminal."""
    return {k: v for k, v in os.environ.items() if k not in ("TERM", "COLUMNS", "LINES")} | changes


# --- real processes ---------------------------------------------------------------------------------------------------


def test_in_a_cron_job_there_is_no_control_character_and_stdout_is_one_json_object(line, job, tmp_path):
    """stdin closed, stdout and stderr files, no TERM, no COLUMNS, and a name of the output that is not text."""
    output = os.fsdecode(b"night-\xff-\xc3\xa9")
    line[line.index("-o") + 1] = output
    with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
        code = subprocess.run(
            [sys.executable, "-m", "prefill_cli", *line], stdout=out, stderr=err, env=environment(), check=False,
            preexec_fn=lambda: os.close(0),
        ).returncode  # fmt: skip
    stdout, stderr = (tmp_path / "stdout").read_bytes(), (tmp_path / "stderr").read_bytes()
    assert code == 0, stderr
    for text in (stdout, stderr):
        assert not set(text) & ({*range(32)} - {ord("\n")})
    assert stdout.count(b"\n") == 1
    totals = json.loads(stdout)
    assert (totals["status"], totals["rows_out"], totals["output"]) == ("done", 30, output)
    assert is_finished(Path(output))
    plan, shard = stderr.decode().splitlines()
    assert re.fullmatch(rf"{STAMP} info 30 rows in 1 file, 50 items, .* on cpu, at most 64 tokens a prompt", plan)
    assert re.fullmatch(rf"{STAMP} info {SHARD.pattern}", shard)


def test_with_stderr_closed_the_run_succeeds_and_stdout_holds_the_result_alone(line, job, command):
    write_prompts(job.inputs, [*random_prompts(29), None])
    result = command(*line, "--max-rejects", "50%", stderr=None, capture_output=False, stdout=subprocess.PIPE,
                     preexec_fn=lambda: os.close(2))  # fmt: skip
    assert result.returncode == 0
    assert json.loads(result.stdout)["rows_out"] == 29


def test_an_error_with_stderr_closed_is_told_by_the_exit_code_alone(command):
    result = command("run", "gone.parquet", "-m", "m", "-i", "i", stderr=None, capture_output=False, stdout=subprocess.PIPE,
                     preexec_fn=lambda: os.close(2))  # fmt: skip
    assert (result.returncode, result.stdout) == (3, "")


def drain(descriptor: int, into: list[bytes], stop: threading.Event) -> None:
    while not stop.is_set() or select.select([descriptor], [], [], 0)[0]:
        if select.select([descriptor], [], [], 0.05)[0]:
            try:
                into.append(os.read(descriptor, 65_536))
            except OSError:  # the other side is closed
                return


def test_on_a_terminal_there_is_a_live_bar_and_a_table(line):
    ends, read, threads, stop = [pty.openpty(), pty.openpty()], ([], []), [], threading.Event()
    for (reading, window), into in zip(ends, read, strict=True):
        termios.tcsetwinsize(window, (24, 100))
        threads.append(threading.Thread(target=drain, args=(reading, into, stop)))
        threads[-1].start()
    try:
        code = subprocess.run(
            [sys.executable, "-m", "prefill_cli", *line, "--shard-rows", "1"], stdout=ends[0][1], stderr=ends[1][1],
            env=environment(TERM="xterm", COLUMNS="100"), timeout=100, check=False,
        ).returncode  # fmt: skip
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for pair in ends:
            for descriptor in pair:
                os.close(descriptor)
    stdout, stderr = (b"".join(parts).decode() for parts in read)
    assert code == 0, stderr
    assert re.search(r"\r +0%\|.*\| 0/30 \[", stderr), "the bar"
    assert "rows/s" in stderr
    assert re.search(r"^30 rows in 1 file", stderr), "text for whoever watches has no date"
    assert not SHARD.search(stderr), "the bar tells it"
    assert stderr.rstrip(" ").endswith("\r"), "the bar is wiped when it is done"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stdout)
    assert re.search(r"^status +done *\r$", plain, re.M)
    assert re.search(r"^rows_out +30 *\r$", plain, re.M)
    assert "truncated_rows" not in plain, "what is zero and no matter is left out"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_of_stdout_that_leaves_early_is_no_traceback(job, command, more):
    job.run()
    reading, writing = os.pipe()
    os.close(reading)
    result = command("show", job.out, *more, stdout=writing, stderr=subprocess.PIPE, capture_output=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_full_disk_below_stdout_is_an_error_in_one_line(job, command):
    job.run()
    with open("/dev/full", "w") as full:
        result = command("show", job.out, "--json", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (result.returncode, result.stderr) == (6, "error: stdout: cannot be written: No space left on device\n")


# --- messages ---------------------------------------------------------------------------------------------------------


def test_quiet_leaves_warnings_and_the_result(line, job):
    result = invoke(*line, job.inputs, "--quiet")
    assert json.loads(result.stdout)["rows_out"] == 30
    assert re.fullmatch(rf"{STAMP} warning {job.inputs} was named twice and is read once\n", result.stderr)


def test_messages_are_told_on_stderr_alone(line):
    result = invoke(*line)
    assert "30 rows in 1 file, 50 items" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_every_line_of_the_json_log_is_an_object(line, job, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY_SEC", 0)
    result = invoke(*line, job.inputs, "--log-format", "json")
    lines = [json.loads(text) for text in result.stderr.splitlines()]
    assert {"info", "warning"} == {entry["level"] for entry in lines}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", entry["time"]) for entry in lines)
    progress = [entry for entry in lines if "rows_done" in entry]
    assert progress[-1]["rows_done"] == progress[-1]["rows"] == 30
    assert progress[-1]["tokens_per_sec"] > 0
    assert progress[-1]["rows_per_sec"] > 0
    assert LINE.fullmatch(progress[-1]["message"])


def shards_told(*arguments: object) -> list[dict[str, object]]:
    lines = map(json.loads, invoke(*arguments, "--log-format", "json").stderr.splitlines())
    return [entry for entry in lines if "shard" in entry]


def test_each_shard_that_is_done_is_told_once_with_its_figures(line, job, tmp_path):
    write_prompts(job.inputs, [*job.prompts[:28], None, None])
    more = ("--shard-rows", "12", "--max-rejects", "3", "--cache", tmp_path / "vectors")
    told = shards_told(*line, *more)
    assert [(t["shard"], t["shards"], t["rows"], t["cached_rows"], t["rejects"]) for t in told] == [
        (0, 3, 12, 0, 0), (1, 3, 12, 0, 0), (2, 3, 6, 0, 2),
    ]  # fmt: skip
    names = "time level message shard shards rows rows_per_sec tokens_per_sec cached_rows rejects"
    for entry in told:
        assert (entry["level"], set(entry)) == ("info", set(names.split()))
        assert math.isfinite(entry["rows_per_sec"])
        assert min(entry["rows_per_sec"], entry["tokens_per_sec"]) > 0
        number, shards, rows, _, rejects = SHARD.fullmatch(entry["message"]).groups()
        assert (int(number), int(shards)) == (entry["shard"] + 1, 3)
        assert (int(rows), int(rejects)) == (entry["rows"], entry["rejects"])
    again = shards_told(*line, *more, "-k", "4", "--overwrite")
    assert [t["cached_rows"] for t in again] == [12, 12, 4], "what a cache served is told too"


def test_after_a_resume_only_the_new_shards_are_told(line, job):
    write_prompts(job.inputs, [*job.prompts[:20], *[None] * 10])
    more = ("--shard-rows", "10", "--max-rejects")
    assert [t["shard"] for t in shards_told(*line, *more, "9")] == [0, 1, 2]
    assert shards_told(*line, *more, "10") == []
    assert is_finished(job.out)


def test_rates_are_finite_and_not_negative_on_a_clock_that_stands_still(line, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert all(0 < t["rows_per_sec"] < math.inf for t in shards_told(*line))


def test_a_name_with_control_characters_breaks_no_line(capsys, monkeypatch):
    console.listen(dated=True)
    logging.getLogger("prefill_cli.x").warning("%s: gone", "a\r\nb\x1b[31m\x9bc")
    assert re.fullmatch(rf"{STAMP} warning a b \[31m c: gone\n", capsys.readouterr().err)


@pytest.mark.parametrize("source", ["option", "file"])
def test_an_error_is_a_json_object_too_where_the_log_is(line, job, source):
    job.inputs.unlink()
    if source == "file":
        Path("prefill-score.toml").write_text("log-format = 'json'")
    result = invoke(*line, *(["--log-format", "json"] if source == "option" else []))
    entry = json.loads(result.stderr)
    assert (result.exit_code, entry["level"]) == (3, "error")
    assert "no such file" in entry["message"]


def test_an_error_of_several_lines_becomes_one(capsys):
    console.print_error("a\n  b\tc\r\nd")
    assert capsys.readouterr().err == "error: a b c d\n"


def test_a_listener_of_stderr_that_left_does_not_stop_the_work(line, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(console, "LINE_EVERY_SEC", 0)

    def listen(*options):
        monkeypatch.setattr(sys, "stderr", Broken())
        return listen_as_ever(*options)

    listen_as_ever = console.listen
    monkeypatch.setattr(console, "listen", listen)
    result = invoke(*line)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "done"


def test_without_any_stderr_messages_go_nowhere(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    console.listen()
    logging.getLogger("prefill_cli.x").warning("nobody hears this")
    console.print_error("nor this")
    assert capsys.readouterr().out == ""


# --- progress ---------------------------------------------------------------------------------------------------------


def test_a_plain_progress_line_appears_at_the_interval(line, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY_SEC", 0)
    told = invoke(*line, "--shard-rows", "10").stderr.splitlines()[1:]
    assert all(re.fullmatch(rf"{STAMP} info ({LINE.pattern}|{SHARD.pattern})", text) for text in told)
    told = [text.split(" info ")[1] for text in told if LINE.search(text)]
    assert told[-1].startswith("30 of 30 rows, ")
    assert told[-1].endswith(" 0 s left")


def test_no_progress_line_appears_before_the_interval_is_over(line):
    assert not LINE.search(invoke(*line).stderr)


def test_quiet_tells_no_shard_and_has_no_progress_line(line, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY_SEC", 0)
    assert invoke(*line, "--quiet").stderr == ""


def test_the_time_left_counts_only_what_this_run_did(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console, "LINE_EVERY_SEC", 5)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console.Progress(console.listen())
    progress.start(rows=1_000, done=800)
    now[0] = 10.0
    progress.advance(rows=100, tokens=5_000)
    monkeypatch.undo()
    # A hundred rows in ten seconds, whatever an earlier run did: the other hundred take ten more.
    assert capsys.readouterr().err == "900 of 1,000 rows, 500 tokens/s, 10 s left\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "bar"), [("xterm", True), ("dumb", False), (None, False)])
def test_a_bar_needs_a_terminal_that_can_draw_one(monkeypatch, term, bar):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.delenv("TERM", raising=False)
    if term:
        monkeypatch.setenv("TERM", term)
    with console.Progress(console.listen()) as progress:
        progress.start(10, 0)
        progress.advance(10, 50)
    assert ("\r" in sys.stderr.getvalue()) is bar


@pytest.mark.parametrize("options", [{"quiet": True}, {"log_format": "json"}])
def test_no_bar_where_it_is_not_wanted(monkeypatch, options):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    messages = console.listen(**options)
    with console.Progress(messages, options.get("quiet", False)) as progress:
        progress.start(10, 0)
        progress.advance(10, 50)
    assert sys.stderr.getvalue() == ""


def test_a_message_meanwhile_stands_on_a_line_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with console.Progress(console.listen()) as progress:
        progress.start(10, 0)
        logging.getLogger("prefill_cli.x").warning("mind the gap")
    assert re.search(r"\r *\rwarning: mind the gap\n", sys.stderr.getvalue())


def test_json_gives_an_object_on_a_terminal_too(line, monkeypatch):
    monkeypatch.setattr(views, "on_terminal", lambda stream: stream is sys.stdout)
    assert re.search(r"^status +done *$", invoke(*line).stdout, re.M)
    assert json.loads(invoke(*line, "--json").stdout)["status"] == "unchanged"
