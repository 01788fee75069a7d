"""`prefill-score show`: some users' histories and lists with titles, as a person wants to see them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prefill_cli.data.inputs import natural
from prefill_cli.data.manifest import read_manifest
from prefill_cli.errors import InputError, OutputError, nearest
from prefill_cli.tools.tables import reading, scan, schema_of
from prefill_cli.tools.titles import item_texts


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
    """One entry a user: id_column, id, history (titles, oldest first, or None), least_score (of the whole list), items
    (rank, score, id and texts; those that were asked for).

    Raises:
        OutputError: not a result of ours. InputError, ItemsError: no such user, file or column.
    """
    manifest = read_manifest(query.output)
    if manifest is None:
        raise OutputError(f"{query.output}: not the result folder of a run (no readable _manifest.json)")
    if manifest["items"] is None:
        raise OutputError(f"{query.output}: holds vectors, made by embed; lists are made of them by run or search")
    options = manifest["options"]
    id_column = options["id_column"]
    lists = _lists(query, id_column, options["layout"])
    texts = item_texts(query.items, query.title_column, options)
    histories = _histories(query, manifest, lists[id_column])
    shown = []
    for row in lists.iter_rows(named=True):
        history = histories.get(row[id_column])
        items = [
            {"rank": rank, "score": score, "item_id": item, **texts.get(item, {})}
            for rank, (item, score) in enumerate(zip(row["item_ids"], row["scores"], strict=True), start=1)
        ]
        titles = None if history is None else [next(iter(texts.get(i, {}).values()), None) or str(i) for i in history]
        least = items[-1]["score"] if items else None
        user = {"id_column": id_column, "id": row[id_column], "history": titles, "least_score": least}
        shown.append(user | {"items": items[: query.top]})
    return shown


def _lists(query: UserQuery, id_column: str, layout: str) -> pl.DataFrame:
    """A row a list: id, item_ids, scores; in the long layout gathered from the rows."""
    with reading(query.output, OutputError):
        files: list[Path] = sorted(query.output.glob("part-*.parquet"), key=lambda part: natural(part.name))
        parts = scan(files)
        kind = parts.collect_schema()[id_column]
    wanted = _user_ids(query.user, kind)
    if query.user:
        parts = parts.filter(pl.col(id_column).is_in(wanted.implode()))
    if layout == "long":  # ids may repeat, but every list begins with rank 1
        lists = parts.group_by((pl.col("rank") == 1).cum_sum().alias("list"), maintain_order=True)
        parts = lists.agg(pl.col(id_column).first(), item_ids=pl.col("item_id"), scores=pl.col("score"))
    parts = parts.select(id_column, "item_ids", "scores")
    with reading(query.output, OutputError):
        found = (parts if query.user else parts.head(query.users)).collect(engine="streaming")
    missing = [name for name, known in zip(query.user, wanted.is_in(found[id_column].implode()), strict=True) if not known]
    if missing:
        raise InputError(f"{query.output}: no user {', '.join(missing)} in the result; see its _rejects folder too")
    return found


def _user_ids(users: tuple[str, ...], kind: pl.DataType) -> pl.Series:
    """What --user says, in the type of the result's ids."""
    texts = pl.Series(users, dtype=pl.String)
    try:
        return texts.str.strptime(kind) if isinstance(kind, pl.Date | pl.Datetime) else texts.cast(kind)
    except pl.exceptions.PolarsError:
        raise InputError(f"--user {', '.join(users)}: user ids of this result are {kind}") from None


def _histories(query: UserQuery, manifest: dict[str, Any], ids: pl.Series) -> dict[Any, list[Any]]:
    """User id → the input's list of item ids; empty where the inputs are gone or have no such column."""
    column = query.history_column or manifest["options"]["exclude_column"]
    files = [f["path"] for f in manifest["inputs"]["files"] if Path(f["path"]).exists()]
    if not column or not files:
        return {}
    with reading(files[0], InputError):
        schema = schema_of(files[0])
        if column not in schema:
            raise InputError(f"{files[0]}: no column {column!r}{nearest(column, schema)}")
        if not isinstance(schema[column], pl.List | pl.Array):
            raise InputError(f"{files[0]}: column {column!r} is {schema[column]}, which is not a list of item ids")
        user = pl.col(ids.name).cast(ids.dtype)  # the result has one type for what may differ from file to file
        rows = scan(files, user, column).filter(user.is_in(ids.implode())).collect(engine="streaming")
    return {user: history or [] for user, history in rows.iter_rows()}
