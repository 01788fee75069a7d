"""The same where there is no rename: object stores, and whatever else pyarrow.fs reaches.

    OUT/_runs/<id>/part-00000.parquet …  _rejects/…  _manifest.json  _SUCCESS
                   _run.json  _receipts/00007.json     while the run is under way
    OUT/_CURRENT     "<id> <check sum>": the run folder that readers take; one small object, written whole
    OUT/_SUCCESS     the same line, last of all

The id is a digest of the fingerprint, so the same command finds what it left. Nothing is read from a run folder before
its receipt, its sizes and at last the pointer say so. There is no lock: two runs of one job write the same bytes under
the same names, and of two different ones each is whole and the last to publish is current. The run folder that was
current before stays for readers that are in it, and for going back; older ones go.
"""

import contextlib
import hashlib
import json
import logging
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prefill_cli import storage
from prefill_cli.data.disk import from_json, to_json
from prefill_cli.data.drafts import UploadedDrafts, part_name
from prefill_cli.data.inputs import Shard
from prefill_cli.data.manifest import MANIFEST, SUCCESS, Fingerprint, is_manifest
from prefill_cli.data.results import REJECTS_FOLDER
from prefill_cli.data.staging import Outlook, Receipt, check_replaceable, refuse_unless
from prefill_cli.errors import OutputError
from prefill_cli.places import Place, Uri, beside, is_uri

log = logging.getLogger(__name__)
RUNS, CURRENT, RUN, RECEIPTS = "_runs", "_CURRENT", "_run.json", "_receipts"
ID_LENGTH = 16
LOOKS = 5  # at the pointer, where a look may meet its replacement


def pointer_to(run_id: str) -> bytes:
    """A line of constant length with its own check sum: a reader that met two versions of it notices."""
    return f"{run_id} {zlib.crc32(run_id.encode()):08x}\n".encode()


def current_run(out: Uri) -> str | None:
    """The id that the pointer names, None where there is no pointer.

    Raises:
        OutputError: there is one that is not ours, or damaged.
    """
    for _ in range(LOOKS):
        try:
            found = storage.read(beside(out, CURRENT))
        except FileNotFoundError:
            return None
        run_id = found.decode(errors="replace")[:ID_LENGTH]
        if found == pointer_to(run_id):
            return run_id
    raise OutputError(f"{beside(out, CURRENT)}: not a pointer that prefill-score wrote; name another --output")


def published_in(where: Place) -> Place:
    """The run folder that readers of a result elsewhere take; any other place is itself."""
    if not is_uri(where) or storage.is_file(where):
        return where
    run_id = None if "*" in where else current_run(where)
    return where if run_id is None else beside(where, RUNS, run_id)


class RemoteStaging:
    """The way from shards to a published result below the URI `out`; see staging.Staging, which it stands for."""

    def __init__(self, out: Uri) -> None:
        self.out = out
        self._run_id = ""
        self._sizes: dict[str, int] = {}  # of the files in the run folder, as far as this process knows
        self._receipts: dict[int, Receipt] = {}

    @property
    def result(self) -> Uri:
        found: Uri = beside(self.out, RUNS, self._run_id)
        return found

    def _of_run(self, run_id: str, *names: str) -> Uri:
        found: Uri = beside(self.out, RUNS, run_id, *names)
        return found

    @property
    def drafts(self) -> UploadedDrafts:
        return UploadedDrafts(self.result)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """No lock is needed; see above."""
        return contextlib.nullcontext()

    def totals(self) -> dict[str, Any]:
        """Of the published result."""
        with storage.reaching(self.out, OutputError):
            found: dict[str, Any] = (self._manifest(current_run(self.out) or "") or {})["totals"]
        return found

    def begin(
        self, fingerprint: Fingerprint, choices: dict[str, Any], overwrite: bool, command: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """See Staging.begin."""
        with storage.reaching(self.out, OutputError):
            return self._begin(fingerprint, choices, overwrite, command or {})

    def command(self) -> dict[str, Any] | None:
        """Of the run that did not end. See Staging.command.

        Raises:
            OutputError: there are several.
        """
        with storage.reaching(self.out, OutputError):
            files = storage.listing(self.out)
            names = [name for name in files if name.startswith(f"{RUNS}/") and name.endswith(f"/{RUN}")]
            left = [name for name in names if name.removesuffix(RUN) + SUCCESS not in files]
            if len(left) > 1:
                raise OutputError(
                    f"{beside(self.out, RUNS)}: there are leftovers of {len(left)} runs; give the command itself"
                )
            run = _read_json(beside(self.out, *left[0].split("/"))) if left else None
        found: dict[str, Any] | None = (run or {}).get("command")
        return found

    def outlook(self, fingerprint: Fingerprint, overwrite: bool) -> Outlook:
        """See Staging.outlook. The last that this object is asked, but for receipts."""
        with storage.reaching(self.out, OutputError):
            files, _, published = self._look(fingerprint, overwrite)
            if fingerprint in (published, self._finished(self._run_id, files)):
                return Outlook("unchanged")
            self._in_the_way(files, fingerprint, overwrite)
            run = self._own_run(fingerprint)
            if run is None:
                return Outlook("new")
            self._know(files)
            return Outlook("resume" if self._receipts else "new", run["choices"])

    def _look(self, fingerprint: Fingerprint, overwrite: bool) -> tuple[dict[str, int], str | None, Fingerprint | None]:
        """All files, the current run, and its fingerprint where it is whole.

        Raises:
            OutputError: the place is not ours, or holds another result that must not be replaced.
        """
        self._run_id = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:ID_LENGTH]
        files = storage.listing(self.out)
        current = current_run(self.out)
        foreign = sorted(name for name in files if not name.startswith((f"{RUNS}/", CURRENT, SUCCESS)))
        if foreign and current is None:
            raise OutputError(f"{self.out}: holds {foreign[0]}, which no run of prefill-score made; name another --output")
        published = self._finished(current, files)
        if published is not None and published != fingerprint:
            check_replaceable(self.out, overwrite, published, fingerprint)
        return files, current, published

    def _begin(
        self, fingerprint: Fingerprint, choices: dict[str, Any], overwrite: bool, command: dict[str, Any]
    ) -> dict[str, Any] | None:
        files, current, published = self._look(fingerprint, overwrite)
        if published == fingerprint:
            return None
        for run_id in self._in_the_way(files, fingerprint, overwrite):
            storage.delete_folder(self._of_run(run_id))
        if self._finished(self._run_id, files) == fingerprint:  # current some time ago, or killed before it was
            self._point(current)
            return None
        run = self._own_run(fingerprint)
        if run is None:
            run = {"fingerprint": fingerprint, "choices": choices, "command": command}
            self._write_json(RUN, run)
        self._know(files)
        kept: dict[str, Any] = run["choices"]
        return kept

    def _own_run(self, fingerprint: Fingerprint) -> dict[str, Any] | None:
        """What an earlier start of this run left word of."""
        run = _read_json(self._of_run(self._run_id, RUN))
        return run if run and run.get("fingerprint") == fingerprint and "choices" in run else None

    def _know(self, files: dict[str, int]) -> None:
        inside = f"{RUNS}/{self._run_id}/"
        self._sizes = {name.removeprefix(inside): size for name, size in files.items() if name.startswith(inside)}
        self._receipts = self._read_receipts()

    def _in_the_way(self, files: dict[str, int], fingerprint: Fingerprint, overwrite: bool) -> list[str]:
        """Ids of runs of other jobs that did not end, to be removed.

        Raises:
            OutputError: one holds something, and `overwrite` does not discard it.
        """
        found = []
        ids = {name.split("/")[1] for name in files if name.startswith(f"{RUNS}/")} - {self._run_id}
        for run_id in sorted(ids):
            if f"{RUNS}/{run_id}/{SUCCESS}" in files:  # was or is current
                continue
            if any(name.startswith(f"{RUNS}/{run_id}/{RECEIPTS}/") for name in files):
                left = (_read_json(self._of_run(run_id, RUN)) or {}).get("fingerprint", {})
                refuse_unless(overwrite, f"{self._of_run(run_id)} holds leftovers of another run", left, fingerprint)
            found.append(run_id)
        return found

    def _finished(self, run_id: str | None, files: dict[str, int]) -> Fingerprint | None:
        """The fingerprint of a run folder that is whole, None where it is not."""
        manifest = self._manifest(run_id) if run_id else None
        if manifest is None or f"{RUNS}/{run_id}/{SUCCESS}" not in files:
            return None
        whole = all(files.get(f"{RUNS}/{run_id}/{name}") == size for name, size in manifest.get("parts", {}).items())
        return manifest["fingerprint"] if whole else None

    def _manifest(self, run_id: str) -> dict[str, Any] | None:
        manifest = _read_json(self._of_run(run_id, MANIFEST))
        return manifest if is_manifest(manifest) else None

    def _read_receipts(self) -> dict[int, Receipt]:
        names = [name for name in self._sizes if name.startswith(f"{RECEIPTS}/")]
        with ThreadPoolExecutor(16) as pool:
            found = pool.map(lambda name: _read_json(self._of_run(self._run_id, name)), names)
        return {receipt["shard"]: receipt for receipt in found if receipt and isinstance(receipt.get("shard"), int)}

    def has_receipts(self) -> bool:
        """Whether any shard is done, so that there is something to lose."""
        return bool(self._receipts)

    def discard(self) -> None:
        """Remove the run folder, unless it is the published one."""
        with storage.reaching(self.result, OutputError):
            if current_run(self.out) != self._run_id:
                storage.delete_folder(self.result)

    def commit(self, shard: Shard, receipt: Receipt) -> None:
        """Write the receipt of a shard whose files were delivered."""
        with storage.reaching(self.out, OutputError):
            for what, inside in _files_of(shard).items():
                if receipt[what] is not None:
                    self._sizes[inside] = receipt[what]
                elif inside in self._sizes:  # of an attempt that was not committed
                    storage.delete(self._of_run(self._run_id, inside))
                    del self._sizes[inside]
            self._receipts[shard.index] = {"shard": shard.index, **receipt}
            self._write_json(f"{RECEIPTS}/{shard.index:05d}.json", self._receipts[shard.index])

    def receipt(self, shard: Shard) -> Receipt | None:
        """The receipt of a shard that is done, or None."""
        receipt = self._receipts.get(shard.index)
        if receipt is None:
            return None
        sizes = {what: self._sizes.get(inside) for what, inside in _files_of(shard).items()}
        return receipt if sizes.items() <= receipt.items() else None

    def publish(self, manifest: dict[str, Any]) -> None:
        """Complete the run folder, see that all of it is there, and point readers to it.

        Raises:
            OutputError: somebody removed or changed a part meanwhile.
        """
        with storage.reaching(self.out, OutputError):
            self._publish(manifest)

    def _publish(self, manifest: dict[str, Any]) -> None:
        parts = {name: size for name, size in sorted(self._sizes.items()) if name.endswith(".parquet")}
        there = storage.listing(self.result)
        if wrong := [name for name, size in parts.items() if there.get(name) != size]:
            raise OutputError(f"{self._of_run(self._run_id, wrong[0])}: gone or changed under the run; start the run again")
        before = current_run(self.out)
        self._write_json(MANIFEST, manifest | {"parts": parts})
        storage.write(self._of_run(self._run_id, SUCCESS), b"")
        self._point(before)

    def _point(self, before: str | None) -> None:
        storage.write(beside(self.out, CURRENT), pointer_to(self._run_id))
        storage.write(beside(self.out, SUCCESS), pointer_to(self._run_id))
        self._clean_up(before)

    def _clean_up(self, before: str | None) -> None:
        """Receipts, and run folders that were neither current nor are. What cannot be removed now goes next time."""
        try:
            storage.delete_folder(self._of_run(self._run_id, RECEIPTS))
            storage.delete(self._of_run(self._run_id, RUN))
            files = storage.listing(beside(self.out, RUNS))
            finished = {name.split("/")[0] for name in files if name.endswith(f"/{SUCCESS}")}
            for run_id in finished - {self._run_id, before}:
                storage.delete_folder(self._of_run(run_id))
        except OSError as error:
            log.warning("%s: the result is published, but old files stay: %s", self.out, error)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        storage.write(self._of_run(self._run_id, name), to_json(value))


def _files_of(shard: Shard) -> dict[str, str]:
    """Names inside the run folder, by how a receipt calls their sizes."""
    return {"part_bytes": part_name(shard), "rejects_bytes": f"{REJECTS_FOLDER}/{part_name(shard)}"}


def _read_json(uri: Uri) -> dict[str, Any] | None:
    try:
        return from_json(storage.read(uri))
    except FileNotFoundError:
        return None
