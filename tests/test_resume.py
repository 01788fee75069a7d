"""A run that ends early is taken up by the same command, and nobody can tell from the result."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import WORDS, Watcher, random_prompts, reference_vectors, write_items, write_prompts

from prefill_cli import job as plan
from prefill_cli import pipeline, worker
from prefill_cli.data.disk import read_json, write_json
from prefill_cli.data.manifest import MANIFEST, SUCCESS
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.engines import local
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import OutputError, TooManyRejectsError

PATIENCE_SEC = 60


def parts(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def staged(job) -> Path:
    return job.out.with_name(".out.staging")


def receipts(job) -> int:
    return len(list((staged(job) / "receipts").glob("*.json")))


def stop_after(job, shards: int, **options: object) -> None:
    """A run that ends, as by a signal, when `shards` shards are committed."""

    def engine(job, todo, progress):
        yield from itertools.islice(run_shards(job, todo, progress), shards)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job.config(**options), engine, Watcher())


def test_a_model_that_fails_in_a_later_shard_publishes_nothing_and_the_same_command_finishes(job, tmp_path, monkeypatch):
    choose, calls = worker.Worker._choose_encoder, itertools.count(1)

    def fragile(worker, *arguments):
        encoder = choose(worker, *arguments)
        encode = encoder.encode

        def encode_or_fail(*args):
            if next(calls) == 3:
                raise RuntimeError("boom")
            return encode(*args)

        encoder.encode = encode_or_fail
        return encoder

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_choose_encoder", fragile)
        with pytest.raises(RuntimeError, match="boom"):
            job.run(shard_rows=7)
    assert not job.out.exists()
    assert receipts(job) == 2
    assert not (staged(job) / "result" / SUCCESS).exists()

    watcher = Watcher()
    totals = pipeline.run(job.config(shard_rows=7), run_shards, watcher)
    whole = job.run(shard_rows=7, output=tmp_path / "whole")
    assert watcher.started == (30, 14)
    assert watcher.rows == 16, "only what was missing is done"
    assert parts(job.out) == parts(tmp_path / "whole")
    timings = {
        "start_sec",
        "read_sec",
        "cache_sec",
        "encode_sec",
        "search_sec",
        "write_sec",
        "wall_sec",
        "tokens_per_sec",
        "peak_rss_bytes",
        "output",
    }
    assert {k: v for k, v in totals.items() if k not in timings} == {k: v for k, v in whole.items() if k not in timings}
    assert not staged(job).exists()


def test_a_run_that_had_only_to_publish_loads_no_model(job, monkeypatch):
    stop_after(job, 5, shard_rows=6)
    monkeypatch.setattr(worker, "Worker", None)
    monkeypatch.setattr(local, "Worker", None)
    assert job.run(shard_rows=6)["shards"] == 5


def test_rejects_of_both_runs_are_there(job, tmp_path):
    inputs = (str(write_prompts(tmp_path / "bad.parquet", [None, *random_prompts(20), "", *random_prompts(8)])),)
    stop_after(job, 2, inputs=inputs, shard_rows=6, max_rejects="2")
    totals = job.run(inputs=inputs, shard_rows=6, max_rejects="2")
    assert (totals["rows_out"], totals["rejects"]) == (28, 2)
    assert pq.read_table(job.out / "_rejects")["source_row"].to_pylist() == [0, 21]


def test_a_higher_limit_of_rejects_goes_on_where_the_lower_one_stopped(job, tmp_path):
    inputs = (str(write_prompts(tmp_path / "bad.parquet", [*random_prompts(12), None, *random_prompts(17)])),)
    with pytest.raises(TooManyRejectsError, match=r"1 of 30 rows are rejected so far"):
        job.run(inputs=inputs, shard_rows=6, max_rejects="0")
    assert receipts(job) == 3
    with pytest.raises(TooManyRejectsError):
        job.run(inputs=inputs, shard_rows=6, max_rejects="0")
    watcher = Watcher()
    pipeline.run(job.config(inputs=inputs, shard_rows=6, max_rejects="1"), run_shards, watcher)
    assert watcher.started == (30, 18)


# --- the inputs changed meanwhile -------------------------------------------------------------------------------------


def change(folder: Path) -> None:
    table = pq.read_table(folder / "2.parquet")
    pq.write_table(pa.concat_tables([table.slice(0, 1), table]), folder / "2.parquet")


def remove(folder: Path) -> None:
    (folder / "3.parquet").unlink()


def add(folder: Path) -> None:
    write_prompts(folder / "4.parquet", random_prompts(3, seed=9))


def rewrite(folder: Path) -> None:
    """Same size, same rows, other words."""
    write_prompts(folder / "1.parquet", random_prompts(6, seed=1)[::-1])


@pytest.mark.parametrize("harm", [change, remove, add, rewrite])
def test_inputs_that_changed_are_noticed_and_overwrite_equals_a_fresh_run(job, tmp_path, harm):
    folder = tmp_path / "many"
    for i in range(4):
        write_prompts(folder / f"{i}.parquet", random_prompts(6, seed=i))
    inputs = (str(folder),)
    stop_after(job, 3, inputs=inputs, shard_rows=4)
    harm(folder)
    with pytest.raises(OutputError, match=r"leftovers of another run; different: inputs\. Give --overwrite"):
        job.run(inputs=inputs, shard_rows=4)
    job.run(inputs=inputs, shard_rows=4, overwrite=True)
    job.run(inputs=inputs, shard_rows=4, output=tmp_path / "fresh")
    assert parts(job.out) == parts(tmp_path / "fresh")


def test_the_token_budget_of_the_first_start_is_reused(job, tmp_path):
    stop_after(job, 2, shard_rows=10, max_batch_tokens=50)
    job.run(shard_rows=10, max_batch_tokens=9_999)
    job.run(shard_rows=10, max_batch_tokens=50, output=tmp_path / "whole")
    assert read_json(job.out / MANIFEST)["model"]["max_batch_tokens"] == 50
    assert parts(job.out) == parts(tmp_path / "whole")


def test_a_thousand_prompts_of_random_length_keep_their_order(job, tmp_path):
    rng = np.random.default_rng(0)
    prompts = [f"w{i // 60} {tail} w{i % 60}" for i, tail in enumerate(random_prompts(1000, longest=38))]
    ids = rng.permutation(1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thousand small passes: threads would only wait for one another
    vectors = reference_vectors(job.model, [[1, *(WORDS.index(w) + 5 for w in p.split())] for p in prompts])
    torch.set_num_threads(threads)
    items = write_items(tmp_path / "own.parquet", ids=pa.array(ids), vectors=vectors)
    inputs = (str(write_prompts(tmp_path / "thousand.parquet", prompts, user_id=pa.array(ids))),)
    options = {"inputs": inputs, "items": items, "score": "cosine", "shard_rows": 300, "max_batch_tokens": 500, "top_k": 1}
    stop_after(job, 2, **options)
    job.run(**options)
    table = pq.read_table(job.out)
    assert table["user_id"].to_pylist() == ids.tolist()
    assert [best[0] for best in table["item_ids"].to_pylist()] == ids.tolist()


# --- real processes, real signals -------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Looks at OUT all the time: it must be absent or complete. With `never_absent`, complete."""

    def __init__(self, out: Path, never_absent: bool = False) -> None:
        super().__init__()
        self._out, self._stop_looking, self._never_absent = out, threading.Event(), never_absent
        self.faults: list[object] = []
        self.looks = 0

    def __enter__(self) -> "Reader":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_looking.set()
        self.join()

    def run(self) -> None:
        while not self._stop_looking.is_set():
            self._look()
            time.sleep(0.002)

    def _look(self) -> None:
        self.looks += 1
        try:
            folder = os.open(self._out, os.O_RDONLY)
        except FileNotFoundError:
            if self._never_absent:
                self.faults.append("absent")
            return
        try:
            names = set(os.listdir(folder))
            manifest = read_json(Path(f"/proc/self/fd/{folder}") / MANIFEST) or {"totals": {"shards": -1}}
            expected = {SUCCESS, MANIFEST, *(f"part-{i:05d}.parquet" for i in range(manifest["totals"]["shards"]))}
            # What ceased to be OUT while we looked is being removed, and nobody can open it any more.
            if names != expected and os.stat(self._out).st_ino == os.fstat(folder).st_ino:
                self.faults.append(names)
        finally:
            os.close(folder)


def start(job, *more: object) -> subprocess.Popen:
    line = ["run", job.inputs, "-m", job.model, "-i", job.items, "-o", job.out, "-k", 5, "--device", "cpu",
            "--dtype", "float32", "--shard-rows", 1, *more]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "prefill_cli", *map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(process: subprocess.Popen, what, may_end: bool = False) -> None:
    until = time.monotonic() + PATIENCE_SEC
    while not what():
        if process.poll() is not None:
            assert may_end, process.communicate()
            return
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def long_job(job):
    """A hundred and fifty shards of one row: a second or more between the first receipt and the last."""
    write_prompts(job.inputs, random_prompts(150))
    return job


def test_sigkill_at_any_moment_leaves_the_old_result_and_the_same_command_gives_the_same_bytes(long_job, tmp_path):
    job = long_job
    job.run(shard_rows=100, top_k=2)
    old = parts(job.out)
    moments = (
        lambda: receipts(job) > 5,
        (staged(job) / "result" / MANIFEST).exists,
    )
    with Reader(job.out, never_absent=True) as reader:
        for moment in moments:
            process = start(job, "--overwrite")
            # The last moment is one of milliseconds, which a busy machine may miss.
            wait_for(process, moment, may_end=moment is moments[-1])
            process.kill()
            process.communicate(timeout=PATIENCE_SEC)
            assert process.returncode == -signal.SIGKILL or (process.returncode == 0 and moment is moments[-1])
        whole = tmp_path / "whole"
        job.run(shard_rows=1, output=whole)
        assert parts(job.out) in (old, parts(whole))
        job.run(shard_rows=1, overwrite=True)
    assert reader.looks > 100
    assert not reader.faults
    assert parts(job.out) == parts(whole)
    assert not staged(job).exists()
    assert not job.out.with_name(".out.lock").exists()


def test_budget_encoder_and_compiling_of_the_first_start_are_kept(job, tmp_path):
    stop_after(job, 1, shard_rows=7, max_batch_tokens=64, encoder="plain", compile=True)
    job.run(shard_rows=7, max_batch_tokens=4096, compile=False)
    made = json.loads((job.out / "_manifest.json").read_text())
    assert {k: made["model"][k] for k in ("max_batch_tokens", "encoder", "compile")} == {
        "max_batch_tokens": 64, "encoder": "plain", "compile": True,
    }  # fmt: skip
    assert made["totals"]["encoder"] == "plain"
    job.run(shard_rows=7, max_batch_tokens=64, encoder="plain", output=tmp_path / "whole")
    found, whole = (pq.read_table(sorted(folder.glob("*.parquet"))) for folder in (job.out, tmp_path / "whole"))
    assert found["item_ids"] == whole["item_ids"]
    # On a CPU without AVX-512 two plain runs of the same settings differ by rounding, up to 4.8e-6 here.
    scores = [np.concatenate(table["scores"].to_pylist()) for table in (found, whole)]
    np.testing.assert_allclose(*scores, atol=1e-5, rtol=1e-5)


def test_a_resume_does_not_probe_again(job, monkeypatch):
    monkeypatch.setitem(plan.PROBE_FROM, "cpu", 0.0)
    monkeypatch.setattr(PrefillEncoder, "probe", lambda self, budgets, prompts: setattr(self, "max_batch_tokens", 3_072))
    stop_after(job, 2, shard_rows=7)
    monkeypatch.setattr(PrefillEncoder, "probe", None)
    totals = job.run(shard_rows=7)
    assert (totals["max_batch_tokens"], read_json(job.out / MANIFEST)["model"]["max_batch_tokens"]) == (3_072, 3_072)


def test_receipts_of_a_version_that_told_less_are_taken_up(job):
    stop_after(job, 2, shard_rows=7)
    for path in (staged(job) / "receipts").iterdir():
        told, untold = read_json(path) or {}, ("encoder", "start_sec", "read_sec", "write_sec", "max_batch_tokens")
        write_json(path, {k: v for k, v in told.items() if k not in untold})
    totals = job.run(shard_rows=7)
    assert (totals["rows_out"], totals["encoder"]) == (30, "packed, plain")
