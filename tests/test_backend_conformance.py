"""What every backend gives for the same token ids: the vectors of plain Transformers, a prompt at a time, in float32.

vLLM's half needs vLLM (`make test-vllm`) and is left out where there is none. Heads of its CPU kernels are 32 wide at least,
so the models here are wider than the other tests'.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import WORDS, Watcher, make_tokenizer, write_items, write_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prefill_cli import pipeline
from prefill_cli.config import RunConfig
from prefill_cli.encoding import vllm_engine
from prefill_cli.encoding.choice import TOLERANCE, choose_encoder, choose_vllm, plain_encoder
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import load_base_model, open_model_folder
from prefill_cli.encoding.vllm import BATCH_TOKENS
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import ModelError

WIDTH, LIMIT = 64, 512
COMPONENT = 2e-6  # of vectors of length 1 in float32, the largest difference of a component
NEEDS_VLLM = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
ENCODERS = ["plain", "packed", pytest.param("vllm", marks=NEEDS_VLLM)]
BACKENDS = ["transformers", pytest.param("vllm", marks=NEEDS_VLLM)]


def save(folder: Path, kind: str = "llama", **others: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LIMIT, "initializer_range": 0.1,
        "bos_token_id": 1, "eos_token_id": 2,
    } | others  # fmt: skip
    gpt2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": LIMIT}
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, **gpt2)),
    }[kind]()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of model folders. Read only."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3", "gpt2"):
        save(root / kind, kind)
    return root


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    """Of every length around a block of vLLM's, the longest that fit, prefixes that many share, copies; in no order."""
    rng = np.random.default_rng(0)

    def some(n: int) -> np.ndarray:
        return rng.integers(3, 5 + len(WORDS), n).astype(np.int32)

    shared = some(150)
    found = [np.concatenate([shared, some(n)]) for n in rng.integers(1, 100, 16)]
    found += [np.concatenate([shared[:129], some(3)]) for _ in range(3)]
    found += [some(n) for n in (1, 2, 3, 15, 16, 17, 127, 128, 129, 255, 256, 257, LIMIT - 1, LIMIT)]
    found += [found[0], found[3], found[3], found[20]]
    return [found[i] for i in rng.permutation(len(found))]


@pytest.fixture(scope="module")
def encoder(models):
    """`make(encoder, model, pooling, ...)`, each made once."""
    made: dict[Any, Any] = {}

    def make(which: str, model: str = "llama", *, pooling: str = "last", dtype: str = "float32", share: bool = True,
             dims: int | None = None, normalize: bool = False) -> Any:  # fmt: skip
        key = (which, model, pooling, dtype, share, dims, normalize)
        if key in made:
            return made[key]
        folder = open_model_folder(RunConfig(inputs=("-",), model=str(models / model), pooling=pooling))
        budget = BATCH_TOKENS["cpu"] if which == "vllm" else 1_024
        options = EncoderOptions(pooling, dims, normalize, dtype, budget, share=share)
        some = [np.arange(3, 3 + n, dtype=np.int32) for n in (5, 40)]
        if which == "vllm":
            made[key] = choose_vllm(folder, options, some, "cpu", LIMIT, False)
        else:
            base = load_base_model(folder, "cpu", dtype, False)
            made[key] = plain_encoder(base, options) if which == "plain" else choose_encoder(base, options, some)
        assert made[key].name == which
        return made[key]

    yield make
    made.clear()


@pytest.fixture(scope="module")
def reference(models, prompts):
    """`states(model)`: each prompt's final hidden states [T, d] by plain Transformers, alone and in float32."""
    known: dict[str, list[np.ndarray]] = {}

    def states(model: str) -> list[np.ndarray]:
        if model not in known:
            base = AutoModel.from_pretrained(models / model, dtype=torch.float32).eval()
            with torch.inference_mode():
                rows = [torch.from_numpy(ids.astype(np.int64))[None] for ids in prompts]
                known[model] = [base(row, use_cache=False).last_hidden_state[0].numpy() for row in rows]
        return known[model]

    return states


POOLED = {"last": lambda h: h[-1], "first": lambda h: h[0], "mean": lambda h: h.mean(0, dtype=np.float64)}


def pooled(states: list[np.ndarray], pooling: str = "last") -> np.ndarray:
    return np.stack([POOLED[pooling](h) for h in states]).astype(np.float32)


def nothing(*_: int) -> None:
    pass


def assert_same(found: np.ndarray, expected: np.ndarray, dtype: str = "float32") -> None:
    """Directions within the dtype's tolerance, lengths within ten times its root, and in float32 component by component."""
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    length, right = np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1)
    cosine = (found.astype(np.float64) * expected).sum(1) / (length * right)
    assert (1 - cosine).max() <= TOLERANCE[dtype]
    assert np.abs(length / right - 1).max() <= (1e-5 if dtype == "float32" else 2e-2)
    if dtype == "float32":
        assert (np.abs(found - expected).max(1) / right).max() <= COMPONENT


@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("which", ENCODERS)
def test_vectors_are_those_of_each_prompt_alone_in_the_order_of_the_prompts(encoder, prompts, reference, which, model):
    found = encoder(which, model).encode(prompts, nothing)
    assert_same(found.vectors, pooled(reference(model)))
    assert (found.retried_rows, len(found.out_of_memory), found.batches > 0) == (0, 0, True)


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("which", ENCODERS)
def test_every_pooling_is_of_the_whole_prompt(encoder, prompts, reference, which, pooling):
    found = encoder(which, pooling=pooling).encode(prompts, nothing)
    assert_same(found.vectors, pooled(reference("llama"), pooling))


@pytest.mark.parametrize("which", ENCODERS)
def test_vectors_have_their_own_length_unless_asked_and_are_cut_before_they_are_scaled(encoder, prompts, reference, which):
    right = pooled(reference("llama"))
    lengths = np.linalg.norm(right, axis=1)
    assert np.abs(lengths - 1).min() > 0.5, "a normalisation would show"
    bare = encoder(which).encode(prompts, nothing).vectors
    assert np.allclose(np.linalg.norm(bare, axis=1), lengths, rtol=1e-5)
    cut = encoder(which, dims=8, normalize=True).encode(prompts, nothing).vectors
    assert_same(cut, right[:, :8] / np.linalg.norm(right[:, :8], axis=1, keepdims=True))


@pytest.mark.parametrize("which", ENCODERS)
def test_reduced_precision_is_within_its_tolerance(encoder, prompts, reference, which):
    found = encoder(which, dtype="bfloat16").encode(prompts, nothing)
    assert_same(found.vectors, pooled(reference("llama")), "bfloat16")


@pytest.mark.parametrize("which", ENCODERS)
def test_copies_are_equal_and_all_rows_and_tokens_are_told_of(encoder, prompts, which):
    told = []
    found = encoder(which).encode(prompts, lambda rows, tokens: told.append((rows, tokens)))
    assert np.sum(told, axis=0).tolist() == [len(prompts), sum(map(len, prompts))]
    places: dict[bytes, list[int]] = {}
    for i, ids in enumerate(prompts):
        places.setdefault(ids.tobytes(), []).append(i)
    copies = [rows for rows in places.values() if len(rows) > 1]
    assert len(copies) == 3
    for first, *others in copies:
        for other in others:
            assert np.allclose(found.vectors[first], found.vectors[other], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["packed", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_what_prompts_share_is_computed_once(encoder, prompts, reference, which):
    """At least three quarters of a full block of vLLM's (128 of the 150 tokens that 16 prompts share) and all copies."""
    heads = Counter(ids[:150].tobytes() for ids in prompts if len(ids) > 150)
    sharers = max(heads.values())
    assert sharers >= 16
    sharing, not_sharing = encoder(which), encoder(which, share=False)
    if which == "vllm":
        sharing.forget()
    once, again = sharing.encode(prompts, nothing), not_sharing.encode(prompts, nothing)
    assert_same(not_sharing.encode(prompts, nothing).vectors, pooled(reference("llama")))
    assert once.computed_tokens <= again.computed_tokens - 96 * (sharers - 1)


@pytest.mark.parametrize("which", ENCODERS)
def test_a_vector_beyond_the_dtype_is_made_in_float32_and_counted(models, tmp_path, which):
    folder = shutil.copytree(models / "llama", tmp_path / "steep")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = 6e4  # fits float16, but not twice
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 0.5
    tensors["model.layers.0.mlp.down_proj.weight"] *= 6e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found_folder = open_model_folder(RunConfig(inputs=("-",), model=str(folder)))
    rows = [np.array(ids, np.int32) for ids in ([3, 4, 5], [7, 9, 8], [9], [3, 4, 5, 6], [7, 9, 8])]
    model = load_base_model(found_folder, "cpu", "float32", False)
    right = plain_encoder(model, EncoderOptions("last", None, False, "float32", 1)).encode(rows, nothing).vectors
    options = EncoderOptions("last", None, False, "float16", 4_096)
    if which == "vllm":
        tried: Any = choose_vllm(found_folder, options, [rows[0]], "cpu", LIMIT, False)
    else:
        half = load_base_model(found_folder, "cpu", "float16", False)
        tried = plain_encoder(half, options) if which == "plain" else choose_encoder(half, options, [rows[0]])
    found = tried.encode(rows, nothing)
    assert found.retried_rows >= 1
    assert np.isfinite(right).all()
    assert_same(found.vectors, right, "float16")


@pytest.mark.parametrize("truncate", ["left", "right", "reject"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_cuts_rejects_and_answers_as_with_the_other_backend(models, tmp_path, prompts, backend, truncate):
    words = np.array(WORDS)
    texts = [" ".join(words[ids[:n] % len(WORDS)]) for ids, n in zip(prompts, range(20, 70), strict=False)]
    texts[3], texts[8], texts[11] = None, " ", " ".join(words[np.arange(90) % len(WORDS)])
    inputs = write_prompts(tmp_path / "prompts.parquet", texts)
    items = write_items(tmp_path / "items.parquet", dim=WIDTH)
    config = RunConfig(
        inputs=(str(inputs),), model=str(models / "llama"), items=items, output=tmp_path / "out", top_k=5, device="cpu",
        dtype="float32", max_length=64, truncate=truncate, max_rejects="100%", shard_rows=16, backend=backend,
    )  # fmt: skip
    totals = pipeline.run(config, run_shards, Watcher())
    other = RunConfig(**(vars(config) | {"backend": "transformers", "encoder": "plain", "output": tmp_path / "other"}))
    expected = pipeline.run(other, run_shards, Watcher())
    names = ("rows", "rows_out", "rejects", "reject_reasons", "tokens", "truncated_rows", "shards")
    assert {n: totals[n] for n in names} == {n: expected[n] for n in names}
    assert {"null_prompt", "empty_prompt"} <= totals["reject_reasons"].keys()
    assert ("too_long" in totals["reject_reasons"]) == (truncate == "reject")
    ours, right = (pq.read_table(sorted(out.glob("part-*"))) for out in (tmp_path / "out", tmp_path / "other"))
    assert ours["user_id"].equals(right["user_id"])
    assert ours["item_ids"].equals(right["item_ids"])
    scores = [np.array(table["scores"].to_pylist()) for table in (ours, right)]
    assert np.allclose(*scores, rtol=1e-4, atol=1e-4)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert ("vllm" in manifest["versions"], manifest["fingerprint"].get("backend")) == (
        (True, "vllm") if backend == "vllm" else (False, None)
    )


def vllm_only(test):
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


@vllm_only
def test_what_has_no_room_in_memory_is_out_of_memory_and_the_rest_is_not(models, prompts, reference, monkeypatch):
    monkeypatch.setattr(vllm_engine, "room", lambda *_: (1 << 24, 200))
    folder = open_model_folder(RunConfig(inputs=("-",), model=str(models / "llama")))
    small = choose_vllm(folder, EncoderOptions("last", None, False, "float32", 4_096), prompts[:1], "cpu", LIMIT, False)
    found = small.encode(prompts, nothing)
    long = [i for i, ids in enumerate(prompts) if len(ids) > 200]
    short = [i for i, ids in enumerate(prompts) if len(ids) <= 200]
    assert found.out_of_memory.tolist() == long
    assert len(long) > 5 < len(short)
    assert np.isnan(found.vectors[long]).all()
    assert_same(found.vectors[short], pooled(reference("llama"))[short])


@vllm_only
def test_a_model_that_vllm_cannot_serve_is_refused_in_a_sentence(tmp_path):
    folder = open_model_folder(RunConfig(inputs=("-",), model=str(save(tmp_path / "narrow", num_attention_heads=8))))
    options = EncoderOptions("last", None, False, "float32", 4_096)
    with pytest.raises(ModelError, match=r"vLLM .*head_dim=8.*the other backend") as refused:
        choose_vllm(folder, options, [np.array([3, 4], np.int32)], "cpu", LIMIT, False)
    assert "\n" not in str(refused.value)


@vllm_only
def test_other_vectors_than_plain_transformers_end_the_run(models, tmp_path, monkeypatch):
    folder = open_model_folder(RunConfig(inputs=("-",), model=str(models / "llama"), pooling="first"))
    monkeypatch.setitem(vllm_engine.POOLING_TYPES, "first", "LAST")
    options = EncoderOptions("first", None, False, "float32", 4_096)
    with pytest.raises(ModelError, match=r"vLLM's vectors differ from plain Transformers' \(1 - cosine"):
        choose_vllm(folder, options, [np.arange(3, 30, dtype=np.int32)], "cpu", LIMIT, False)


@pytest.fixture
def line(models, tmp_path) -> SimpleNamespace:
    """A command line with vLLM, in a folder where there is nothing else."""
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(40)) for i in range(40)]
    inputs = write_prompts(tmp_path / "prompts.parquet", texts)
    items = write_items(tmp_path / "items.parquet", dim=WIDTH)
    words = ["run", inputs, "-m", models / "llama", "-i", items, "-o", tmp_path / "out", "--backend", "vllm",
             "--device", "cpu", "--dtype", "float32", "--no-compile"]  # fmt: skip
    return SimpleNamespace(words=[sys.executable, "-m", "prefill_cli", *map(str, words)], out=tmp_path / "out")


@vllm_only
def test_a_run_prints_its_summary_alone_and_leaves_no_process_behind(line):
    process = subprocess.Popen(line.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = set()
    while process.poll() is None:
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            children |= read(task)
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["encoder"] == "vllm"
    assert all(" info " in told for told in err.splitlines()), err
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@vllm_only
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_run_with_vllm_and_the_same_command_then_does_the_job(line, signum):
    process = subprocess.Popen(line.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for told in process.stderr:
        if "40 rows in 1 file" in told:
            break
    time.sleep(3)  # vLLM is about to start
    assert process.poll() is None, process.stderr.read()
    process.send_signal(signum)
    out, err = process.communicate(timeout=15)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[signum]
    assert (out, "Traceback" in err) == ("", False)
    done = subprocess.run(line.words, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, (line.out / "_SUCCESS").exists()) == (0, True), done.stderr


def read(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()
