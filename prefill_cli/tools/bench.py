"""`prefill-score bench`: this tool's encoder against what people write or install instead, on their own model and prompts.

All ways read the same prompts with the same weights, dtype and threads, in one process, passes taken in turn, the best of
each kept. Start-up (imports, weights, compiling) is told apart. Tokens are every prompt's own, shared or not, so that
tokens per second compare like with like.
"""

import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rows import read_rows
from prefill_cli.data.tokenization import Ids, PromptTokenizer, load_tokenizer
from prefill_cli.encoding.choice import choose_encoder, plain_encoder
from prefill_cli.encoding.encoder import Encoder, EncoderOptions
from prefill_cli.encoding.loading import choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.errors import InputError, UsageError
from prefill_cli.job import AUTO_BATCH_TOKENS, COMPILE_FROM
from prefill_cli.tools.peers import decoding_sec, load_peer
from prefill_cli.tools.workload import synthetic_prompts

LOOP_ROWS = 32
DECODED_PROMPTS = 4


def bench(config: RunConfig, rows: int, repeat: int, peers: Sequence[str] = ()) -> dict[str, Any]:
    """Time encoding of the first `rows` prompts (of the synthetic workload without an input), `repeat` passes of each way.

    Returns one object: what was measured on; for each way `sec`, `tokens_per_sec`, `padding` (cells computed for each
    token) and `ratio` (how many times as long as this tool it takes); the share of the machine's matrix-product rate
    (`mfu`); and what generating --top-k ids would cost.
    """
    began = time.perf_counter()
    config = replace(config, exclude_column=None, candidates_column=None, keep_columns=())  # read what encoding needs
    folder = open_model_folder(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    prompts, texts = read_prompts(config, rows, tokenize)
    if peers and not texts:
        raise UsageError("--peer needs prompts that are text: an input with a prompt column, or none at all")
    tokens = sum(map(len, prompts))
    kind = device.partition(":")[0]
    model = load_base_model(folder, device, dtype, config.trust_remote_code)
    start_sec = time.perf_counter() - began

    began = time.perf_counter()
    compiled = tokens * repeat * folder.flops_per_token >= COMPILE_FROM[kind] if config.compile is None else config.compile
    options = EncoderOptions(
        pooling="last",
        dims=config.dims,
        normalize=config.normalize,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or AUTO_BATCH_TOKENS[kind],
        compiled=compiled,
    )
    ours = plain_encoder(model, options) if config.encoder == "plain" else choose_encoder(model, options, prompts)
    first_batch_sec = time.perf_counter() - began
    by_length = sorted(prompts, key=len, reverse=True)
    ways: dict[str, Callable[[], int | None]] = {"prefill-score": _way(ours, prompts)}
    if isinstance(ours, PrefillEncoder):
        ways["prefill-score, nothing shared"] = _way(ours.without_sharing(), prompts)
        ways["padded batches"] = _way(plain_encoder(model, options), prompts)
    ways |= {
        "loop, sorted": lambda: _loop(model, by_length),
        "loop, arrival order": lambda: _loop(model, prompts),
    }
    for name in peers:
        embed = load_peer(name, folder.path, dtype, device, tokenize.limit)
        ways[name] = lambda embed=embed: embed(texts) and None  # type: ignore[misc]
    _loop(model, prompts[:LOOP_ROWS])  # first-call costs belong to none of the ways
    seconds = dict.fromkeys(ways, float("inf"))
    cells: dict[str, int | None] = dict.fromkeys(ways)
    for _ in range(repeat):
        for name, way in ways.items():
            began = time.perf_counter()
            cells[name] = way()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    own = seconds["prefill-score"]
    products = _product_rate(model, ours)
    flops = 2.0 * sum(weight.numel() for weight in _weights(model)) * (cells["prefill-score"] or 0)
    prefill_sec, step_sec = decoding_sec(model, by_length[:: max(1, len(by_length) // DECODED_PROMPTS)][:DECODED_PROMPTS])
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "rows": len(prompts),
        "tokens": tokens,
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "repeat": repeat,
        "encoder": "packed" if isinstance(ours, PrefillEncoder) else "plain",
        "compiled": compiled,
        "start_sec": round(start_sec, 3),
        "first_batch_sec": round(first_batch_sec, 3),
        "ways": {
            name: {
                "sec": round(seconds[name], 6),
                "tokens_per_sec": round(tokens / seconds[name]),
                "padding": None if (n := cells[name]) is None else round(n / tokens, 3),
                "ratio": round(seconds[name] / own, 3),
            }
            for name in ways
        },
        "linear_flops_per_sec": round(flops / own),
        "product_flops_per_sec": round(products),
        "mfu": round(flops / own / products, 3),
        "peak_rss_bytes": rss,
        "decoding": {
            "ids": config.top_k,
            "step_sec": round(step_sec, 6),
            "sec_per_prompt": round(prefill_sec + config.top_k * step_sec, 6),
            "ratio": round((prefill_sec + config.top_k * step_sec) / (own / len(prompts)), 1),
        },
    }


def read_prompts(config: RunConfig, rows: int, tokenize: PromptTokenizer) -> tuple[list[Ids], list[str]]:
    """Token ids, and the texts where the input's prompts are text (or are made here)."""
    if config.inputs:
        plan = plan_inputs(config)
        shard = plan.shards(rows)[0]
        prompts = read_rows(ShardReader(plan, config), tokenize, plan, config.id_column, shard).input_ids
        texts = []
        if not (config.messages_column or config.token_ids_column):
            pieces = ShardReader(plan, config).read(shard)
            texts = [config.prefix + t for piece in pieces for t in piece.prompts.to_pylist() if isinstance(t, str) and t]
    else:
        texts = synthetic_prompts(rows)
        prompts = [ids for ids in tokenize(pa.array(texts)).input_ids if ids is not None]
    if not prompts:
        raise InputError("there is no prompt to measure with: every row of the first shard is rejected")
    return prompts, texts


def _way(encoder: Encoder, prompts: Sequence[Ids]) -> Callable[[], int]:
    return lambda: encoder.encode(prompts, lambda *_: None).computed_tokens


def _loop(model: Any, prompts: Sequence[Ids]) -> int:
    """The plain loop over ready-made ids; returns the cells that it computed."""
    device, cells = next(model.parameters()).device, 0
    with torch.inference_mode():
        for start in range(0, len(prompts), LOOP_ROWS):
            batch = [torch.from_numpy(ids.astype(np.int64)) for ids in prompts[start : start + LOOP_ROWS]]
            lengths = torch.tensor([len(ids) for ids in batch])
            input_ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
            mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long().to(device)
            hidden = model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
            hidden[torch.arange(len(batch)), lengths - 1].float().cpu().numpy()
            cells += input_ids.numel()
    return cells


def _weights(model: Any) -> list[torch.Tensor]:
    """The matrices of linear layers, whichever class they are of, without the embedding's."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return [p.detach() for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]


def _product_rate(model: Any, encoder: Encoder, rows: int = 2_048, passes: int = 6) -> float:
    """Floating-point operations a second of bare products with the model's widest layer, as many side by side as lanes."""
    weight = max(_weights(model), key=torch.numel)
    x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    lanes = encoder.lanes if isinstance(encoder, PrefillEncoder) else 1
    threads = torch.get_num_threads() // lanes
    best = 0.0

    def multiply() -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for _ in range(passes):
                F.linear(x, weight)

    for _ in range(passes):
        workers = [threading.Thread(target=multiply) for _ in range(lanes)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if weight.is_cuda:
            torch.cuda.synchronize()
        best = max(best, 2.0 * rows * weight.numel() * passes * lanes / (time.perf_counter() - began))
    return best
