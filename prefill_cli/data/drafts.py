"""Where whoever does a shard leaves its files, until whoever leads the run commits them (staging.py).

Drafts are what a worker in another process or on another machine gets of a staging folder. A worker that outlives its run
writes drafts that nobody commits: the next start has a folder of its own.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from prefill_cli import storage
from prefill_cli.data.inputs import Shard
from prefill_cli.data.results import REJECTS_FOLDER
from prefill_cli.errors import OutputError
from prefill_cli.places import Uri, beside

Sizes = dict[str, int | None]  # of a shard's part and rejects, as its receipt tells them; None: no such file


def part_name(shard: Shard) -> str:
    return f"part-{shard.index:05d}.parquet"


class Drafts(Protocol):
    """A place for the files of shards. It can be pickled."""

    def part(self, shard: Shard) -> Path:
        """Where to write a shard's rows."""
        ...

    def rejects(self, shard: Shard) -> Path: ...

    def deliver(self, shard: Shard) -> Sizes:
        """Hand over what was written, and say how large it is.

        Raises:
            OutputError: it cannot be had from where the run is led.
        """
        ...


@dataclass(frozen=True)
class FolderDrafts:
    """In a folder that the leader of the run sees too."""

    folder: Path

    def part(self, shard: Shard) -> Path:
        return self.folder / part_name(shard)

    def rejects(self, shard: Shard) -> Path:
        return self.folder / REJECTS_FOLDER / part_name(shard)

    def deliver(self, shard: Shard) -> Sizes:
        return sizes_of(self.part(shard), self.rejects(shard))


@dataclass(frozen=True)
class UploadedDrafts:
    """On this machine until they are delivered, then in the run folder `run`, where a receipt makes them count."""

    run: Uri

    @cached_property
    def _here(self) -> FolderDrafts:
        return FolderDrafts(storage.scratch() / "drafts")

    def __reduce__(self) -> Any:
        return UploadedDrafts, (self.run,)

    def part(self, shard: Shard) -> Path:
        self._here.folder.mkdir(exist_ok=True)
        return self._here.part(shard)

    def rejects(self, shard: Shard) -> Path:
        return self._here.rejects(shard)

    def deliver(self, shard: Shard) -> Sizes:
        with storage.reaching(self.run, OutputError):
            sizes = self._here.deliver(shard)
            for path in (self._here.part(shard), self._here.rejects(shard)):
                if path.exists():
                    storage.upload(path, beside(self.run, *path.relative_to(self._here.folder).parts))
                    path.unlink()
        return sizes


def sizes_of(part: Path, rejects: Path) -> Sizes:
    files = {"part_bytes": part, "rejects_bytes": rejects}
    return {name: file.stat().st_size if file.exists() else None for name, file in files.items()}
