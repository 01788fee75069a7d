"""Hidden states → one vector a prompt, in float32: pool, then cut to --dims, then normalise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.errors import ModelError, first_line

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
    """[B, d] pooled vectors → [B, dims or d]: cut first, so that a normalised vector has length 1 after it.

    A vector of zero length, which has no direction, stays as it is.
    """
    cut = pooled[:, :dims].cpu()
    return torch.from_numpy(unit_length(cut.numpy())) if normalize else cut


def unit_length(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[n, d] vectors over their lengths; one of zero length stays as it is."""
    wide = torch.from_numpy(vectors).double()  # squares of very long or short vectors leave the range of float32
    lengths = wide.norm(dim=-1, keepdim=True)
    scaled: npt.NDArray[np.float32] = (wide / torch.where(lengths > 0, lengths, 1.0)).float().numpy()
    return scaled


def stored_pooling(folder: Path) -> str | None:
    """The pooling that a model folder names for itself (sentence-transformers layout), or None.

    Raises:
        ModelError: it names one that is not last, mean or first.
    """
    path = next(iter(sorted(folder.glob("*_Pooling/config.json"))), None)
    if path is None:
        return None
    stored = read_json(path)
    modes = stored.get("pooling_mode", [])  # the newer layout: a name, or several to be joined end to end
    names = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    names += [key.removeprefix("pooling_mode_") for key, value in stored.items() if value is True and "pooling_mode_" in key]
    found = {STORED_NAMES.get(name) for name in names}
    if len(found) == 1 and (pooling := found.pop()):
        return pooling
    raise ModelError(
        f"{path}: pooling {' + '.join(names) or 'none'} is not one of last, mean, first; choose one by --pooling"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        ModelError: unreadable, or not an object.
    """
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {first_line(error)}") from None
    if not isinstance(stored, dict):
        raise ModelError(f"{path}: not a JSON object")
    return stored
