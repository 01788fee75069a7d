#!/usr/bin/env python3
"""The GPU part of the checks: equality with plain Transformers and speed, on Llama shapes of random weights.

    python .ci/gpu.py [--device cuda] [--shapes 135M 1B 8B] [--rows 256]

Prints one JSON line for each shape: what `verify` and `bench` found, in bfloat16, and in float32 for the smallest. Needs
the package's own dependencies only (no polars, no model, no network), and less than ten minutes on one H200.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prefill_cli.config import RunConfig
from prefill_cli.scoring.filters import Filters
from prefill_cli.scoring.heads import Head, PairHead
from prefill_cli.scoring.topk import Catalogue, search
from prefill_cli.tools.bench import bench
from prefill_cli.tools.bench_search import made_up_items
from prefill_cli.tools.verify import verify
from prefill_cli.tools.workload import synthetic_prompts

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads
    "tiny": (64, 96, 2, 4, 2),
    "135M": (576, 1536, 30, 9, 3),
    "1B": (2048, 8192, 16, 32, 8),
    "8B": (4096, 14336, 32, 32, 8),
}


def save_model(folder: Path, shape: str, texts: list[str]) -> None:
    """A Llama of random weights in bfloat16, whose tokens are the prompts' words and marks."""
    split = pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=len(words) + 1, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def search_on(device: str, kind: str, n: int, users: int = 256, k: int = 100) -> dict[str, object]:
    """Search on the device against the same on the CPU in float32: equal to the bit, and how long each takes."""
    rng = np.random.default_rng(0)
    items = made_up_items(n, 576 if kind == "dot" else 64)
    queries = rng.standard_normal((users, 576), dtype=np.float32)
    head = None
    if kind == "mlp":
        layers = [(torch.randn(256, 640) / 25, torch.zeros(256)), (torch.randn(1, 256) / 16, torch.zeros(1))]
        head = PairHead(Head("mlp", "relu", tuple(layers), ""), 576)
    found, seconds = {}, {}
    for place in (device, "cpu"):
        catalogue = Catalogue(items, None, place, head=head)
        search(queries[:8], catalogue, k, Filters())
        began = time.perf_counter()
        found[place] = search(queries, catalogue, k, Filters())
        seconds[place] = round(time.perf_counter() - began, 3)
    one, other = found[device], found["cpu"]
    same = one.rows.tobytes() == other.rows.tobytes() and one.scores.tobytes() == other.scores.tobytes()
    return {"search": kind, "items": n, "users": users, "k": k, "sec": seconds, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "1B", "8B"])
    parser.add_argument("--rows", type=int, default=256)
    args = parser.parse_args()
    texts = synthetic_prompts(args.rows)
    failed = False
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as place:
            folder, prompts = Path(place) / "model", Path(place) / "prompts.parquet"
            save_model(folder, shape, texts)
            pq.write_table(pa.table({"user_id": np.arange(len(texts)), "prompt": texts}), prompts)
            for dtype in ("bfloat16", "float32")[: 2 if shape == args.shapes[0] else 1]:
                config = RunConfig(inputs=(str(prompts),), model=str(folder), device=args.device, dtype=dtype)
                found = verify(config, 16)
                found.pop("prompts")
                failed |= found["status"] != "same"
                print(json.dumps({"shape": shape, "verify": found, "bench": bench(config, args.rows, 2)}), flush=True)
    for kind in ("dot", "mlp"):
        found = search_on(args.device, kind, 200_000 if "tiny" not in args.shapes else 2_000)
        failed |= not found["same"]
        print(json.dumps(found), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
