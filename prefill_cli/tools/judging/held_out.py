"""Held-out items and segments, and which of a result's lists belongs to whom.

They are columns of the result itself, of --truth-file, or of the run's own input, looked for in this order (a file that is
named comes first). The result's own rows are known by their place, and so are the input's: the lists are the rows of the
input, in order, less the rejected ones. A file is joined by the ids, which must be distinct.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from prefill_cli.arrow import to_working
from prefill_cli.data.inputs import find_files, read_footer
from prefill_cli.data.results import REJECTS_FOLDER
from prefill_cli.errors import InputError, OutputError, UsageError, nearest
from prefill_cli.parquet import open_parquet
from prefill_cli.tools.judging.ids import (
    Codes,
    Ints,
    as_ids,
    find_ids,
    item_lists,
    kind_of_ids,
    offsets_of,
    places_of,
    repeated,
)
from prefill_cli.tools.judging.result_lists import Result, ids_of, read_columns
from prefill_cli.tools.judging.run_inputs import RunInputs, check_items, open_inputs
from prefill_cli.tools.tables import reading

MAX_SEGMENTS = 256


@dataclass(frozen=True)
class Truths:
    """Items of each of n users: those of user i are items[codes[offsets[i] : offsets[i + 1]]], distinct."""

    offsets: Ints  # [n + 1]
    codes: Codes
    items: pa.Array

    def codes_of(self, rows: Ints) -> tuple[Ints, Codes]:
        """[rows + 1] offsets and codes of some users' items."""
        places, offsets = places_of(self.offsets, rows)
        return offsets, self.codes[places]

    def take(self, rows: Ints) -> tuple[Ints, pa.Array]:
        """[rows + 1] offsets and ids of some users' items."""
        offsets, codes = self.codes_of(rows)
        return offsets, self.items.take(pa.array(codes))


@dataclass(frozen=True)
class Users:
    """n rows of whom something is known, and the lists that are theirs."""

    source: str  # where the columns are, as a user would name it
    truths: Truths | None
    segments: npt.NDArray[np.int64]  # [n] which value
    values: list[Any]  # of the segment column; [None] without one
    of_list: Ints  # [lists] the row of each list's user, -1: none
    in_run: npt.NDArray[np.bool_]  # [n] whether the run was given this user
    of_inputs: bool = False  # whether the n rows are those of the run's input
    ids: pa.Array | None = None  # [n] of a file's rows, as as_ids gives them

    @property
    def rows(self) -> int:
        return len(self.segments)


@dataclass(frozen=True)
class Sought:
    """Which columns, and where a person says that they are."""

    truth: str | None
    by: str | None
    file: str | None

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.truth, self.by) if name))


def find_users(result: Result, sought: Sought) -> Users:
    """Read the columns from where they are.

    Raises:
        InputError: no such column, a type that does not fit, ids that occur more than once. UsageError: too many segments.
    """
    if sought.file is None and all(name in result.columns for name in sought.columns):
        return _of_result(result, sought)
    return _of_inputs(result, sought) if sought.file is None else _of_file(result, sought, sought.file)


def _of_result(result: Result, sought: Sought) -> Users:
    for name in filter(None, [sought.truth]):
        check_items(result.folder, name, result.schema.field(name).type, result.item_type, lists_only=False)
    truths, segments, values = _columns(result, sought, read_columns(result, sought.columns), result.folder)
    every = np.arange(len(segments))
    return Users(str(result.folder), truths, segments, values, every, np.ones(len(every), bool))


def _of_inputs(result: Result, sought: Sought) -> Users:
    missing = [name for name in sought.columns if name not in result.columns]
    what = f"column {missing[0]!r} is not in {result.folder}{nearest(missing[0], result.columns)}"
    try:
        inputs = open_inputs(result)
    except InputError as error:
        raise InputError(f"{what}, and cannot be looked up in the run's input: {error}; name a --truth-file") from None
    for name in sought.columns:
        if not inputs.has(name):
            names = inputs.files[0].schema.names if inputs.files else []
            raise InputError(f"{what}, and column {name!r} not in its input{nearest(name, names)}; name a --truth-file")
        inputs.check(name, of_items=name == sought.truth)
    place = inputs.files[0].path if len(inputs.files) == 1 else "the run's input"
    truths, segments, values = _columns(result, sought, inputs.batches(sought.columns), place)
    return Users(place, truths, segments, values, rows_of_lists(result, inputs), np.ones(len(segments), bool), True)


def _of_file(result: Result, sought: Sought, file: str) -> Users:
    table = RunInputs(tuple(map(read_footer, find_files([file]))), result.item_type)
    table.check(result.id_column)
    for name in sought.columns:
        table.check(name, of_items=name == sought.truth)
    truths, segments, values = _columns(result, sought, table.batches(sought.columns), file)
    ids, listed = read_ids(table, result.id_column), ids_of(result)
    _check_kinds(file, table, result)
    for where, known, remedy in (
        (file, ids, "a user's held-out items belong into one row, as a list"),
        (result.folder, listed, "keep the column in the output instead (run --keep-columns)"),
    ):
        if twice := repeated(known):
            some = ", ".join(map(str, twice))
            raise InputError(f"{where}: user ids that occur more than once ({some}) cannot be joined; {remedy}")
    of_list = find_ids(listed, ids)
    in_run = np.zeros(len(ids), bool)
    in_run[of_list[of_list >= 0]] = True
    rejected = find_ids(_rejects(result, [result.id_column], lambda part: as_ids(part[0])), ids)
    in_run[rejected[rejected >= 0]] = True
    if result.is_long and result.manifest["totals"]["empty_lists"] and not in_run.all():
        try:
            inputs = open_inputs(result)
        except InputError as error:
            raise InputError(
                f"{file}: {np.count_nonzero(~in_run):,} of its users have no list in {result.folder}, whose layout leaves "
                f"empty lists out, and whether the run was given them cannot be looked up: {error}"
            ) from None
        given = find_ids(read_ids(inputs, result.id_column), ids)
        in_run[given[given >= 0]] = True
    return Users(file, truths, segments, values, of_list, in_run, ids=ids)


def _check_kinds(file: str, table: RunInputs, result: Result) -> None:
    wanted = kind_of_ids(result.schema.field(result.id_column).type)
    for part in table.files:
        if (found := kind_of_ids(part.schema.field(result.id_column).type)) != wanted:
            raise InputError(f"{part.path}: its ids ({result.id_column!r}) are {found}, those of {result.folder} {wanted}")


def _columns(
    result: Result, sought: Sought, tables: Iterable[pa.Table], where: object
) -> tuple[Truths | None, npt.NDArray[np.int64], list[Any]]:
    """Truths, segments and the segments' values of all rows."""
    lengths, coded, segments = [np.empty(0, np.int64)], [], [np.empty(0, np.int64)]
    known: dict[Any, int] = {}
    for table in tables:
        if sought.truth:
            with reading(f"{where}: column {sought.truth!r}", InputError):
                many, items = item_lists(table[sought.truth], result.item_type)
            lengths.append(many)
            coded.append(items.dictionary_encode())
        if sought.by:
            segments.append(_segments(table[sought.by], known, f"{where}: column {sought.by!r}"))
        else:
            segments.append(np.zeros(table.num_rows, np.int64))
    truths = None
    if sought.truth:
        empty = as_ids(pa.array([], result.item_type)).dictionary_encode()
        every = pa.concat_arrays([part for part in coded if len(part)] or [empty])
        truths = Truths(offsets_of(np.concatenate(lengths)), every.indices.to_numpy(), every.dictionary)
    return truths, np.concatenate(segments), list(known) if sought.by else [None]


def _segments(column: pa.ChunkedArray, known: dict[Any, int], what: str) -> npt.NDArray[np.int64]:
    """Each value's number in `known`, to which new values are added; null is a value."""
    with reading(what, InputError):
        array = to_working(column.combine_chunks())
        array.validate(full=True)
        if pa.types.is_nested(array.type):
            raise InputError(f"{what} is {array.type}; segments are text, numbers, dates or booleans")
        coded = array.dictionary_encode(null_encoding="encode")
    numbers = np.array([known.setdefault(value, len(known)) for value in coded.dictionary.to_pylist()], np.int64)
    if len(known) > MAX_SEGMENTS:
        raise UsageError(f"{what} has more than {MAX_SEGMENTS} values; --by takes a column of few, like a country")
    return numbers[coded.indices.to_numpy()] if len(coded) else np.empty(0, np.int64)


def read_ids(table: RunInputs, column: str) -> pa.Array:
    """[rows] the ids of all rows."""
    parts = [as_ids(batch[0]) for batch in table.batches([column])]
    return pa.concat_arrays(parts) if parts else as_ids(pa.array([], table.files[0].schema.field(column).type))


def _rejects(result: Result, columns: Sequence[str], take: Callable[[pa.Table], pa.Array]) -> pa.Array:
    found = []
    for path in sorted((result.folder / REJECTS_FOLDER).glob("*.parquet")):
        with reading(path, OutputError):
            found.append(take(_table(open_parquet(path), columns)))
    return pa.concat_arrays(found) if found else pa.array([], pa.int64())


def _table(file: pq.ParquetFile, columns: Sequence[str]) -> pa.Table:
    return file.read(columns=list(columns)).select(list(columns))


def rows_of_lists(result: Result, inputs: RunInputs) -> Ints:
    """[lists] the number of the input row that each list was made from.

    Raises:
        InputError: the ids are not those of the input; in the long layout also where ids that repeat leave it open which
        of their rows has an empty list, and so none.
    """
    begins = offsets_of([file.rows for file in inputs.files])[:-1]
    starts = dict(zip((file.path for file in inputs.files), begins, strict=True))
    kept = np.ones(inputs.rows, bool)

    def numbers(part: pa.Table) -> pa.Array:
        files, rows = part["source_file"].to_pylist(), part["source_row"].to_pylist()
        return pa.array([starts[file] + row for file, row in zip(files, rows, strict=True)], pa.int64())

    kept[_rejects(result, ["source_file", "source_row"], numbers).to_numpy()] = False
    rows = np.flatnonzero(kept)
    given, listed = read_ids(inputs, result.id_column).take(pa.array(rows)), ids_of(result)
    if given.equals(listed):
        return rows
    if result.is_long and len(listed) < len(given):
        if twice := repeated(given):
            raise InputError(
                f"{result.folder}: user ids that occur more than once ({', '.join(map(str, twice))}) leave open which of "
                "their rows has an empty list; use --layout nested"
            )
        found = find_ids(listed, given)
        if (found >= 0).all():
            return rows[found]
    raise InputError(f"{result.folder}: its users are not those of the input that its manifest names")
