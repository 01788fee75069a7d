"""The rows of one shard on their way: read, tokenised, told apart. Every row is here or in `rejects`, never in both."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli.arrow import working_type
from prefill_cli.data import rejects as reject_rows
from prefill_cli.data.inputs import InputPlan, Shard
from prefill_cli.data.prompts import Piece, ShardReader
from prefill_cli.data.rejects import Reject
from prefill_cli.data.tokenization import Ids, Tokenized


@dataclass(frozen=True)
class ShardRows:
    """n rows in input order: what goes to the model and what goes straight to the output, aligned."""

    columns: pa.Table  # the id, then the kept columns, in working types
    exclude: pa.ChunkedArray | None  # [n] lists of item ids
    candidates: pa.ChunkedArray | None
    input_ids: list[Ids]  # n arrays; of a search, the vectors
    source_file: npt.NDArray[np.object_]  # [n]
    source_row: npt.NDArray[np.int64]  # [n]
    rejects: pa.Table
    truncated_rows: int
    control_token_rows: int

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.input_ids if ids.dtype.kind == "i")

    def without(self, bad: npt.NDArray[np.bool_], reject: Reject) -> "ShardRows":
        """The same rows less the `bad` ones ([n] mask), which are rejected."""
        if not bad.any():
            return self
        keep, mask = pa.array(~bad), np.flatnonzero(~bad)
        gone = self.columns.column(0).filter(pa.array(bad)).combine_chunks()
        dropped = _reject_table(
            self.rejects.schema, gone, self.source_file[bad].tolist(), self.source_row[bad].tolist(), [reject] * len(gone)
        )
        return ShardRows(
            self.columns.filter(keep),
            None if self.exclude is None else self.exclude.filter(keep),
            None if self.candidates is None else self.candidates.filter(keep),
            [self.input_ids[i] for i in mask],
            self.source_file[mask],
            self.source_row[mask],
            pa.concat_tables([self.rejects, dropped]),
            self.truncated_rows,
            self.control_token_rows,
        )


def read_rows(
    reader: ShardReader, tokenize: Callable[[pa.Array], Tokenized], plan: InputPlan, id_column: str, shard: Shard
) -> ShardRows:
    """Read and tokenise a shard piece by piece; a prompt's text is let go as soon as it has become ids."""
    batches, excludes, candidates, sources, rejects = [], [], [], [], []
    input_ids: list[Ids] = []
    truncated = control = 0
    reject_schema = reject_rows.schema(id_column, plan.id_type)
    schema = pa.schema([(f.name, working_type(f.type)) for f in (pa.field(id_column, plan.id_type), *plan.kept)])
    for piece in reader.read(shard):
        readable = [i for i in range(len(piece.ids)) if i not in piece.rejects]
        tokenized = tokenize(piece.prompts.take(pa.array(readable, pa.int64())))
        found = dict(piece.rejects) | {readable[i]: reject for i, reject in tokenized.rejects.items()}
        kept = pa.array([i for i in range(len(piece.ids)) if i not in found], pa.int64())
        rejects.append(_rejects_of(piece, found, reject_schema))
        columns = [column.take(kept) for column in (piece.ids, *piece.kept.columns)]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        excludes.append(None if piece.exclude is None else piece.exclude.take(kept))
        candidates.append(None if piece.candidates is None else piece.candidates.take(kept))
        sources.append((piece.path, piece.first_row + kept.to_numpy()))
        input_ids += [ids for ids in tokenized.input_ids if ids is not None]
        truncated += tokenized.truncated_rows
        control += tokenized.control_token_rows
    return ShardRows(
        pa.Table.from_batches(batches, schema),
        _chunked(excludes),
        _chunked(candidates),
        input_ids,
        np.array([path for path, rows in sources for _ in rows], object),
        np.concatenate([np.empty(0, np.int64), *(rows for _, rows in sources)]),
        pa.concat_tables([reject_schema.empty_table(), *rejects]),
        truncated,
        control,
    )


def _chunked(arrays: list[pa.Array | None]) -> pa.ChunkedArray | None:
    found = [a for a in arrays if a is not None]
    return pa.chunked_array(found) if found else None


def _rejects_of(piece: Piece, found: dict[int, Reject], schema: pa.Schema) -> pa.Table:
    rows = sorted(found)
    ids = piece.ids.take(pa.array(rows, pa.int64()))
    # An id whose own bytes are broken would make the rejects unreadable in turn.
    broken = [found[i].reason == "bad_text" and found[i].detail.startswith(f"column {schema.names[0]} ") for i in rows]
    if any(broken):
        ids = pa.array([None if bad else cell.as_py() for bad, cell in zip(broken, ids, strict=True)], ids.type)
    return _reject_table(
        schema, ids, [piece.path] * len(rows), [piece.first_row + i for i in rows], [found[i] for i in rows]
    )


def _reject_table(schema: pa.Schema, ids: pa.Array, files: list[str], rows: list[int], why: list[Reject]) -> pa.Table:
    columns = (files, rows, [reject.reason for reject in why], [reject.detail for reject in why])
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types[1:], strict=True)]
    return pa.table([ids.cast(schema.types[0]), *arrays], schema=schema)
