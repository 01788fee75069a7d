"""`prefill-score bench`: this tool's encoder against the loop that people write first, on their own model and prompts.

The loop is plain Transformers: batches of 32 in arrival order, padded to the longest, last hidden state of the last
token; and the same sorted by length. All read the same token ids with the same weights, dtype and threads, in one
process, passes taken in turn, the best of each kept. Start-up (imports, weights) is told apart.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rows import read_rows
from prefill_cli.data.tokenization import Ids, PromptTokenizer, load_tokenizer
from prefill_cli.encoding.loading import choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.errors import InputError
from prefill_cli.job import AUTO_BATCH_TOKENS

LOOP_ROWS = 32


def bench(config: RunConfig, rows: int, repeat: int) -> dict[str, Any]:
    """Time encoding of the first `rows` prompts, `repeat` passes of each way.

    Returns one object: what was measured on, and for each way `sec`, `tokens_per_sec` and `padding` (cells per token).
    """
    began = time.perf_counter()
    config = replace(config, exclude_column=None, candidates_column=None, keep_columns=())  # read what encoding needs
    folder, plan = open_model_folder(config), plan_inputs(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    model = load_base_model(folder, device, dtype, config.trust_remote_code)
    start_sec = time.perf_counter() - began

    shard = plan.shards(rows)[0]
    prompts = read_rows(ShardReader(plan, config), tokenize, plan, config.id_column, shard).input_ids
    if not prompts:
        raise InputError("there is no prompt to measure with: every row of the first shard is rejected")
    tokens = sum(map(len, prompts))
    budget = config.max_batch_tokens or AUTO_BATCH_TOKENS[device.partition(":")[0]]
    encoder = PlainEncoder(model, pooling="last", dims=config.dims, normalize=config.normalize, max_batch_tokens=budget)
    by_length = sorted(prompts, key=len, reverse=True)
    ways: dict[str, Callable[[], int]] = {
        "prefill-score": lambda: encoder.encode(prompts, lambda *_: None).computed_tokens,
        "loop, arrival order": lambda: _loop(model, prompts),
        "loop, sorted": lambda: _loop(model, by_length),
    }
    _loop(model, prompts[:LOOP_ROWS])  # first-call costs belong to none of the ways
    seconds = dict.fromkeys(ways, float("inf"))
    cells = dict.fromkeys(ways, 0)
    for _ in range(repeat):
        for name, way in ways.items():
            began = time.perf_counter()
            cells[name] = way()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return {
        "rows": len(prompts),
        "tokens": tokens,
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "repeat": repeat,
        "start_sec": round(start_sec, 3),
        "ways": {
            name: {
                "sec": round(seconds[name], 6),
                "tokens_per_sec": round(tokens / seconds[name]),
                "padding": round(cells[name] / tokens, 3),
            }
            for name in ways
        },
    }


def _loop(model: Any, prompts: Sequence[Ids]) -> int:
    """The plain loop over ready-made ids; returns the cells that it computed."""
    device, cells = next(model.parameters()).device, 0
    vectors: list[npt.NDArray[np.float32]] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), LOOP_ROWS):
            batch = [torch.from_numpy(ids.astype(np.int64)) for ids in prompts[start : start + LOOP_ROWS]]
            lengths = torch.tensor([len(ids) for ids in batch])
            input_ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
            mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long().to(device)
            hidden = model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
            vectors.append(hidden[torch.arange(len(batch)), lengths - 1].float().cpu().numpy())
            cells += input_ids.numel()
    return cells
