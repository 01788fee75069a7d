"""Parquet files opened in one way: page checksums are verified, and what is damaged is told and never ends the process.

pyarrow aborts in RowGroupMetaData.column where a footer's size statistics do not fit the type of their column, since a C++
exception leaves a function that is declared to throw none. Reading goes another way and raises. So footers are asked for
row groups as wholes and never for a column of one.
"""

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FAULTS = (OSError, pa.ArrowException, UnicodeDecodeError)  # what opening and reading raise for a damaged file


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """A file with a schema that can be decoded and a footer whose counts of rows agree.

    Raises:
        One of FAULTS.
    """
    if isinstance(source, str | Path) and re.search("[\udc80-\udcff]", str(source)):
        source = pa.OSFile(os.fsencode(source))  # a name that is no text, which pyarrow takes for one
    file = pq.ParquetFile(source, page_checksum_verification=True, **options)
    _ = file.schema_arrow.names  # decoded here for the first time
    rows = group_rows(file.metadata)
    if min(rows, default=0) < 0 or sum(rows) != file.metadata.num_rows:
        raise pa.ArrowInvalid("the footer is damaged: its row groups do not hold the rows that it counts in all")
    return file


def group_rows(metadata: pq.FileMetaData) -> tuple[int, ...]:
    """Rows of each row group."""
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
