"""How many tokens a forward pass takes where the user did not say: what fits the memory and the cache, then a short probe.

A row that is too long loses the cache between layers and leaves lanes waiting at the end of a shard; one that is too short
is filled up more often and pays for each layer's calls more often. A prompt's vector is the same bits for any budget.
"""

from collections.abc import Callable, Sequence

import torch

from prefill_cli.machine import cache_bytes, free_memory, threads

CHUNK = {"cpu": 1_024, "mps": 2_048, "cuda": 8_192}  # rows of a position-wise product, by device type
CHUNKS = (1, 2, 4, 8)  # of a row: the budgets that come into question
# Floats of a token that are at work at once, as multiples of its hidden state: hidden states, queries, keys, values,
# attended values, their sum, and what Transformers' own code holds beside them.
STATES_PER_TOKEN = 12
SHARE_OF_MEMORY = 0.25
PROBES = 2  # passes of each budget
MAX_LANES = 32  # rows at work side by side on a CPU; more would queue for Python's interpreter lock
NOISE = 0.05


def auto_batch_tokens(hidden_size: int, dtype: str, device: str) -> int:
    """The largest budget in question whose states fit the last cache, and a quarter of the free memory, for all lanes.

    The smallest, for a GPU that another machine has.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return CHUNK[device]
    return affordable(hidden_size, dtype, device, cache_bytes() if device == "cpu" else free_memory(device))[-1]


def affordable(hidden_size: int, dtype: str, device: str, most_bytes: float = float("inf")) -> list[int]:
    """Budgets that a quarter of the free memory and `most_bytes` have room for, ascending; at least the smallest."""
    lanes = threads() if device == "cpu" else 1
    token = lanes * STATES_PER_TOKEN * hidden_size * getattr(torch, dtype).itemsize
    room = min(SHARE_OF_MEMORY * free_memory(device), most_bytes)
    chunk = CHUNK[device.partition(":")[0]]
    return [chunk * n for n in CHUNKS if n == 1 or chunk * n * token <= room]


def lanes(device: str) -> int:
    """Packed rows at work side by side, by device type."""
    return min(threads(), MAX_LANES) if device == "cpu" else 1


def row_tokens(max_batch_tokens: int, chunk: int) -> int:
    """Tokens of a packed row: the budget in whole chunks."""
    return max(chunk, max_batch_tokens // chunk * chunk)


def fastest(budgets: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest budget that is as fast as the fastest, up to what the machine's noise lets one see.

    budgets: ascending. seconds: of a pass over so many tokens. Passes are taken in turn, the best of each counts.
    """
    best = dict.fromkeys(budgets, float("inf"))
    for _ in range(PROBES):
        for tokens in budgets:
            best[tokens] = min(best[tokens], seconds(tokens) / tokens)
    return next(tokens for tokens in budgets if best[tokens] <= (1 + NOISE) * min(best.values()))
