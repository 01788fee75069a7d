"""The lists of a result folder, a row group at a time, whichever layout it has and whatever type its item ids have."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prefill_cli.arrow import is_binary, is_text
from prefill_cli.data.inputs import natural
from prefill_cli.data.manifest import damage, read_manifest
from prefill_cli.errors import OutputError
from prefill_cli.parquet import open_parquet
from prefill_cli.tools.judging.ids import Codes, Ints, as_ids, encode, offsets_of, places_of
from prefill_cli.tools.tables import reading

Given = TypeVar("Given")
Made = TypeVar("Made")
THREADS = 2  # the second one works while the first waits for the disk; a chunk each is held


@dataclass(frozen=True)
class Lists:
    """n users' lists: list i is codes[offsets[i] : offsets[i + 1]], best first, and code c stands for item_ids[c].

    `start` is the number of the first of them among all lists of the result. Codes are this object's own.
    """

    start: int
    offsets: Ints  # [n + 1]
    codes: Codes
    item_ids: pa.Array  # distinct

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def take(self, rows: Ints) -> "Lists":
        """Some of the lists, by their place here, in that order; `start` has no meaning then."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        places, offsets = places_of(self.offsets, rows)
        return Lists(0, offsets, self.codes[places], self.item_ids)


@dataclass(frozen=True)
class Result:
    """A finished result folder."""

    folder: Path
    manifest: dict[str, Any]
    files: tuple[Path, ...]
    schema: pa.Schema

    @property
    def id_column(self) -> str:
        return str(self.manifest["options"]["id_column"])

    @property
    def top_k(self) -> int:
        return int(self.manifest["options"]["top_k"])

    @property
    def catalogue(self) -> int:
        """How many items there were to choose from."""
        return int(self.manifest["items"]["items"])

    @property
    def exclude_column(self) -> str | None:
        """The input's column of items that each user must not get."""
        name = self.manifest["options"]["exclude_column"]
        return None if name is None else str(name)

    @property
    def is_long(self) -> bool:
        return bool(self.manifest["options"]["layout"] == "long")

    @property
    def item_type(self) -> pa.DataType:
        return self.schema.field("item_id").type if self.is_long else self.schema.field("item_ids").type.value_type

    @property
    def columns(self) -> list[str]:
        """The id and the kept columns."""
        own = ("rank", "item_id", "score") if self.is_long else ("item_ids", "scores")
        return [name for name in self.schema.names if name not in own]


def open_result(folder: Path) -> Result:
    """A result, looked at: its manifest is there and its files are those that it names.

    Raises:
        OutputError: not a finished result of ours, or damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise OutputError(f"{folder}: not the result folder of a run (no readable _manifest.json)")
    if wrong := damage(folder, manifest):
        raise OutputError(f"{folder}: {wrong}, so it was changed after it was published; the command that made it mends it")
    files = tuple(sorted(folder.glob("part-*.parquet"), key=lambda part: natural(part.name)))
    wanted = {"rank", "item_id"} if manifest["options"]["layout"] == "long" else {"item_ids"}
    with reading(folder, OutputError):
        schema = open_parquet(files[0]).schema_arrow if files else pa.schema([])
    if missing := (wanted | {manifest["options"]["id_column"]}) - set(schema.names):
        raise OutputError(f"{folder}: no column {', '.join(map(repr, sorted(missing)))} in it, so these are no lists")
    return Result(folder, manifest, files, schema)


def read_lists(result: Result) -> Iterator[Lists]:
    """All lists in order, those of a row group at a time. The long layout has none for users without an item.

    Raises:
        OutputError: a part cannot be read.
    """
    for group in groups_of(result):
        yield from read_group(result, group) if not result.is_long else ()
    if result.is_long:
        yield from _long_lists(result)


@dataclass(frozen=True)
class Group:
    """A row group of a part: `rows` rows from number `start` of the result on."""

    file: Path
    index: int
    start: int
    rows: int


def groups_of(result: Result) -> list[Group]:
    """Every row group of every part, in order."""
    found, start = [], 0
    with reading(result.folder, OutputError):
        for file in result.files:
            metadata = open_parquet(file).metadata
            for index in range(metadata.num_row_groups):
                rows = metadata.row_group(index).num_rows
                found.append(Group(file, index, start, rows))
                start += rows
    return found


def read_group(result: Result, group: Group) -> Iterator[Lists]:
    """The lists of a row group of the nested layout (one object, or none for no rows)."""
    with reading(group.file, OutputError):
        column = _open(group.file, "item_ids.list.element", result).read_row_group(group.index, columns=["item_ids"])[0]
        if not len(column):
            return
        lists = column.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        codes, item_ids = encode(lists.flatten())
    yield Lists(group.start, offsets_of(lengths), codes, item_ids)


def _long_lists(result: Result) -> Iterator[Lists]:
    """A list begins where rank is 1; one that goes on in the next row group waits for it."""
    waiting: pa.Table | None = None
    start = 0
    for group in groups_of(result):
        with reading(group.file, OutputError):
            rows = _open(group.file, "item_id", result).read_row_group(group.index, columns=["rank", "item_id"])
            rows = rows if waiting is None else pa.concat_tables([waiting, rows])
            begins = np.flatnonzero(rows["rank"].to_numpy() == 1)
        if len(begins) > 1:
            yield _as_lists(rows.slice(0, begins[-1]), begins[:-1], start)
            start += len(begins) - 1
        waiting = rows.slice(begins[-1]) if len(begins) else rows
    if waiting is not None and waiting.num_rows:
        yield _as_lists(waiting, np.array([0]), start)


def _as_lists(rows: pa.Table, begins: Ints, start: int) -> Lists:
    codes, item_ids = encode(rows["item_id"])
    return Lists(start, np.append(begins, rows.num_rows), codes, item_ids)


def _open(file: Path, leaf: str, result: Result) -> pq.ParquetFile:
    """Text and binary ids stay the dictionaries that they are in the file."""
    coded = is_text(result.item_type) or is_binary(result.item_type)
    return open_parquet(file, read_dictionary=[leaf] if coded else None)


def read_columns(result: Result, names: Sequence[str]) -> Iterator[pa.Table]:
    """The id or kept columns of all lists, a row a list, in the order of read_lists."""
    wanted = [*names, "rank"] if result.is_long else list(names)
    for group in groups_of(result):
        with reading(group.file, OutputError):
            rows = open_parquet(group.file).read_row_group(group.index, columns=wanted)
            yield rows.filter(pc.equal(rows["rank"], 1)).drop_columns("rank") if result.is_long else rows


def ids_of(result: Result) -> pa.Array:
    """[lists] the user ids, in order, as as_ids gives them."""
    parts = [as_ids(table[0]) for table in read_columns(result, [result.id_column])]
    return pa.concat_arrays(parts) if parts else as_ids(pa.array([], result.schema.field(result.id_column).type))


def in_turn(work: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
    """work(x) of each x, in order, a few at a time in threads; what is given is read no further ahead than that."""
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[Future[Made]] = deque()
        for one in given:
            waiting.append(pool.submit(work, one))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
