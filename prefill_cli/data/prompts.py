"""Parquet → shards, in bounded memory: one file open at a time, one record batch at a time, nothing concatenated.

Rows that cannot be scored whatever the model says (null id, bytes that are not text) are told apart here; what is
wrong with a prompt is judged where it is tokenised.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefill_cli import storage
from prefill_cli.arrow import invalid_text, is_text, to_working, working_type
from prefill_cli.config import RunConfig
from prefill_cli.data import inputs
from prefill_cli.data.inputs import InputFile, InputPlan, Shard, check_unchanged, hive_columns
from prefill_cli.data.rejects import Reject
from prefill_cli.errors import InputError, first_line
from prefill_cli.matrices import TENSOR, open_matrix, to_float32
from prefill_cli.parquet import FAULTS, open_parquet
from prefill_cli.places import is_uri

BATCH_ROWS = 2_048
# Of a record batch with all columns of its file as the file encodes them (repeated values count once); reading stays below.
BATCH_BYTES = 64 << 20
READ_BUFFER_BYTES = 1 << 20
FAR_BUFFER_BYTES = 8 << 20  # a request to an object store takes as long as several megabytes


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one file, columns in the working types of the plan, which are the same for all files.

    `rejects` maps a position in the piece to the reason why that row cannot be scored.
    """

    path: str
    first_row: int  # of `ids[0]` in the file
    ids: pa.Array
    prompts: pa.Array
    kept: pa.RecordBatch
    exclude: pa.Array | None
    candidates: pa.Array | None
    rejects: dict[int, Reject]


class ShardReader:
    """Reads shards in any order; reading them in file order costs one pass over the files.

    A file that is no longer what its footer said when the run was planned ends the run.
    """

    def __init__(self, plan: InputPlan, config: RunConfig) -> None:
        self._plan = plan
        self._config = config
        self._starts = list(itertools.accumulate((f.rows for f in plan.files), initial=0))[:-1]
        self._cursor: _Cursor | None = None

    def read(self, shard: Shard) -> Iterator[Piece]:
        """The rows of a shard in order.

        Raises:
            InputError: a file changed, vanished or cannot be decoded.
        """
        done, read = 0, {}
        while done < shard.rows:
            file, offset = self._locate(shard.start + done)
            if self._cursor is None or not self._cursor.stands_at(file, offset):
                columns = [c for c in self._plan.columns.names if c in file.schema.names]
                self._cursor = _Cursor(file, offset, columns, self._config.user_ids)
            batch = self._cursor.next_batch(shard.rows - done)
            done += batch.num_rows
            read[file.path] = file
            yield self._piece(batch, file, offset)
        for file in read.values():  # one that was written over in place may have given rows of two versions
            check_unchanged(file)

    def _locate(self, row: int) -> tuple[InputFile, int]:
        number = bisect.bisect_right(self._starts, row) - 1  # of the files that start there the last, which has rows
        return self._plan.files[number], row - self._starts[number]

    def _piece(self, batch: pa.RecordBatch, file: InputFile, first_row: int) -> Piece:
        config, plan = self._config, self._plan
        columns = {}
        for name, kind in zip(plan.columns.names, plan.columns.types, strict=True):
            if name in batch.schema.names:
                column = to_working(batch.column(name))
            else:
                column = pa.array([hive_columns(file.path)[name]] * batch.num_rows, pa.string())
            wanted = working_type(kind)
            columns[name] = column if column.type == wanted else column.cast(wanted)
        ids = columns[config.id_column]
        rejects: dict[int, Reject] = {}
        for name in reversed((config.id_column, *config.keep_columns)):  # the id's own fault is the one told
            if is_text(columns[name].type) or pa.types.is_nested(columns[name].type):
                rejects |= {i: Reject("bad_text", f"column {name} is not UTF-8") for i in invalid_text(columns[name])}
        rejects |= {i: Reject("null_id", "") for i, null in enumerate(ids.is_null().to_pylist()) if null}
        return Piece(
            file.path,
            first_row,
            ids,
            columns[config.text_column],
            pa.RecordBatch.from_arrays([columns[f.name] for f in plan.kept], names=[f.name for f in plan.kept]),
            columns[config.exclude_column] if config.exclude_column else None,
            columns[config.candidates_column] if config.candidates_column else None,
            rejects,
        )


class _Cursor:
    """An open file that stands at a row and moves forward."""

    def __init__(self, file: InputFile, offset: int, columns: list[str], user_ids: Path | None) -> None:
        self._file = file
        self._next_row = offset
        self._rest: pa.RecordBatch | None = None
        if inputs.is_matrix(file.path):
            check_unchanged(file)
            self._batches = _matrix_batches(file, offset, columns, user_ids)
            return
        try:
            check_unchanged(file)
            # No pre-buffering: a column chunk is read through a small buffer, however large its row group is.
            source: Any = file.path
            buffer = READ_BUFFER_BYTES
            if is_uri(file.path):
                source, buffer = storage.open_input(file.path), FAR_BUFFER_BYTES
            parquet = open_parquet(source, buffer_size=buffer, pre_buffer=False)
        except FAULTS as error:
            raise InputError(f"{file.path}: the file was there when the run began: {first_line(error)}") from None
        group, skip = 0, offset
        while skip and skip >= file.group_rows[group]:
            skip -= file.group_rows[group]
            group += 1
        self._batches = _batches(parquet, group, columns)
        while skip:
            batch = self._read()
            self._rest = batch.slice(skip) if skip < batch.num_rows else None
            skip -= min(skip, batch.num_rows)

    def stands_at(self, file: InputFile, offset: int) -> bool:
        return file is self._file and offset == self._next_row

    def next_batch(self, limit: int) -> pa.RecordBatch:
        """Between 1 and `limit` rows from where the cursor stands."""
        batch = self._rest if self._rest is not None else self._read()
        self._rest = batch.slice(limit) if batch.num_rows > limit else None
        self._next_row += min(limit, batch.num_rows)
        return batch.slice(0, limit)

    def _read(self) -> pa.RecordBatch:
        try:
            for batch in self._batches:
                if batch.num_rows:
                    return batch
        except FAULTS as error:
            raise InputError(f"{self._file.path}: damaged near row {self._next_row}: {first_line(error)}") from None
        raise InputError(f"{self._file.path}: holds fewer rows than its footer says ({self._file.rows})")


def _matrix_batches(file: InputFile, start: int, columns: list[str], user_ids: Path | None) -> Iterator[pa.RecordBatch]:
    """Ids and vectors of a .npy or .safetensors file from a row on."""
    rows, _ = open_matrix(Path(file.path), TENSOR, InputError)
    ids = None if user_ids is None else inputs.user_ids(user_ids, columns[0], len(rows))
    for first in range(start, len(rows), BATCH_ROWS):
        vectors = to_float32(rows[first : first + BATCH_ROWS])
        numbers = pa.array(np.arange(first, first + len(vectors))) if ids is None else ids.slice(first, len(vectors))
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        yield pa.RecordBatch.from_arrays([numbers, lists], names=columns)


def _batches(parquet: pq.ParquetFile, first_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Record batches from a row group on; those of row groups with cells of like size run on across their borders."""
    metadata = parquet.metadata
    groups = range(first_group, metadata.num_row_groups)
    for rows, run in itertools.groupby(groups, lambda group: _batch_rows(metadata.row_group(group))):
        yield from parquet.iter_batches(batch_size=rows, row_groups=list(run), columns=columns, use_threads=False)


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    """Rows of a record batch that stays near BATCH_BYTES: a power of two, so that like row groups agree."""
    rows = max(1, min(BATCH_ROWS, BATCH_BYTES * int(group.num_rows) // max(int(group.total_byte_size), 1)))
    return 1 << (rows.bit_length() - 1)
