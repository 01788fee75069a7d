"""Hidden states → one vector a prompt, in float32: pool, then cut to --dims, then normalise."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from prefill_cli.errors import ModelError

# B prompts, T padded positions, d width. Right padding: prompt b has real tokens at [b, :lengths[b]].


def _last(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()


def _mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]  # [B, T]
    return hidden.float().masked_fill(~real[..., None], 0.0).sum(1) / lengths[:, None]


def _first(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[:, 0].float()


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": _last,  # the last real token, which in a causal model has read the whole prompt
    "mean": _mean,  # the mean over real tokens
    "first": _first,  # the first token
}

# The names under which sentence-transformers stores the same three in 1_Pooling/config.json.
STORED_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "first", "mean_tokens": "mean", "cls_token": "first"}


def finish(pooled: Tensor, dims: int | None, normalize: bool) -> Tensor:
    """[B, d] pooled vectors → [B, dims or d]: cut first, so that a normalised vector has length 1 after it."""
    cut = pooled[:, :dims]
    return torch.nn.functional.normalize(cut, dim=-1) if normalize else cut


def stored_pooling(folder: Path) -> str | None:
    """The pooling that a model folder names for itself (sentence-transformers layout), or None.

    Raises:
        ModelError: it names one that is not last, mean or first.
    """
    path = next(iter(sorted(folder.glob("*_Pooling/config.json"))), None)
    if path is None:
        return None
    stored = json.loads(path.read_bytes())
    names = [stored["pooling_mode"]] if "pooling_mode" in stored else []
    names += [key.removeprefix("pooling_mode_") for key, value in stored.items() if value is True and "pooling_mode_" in key]
    if len(names) == 1 and names[0] in STORED_NAMES:
        return STORED_NAMES[names[0]]
    raise ModelError(
        f"{path}: pooling {' + '.join(names) or 'none'} is not one of last, mean, first; choose one by --pooling"
    )
