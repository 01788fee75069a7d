"""How popular items are: the number of histories (rows of the run's input) that hold each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.tools.judging.ids import Ints, as_ids, encode
from prefill_cli.tools.judging.result_lists import in_turn
from prefill_cli.tools.judging.run_inputs import RunInputs

MERGE_ROWS = 2_000_000  # of counts that wait to be summed
MANY_ROWS = 1 << 20


@dataclass(frozen=True)
class Popularity:
    """Items by popularity."""

    items: pa.Array  # the most popular first, ids as as_ids gives them
    counts: Ints  # of histories that hold each
    users: int  # rows of the input
    longest: int  # the most items that the run excluded for a user

    @property
    def of_histories(self) -> float:
        """Mean share of users who have the item, over all places of histories."""
        total = self.counts.sum()
        return float(np.dot(self.counts.astype(np.float64), self.counts)) / total / self.users if total else 0.0

    def degrees(self, items: pl.Series) -> Ints:
        """In how many histories each of some items is."""
        known = pl.DataFrame({"item": pl.from_arrow(self.items), "d": self.counts})
        if items.dtype != known["item"].dtype:  # there is none on one side
            return np.zeros(len(items), np.int64)
        return pl.DataFrame({"item": items}).join(known, "item", "left", maintain_order="left")["d"].fill_null(0).to_numpy()


@dataclass(frozen=True)
class Seen:
    """What a batch of input rows excludes, as places in the order of popularity, ascending within a user."""

    start: int  # number of the first row
    rows: int
    user: Ints  # [entries] from 0 in this batch
    place: Ints  # [entries]


def count_histories(inputs: RunInputs, column: str, exclude: str | None) -> Popularity:
    """A pass over the input's histories.

    Raises:
        InputError: no such column, or not one of lists of item ids.
    """
    nothing = as_ids(pa.array([], inputs.item_type))
    waiting = [pl.DataFrame({"item": pl.from_arrow(nothing), "d": np.empty(0, np.int64)})]
    rows = merged = longest = 0
    columns = list(dict.fromkeys([column, *([exclude] if exclude else [])]))

    def count(batch: pa.Table) -> tuple[pl.DataFrame, int]:
        lengths, values = inputs.lists(batch, column)
        codes, items = encode(values)
        times = np.bincount(codes, minlength=len(items))
        seen = np.flatnonzero(times)
        most = inputs.lists(batch, exclude)[0].max(initial=0) if exclude and exclude != column else lengths.max(initial=0)
        return pl.DataFrame({"item": pl.from_arrow(items.take(pa.array(seen))), "d": times[seen]}), int(most)

    for frame, most in in_turn(count, inputs.batches(columns)):
        longest = max(longest, most)
        waiting.append(frame)
        rows += len(frame)
        if rows > merged + MERGE_ROWS:
            waiting = [pl.concat(waiting).group_by("item").agg(pl.col("d").sum())]
            rows = merged = len(waiting[0])
    table = pl.concat(waiting).group_by("item").agg(pl.col("d").sum()).sort(["d", "item"], descending=[True, False])
    return Popularity(as_ids(table["item"].to_arrow()), table["d"].to_numpy(), inputs.rows, longest if exclude else 0)


def read_seen(inputs: RunInputs, exclude: str | None, items: pa.Array) -> Iterator[Seen]:
    """What each row excludes of `items`, which are in the order of popularity. Without a column: nothing."""

    def seen(numbered: tuple[int, pa.Table]) -> Seen:
        start, batch = numbered
        lengths, values = inputs.lists(batch, exclude or "")
        place = pc.fill_null(pc.index_in(values, value_set=items), -1).to_numpy().astype(np.int64)
        keys = np.sort((np.repeat(np.arange(len(lengths)), lengths) * len(items) + place)[place >= 0])
        return Seen(start, len(lengths), *np.divmod(keys, max(len(items), 1)))

    if exclude is not None:
        yield from in_turn(seen, _numbered(inputs.batches([exclude])))
        return
    nothing = np.empty(0, np.int64)
    for start in range(0, inputs.rows, MANY_ROWS):
        yield Seen(start, min(MANY_ROWS, inputs.rows - start), nothing, nothing)


def _numbered(batches: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    start = 0
    for batch in batches:
        yield start, batch
        start += batch.num_rows
