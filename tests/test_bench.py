"""`prefill-score bench`: the same prompts in every way, and numbers that belong together."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PROJECT, random_prompts, write_items, write_prompts
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.encoding import decoders
from prefill_cli.encoding.budget import CHUNK
from prefill_cli.encoding.packing import unique_tokens
from prefill_cli.errors import InputError
from prefill_cli.scoring.filters import Filters
from prefill_cli.scoring.topk import Catalogue, search
from prefill_cli.tools import bench as tool
from prefill_cli.tools import bench_search
from prefill_cli.tools.bench import bench
from prefill_cli.tools.bench_search import made_up_items
from prefill_cli.tools.workload import INSTRUCTION, synthetic_prompts


def test_every_way_computes_the_same_tokens_and_states_its_padding(job):
    measured = bench(job.config(max_batch_tokens=1), rows=20, repeat=2)
    tokens = sum(len(prompt.split()) + 1 for prompt in job.prompts[:20])
    assert (measured["rows"], measured["tokens"], measured["device"], measured["dtype"]) == (20, tokens, "cpu", "float32")
    assert (measured["encoder"], measured["compiled"]) == ("packed", False)
    longest = max(len(prompt.split()) + 1 for prompt in job.prompts[:20])
    padding = {name: way["padding"] for name, way in measured["ways"].items()}
    # Packed, everything fits one chunk of rows, the least budget; one token leaves every padded prompt alone, and so
    # unpadded; the loop pads its 20 to the longest.
    loop, chunk = round(20 * longest / tokens, 3), round(CHUNK["cpu"] / tokens, 3)
    assert padding == {
        "prefill-score": chunk, "prefill-score, nothing shared": chunk, "padded batches": 1.0,
        "loop, sorted": loop, "loop, arrival order": loop,
    }  # fmt: skip
    for way in measured["ways"].values():
        assert way["tokens_per_sec"] == pytest.approx(tokens / way["sec"], rel=0.05)
        assert way["ratio"] == pytest.approx(way["sec"] / measured["ways"]["prefill-score"]["sec"], abs=2e-3)
    assert 0 < measured["mfu"] < 1.5
    assert measured["unique_tokens"] == 1.0, "nothing is shared"
    assert list(measured["stages"]) == ["start", "compile_and_check", "read", "encode", "search"]
    assert measured["stages"]["encode"] == pytest.approx(measured["ways"]["prefill-score"]["sec"], abs=1e-3)
    searched = measured["search"]
    assert (searched["queries"], searched["items"], searched["k"]) == (20, 50, 5)
    assert searched["ways"]["torch.topk"]["same"] == 1.0
    assert measured["decoding"]["ids"] == job.config().top_k
    assert measured["decoding"]["sec_per_prompt"] > job.config().top_k * measured["decoding"]["step_sec"]


def test_without_an_input_prompts_are_made_up(job):
    done = CliRunner().invoke(cli.app, ["bench", "-m", str(job.model), "--rows", "3", "--repeat", "1"])
    assert done.exit_code == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert (measured["rows"], measured["search"]["items"]) == (3, 50_000)
    texts = synthetic_prompts(48)
    assert texts == synthetic_prompts(48)
    assert len(set(texts)) < len(texts), "new members of a country have the same prompt"
    assert all(text.startswith(INSTRUCTION) for text in texts)


def test_a_peer_that_is_not_installed_says_how_it_is(job, tmp_path):
    line = ["bench", str(job.inputs), "-m", str(job.model), "--rows", "3", "--repeat", "1", "--peer"]
    done = CliRunner().invoke(cli.app, [*line, "vllm"])
    assert (done.exit_code, "pip install 'prefill-score[vllm]'" in done.stderr) == (2, True)
    done = CliRunner().invoke(cli.app, [*line, "faiss"])
    assert (done.exit_code, "pip install faiss-cpu" in done.stderr) == (2, True)
    done = CliRunner().invoke(cli.app, [*line, "vlm"])
    assert (done.exit_code, "one of sentence-transformers, vllm, faiss, usearch" in done.stderr) == (2, True)


def test_a_peer_is_measured_beside_the_others(job, monkeypatch):
    seen = []
    monkeypatch.setattr(tool, "load_package", lambda name: None)
    monkeypatch.setattr(
        tool, "load_encoder", lambda *_: lambda texts: (seen.append(list(texts)), np.ones((len(texts), 2)))[1]
    )
    measured = tool.bench(job.config(), rows=5, repeat=2, peers=("sentence-transformers",))
    assert seen == [job.prompts[:5]] * 2
    way = measured["ways"]["sentence-transformers"]
    assert (way["padding"], way["sec"] > 0) == (None, True)


def test_unique_tokens_are_what_is_left_of_copies_and_prefixes():
    instruction = np.arange(300, dtype=np.int32)
    prompts = [np.append(instruction, np.int32(1_000 + i // 2)) for i in range(6)]  # three, twice each
    assert unique_tokens(prompts) == 300 + 3


def test_peers_of_search_find_the_same_items(monkeypatch):
    """Stand-ins of FAISS and USearch (which the tests do not install) with their real calls."""
    rng = np.random.default_rng(0)
    items, queries = made_up_items(300, 16), rng.standard_normal((9, 16), dtype=np.float32)

    def best(vectors, queries, k):
        return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]

    class IndexFlatIP:
        def __init__(self, width):
            self.vectors = np.empty((0, width), np.float32)

        def add(self, vectors):
            self.vectors = vectors

        def search(self, queries, k):
            return None, best(self.vectors, queries, k)

    def search(vectors, queries, k, metric, exact):
        assert (metric, exact) == ("ip", True)
        return SimpleNamespace(keys=best(vectors, queries, k).astype(np.uint64))

    modules = {"faiss": SimpleNamespace(IndexFlatIP=IndexFlatIP),
               "usearch": SimpleNamespace(search=search, MetricKind=SimpleNamespace(IP="ip"))}  # fmt: skip
    monkeypatch.setattr(bench_search, "load_package", modules.get)
    found = bench_search.bench_search(queries, items, 12, 1, "cpu", ("faiss", "usearch"))
    assert {name: way["same"] for name, way in found["ways"].items()} == dict.fromkeys(
        ("prefill-score", "torch.topk", "faiss", "usearch"), 1.0
    )
    assert all(way["ratio"] > 0 for way in found["ways"].values())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_search_on_cuda_gives_the_bits_of_the_cpu(dtype):
    rng = np.random.default_rng(0)
    items, queries = made_up_items(30_000, 96), rng.standard_normal((70, 96), dtype=np.float32)
    found = [search(queries, Catalogue(items, None, place, scan_dtype=dtype), 50, Filters()) for place in ("cuda", "cpu")]
    assert found[0].rows.tobytes() == found[1].rows.tobytes()
    assert found[0].scores.tobytes() == found[1].scores.tobytes()


def test_bench_of_search_alone_needs_no_model(tmp_path):
    line = ["bench", "--search", "--size", "300,16", "--rows", "20", "--repeat", "1", "-k", "7", "--json"]
    done = CliRunner().invoke(cli.app, line)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["items"], found["width"], found["queries"], found["k"]) == (0, 300, 16, 20, 7)
    assert found["ways"]["torch.topk"]["same"] == 1.0
    write_items(tmp_path / "items.parquet", n=30)
    done = CliRunner().invoke(cli.app, ["bench", "--search", "-i", str(tmp_path / "items.parquet"), "--rows", "3"])
    assert json.loads(done.stdout)["items"] == 30
    done = CliRunner().invoke(cli.app, ["bench", "--search", "--size", "300"])
    assert (done.exit_code, "like 200000,576" in done.stderr) == (2, True)


def test_verify_shows_the_differences_and_exits_by_them(job, monkeypatch):
    line = ["verify", str(job.inputs), "-m", str(job.model), "--rows", "9", "--dtype", "float32"]
    done = CliRunner().invoke(cli.app, line)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["status"], found["model_type"], len(found["prompts"])) == (0, "same", "llama", 9)
    assert found["largest_difference"] < 1e-5
    rotate = decoders._rotate
    monkeypatch.setattr(decoders, "_rotate", lambda x, cos, sin: rotate(x, cos, -sin))
    done = CliRunner().invoke(cli.app, line)
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (5, "different")


def test_verify_of_a_model_without_a_fast_encoder_says_why(job, tmp_path):
    folder = tmp_path / "mamba"
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = CliRunner().invoke(cli.app, ["verify", str(job.inputs), "-m", str(folder), "--rows", "3"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["status"], found["prompts"]) == (0, "plain", [])
    assert "mamba" in found["why"]


def test_the_command_ends_with_one_json_line(job):
    result = CliRunner().invoke(cli.app, ["bench", str(job.inputs), "-m", str(job.model), "--rows", "5", "--repeat", "1"])
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["rows"] == 5


def test_an_input_without_a_prompt_to_measure_is_refused(job, tmp_path):
    inputs = write_prompts(tmp_path / "none.parquet", [None, "", *random_prompts(3)])
    with pytest.raises(InputError, match="no prompt to measure"):
        bench(job.config(inputs=(str(inputs),)), rows=2, repeat=1)


def test_the_gpu_script_runs_on_a_cpu_too():
    line = [sys.executable, str(PROJECT / ".ci" / "gpu.py"), "--device", "cpu", "--shapes", "tiny", "--rows", "12"]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    bfloat16, float32, *searched = (json.loads(text) for text in done.stdout.splitlines())
    assert [(found["search"], found["same"]) for found in searched] == [("dot", True), ("mlp", True)]
    assert bfloat16["verify"]["status"] == float32["verify"]["status"] == "same"
    assert float32["bench"]["encoder"] == "packed"
