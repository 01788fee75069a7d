"""Item-embedding files: read, checked and held as float32 before a model is loaded.

Parquet (one file, a folder or a glob of parts; id and embedding columns), safetensors (tensor `embeddings` [N, d]) or
npy (memory-mapped). Files without ids take them from --item-ids, else the row numbers from 0 serve. Pickles are refused.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
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

log = logging.getLogger(__name__)
CHECK_ROWS = 65_536


@dataclass(frozen=True)
class Items:
    """N items in file order, ready to be scored.

    `vectors` is [N, d] float32, cut and normalised as --dims, --normalize and --score ask; `bias` [N] float32 or None;
    `norms` [N] float64, the vectors' lengths.
    """

    ids: pa.Array
    vectors: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float32] | None
    sha256: str
    dropped: int
    provenance: dict[str, Any]
    mapped: tuple[Path, int, int] | None = None  # path, size and mtime of the file that `vectors` are a view of

    def check_unchanged(self) -> None:
        """That a memory-mapped file is still what was checked and digested.

        Raises:
            ItemsError: it was written over.
        """
        if self.mapped and self.mapped != stamp(self.mapped[0]):
            raise ItemsError(f"{self.mapped[0]}: the item file changed while the run was using it; start the run again")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])


def load_items(config: RunConfig, hidden_size: int | None) -> Items:
    """Load and check the catalogue of a run. `hidden_size` is the model's width; None checks the file by itself.

    Raises:
        ItemsError: unreadable, wrong width, duplicate ids, bad vectors (unless --bad-items drop).
    """
    assert config.items is not None
    raw = item_files.read(config)
    where, width = str(config.items), raw.vectors.shape[1]
    if not len(raw.ids):
        raise ItemsError(f"{where}: there are no items in it")
    hidden_size = hidden_size or width
    wanted = config.dims or hidden_size
    if config.dims and config.dims > hidden_size:
        raise UsageError(f"--dims {config.dims} is more than the model's width of {hidden_size}")
    if width not in (hidden_size, wanted):
        also = f" or --dims {config.dims}" if config.dims else ""
        raise ItemsError(f"{where}: embeddings are {width} wide, but {config.model} gives vectors of {hidden_size}{also}")
    _check_ids(raw.ids, where)
    vectors = raw.vectors[:, :wanted]
    bad = _bad_rows(vectors, raw.null_rows, config.score == "cosine" or config.normalize)
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
        ids, vectors, bias = ids.take(pa.array(keep)), vectors[keep], None if bias is None else bias[keep]
    if not len(ids):
        raise ItemsError(f"{where}: every item is left out (--bad-items drop)")
    vectors = np.ascontiguousarray(vectors, np.float32)
    if config.normalize or config.score == "cosine":
        vectors = _unit_length(vectors)
    mapped = raw.mapped if np.may_share_memory(vectors, raw.vectors) else None
    return Items(ids, vectors, _norms(vectors), bias, raw.sha256, len(bad_rows), raw.provenance, mapped)


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


def _bad_rows(
    vectors: npt.NDArray[Any], null_rows: npt.NDArray[np.int64], no_zeros: bool
) -> dict[str, npt.NDArray[np.int64]]:
    """Rows of [N, d] vectors that cannot be scored, by what is wrong with them."""
    finite = _by_block(vectors, lambda block: np.isfinite(block.astype(np.float32)).all(axis=1), bool)
    finite[null_rows] = True  # told apart by their own reason
    bad = {"null or ragged embeddings": null_rows, "NaN or infinity in the embedding": np.flatnonzero(~finite)}
    if no_zeros:
        zero = _by_block(vectors, lambda block: ~block.astype(np.float32).any(axis=1), bool)
        zero[null_rows] = False
        bad["an embedding of zero length, which has no direction for cosine or --normalize"] = np.flatnonzero(zero)
    return bad


def _unit_length(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[N, d] vectors over their lengths, which are taken in float64: a float32 one may overflow or vanish."""
    unit, norms = np.empty(vectors.shape, np.float32), _norms(vectors)
    for start in range(0, len(vectors), CHECK_ROWS):
        stop = start + CHECK_ROWS
        unit[start:stop] = vectors[start:stop] / norms[start:stop, None]
    return unit


def _norms(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return _by_block(vectors, lambda block: np.sqrt(np.square(block, dtype=np.float64).sum(axis=1)), np.float64)


def _by_block(vectors: npt.NDArray[Any], compute: Callable[[npt.NDArray[Any]], Any], dtype: Any) -> npt.NDArray[Any]:
    """[N] results of a row-wise function without a second [N, d] array in memory."""
    result = np.empty(len(vectors), dtype)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, which is what is looked for
        for start in range(0, len(vectors), CHECK_ROWS):
            result[start : start + CHECK_ROWS] = compute(vectors[start : start + CHECK_ROWS])
    return result


def _examples(ids: pa.Array, rows: npt.NDArray[np.int64] | None = None) -> str:
    shown = ids.slice(0, 5) if rows is None else ids.take(pa.array(rows[:5]))
    more = len(ids if rows is None else rows) > 5
    return ", ".join(map(str, shown.to_pylist())) + (", …" if more else "")
