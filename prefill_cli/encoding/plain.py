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

from prefill_cli.encoding.batching import TokenLimit, halves, padded_batches
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

    name = "plain"

    def __init__(self, model: Any, *, pooling: str, dims: int | None, normalize: bool, max_batch_tokens: int) -> None:
        self._model = model
        self._pool = POOLINGS[pooling]
        self._dims = dims
        self._normalize = normalize
        self.max_batch_tokens = max_batch_tokens
        self._limit = TokenLimit(max_batch_tokens)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def encode(self, input_ids: Sequence[npt.NDArray[np.int32]], on_batch: OnBatch) -> Encoded:
        """See Encoder. Where memory runs out, a batch is halved. Vectors that are not finite are tried again."""
        lengths = np.fromiter(map(len, input_ids), np.int64, len(input_ids))
        found: list[tuple[list[int], npt.NDArray[np.float32]]] = []
        failed: list[int] = []
        cells = 0
        waiting = [list(rows) for rows in padded_batches(lengths, self._limit.tokens)][::-1]
        while waiting:
            rows = waiting.pop()
            size = len(rows) * int(lengths[rows[0]])
            if len(rows) > 1 and size > self._limit.tokens:  # planned before the limit was lowered
                waiting += halves(rows)
                continue
            vectors = self._try(self._model, [input_ids[i] for i in rows])
            if vectors is None and len(rows) > 1:
                self._limit.lower(size)
                waiting += halves(rows)
                continue
            if vectors is None:
                failed += rows
            else:
                found.append((rows, vectors))
                cells += size
            on_batch(len(rows), int(lengths[rows].sum()))
        vectors = np.full((len(input_ids), found[0][1].shape[1] if found else 0), np.nan, np.float32)
        for rows, part in found:
            vectors[rows] = part  # back to input order, in the function that left it
        again = self.retry(input_ids, vectors, except_for=failed)
        return Encoded(
            vectors,
            batches=len(found),
            computed_tokens=cells + int(lengths[again].sum()),
            retried_rows=len(again),
            out_of_memory=np.array(sorted(failed), np.int64),
        )

    def retry(
        self, input_ids: Sequence[npt.NDArray[np.int32]], vectors: npt.NDArray[np.float32], except_for: Sequence[int] = ()
    ) -> npt.NDArray[np.int64]:
        """Encode rows of `vectors` [n, d] that are not finite once more, alone and in float32, in place; returns which."""
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        again = np.setdiff1d(bad, np.asarray(except_for, np.int64))
        if len(again):
            model = self._in_float32()
            for row in again:
                if (alone := self._try(model, [input_ids[int(row)]])) is not None:
                    vectors[row] = alone[0]
        return again

    def _try(self, model: Any, rows: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32] | None:
        """[B, d] vectors of B prompts, None where the memory does not suffice."""
        try:
            return self._forward(model, rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

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
        with torch.inference_mode():
            hidden = model(
                input_ids=torch.from_numpy(padded).to(device),
                # Without padding there is nothing to mask, and attention takes its faster causal path.
                attention_mask=None if mask.all() else torch.from_numpy(mask.astype(np.int64)).to(device),
                use_cache=False,
            ).last_hidden_state
            pooled = self._pool(hidden, torch.from_numpy(lengths).to(device))
            vectors: npt.NDArray[np.float32] = finish(pooled, self._dims, self._normalize).numpy()
        return vectors
