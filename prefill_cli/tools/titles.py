"""What the item file calls an item, for the commands that show items to a person."""

from pathlib import Path
from typing import Any

import polars as pl

from prefill_cli.data.inputs import find_files
from prefill_cli.errors import InputError, ItemsError, nearest
from prefill_cli.matrices import MATRIX_SUFFIXES
from prefill_cli.tools.tables import reading, scan


def item_texts(
    items: Path | None, title_column: str | None, options: dict[str, Any], ids: pl.Series | None = None
) -> dict[Any, dict[str, Any]]:
    """Item id → up to three text columns, the title first; empty where the run's item file is gone or has none.

    items: another item file than the run's. options: the run's, from its manifest. ids: only these items.

    Raises:
        ItemsError: the item file cannot be read, or a column that was named is not in it.
    """
    path = items or Path(options["items"])
    if path.suffix in MATRIX_SUFFIXES or (not items and not _is_there(path)):
        return {}
    item_id, title = options["item_id_column"], title_column or "title"
    with reading(path, ItemsError):
        table = scan(find_files([str(path)]))
        schema = table.collect_schema()
        if item_id not in schema:
            raise ItemsError(f"{path}: no column {item_id!r}{nearest(item_id, schema)}")
        texts = [name for name, kind in schema.items() if kind == pl.String and name != item_id]
        if title_column and title not in texts:
            raise ItemsError(f"{path}: no text column {title!r}{nearest(title, texts)}")
        texts.sort(key=lambda name: name != title)
        table = table.select(item_id, *texts[:3])
        if ids is not None:
            known = pl.col(item_id).cast(ids.dtype, strict=False)
            table = table.with_columns(known).filter(known.is_in(ids.implode()))
        rows = table.collect(engine="streaming")
    return {row.pop(item_id): row for row in rows.to_dicts()}


def _is_there(path: Path) -> bool:
    try:
        return bool(find_files([str(path)]))
    except InputError:
        return False
