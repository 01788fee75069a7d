"""What becomes of a shard's vectors: lists of the best items, or the vectors themselves."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli.data import results
from prefill_cli.data.rejects import Reject
from prefill_cli.data.rows import ShardRows
from prefill_cli.encoding.pooling import unit_length
from prefill_cli.job import Job, Scoring
from prefill_cli.scoring.filters import Filters, ItemIndex
from prefill_cli.scoring.topk import search

Vectors = npt.NDArray[np.float32]  # [n, d]


@dataclass(frozen=True)
class Written:
    """What stands in a part, for the receipt of its shard."""

    rows: int  # long layout: list entries
    empty_lists: int = 0
    unknown_ids: int = 0
    search_sec: float = 0.0


class Outcome(Protocol):
    """Makes parts of a result."""

    def fit(self, rows: ShardRows, vectors: Vectors) -> tuple[ShardRows, Vectors]:
        """Finite vectors and their rows, less those that nothing can be made of, which are rejected."""
        ...

    def write(self, path: Path, rows: ShardRows, vectors: Vectors) -> Written: ...

    def check_unchanged(self) -> None:
        """That the files it works with are still what they were."""
        ...


def outcome_of(job: Job) -> Outcome:
    return VectorsThemselves(job) if job.scoring is None else BestItems(job, job.scoring)


class VectorsThemselves:
    """A row an input row: its vector. See Outcome."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def fit(self, rows: ShardRows, vectors: Vectors) -> tuple[ShardRows, Vectors]:
        return _with_direction(rows, vectors) if self._job.normalizes else (rows, vectors)

    def write(self, path: Path, rows: ShardRows, vectors: Vectors) -> Written:
        step = results.group_rows(self._job.user_width)
        starts = range(0, len(vectors), step)
        groups = ((rows.columns.slice(start, step), vectors[start : start + step]) for start in starts)
        return Written(results.write_vectors(path, self._job.form, groups))

    def check_unchanged(self) -> None:
        pass


class BestItems:
    """The exact top-k lists. See Outcome."""

    def __init__(self, job: Job, scoring: Scoring) -> None:
        self._job, self._scoring = job, scoring
        self._index = ItemIndex(scoring.items.ids)
        self._catalogue = scoring.catalogue(job.user_width, job.device)

    def fit(self, rows: ShardRows, vectors: Vectors) -> tuple[ShardRows, Vectors]:
        head = self._scoring.head
        if not len(vectors):
            return rows, vectors
        if head and head.kind == "user_tower":
            vectors = head.tower(vectors)
            finite = np.isfinite(vectors).all(axis=1)
            rows, vectors = _without(rows, vectors, ~finite, "the head gives a vector that is not finite")
            vectors = unit_length(vectors) if self._job.is_cosine else vectors
        too_far = self._catalogue.overflowing(vectors)
        rows, vectors = _without(rows, vectors, too_far, "its scores would leave the range of float32")
        directed = self._job.is_cosine or self._job.config.normalize
        return _with_direction(rows, vectors) if directed else (rows, vectors)

    def write(self, path: Path, rows: ShardRows, vectors: Vectors) -> Written:
        filters = self._index.filters(rows.exclude, rows.candidates)
        found = _Lists(self, rows.columns, vectors, filters)
        entries = results.write_part(path, self._job.form, found)
        return Written(entries, found.empty_lists, filters.unknown_ids, found.search_sec)

    def search(self, vectors: Vectors, filters: Filters) -> results.Lists:
        items = self._scoring.items
        top = search(vectors, self._catalogue, min(self._job.config.top_k, len(items)), filters)
        return results.Lists(top.offsets, items.ids.take(pa.array(top.rows)), top.scores)

    def check_unchanged(self) -> None:
        self._scoring.items.check_unchanged()

    @property
    def group_rows(self) -> int:
        return results.group_rows(min(self._job.config.top_k, len(self._scoring.items)))


class _Lists:
    """The row groups of a part, searched as they are written; counts on the way."""

    def __init__(self, outcome: BestItems, columns: pa.Table, vectors: Vectors, filters: Filters) -> None:
        self._outcome, self._columns, self._vectors, self._filters = outcome, columns, vectors, filters
        self.empty_lists = 0
        self.search_sec = 0.0

    def __iter__(self) -> Iterator[tuple[pa.Table, results.Lists]]:
        step = self._outcome.group_rows
        for start in range(0, len(self._vectors), step):
            began = time.perf_counter()
            lists = self._outcome.search(self._vectors[start : start + step], self._filters.of_users(start, start + step))
            self.empty_lists += int((np.diff(lists.offsets) == 0).sum())
            self.search_sec += time.perf_counter() - began
            yield self._columns.slice(start, step), lists


def _without(rows: ShardRows, vectors: Vectors, bad: Any, why: str) -> tuple[ShardRows, Vectors]:
    """Rows and vectors less the `bad` ones ([n] mask), which are rejected."""
    return rows.without(bad, Reject("not_finite", why)), vectors[~bad]


def _with_direction(rows: ShardRows, vectors: Vectors) -> tuple[ShardRows, Vectors]:
    return _without(rows, vectors, ~vectors.any(axis=1), "its vector has zero length and so no direction")


def only_finite(
    rows: ShardRows, vectors: Vectors, out_of_memory: npt.NDArray[np.int64], width: int
) -> tuple[ShardRows, Vectors]:
    """Rows and their vectors [n, width], less the rows that have no vector."""
    unfit = np.zeros(len(vectors), bool)
    unfit[out_of_memory] = True
    detail = "the memory does not suffice for this prompt, alone in a batch too; lower --max-length"
    rows, vectors = rows.without(unfit, Reject("out_of_memory", detail)), vectors[~unfit]
    if not len(vectors):
        return rows, np.empty((0, width), np.float32)
    finite = np.isfinite(vectors).all(axis=1)
    return _without(rows, vectors, ~finite, "the model gives a vector that is not finite, in float32 and alone too")
