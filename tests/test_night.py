"""What a nightly run meets on its machine: signals, full disks, files that go, clocks that jump, locks that stay.

Every run is a process of its own, forked where the libraries are loaded (crash_server.py), and what befalls it is in
night_deeds.py. Afterwards the old result is intact, stderr has one line, and the same command finishes the job.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, write_items
from test_crash import parts

from prefill_cli.data import locks
from prefill_cli.data.disk import read_json
from prefill_cli.data.manifest import is_finished
from prefill_cli.errors import OutputError

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
CODES = {TERM: 143, INT: 130}
NO_PROCESS = 2**22 + 5  # beyond the largest number of one
AT_ONCE = 4


class Place:
    """A folder with yesterday's result and everything that tonight's run reads."""

    def __init__(self, folder: Path, night: SimpleNamespace, items: str = "items.parquet") -> None:
        self.folder, self.out, self._night = folder, folder / "out", night
        shutil.copytree(night.before, folder, dirs_exist_ok=True)  # keeps the times of files
        self.argv = [
            "run", folder / "prompts.parquet", "-m", folder / "model", "-i", folder / items, "-k", 5, "--device", "cpu",
            "--dtype", "float32", "--quiet", "--shard-rows", 8, "--overwrite", "-o", self.out,
        ]  # fmt: skip
        self.mark = folder / "mark"

    def order(self, *deeds: list, more: tuple = (), signals: tuple = ()) -> dict:
        words = [str(word) for word in (*self.argv, *more)]
        named = [[str(x) if isinstance(x, Path) else x for x in deed] for deed in deeds]
        return {"argv": words, "deeds": named, "signals": [[str(self.mark), *signals[0]], *([None, *s] for s in signals[1:])]
                if signals else []}  # fmt: skip

    def receipts(self) -> int:
        return len(list((self.folder / ".out.staging" / "receipts").glob("*.json")))

    def check_old(self) -> None:
        assert parts(self.out) == self._night.old
        assert is_finished(self.out)

    def mend(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            source = self._night.before / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.folder / name)

    def check_new(self) -> None:
        assert parts(self.out) == self._night.new
        assert is_finished(self.out)
        assert not [name for name in os.listdir(self.folder) if name.startswith(".out")], "no staging folder, no lock"


@pytest.fixture(scope="module")
def night(tmp_path_factory, llama, server):
    """Yesterday's result with its inputs, and the bytes of tonight's."""
    from conftest import random_prompts, write_prompts

    before = tmp_path_factory.mktemp("night")
    write_prompts(before / "prompts.parquet", random_prompts(30))
    write_items(before / "items.parquet")
    np.save(before / "items.npy", np.random.default_rng(3).standard_normal((50, HIDDEN), dtype=np.float32))
    shutil.copytree(llama, before / "model")
    found = SimpleNamespace(before=before, server=server, old={}, new={})
    whole = Place(tmp_path_factory.mktemp("whole"), found)
    yesterday = Place(before, SimpleNamespace(before=tmp_path_factory.mktemp("empty")))
    ended = server.together([whole.order(), yesterday.order(more=("-k", 2))])
    assert [run["status"] for run in ended] == [0, 0], ended
    found.old, found.new = parts(before / "out"), parts(whole.out)
    return found


@pytest.fixture
def place(night, tmp_path):
    made = iter(range(100))
    return lambda **options: Place(tmp_path / f"place{next(made)}", night, **options)


def some_at_once(server, orders: list[dict], at_once: int = AT_ONCE) -> list[dict]:
    """A machine of two cores has no use for more; those that only wait can be more."""
    return [run for i in range(0, len(orders), at_once) for run in server.together(orders[i : i + at_once])]


def finish(server, places: list[Place]) -> None:
    """The same commands, left alone."""
    ended = some_at_once(server, [place.order() for place in places])
    assert [(run["status"], run["stderr"]) for run in ended] == [(0, "")] * len(places)
    for place in places:
        place.check_new()


def check_one_line(run: dict, code: int, *words: str) -> None:
    """The exit code, one sentence on stderr that says so, and nobody left behind."""
    assert run["status"] == code, run
    line = "[^\\n]*".join(("error: ", *words, ""))
    assert re.fullmatch(rf"{line}\n", run["stderr"]), run["stderr"]
    assert "Traceback" not in run["stderr"]
    assert run["left"] == []


# --- signals ----------------------------------------------------------------------------------------------------------

# Where a run is when the signals come, and the seconds within which it has to end after the last of them.
ENDS = {
    "a batch sleeps": ([["stuck", "batch", "python"]], [TERM], 10),
    "a batch is in C": ([["stuck", "batch", "c"]], [INT], 10),
    "the model is loading": ([["stuck", "load", "c"]], [TERM], 10),
    "files are hashed": ([["stuck", "hash", "python"]], [INT], 10),
    "the disk gives no bytes to hash": ([["stuck", "hash", "c"]], [TERM], 10),
    "a compiler runs": ([["compiler"]], [INT], 10),
    "a compiler runs beside the main thread": ([["compile_while_loading"]], [TERM], 10),
    "a batch sleeps, and nobody has patience": ([["stuck", "batch", "python"]], [TERM, TERM], 2),
    "the model is loading, and nobody has patience": ([["stuck", "load", "c"]], [INT, TERM], 2),
    "lists are being written": ([["slow_finish"], ["stuck", "batch", "python"]], [TERM], 10),
}


def test_a_signal_ends_a_run_within_ten_seconds_wherever_it_is_and_a_second_one_at_once(night, place, thorough):
    orders, places = [], []
    for deeds, signals, _ in ENDS.values():
        here = place()
        told = []
        for name, *rest in deeds:
            files = [here.mark, here.folder] if name.startswith("compile") else [here.mark]
            if name == "slow_finish":
                files = [here.mark, 2]
            elif len(deeds) > 1:
                files = [here.folder / "unused"]
            told.append([name, *rest, *files])
        more = ("--compile",) if ["compiler"] in deeds else ()
        orders.append(here.order(*told, more=more, signals=tuple((0.3, number) for number in signals)))
        places.append(here)
    for (what, (_, signals, within)), run, here in zip(ENDS.items(), night.server.together(orders), places, strict=True):
        check_one_line(run, CODES[signals[0]], "stopped", "the same command goes on")
        assert run["seconds"] < within, what
        here.check_old()
        if what == "lists are being written":
            assert here.receipts() == 2, "a shard that had its vectors is committed"
    finish(night.server, places if thorough else places[::3])


# --- the time limit ---------------------------------------------------------------------------------------------------


def test_a_time_limit_ends_a_run_with_124_and_one_that_is_not_reached_changes_nothing(night, place, tmp_path):
    limited, free, search = place(), place(), place()
    users = np.random.default_rng(0).standard_normal((30, HIDDEN), dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(users.ravel()), HIDDEN)
    pq.write_table(pa.table({"user_id": pa.array(range(30)), "embedding": lists}), search.folder / "users.parquet")
    search.argv = [
        "search", search.folder / "users.parquet", "-i", search.folder / "items.parquet", "-k", 5, "--device", "cpu",
        "--quiet", "--shard-rows", 8, "--overwrite", "-o", search.folder / "found",
    ]  # fmt: skip
    wrong = ["0s", "-1s", "2x", "soon", ""]
    runs = night.server.together(
        [
            limited.order(["slow_batches", 0.8], more=("--time-limit", "2s")),
            search.order(["slow_search", 4], more=("--time-limit", "2s")),
            free.order(more=("--time-limit", "1h")),
            *(limited.order(more=("--time-limit", text)) for text in wrong),
            search.order(more=("--time-limit", "soon")),
        ]
    )
    for run, here in zip(runs[:2], (limited, search), strict=True):
        check_one_line(
            run, 124, "by --time-limit; the same command goes on" if here is limited else "the same command goes on"
        )
        assert run["seconds"] < 15  # the limit, ten seconds, and some for a machine that does the others too
        here.check_old()
    assert (runs[2]["status"], runs[2]["stderr"]) == (0, "")
    free.check_new()
    for run in runs[3:]:
        check_one_line(run, 2, "--time-limit")
    finish(night.server, [limited])
    assert night.server.run(search.order()["argv"])["status"] == 0
    assert is_finished(search.folder / "found")


def test_a_time_limit_that_ends_while_libraries_load_is_one_line_too(command, place):
    here = place()
    ended = command(*here.argv, "--time-limit", "1s")
    assert (ended.returncode, ended.stdout) == (124, "")
    assert ended.stderr == "error: stopped by --time-limit; the same command goes on where this one ended\n"
    here.check_old()


# --- disks ------------------------------------------------------------------------------------------------------------


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", options, "night", folder]
    return subprocess.run(line, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path):
    """A disk of a megabyte in a folder's place."""
    assert mounted(folder, "size=1m")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, but: int) -> Path:
    """Leave so many bytes."""
    filler = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write_bytes(b"\1" * (free - but))
    return filler


def can_mount() -> bool:
    if os.geteuid() or not shutil.which("mount"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        if mounted(Path(folder), "size=64k"):
            subprocess.run(["umount", folder], check=True)
            return True
    return False


needs_mount = pytest.mark.skipif(not can_mount(), reason="this user may not mount; the limit on files is tested instead")


@needs_mount
def test_a_disk_that_fills_up_is_told_with_its_free_bytes_and_the_same_command_goes_on(night, place, tmp_path):
    (tmp_path / "place0").mkdir()
    with small_disk(tmp_path / "place0"):
        here = place()
        filler = fill(here.folder, but=20_480)
        run = night.server.run(**here.order())
        check_one_line(run, 6, str(here.folder), r"No space left on device \([\d,]+ bytes are free\); free some space")
        assert 0 < here.receipts() < 4
        here.check_old()
        filler.unlink()
        finish(night.server, [here])


def test_a_file_that_the_system_lets_grow_no_more_is_told_and_the_same_command_goes_on(night, place):
    here = place()
    run = night.server.run(**here.order(["files_of_at_most", 2_048]))
    check_one_line(run, 6, str(here.folder), "cannot be written: File too large")
    here.check_old()
    finish(night.server, [here])


def cached_rows(here: Place) -> int:
    return read_json(here.out / "_manifest.json")["totals"]["cached_rows"]


def test_a_cache_that_cannot_take_more_is_one_warning_and_serves_all_the_same(night, place, tmp_path):
    """A full disk by a limit on files, a folder that nobody may write to with vectors in it, and one without."""
    limited, read_only, empty = place(), place(), place()
    for here in (limited, read_only, empty):
        here.argv += ["--cache", here.folder / "vectors"]
    shorter = read_only.order(more=("-o", read_only.folder / "first"))
    assert night.server.run(**shorter)["status"] == 0
    space = next((read_only.folder / "vectors").iterdir())
    (space / "uses").joinpath("later").touch()
    (empty.folder / "vectors").mkdir()
    for folder in (space, space / "uses", read_only.folder / "vectors", empty.folder / "vectors"):
        folder.chmod(0o555)
    runs = night.server.together(
        [
            limited.order(["segments_of_at_most", 100]),
            read_only.order(["no_powers"]),
            empty.order(["no_powers"]),
        ]
    )
    for run, why in zip(runs, ("File too large", "Permission denied", "Permission denied"), strict=True):
        assert run["status"] == 0, run
        assert re.fullmatch(rf"\S+ warning the cache [^\n]*{why}[^\n]*\n", run["stderr"]), run["stderr"]
    assert [cached_rows(here) for here in (limited, read_only, empty)] == [0, 30, 0]
    for here in (limited, read_only, empty):
        here.check_new()


@needs_mount
def test_full_disks_of_the_cache_and_of_the_compiled_kernels_are_warnings(night, place, tmp_path):
    with small_disk(tmp_path / "full"):
        here, compiled = place(), place()
        (tmp_path / "full" / "vectors").mkdir()
        fill(tmp_path / "full", but=0)
        runs = night.server.together(
            [
                here.order(more=("--cache", tmp_path / "full" / "vectors")),
                compiled.order(["kernels_at", tmp_path / "full"], more=("--compile",)),
            ]
        )
    for run, what in zip(runs, ("the cache stays as it is", "no scan.cpp is compiled"), strict=True):
        assert run["status"] == 0, run
        assert re.fullmatch(rf"\S+ warning {what}[^\n]*No space left on device[^\n]*\n", run["stderr"]), run["stderr"]
    here.check_new()
    compiled.check_new()


def test_a_place_for_kernels_that_is_not_there_is_a_warning(night, place):
    nowhere, homeless = place(), place()
    orders = [
        nowhere.order(["kernels_at", "/proc/nowhere"], more=("--compile",)),
        homeless.order(["homeless"], more=("--compile",)),
    ]
    for run, here in zip(night.server.together(orders), (nowhere, homeless), strict=True):
        assert run["status"] == 0, run
        assert re.fullmatch(r"\S+ warning no scan\.cpp is compiled, which makes the run slower: [^\n]*\n", run["stderr"])
        here.check_new()


def test_an_output_folder_that_is_read_only_is_refused_and_stays(night, place):
    here = place()
    here.folder.chmod(0o555)
    run = night.server.run(**here.order(["no_powers"]))
    check_one_line(run, 6, r"\.out\.lock: cannot be written: Permission denied")
    here.check_old()
    here.folder.chmod(0o755)
    finish(night.server, [here])


@needs_mount
def test_an_output_disk_that_is_read_only_is_refused_and_stays(night, place, tmp_path):
    (tmp_path / "place0").mkdir()
    with small_disk(tmp_path / "place0"):
        here = place()
        subprocess.run(["mount", "-o", "remount,ro", here.folder], check=True)
        run = night.server.run(**here.order())
        check_one_line(run, 6, r"\.out\.lock: cannot be written: Read-only file system")
        here.check_old()


# --- files that change under the run ----------------------------------------------------------------------------------

INPUT, MATRIX, WEIGHTS = "prompts.parquet", "items.npy", "model/model.safetensors"
CHANGES = {  # when, what, of which file: the exit code and words of the sentence
    ("planned", "vanish", INPUT): (3, "was there when the run began"),
    ("planned", "halve", INPUT): (3, "changed while the run was reading it"),
    ("planned", "change", INPUT): (3, "changed while the run was reading it"),
    ("reading", "vanish", INPUT): (3, "was there when the run began"),
    ("reading", "halve", INPUT): (3, "prompts.parquet"),
    ("reading", "truncate", INPUT): (3, "prompts.parquet"),
    ("reading", "change", INPUT): (3, "changed while the run was reading it"),
    ("search", "vanish", MATRIX): (4, "the item file changed while the run was using it"),
    ("search", "truncate", MATRIX): (4, "the file became shorter while the run was using it"),
    ("finish", "change", MATRIX): (4, "the item file changed while the run was using it"),
    ("planned", "vanish", "items.parquet"): (0, ""),  # it was read and checked before
    ("planned", "vanish", "model"): (5, "the weights changed while the run was using them"),
    ("planned", "change", WEIGHTS): (5, "the weights changed while the run was using them"),
    ("finish", "change", WEIGHTS): (5, "the weights changed while the run was using them"),
    ("finish", "vanish", "model"): (0, ""),  # it is loaded
    ("finish", "vanish", ".out.staging"): (6, "cannot be written", "its folder was removed meanwhile"),
    ("finish", "vanish", ".out.staging/result/part-00000.parquet"): (6, "part-00000.parquet: gone or changed"),
    ("publish", "vanish", ".out.staging/result/part-00000.parquet"): (6, "part-00000.parquet: gone or changed"),
    ("publish", "vanish", "out"): (0, ""),
    ("publish", "put", "out/notes.txt"): (6, "out: holds notes.txt, which no run of prefill-score made; move it away"),
}


def test_what_changes_under_a_run_ends_it_with_the_code_of_whoever_must_act_and_never_costs_the_old_result(
    night, place, thorough
):
    places, orders = [], []
    for when, what, name in CHANGES:
        here = place(items=MATRIX if name == MATRIX else "items.parquet")
        call = 2 if when in ("search", "finish", "reading") else 1
        orders.append(here.order(["harm", when, what, here.folder / name, call]))
        places.append(here)
    unfinished = []
    for (change, expected), run, here in zip(CHANGES.items(), some_at_once(night.server, orders), places, strict=True):
        code, *words = expected
        name = change[2]
        if not code:
            assert (run["status"], run["stderr"]) == (0, ""), (change, run)
            here.check_new()
            continue
        assert run["status"] == code, (change, run)
        check_one_line(run, code, *words)
        here.check_old()
        if name == "out/notes.txt":
            assert (here.out / "notes.txt").read_text() == "another program's"
            (here.out / "notes.txt").unlink()
        elif not name.startswith(".out"):
            here.mend(name)
        if name != MATRIX:  # whose ids are row numbers
            unfinished.append(here)
    finish(night.server, unfinished if thorough else unfinished[::3])


def test_a_matrix_of_users_vectors_that_is_cut_under_a_search_is_an_error_of_the_input(night, place):
    here = place()
    np.save(here.folder / "users.npy", np.random.default_rng(0).standard_normal((3_000, HIDDEN), dtype=np.float32))
    here.argv = ["search", here.folder / "users.npy", "-i", here.folder / "items.parquet", "-k", 5, "--quiet",
                 "--shard-rows", 1_000, "-o", here.folder / "found"]  # fmt: skip
    run = night.server.run(**here.order(["harm", "reading", "truncate", here.folder / "users.npy", 2]))
    check_one_line(run, 3, r"users\.npy: the file (became shorter|changed)")


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_no_byte_and_makes_no_figure_negative(night, place):
    here = place()
    here.argv += ["--cache", here.folder / "vectors"]
    for _ in range(2):
        run = night.server.run(**here.order(["jumping_clock"]))
        assert (run["status"], run["stderr"]) == (0, "")
        here.check_new()
        totals = read_json(here.out / "_manifest.json")["totals"]
        figures = {name: value for name, value in totals.items() if isinstance(value, int | float)}
        assert min(figures.values()) >= 0, figures
        assert all(value < 100 for name, value in figures.items() if name.endswith("_sec") and "_per_" not in name), figures
        shutil.rmtree(here.out)  # the second time vectors come from the cache
    assert totals["cached_rows"] == 30


# --- locks ------------------------------------------------------------------------------------------------------------


def lock_of(folder: Path, pid: int, host: str) -> Path:
    path = folder / ".out.lock"
    path.write_text(json.dumps({"pid": pid, "host": host}))
    return path


def hold(folder: Path) -> None:
    with locks.locked(folder / "out"):
        assert read_json(folder / ".out.lock", sealed=False) == {"pid": os.getpid(), "host": socket.gethostname()}
    assert os.listdir(folder) == []


@pytest.fixture
def no_flock(monkeypatch):
    import night_deeds

    monkeypatch.setattr(locks.fcntl, "flock", locks.fcntl.flock)  # put back afterwards
    night_deeds.no_flock()


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_a_lock_that_a_dead_process_of_any_host_left_is_taken_over_and_told(tmp_path, caplog, host):
    caplog.set_level("INFO")
    lock_of(tmp_path, NO_PROCESS, host)
    hold(tmp_path)
    assert f"process {NO_PROCESS} on {host} left this lock and lives no more; taken over" in caplog.text


def test_without_flock_the_lock_of_a_dead_process_of_this_host_is_taken_over(tmp_path, caplog, no_flock):
    caplog.set_level("INFO")
    lock_of(tmp_path, NO_PROCESS, socket.gethostname())
    hold(tmp_path)
    assert caplog.text.count(f"process {NO_PROCESS} on {socket.gethostname()} left this lock and lives no more") == 1
    (tmp_path / ".out.lock").touch()  # by somebody who died before writing a name into it
    hold(tmp_path)
    hold(tmp_path)


@pytest.mark.parametrize(
    ("pid", "host", "words"),
    [
        (os.getppid(), socket.gethostname(), "is writing this output; wait for it"),
        (
            NO_PROCESS,
            "elsewhere",
            "left this lock, .* make sure that it does not, remove the file, and give the same command",
        ),
    ],
)
def test_without_flock_a_lock_that_may_be_held_is_refused_with_its_holder_and_stays(tmp_path, no_flock, pid, host, words):
    content = lock_of(tmp_path, pid, host).read_text()
    with pytest.raises(OutputError, match=f"process {pid} on {host} {words}"), locks.locked(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == [".out.lock"]
    assert (tmp_path / ".out.lock").read_text() == content


def test_the_lock_of_another_who_came_after_ours_was_removed_stays(tmp_path):
    with locks.locked(tmp_path / "out"):
        (tmp_path / ".out.lock").unlink()
        lock_of(tmp_path, 1, "elsewhere")
    assert os.listdir(tmp_path) == [".out.lock"]


def test_without_flock_no_two_hold_a_lock_whoever_dies(server, tmp_path):
    orders = [{"argv": [], "deeds": [["lock_storm", str(tmp_path), 150, seed]]} for seed in range(4)]
    assert [run["status"] for run in server.together(orders)] == [0, 0, 0, 0]
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} <= {".out.lock"}


def test_without_flock_one_of_two_runs_wins_and_the_other_names_it(night, place):
    here = place()
    runs = night.server.together([here.order(["no_flock"], ["slow_batches", 0.2])] * 2)
    won, lost = sorted(runs, key=lambda run: run["status"])
    assert (won["status"], won["stderr"]) == (0, "")
    check_one_line(lost, 6, rf"process \d+ on {socket.gethostname()} is writing this output")
    here.check_new()


# --- threads that fail ------------------------------------------------------------------------------------------------

FAILURES = {
    ("read", "RuntimeError"): (1, "a bug in prefill-score: RuntimeError in night_deeds.py"),
    ("encode", "RuntimeError"): (1, "a bug in prefill-score: RuntimeError in night_deeds.py"),
    ("finish", "RuntimeError"): (1, "a bug in prefill-score: RuntimeError in night_deeds.py"),
    ("batch", "RuntimeError"): (1, "a bug in prefill-score: RuntimeError in night_deeds.py"),
    ("read", "MemoryError"): (1, "the memory does not suffice"),
    ("encode", "MemoryError"): (1, "the memory does not suffice"),
    ("finish", "MemoryError"): (1, "the memory does not suffice"),
    ("finish", "SystemExit"): (1, "a bug in prefill-score: SystemExit"),
}


def test_a_thread_that_fails_ends_the_run_in_seconds_and_leaves_no_process(night, place, thorough):
    places = [place() for _ in FAILURES]
    orders = [
        here.order(["fail", where, kind, 1 if where == "batch" else 3], ["slow_batches", 0.2])
        for (where, kind), here in zip(FAILURES, places, strict=True)
    ]
    runs = some_at_once(night.server, orders, at_once=len(orders))
    for (what, (code, words)), run, here in zip(FAILURES.items(), runs, places, strict=True):
        assert run["status"] == code, (what, run)
        check_one_line(run, code, words)
        assert run["seconds"] < 20, what  # from the start on, beside all the others
        here.check_old()
    finish(night.server, places if thorough else places[::3])
