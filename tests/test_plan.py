"""What `plan` and `run --dry-run` tell: counts against brute force and against the run itself."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import WORDS, random_prompts, write_items, write_prompts

from prefill_cli import machine, views
from prefill_cli.data import expected
from prefill_cli.data.lengths import bound
from prefill_cli.encoding import prefill
from prefill_cli.errors import OutputError
from prefill_cli.planning import plan_job
from prefill_cli.tools import plan as tool
from prefill_cli.tools.forecast import estimate, probe, survey
from prefill_cli.tools.forecast.estimate import Stages, Timed

INSTRUCTION = " ".join(WORDS[i % 60] for i in range(7, 47))  # 40 tokens


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache"


@pytest.fixture
def mixed(job):
    """Prompts that share an instruction, some equal, some too long for 64 tokens, some without a prompt."""
    rng = np.random.default_rng(5)
    prompts = [f"{INSTRUCTION} {' '.join(rng.choice(WORDS, rng.integers(1, 15)))}" for _ in range(40)]
    prompts += [prompts[0]] * 5 + [None, "  ", f"{INSTRUCTION} {INSTRUCTION}", "w1 <|user|> w2"]
    write_prompts(job.inputs, prompts)
    job.prompts = prompts
    return job


def plan(job, rows=None, probe_sec=0.0, dry_run=False, **options):
    return tool.plan(job.config(**options), rows, probe_sec, dry_run)


def no_model(*_, **__):
    raise AssertionError("the model is not to be loaded")


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run_main(*arguments: object) -> int:
    """The command in this process; returns its exit code."""
    from typer.testing import CliRunner

    from prefill_cli.cli import app

    return CliRunner().invoke(app, [*map(str, arguments)])


def test_counts_are_those_of_brute_force(mixed):
    told = plan(mixed, max_rejects="10")
    ids = [["<s>", *p.split()] for p in mixed.prompts if p and p.strip()]
    ids = [row if len(row) <= 64 else [row[0], *row[-63:]] for row in ids]
    assert (told["rows"], told["files"], told["shards"], told["sampled_rows"]) == (49, 1, 1, 49)
    assert told["reject_reasons"] == {"null_prompt": 1, "empty_prompt": 1}
    assert told["tokens"] == sum(map(len, ids))
    assert told["truncated_rows"] == 1
    assert told["control_token_rows"] == 1
    once = list({tuple(row): row for row in ids}.values())
    assert told["copies"] == told["copies_in_shards"] == len(ids) - len(once) >= 5
    assert told["copied_tokens"] == told["tokens"] - sum(map(len, once))
    assert told["lengths"]["histogram"] == {str(b): n for b, n in sorted(Counter(bound(len(r)) for r in ids).items())}
    lengths = sorted(map(len, ids))
    assert told["lengths"]["quantiles"]["0.5"] == lengths[-(-len(lengths) // 2) - 1]
    assert (told["lengths"]["quantiles"]["0"], told["lengths"]["quantiles"]["1"]) == (lengths[0], 64)
    # The instruction is computed once, and the begin-of-sequence token with it.
    sharing = sum(row[1:41] == INSTRUCTION.split() for row in once)
    assert told["prefix_tokens_saved"] >= (sharing - 1) * 41 > 1000
    assert told["tokens_to_compute"] == told["tokens"] - told["copied_tokens"] - told["prefix_tokens_saved"]
    assert told["expected"] is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_rows": 16},
        {"share": False},
        {"max_batch_tokens": 2048, "shard_rows": 20},
        {"encoder": "plain", "max_batch_tokens": 256},
    ],
    ids=str,
)
def test_batches_and_tokens_are_what_the_run_then_reports(mixed, options, monkeypatch):
    for module in (prefill, survey):  # PyTorch tells a thread of a process that ran before of fewer threads
        monkeypatch.setattr(module, "lanes", lambda _: 2)
    told = plan(mixed, max_rejects="10", **options)
    totals = mixed.run(max_rejects="10", **options)
    names = ("rows", "rejects", "tokens", "computed_tokens", "batches", "shards", "truncated_rows", "control_token_rows")
    assert {name: told[name] for name in names} == {name: totals[name] for name in names}
    assert told["encoder"] == totals["encoder"]
    assert told["batches"] > 0


def test_rows_that_a_cache_knows_are_not_counted_as_work(mixed, tmp_path):
    options = {"cache": tmp_path / "vectors", "max_rejects": "10"}
    mixed.run(**options)
    stored = files_under(tmp_path / "vectors")
    write_prompts(mixed.inputs, [*mixed.prompts, "w3 w4 w5"])
    told = plan(mixed, **options)
    assert told["cached_rows"] == 47
    assert told["tokens_to_compute"] == 4
    assert files_under(tmp_path / "vectors") == stored, "nor does it leave word there"
    totals = mixed.run(output=tmp_path / "another", **options)
    assert [told[n] for n in ("cached_rows", "computed_tokens")] == [totals[n] for n in ("cached_rows", "computed_tokens")]


def test_a_cache_that_is_not_there_is_not_made(job, tmp_path):
    assert plan(job, cache=tmp_path / "vectors")["cached_rows"] == 0
    assert not (tmp_path / "vectors").exists()


def test_where_a_cache_knows_all_the_search_alone_is_tried(job, tmp_path, monkeypatch):
    job.run(cache=tmp_path / "vectors")
    monkeypatch.setattr(probe, "load_base_model", no_model)
    told = plan(job, probe_sec=5.0, cache=tmp_path / "vectors", output=tmp_path / "another")
    assert told["expected"]["encode_sec"] == 0
    assert told["expected"]["search_sec"] > 0
    assert told["expected"]["probe"]["searched_rows"] == 30


def test_a_sample_says_so_and_is_near_the_whole(job):
    write_prompts(job.inputs, random_prompts(3_000, seed=3))
    whole, part = plan(job), plan(job, rows=320)
    assert (whole["sampled_rows"], whole["sampling_error"]) == (3_000, 0.0)
    assert part["rows"] == 3_000
    assert part["sampled_rows"] == 320
    assert 0 < part["sampling_error"] < 0.2
    assert part["tokens"] == pytest.approx(whole["tokens"], rel=1.5 * part["sampling_error"])
    again = plan(job, rows=320)
    assert again | {"memory": 0} == part | {"memory": 0}, "and is the same one each time"


def test_whole_shards_are_sampled_where_there_is_room_and_each_row_once(job):
    write_prompts(job.inputs, ["w1"] * 100)
    found, _ = plan_job(job.config(shard_rows=10))
    assert [[s.index for s in group] for group in survey.groups_of(found, 35)] == [[1], [5], [8]]
    assert [g[0].rows for g in survey.groups_of(found, None)] == [10] * 10
    for sample in range(1, 10):
        (group,) = survey.groups_of(found, sample)
        rows = [row for s in group for row in range(s.start, s.start + s.rows)]
        assert len(rows) == len(set(rows)) == sample
        assert max(rows) < 100


def test_no_row_is_no_trouble(job):
    write_prompts(job.inputs, [])
    told = plan(job, probe_sec=1.0)
    assert (told["rows"], told["tokens"], told["batches"], told["expected"]) == (0, 0, 0, None)


def test_without_a_probe_no_model_is_loaded(job, monkeypatch):
    monkeypatch.setattr(probe, "load_base_model", no_model)
    assert plan(job)["tokens"] > 0
    with pytest.raises(AssertionError):
        plan(job, probe_sec=1.0)


@pytest.mark.parametrize("options", [{}, {"encoder": "plain", "max_batch_tokens": 64}], ids=str)
def test_the_expectation_stands_in_the_manifest_of_the_run_with_its_error(job, cache_folder, options):
    told = plan(job, probe_sec=5.0, **options)
    seconds = told["expected"]
    stages = ("plan_sec", "start_sec", "read_sec", "encode_sec", "search_sec", "write_sec")
    assert all(seconds[name] > 0 for name in stages)
    assert seconds["wall_sec"] == pytest.approx(sum(seconds[name] for name in stages))
    assert seconds["command_sec"] == seconds["wall_sec"] + seconds["launch_sec"]
    assert seconds["probe"]["batches"] == told["batches"]
    totals = job.run(**options)
    kept = json.loads((job.out / "_manifest.json").read_text())["expected"]
    assert kept["wall_sec"] == seconds["wall_sec"]
    assert kept["encode_sec"] == seconds["encode_sec"]
    assert kept["error"] == pytest.approx(totals["wall_sec"] / seconds["wall_sec"] - 1)


def test_another_run_has_no_expectation(job, tmp_path):
    plan(job, probe_sec=1.0)
    job.run(top_k=4)
    assert "expected" not in json.loads((job.out / "_manifest.json").read_text())
    job.run(output=tmp_path / "plain", encoder="plain")
    assert "expected" not in json.loads((tmp_path / "plain" / "_manifest.json").read_text()), "another pace"


def test_a_resumed_run_has_no_expectation(job, monkeypatch):
    plan(job, probe_sec=1.0, shard_rows=10)
    job_commit = plan_job(job.config(shard_rows=10))[0].staging.__class__.commit

    def commit(self, shard, receipt):
        if shard.index == 1:
            raise OutputError("the disk is full")
        job_commit(self, shard, receipt)

    with monkeypatch.context() as patch:
        patch.setattr("prefill_cli.data.staging.Staging.commit", commit)
        with pytest.raises(OutputError):
            job.run(shard_rows=10)
    told = plan(job, shard_rows=10, dry_run=True)
    assert (told["status"], told["done_shards"]) == ("resume", 1)
    job.run(shard_rows=10)
    assert "expected" not in json.loads((job.out / "_manifest.json").read_text())


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\x00", b'{"wall_sec": 1, "encode_sec": 1, "made_at": ""}', b"[" * 9999]
)
def test_a_damaged_expectation_is_as_good_as_none(job, cache_folder, content):
    plan(job, probe_sec=1.0)
    (kept,) = (cache_folder / "prefill-score" / "expected").iterdir()
    kept.write_bytes(content)
    job.run()
    assert "expected" not in json.loads((job.out / "_manifest.json").read_text())


def test_parts_have_the_same_bytes_with_and_without_an_expectation(job, tmp_path):
    job.run(output=tmp_path / "before")
    plan(job, probe_sec=1.0)
    job.run()
    part = "part-00000.parquet"
    assert (job.out / part).read_bytes() == (tmp_path / "before" / part).read_bytes()
    before, after = (json.loads((out / "_manifest.json").read_text()) for out in (tmp_path / "before", job.out))
    assert before["fingerprint"] == after["fingerprint"]


def test_a_cache_folder_that_cannot_be_written_is_no_trouble(job, cache_folder, monkeypatch):
    cache_folder.write_text("a file")
    assert plan(job, probe_sec=1.0)["expected"]["wall_sec"] > 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    expected.keep({}, {}, {"wall_sec": 1.0, "encode_sec": 1.0})
    assert expected.find({}, {}) is None


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_old_expectations_go(cache_folder, monkeypatch):
    monkeypatch.setattr(expected, "MOST_FILES", 3)
    for i in range(5):
        expected.keep({"run": i}, {}, {"wall_sec": float(i + 1), "encode_sec": 0.0})
        (found,) = [p for p in (cache_folder / "prefill-score" / "expected").iterdir() if p.stat().st_mtime > 1e9]
        os.utime(found, (i, i))
    found = [expected.find({"run": i}, {}) for i in range(5)]
    assert [f and f["wall_sec"] for f in found] == [None, None, 3.0, 4.0, 5.0]


def test_a_dry_run_leaves_no_trace_and_tells_what_the_run_would_find(job, tmp_path):
    def look(**options):
        before = files_under(tmp_path)
        told = plan(job, dry_run=True, **options)
        assert files_under(tmp_path) == before
        return told

    assert look()["status"] == "new"
    assert look(output=tmp_path / "not" / "yet" / "there")["status"] == "new"
    job.run()
    assert look()["status"] == "unchanged"
    with pytest.raises(OutputError, match=r"holds the result of another run; different: top_k \(5, now 4\)"):
        look(top_k=4)
    assert look(top_k=4, overwrite=True)["status"] == "new"
    told = plan(job, top_k=4)
    assert told["status"] == "refused"
    assert "top_k" in told["why"]
    assert told["tokens"] > 0


@pytest.mark.parametrize("what", ["foreign", "file", "leftovers", "locked", "below a file"])
def test_what_is_in_the_way_of_the_run_is_in_the_way_of_the_dry_run(job, tmp_path, what):
    output = job.out
    if what == "foreign":
        job.out.mkdir()
        (job.out / "notes.txt").write_text("mine")
    elif what == "file":
        job.out.write_text("mine")
    elif what == "leftovers":
        (tmp_path / ".out.staging" / "receipts").mkdir(parents=True)
        (tmp_path / ".out.staging" / "receipts" / "00000.json").write_text("{}")
    elif what == "below a file":
        (tmp_path / "file").write_text("mine")
        output = tmp_path / "file" / "out"
    else:
        from prefill_cli.data.locks import locked

        with locked(job.out):
            before = files_under(tmp_path)
            with pytest.raises(OutputError, match=f"process {os.getpid()} on .* is writing this output"):
                plan(job, dry_run=True)
            assert files_under(tmp_path) == before
        return
    before = files_under(tmp_path)
    with pytest.raises(OutputError) as dry:
        plan(job, dry_run=True, output=output)
    assert files_under(tmp_path) == before
    with pytest.raises(OutputError) as real:
        job.run(output=output)
    assert dry.value.exit_code == real.value.exit_code
    if what != "below a file":  # where the run fails at its lock already
        assert str(dry.value) == str(real.value)


def test_exit_codes_are_those_of_the_run(job, tmp_path):
    options = ["-m", job.model, "-i", job.items, "-o", job.out, "--device", "cpu", "--dtype", "float32", "--quiet"]
    wrong = {
        2: [job.inputs, *options, "--top-k", "0"],
        3: [job.inputs, *options, "--prompt-column", "text"],
        4: [job.inputs, *options, "-i", write_items(tmp_path / "narrow.parquet", dim=8)],
        5: [job.inputs, *options, "-m", tmp_path / "no-model"],
        6: [job.inputs, *options, "-o", tmp_path / "in" / "prompts.parquet" / "x"],
    }
    for code, arguments in wrong.items():
        done = run_main("run", *arguments, "--dry-run")
        assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert not job.out.exists()


def test_too_many_rejects_are_told_and_end_a_dry_run_as_they_would_the_run(mixed):
    options = ["-m", mixed.model, "-i", mixed.items, "-o", mixed.out, "--device", "cpu", "--dtype", "float32"]
    done = run_main("run", mixed.inputs, *options, "--dry-run")
    assert done.exit_code == 7
    assert json.loads(done.stdout)["rejects"] == 2
    assert "2 of 49 rows would be rejected (1 null_prompt, 1 empty_prompt)" in done.stderr
    told = run_main("plan", mixed.inputs, *options, "--probe", "0")
    assert told.exit_code == 0
    assert "2 of 49 rows would be rejected" in told.stderr


def test_json_and_table_tell_the_same(job, monkeypatch, capsys):
    told = plan(job, probe_sec=1.0)
    views.print_plan(told, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(told))
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", "100")
    views.print_plan(told, as_json=False)
    shown = capsys.readouterr().out
    assert f"{told['tokens']:,}, {told['lengths']['mean']:,.0f} a prompt" in shown
    assert "all rows" in shown
    bars = [line for line in shown.splitlines() if line.strip().startswith("to ")]
    counts = list(told["lengths"]["histogram"].values())
    drawn = [max(line.count("█"), line.count("#")) for line in bars if not line.strip().startswith("to compute")]
    assert len(drawn) == len(counts)
    assert np.argmax(drawn) == np.argmax(counts)
    assert all(len(line) <= 100 for line in shown.splitlines())
    views.print_plan(plan(job, rows=10), as_json=False)
    shown = capsys.readouterr().out
    assert "a sample of 10 rows" in shown
    assert "not probed" in shown


def test_a_limit_that_the_run_would_exceed_is_told(job, monkeypatch, caplog):
    monkeypatch.setattr(tool, "_seconds", lambda *_: {"wall_sec": 100.0, "encode_sec": 1.0})
    plan(job, probe_sec=1.0, time_limit="1m")
    assert "the run may take 100 s, more than --time-limit 1m" in caplog.text
    monkeypatch.setattr(machine, "free_memory", lambda *_: 1e6)
    plan(job)
    assert "GB of memory, more than is free; lower --shard-rows" in caplog.text


def test_an_unchanged_result_needs_no_reading(job, monkeypatch, capsys):
    job.run()
    monkeypatch.setattr(survey.Surveyor, "load", no_model)
    told = plan(job, dry_run=True)
    assert (told["status"], told["rows"]) == ("unchanged", 30)
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    views.print_plan(told, as_json=False)
    assert "unchanged" in capsys.readouterr().out


def test_several_inputs_need_no_name_for_a_result(job, tmp_path):
    other = write_prompts(tmp_path / "in" / "more.parquet", random_prompts(5, seed=1))
    told = plan(job, inputs=(str(job.inputs), str(other)), output=None)
    assert (told["rows"], told["files"], told["output"]) == (35, 2, None)


def test_without_items_all_is_told_but_a_search(job, cache_folder):
    told, whole = plan(job, probe_sec=2.0, items=None), plan(job, probe_sec=2.0)
    counts = ("rows", "tokens", "computed_tokens", "batches", "lengths", "copies")
    assert [told[name] for name in counts] == [whole[name] for name in counts]
    assert told["expected"]["encode_sec"] > 0
    assert (told["expected"]["search_sec"], told["memory"]["parts"]["search"]) == (0.0, 0)
    (kept,) = (cache_folder / "prefill-score" / "expected").iterdir()  # that of the whole run
    assert json.loads(kept.read_text())["wall_sec"] == whole["expected"]["wall_sec"]


# --- the arithmetic of the estimate ------------------------------------------------------------------------------------


def test_a_fit_finds_the_cost_that_batches_were_made_of():
    rng = np.random.default_rng(0)
    sizes = [(int(c), int(p)) for c, p in zip(rng.integers(1, 9, 40) * 1024, rng.integers(10**5, 10**7, 40), strict=True)]
    timed = [Timed(c, p, 0.01 + 2e-4 * c + 3e-8 * p, False) for c, p in sizes] + [Timed(1024, 10**5, 0.5, True)]
    cost = estimate.fit(timed)
    assert (cost.constant, cost.cell, cost.pair) == pytest.approx((0.01, 2e-4, 3e-8), rel=1e-6)
    assert cost.prefixes == pytest.approx(0.5 / (0.01 + 2e-4 * 1024 + 3e-3))
    assert cost.spread < 1e-9


def test_a_fit_of_few_batches_has_no_negative_cost_and_keeps_the_sum():
    assert estimate.fit([]) is None
    one = estimate.fit([Timed(2048, 10**6, 0.4, False)])
    assert one.of([survey.Batch(4096, 5)]) == pytest.approx([0.8])
    for seconds in ([0.5, 0.4], [0.4, 0.5, 0.1]):
        timed = [Timed(1024 * (i + 1), 10**5 * (i + 1) ** 2, sec, False) for i, sec in enumerate(seconds)]
        cost = estimate.fit(timed)
        assert min(cost.constant, cost.cell, cost.pair) >= 0
        assert sum(cost.of(survey.Batch(t.cells, t.pairs) for t in timed)) == pytest.approx(sum(seconds))


def test_lanes_take_the_next_batch_as_soon_as_they_are_free():
    assert estimate.makespan([4.0, 1.0, 1.0, 1.0, 2.0], 2) == 5.0
    assert estimate.makespan([4.0, 1.0], 1) == 5.0
    assert estimate.makespan([], 3) == 0.0


def test_stages_overlap_as_far_as_they_leave_cores_to_each_other():
    stages, idle, busy = [Stages(1.0, 3.0, 0.5)] * 3, Stages(0.0, 0.0, 0.0), Stages(1.0, 1.0, 1.0)
    assert estimate.wall_sec(stages, idle) == 1.0 + 3 * 3.0 + 0.5
    assert estimate.wall_sec(stages, busy) == 3 * 4.5
    assert estimate.wall_sec(stages, Stages(0.5, 1.0, 1.0)) == 3 * 4.0
    assert estimate.wall_sec([Stages(5.0, 1.0, 0.0)] * 2, idle) == 5.0 + 5.0 + 1.0
    assert estimate.wall_sec([Stages(1.0, 2.0, 3.0)], busy) == 6.0
    assert estimate.wall_sec([], idle) == 0.0


def test_the_age_of_a_process_is_told_or_zero(monkeypatch):
    assert machine.process_sec() > 0
    monkeypatch.setattr(machine, "_read", lambda _: "")
    assert machine.process_sec() == 0.0
    assert machine.resident_bytes() > 10**6
