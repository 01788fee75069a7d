"""Tiny real models, prompts and item files, built by the tests themselves: no network, nothing random between runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from browser import CHROMIUM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prefill_cli import pipeline
from prefill_cli.config import RunConfig
from prefill_cli.engines import engine_of

HIDDEN = 32
WORDS = [f"w{i}" for i in range(60)]
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }} {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROJECT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="more kills, more damaged files: minutes instead of seconds")


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU, a browser or vLLM are not collected where there is none."""
    found = {"cuda": torch.cuda.is_available(), "browser": CHROMIUM is not None, "vllm": find_spec("vllm") is not None}
    for mark, there in found.items():
        if not there:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of the machine or the checkout reaches a test: an empty folder, no variables of ours."""
    for name in [n for n in os.environ if n.startswith("PREFILL_SCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def make_tokenizer(*, bos: bool = True, eos: bool = False, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a word (w0 … w59 are ids 5 … 64), no pad token; BOS and EOS are added as asked."""
    vocabulary = {word: i for i, word in enumerate(SPECIALS + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = " ".join([*(["<s>"] if bos else []), "$A", *(["</s>"] if eos else [])])
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )  # fmt: skip
    fast.chat_template = template
    return fast


def save_llama(folder: Path, *, tokenizer: PreTrainedTokenizerFast | None = None, positions: int = 64) -> Path:
    """A 2-layer Llama of 32 dims with all-different random weights of ordinary size."""
    torch.manual_seed(0)
    tokenizer = tokenizer or make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BOS added by the tokenizer, no pad token, a chat template, 64 positions. Read only."""
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen learned positions, no special token added, no chat template. Read only."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    tokenizer = make_tokenizer(bos=False, template=None)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=16, initializer_range=0.2,
                   bos_token_id=1, eos_token_id=2)
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def reference_vectors(folder: Path, rows: list[list[int]]) -> np.ndarray:
    """[n, d] the last token's hidden state by plain Transformers, one prompt at a time, in float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.stack([model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1].numpy() for ids in rows])


def reference_top_k(queries: np.ndarray, items: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] rows and scores by brute force: float64 products, score descending, then row ascending."""
    scores = (queries.astype(np.float64) @ items.astype(np.float64).T).astype(np.float32)
    rows = np.lexsort((np.broadcast_to(np.arange(len(items)), scores.shape), -scores), axis=1)[:, :k]
    return rows, np.take_along_axis(scores, rows, 1)


def random_prompts(n: int, seed: int = 0, longest: int = 40) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(n)]


def write_prompts(path: Path, prompts: list[str | None], **columns: object) -> Path:
    """prompts.parquet with user_id 1000, 1001, … unless given."""
    table = {"user_id": pa.array(range(1000, 1000 + len(prompts)), pa.int64()), "prompt": pa.array(prompts, pa.string())}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table | columns), path)
    return path


def write_items(
    path: Path, n: int = 50, dim: int = HIDDEN, *, ids: object = None, vectors: np.ndarray | None = None
) -> Path:
    """items.parquet with item_id "i0", "i1", … and random embeddings unless given."""
    if vectors is None:
        vectors = np.random.default_rng(3).standard_normal((n, dim), dtype=np.float32)
    ids = pa.array([f"i{i}" for i in range(len(vectors))]) if ids is None else ids
    flat = pa.array(vectors.reshape(-1), pa.from_numpy_dtype(vectors.dtype))
    pq.write_table(pa.table({"item_id": ids, "embedding": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}), path)
    return path


class Server:
    """crash_server.py, asked a run at a time."""

    def __init__(self, cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROJECT / "tests" / "crash_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
        )  # fmt: skip

    def run(self, argv: list[str], **order: object) -> dict:
        return self._ask({"argv": argv} | order)

    def together(self, orders: list[dict]) -> list[dict]:
        """Some at once."""
        return self._ask({"together": orders})

    def _ask(self, order: dict) -> Any:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server"))  # a folder without a configuration
    yield found
    found.close()


class Watcher:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.started: tuple[int, int] | None = None
        self.rows = self.tokens = 0

    def start(self, rows: int, done: int) -> None:
        self.started = (rows, done)

    def advance(self, rows: int, tokens: int) -> None:
        self.rows += rows
        self.tokens += tokens


@pytest.fixture
def job(tmp_path: Path, llama: Path) -> SimpleNamespace:
    """A small job in tmp_path (30 prompts, 50 items) and `run(**options)`, which does it in this process.

    Runs are in float32 on the CPU with k = 5 into tmp_path/out; `run` returns the totals.
    """
    prompts = random_prompts(30)
    inputs = write_prompts(tmp_path / "in" / "prompts.parquet", prompts)
    items = write_items(tmp_path / "items.parquet")

    def config(**options: object) -> RunConfig:
        given = {"inputs": (str(inputs),), "model": str(llama), "items": items, "output": tmp_path / "out", "top_k": 5,
                 "device": "cpu", "dtype": "float32"}  # fmt: skip
        return RunConfig(**(given | options))

    def run(**options: object) -> dict[str, object]:
        settings = config(**options)
        return pipeline.run(settings, engine_of(settings), Watcher())

    return SimpleNamespace(
        prompts=prompts, inputs=inputs, items=items, model=llama, out=tmp_path / "out", config=config, run=run
    )


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`prefill-score ARGS` in a process of its own, stdout and stderr captured (so: no terminal)."""

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        given = {"capture_output": True, "text": True, "timeout": 100} | options
        return subprocess.run([sys.executable, "-m", "prefill_cli", *map(str, arguments)], check=False, **given)

    return call
