"""Requests that a run sends to an object store which holds its input and its output.

Counted from data/inputs.py (footers), data/prompts.py (cursors), data/remote_staging.py and storage.py, for S3 as pyarrow
speaks it: every write is a multipart upload and a look at its size. tests/test_scale.py holds the counts to a server's
log. Models and items are not counted, nor what a store asks to be sent twice.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefill_cli.data.prompts import BATCH_ROWS, FAR_BUFFER_BYTES

UPLOAD_BYTES = 10 << 20  # of one request of an upload
PAGE_KEYS = 1_000  # of an answer to a listing, and of one request that deletes
SMALL_WRITES = 5  # _run.json, manifest, _SUCCESS twice, pointer
MARKS = 2  # folders whose last file was deleted
FOOTER_GETS, FOOTER_HEADS = 3, 3  # planning, of a file
OPEN_GETS, OPEN_HEADS = 1, 3  # a reader that begins in a file
CHECK_HEADS = 2  # that a file is what it was, after a shard
PLAN_HEADS, BEGIN_HEADS, PUBLISH_HEADS = 3, 3, 3
PLAN_LISTS = 2  # before the listing itself

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Of the input's files, all alike, and of the output's parts. columns: that the run reads."""

    file_rows: int
    group_rows: int
    row_bytes: float  # in the file, of the columns that are read
    columns: int
    part_row_bytes: float


@dataclass(frozen=True)
class Requests:
    """By kind. puts: PUT and POST, deletes aside."""

    puts: int
    lists: int
    gets: int
    heads: int
    deletes: int

    @property
    def total(self) -> int:
        return self.puts + self.lists + self.gets + self.heads + self.deletes


def requests_of(layout: Layout, rows: int, shard_rows: int, workers: int) -> Requests:
    """Of a first run without rejects. Several workers seldom take two shards in a row, so that each shard is a new start."""
    files, shards = max(1, -(-rows // layout.file_rows)), max(1, -(-rows // shard_rows))
    borders = _borders(layout, rows, shard_rows)
    pieces = max(1, len(borders))  # of a shard and a file
    opens = files if workers == 1 else pieces
    gets = _sequential_gets(layout, rows) if workers == 1 else _scattered_gets(layout, borders, rows)
    uploads = max(1, math.ceil(layout.part_row_bytes * min(shard_rows, rows) / UPLOAD_BYTES))
    return Requests(
        puts=3 * (SMALL_WRITES + shards) + (2 + uploads) * shards + MARKS,
        lists=PLAN_LISTS + _pages(files) + 1 + _pages(2 * shards + 1) + _pages(shards + 1) + _pages(shards + 3),
        gets=FOOTER_GETS * files + OPEN_GETS * opens + gets,
        heads=PLAN_HEADS + FOOTER_HEADS * files + BEGIN_HEADS + SMALL_WRITES + PUBLISH_HEADS
        + OPEN_HEADS * opens + CHECK_HEADS * pieces + 2 * shards,
        deletes=_pages(shards) + 2,
    )  # fmt: skip


def times_read(layout: Layout, rows: int, shard_rows: int, workers: int) -> float:
    """How often a row is decoded: a worker that begins inside a row group decodes the group from its first row on."""
    if workers == 1 or not rows:
        return 1.0
    first, stop = _stretches(layout, _borders(layout, rows, shard_rows), rows)
    return float((stop - first).sum()) / rows


def _borders(layout: Layout, rows: int, shard_rows: int) -> Ints:
    """[p] where a file or a shard begins."""
    return np.union1d(np.arange(0, rows, layout.file_rows), np.arange(0, rows, shard_rows))


def _stretches(layout: Layout, borders: Ints, rows: int) -> tuple[Ints, Ints]:
    """[p] the rows of its file that a new reader decodes of each piece: from its first row group on, in whole batches."""
    ends = np.append(borders[1:], rows)
    inside = borders % layout.file_rows
    of_file = np.minimum(layout.file_rows, rows - (borders - inside))
    first = inside // layout.group_rows * layout.group_rows
    batches = -(-(inside + ends - borders - first) // BATCH_ROWS)
    return first, np.minimum(first + batches * BATCH_ROWS, of_file)


def _pages(keys: int) -> int:
    return max(1, -(-keys // PAGE_KEYS))


def _of_bytes(number: float) -> int:
    return max(1, math.ceil(number / FAR_BUFFER_BYTES))


def _sequential_gets(layout: Layout, rows: int) -> int:
    """Every column of every row group once, the prompt's in as many pieces as the buffer is filled."""
    of_file, rest = (-(-some // layout.group_rows) for some in (layout.file_rows, rows % layout.file_rows))
    groups = rows // layout.file_rows * of_file + rest
    return groups * (layout.columns - 1 + _of_bytes(layout.row_bytes * min(layout.group_rows, layout.file_rows, rows)))


def _scattered_gets(layout: Layout, borders: Ints, rows: int) -> int:
    """The same of each piece by a reader of its own."""
    first, stop = _stretches(layout, borders, rows)
    groups = -(-(stop - first) // layout.group_rows)
    whole = _of_bytes(layout.row_bytes * layout.group_rows)
    rest = np.ceil(layout.row_bytes * (stop - first - (groups - 1) * layout.group_rows) / FAR_BUFFER_BYTES)
    return int((groups * (layout.columns - 1) + (groups - 1) * whole + np.maximum(rest, 1)).sum())
