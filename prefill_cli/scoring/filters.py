"""Which items a user may get: external ids → item rows, exactly typed, unknown ids counted.

An id type that could never match the catalogue's is an error: a filter that silently hits nothing is the worst kind.
"""

from dataclasses import dataclass, field
from pathlib import Path

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
    """(user, item) pairs: position of the user among the queries, row of the item; sorted by user."""

    users: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    items: Rows = field(default_factory=lambda: np.empty(0, np.int64))

    def of_users(self, start: int, stop: int) -> "Pairs":
        """The pairs of users start … stop - 1, counted from `start`."""
        a, b = np.searchsorted(self.users, (start, stop))
        return Pairs(self.users[a:b] - start, self.items[a:b])


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


class ItemIndex:
    """External id → item row, by Arrow's vectorised hash join. N ids, unique."""

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
        return Pairs(users[known], rows[known]), int((~known).sum()) - values.null_count

    def rows_of(self, values: pa.Array | pa.ChunkedArray, error: type[PrefillScoreError], where: str) -> Rows:
        """[m] item rows of m ids, -1 for null ids and for those that are not in the catalogue."""
        kind, own = values.type, self._ids.type
        if pa.types.is_null(kind):
            return np.full(len(values), -1)
        if pa.types.is_integer(kind) and pa.types.is_integer(own):
            # One type in which equal numbers are equal; beside uint64 only a decimal holds both signs.
            wide = pa.decimal128(20) if pa.uint64() in (kind, own) else pa.int64()
            values, ids = values.cast(wide), self._ids.cast(wide)
        elif is_text(kind) and is_text(own):
            values, ids = values.cast(pa.large_string()), self._ids.cast(pa.large_string())
        elif is_binary(kind) and is_binary(own):
            values, ids = values.cast(pa.large_binary()), self._ids.cast(pa.large_binary())
        else:
            raise error(f"{where} has ids of type {kind}, but item ids are {own}: none could ever match")
        found = pc.index_in(values, value_set=ids, skip_nulls=True)
        rows: Rows = pc.fill_null(found, -1).to_numpy().astype(np.int64)
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


def _is_parquet(path: Path) -> bool:
    if path.suffix == ".parquet" or not path.exists():
        return path.suffix == ".parquet"
    with path.open("rb") as file:
        return file.read(4) == PARQUET_MAGIC
