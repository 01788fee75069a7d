"""The seam between the model and the rest: token ids in row order → vectors in row order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

OnBatch = Callable[[int, int], None]  # rows and tokens of a batch that is done


@dataclass(frozen=True)
class EncoderOptions:
    """How vectors are made, and how fast."""

    pooling: str
    dims: int | None
    normalize: bool
    dtype: str
    max_batch_tokens: int
    compiled: bool = False
    share: bool = True
    probe: bool = False  # whether the budget may be another that is faster


@dataclass(frozen=True)
class Encoded:
    """Vectors of n prompts, pooled, cut to --dims and normalised as the run asks.

    `vectors` is [n, d] float32, row i for prompt i; a row that is not finite belongs to a prompt that could not be
    encoded, in float32 and alone either. `computed_tokens` counts cells that went through the model, padding included.
    `out_of_memory` lists the rows that did not fit the memory even alone; they are not finite either.
    """

    vectors: npt.NDArray[np.float32]
    batches: int
    computed_tokens: int
    retried_rows: int
    out_of_memory: npt.NDArray[np.int64]


class Encoder(Protocol):
    """Anything that turns prompts into vectors."""

    name: str  # for the manifest
    max_batch_tokens: int  # as the run asked, or as a probe found

    def encode(self, input_ids: Sequence[npt.NDArray[Any]], on_batch: OnBatch) -> Encoded:
        """Vectors of `input_ids` (n arrays of at least one token each), in the same order."""
        ...
