"""Items that are tokens of the model: rows of its output or input embedding matrix behind the seam of an encoder.

No forward pass, and of the weights one tensor is read: which one, a model without weights (PyTorch's meta device) tells.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.encoding.encoder import Encoded, OnBatch
from prefill_cli.encoding.loading import ModelFolder, quiet_transformers
from prefill_cli.encoding.pooling import finish
from prefill_cli.errors import ModelError, first_line

GATHERED_TOKENS = 65_536  # rows in float64 at once


class TokenRows:
    """An Encoder that gives an item the mean of its tokens' rows, in float64 and rounded once.

    matrix: [V, d] as stored. name: what the manifest says of it.
    """

    max_batch_tokens = 0

    def __init__(self, matrix: Tensor, name: str, dims: int | None, normalize: bool) -> None:
        self._matrix, self.name = matrix, name
        self._dims, self._normalize = dims, normalize

    def encode(self, input_ids: Sequence[npt.NDArray[np.int32]], on_batch: OnBatch) -> Encoded:
        """See Encoder."""
        found = [np.empty((0, self._matrix.shape[1]), np.float32)]
        for ids in _slices(input_ids):
            lengths = np.fromiter(map(len, ids), np.int64, len(ids))
            rows = self._matrix[torch.from_numpy(np.concatenate(ids).astype(np.int64))].double().numpy()
            sums = np.add.reduceat(rows, np.concatenate([[0], np.cumsum(lengths)[:-1]]), axis=0)
            found.append((sums / lengths[:, None]).astype(np.float32))
            on_batch(len(ids), int(lengths.sum()))
        vectors = finish(torch.from_numpy(np.concatenate(found)), self._dims, self._normalize).numpy()
        return Encoded(np.ascontiguousarray(vectors), len(found) - 1, 0, 0, np.empty(0, np.int64))


def _slices(input_ids: Sequence[npt.NDArray[np.int32]]) -> list[Sequence[npt.NDArray[np.int32]]]:
    """Consecutive items whose tokens are gathered at once."""
    ends = np.cumsum([len(ids) for ids in input_ids]) // GATHERED_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(input_ids)]
    return [input_ids[a:b] for a, b in itertools.pairwise(borders) if a < b]


def load_token_rows(
    folder: ModelFolder, output: bool, dims: int | None, normalize: bool, trust_remote_code: bool
) -> TokenRows:
    """The rows of the output (what the vocabulary head multiplies) or input embeddings of a model folder.

    Raises:
        ModelError: the weights hold no such matrix, or one of another shape than config.json says.
    """
    names, has_bias = _names(folder, output, trust_remote_code)
    which = "output" if output else "input"
    files = [path for path, _ in folder.stamps]
    name, matrix = _find(files, names)
    if matrix is None:
        raise ModelError(
            f"{folder.path}: the weights hold no {which} embeddings ({' or '.join(names)})"
            + ("; those of the input are there for --from-input-embeddings" if output else "")
        )
    if has_bias:
        raise ModelError(
            f"{folder.path}: the vocabulary head adds a bias to each token's score, which its rows alone do not hold; "
            "export the items yourself, with an --item-bias-column"
        )
    if matrix.shape[1] != folder.hidden_size or len(matrix) < folder.vocabulary:
        raise ModelError(
            f"{folder.path}: {name} is {list(matrix.shape)}, not [{folder.vocabulary}, {folder.hidden_size}] as config.json "
            "says"
        )
    return TokenRows(matrix, f"{which} embeddings ({name})", dims, normalize)


def _names(folder: ModelFolder, output: bool, trust_remote_code: bool) -> tuple[list[str], bool]:
    """Names that the matrix may have in the checkpoint (tied matrices have two), and whether scores get a bias."""
    quiet_transformers()
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                folder.config, trust_remote_code=trust_remote_code
            )
        layer: Any = model.get_output_embeddings() if output else model.get_input_embeddings()
        weight = layer.weight
    except Exception as error:  # the model's own code
        which = "output" if output else "input"
        raise ModelError(f"{folder.path}: this model has no {which} embeddings: {first_line(error)}") from None
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    return names, output and getattr(layer, "bias", None) is not None


def _find(files: Sequence[Path], names: Sequence[str]) -> tuple[str, Tensor | None]:
    """The first tensor under one of the names, whole or without what a base model's checkpoint leaves out."""
    from safetensors import safe_open

    stored: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            stored |= dict.fromkeys(opened.keys(), file)
    bare = [name.partition(".")[2] for name in names if name.count(".") > 1]
    for name in (*names, *bare):
        if name in stored:
            with safe_open(stored[name], framework="pt") as opened:
                return name, opened.get_tensor(name)
    return "", None
