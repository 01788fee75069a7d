"""`prefill-score show`: some users' histories and lists with titles, as a person wants to see them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prefill_cli.data.manifest import read_manifest
from prefill_cli.errors import InputError, OutputError, nearest


@dataclass(frozen=True)
class UserQuery:
    """Which users of which result, and where titles and histories are."""

    output: Path
    user: tuple[str, ...]
    users: int
    top: int
    items: Path | None
    title_column: str | None
    history_column: str | None


def read_lists(query: UserQuery) -> list[dict[str, Any]]:
    """One entry a user: id_column, id, history (titles, oldest first, or None), items (rank, score, id and texts).

    Raises:
        OutputError: not a result of ours. InputError: no such user or column.
    """
    manifest = read_manifest(query.output)
    if manifest is None:
        raise OutputError(f"{query.output}: not the result folder of a run (no readable _manifest.json)")
    options = manifest["options"]
    id_column = options["id_column"]
    lists = _lists(query, id_column, options["layout"])
    texts = _item_texts(query, options)
    histories = _histories(query, manifest, lists[id_column])
    shown = []
    for row in lists.iter_rows(named=True):
        history = histories.get(row[id_column])
        items = [
            {"rank": rank, "score": score, "item_id": item, **texts.get(item, {})}
            for rank, (item, score) in enumerate(zip(row["item_ids"], row["scores"], strict=True), start=1)
        ]
        titles = None if history is None else [next(iter(texts.get(i, {}).values()), str(i)) for i in history]
        shown.append({"id_column": id_column, "id": row[id_column], "history": titles, "items": items[: query.top]})
    return shown


def _lists(query: UserQuery, id_column: str, layout: str) -> pl.DataFrame:
    """A row a user: id, item_ids, scores; in the long layout gathered from the rows."""
    parts = pl.scan_parquet(str(query.output / "part-*.parquet"))
    if query.user:
        kind = parts.collect_schema()[id_column]
        try:
            wanted = pl.Series(query.user).cast(kind)
        except pl.exceptions.PolarsError:
            raise InputError(f"--user {', '.join(query.user)}: user ids of this result are {kind}") from None
        parts = parts.filter(pl.col(id_column).is_in(wanted.implode()))
    if layout == "long":
        parts = parts.group_by(id_column, maintain_order=True).agg(item_ids=pl.col("item_id"), scores=pl.col("score"))
    found = parts.select(id_column, "item_ids", "scores").head(len(query.user) or query.users).collect(engine="streaming")
    if query.user and found.is_empty():
        raise InputError(f"{query.output}: no user {', '.join(query.user)} in the result; see its _rejects folder too")
    return found


def _item_texts(query: UserQuery, options: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Item id → its text columns, the title first; empty where the item file is gone or has none."""
    path = query.items or Path(options["items"])
    if path.suffix in (".npy", ".safetensors") or (not query.items and not path.exists()):
        return {}
    items = pl.scan_parquet(str(path / "**/*.parquet" if path.is_dir() else path))
    schema = items.collect_schema()
    texts = [name for name, kind in schema.items() if kind == pl.String and name != options["item_id_column"]]
    title = query.title_column or "title"
    if query.title_column and title not in texts:
        raise InputError(f"{path}: no text column {title!r}{nearest(title, texts)}")
    texts.sort(key=lambda name: name != title)
    table = items.select(options["item_id_column"], *texts[:3]).collect()
    return {row.pop(options["item_id_column"]): row for row in table.to_dicts()}


def _histories(query: UserQuery, manifest: dict[str, Any], ids: pl.Series) -> dict[Any, list[Any]]:
    """User id → the input's list of item ids; empty where the inputs are gone or have no such column."""
    column = query.history_column or manifest["options"]["exclude_column"]
    files = [f["path"] for f in manifest["inputs"]["files"] if Path(f["path"]).exists()]
    if not column or not files:
        return {}
    prompts = pl.scan_parquet(files, extra_columns="ignore")
    if column not in prompts.collect_schema():
        raise InputError(f"{files[0]}: no column {column!r}{nearest(column, prompts.collect_schema())}")
    rows = prompts.select(ids.name, column).filter(pl.col(ids.name).is_in(ids.implode())).collect(engine="streaming")
    return {user: history or [] for user, history in rows.iter_rows()}
