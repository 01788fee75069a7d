"""Ids of users and items in one type for each of their kinds, and lists of them as flat arrays with offsets."""

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.arrow import is_binary, is_list, is_text, plain_type, to_working

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]


def offsets_of(lengths: npt.ArrayLike) -> Ints:
    """[n + 1] where each of n consecutive lists begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def as_ids(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Ids in one type for each of their kinds: int64 (dates as days; uint64 bit for bit), large_string, large_binary."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = to_working(array)
    if pa.types.is_date(array.type):
        array = array.cast(pa.date32()).cast(pa.int32())
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64(), safe=False)
    if is_text(array.type):
        array = array.cast(pa.large_string())
    elif is_binary(array.type):
        array = array.cast(pa.large_binary())
    array.validate(full=True)
    return array


def kind_of_ids(kind: pa.DataType) -> str:
    """Which of the kinds of as_ids a type belongs to; a type that is no id is itself."""
    kind = plain_type(kind)
    if pa.types.is_integer(kind):
        return "integer"
    return "text" if is_text(kind) else "binary" if is_binary(kind) else str(kind)


def element_type(kind: pa.DataType) -> pa.DataType:
    """What a list holds; any other type is itself."""
    return kind.value_type if is_list(kind) else kind


def encode(column: pa.Array | pa.ChunkedArray) -> tuple[Codes, pa.Array]:
    """Values as numbers of distinct ones, and those, as as_ids gives them. There is no null among the values.

    A dictionary may hold values that do not occur.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    return array.indices.to_numpy().astype(np.int32, copy=False), as_ids(array.dictionary)


def places_of(offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Where the elements of some lists are, list after list, and [rows + 1] the offsets that these lists then have."""
    lengths = offsets[rows + 1] - offsets[rows]
    taken = offsets_of(lengths)
    return np.arange(taken[-1]) + np.repeat(offsets[rows] - taken[:-1], lengths), taken


def distinct_in_lists(lengths: Ints, values: pa.Array) -> tuple[Ints, pa.Array]:
    """Lists of ids, given by their lengths and values, without what is null or stands there again; in any order."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    if values.null_count:
        there = pc.is_valid(values)
        row, values = row[there.to_numpy(zero_copy_only=False)], values.filter(there)
    if len(row) and np.bincount(row).max() > 1:
        codes, distinct = encode(values)
        keys = np.sort(row * len(distinct) + codes)
        again = keys[1:] == keys[:-1]
        if again.any():
            row, codes = np.divmod(keys[np.append(True, ~again)], len(distinct))
            values = distinct.take(pa.array(codes))
    return np.bincount(row, minlength=len(lengths)).astype(np.int64), values


def item_lists(column: pa.ChunkedArray, item_type: pa.DataType) -> tuple[Ints, pa.Array]:
    """Distinct ids of each row, of a column of ids or of lists of ids: [rows] how many, and those of all rows."""
    cells = to_working(column.combine_chunks())
    if is_list(cells.type):
        lengths = pc.fill_null(pc.list_value_length(cells), 0).to_numpy().astype(np.int64)
        values = pc.list_flatten(cells)
    else:
        lengths, values = np.ones(len(cells), np.int64), cells
    lengths, values = distinct_in_lists(lengths, as_ids(values))
    return lengths, as_ids(pa.array([], item_type)) if pa.types.is_null(values.type) else values


def find_ids(wanted: pa.Array, among: pa.Array) -> Ints:
    """[wanted] where each id stands among others, which are distinct; -1 for nowhere and for null. Both as as_ids gives."""
    table = pl.DataFrame({"id": pl.from_arrow(among), "row": np.arange(len(among))})
    asked = pl.DataFrame({"id": pl.from_arrow(wanted)})
    if table["id"].dtype != asked["id"].dtype:
        return np.full(len(wanted), -1)
    return asked.join(table, "id", "left", maintain_order="left")["row"].fill_null(-1).to_numpy()


def repeated(ids: pa.Array) -> list[object]:
    """Up to five ids that occur more than once."""
    column = pl.Series("id", ids)
    if column.n_unique() == len(column):
        return []
    counts = pl.DataFrame({"id": column}).group_by("id").len().filter((pl.col("len") > 1) & pl.col("id").is_not_null())
    return counts["id"].sort().head(5).to_list()
