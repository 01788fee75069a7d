"""--shard-of I/N and `finish`: every N-th shard by whoever, one published result, no coordinator."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import Watcher, random_prompts, write_prompts
from s3_server import s3, s3_server  # noqa: F401
from test_workers import parts

from prefill_cli import pipeline
from prefill_cli.config import RunConfig, from_dict
from prefill_cli.data import locks
from prefill_cli.data.disk import read_json
from prefill_cli.data.staging import Staging
from prefill_cli.errors import OutputError, TooManyRejectsError
from prefill_cli.places import Uri

OTHERS = "slice-0-of-2 of another run are being done; wait for them"


def finish(out, **options):
    return pipeline.finish(out, Watcher(), **options)


@pytest.fixture
def whole(job, tmp_path):
    """The bytes of the same run in one piece, in shards of 2: 15 of them."""
    job.run(shard_rows=2, output=tmp_path / "whole")
    return parts(tmp_path / "whole")


def staging(job):
    return job.out.with_name(".out.staging")


def test_slices_in_any_order_and_finish_give_the_bytes_of_one_run(job, whole):
    for number in (2, 0, 1):
        with pytest.raises(OutputError, match=r"shards are not done|no run that was begun"):
            finish(job.out)
        totals = job.run(shard_rows=2, shard_of=f"{number}/3")
        assert (totals["status"], totals["slice"], totals["shards"], totals["rows"]) == ("slice done", f"{number}/3", 5, 10)
        assert not job.out.exists()
    assert totals["missing_shards"] == 0
    done = finish(job.out)
    assert (done["status"], done["rows"], done["shards"]) == ("done", 30, 15)
    assert parts(job.out) == whole
    assert not staging(job).exists()
    assert finish_again(job) == "unchanged"


def finish_again(job) -> str:
    """What a slice that a scheduler repeats says."""
    return str(job.run(shard_rows=2, shard_of="1/3")["status"])


def test_what_is_missing_is_named_and_the_command_without_a_slice_does_it(job, whole):
    job.run(shard_rows=2, shard_of="0/2")
    says = (
        r"7 of 15 shards are not done \(from 0: 1, 3, 5, 7, 9, …\); start the slices again that did not end, or do the rest"
    )
    with pytest.raises(OutputError, match=says):
        finish(job.out)
    assert job.run(shard_rows=2)["shards"] == 15
    assert parts(job.out) == whole


def test_a_slice_is_taken_up_where_it_ended(job, whole, monkeypatch):
    staged = []

    def stop(self, shard, receipt):
        commit(self, shard, receipt)
        staged.append(shard.index)
        if len(staged) == 2:
            raise KeyboardInterrupt

    commit = Staging.commit
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            job.run(shard_rows=2, shard_of="1/3")
    job.run(shard_rows=2, shard_of="0/3")
    assert sorted(staged) == [1, 4]
    watched = job.run(shard_rows=2, shard_of="1/3")
    assert (watched["shards"], watched["missing_shards"]) == (5, 5)
    job.run(shard_rows=2, shard_of="2/3")
    assert finish(job.out)["status"] == "done"
    assert parts(job.out) == whole


def test_more_slices_than_shards_leave_some_with_nothing_to_do(job):
    assert job.run(shard_rows=20, shard_of="5/9")["rows"] == 0
    job.run(shard_rows=20, shard_of="0/9")
    job.run(shard_rows=20, shard_of="1/9")
    assert finish(job.out)["rows"] == 30


def test_slices_at_once_are_processes_that_do_not_meet(job, whole):
    line = [sys.executable, "-m", "prefill_cli", "run", job.inputs, "-m", job.model, "-i", job.items, "-o", job.out,
            "-k", "5", "--device", "cpu", "--dtype", "float32", "--shard-rows", "2"]  # fmt: skip
    slices = [[*map(str, line), "--shard-of", f"{i}/3"] for i in range(3)]
    running = [subprocess.Popen(slice_, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for slice_ in slices]
    ends = [run.communicate(timeout=100) for run in running]
    assert [run.returncode for run in running] == [0, 0, 0], ends
    assert all(json.loads(out)["shards"] == 5 for out, _ in ends)
    assert finish(job.out)["status"] == "done"
    assert parts(job.out) == whole


def test_the_same_slice_and_the_whole_run_are_refused_while_a_slice_lives(job):
    with locks.locked(job.out, "slice-0-of-2"):
        with pytest.raises(OutputError, match=r"slice-0-of-2\.lock: process \d+ on"):
            job.run(shard_of="0/2")
        with pytest.raises(OutputError, match="slice-0-of-2 of a run are being done; wait for them"):
            job.run()
        with pytest.raises(OutputError, match="no run that was begun"):
            finish(job.out)
        assert job.run(shard_of="1/2", shard_rows=2)["shards"] == 7
        with pytest.raises(OutputError, match=OTHERS):
            job.run(shard_of="1/2", shard_rows=2, top_k=4, overwrite=True)
    with locks.locked(job.out), pytest.raises(OutputError, match="is writing this output"):
        job.run(shard_of="0/2")


def test_rejects_are_counted_over_all_slices(job, tmp_path):
    inputs = (str(write_prompts(tmp_path / "bad" / "p.parquet", [None, *random_prompts(4), None, *random_prompts(14)])),)
    for number in range(2):
        job.run(inputs=inputs, shard_rows=4, max_rejects="1", shard_of=f"{number}/2")
    with pytest.raises(TooManyRejectsError, match="2 of 20 rows are rejected"):
        finish(job.out)
    assert finish(job.out, max_rejects="2")["rejects"] == 2
    assert pq.read_table(job.out / "_rejects")["source_row"].to_pylist() == [0, 5]


def test_finish_goes_where_the_run_was_begun(job, tmp_path, monkeypatch):
    monkeypatch.chdir(job.inputs.parent)
    for number in range(2):
        job.run(inputs=("prompts.parquet",), shard_rows=10, output=tmp_path / "out", shard_of=f"{number}/2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert finish(Path("..") / "out")["rows"] == 30
    assert read_json(tmp_path / "out" / "_manifest.json")["options"]["inputs"] == ["prompts.parquet"]


def test_finish_of_nothing_says_so(tmp_path):
    with pytest.raises(OutputError, match="out: no run that was begun is waiting there; `run --shard-of` begins one"):
        finish(tmp_path / "out")


def test_options_survive_the_way_through_the_folder(tmp_path):
    config = RunConfig(inputs=("a", "b"), model="m", items=Uri("s3://b/i.parquet"), output=tmp_path, keep_columns=("x", "y"),
                       max_rejects="3%", compile=False, workers="2", dims=8, score="cosine")  # fmt: skip
    assert from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_slices_on_an_object_store(job, s3):  # noqa: F811
    out = Uri(f"{s3}/sliced")
    for number in (1, 0):
        assert job.run(shard_rows=10, output=out, shard_of=f"{number}/2")["missing_shards"] == (2 if number else 0)
    with pytest.raises(OutputError, match="no run that was begun"):
        finish(Uri(f"{s3}/nothing"))
    assert finish(out)["rows"] == 30
