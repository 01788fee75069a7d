"""Vectors kept between runs: a prompt that was encoded last night costs a look-up.

    DIR/<space>/space.json              everything that makes a vector, in words; its digest names the folder
    DIR/<space>/<keys' digest>.arrow    a segment: sorted keys, vectors, check sums; whole or absent, never changed
    DIR/<space>/uses/<time>-….arrow     which rows of which segments a run used, for whoever prunes

A key is a 128-bit digest of the token ids. A run sees the segments that were there when it began; what it adds serves the
next one. So two runs may use one cache, and a result never depends on who was faster. In memory a key takes 20 bytes and
a bit, while it is not looked up; vectors stay in their memory-mapped files.
"""

import hashlib
import json
import logging
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli import storage
from prefill_cli.data.disk import replacing, sync_folder, write_json, writing
from prefill_cli.data.tokenization import Ids
from prefill_cli.errors import OutputError, first_line
from prefill_cli.machine import user_cache
from prefill_cli.matrices import to_float32
from prefill_cli.places import Place, Uri, beside, is_uri, local

log = logging.getLogger(__name__)
Space = dict[str, Any]
Keys = npt.NDArray[np.uint64]  # [n, 2]

FORMAT = b"prefill-score vectors 1"
SPACE, USES = "space.json", "uses"
SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.arrow")
KEY_BYTES = 16


def folder_of(cache: Path, space: Space) -> Path:
    """Where the vectors lie that are made in one way."""
    return cache / hashlib.sha256(json.dumps(space, sort_keys=True).encode()).hexdigest()[:16]


def seen_segments(cache: Place, space: Space) -> list[str]:
    """Names of the segments that a run sees which begins now, sorted."""
    if not is_uri(cache):
        return segment_names(folder_of(local(cache), space))
    with storage.reaching(cache, OutputError):
        return sorted(filter(SEGMENT_NAME.fullmatch, storage.listing(beside(cache, folder_of(Path(), space).name))))


def mirror_of(cache: Uri) -> Path:
    """Where the files of a cache elsewhere are kept on this machine: they never change, so a copy is as good."""
    return user_cache() / "vectors" / hashlib.sha256(cache.encode()).hexdigest()[:16]


def segment_names(folder: Path) -> list[str]:
    """Names of the segments that are there now, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir() if SEGMENT_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def keys_of(input_ids: Sequence[Ids]) -> Keys:
    """[n, 2] digests of prompts."""
    digests = (hashlib.blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=KEY_BYTES).digest() for ids in input_ids)
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


class BadSegmentError(Exception):
    """Why a file is no segment of its space."""


@dataclass(frozen=True)
class Segment:
    """An open one of n vectors: `keys` [n, 2] ascending, `stored` [n, d] float32 or bfloat16 as uint16, mapped."""

    name: str
    keys: Keys
    stored: npt.NDArray[Any]
    sums: npt.NDArray[np.uint32]  # [n] of a key and its vector
    used: npt.NDArray[np.int64]  # [n] seconds since 1970 when the vector was made or, as far as a compaction knew, used

    def __len__(self) -> int:
        return len(self.keys)

    def vectors(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """[m, d] as stored, and [m] which of them are as they were written."""
        raw = self.stored[rows]
        return raw, _sums(self.keys[rows], raw) == self.sums[rows]


def open_segment(path: Path, space: str, width: int | None = None) -> Segment:
    """Map a segment.

    Raises:
        FileNotFoundError. BadSegmentError: torn, damaged in what is read at once, or of another space or width.
    """
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            told = reader.schema.metadata or {}
            if told.get(b"format") != FORMAT or reader.num_record_batches != 1:
                raise BadSegmentError("no segment of a vector cache")
            if told.get(b"space") != space.encode():
                raise BadSegmentError("its vectors were made in another way")
            batch = reader.get_batch(0)
        batch.validate(full=True)
        wanted = _schema(batch.schema.field("vector").type.value_type, batch.schema.field("vector").type.list_size)
        if not batch.schema.equals(wanted) or any(column.null_count or column.offset for column in batch.columns):
            raise BadSegmentError("its columns are not those of a segment")
        key, vector, sums, used = batch.columns
        keys = np.frombuffer(key.buffers()[1], "<u8", 2 * len(batch)).reshape(-1, 2)
        stored = vector.values.to_numpy().reshape(len(batch), -1)
        segment = Segment(path.name, keys, stored, sums.to_numpy(), used.to_numpy())
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, AttributeError, KeyError, ValueError) as error:
        raise BadSegmentError(f"not readable ({first_line(error)})") from None
    if told.get(b"index_sum") != _index_sum(segment):
        raise BadSegmentError("damaged: its keys are not those that were written")
    if width is not None and stored.shape[1] != width:
        raise BadSegmentError(f"its vectors are {stored.shape[1]} wide, not {width}")
    return segment


def write_segment(folder: Path, keys: Keys, stored: npt.NDArray[Any], used: npt.NDArray[np.int64]) -> Path:
    """Write distinct `keys` [n, 2] in ascending order with their vectors [n, d].

    The name is a digest of the keys: two runs that encode the same prompts leave one segment.
    """
    name = hashlib.blake2b(keys.tobytes(), digest_size=KEY_BYTES).hexdigest() + ".arrow"
    path = folder / name
    flat = pa.array(np.ascontiguousarray(stored).ravel())
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), len(keys), [None, pa.py_buffer(keys.tobytes())]),
        pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.field("item", flat.type, nullable=False), stored.shape[1])),
        pa.array(_sums(keys, stored)),
        pa.array(used),
    ]
    segment = Segment(name, keys, stored, columns[2].to_numpy(), used)
    told = {b"format": FORMAT, b"space": folder.name.encode(), b"index_sum": _index_sum(segment)}
    schema = _schema(flat.type, stored.shape[1]).with_metadata(told)
    with replacing(path) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    sync_folder(folder)
    return path


def compact(vectors: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """[n, d] as bfloat16 (uint16) where that loses nothing, which halves the segment."""
    bits = vectors.view(np.uint32)
    return vectors if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16)


def _schema(number: pa.DataType, width: int) -> pa.Schema:
    fields = (
        ("key", pa.binary(KEY_BYTES)),
        ("vector", pa.list_(pa.field("item", number, nullable=False), width)),
        ("sum", pa.uint32()),
        ("used", pa.int64()),
    )
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def _sums(keys: Keys, stored: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """[n] CRC-32 of each key and its vector."""
    return np.array([zlib.crc32(row.data, zlib.crc32(key.data)) for key, row in zip(keys, stored, strict=True)], np.uint32)


def _index_sum(segment: Segment) -> bytes:
    """Of all that is read when a segment is opened."""
    total = zlib.crc32(segment.used.data, zlib.crc32(segment.sums.data, zlib.crc32(segment.keys.data)))
    return f"{len(segment)} {total:08x}".encode()


@dataclass(frozen=True)
class Known:
    """What a cache knows of n prompts: `vectors` [n, d] float32, not a number where `found` [n] is false."""

    keys: Keys
    found: npt.NDArray[np.bool_]
    vectors: npt.NDArray[np.float32]


class VectorCache:
    """The segments `names` of a space, as one index; and the place for new ones.

    width: of the vectors. A segment that is torn, foreign or gone is left out with a warning.

    Raises:
        OutputError: the cache's folder cannot be made or read.
    """

    def __init__(self, cache: Place, space: Space, names: Iterable[str], width: int) -> None:
        self.folder = folder_of(mirror_of(cache) if is_uri(cache) else local(cache), space)
        self._far: Uri | None = beside(cache, self.folder.name) if is_uri(cache) else None
        self._width = width
        self._began = time.time()
        self._writable = True
        with writing(self.folder.parent):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with writing(self.folder):
                (self.folder / USES).mkdir(parents=True, exist_ok=True)
            if not (self.folder / SPACE).exists():
                write_json(self.folder / SPACE, space)
        except OutputError as error:
            self._stays(error)
        if self._far and self._writable:
            names = [*names]
            self._pull(self._far, names)
        self._segments = [s for name in names if (s := self._opened(name))]
        self._starts = np.cumsum([0, *map(len, self._segments)])
        keys = np.concatenate([np.empty((0, 2), np.uint64), *(s.keys for s in self._segments)])
        order = np.argsort(keys[:, 0], kind="stable")  # of equal keys the one in the first segment comes first
        self._high, self._low = keys[order, 0], keys[order, 1]
        self._position = order.astype(np.uint32 if len(order) < 1 << 32 else np.int64)
        self._used = np.zeros(-(-len(order) // 8), np.uint8)  # a bit for each position
        self._damaged: set[str] = set()
        self.looked_up = self.hits = 0

    def __len__(self) -> int:
        return len(self._high)

    def _pull(self, far: Uri, names: list[str]) -> None:
        """Fetch the segments that are not here yet; a pruned one that is only here goes, unless a run may be at it."""
        with storage.reaching(far, OutputError):
            there = storage.listing(far)
            if SPACE not in there:
                storage.upload(self.folder / SPACE, beside(far, SPACE))
            for name in names:
                path = self.folder / name
                if name in there and not (path.exists() and path.stat().st_size == there[name]):
                    storage.download(beside(far, name), path)
        for name in segment_names(self.folder):
            if name not in there and (self.folder / name).stat().st_mtime < self._began - 86_400:
                (self.folder / name).unlink(missing_ok=True)

    def _push(self, path: Path) -> None:
        if self._far:
            with storage.reaching(self._far, OutputError):
                storage.upload(path, beside(self._far, *path.relative_to(self.folder).parts))

    def _opened(self, name: str) -> Segment | None:
        try:
            return open_segment(self.folder / name, self.folder.name, self._width)
        except FileNotFoundError:
            log.warning("%s: gone since this run first began; its vectors are made anew", self.folder / name)
        except (BadSegmentError, OSError) as error:
            log.warning("%s: left out of the cache: %s", self.folder / name, first_line(error))
        return None

    def look_up(self, input_ids: Sequence[Ids]) -> Known:
        """The vectors of n prompts that are known; see Known."""
        keys = keys_of(input_ids)
        positions = self._positions(keys)
        vectors = np.full((len(keys), self._width), np.nan, np.float32)
        found = positions >= 0
        of_segment = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(of_segment[found]).tolist():
            segment, at = self._segments[number], np.flatnonzero(of_segment == number)
            raw, sound = segment.vectors(positions[at] - self._starts[number])
            vectors[at] = to_float32(raw)
            if not sound.all():
                vectors[at[~sound]] = np.nan
                found[at[~sound]] = False
                if segment.name not in self._damaged:
                    log.warning("%s: damaged; vectors of it are made anew", self.folder / segment.name)
                    self._damaged.add(segment.name)
        hit = positions[found]
        np.bitwise_or.at(self._used, hit >> 3, np.left_shift(1, hit & 7).astype(np.uint8))
        self.looked_up += len(keys)
        self.hits += len(hit)
        return Known(keys, found, vectors)

    def _positions(self, keys: Keys) -> npt.NDArray[np.int64]:
        """[n] of keys [n, 2] among all rows of all segments, -1 for an unknown one."""
        positions, waiting = np.full(len(keys), -1, np.int64), np.arange(len(keys))
        at = np.searchsorted(self._high, keys[:, 0])
        while len(waiting) and len(self._high):
            here = np.minimum(at[waiting], len(self._high) - 1)
            candidate = (at[waiting] < len(self._high)) & (self._high[here] == keys[waiting, 0])
            same = candidate & (self._low[here] == keys[waiting, 1])
            positions[waiting[same]] = self._position[here[same]]
            waiting = waiting[candidate & ~same]  # another key with the same first half: look at the next
            at[waiting] += 1
        return positions

    def add(self, keys: Keys, vectors: npt.NDArray[np.float32]) -> None:
        """Keep vectors [n, d] of prompts for the next run; those that are not finite are left out."""
        fit = np.isfinite(vectors).all(axis=1)
        order = np.lexsort((keys[fit, 1], keys[fit, 0]))
        keys, vectors = keys[fit][order], vectors[fit][order]
        new = np.append(True, (keys[1:] != keys[:-1]).any(axis=1))[: len(keys)]
        if self._writable and new.any():
            used = np.full(int(new.sum()), int(time.time()), np.int64)
            try:
                self._push(write_segment(self.folder, np.ascontiguousarray(keys[new]), compact(vectors[new]), used))
            except OutputError as error:
                self._stays(error)

    def _stays(self, error: OutputError) -> None:
        """Told once. The run is worth more than what it would save the next one."""
        self._writable = False
        log.warning("the cache stays as it is: %s", error)

    def close(self) -> None:
        """Leave word of which vectors were used, for whoever prunes."""
        if not self.hits or not self._writable:
            return
        bits = np.unpackbits(self._used, count=len(self), bitorder="little")
        rows = [np.packbits(part, bitorder="little").tobytes() for part in np.split(bits, self._starts[1:-1])]
        table = pa.table({"segment": [s.name for s in self._segments], "rows": pa.array(rows, pa.binary())})
        told = {"time": str(int(self._began)), "looked_up": str(self.looked_up), "hits": str(self.hits)}
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}.arrow"
        schema, path = table.schema.with_metadata(told), self.folder / USES / name
        try:
            with replacing(path) as file, pa.ipc.new_file(file, schema) as writer:
                writer.write_table(table)
            self._push(path)
        except OutputError as error:
            log.warning("the cache is not told what was used: %s", error)
