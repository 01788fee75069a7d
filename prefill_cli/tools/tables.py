"""Parquet files as one Polars table, for the commands that look at tables.

pyarrow reads them: Polars' own reader does not verify page checksums.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars.io.plugins import register_io_source

from prefill_cli.errors import InputError, PrefillScoreError, first_line
from prefill_cli.parquet import FAULTS, open_parquet

BATCH_ROWS = 16_384


def scan(files: Sequence[str | Path], *columns: pl.Expr | str) -> pl.LazyFrame:
    """The columns of all files, in order; types may differ from file to file in width, and other columns at will."""
    if not files:
        raise FileNotFoundError("there is no Parquet file")
    tables = [_scan_file(file).select(*(columns or (pl.all(),))) for file in files]
    return pl.concat(tables, how="vertical_relaxed")


def schema_of(file: str | Path) -> pl.Schema:
    """Names and Polars types of a file's columns."""
    return _frame(open_parquet(file).schema_arrow.empty_table()).schema


def _scan_file(file: str | Path) -> pl.LazyFrame:
    def batches(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        parquet = open_parquet(file)
        groups = [i for i in range(parquet.num_row_groups) if predicate is None or _any_match(parquet, i, predicate)]
        for batch in parquet.iter_batches(BATCH_ROWS, groups, columns) if groups else ():
            frame = _frame(pa.Table.from_batches([batch]))
            frame = frame if predicate is None else frame.filter(predicate)
            if rows is not None:
                frame = frame.head(rows)
                rows -= len(frame)
            yield frame
            if rows == 0:
                return

    return register_io_source(batches, schema=schema_of(file))


def _any_match(parquet: pq.ParquetFile, group: int, predicate: pl.Expr) -> bool:
    """Whether a row group has rows that a filter keeps, so that the wide columns of the others are never read."""
    return _frame(parquet.read_row_group(group, columns=predicate.meta.root_names())).select(predicate.any()).item() is True


def _frame(table: pa.Table) -> pl.DataFrame:
    table.validate(full=True)  # Polars trusts text to be UTF-8 and panics later
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


@contextmanager
def reading(path: Path | str, kind: type[PrefillScoreError]) -> Iterator[None]:
    """Turn what damaged or strange files raise into one sentence of the kind of error that fits."""
    try:
        yield
    except InputError as error:
        raise kind(str(error)) from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, *FAULTS) as error:  # a panic is no Exception
        raise kind(f"{path}: cannot be read: {first_line(error)}") from None
