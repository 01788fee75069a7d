"""--engine ray on a real Ray: one of its own, and a cluster of two nodes whose processes are killed."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, random_prompts, write_prompts
from test_workers import KILLER, parts, wait_for

from prefill_cli import signals
from prefill_cli.engines import engine_of
from prefill_cli.errors import Interrupted, UsageError

ROWS, SHARD_ROWS = 192, 12


def processes(words: str) -> dict[int, str]:
    """Command lines that have `words` in them, by process."""
    found = {}
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in text:
                found[int(line.parent.name)] = text
    return found


class Nodes:
    """A Ray of two nodes on this machine, a core each; the first one is the head."""

    def __init__(self, environment: dict[str, str]) -> None:
        from ray.cluster_utils import Cluster

        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            self._cluster = Cluster()
            self._environment = environment
            # The head has no core, so that a node with workers can go while the cluster stays.
            self._cluster.add_node(num_cpus=0, include_dashboard=False)
            self.nodes = [self._add(), self._add()]
        self.address = self._cluster.address

    def _add(self):
        return self._cluster.add_node(num_cpus=1)

    def another(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            self.nodes.append(self._add())

    def workers(self) -> list[int]:
        """Processes of actors of ours."""
        return list(processes("ray::_RayWorker"))

    def kill_node(self) -> None:
        """All processes of a node at once, as when its power goes."""
        node = self.nodes.pop(0)
        raylets = [process.process.pid for process in node.all_processes["raylet"]]
        below = [pid for raylet in raylets for pid in _children(raylet)]
        for pid in (*raylets, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.worker_nodes.discard(node)

    def stop(self) -> None:
        self._cluster.shutdown()


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """With workers that die at the shard that a file names, or take their time, as in test_workers."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "sitecustomize.py").write_text(KILLER)
    paths = [str(folder), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    nodes = Nodes(
        {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TEST_KILL": str(folder / "kill"), "HF_HUB_OFFLINE": "1"}
    )
    nodes.kill = folder / "kill"
    yield nodes
    nodes.stop()


@pytest.fixture
def big(job, tmp_path):
    """Sixteen shards, their bytes when this process does them, and the command line of that."""
    inputs = write_prompts(tmp_path / "many" / "p.parquet", random_prompts(ROWS))
    job.run(inputs=(str(inputs),), shard_rows=SHARD_ROWS, output=tmp_path / "alone")
    line = [sys.executable, "-m", "prefill_cli", "run", inputs, "-m", job.model, "-i", job.items, "-o", tmp_path / "out",
            "-k", 5, "--device", "cpu", "--dtype", "float32", "--shard-rows", SHARD_ROWS]  # fmt: skip
    job.line, job.whole, job.out = list(map(str, line)), parts(tmp_path / "alone"), tmp_path / "out"
    return job


def on(cluster, *more: object) -> list[str]:
    return ["--engine", "ray", "--ray-address", cluster.address, "--workers", "2", "--cpus-per-worker", "1", *map(str, more)]


def start(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(run: subprocess.Popen[str], code: int = 0) -> dict[str, object]:
    out, err = run.communicate(timeout=110)
    assert run.returncode == code, err
    return json.loads(out) if out else {"stderr": err}


def test_a_ray_of_its_own_gives_the_same_bytes_and_leaves_nothing_behind(big):
    before = set(processes("raylet"))
    totals = end(start([*big.line, "--engine", "ray", "--workers", "2", "--cpus-per-worker", "1"]))
    assert parts(big.out) == big.whole
    manifest = json.loads((big.out / "_manifest.json").read_text())
    assert sum(row["rows"] for row in manifest["workers"]) == totals["rows_out"] == ROWS
    wait_for(lambda: set(processes("raylet")) <= before, 20)


def test_two_nodes_give_the_same_bytes(big, cluster):
    end(start([*big.line, *on(cluster)]))
    assert parts(big.out) == big.whole


@pytest.fixture
def times(thorough, cluster):
    """How often; of several times shards take longer, so that a moment after the first is in the midst of others."""
    if thorough:
        cluster.kill.write_text("pause 1.5")
    yield 10 if thorough else 1
    cluster.kill.unlink(missing_ok=True)


def any_moment(big, run: subprocess.Popen[str], seed: int) -> None:
    """From the beginning of workers on, or (every other time) while shards are done."""
    if seed % 2:
        begun(big, run)
    time.sleep(random.Random(seed).uniform(0, 2 if seed % 2 else 6))


def receipts(big) -> list[Path]:
    return list(big.out.with_name(".out.staging").glob("receipts/0*.json"))


def begun(big, run: subprocess.Popen[str]) -> None:
    """Wait until a shard is done."""
    wait_for(lambda: receipts(big) or run.poll() is not None)


def test_an_actor_that_is_killed_at_any_moment_changes_nothing(big, cluster, times):
    for seed in range(times):
        run = start([*big.line, *on(cluster, "--overwrite")])
        workers = wait_for(cluster.workers)
        any_moment(big, run, seed)
        for pid in workers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end(run)
        assert parts(big.out) == big.whole
        shutil.rmtree(big.out)


def test_a_node_that_goes_at_any_moment_changes_nothing(big, cluster, times):
    for seed in range(times):
        run = start([*big.line, *on(cluster, "--overwrite")])
        wait_for(cluster.workers)
        any_moment(big, run, seed)
        cluster.kill_node()
        cluster.another()
        end(run)
        assert parts(big.out) == big.whole
        shutil.rmtree(big.out)


def test_a_driver_that_is_killed_at_any_moment_is_started_again_and_ends(big, cluster, times):
    for seed in range(times):
        run = start([*big.line, *on(cluster, "--overwrite")])
        begun(big, run)
        time.sleep(random.Random(seed).uniform(0, 2))
        run.kill()
        run.communicate()
        wait_for(lambda: not cluster.workers())
        end(start([*big.line, *on(cluster, "--overwrite")]))
        assert parts(big.out) == big.whole
        shutil.rmtree(big.out)


def test_a_shard_that_kills_every_actor_is_given_up(big, cluster):
    cluster.kill.write_text("2")
    try:
        assert "12 of 192 rows are rejected so far (12 worker_died)" in end(start([*big.line, *on(cluster)]), 7)["stderr"]
        end(start([*big.line, *on(cluster, "--max-rejects", 12)]))
    finally:
        cluster.kill.unlink()
    rejects = pq.read_table(big.out / "_rejects")
    assert rejects["source_row"].to_pylist() == list(range(24, 36))


def test_half_by_slices_half_by_ray_is_one_result(big, cluster):
    for number in range(2):  # the first and the third quarter
        assert end(start([*big.line, "--shard-of", f"{2 * number}/4"]))["status"] == "slice done"
    end(start([*big.line, *on(cluster)]))
    assert parts(big.out) == big.whole
    workers = json.loads((big.out / "_manifest.json").read_text())["workers"]
    assert sum(row["shards"] for row in workers) == 8


def test_an_error_of_an_actor_has_its_own_exit_code(big, cluster):
    run = start([*big.line, *on(cluster), "--workers", "1"])
    begun(big, run)
    path = Path(big.line[4])
    path.write_bytes(path.read_bytes() + b"x")
    assert "the file changed while the run was reading it" in end(run, 3)["stderr"]


def test_signals_end_a_run_in_order(big, cluster):
    run = start([*big.line, *on(cluster)])
    begun(big, run)
    run.terminate()
    assert "stopped by SIGTERM" in end(run, 143)["stderr"]
    wait_for(lambda: not cluster.workers())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGALRM, 124)])
def test_a_signal_in_a_call_of_rays_is_told_as_what_it_was(monkeypatch, signum, code):
    """Ray raises a KeyboardInterrupt in place of what the handler raised."""
    monkeypatch.setattr(signals, "heard", [])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        signals._stop_once(signum, None)
    with pytest.raises(Interrupted) as told, signals.as_heard():
        raise KeyboardInterrupt
    assert told.value.exit_code == code


def test_no_cluster_and_no_package_are_told(big, job, monkeypatch):
    said = end(start([*big.line, "--engine", "ray", "--ray-address", "127.0.0.1:1"]), 2)["stderr"]
    assert "--ray-address 127.0.0.1:1: no Ray cluster answers there" in said
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--engine ray needs .*: pip install 'prefill-score\[ray\]'"):
        engine_of(job.config(engine="ray"))
