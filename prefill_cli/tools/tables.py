"""Parquet files as one Polars table, for the commands that look at tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from prefill_cli.errors import InputError, PrefillScoreError, first_line


def scan(files: Sequence[str | Path], *columns: pl.Expr | str) -> pl.LazyFrame:
    """The columns of all files, in order; types may differ from file to file in width, and other columns at will."""
    if not files:
        raise FileNotFoundError("there is no Parquet file")
    tables = [pl.scan_parquet(file, glob=False).select(*(columns or (pl.all(),))) for file in files]
    return pl.concat(tables, how="vertical_relaxed")


@contextmanager
def reading(path: Path | str, kind: type[PrefillScoreError]) -> Iterator[None]:
    """Turn what Polars says of damaged or strange files into one sentence of the kind of error that fits."""
    try:
        yield
    except InputError as error:
        raise kind(str(error)) from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:  # a panic is no Exception
        raise kind(f"{path}: cannot be read: {first_line(error)}") from None
