"""--workers N: several processes over the shards of one run, and what happens when one dies."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import PROJECT, Watcher, random_prompts, write_prompts

from prefill_cli import pipeline
from prefill_cli.data.inputs import Shard
from prefill_cli.engines import crew, engine_of, processes
from prefill_cli.errors import InputError, ItemsError, PrefillScoreError, TooManyRejectsError, UsageError
from prefill_cli.matrices import open_matrix
from prefill_cli.planning import plan_job
from prefill_cli.scoring.matrix import Matrix

SHARDS = [Shard(i, i * 10, 10) for i in range(6)]


class Play:
    """A crew that does what a script says: `dies` names (shard, how often) whose workers end with it in hand."""

    def __init__(self, dies: dict[int, int] | None = None, ready: int = 99) -> None:
        self.dies, self.ready = Counter(dies or {}), ready
        self.hired = self.closed = 0
        self.in_hand: dict[int, list[crew.Task]] = {}
        self.coming: list[crew.Event] = []
        self.most_in_hand: Counter[int] = Counter()
        self.given: list[crew.Task] = []
        self.dismissed: list[int] = []

    def hire(self) -> int:
        self.hired += 1
        self.in_hand[self.hired] = []
        if len(self.in_hand) <= self.ready:
            self.coming.append(crew.Ready(self.hired))
        return self.hired

    def give(self, worker: int, task: crew.Task) -> None:
        self.given.append(task)
        self.in_hand[worker].append(task)
        self.most_in_hand[worker] = max(self.most_in_hand[worker], len(self.in_hand[worker]))

    def dismiss(self, worker: int) -> None:
        assert not self.in_hand.pop(worker)
        self.dismissed.append(worker)

    def events(self) -> list[crew.Event]:
        if self.coming:
            found, self.coming = self.coming, []
            return found
        worker = max(self.in_hand, key=lambda number: len(self.in_hand[number]))
        if not self.in_hand[worker]:
            time.sleep(0.01)
            return []
        task = self.in_hand[worker][0]
        if self.dies[task.shard.index] > 0 and not task.give_up:
            self.dies[task.shard.index] -= 1
            del self.in_hand[worker]
            return [crew.Batch(worker, task.shard, 4, 40), crew.Death(worker, "by SIGKILL")]
        self.in_hand[worker].pop(0)
        return [crew.Batch(worker, task.shard, 7, 70), crew.Answer(worker, task.shard, {"why": task.give_up})]

    def close(self) -> None:
        self.closed += 1


def play(crew_: Play, workers: tuple[int, int] = (2, 2), shards: list[Shard] = SHARDS) -> tuple[dict[int, str], Watcher]:
    watcher = Watcher()
    leader = crew._Leader(crew_, shards, *workers, watcher)
    return {shard.index: receipt["why"] for shard, receipt in leader.answers()}, watcher


def test_every_shard_is_answered_once_and_progress_adds_up():
    done, watcher = play(Play())
    assert done == dict.fromkeys(range(6), "")
    assert watcher.rows == 60


def test_batches_that_are_heard_of_after_the_answer_do_not_count_again():
    actors = Play()
    events = actors.events

    def late() -> list[crew.Event]:
        found = events()
        return sorted(found, key=lambda event: isinstance(event, crew.Batch))

    actors.events = late
    assert play(actors)[1].rows == 60


def test_work_is_shared_evenly_at_the_end():
    """Four shards and two workers of which one comes late: nobody holds what another could do."""
    actors = Play()
    play(actors, shards=SHARDS[:2])
    assert max(actors.most_in_hand.values()) == 1
    actors = Play()
    play(actors, (1, 1), SHARDS)
    assert max(actors.most_in_hand.values()) == crew.IN_HAND


def test_no_more_workers_are_hired_than_shards_and_idle_ones_are_let_go():
    actors = Play()
    play(actors, (1, 50), SHARDS[:3])
    assert actors.hired == 3
    assert len(actors.dismissed) == 2


def test_the_shard_of_a_dead_worker_is_done_again_and_the_worker_replaced():
    actors = Play({2: 1})
    done, watcher = play(actors)
    assert done == dict.fromkeys(range(6), "")
    assert actors.hired == 3
    assert watcher.rows == 60


def test_a_shard_that_ends_three_workers_is_given_up_and_no_other_is():
    actors = Play({2: 99})
    done, _ = play(actors)
    assert [task.shard.index for task in actors.given if task.give_up] == [2]
    assert done == {i: "" for i in range(6) if i != 2} | {
        2: "3 workers ended with this row's shard in hand, the last by SIGKILL"
    }


def test_a_suspect_is_done_alone():
    actors = Play({0: 2})
    in_hand = actors.in_hand
    give = actors.give

    def checked(worker: int, task: crew.Task) -> None:
        if actors.dies[0] < 2 and (task.shard.index == 0 or any(t.shard.index == 0 for t in in_hand[worker])):
            assert not in_hand[worker]
        give(worker, task)

    actors.give = checked
    assert play(actors, (1, 1))[0] == dict.fromkeys(range(6), "")


def test_a_shard_whose_ids_cannot_be_read_either_ends_the_run():
    actors = Play({2: 99})
    events = actors.events

    def deadly() -> list[crew.Event]:
        for task in (tasks[0] for tasks in actors.in_hand.values() if tasks):
            if task.shard.index == 2 and task.give_up:
                worker = next(number for number, tasks in actors.in_hand.items() if tasks and tasks[0] is task)
                del actors.in_hand[worker]
                return [crew.Death(worker, "by SIGSEGV")]
        return events()

    actors.events = deadly
    with pytest.raises(InputError, match=r"shard 2 \(rows from 20 on\) ends every worker that reads it \(by SIGSEGV\)"):
        play(actors)


def test_workers_that_end_before_they_do_anything_end_the_run():
    actors = Play()
    actors.events = lambda: [crew.Death(actors.hired, "with exit code 1")]
    with pytest.raises(PrefillScoreError, match="5 workers one after another did nothing and ended with exit code 1"):
        play(actors)


def test_workers_that_never_come_end_the_run(monkeypatch):
    monkeypatch.setattr(crew, "WAIT_SEC", 0.05)
    with pytest.raises(PrefillScoreError, match="no worker has come"):
        play(Play(ready=0))


def test_one_worker_of_several_that_comes_does_everything():
    assert play(Play(ready=1))[0] == dict.fromkeys(range(6), "")


# --- real processes ---------------------------------------------------------------------------------------------------


def parts(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.parquet"))}


def worker_processes(parent: int) -> list[int]:
    """Its children that are workers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            above = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if above == parent and b"spawn_main" in line:
            found.append(int(status.parent.name))
    return found


def wait_for(condition, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)
    return found


def test_two_processes_give_the_bytes_of_one(job):
    one = job.run(shard_rows=6)
    two = job.run(shard_rows=6, workers="2", output=job.out.with_name("two"))
    assert parts(job.out.with_name("two")) == parts(job.out)
    same = ("rows", "rows_out", "tokens", "shards", "rejects")
    assert {name: two[name] for name in same} == {name: one[name] for name in same}
    workers = json.loads((job.out.with_name("two") / "_manifest.json").read_text())["workers"]
    assert [sum(row[name] for row in workers) for name in ("shards", "rows", "tokens")] == [5, 30, one["tokens"]]
    assert "workers" not in json.loads((job.out / "_manifest.json").read_text())
    assert not worker_processes(os.getpid())


def test_an_error_in_a_process_ends_the_run_as_it_does_in_this_one(job, tmp_path):
    inputs = write_prompts(tmp_path / "bad" / "p.parquet", random_prompts(30))
    with pytest.raises(UsageError, match="--workers 2: this machine has one mps device"):
        seats = job.config(workers="2", device="mps")
        processes.seats_of(SimpleNamespace(config=seats, device="mps"))
    settings = job.config(workers="2", inputs=(str(inputs),), shard_rows=6)
    engine = engine_of(settings)

    def spoil(job_, shards, progress):
        inputs.write_bytes(inputs.read_bytes()[:-1])
        yield from engine(job_, shards, progress)

    with pytest.raises(InputError, match="the file changed while the run was reading it"):
        pipeline.run(settings, spoil, Watcher())
    assert not worker_processes(os.getpid())


# Imported by every Python that starts with its folder on PYTHONPATH. Workers kill themselves at the shard whose number the
# file TEST_KILL holds; "once" after it: one of them does, and the file goes.
KILLER = """
import os, signal, sys, time
from pathlib import Path
if any(word in " ".join(sys.orig_argv) for word in ("spawn_main", "default_worker")):
    import prefill_cli.worker as w
    real, file = w.Worker.do, Path(os.environ.get("TEST_KILL", "none"))
    def do(self, shard, on_batch):
        found = file.read_text().split() if file.exists() else []
        if found[:1] == ["pause"]:
            time.sleep(float(found[1]))
        if found[:1] == [str(shard.index)]:
            if found[1:] == ["once"]:
                file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, shard, on_batch)
    w.Worker.do = do
"""


@pytest.fixture
def killer(tmp_path, monkeypatch):
    """A file that says at which shard workers die."""
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "sitecustomize.py").write_text(KILLER)
    paths = [str(tmp_path / "killer"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("TEST_KILL", str(tmp_path / "kill"))
    return tmp_path / "kill"


def test_a_process_that_is_killed_is_replaced_and_its_shard_done_again(job, killer):
    job.run(shard_rows=6)
    killer.write_text("2 once")
    job.run(shard_rows=6, workers="2", output=job.out.with_name("two"))
    assert parts(job.out.with_name("two")) == parts(job.out)


def test_rows_of_a_shard_that_kills_every_worker_are_rejected(job, killer):
    killer.write_text("2")
    with pytest.raises(TooManyRejectsError, match=r"6 of 30 rows are rejected so far \(6 worker_died"):
        job.run(shard_rows=6, workers="2")
    totals = job.run(shard_rows=6, workers="2", max_rejects="20%")
    assert (totals["rows_out"], totals["reject_reasons"]) == (24, {"worker_died": 6})
    rejects = pq.read_table(job.out / "_rejects")
    assert rejects["source_row"].to_pylist() == list(range(12, 18))
    assert rejects["user_id"].to_pylist() == pq.read_table(job.inputs)["user_id"].to_pylist()[12:18]
    assert set(rejects["detail"].to_pylist()) == {
        "3 workers ended with this row's shard in hand, the last by SIGKILL; the system may have run out of memory"
    }


def test_a_shard_that_was_given_up_is_tried_again_by_the_same_command(job, killer):
    killer.write_text("2")
    with pytest.raises(TooManyRejectsError):
        job.run(shard_rows=6, workers="2")
    with pytest.raises(TooManyRejectsError):
        pipeline.finish(job.out, Watcher())
    killer.unlink()
    totals = job.run(shard_rows=6)
    assert (totals["rows_out"], totals["rejects"]) == (30, 0)
    alone = job.out.with_name("alone")
    job.run(shard_rows=6, output=alone)
    assert parts(job.out) == parts(alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_run_however_it_ends_and_the_same_command_goes_on(job, number, tmp_path):
    inputs = write_prompts(tmp_path / "many" / "p.parquet", random_prompts(400))
    line = [sys.executable, "-m", "prefill_cli", "run", inputs, "-m", job.model, "-i", job.items, "-o", job.out, "-k", "5",
            "--device", "cpu", "--dtype", "float32", "--shard-rows", "4", "--workers", "2"]  # fmt: skip
    whole = job.run(inputs=(str(inputs),), shard_rows=4, output=tmp_path / "whole")
    run = subprocess.Popen(list(map(str, line)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    receipts = job.out.with_name(".out.staging") / "receipts"
    wait_for(lambda: list(receipts.glob("0*.json")))
    workers = worker_processes(run.pid)
    assert len(workers) == 2
    run.send_signal(number)
    _, said = run.communicate(timeout=30)
    assert run.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number], said
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10)
    assert len(list(receipts.glob("0*.json"))) < whole["shards"]
    again = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(again.stdout)["rows_out"] == 400
    assert "going on after an earlier run" in again.stderr
    assert parts(job.out) == parts(tmp_path / "whole")


def test_each_process_has_a_device_and_cores_of_its_own(job, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    seats = processes.seats_of(SimpleNamespace(config=job.config(workers="3"), device="cpu"))
    assert [seat.cores for seat in seats] == [(0, 1), (2, 3), (4, 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = SimpleNamespace(config=job.config(workers="2", device="cuda", cpus_per_worker=3), device="cuda")
    seats = processes.seats_of(cuda)
    assert [(seat.device, seat.cores) for seat in seats] == [("cuda:0", (0, 1, 2)), ("cuda:1", (3, 4, 5))]
    with pytest.raises(UsageError, match="--workers 3: this machine has 2 GPUs, and each worker takes one"):
        processes.seats_of(SimpleNamespace(config=job.config(workers="3", device="cuda"), device="cuda"))


def test_a_mapped_catalogue_goes_to_another_process_by_its_name(tmp_path):
    np.save(tmp_path / "items.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    rows, _ = open_matrix(tmp_path / "items.npy", "", ItemsError)
    packed = pickle.dumps(Matrix(rows, 2))
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert isinstance(again.source, np.memmap)
    assert np.array_equal(again.block(0, 4), np.load(tmp_path / "items.npy")[:, :2])
    (tmp_path / "items.npy").unlink()
    with pytest.raises(ItemsError, match=r"items\.npy: no such file on .*; every worker must see it under this path"):
        pickle.loads(packed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": "0"}, "--workers must be a number from 1 up, or a range like 2:16, not '0'"),
        ({"workers": "3:2"}, "--workers must be a number from 1 up, or a range like 2:16, not '3:2'"),
        ({"workers": "1:2"}, "--workers 1:2: a range needs --engine ray; processes are a fixed number"),
        ({"cpus_per_worker": 2}, "--cpus-per-worker needs --workers, more than one, or --engine ray"),
        ({"ray_address": "x:1"}, "--ray-address needs --engine ray"),
        ({"workers": "2", "device": "cuda:1"}, "--workers 2 takes one device each, so --device cuda:1 is one too few"),
        ({"shard_of": "3/3"}, "--shard-of must be I/N with I from 0 to N - 1, like 0/16, not '3/3'"),
        ({"shard_of": "1"}, "--shard-of must be I/N with I from 0 to N - 1, like 0/16, not '1'"),
    ],
)
def test_options_that_make_no_sense_are_refused(job, options, says):
    with pytest.raises(UsageError) as caught:
        job.config(**options)
    assert str(caught.value) == says


def test_a_gpu_that_only_workers_have_is_taken_at_its_word(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda: this machine has no such device that torch can use"):
        plan_job(job.config(device="cuda"))
    with pytest.raises(UsageError, match="this machine has no GPU to look at, so give --dtype, bfloat16 or float32"):
        plan_job(job.config(device="cuda", engine="ray", dtype="auto"))
    planned, fingerprint = plan_job(job.config(device="cuda", engine="ray", dtype="bfloat16"))
    assert (planned.device, planned.dtype, fingerprint["device"]) == ("cuda", "bfloat16", "cuda")
