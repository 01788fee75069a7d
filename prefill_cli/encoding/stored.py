"""Vectors that are there already, behind the seam of an encoder: cut and normalised, nothing computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.encoding.encoder import Encoded, OnBatch
from prefill_cli.encoding.pooling import unit_length


class StoredVectors:
    """An Encoder whose prompts are their own vectors, [d] float32 each."""

    name = "stored"
    max_batch_tokens = 0

    def __init__(self, dims: int | None, normalize: bool) -> None:
        self._dims, self._normalize = dims, normalize

    def encode(self, input_ids: Sequence[npt.NDArray[Any]], on_batch: OnBatch) -> Encoded:
        """See Encoder."""
        whole = np.stack(input_ids) if input_ids else np.empty((0, 0), np.float32)
        vectors = np.ascontiguousarray(whole[:, : self._dims])
        on_batch(len(vectors), 0)
        return Encoded(unit_length(vectors) if self._normalize else vectors, 0, 0, 0, np.empty(0, np.int64))
