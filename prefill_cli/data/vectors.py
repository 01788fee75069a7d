"""A column of users' vectors instead of prompts, for `prefill-score search`."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import InputPlan
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rejects import Reject
from prefill_cli.data.tokenization import Tokenized


class VectorReader:
    """Lists of floats → float32 vectors of `width`; a row that is none is told apart."""

    limit = None  # of tokens, of which there are none
    specials: tuple[list[int], list[int]] = ([], [])

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, column: pa.Array) -> Tokenized:
        """The vectors of a piece, in the place of token ids."""
        if pa.types.is_null(column.type):
            column = column.cast(pa.large_list(pa.float32()))
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
        good = np.flatnonzero((lengths == self._width) & (lengths > 0))
        flat = column.take(pa.array(good)).flatten()
        nulls = np.zeros(len(flat), bool) if not flat.null_count else flat.is_null().to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, which is told as such
            vectors = flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(good), self._width)
        holes = np.asarray(nulls.reshape(vectors.shape).any(axis=1)).tolist()
        finite = np.asarray(np.isfinite(vectors).all(axis=1)).tolist()
        found: list[npt.NDArray[Any] | None] = [None] * len(column)
        rejects = {}
        for i in np.flatnonzero((lengths != self._width) | (lengths == 0)).tolist():
            null = lengths[i] < 0
            wanted = f", not {self._width}" if self._width else ""
            why = "" if null else f"the vector has {lengths[i]} numbers{wanted}"
            rejects[i] = Reject("null_vector" if null else "bad_vector", why)
        for i, vector, hole, is_finite in zip(good.tolist(), vectors, holes, finite, strict=True):
            if hole:
                rejects[i] = Reject("bad_vector", "the vector holds a null")
            elif not is_finite:
                rejects[i] = Reject("not_finite", "the vector holds a number that is not finite")
            else:
                found[i] = vector
        return Tokenized(found, rejects)


def width_of_vectors(plan: InputPlan, config: RunConfig) -> int:
    """The commonest number of numbers among the first vectors; 0 where there is no vector."""
    kind = plan.columns.field(config.text_column).type
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    if pa.types.is_null(kind):
        return 0
    reader = ShardReader(plan, replace(config, keep_columns=(), exclude_column=None, candidates_column=None))
    for shard in plan.shards(16_384):
        lengths: Counter[int] = Counter()
        for piece in reader.read(shard):
            lengths.update(pc.list_value_length(piece.prompts).drop_null().to_pylist())
        lengths.pop(0, None)
        if lengths:
            return lengths.most_common(1)[0][0]
    return 0
