"""The rows that a run was given, read again: histories, held-out items, ids. Refused where they are not the same files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from prefill_cli.arrow import is_list, plain_type
from prefill_cli.data.inputs import InputFile, read_footer
from prefill_cli.errors import InputError, nearest
from prefill_cli.parquet import open_parquet
from prefill_cli.tools.judging.ids import Ints, element_type, item_lists, kind_of_ids
from prefill_cli.tools.judging.result_lists import Result
from prefill_cli.tools.tables import BATCH_ROWS, reading


@dataclass(frozen=True)
class RunInputs:
    """Parquet files with rows in a fixed order. `item_type` is that of the result's items."""

    files: tuple[InputFile, ...]
    item_type: pa.DataType

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def has(self, column: str) -> bool:
        return bool(self.files) and all(column in file.schema.names for file in self.files)

    def check(self, column: str, *, of_items: bool = False, lists_only: bool = False) -> None:
        """That every file has a column, and where it is to hold item ids, that it does.

        Raises:
            InputError: it does not.
        """
        for file in self.files:
            if column not in file.schema.names:
                raise InputError(f"{file.path}: no column {column!r}{nearest(column, file.schema.names)}")
            kind = plain_type(file.schema.field(column).type)
            if of_items:
                check_items(file.path, column, kind, self.item_type, lists_only=lists_only)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of all rows, in order."""
        for file in self.files:
            with reading(file.path, InputError):
                for batch in open_parquet(file.path).iter_batches(BATCH_ROWS, columns=list(columns)):
                    yield pa.Table.from_batches([batch])

    def lists(self, batch: pa.Table, column: str) -> tuple[Ints, pa.Array]:
        """A column's distinct ids of each row: [rows] how many, and those of all rows after one another."""
        with reading(f"column {column!r}", InputError):
            return item_lists(batch[column], self.item_type)


def open_inputs(result: Result) -> RunInputs:
    """The input files that the manifest names.

    Raises:
        InputError: they are gone, elsewhere, no Parquet, or changed since the run read them.
    """
    files = []
    for known in result.manifest["inputs"]["files"]:
        path = str(known["path"])
        if not Path(path).exists():
            raise InputError(f"{path}: the run's input is not there any more, or its path is not relative to here")
        found = read_footer(path)
        if (found.size_bytes, found.footer_sha256) != (known["size_bytes"], known["footer_sha256"]):
            raise InputError(f"{path}: the input was changed after {result.folder} was made from it")
        files.append(found)
    return RunInputs(tuple(files), result.item_type)


def check_items(path: str | Path, column: str, kind: pa.DataType, item_type: pa.DataType, *, lists_only: bool) -> None:
    """That a column holds ids of the kind that the result's items have.

    Raises:
        InputError: it does not.
    """
    found, wanted = kind_of_ids(element_type(kind)), kind_of_ids(item_type)
    if lists_only and not is_list(kind) and not pa.types.is_null(kind):
        raise InputError(f"{path}: column {column!r} is {kind}, which is not a list of item ids")
    if found not in (wanted, "null"):
        raise InputError(f"{path}: column {column!r} holds {found} values, but the result's item ids are {wanted}")
