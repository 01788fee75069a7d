"""`prefill-score cache`: what a vector cache holds and how well it served, and its pruning.

Pruning copies what is kept into few large segments and then removes the old ones, so that whoever opens the cache
meanwhile finds each vector once or twice. A run that is under way keeps the files that it has open; one that is taken
up again after its segments were pruned makes those vectors anew.
"""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli import storage
from prefill_cli.data.cache import (
    SEGMENT_NAME,
    SPACE,
    USES,
    BadSegmentError,
    Segment,
    compact,
    mirror_of,
    open_segment,
    segment_names,
    write_segment,
)
from prefill_cli.data.disk import read_json, writing
from prefill_cli.errors import OutputError, UsageError, first_line
from prefill_cli.matrices import to_float32
from prefill_cli.places import Place, beside, is_uri, local

SEGMENT_BYTES = 256 << 20  # of vectors in a segment that pruning writes; all of it is in memory then
ROW_BYTES = 28  # of a row beside its vector: key, check sum, time
TORN_AFTER_SEC = 86_400.0  # a temporary file of this age is nobody's any more
NIGHTS = 7  # whose hit rate is shown


@dataclass(frozen=True)
class Use:
    """What one run took from a space."""

    path: Path
    time: int
    looked_up: int
    hits: int
    rows: dict[str, bytes]  # segment → a bit for each of its rows


@dataclass
class SpaceView:
    """One way of making vectors, and what is kept of it."""

    folder: Path
    space: dict[str, Any]
    segments: list[Segment] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # file → why it is no segment
    uses: list[Use] = field(default_factory=list)
    torn: list[Path] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.segments))

    @property
    def width(self) -> int:
        return int(self.segments[0].stored.shape[1]) if self.segments else 0

    @property
    def bytes(self) -> int:
        return sum((self.folder / s.name).stat().st_size for s in self.segments)

    def last_used(self) -> list[npt.NDArray[np.int64]]:
        """Of each segment's rows, seconds since 1970."""
        found = {s.name: s.used.copy() for s in self.segments}
        for use in self.uses:
            for name, bits in use.rows.items():
                if name in found and len(bits) == -(-len(found[name]) // 8):
                    rows = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(found[name]), bitorder="little")
                    np.maximum(found[name], use.time * rows.astype(np.int64), out=found[name])
        return [found[s.name] for s in self.segments]


@contextlib.contextmanager
def mirrored(cache: Place) -> Iterator[Path]:
    """A cache's folder; of one elsewhere a copy on this machine, whose changes are made there too when the block ends."""
    if not is_uri(cache):
        yield local(cache)
        return
    folder = mirror_of(cache)
    with storage.reaching(cache, OutputError):
        before = storage.listing(cache)
        for name, size in before.items():
            path = folder / name
            if not (path.exists() and path.stat().st_size == size):
                storage.download(beside(cache, name), path)
        for name, path in _files(folder).items():  # pruned elsewhere; a young one may be on its way from a run here
            if name not in before and path.stat().st_mtime < time.time() - TORN_AFTER_SEC:
                path.unlink()
        stamps = {name: path.stat().st_mtime_ns for name, path in _files(folder).items()}
        yield folder
        after = _files(folder)
        for name, path in after.items():
            if stamps.get(name) != path.stat().st_mtime_ns:
                storage.upload(path, beside(cache, name))
        for name in before.keys() - after.keys():
            storage.delete(beside(cache, name))


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def view(cache: Path) -> list[SpaceView]:
    """All spaces of a cache.

    Raises:
        UsageError: no such folder, or none of ours.
    """
    if not cache.is_dir():
        raise UsageError(f"{cache}: no such folder")
    folders = sorted(path.parent for path in cache.glob(f"*/{SPACE}"))
    if not folders and any(cache.iterdir()):
        raise UsageError(f"{cache}: no vector cache; there is no {SPACE} in any folder of it")
    return [_space_view(folder) for folder in folders]


def _space_view(folder: Path) -> SpaceView:
    found = SpaceView(folder, read_json(folder / SPACE) or {})
    for name in segment_names(folder):
        with contextlib.suppress(FileNotFoundError):
            try:
                found.segments.append(open_segment(folder / name, folder.name))
            except (BadSegmentError, OSError) as error:
                found.bad[name] = first_line(error)
    for path in sorted((folder / USES).glob("*.arrow")):
        with contextlib.suppress(OSError, pa.ArrowException, KeyError, ValueError):  # torn: its run's uses are not known
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            told = {key.decode(): int(value) for key, value in table.schema.metadata.items()}
            rows = dict(zip(table["segment"].to_pylist(), table["rows"].to_pylist(), strict=True))
            found.uses.append(Use(path, told["time"], told["looked_up"], told["hits"], rows))
    found.torn = [path for path in folder.rglob(".*.tmp") if path.stat().st_mtime < time.time() - TORN_AFTER_SEC]
    return found


def describe(cache: Place) -> dict[str, Any]:
    """What is there, as plain values."""
    with mirrored(cache) as folder:
        spaces, now = view(folder), time.time()
        return {
            "cache": str(cache),
            "vectors": sum(space.rows for space in spaces),
            "bytes": sum(path.stat().st_size for path in _files(folder).values()),
            "free_bytes": shutil.disk_usage(folder).free,
            "spaces": [_described(space, now) for space in spaces],
        }


def _described(space: SpaceView, now: float) -> dict[str, Any]:
    ages = np.maximum(0, now - np.concatenate([np.empty(0, np.int64), *space.last_used()])) / 86_400
    last = space.uses[-NIGHTS:]
    looked_up = sum(use.looked_up for use in last)
    return {
        "space": space.folder.name,
        "made_by": space.space,
        "vectors": space.rows,
        "width": space.width,
        "bytes": space.bytes,
        "segments": len(space.segments),
        "days_since_use": {name: float(np.quantile(ages, at)) for name, at in AGES.items()} if len(ages) else None,
        "runs": len(space.uses),
        "hit_rate": sum(use.hits for use in last) / looked_up if looked_up else None,
        "left_out": space.bad,
        "torn_files": len(space.torn),
    }


AGES = {"least": 0.0, "median": 0.5, "most": 1.0}


def prune(cache: Place, older_than_sec: float | None, max_bytes: int | None) -> dict[str, Any]:
    """Remove vectors that no run used for so long, then those unused longest until the rest fits; compact what stays.

    Damaged segments, files of writers that died and what runs left word of go too. A file that is not ours stays.
    """
    with mirrored(cache) as folder:
        return {"cache": str(cache)} | _prune(folder, older_than_sec, max_bytes)


def _prune(cache: Path, older_than_sec: float | None, max_bytes: int | None) -> dict[str, Any]:
    spaces, now = view(cache), time.time()
    before = sum(space.rows for space in spaces)
    used = [np.minimum(np.concatenate([np.empty(0, np.int64), *space.last_used()]), int(now)) for space in spaces]
    keep = [now - times <= older_than_sec if older_than_sec is not None else np.ones(len(times), bool) for times in used]
    keep = [kept & _first_of_each_key(space, times) for space, times, kept in zip(spaces, used, keep, strict=True)]
    if max_bytes is not None and spaces:
        keep = _fitting(spaces, used, keep, max_bytes)
    removed: Counter[str] = Counter()
    for space, times, kept in zip(spaces, used, keep, strict=True):
        _rewrite(space, times, kept, removed)
    rows = sum(space.rows for space in view(cache)) if cache.exists() else 0
    return {"vectors_before": before, "vectors": rows, "removed_files": removed.total()}


def _first_of_each_key(space: SpaceView, times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[n] whether a row is the one of its key that stays: two runs side by side may have made it twice."""
    keys = np.concatenate([np.empty((0, 2), np.uint64), *(s.keys for s in space.segments)])
    order = np.lexsort((-times, keys[:, 1], keys[:, 0]))
    first = np.append(True, (keys[order][1:] != keys[order][:-1]).any(axis=1))[: len(keys)]
    found = np.zeros(len(keys), bool)
    found[order[first]] = True
    return found


def _fitting(
    spaces: list[SpaceView], used: list[npt.NDArray[np.int64]], keep: list[npt.NDArray[np.bool_]], max_bytes: int
) -> list[npt.NDArray[np.bool_]]:
    """`keep` less the rows that were unused longest, over all spaces, so that the kept ones have max_bytes at most."""
    times, kept = np.concatenate(used), np.concatenate(keep)
    row_bytes = [np.full(len(s), s.stored.shape[1] * s.stored.itemsize + ROW_BYTES) for v in spaces for s in v.segments]
    sizes = np.concatenate([np.empty(0, np.int64), *row_bytes]) * kept
    order = np.argsort(-times, kind="stable")
    kept[order[np.cumsum(sizes[order]) > max_bytes]] = False
    return np.split(kept, np.cumsum([len(mask) for mask in keep])[:-1])


def _rewrite(space: SpaceView, times: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_], removed: Counter[str]) -> None:
    """Kept rows as few segments in the order of their keys; then the old files go."""
    fresh: set[str] = set()
    rows = np.flatnonzero(kept)
    starts = np.cumsum([0, *map(len, space.segments)])
    if len(rows):
        keys = np.concatenate([s.keys for s in space.segments])
        rows = rows[np.lexsort((keys[rows, 1], keys[rows, 0]))]
        step = max(1, SEGMENT_BYTES // (4 * space.width))
        for start in range(0, len(rows), step):
            fresh |= _copied(space, rows[start : start + step], starts, times)
    for name in {s.name for s in space.segments} - fresh | space.bad.keys():
        _remove(space.folder / name, removed)
    for path in (*space.torn, *(use.path for use in space.uses)):
        _remove(path, removed)
    if not fresh and not any(SEGMENT_NAME.fullmatch(path.name) for path in space.folder.iterdir()):
        with contextlib.suppress(OSError):  # a run that began meanwhile may have put something there
            (space.folder / USES).rmdir()
            _remove(space.folder / SPACE, removed)
            space.folder.rmdir()


def _copied(space: SpaceView, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], times: Any) -> set[str]:
    """Name of the segment that now holds these rows, less those that are damaged."""
    of_segment = np.searchsorted(starts, rows, side="right") - 1
    vectors, keys = np.empty((len(rows), space.width), np.float32), np.empty((len(rows), 2), np.uint64)
    sound = np.zeros(len(rows), bool)
    for number in np.unique(of_segment).tolist():
        segment, at = space.segments[number], np.flatnonzero(of_segment == number)
        raw, sound[at] = segment.vectors(rows[at] - starts[number])
        vectors[at], keys[at] = to_float32(raw), segment.keys[rows[at] - starts[number]]
    if not sound.any():
        return set()
    return {write_segment(space.folder, keys[sound], compact(vectors[sound]), times[rows][sound]).name}


def _remove(path: Path, removed: Counter[str]) -> None:
    with writing(path), contextlib.suppress(FileNotFoundError):
        path.unlink()
        removed[path.suffix] += 1
