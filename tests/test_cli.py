"""The command as a scheduler sees it: exit codes, one line for an error, and no prompt where none belongs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, random_prompts, write_items, write_prompts
from typer.testing import CliRunner

from prefill_cli import __version__, cli, outcome, pipeline, signals, worker
from prefill_cli.data.manifest import MANIFEST, is_finished
from prefill_cli.data.tokenization import PromptTokenizer
from prefill_cli.errors import Interrupted

FIELDS = {  # contract 2.6; cached_rows comes with the cache
    "status", "output", "rows", "rows_out", "rejects", "tokens", "computed_tokens", "truncated_rows", "control_token_rows",
    "retried_rows", "empty_lists", "unknown_ids", "dropped_items", "shards", "batches", "encoder",
    "start_sec", "read_sec", "encode_sec", "search_sec", "write_sec", "wall_sec",
    "tokens_per_sec", "peak_rss_bytes", "device", "dtype",
}  # fmt: skip
SECRET = "SECRET-123"


def invoke(*arguments: object, **env: str):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env=env)


@pytest.fixture
def line(job) -> list[object]:
    """The command line of `job`, less `run`."""
    return [job.inputs, "-m", job.model, "-i", job.items, "-o", job.out, "-k", 5, "--device", "cpu", "--dtype", "float32"]


def with_option(line: list[object], name: str, value: object) -> list[object]:
    return [value if i and line[i - 1] == name else given for i, given in enumerate(line)]


# --- exit codes -------------------------------------------------------------------------------------------------------


def bad_flag(job, line):
    return [*line, "--bogus"]


def number_that_is_none(job, line):
    return with_option(line, "-k", "many")


def contradiction(job, line):
    return [*line, "--prefix", "x", "--messages-column", "m"]


def unknown_key(job, line):
    Path("prefill-score.toml").write_text("topk = 3")
    return line


def two_columns_of_one_name(job, line):
    return [*line, "--keep-columns", "user_id"]


def missing_input(job, line):
    return [job.inputs.with_name("gone.parquet"), *line[1:]]


def damaged_input(job, line):
    job.inputs.write_bytes(job.inputs.read_bytes()[:-20])
    return line


def missing_column(job, line):
    return [*line, "--id-column", "uid"]


def missing_items(job, line):
    return with_option(line, "-i", "gone.parquet")


def items_of_another_width(job, line):
    return with_option(line, "-i", write_items(Path("narrow.parquet"), dim=8))


def missing_model(job, line):
    return with_option(line, "-m", "./gone")


def model_without_weights(job, line):
    shutil.copytree(job.model, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return with_option(line, "-m", "bare")


def foreign_output(job, line):
    job.out.mkdir()
    (job.out / "thesis.txt").touch()
    return line


def result_of_another_run(job, line):
    job.run(top_k=3)
    return line


def all_rows_rejected(job, line):
    write_prompts(job.inputs, [None] * 3)
    return line


CODES = {
    bad_flag: (2, r"No such option: --bogus; see .* run --help"),
    number_that_is_none: (2, r"'-?-?k'|--top-k"),
    contradiction: (2, r"--prefix is joined to prompt text"),
    unknown_key: (2, r"unknown key 'topk' \(did you mean 'top_k'\?\)"),
    two_columns_of_one_name: (2, r"'user_id' would stand twice"),
    missing_input: (3, r"gone\.parquet: no such file"),
    damaged_input: (3, r"prompts\.parquet: not readable as Parquet"),
    missing_column: (3, r"no column 'uid'"),
    missing_items: (4, r"gone\.parquet: no such file"),
    items_of_another_width: (4, r"8 wide, but .* gives vectors of 32"),
    missing_model: (5, r"--model \./gone: no such folder"),
    model_without_weights: (5, r"bare: no weights"),
    foreign_output: (6, r"no run of prefill-score made it"),
    result_of_another_run: (6, r"different: top_k \(3, now 5\)"),
    all_rows_rejected: (7, r"3 of 3 rows are rejected"),
}


@pytest.mark.parametrize("harm", CODES, ids=lambda harm: harm.__name__)
def test_every_failure_has_its_exit_code_one_line_on_stderr_and_nothing_on_stdout(job, line, harm):
    code, message = CODES[harm]
    result = invoke("run", *harm(job, line), "--quiet")
    assert result.exit_code == code
    assert result.stdout == ""
    assert re.fullmatch(rf"error: .*({message}).*\n", result.stderr)
    if harm is not result_of_another_run:
        assert not is_finished(job.out)


def test_one_reject_of_a_hundred_is_within_the_default_limit_and_above_a_limit_of_none(job, line):
    write_prompts(job.inputs, [*random_prompts(99), None])
    assert invoke("run", *line, "--max-rejects", "0").exit_code == 7
    assert invoke("run", *line).exit_code == 0


@pytest.mark.parametrize(("signum", "code"), [(15, 143), (2, 130)])
def test_a_signal_is_told_in_one_line(line, monkeypatch, signum, code):
    monkeypatch.setattr(pipeline, "run", lambda *_: signals.stop(signum, None))
    result = invoke("run", *line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"error: {Interrupted(signum)}\n"


def test_a_keyboard_interrupt_of_a_library_counts_as_sigint(line, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    result = invoke("run", *line)
    assert (result.exit_code, result.stderr) == (130, f"error: {Interrupted(2)}\n")


def test_a_usage_error_in_a_process_of_its_own_is_one_line_too(command):
    result = command("run", "--bogus")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: No such option: --bogus; see .*run --help\n", result.stderr)


def test_without_a_command_the_help_is_shown():
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")
    assert "Commands:" in result.stderr


def test_version_and_short_help():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"prefill-score {__version__}\n")
    for arguments in (["-h"], ["run", "-h"], ["show", "-h"], ["inspect", "-h"]):
        assert invoke(*arguments).exit_code == 0
        assert invoke(*arguments).output == invoke(*arguments[:-1], "--help").output


# --- a bug of ours, and what it may not tell --------------------------------------------------------------------------


def test_a_bug_is_one_line_and_a_traceback_only_on_request(line, monkeypatch):
    def broken(*_):
        raise ValueError(f"cannot digest {SECRET}\nat all")

    monkeypatch.setattr(pipeline, "run", broken)
    result = invoke("run", *line)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(
        r"error: a bug in prefill-score: ValueError in test_cli\.py:\d+; PREFILL_SCORE_DEBUG=1 shows the traceback\n",
        result.stderr,
    )
    result = invoke("run", *line, PREFILL_SCORE_DEBUG="1")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "in broken" in result.stderr
    assert "Traceback" not in invoke("run", *line, PREFILL_SCORE_DEBUG="0").stderr


def crash_in_tokenization(monkeypatch):
    def call(self, column):
        raise RuntimeError(f"cannot encode {column.to_pylist()}")

    monkeypatch.setattr(PromptTokenizer, "__call__", call)


def crash_in_encoding(monkeypatch):
    class Encoder:
        def encode(self, input_ids, on_batch):
            raise RuntimeError(f"prompt {SECRET}")

    monkeypatch.setattr(worker.Worker, "_choose_encoder", lambda *_: Encoder())


def crash_in_search(monkeypatch):
    def search(*_):
        raise RuntimeError(f"prompt {SECRET}")

    monkeypatch.setattr(outcome, "search", search)


def no_crash(monkeypatch):
    pass


@pytest.mark.parametrize("crash", [crash_in_tokenization, crash_in_encoding, crash_in_search, no_crash])
def test_prompts_appear_nowhere_but_in_the_input(job, line, tmp_path, monkeypatch, crash):
    prompts = [
        f"{SECRET} w1",
        f"w2 {SECRET}",
        *(f"{SECRET} " + p for p in random_prompts(8, longest=39)),
        SECRET + " w1" * 70,
    ]
    write_prompts(job.inputs, [*prompts, f" {SECRET}\x00"])
    crash(monkeypatch)
    options = ["--truncate", "reject", "--max-rejects", "100%", "--shard-rows", 3]
    result = invoke("run", *line, *options)
    assert result.exit_code == (0 if crash is no_crash else 1)
    told = [result.stdout, result.stderr]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    if crash is not no_crash:  # leftovers of a later crash, then the refusal of another run
        invoke("run", *line, *options, "--max-rejects", "0")
        told += [str(v) for v in invoke("run", *line, "--json").__dict__.values()]
    written = [p for place in (job.out, job.out.with_name(".out.staging")) for p in place.rglob("*") if p.is_file()]
    assert written
    told += [str(pq.read_table(p).to_pylist()) if p.suffix == ".parquet" else p.read_text() for p in written]
    assert any("too_long" in text for text in told)
    assert not [text for text in told if SECRET in text]


# --- what the line says and what stdout gives -------------------------------------------------------------------------


def test_a_run_gives_one_json_object_with_every_field_of_the_contract(job, line):
    result = invoke("run", *line)
    assert result.exit_code == 0
    totals = json.loads(result.stdout)
    assert totals.keys() >= FIELDS
    assert (totals["status"], totals["output"], totals["rows"]) == ("done", str(job.out), 30)
    assert json.loads((job.out / MANIFEST).read_text())["totals"] == totals
    again = invoke("run", *line)
    assert again.exit_code == 0
    assert json.loads(again.stdout) == totals | {"status": "unchanged"}
    assert "holds this very result already; nothing to do" in again.stderr


def test_the_input_alone_is_enough_where_the_file_of_the_folder_says_the_rest(job):
    Path("prefill-score.toml").write_text(
        f"model = '{job.model}'\nitems = 'items.parquet'\ntop-k = 4\ndevice = 'cpu'\nkeep-columns = ['prompt']\n"
    )
    assert invoke("run", "in/prompts.parquet").exit_code == 0
    table = pq.read_table("prompts.topk")
    assert table.column_names == ["user_id", "prompt", "item_ids", "scores"]
    assert len(table["item_ids"][0]) == 4
    assert invoke("run", "in/prompts.parquet", "-k", "2", "--overwrite", PREFILL_SCORE_TOP_K="3").exit_code == 0
    assert len(pq.read_table("prompts.topk")["item_ids"][0]) == 2


def test_the_file_that_config_names_serves_from_anywhere(job, monkeypatch):
    Path("elsewhere").mkdir()
    Path("night.toml").write_text(f"model = '{job.model}'\nitems = 'items.parquet'\noutput = 'tonight'")
    monkeypatch.chdir("elsewhere")
    assert invoke("run", job.inputs, "--config", "../night.toml").exit_code == 0
    assert is_finished(Path("../tonight"))


def test_every_option_of_the_line_reaches_the_run(line, monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "run", lambda config, *_: seen.append(config) or {"status": "done"})
    given = [
        "--keep-columns", "a,b", "--no-generation-prompt", "--max-length", 9, "--keep-head", 2, "--append-eos", "--pooling",
        "mean", "--dims", 3, "--normalize", "--score", "cosine", "--bad-items", "drop", "--allow", "a.txt", "--layout",
        "long", "--max-batch-tokens", 64, "--max-rejects", "5", "--offline", "--no-trust-remote-code", "--prefix", "p ",
    ]  # fmt: skip
    assert invoke("run", *line, *given).exit_code == 0
    config = seen[0]
    assert (config.keep_columns, config.generation_prompt, config.max_length, config.keep_head) == (("a", "b"), False, 9, 2)
    assert (config.append_eos, config.pooling, config.dims, config.normalize) == (True, "mean", 3, True)
    assert (config.score, config.bad_items, config.allow, config.layout) == ("cosine", "drop", Path("a.txt"), "long")
    assert (config.max_batch_tokens, config.max_rejects, config.offline) == (64, "5", True)
    assert (config.trust_remote_code, config.prefix, config.top_k, config.dtype) == (False, "p ", 5, "float32")


def test_the_long_layout_and_rejects_are_counted(job, line):
    exclude = pa.array([[f"i{i}" for i in range(50)], *[[]] * 8, None], pa.list_(pa.string()))
    write_prompts(job.inputs, [*random_prompts(9), None], seen=exclude)
    result = invoke("run", *line, "--layout", "long", "--exclude-column", "seen", "--max-rejects", "50%")
    totals = json.loads(result.stdout)
    assert (totals["rows"], totals["rows_out"], totals["rejects"], totals["empty_lists"]) == (10, 9, 1, 1)
    table = pq.read_table(job.out)
    assert table.column_names == ["user_id", "rank", "item_id", "score"]
    assert table.num_rows == 8 * 5


def test_standard_streams_that_are_closed_never_become_files_of_the_result(tmp_path):
    """The first file that is opened after the start gets a number above those of the three streams."""
    code = "import os; from prefill_cli import cli; cli.app = lambda: os._exit(os.open('x', os.O_CREAT)); cli.main()"
    for closed in ((), (0,), (2,), (0, 1, 2)):
        number = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(PROJECT)},
            preexec_fn=lambda closed=closed: [os.close(c) for c in closed], check=False,
        ).returncode  # fmt: skip
        assert number > 2
