"""Item-embedding files: read, checked and held as float32 before a model is loaded.

Parquet (one file, a folder or a glob of parts; id and embedding columns), safetensors (tensor `embeddings` [N, d]) or
npy (memory-mapped). Files without ids take them from --item-ids, else the row numbers from 0 serve. Pickles are refused.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.arrow import invalid_text, is_text
from prefill_cli.config import RunConfig
from prefill_cli.errors import ItemsError, UsageError
from prefill_cli.scoring import item_files
from prefill_cli.scoring.item_files import stamp
from prefill_cli.scoring.matrix import Matrix

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Items:
    """N items in file order, ready to be scored.

    `matrix` is [N, d] float32, cut and normalised as --dims, --normalize and --score ask; `bias` [N] float32 or None;
    `norms` [N] float64, the vectors' lengths.
    """

    ids: pa.Array
    matrix: Matrix
    norms: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float32] | None
    sha256: str
    dropped: int
    provenance: dict[str, Any]
    mapped: tuple[Path, int, int] | None = None  # path, size and mtime of the file that `matrix` reads from

    def check_unchanged(self) -> None:
        """That a memory-mapped file is still what was checked and digested.

        Raises:
            ItemsError: it was written over.
        """
        try:
            same = not self.mapped or self.mapped == stamp(self.mapped[0])
        except OSError:
            same = False
        if self.mapped and not same:
            raise ItemsError(f"{self.mapped[0]}: the item file changed while the run was using it; start the run again")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def largest_norm(self) -> float:
        """Length of the longest vector."""
        return float(self.norms.max())

    @cached_property
    def largest_bias(self) -> float:
        """The largest magnitude of a bias."""
        return 0.0 if self.bias is None else float(np.abs(self.bias).max())

    @property
    def width(self) -> int:
        return self.matrix.width

    @property
    def vectors(self) -> npt.NDArray[np.float32]:
        """[N, d], all in memory."""
        resident = self.matrix.resident
        return self.matrix.block(0, len(self)) if resident is None else resident


def load_items(config: RunConfig, user_width: int | None, head_width: int | None = None) -> Items:
    """Load and check the catalogue of a run.

    user_width: of the users' vectors before --dims; None checks the file by itself. head_width: of the items that a head
    takes, which are then not cut.

    Raises:
        ItemsError: unreadable, wrong width, duplicate ids, bad vectors (unless --bad-items drop).
    """
    assert config.items is not None
    raw = item_files.read(config)
    where, width = str(config.items), raw.vectors.shape[1]
    if not len(raw.ids):
        raise ItemsError(f"{where}: there are no items in it")
    wanted = _wanted_width(config, width, user_width or width, head_width)
    if not raw.numbered:
        _check_ids(raw.ids, where)
    matrix = Matrix(raw.vectors, wanted)
    bad = _bad_rows(matrix, raw.null_rows, config.score == "cosine" or config.normalize)
    if raw.bias is not None:
        bad["a bias that is null or not finite"] = np.flatnonzero(~np.isfinite(raw.bias))
    bad_rows = np.unique(np.concatenate(list(bad.values())))
    if len(bad_rows) and config.bad_items == "fail":
        what, rows = next((w, r) for w, r in bad.items() if len(r))
        raise ItemsError(
            f"{where}: {len(rows)} items have {what}: {_examples(raw.ids, rows)}; mend them, or leave them out with "
            "--bad-items drop"
        )
    ids, bias = raw.ids, raw.bias
    if len(bad_rows):
        log.warning(
            "%s: %d of %d items are left out (--bad-items drop): %s",
            where,
            len(bad_rows),
            len(ids),
            _examples(ids, bad_rows),
        )
        keep = np.setdiff1d(np.arange(len(ids)), bad_rows)
        ids, bias = ids.take(pa.array(keep)), None if bias is None else bias[keep]
        matrix = replace(matrix, kept=keep)
    if not len(ids):
        raise ItemsError(f"{where}: every item is left out (--bad-items drop)")
    if config.normalize or config.score == "cosine":
        matrix = replace(matrix, lengths=_norms(matrix))
    stored, matrix = matrix, matrix.in_memory()
    mapped = raw.mapped if matrix is stored else None
    return Items(ids, matrix, _norms(matrix), bias, raw.sha256, len(bad_rows), raw.provenance, mapped)


def _wanted_width(config: RunConfig, width: int, user_width: int, head_width: int | None) -> int:
    """The columns of the item file that are scored: it may be as wide as the users' vectors, or as --dims cuts them."""
    wanted = head_width or config.dims or user_width
    if config.dims and config.dims > user_width:
        whose = "model" if config.model and not config.vector_column else "input"
        raise UsageError(f"--dims {config.dims} is more than the {whose}'s width of {user_width}")
    if head_width and width != head_width:
        raise ItemsError(
            f"{config.items}: embeddings are {width} wide, but --head {config.head} takes items of {head_width}"
        )
    if width not in (user_width, wanted):
        also = f" or --dims {config.dims}" if config.dims else ""
        users = config.model if config.model and not config.vector_column else "the input"
        raise ItemsError(f"{config.items}: embeddings are {width} wide, but {users} gives vectors of {user_width}{also}")
    return wanted


def check_provenance(items: Items, config: RunConfig, made_with: dict[str, Any]) -> None:
    """Compare what the item file says made it with what this run uses; fields that either side lacks are not compared.

    Raises:
        ItemsError: they differ and --strict-provenance is given.
    """
    stored = items.provenance
    differing = [
        f"{name} ({stored[name]}, now {made_with[name]})"
        for name in stored.keys() & made_with.keys()
        if None not in (stored[name], made_with[name]) and stored[name] != made_with[name]
    ]
    if differing:
        message = f"{config.items} was made with another {', '.join(sorted(differing))}; scores may mean nothing"
        if config.strict_provenance:
            raise ItemsError(f"{message} (--strict-provenance)")
        log.warning("%s", message)


def _check_ids(ids: pa.Array, where: str) -> None:
    if ids.null_count:
        raise ItemsError(f"{where}: {ids.null_count} item ids are null")
    broken = invalid_text(ids) if is_text(ids.type) else []
    if broken:
        raise ItemsError(f"{where}: {len(broken)} item ids are not UTF-8, the first in row {broken[0]} (from 0)")
    counts = pc.value_counts(ids)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
    if len(repeated):
        raise ItemsError(f"{where}: {len(repeated)} item ids stand there more than once: {_examples(repeated)}")


def _bad_rows(matrix: Matrix, null_rows: npt.NDArray[np.int64], no_zeros: bool) -> dict[str, npt.NDArray[np.int64]]:
    """Rows of [N, d] vectors that cannot be scored, by what is wrong with them."""
    finite, zero = np.ones(len(matrix), bool), np.zeros(len(matrix), bool)
    for start, block in matrix.blocks():
        finite[start : start + len(block)] = np.isfinite(block).all(axis=1)
        if no_zeros:
            zero[start : start + len(block)] = ~block.any(axis=1)
    finite[null_rows], zero[null_rows] = True, False  # told apart by their own reason
    bad = {"null or ragged embeddings": null_rows, "NaN or infinity in the embedding": np.flatnonzero(~finite)}
    if no_zeros:
        bad["an embedding of zero length, which has no direction for cosine or --normalize"] = np.flatnonzero(zero)
    return bad


def _norms(matrix: Matrix) -> npt.NDArray[np.float64]:
    """[N] lengths, in float64: a float32 one may overflow or vanish."""
    norms = np.empty(len(matrix))
    for start, block in matrix.blocks():
        norms[start : start + len(block)] = np.sqrt(np.einsum("nd,nd->n", *[block.astype(np.float64)] * 2))
    return norms


def _examples(ids: pa.Array, rows: npt.NDArray[np.int64] | None = None) -> str:
    shown = ids.slice(0, 5) if rows is None else ids.take(pa.array(rows[:5]))
    more = len(ids if rows is None else rows) > 5
    return ", ".join(map(str, shown.to_pylist())) + (", …" if more else "")
