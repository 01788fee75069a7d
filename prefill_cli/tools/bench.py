"""`prefill-score bench`: this tool's encoder against what people write or install instead, on their own model and prompts.

All ways read the same prompts with the same weights, dtype and threads, in one process, passes taken in turn, the best of
each kept. Start-up (imports, weights, compiling) is told apart. Tokens are every prompt's own, shared or not, so that
tokens per second compare like with like.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from prefill_cli.config import RunConfig
from prefill_cli.data.manifest import peak_rss_bytes
from prefill_cli.data.tokenization import Ids
from prefill_cli.encoding.choice import choose_encoder, plain_encoder
from prefill_cli.encoding.encoder import Encoder
from prefill_cli.encoding.packing import unique_tokens
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.encoding.vllm import VllmEncoder
from prefill_cli.errors import UsageError
from prefill_cli.job import COMPILE_FROM, PROBE_FROM, pays
from prefill_cli.scoring.items import load_items
from prefill_cli.tools.bench_search import bench_search, made_up_items
from prefill_cli.tools.peers import OF_TEXTS, SEARCHERS, load_encoder, load_package
from prefill_cli.tools.subject import load_subject

LOOP_ROWS = 32
DECODED_PROMPTS = 4
MADE_UP_ITEMS = 50_000


def bench(config: RunConfig, rows: int, repeat: int, peers: Sequence[str] = ()) -> dict[str, Any]:
    """Time encoding of the first `rows` prompts (of the synthetic workload without an input), `repeat` passes of each way.

    Their vectors are then searched for among --items, or among made-up ones.

    Returns one object: what was measured on; for each way of encoding `sec`, `tokens_per_sec`, `padding` (cells computed
    for each token) and `ratio` (how many times as long as this tool it takes); seconds by stage; the share of tokens
    that are left where equal prompts and shared prefixes are encoded once (`unique_tokens`); the share of the machine's
    matrix-product rate (`mfu`); ways of searching; and what generating --top-k ids would cost.

    Raises:
        UsageError: a peer is unknown, not installed, or needs text.
    """
    began = time.perf_counter()
    if config.backend == "vllm":
        peers = (*peers, *(("vllm",) if "vllm" not in peers else ()))
    for name in peers:
        load_package(name)  # what is missing is said now, not after minutes
    of_texts = [name for name in peers if name in OF_TEXTS]
    subject = load_subject(config, rows, with_texts=bool(of_texts))
    model, prompts, device, dtype = subject.model, subject.prompts, subject.device, subject.options.dtype
    if of_texts and not subject.texts:
        raise UsageError(f"--peer {of_texts[0]} needs prompts that are text: an input with a prompt column, or none at all")
    tokens = sum(map(len, prompts))
    start_sec = time.perf_counter() - began

    began = time.perf_counter()
    work = tokens * repeat
    compiled = pays(COMPILE_FROM, work, subject.folder, device) if config.compile is None else config.compile
    probe = not config.max_batch_tokens and pays(PROBE_FROM, work, subject.folder, device)
    options = replace(subject.options, pooling="last", compiled=compiled, probe=probe)  # as the loop and the peers pool
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
    for name in of_texts:
        ways[name] = _peer(load_encoder(name, subject.folder.path, dtype, device, subject.limit), subject.texts)
    if "vllm" in peers:  # compiled, as it comes; its pooling as above
        ways["vllm"] = _afresh(subject.load_vllm(config, pooling="last", compiled=config.compile is not False), prompts)
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
    queries = ours.encode(prompts, lambda *_: None).vectors
    items = load_items(config, queries.shape[1]) if config.items else made_up_items(MADE_UP_ITEMS, queries.shape[1])
    searched = bench_search(queries, items, config.top_k, repeat, device, [p for p in peers if p in SEARCHERS])
    prefill_sec, step_sec = _decoding_sec(model, by_length[:: max(1, len(by_length) // DECODED_PROMPTS)][:DECODED_PROMPTS])
    return {
        "rows": len(prompts),
        "tokens": tokens,
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "repeat": repeat,
        "encoder": ours.name,
        "compiled": compiled,
        "stages": {
            "start": round(start_sec - subject.read_sec, 3),
            "compile_and_check": round(first_batch_sec, 3),
            "read": round(subject.read_sec, 3),
            "encode": round(own, 3),
            "search": round(searched["ways"]["prefill-score"]["sec"], 3),
        },
        "unique_tokens": round(unique_tokens(prompts) / tokens, 3),
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
        "peak_rss_bytes": peak_rss_bytes(),
        "search": searched,
        "decoding": {
            "ids": config.top_k,
            "step_sec": round(step_sec, 6),
            "sec_per_prompt": round(prefill_sec + config.top_k * step_sec, 6),
            "ratio": round((prefill_sec + config.top_k * step_sec) / (own / len(prompts)), 1),
        },
    }


def _way(encoder: Encoder, prompts: Sequence[Ids]) -> Callable[[], int]:
    return lambda: encoder.encode(prompts, lambda *_: None).computed_tokens


def _afresh(encoder: VllmEncoder, prompts: Sequence[Ids]) -> Callable[[], int]:
    """Every pass begins where a run begins, without prefixes from the one before."""

    def way() -> int:
        encoder.forget()
        return encoder.encode(prompts, lambda *_: None).computed_tokens

    return way


def _peer(embed: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> Callable[[], None]:
    def way() -> None:
        embed(texts)

    return way


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


def _decoding_sec(model: Any, prompts: Sequence[Ids], steps: int = 8) -> tuple[float, float]:
    """Seconds of the prefill pass of some prompts, and of one decoding step after it, without the vocabulary's product.

    Plain Transformers, one prompt at a time with a key-value cache, the median over prompts: what generating ids costs
    at least.
    """
    device = next(model.parameters()).device
    prefill, step = [], []
    with torch.inference_mode():
        for ids in prompts:
            began = time.perf_counter()
            out = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device), use_cache=True)
            name = "cache" if "cache" in out else "past_key_values"  # as of Transformers 5.20 or so, and before
            cache = {name: out[name]}
            out.last_hidden_state.sum().item()  # waits for the device
            prefill.append(time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(steps):
                out = model(input_ids=torch.tensor([[int(ids[-1])]], device=device), use_cache=True, **cache)
            out.last_hidden_state.sum().item()
            step.append((time.perf_counter() - began) / steps)
    return float(np.median(prefill)), float(np.median(step))
