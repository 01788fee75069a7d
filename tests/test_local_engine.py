"""Shards side by side in one process: in order, and an error in any stage ends the run with its own words, soon."""

import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Watcher

from prefill_cli import machine, outcome, pipeline
from prefill_cli.data import results
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import InputError
from prefill_cli.worker import Worker


def slowly(monkeypatch, seconds: float = 0.2):
    """Every batch of the model takes its time, so that the stages meet."""
    encode = Worker.encode

    def slow(self, read, on_batch):
        def wait(rows, tokens):
            for _ in range(20):
                time.sleep(seconds / 20)
                on_batch(0, 0)
            on_batch(rows, tokens)

        return encode(self, read, wait)

    monkeypatch.setattr(Worker, "encode", slow)


def test_stages_of_neighbouring_shards_overlap_and_shards_come_in_order(job, monkeypatch):
    slowly(monkeypatch)
    told = []
    for name in ("read", "finish"):
        stage = getattr(Worker, name)

        def tell(self, what, name=name, stage=stage):
            shard = what if name == "read" else what.read.shard
            told.append((name, shard.index))
            return stage(self, what)

        monkeypatch.setattr(Worker, name, tell)
    watcher = Watcher()
    totals = pipeline.run(job.config(shard_rows=6), run_shards, watcher)
    assert watcher.rows == totals["rows"] == 30
    assert [i for name, i in told if name == "finish"] == list(range(5))
    for i in range(3):  # shard i + 2 is read before shard i + 1 is searched, while it is in the model
        assert told.index(("read", i + 2)) < told.index(("finish", i + 1))


@pytest.mark.parametrize("stage", ["read", "encode", "finish"])
def test_an_error_in_any_stage_ends_the_run_with_its_own_words(job, monkeypatch, stage):
    slowly(monkeypatch, 0.5)
    real = getattr(Worker, stage)

    def fail(self, what, *rest):
        shard = what if stage == "read" else what.shard if stage == "encode" else what.read.shard
        if shard.index == 1:
            raise InputError(f"broken in {stage}")
        return real(self, what, *rest)

    monkeypatch.setattr(Worker, stage, fail)
    began = time.monotonic()
    with pytest.raises(InputError, match=f"broken in {stage}"):
        pipeline.run(job.config(shard_rows=6), run_shards, Watcher())
    assert time.monotonic() - began < 10
    assert not job.out.exists()
    monkeypatch.undo()
    assert pipeline.run(job.config(shard_rows=6), run_shards, Watcher())["status"] == "done"


def test_a_prompt_that_memory_does_not_hold_is_a_reject(job, monkeypatch):
    def with_a_failure(encoded):
        encoded.vectors[3] = np.nan
        return replace(encoded, out_of_memory=np.array([3]))

    def choose(self, *arguments):
        encoder = original(self, *arguments)
        monkeypatch.setattr(PrefillEncoder, "encode", lambda s, ids, told: with_a_failure(real(s, ids, told)))
        return encoder

    real, original = PrefillEncoder.encode, Worker._choose_encoder
    monkeypatch.setattr(Worker, "_choose_encoder", choose)
    totals = job.run(max_rejects="1")
    assert (totals["rows_out"], totals["reject_reasons"]) == (29, {"out_of_memory": 1})
    assert pq.read_table(job.out / results.REJECTS_FOLDER)["source_row"].to_pylist() == [3]


def test_search_has_all_cores_though_the_encoders_threads_take_one_each(job, monkeypatch):
    """What PyTorch tells a new thread is one, once a pool has threads of one: a run's search was left with a single lane."""
    seen, search = [], outcome.search
    monkeypatch.setattr(outcome, "search", lambda *given: (seen.append(torch.get_num_threads()), search(*given))[1])
    job.run(shard_rows=10)
    job.run(shard_rows=10, output=job.out.with_name("again"))
    assert seen == [machine.threads()] * 6
    assert machine.threads() == torch.get_num_threads()
