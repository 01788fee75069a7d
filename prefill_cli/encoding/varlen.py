"""Attention over packed sequences by PyTorch's variable-length kernel (FlashAttention-2, arXiv 2307.08691), on CUDA.

All sequences of a row are one call per layer. A sequence that goes on from a shared prefix has more keys than queries,
which the kernel aligns at their ends, as causal attention wants it.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefill_cli.errors import first_line

log = logging.getLogger(__name__)
WIDEST_HEAD = 256  # that the kernel knows


@dataclass(frozen=True)
class Layout:
    """Sequences that lie end to end: where they end ([n + 1] int32, from 0), for queries and for keys, and the longest."""

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int


class Varlen:
    """`varlen_attn` of torch.nn.attention.varlen, whose options differ from one PyTorch to the next."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._options = set(inspect.signature(call).parameters)

    def serves(self, query: Tensor, value: Tensor, window: int | None, softcap: float | None) -> bool:
        """Whether the kernel knows this kind of attention."""
        size = query.shape[-1]
        fits = size == value.shape[-1] and size <= WIDEST_HEAD and not size % 8
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and fits and not softcap and (window is None or "window_size" in self._options)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, at: Layout, scale: float, window: int | None) -> Tensor:
        """[Tq, heads, size] for query [Tq, heads, size] and key, value [Tk, KV heads, size]."""
        options: dict[str, Any] = {"scale": scale}
        if "window_size" in self._options:
            options["window_size"] = (-1 if window is None else window - 1, 0)  # keys before a query, and after it
        else:
            options["is_causal"] = True
        if "num_splits" in self._options:  # one order of sums, whatever else is in the batch
            options["num_splits"] = 1
        if (groups := query.shape[1] // key.shape[1]) > 1:
            if "enable_gqa" in self._options:
                options["enable_gqa"] = True
            else:
                key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        out: Tensor = self._call(
            query, key, value, at.query_ends, at.key_ends, at.most_queries, at.most_keys, **options
        )  # fmt: skip
        return out


def load_varlen(device: torch.device) -> Varlen | None:
    """The kernel, where this device and PyTorch have it: tried on a few tokens."""
    if device.type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        varlen = Varlen(varlen_attn)
        x = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device=device)
        ends = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
        with torch.inference_mode():
            varlen(x, x, x, Layout(ends, ends, 2, 2), 1.0, None).sum().item()
    except Exception as error:  # another PyTorch, an older card
        log.warning("PyTorch's variable-length attention does not work here, so tiles serve: %s", first_line(error))
        return None
    return varlen
