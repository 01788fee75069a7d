"""What lists do with the catalogue as a whole: how much of it they show, how evenly, how popular and how new it is.

All are over the places of the first k of every list; c(i) is the number of lists that have item i there, N the size of the
catalogue, d(i) the number of histories that hold item i, and M that of all histories (the input's rows).

coverage         share of the N items with c(i) > 0 (aggregate diversity: Adomavicius, Kwon, Improving aggregate
                 recommendation diversity using ranking-based techniques, IEEE TKDE 24(5), 2012)
gini             Gini index of c over all N items: sum over j of (2j - N - 1) c(i_j) / ((N - 1) sum of c), items by c
                 ascending; 0 where all are shown alike, 1 where one item is shown alone (Shani, Gunawardana, Evaluating
                 recommendation systems, Recommender Systems Handbook, 2011)
popularity       mean of d(i) / M over places: average recommendation popularity (Yin, Cui, Li, Yao, Chen, Challenging
                 the long tail recommendation, VLDB 2012, over users), as a share of users
popularity_lift  popularity / mean of d(i) / M over the histories' own places, - 1 (the change of group average
                 popularity, Abdollahpouri, Mansoury, Burke, Mobasher, The unfairness of popularity bias in
                 recommendation, RMSE at RecSys 2019); above 0 where lists are more popular than what users take
novelty          mean of log2(M / d(i)) over places, in bits: self-information (Zhou, Kuscsik, Liu, Medo, Wakeling,
                 Zhang, Solving the apparent diversity-accuracy dilemma of recommender systems, PNAS 107, 2010). An item
                 in no history counts there as if it were in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from prefill_cli.tools.judging.ids import Ints
from prefill_cli.tools.judging.popularity import Popularity
from prefill_cli.tools.judging.ranking_metrics import Floats
from prefill_cli.tools.judging.result_lists import Lists

MERGE_ROWS = 2_000_000  # of counts that wait to be summed
SPARSE_CELLS = 1 << 23  # above which a chunk's counts are sorted instead of laid out


@dataclass
class ItemCounts:
    """How many lists have each item among their first k, by segment; grows with the items that occur."""

    ks: Sequence[int]
    _waiting: list[pl.DataFrame] = field(default_factory=list)
    _rows: int = 0
    _merged: int = 0

    @property
    def names(self) -> list[str]:
        return [f"c{j}" for j in range(len(self.ks))]

    def count(self, lists: Lists, segments: Ints) -> pl.DataFrame:
        """Counts of a chunk's lists, for `add`. segments: [lists]. May run in threads."""
        size, buckets = len(lists.item_ids), len(self.ks) + 1
        lengths, longest = lists.lengths, int(lists.lengths.max(initial=0))
        bucket = np.searchsorted(self.ks, np.arange(longest), side="right")  # of rank + 1
        if len(lists.codes) == longest * len(lists):  # all of one length: no rank for each place needs to be made
            first = lists.codes.reshape(len(lists), longest) + segments[:, None] * size
            cells = (first * buckets + bucket).reshape(-1)
        else:
            rank = np.arange(len(lists.codes)) - np.repeat(lists.offsets[:-1], lengths)
            cells = (np.repeat(segments * size, lengths) + lists.codes) * buckets + bucket[rank]
        total = (int(segments.max(initial=0)) + 1) * size * buckets
        if total <= max(SPARSE_CELLS, 4 * len(cells)):
            counts = np.bincount(cells, minlength=total).reshape(-1, buckets)
            row = np.flatnonzero(counts[:, :-1].any(axis=1))
            counts = counts[row]
        else:
            cells, times = np.unique(cells, return_counts=True)
            row, at = np.unique(cells // buckets, return_inverse=True)
            counts = np.zeros((len(row), buckets), np.int64)
            counts[at, cells % buckets] = times
        segment, code = np.divmod(row, max(size, 1))
        return self.frame(segment, lists.item_ids.take(pa.array(code)), counts[:, :-1].cumsum(axis=1))

    def frame(self, segment: Ints, items: pa.Array, counts: npt.NDArray[np.int64]) -> pl.DataFrame:
        """Rows of (segment, item) with [rows, ks] counts."""
        columns = dict(zip(self.names, counts.T, strict=True))
        return pl.DataFrame({"segment": segment.astype(np.int16), "item": pl.from_arrow(items), **columns})

    def add(self, frame: pl.DataFrame) -> None:
        self._waiting.append(frame)
        self._rows += len(frame)
        if self._rows > self._merged + MERGE_ROWS:
            self.merged()

    def merged(self) -> pl.DataFrame:
        """(segment, item, c0, c1, …), each pair of segment and item once."""
        if not self._waiting:
            return self.frame(np.empty(0, np.int64), pa.array([], pa.int64()), np.empty((0, len(self.ks)), np.int64))
        table = pl.concat(self._waiting).group_by("segment", "item").agg(pl.col(self.names).sum())
        self._waiting, self._rows, self._merged = [table], len(table), len(table)
        return table

    def summary(self, items: int, popularity: Popularity | None, segment: int | None = None) -> dict[str, dict[str, Any]]:
        """Metric → k → value, of one segment or of all; `items` in the catalogue."""
        table = self.merged()
        if segment is None:
            table = table.group_by("item").agg(pl.col(self.names).sum())
        else:
            table = table.filter(pl.col("segment") == segment)
        table = table.sort("item")  # sums of floats then have one order
        found: dict[str, dict[str, Any]] = {}
        degrees = None if popularity is None else popularity.degrees(table["item"])
        for name, k in zip(self.names, self.ks, strict=True):
            counts = table[name].to_numpy()
            values: dict[str, float | None] = {
                "coverage": np.count_nonzero(counts) / max(items, 1),
                "gini": gini(counts, items),
            }
            if popularity is not None and degrees is not None:
                values |= _popularity_metrics(counts, degrees, popularity)
            for metric, value in values.items():
                found.setdefault(metric, {})[str(k)] = None if value is None else float(value)
        return found


def gini(counts: npt.NDArray[np.int64], items: int) -> float | None:
    """Of `counts` and as many zeros as make `items`; None for fewer than two items, or where nothing is counted."""
    total = int(counts.sum())
    if items < 2 or not total:
        return None
    ascending = np.sort(counts)
    j = np.arange(items - len(ascending) + 1, items + 1)
    return float(np.dot(2 * j - items - 1, ascending.astype(np.float64))) / ((items - 1) * total)


def _popularity_metrics(counts: npt.NDArray[np.int64], degrees: Ints, popularity: Popularity) -> dict[str, float | None]:
    places: Floats = counts.astype(np.float64)
    if not places.sum() or not popularity.users:
        return {"popularity": None, "popularity_lift": None, "novelty": None}
    mean = float(places @ degrees) / places.sum() / popularity.users
    bits = np.log2(popularity.users / np.maximum(degrees, 1))
    usual = popularity.of_histories
    return {
        "popularity": mean,
        "popularity_lift": mean / usual - 1 if usual else None,
        "novelty": float(places @ bits) / places.sum(),
    }
