"""Where a result is before it is one: a lock, a folder beside the output, receipts, and the exchange at the end.

    .OUT.lock             held by the living run (locks.py); a slice of it (--shard-of) holds .OUT.slice-3-of-16.lock
    .OUT.staging/
        run.json          fingerprint, the choices a resume has to repeat, and the command (for `finish`)
        drafts/           a folder for each start: files of shards that are under way
        receipts/00007.json   shard 7 is whole and on disk; written last of its shard
        result/           becomes OUT
        previous/         OUT for an instant, only where the system cannot exchange two folders at once

Readers of OUT see the old result or the new one. A killed run leaves the staging folder; the same command goes on there.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import fnmatch
import glob
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prefill_cli.config import RunConfig, option
from prefill_cli.data.disk import check_writable, read_json, sync_folder, write_json, writing
from prefill_cli.data.drafts import FolderDrafts, Sizes, part_name, sizes_of
from prefill_cli.data.inputs import Shard
from prefill_cli.data.locks import check_free, lock_path, locked, slices_at_work, taking_turns
from prefill_cli.data.manifest import MANIFEST, SUCCESS, Fingerprint, differences, is_finished, read_manifest
from prefill_cli.data.results import REJECTS_FOLDER
from prefill_cli.errors import OutputError, UsageError
from prefill_cli.places import Place, Uri, is_uri, place, result_name

Receipt = dict[str, Any]
OUR_FILES = re.compile(rf"({REJECTS_FOLDER}/)?part-\d{{5,}}\.parquet|{MANIFEST}|{SUCCESS}")
AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2


def output_folder(config: RunConfig, suffix: str = ".topk") -> Place:
    """--output, or `<input stem><suffix>` in the current folder for a single input.

    Raises:
        UsageError: several inputs and no output; an output that is or lies in an input, or is the item file.
    """
    first = config.inputs[0]
    if config.output is not None:
        out = config.output
    elif len(config.inputs) > 1 or (glob.has_magic(first) and not os.path.exists(first)):
        raise UsageError("several inputs need a name for the result: give -o/--output")
    else:
        out = Path(result_name(place(first), suffix))
    options = ("items", "item_ids", "head", "allow", "deny", "cache")
    named = [("the input", place(text)) for text in config.inputs]
    named += [(option(name), value) for name in options if (value := getattr(config, name))]
    if isinstance(out, Uri):
        for what, where in named:
            if is_uri(where):
                _check_apart(out, what, where)
        return out
    there = [(what, str(where)) for what, where in named if not is_uri(where)]
    _check_apart_here(out, [*there, ("--model", config.model)])
    # The folder itself is exchanged, not a link to it, and what lies beside it needs its own name.
    return out.resolve() if out.is_symlink() or out.name in ("", "..") else out


def _check_apart(out: Uri, what: str, other: Uri) -> None:
    """That one is not in the other."""
    a, b = (uri.partition("?")[0].rstrip("/") + "/" for uri in (out, other))
    if b.startswith(a):
        raise UsageError(f"--output {out} is or holds {what} {other}; results go elsewhere")
    if a.startswith(b) or fnmatch.fnmatch(a.rstrip("/"), b.rstrip("/")):
        raise UsageError(f"--output {out} lies inside {what} {other}, which would be read again; results go elsewhere")


def _check_apart_here(out: Path, named: list[tuple[str, str]]) -> None:
    place = out.resolve()
    for what, text in named:
        path = Path(text).resolve()
        if os.path.exists(path) and (place == path or place in path.parents):
            raise UsageError(f"--output {out} is or holds {what} {text}; results go elsewhere")
        matches = glob.has_magic(text) and fnmatch.fnmatch(str(place), os.path.realpath(text))
        inside = os.path.isdir(path) and path in place.parents
        if what in ("the input", "--items", "--cache") and (matches or inside):
            raise UsageError(f"--output {out} lies inside {what} {text}, which would be read again; results go elsewhere")


@dataclass(frozen=True)
class Outlook:
    """What a run would find at its output: nothing in the way, shards of its own that are done, or its whole result."""

    state: Literal["new", "resume", "unchanged"]
    choices: dict[str, Any] = field(default_factory=dict)  # that a resume repeats


class Staging:
    """The way from shards to a published folder OUT. Use inside `locked`.

    part: the name of a slice of the run, several of which are at work at once and none of which publishes.
    """

    def __init__(self, out: Path, part: str = "") -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.staging"
        self.result = self.folder / "result"
        self._part = part
        self._receipts = self.folder / "receipts"
        self._previous = self.folder / "previous"
        self._drafts = self.folder / "drafts"
        # Workers of a start that was killed may live a little longer; what they write is found by nobody.
        self.drafts = FolderDrafts(self._drafts / f"{part or 'whole'}.{secrets.token_hex(4)}")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """See the function."""
        return locked(self.out, self._part)

    def totals(self) -> dict[str, Any]:
        """Of the published result."""
        found: dict[str, Any] = (read_manifest(self.out) or {})["totals"]
        return found

    def begin(
        self, fingerprint: Fingerprint, choices: dict[str, Any], overwrite: bool, command: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Take up leftovers of the same run or start anew; returns the choices to run with, None if nothing is left to do.

        `choices` are those that a resume must repeat (the token budget); what the first start chose is returned. command:
        kept for `finish`.

        Raises:
            OutputError: OUT is not ours, or holds (or was to hold) the result of another run and `overwrite` is not given.
        """
        if not self._part:
            return self._begin(fingerprint, choices, overwrite, command or {})
        with taking_turns(self.out):
            return self._begin(fingerprint, choices, overwrite, command or {})

    def _begin(
        self, fingerprint: Fingerprint, choices: dict[str, Any], overwrite: bool, command: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self._previous.exists() and not self.out.exists():  # killed between the two renames
            with writing(self.out):
                self._previous.rename(self.out)
        run = self._run()
        if run and run["fingerprint"] == fingerprint == self._published():  # killed after the exchange
            self.discard()
        if self._published() == fingerprint:
            with contextlib.suppress(OSError):  # killed just before the last step: empty; anything else stays
                self.folder.rmdir()
            return None
        self._check_place(fingerprint, overwrite)
        return self._take_up(run, {"fingerprint": fingerprint, "choices": choices, "command": command}, overwrite)

    def command(self) -> dict[str, Any] | None:
        """What the leftovers are to become, as `begin` was told; None where there are none."""
        found: dict[str, Any] | None = (self._run() or {}).get("command")
        return found

    def outlook(self, fingerprint: Fingerprint, overwrite: bool) -> Outlook:
        """What `begin` would come to; nothing is touched.

        Raises:
            OutputError: what `begin` would raise.
        """
        check_writable(self.out.parent)
        check_free(lock_path(self.out))
        here = self.out if self.out.exists() else self._previous
        if is_finished(here) and (read_manifest(here) or {}).get("fingerprint") == fingerprint:
            return Outlook("unchanged")
        self._check_place(fingerprint, overwrite)
        run = self._run()
        if not self._is_own(run, fingerprint, overwrite) or run is None:
            return Outlook("new")
        return Outlook("resume" if self.has_receipts() else "new", run["choices"])

    def _run(self) -> dict[str, Any] | None:
        """What the leftovers are of; None where there are none or nothing tells."""
        run = read_json(self.folder / "run.json")
        return run if run and run.keys() >= {"fingerprint", "choices"} else None

    def _published(self) -> Fingerprint | None:
        return (read_manifest(self.out) or {}).get("fingerprint") if is_finished(self.out) else None

    def _check_place(self, fingerprint: Fingerprint, overwrite: bool) -> None:
        """That OUT may be replaced."""
        self._check_ours()
        if (old := self._published()) is not None:
            check_replaceable(self.out, overwrite, old, fingerprint)

    def _check_ours(self) -> None:
        """That OUT is absent, empty, or made by a run of ours."""
        if self.out.is_dir() and read_manifest(self.out) is None and any(self.out.iterdir()):
            raise OutputError(
                f"{self.out}: the folder is not empty and no run of prefill-score made it; name another --output"
            )
        if self.out.is_dir() and (foreign := _foreign_file(self.out)):
            raise OutputError(
                f"{self.out}: holds {foreign}, which no run of prefill-score made; move it away and give the same command "
                "again"
            )
        if self.out.is_mount():
            raise OutputError(f"{self.out}: a mount point cannot be exchanged for the result; name a folder inside it")
        if self.out.exists() and not self.out.is_dir():
            raise OutputError(f"{self.out}: there is a file of that name; name another --output")

    def _take_up(self, run: dict[str, Any] | None, new: dict[str, Any], overwrite: bool) -> dict[str, Any]:
        """The staging folder, with what an earlier start of the same run left in it or empty; returns the choices."""
        if not self._is_own(run, new["fingerprint"], overwrite):
            if self.folder.exists():
                if others := slices_at_work(self.out, self._part):
                    raise OutputError(f"{self.folder}: {', '.join(others)} of another run are being done; wait for them")
                self.discard()
            run = None
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            if run is None:
                run = new
                write_json(self.folder / "run.json", run)
            self._receipts.mkdir(exist_ok=True)
            self.result.mkdir(exist_ok=True)
            self._drafts.mkdir(exist_ok=True)
            for left in self._drafts.glob(f"{self._part}.*" if self._part else "*"):
                shutil.rmtree(left, ignore_errors=True)
            self.drafts.folder.mkdir()
            for torn in self.folder.rglob(".*.tmp") if not self._part else ():  # another slice may be writing one
                torn.unlink()
        kept: dict[str, Any] = run["choices"]
        return kept

    def _is_own(self, run: dict[str, Any] | None, fingerprint: Fingerprint, overwrite: bool) -> bool:
        """Whether the leftovers are of this very run.

        Raises:
            OutputError: they are not, and something would be lost.
        """
        if run is None:
            if self.folder.exists():
                self._check_unnamed(overwrite)
            return False
        if run["fingerprint"] != fingerprint:
            what = f"{self.folder} holds leftovers of another run"
            refuse_unless(overwrite or not self.has_receipts(), what, run["fingerprint"], fingerprint)
            return False
        # Complete, or what was OUT until a run was killed after the exchange, whose receipts tell of other files.
        return not is_finished(self.result) or (read_manifest(self.result) or {}).get("fingerprint") == fingerprint

    def _check_unnamed(self, overwrite: bool) -> None:
        """That a staging folder without a readable run.json may be removed."""
        ours = {"run.json", *(p.name for p in (self._receipts, self.result, self._previous, self._drafts))}
        if not self.folder.is_dir() or any(p.name not in ours and p.suffix != ".tmp" for p in self.folder.iterdir()):
            raise OutputError(f"{self.folder}: not a staging folder of prefill-score, but in its place; move it away")
        if self.has_receipts() and not overwrite:
            raise OutputError(f"{self.folder} holds leftovers of a run that its run.json does not name. Give --overwrite")

    def has_receipts(self) -> bool:
        """Whether any shard is done, so that there is something to lose."""
        return any(self._receipts.glob("*.json"))

    def discard(self) -> None:
        """Remove the staging folder, run.json last: killed half-way, it is still known as ours and its receipts are gone."""
        if not self.folder.exists():
            return
        with writing(self.folder):
            for part in (self._receipts, self._drafts, self.result, self._previous):
                shutil.rmtree(part, ignore_errors=not part.exists())
            (self.folder / "run.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    def part(self, shard: Shard) -> Path:
        return self.result / part_name(shard)

    def rejects(self, shard: Shard) -> Path:
        return self.result / REJECTS_FOLDER / part_name(shard)

    def commit(self, shard: Shard, receipt: Receipt) -> None:
        """Declare a shard done: its files come from the drafts to their places on disk, then the receipt says so."""
        _move(self.drafts.part(shard), self.part(shard), receipt["part_bytes"])
        _move(self.drafts.rejects(shard), self.rejects(shard), receipt["rejects_bytes"])
        if not self._sizes(shard).items() <= receipt.items():
            raise OutputError(f"{self.part(shard)}: gone or changed under the run; give the same command again")
        write_json(self._receipts / f"{shard.index:05d}.json", {"shard": shard.index, **receipt})

    def receipt(self, shard: Shard) -> Receipt | None:
        """The receipt of a shard that is done, or None."""
        receipt = read_json(self._receipts / f"{shard.index:05d}.json")
        return receipt if receipt and self._sizes(shard).items() <= receipt.items() else None

    def _sizes(self, shard: Shard) -> Sizes:
        """What the files of a shard that is done must still be."""
        return sizes_of(self.part(shard), self.rejects(shard))

    def _check_done(self, manifest: dict[str, Any]) -> None:
        """That every shard's files are still what its receipt says."""
        done = [Shard(int(path.stem), 0, 0) for path in sorted(self._receipts.glob("*.json"))]
        wrong = [self.part(shard) for shard in done if self.receipt(shard) is None]
        if wrong or len(done) != manifest["totals"]["shards"]:
            what = wrong[0] if wrong else self.folder
            raise OutputError(f"{what}: gone or changed under the run; give the same command again")

    def publish(self, manifest: dict[str, Any]) -> None:
        """Complete the result, then exchange it with OUT.

        Raises:
            OutputError: somebody removed or changed a part meanwhile, or the exchange failed; what is done is kept.
        """
        self._check_done(manifest)
        parts = {p.relative_to(self.result).as_posix(): p.stat().st_size for p in sorted(self.result.rglob("*.parquet"))}
        write_json(self.result / MANIFEST, manifest | {"parts": parts})
        with writing(self.out):
            (self.result / SUCCESS).touch()
            sync_folder(self.result)
            self._check_ours()  # a run takes hours, in which somebody may have put something there
            if self.out.exists() and any(self.out.iterdir()):
                if not exchange(self.result, self.out):
                    self.out.rename(self._previous)
                    self.result.rename(self.out)
            else:
                self.result.rename(self.out)
            sync_folder(self.out.parent)
        self.discard()


def _move(draft: Path, final: Path, size: int | None) -> None:
    """A file of a shard to its place, for good. size: None where there is none."""
    with writing(final):
        if size is None:  # an attempt that was not committed may have had one
            final.unlink(missing_ok=True)
            return
        final.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # which its size tells
            draft.replace(final)
        sync_folder(final.parent)


def _foreign_file(folder: Path) -> str | None:
    """One file in a result that no run writes; those with a dot belong to systems and editors."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not (hidden or path.is_dir() or OUR_FILES.fullmatch(name.as_posix())):
            return str(name)
    return None


def check_replaceable(out: Place, overwrite: bool, old: Fingerprint, new: Fingerprint) -> None:
    """That the result of one run may be replaced by that of another.

    Raises:
        OutputError: `overwrite` is not given, or one is lists and the other vectors.
    """
    what, kinds = f"{out} holds the result of another run", [found.get("result", "lists") for found in (old, new)]
    if kinds[0] != kinds[1]:  # an --overwrite that a file of options holds was not meant for this
        raise OutputError(f"{what}, which is {kinds[0]}, and this command makes {kinds[1]}; name another --output")
    refuse_unless(overwrite, what, old, new)


def refuse_unless(overwrite: bool, what: str, old: Fingerprint, new: Fingerprint) -> None:
    if not overwrite:
        raise OutputError(f"{what}; different: {differences(old, new)}. Give --overwrite to replace it")


def exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one atomic step; False where the system or file system cannot.

    Linux: renameat2(2) with RENAME_EXCHANGE. macOS: renamex_np(2) with RENAME_SWAP.
    """
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    names: tuple[Any, ...] = (os.fsencode(a), os.fsencode(b))
    call: Callable[..., int] | None
    if sys.platform == "darwin":
        call, arguments = getattr(libc, "renamex_np", None), (*names, RENAME_SWAP)
    else:
        call, arguments = getattr(libc, "renameat2", None), (AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    if call is None:
        return False
    if call(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))
