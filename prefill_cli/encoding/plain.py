"""The plain encoder: Transformers' own forward pass over right-padded batches.

It is the reference that every faster encoder is held to, and the way for models that those do not know. No vocabulary
head, no key-value cache, masks from lengths (never from token values), any id as padding.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefill_cli.encoding.batching import padded_batches
from prefill_cli.encoding.encoder import Encoded, OnBatch
from prefill_cli.encoding.loading import float32_copy, is_out_of_memory
from prefill_cli.encoding.pooling import POOLINGS, finish
from prefill_cli.errors import ModelError

log = logging.getLogger(__name__)
PADDING_ID = 0  # any id that exists: padded positions are masked, and causal attention never looks right


class PlainEncoder:
    """An Encoder over a Transformers base model.

    model: maps input_ids [B, T] and attention_mask [B, T] to an object with `last_hidden_state` [B, T, hidden].
    max_batch_tokens: padded cells of a batch.
    """

    def __init__(self, model: Any, *, pooling: str, dims: int | None, normalize: bool, max_batch_tokens: int) -> None:
        self._model = model
        self._pool = POOLINGS[pooling]
        self._dims = dims
        self._normalize = normalize
        self._max_batch_tokens = max_batch_tokens

    def encode(self, input_ids: Sequence[npt.NDArray[np.int32]], on_batch: OnBatch) -> Encoded:
        """See Encoder. Rows whose vector is not finite are tried once more, alone and in float32."""
        lengths = np.fromiter(map(len, input_ids), np.int64, len(input_ids))
        vectors, batches, cells = None, 0, 0
        for rows in padded_batches(lengths, self._max_batch_tokens):
            encoded = self._forward(self._model, [input_ids[i] for i in rows])
            if vectors is None:
                vectors = np.empty((len(input_ids), encoded.shape[1]), np.float32)
            vectors[rows] = encoded  # back to input order, in the function that left it
            batches += 1
            cells += len(rows) * int(lengths[rows[0]])
            on_batch(len(rows), int(lengths[rows].sum()))
        if vectors is None:
            return Encoded(np.empty((0, 0), np.float32), 0, 0, 0)
        again = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(again):
            model = self._in_float32()
            for row in again:
                vectors[row] = self._forward(model, [input_ids[int(row)]])[0]
        return Encoded(vectors, batches, cells + int(lengths[again].sum()), len(again))

    def _in_float32(self) -> Any:
        try:
            return float32_copy(self._model)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                "out of memory for a float32 copy of the model, which prompts need whose vector is not finite; "
                "start again with --dtype float32 or bfloat16"
            ) from None

    def _forward(self, model: Any, rows: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """[B, d] float32 vectors of B prompts, in their order."""
        device = next(model.parameters()).device
        lengths = np.array([len(row) for row in rows])
        padded = np.full((len(rows), lengths.max()), PADDING_ID, np.int64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        mask = np.arange(lengths.max()) < lengths[:, None]  # [B, T]
        try:
            with torch.inference_mode():
                hidden = model(
                    input_ids=torch.from_numpy(padded).to(device),
                    # Without padding there is nothing to mask, and attention takes its faster causal path.
                    attention_mask=None if mask.all() else torch.from_numpy(mask.astype(np.int64)).to(device),
                    use_cache=False,
                ).last_hidden_state
                pooled = self._pool(hidden, torch.from_numpy(lengths).to(device))
                vectors: npt.NDArray[np.float32] = finish(pooled, self._dims, self._normalize).numpy()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                f"out of memory in a batch of {len(rows)} prompts x {lengths.max()} tokens on {device}; "
                f"lower --max-batch-tokens (now {self._max_batch_tokens}) or --max-length"
            ) from None
        return vectors
