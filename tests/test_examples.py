"""Every example in the help texts, in README and in docs/ is run, in a folder that holds what the examples name.

docs/nightly.md, whose examples are for schedulers, has tests of its own.
"""

import re
import shlex
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from conftest import PROJECT
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from prefill_cli import cli

SAMPLE = PROJECT / "sample_data"
PAGES = [PROJECT / "README.md", *sorted(page for page in (PROJECT / "docs").glob("*.md") if page.name != "nightly.md")]
COMMANDS = typer.main.get_command(cli.app).commands


def call(line: str) -> str:
    words = shlex.split(line)
    assert words[0] == "prefill-score"
    done = CliRunner().invoke(cli.app, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
    return done.stdout


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """./model and the files that examples read, of 24 sample users."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(SAMPLE / "model", folder / "model")
    shutil.copy(SAMPLE / "items.parquet", folder)
    pq.write_table(pq.read_table(SAMPLE / "prompts.parquet").slice(0, 24), folder / "prompts.parquet")
    items = pq.read_table(SAMPLE / "items.parquet", columns=["item_id", "title"])
    pq.write_table(items, folder / "titles.parquet")
    tokens = pa.array([[i, i + 1] for i in range(len(items))])
    pq.write_table(pa.table({"item_id": items["item_id"], "token_ids": tokens}), folder / "tokens.parquet")
    save_file(
        {
            "layers.0.weight": torch.randn(8, 128), "layers.0.bias": torch.zeros(8),
            "layers.1.weight": torch.randn(1, 8), "layers.1.bias": torch.zeros(1),
        },
        folder / "head.safetensors",
        {"head": "mlp", "activation": "relu"},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call("prefill-score run prompts.parquet -m ./model -i items.parquet -k 50 --exclude-column seen_items "
             "--keep-columns next_item --cache vectors")  # fmt: skip
        shutil.copytree("prompts.topk", "yesterday.topk")
        call("prefill-score run prompts.parquet -m ./model -i items.parquet -o slices.topk --shard-rows 12 --shard-of 0/1")
        for name in ("vectors.parquet", "users.parquet"):
            call(f"prefill-score embed prompts.parquet -m ./model -o {name}")
    return folder


@pytest.fixture
def here(shelf, tmp_path, monkeypatch):
    shutil.copytree(shelf, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def examples(command: str) -> list[str]:
    """What stands after "Example:" in a command's help."""
    paragraphs = (COMMANDS[command].help or "").split("\n\n")
    return [" ".join(p.split()).removeprefix("Example: ") for p in paragraphs if p.strip().startswith("Example:")]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_example_in_each_commands_help_runs(here, command):
    lines = examples(command)
    assert lines, f"the help of {command} ends with an example"
    for line in lines:
        assert line.split()[:2] == ["prefill-score", command]
        call(line)


def names_of_training_code() -> dict:
    """What somebody has who has trained a model and its item embeddings."""
    import transformers as tf

    return {
        "model": tf.AutoModelForCausalLM.from_pretrained("model"), "tokenizer": tf.AutoTokenizer.from_pretrained("model"),
        "embeddings": torch.from_numpy(np.random.default_rng(0).standard_normal((20, 64), dtype=np.float32)), "d": 64,
        "item_ids": [f"t{i:04}" for i in range(20)], "user_ids": [1, 2], "prompts": ["Iron Lagoon", "Paper Cyborg"],
        "layers": torch.nn.ModuleList([torch.nn.Linear(128, 8), torch.nn.Linear(8, 1)]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.vllm] * (page.name == "vllm.md"), id=page.name) for page in PAGES]
)
def test_what_each_page_shows_runs_from_top_to_bottom(here, page):
    text = page.read_text()
    if page.name == "vllm.md":  # whose kernels for CPUs want heads of 32 dimensions and more; the sample model's have 16
        config = LlamaConfig.from_pretrained("model", num_attention_heads=2, num_key_value_heads=2, head_dim=64)
        LlamaForCausalLM(config).save_pretrained("model")
    names = names_of_training_code()
    for indent, kind, block in re.findall(r"^( *)```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        code = re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        if kind == "python":
            exec(code, names)
        elif kind == "sh":
            for line in code.replace("\\\n", " ").splitlines():
                do(re.sub(r"\s+#.*", "", line.strip()))
        else:
            assert kind in ("text", "toml", "mermaid"), "a block of another kind would not be looked at"


def do(line: str) -> None:
    if line.startswith("make "):
        assert f"\n{line.split()[1]}:" in (PROJECT / "Makefile").read_text()
    elif line.startswith("pip install "):
        assert re.fullmatch(r"pip install 'prefill-score\[\w+\]'", line)
    elif line:
        call(line)
