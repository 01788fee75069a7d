"""The parts of a result: schema fixed up front from the input's types, row groups of bounded size, rejects beside them.

A part appears under its name only when it is whole and on disk (disk.replacing).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from prefill_cli.arrow import is_list
from prefill_cli.config import RunConfig
from prefill_cli.data import rejects
from prefill_cli.data.disk import replacing, writing
from prefill_cli.data.inputs import InputPlan
from prefill_cli.errors import UsageError

REJECTS_FOLDER = "_rejects"
GROUP_ELEMENTS = 4_000_000  # list elements of a row group: 48 MB of int64 ids and float32 scores before compression
GROUP_BYTES = 256 << 20  # of ids and kept columns in a row group of the long layout, which repeats them k times
OUTPUT_COLUMNS = {"nested": ("item_ids", "scores"), "long": ("rank", "item_id", "score")}


@dataclass(frozen=True)
class Lists:
    """The lists of consecutive users: list i is [offsets[i] : offsets[i + 1]] of the flat arrays, best first."""

    offsets: npt.NDArray[np.int64]  # [n + 1]
    item_ids: pa.Array
    scores: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """How parts look: the same for every shard of a run."""

    layout: str
    result: pa.Schema
    rejects: pa.Schema


def plan_format(config: RunConfig, plan: InputPlan, item_id_type: pa.DataType) -> Format:
    """Schemas of parts and rejects.

    Raises:
        UsageError: two output columns would have one name.
    """
    _check_names(config, OUTPUT_COLUMNS[config.layout])
    fields = [pa.field(config.id_column, plan.id_type), *plan.kept]
    if config.layout == "nested":
        fields += [pa.field("item_ids", pa.list_(item_id_type)), pa.field("scores", pa.list_(pa.float32()))]
    else:
        fields += [pa.field("rank", pa.int32()), pa.field("item_id", item_id_type), pa.field("score", pa.float32())]
    return Format(config.layout, pa.schema(fields), rejects.schema(config.id_column, plan.id_type))


def plan_vectors(config: RunConfig, plan: InputPlan, width: int, metadata: dict[str, str]) -> Format:
    """The same for vectors of `width` themselves. metadata: of each part, about what made them."""
    _check_names(config, (config.embedding_column,))
    vectors = pa.field(config.embedding_column, pa.list_(pa.float32(), width))
    schema = pa.schema([pa.field(config.id_column, plan.id_type), vectors, *plan.kept], metadata)
    return Format("vectors", schema, rejects.schema(config.id_column, plan.id_type))


def _check_names(config: RunConfig, names: tuple[str, ...]) -> None:
    """names: of the columns that a run makes, beside those that it carries over."""
    carried = (config.id_column, *config.keep_columns)
    for name in carried:
        if name in names or carried.count(name) > 1:
            raise UsageError(f"column {name!r} would stand twice in the output, which has {', '.join((*carried, *names))}")
    if config.id_column in rejects.COLUMNS:
        raise UsageError(f"the id column {config.id_column!r} has the name of a column of the rejects; rename it")


def write_part(path: Path, form: Format, groups: Iterable[tuple[pa.Table, Lists]]) -> int:
    """Write one part from (id and kept columns, lists) pairs; returns its rows (long: list entries).

    Each pair is a row group, or several in the long layout where the kept columns are wide.
    """
    layout = _nested if form.layout == "nested" else _long
    tables = (table for columns, lists in groups for table in layout(columns, lists, form.result))
    return _write(path, form.result, tables, ("scores", "score"))


def write_vectors(path: Path, form: Format, groups: Iterable[tuple[pa.Table, npt.NDArray[np.float32]]]) -> int:
    """Write one part from (id and kept columns, vectors [n, d]) pairs, a row group each; returns its rows."""

    def table(columns: pa.Table, vectors: npt.NDArray[np.float32]) -> pa.Table:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        first, *kept = columns.columns
        return _as([first, lists, *kept], form.result)

    return _write(path, form.result, (table(*group) for group in groups), (form.result.names[1],))


def write_rejects(path: Path, table: pa.Table) -> None:
    """Write a shard's rejects; a shard without any has no such file."""
    if table.num_rows:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        _write(path, table.schema, [table])
    else:
        path.unlink(missing_ok=True)


def group_rows(k: int) -> int:
    """Users of a row group when each may have k items."""
    return max(1, GROUP_ELEMENTS // k)


def parquet_options(schema: pa.Schema, plain: Collection[str]) -> dict[str, Any]:
    """How parts are written. plain: columns of numbers that hardly repeat: a dictionary costs time and saves nothing."""
    # Parquet names the values of a list by their own path.
    indexed = [f.name + (".list.element" if is_list(f.type) else "") for f in schema if f.name not in plain]
    return {"compression": "zstd", "use_dictionary": indexed, "write_page_checksum": True}


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], plain: tuple[str, ...] = ()) -> int:
    rows = 0
    with replacing(path) as file, pq.ParquetWriter(file, schema, **parquet_options(schema, plain)) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            rows += table.num_rows
    return rows


def _nested(columns: pa.Table, lists: Lists, schema: pa.Schema) -> Iterator[pa.Table]:
    offsets = pa.array(lists.offsets.astype(np.int32))
    arrays = [
        *columns.columns,
        pa.ListArray.from_arrays(offsets, lists.item_ids),
        pa.ListArray.from_arrays(offsets, pa.array(lists.scores)),
    ]
    yield _as(arrays, schema)


def _long(columns: pa.Table, lists: Lists, schema: pa.Schema) -> Iterator[pa.Table]:
    lengths = np.diff(lists.offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    rank = np.arange(len(user)) - np.repeat(lists.offsets[:-1], lengths) + 1
    row_bytes = columns.nbytes // max(columns.num_rows, 1) + 1
    step = max(1, GROUP_BYTES // row_bytes)
    for start in range(0, len(user), step):
        entries = slice(start, start + step)
        repeated = columns.take(pa.array(user[entries])).columns
        ranks, scores = pa.array(rank[entries].astype(np.int32)), pa.array(lists.scores[entries])
        yield _as([*repeated, ranks, lists.item_ids[entries], scores], schema)


def _as(arrays: list[pa.Array | pa.ChunkedArray], schema: pa.Schema) -> pa.Table:
    """The arrays under the schema, back in the types that the input came with."""
    return pa.table([a if a.type == f.type else a.cast(f.type) for a, f in zip(arrays, schema, strict=True)], schema=schema)
