"""Which items a user may get: external ids → item rows, exactly typed, unknown ids counted.

An id type that could never match the catalogue's is an error: a filter that silently hits nothing is the worst kind.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.arrow import is_binary, is_text
from prefill_cli.errors import InputError, ItemsError, PrefillScoreError
from prefill_cli.scoring.item_files import id_column

Rows = npt.NDArray[np.int64]
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Pairs:
    """(user, item) pairs: position of the user among the queries, row of the item; each once, by user, then item.

    Only `by_item` gives another order.
    """

    users: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    items: Rows = field(default_factory=lambda: np.empty(0, np.int64))

    def of_users(self, start: int, stop: int) -> "Pairs":
        """The pairs of users start … stop - 1, counted from `start`."""
        a, b = np.searchsorted(self.users, (start, stop))
        return Pairs(self.users[a:b] - start, self.items[a:b])

    def lists(self, users: int) -> tuple[Rows, Rows]:
        """Offsets [users + 1] and items: those of user i, ascending, are [offsets[i] : offsets[i + 1]]."""
        return np.searchsorted(self.users, np.arange(users + 1)), self.items

    def by_item(self) -> "Pairs":
        """The same, sorted by item."""
        order = np.argsort(self.items, kind="stable")
        return Pairs(self.users[order], self.items[order])


@dataclass(frozen=True)
class Filters:
    """What is not allowed to whom, for n users.

    `limited` [n] marks users who may get the items of `candidates` only; None: nobody is limited.
    """

    exclude: Pairs = field(default_factory=Pairs)
    candidates: Pairs = field(default_factory=Pairs)
    limited: npt.NDArray[np.bool_] | None = None
    unknown_ids: int = 0

    def of_users(self, start: int, stop: int) -> "Filters":
        """The filters of users start … stop - 1, counted from `start`."""
        limited = None if self.limited is None else self.limited[start:stop]
        return Filters(self.exclude.of_users(start, stop), self.candidates.of_users(start, stop), limited)

    def take(self, users: Rows) -> "Filters":
        """The filters of some users (positions, ascending), counted from 0 in their order."""
        limited = None if self.limited is None else self.limited[users]
        return Filters(_of_some(self.exclude, users), _of_some(self.candidates, users), limited)


def _of_some(pairs: Pairs, users: Rows) -> Pairs:
    number = np.minimum(np.searchsorted(users, pairs.users), max(0, len(users) - 1))
    found = users[number] == pairs.users if len(users) else np.zeros(len(pairs.users), bool)
    return Pairs(number[found], pairs.items[found])


class ItemIndex:
    """External id → item row. N ids, unique."""

    def __init__(self, ids: pa.Array) -> None:
        self._ids = ids

    def filters(self, exclude: pa.ChunkedArray | None, candidates: pa.ChunkedArray | None) -> Filters:
        """Filters from two columns of id lists, one list a user; a null list means no filter.

        Raises:
            InputError: the ids' type cannot match the catalogue's.
        """
        excluded, unknown = self._pairs(exclude, "exclude")
        allowed, unknown_too = self._pairs(candidates, "candidates")
        limited = None if candidates is None else candidates.is_valid().to_numpy()
        return Filters(excluded, allowed, limited, unknown + unknown_too)

    def _pairs(self, column: pa.ChunkedArray | None, what: str) -> tuple[Pairs, int]:
        if column is None or pa.types.is_null(column.type):
            return Pairs(), 0
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        values = pc.list_flatten(column)
        rows = self.rows_of(values, InputError, f"the {what} column")
        users = np.repeat(np.arange(len(lengths)), lengths)
        known = rows >= 0
        # As one number a pair, they are sorted at once; np.unique would hash them, at eighty times the cost.
        keys = np.sort(users[known] * len(self._ids) + rows[known])
        users, rows = np.divmod(keys[np.diff(keys, prepend=-1) > 0], max(1, len(self._ids)))
        return Pairs(users, rows), int((~known).sum()) - values.null_count

    def rows_of(self, values: pa.Array | pa.ChunkedArray, error: type[PrefillScoreError], where: str) -> Rows:
        """[m] item rows of m ids, -1 for null ids and for those that are not in the catalogue."""
        kind, own = values.type, self._ids.type
        if pa.types.is_null(kind):
            return np.full(len(values), -1)
        if pa.types.is_integer(kind) and pa.types.is_integer(own):
            return self._rows_of_numbers(values)
        for fits, wide in ((is_text, pa.large_string()), (is_binary, pa.large_binary())):
            if fits(kind) and fits(own):
                found = pc.index_in(values.cast(wide), value_set=self._wide_ids, skip_nulls=True)
                rows: Rows = pc.fill_null(found, -1).to_numpy().astype(np.int64)
                return rows
        raise error(f"{where} has ids of type {kind}, but item ids are {own}: none could ever match")

    @cached_property
    def _wide_ids(self) -> pa.Array:
        return self._ids.cast(pa.large_string() if is_text(self._ids.type) else pa.large_binary())

    @cached_property
    def _sorted_ids(self) -> tuple[npt.NDArray[Any], Rows | None]:
        """The catalogue's numbers ascending, in its widest type, and the rows that they are in (None: in this order)."""
        numbers = _numbers(self._ids, pa.types.is_unsigned_integer(self._ids.type))
        if (numbers[:-1] < numbers[1:]).all():
            return numbers, None
        order = np.argsort(numbers)
        return numbers[order], order

    def _rows_of_numbers(self, values: pa.Array | pa.ChunkedArray) -> Rows:
        """A look-up in ids that are sorted once, so that a few ids cost little in a large catalogue."""
        unsigned = pa.types.is_unsigned_integer(self._ids.type)
        low, high = (0, 2**64 - 1) if unsigned else (-(2**63), 2**63 - 1)
        # What the catalogue's type cannot hold is not in it; beyond that, equal numbers are equal.
        own_kind = pa.types.is_unsigned_integer(values.type) == unsigned
        inside = values.is_valid()
        if not own_kind and unsigned:
            inside = pc.and_(inside, pc.fill_null(pc.greater_equal(values, pa.scalar(low, values.type)), False))
        elif not own_kind and pa.types.is_uint64(values.type):
            inside = pc.and_(inside, pc.fill_null(pc.less_equal(values, pa.scalar(high, values.type)), False))
        rows = np.full(len(values), -1)
        places = np.flatnonzero(inside.to_numpy(zero_copy_only=False) if isinstance(inside, pa.Array) else inside.to_numpy())
        numbers = _numbers(values.take(pa.array(places)), unsigned)
        ids, order = self._sorted_ids
        if not len(ids) or not len(numbers):
            return rows
        if len(ids) - 1 == int(ids[-1]) - int(ids[0]):  # without a gap
            near = (numbers >= ids[0]) & (numbers <= ids[-1])
            found = np.where(near, numbers - ids[0], 0).astype(np.int64)
        elif 4 * len(numbers) > len(ids):  # enough of them to pay for a table of the catalogue
            joined = pc.index_in(pa.array(numbers), value_set=pa.array(ids))
            near = joined.is_valid().to_numpy(zero_copy_only=False)
            found = pc.fill_null(joined, 0).to_numpy().astype(np.int64)
        else:
            ascending = np.argsort(numbers)  # neighbours in the cache: with this sort, a third of the time at random
            found = np.empty(len(numbers), np.int64)
            found[ascending] = np.minimum(np.searchsorted(ids, numbers[ascending]), len(ids) - 1)
            near = ids[found] == numbers
        rows[places[near]] = found[near] if order is None else order[found[near]]
        return rows

    def rows_in_file(self, path: Path, id_name: str) -> tuple[Rows, int]:
        """Item rows that an --allow or --deny file names, and how many of its ids are unknown.

        The file is Parquet (the item id column, or the only one), which its first bytes tell, or text with one id a line.

        Raises:
            ItemsError: unreadable, or ids of a type that cannot be the catalogue's.
        """
        if path.exists() and not path.is_file():  # a pipe would make us wait for a writer
            raise ItemsError(f"{path}: not a regular file")
        ids = id_column(path, id_name) if _is_parquet(path) else self._text_ids(path)
        rows = self.rows_of(ids, ItemsError, str(path))
        return np.unique(rows[rows >= 0]), int((rows < 0).sum()) - ids.null_count

    def _text_ids(self, path: Path) -> pa.Array:
        try:
            lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ItemsError(f"{path}: not readable as text: {error}") from None
        try:
            return pa.array(lines, pa.large_string()).cast(self._ids.type)
        except pa.ArrowInvalid:
            raise ItemsError(f"{path}: holds ids that are not {self._ids.type}, which item ids are") from None


def _numbers(ids: pa.Array | pa.ChunkedArray, unsigned: bool) -> npt.NDArray[Any]:
    """Integers without nulls as int64 or uint64."""
    wide = ids.cast(pa.uint64() if unsigned else pa.int64())
    numbers: npt.NDArray[Any] = wide.to_numpy(zero_copy_only=False) if isinstance(wide, pa.Array) else wide.to_numpy()
    return numbers


def _is_parquet(path: Path) -> bool:
    if path.suffix == ".parquet" or not path.exists():
        return path.suffix == ".parquet"
    with path.open("rb") as file:
        return file.read(4) == PARQUET_MAGIC
