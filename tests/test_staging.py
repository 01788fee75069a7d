"""Locks, receipts and the exchange: what a reader of OUT sees, whatever happens to the writer."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, Watcher, random_prompts, write_prompts

from prefill_cli import pipeline
from prefill_cli.data import staging as staging_module
from prefill_cli.data.disk import read_json, replacing, write_json
from prefill_cli.data.inputs import Shard
from prefill_cli.data.locks import locked
from prefill_cli.data.manifest import MANIFEST, SUCCESS, is_finished
from prefill_cli.data.staging import Staging, exchange
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import OutputError, UsageError

SHARDS = [Shard(i, i, 1) for i in range(3)]


def manifest_of(name: str) -> dict[str, object]:
    rest = {key: {} for key in ("options", "inputs", "model", "items")}
    return rest | {"made_by": "prefill-score", "fingerprint": {"name": name}, "totals": {"shards": len(SHARDS)}}


def write(out: Path, name: str, *, overwrite: bool = True, shards: list[Shard] = SHARDS, publish: bool = True) -> list[int]:
    """A whole run whose parts hold `name`; returns the shards that it had to do."""
    staging, done = Staging(out), []
    if staging.begin({"name": name}, {}, overwrite) is None:
        return []
    for shard in shards:
        if staging.receipt(shard) is None:
            with replacing(staging.drafts.part(shard)) as file:
                file.write(name.encode())
            staging.commit(shard, staging.drafts.deliver(shard) | {"rows": 1})
            done.append(shard.index)
    if publish:
        staging.publish(manifest_of(name))
    return done


def read(out: Path) -> str:
    """What a complete result holds; fails where it is not complete or a mix."""
    names = set(os.listdir(out))
    assert names == {SUCCESS, MANIFEST, *(f"part-{s.index:05d}.parquet" for s in SHARDS)}
    held = {p.read_text() for p in out.glob("part-*")} | {read_json(out / MANIFEST)["fingerprint"]["name"]}
    assert len(held) == 1
    return held.pop()


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def staged(job) -> Path:
    return job.out.with_name(".out.staging")


def leave(job, **options: object) -> None:
    """Leftovers of a run of five shards, of which two are done."""

    def engine(job, shards, progress):
        from prefill_cli.engines.local import run_shards

        yield from itertools.islice(run_shards(job, shards, progress), 2)
        raise KeyboardInterrupt

    from prefill_cli import pipeline

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job.config(**({"shard_rows": 6} | options)), engine, _Silent())


class _Silent:
    def start(self, rows: int, done: int) -> None: ...

    def advance(self, rows: int, tokens: int) -> None: ...


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_while_the_first_lives_and_takes_over_when_it_is_killed(tmp_path):
    out, lock = tmp_path / "out", tmp_path / ".out.lock"
    code = "import sys, time, pathlib\nfrom prefill_cli.data.locks import locked\nwith locked(pathlib.Path(sys.argv[1])):\n"
    code += "    print('held', flush=True)\n    time.sleep(100)\n"
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE, text=True, cwd=PROJECT) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=rf"process {first.pid} on \S+ is writing this output"), locked(out):
            pass
        assert lock.exists(), "the refused one leaves the lock to its holder"
        first.kill()
        first.wait()
    assert lock.exists()
    with locked(out):
        assert read_json(lock, sealed=False)["pid"] == os.getpid()
        with pytest.raises(OutputError, match=f"process {os.getpid()} "), locked(out):
            pass
    assert not lock.exists()


def test_the_lock_goes_when_its_block_fails(tmp_path):
    with pytest.raises(ValueError, match="x"), locked(tmp_path / "out"):
        raise ValueError("x")
    with locked(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == []


def test_only_one_of_many_writers_holds_the_lock(tmp_path):
    inside, refused, worst = [], [], []

    def write_once() -> None:
        for _ in range(100):
            try:
                with locked(tmp_path / "out"):
                    inside.append(1)
                    worst.append(len(inside))
                    inside.pop()
            except OutputError:
                refused.append(1)

    threads = [threading.Thread(target=write_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst) == 1
    assert len(worst) + len(refused) == 400


def test_a_run_is_refused_while_another_writes_the_same_output(job):
    with locked(job.out), pytest.raises(OutputError, match=r"\.out\.lock: process \d+ on"):
        job.run()
    assert job.run()["status"] == "done"
    assert sorted(p.name for p in job.out.parent.iterdir() if p.name.startswith(".")) == []


# --- the exchange -----------------------------------------------------------------------------------------------------


def test_a_reader_never_sees_less_than_a_whole_result(tmp_path):
    out, stop, faults, seen = tmp_path / "out", threading.Event(), [], set()
    write(out, "first")

    def look() -> None:
        while not stop.is_set():
            try:
                folder = os.open(out, os.O_RDONLY)
            except FileNotFoundError:
                faults.append("absent")
                continue
            names = set(os.listdir(folder))
            # What was listed while it was no longer OUT is not ours to judge: it is being removed.
            if os.stat(out).st_ino == os.fstat(folder).st_ino:
                seen.add(os.fstat(folder).st_ino)
                if names != {SUCCESS, MANIFEST, *(f"part-{s.index:05d}.parquet" for s in SHARDS)}:
                    faults.append(names)
            os.close(folder)

    reader = threading.Thread(target=look)
    reader.start()
    for i in range(60):
        write(out, f"result {i}")
    stop.set()
    reader.join()
    assert not faults
    assert len(seen) > 1
    assert read(out) == "result 59"


def test_exchange_swaps_two_folders_and_says_so(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "a", tmp_path / "b") is True
    assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["b"], ["a"])
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "gone")


def test_two_renames_serve_where_the_system_cannot_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(staging_module, "exchange", lambda a, b: False)
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new")
    assert read(tmp_path / "out") == "new"
    assert os.listdir(tmp_path) == ["out"]


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("has_exchange", [True, False])
def test_killed_before_any_step_the_old_or_new_result_stands_and_the_same_command_finishes(
    tmp_path, monkeypatch, has_exchange
):
    """From the n-th change on nothing reaches the disk any more, as after SIGKILL; for every n."""
    steps, limit = itertools.count(), [0]

    def mortal(call):
        def step(*args, **kwargs):
            if next(steps) >= limit[0]:
                raise _Killed
            return call(*args, **kwargs)

        return step

    absent = 0
    for limit[0] in itertools.count():
        out = tmp_path / f"{limit[0]}" / "out"
        out.parent.mkdir()
        write(out, "old")
        write(out, "new", publish=False, shards=SHARDS[:1])
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, mortal(getattr(os, name)))
            patch.setattr(staging_module, "exchange", mortal(exchange if has_exchange else lambda a, b: False))
            steps = itertools.count()
            try:
                write(out, "new")
            except _Killed:
                survived = False
            else:
                survived = True
        if has_exchange or out.exists():
            assert read(out) in ("old", "new")
        else:
            absent += 1
            write(out, "new", publish=False)
            assert read(out) == "old", "what stood there is put back before anything else"
        write(out, "new")
        assert read(out) == "new"
        assert os.listdir(out.parent) == ["out"]
        if survived:
            break
    assert limit[0] > 20
    assert absent == (0 if has_exchange else 1)


def test_what_was_exchanged_out_is_never_taken_for_new_parts(tmp_path, monkeypatch):
    """Killed after the exchange, then OUT was removed by hand: the receipts are there, but the parts are yesterday's."""
    out = tmp_path / "out"
    write(out, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", lambda self: (_ for _ in ()).throw(_Killed))
        with pytest.raises(_Killed):
            write(out, "new")
    assert read(out) == "new"
    shutil.rmtree(out)
    assert write(out, "new") == [0, 1, 2]
    assert read(out) == "new"


def test_a_foreign_folder_that_appeared_during_the_run_is_not_touched(tmp_path):
    out = tmp_path / "out"
    write(out, "new", publish=False)
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    staging = Staging(out)
    with pytest.raises(OutputError, match="no run of prefill-score made it"):
        staging.publish(manifest_of("new"))
    assert snapshot(out).keys() == {str(out / "thesis.txt")}
    (out / "thesis.txt").unlink()
    assert write(out, "new") == []
    assert read(out) == "new"


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_a_full_disk_leaves_the_old_result_and_the_same_command_goes_on(tmp_path, monkeypatch, call):
    """The n-th write fails, for every n."""
    for n in itertools.count():
        out = tmp_path / f"{n}" / "out"
        out.parent.mkdir()
        write(out, "old")
        left = itertools.count(n, -1)

        real = getattr(os, call)

        def fail(*args, real=real, left=left, **kwargs):
            if next(left) == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(staging_module, "exchange", lambda a, b: False)
            patch.setattr(os, call, fail)
            try:
                write(out, "new")
                break
            except OutputError as error:
                assert "No space left on device" in str(error)
                assert "bytes are free" in str(error)
        assert not out.exists() or read(out) in ("old", "new")
        write(out, "new")
        assert read(out) == "new"
    assert n > 1


# --- what stands at OUT -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_no_run_made_is_never_touched(job, overwrite):
    job.out.mkdir()
    (job.out / "thesis.txt").write_text("years")
    before = snapshot(job.out)
    with pytest.raises(OutputError, match=r"out: the folder is not empty and no run of prefill-score made it"):
        job.run(overwrite=overwrite)
    assert snapshot(job.out) == before
    assert not staged(job).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_place_of_the_result_is_never_touched(job, overwrite):
    job.out.write_text("mine")
    with pytest.raises(OutputError, match=r"out: there is a file of that name"):
        job.run(overwrite=overwrite)
    assert job.out.read_text() == "mine"


def test_an_empty_folder_is_used(job):
    job.out.mkdir()
    job.run()
    assert pq.read_table(job.out).num_rows == 30


def test_folders_above_the_result_are_made(job, tmp_path):
    job.run(output=tmp_path / "a" / "b" / "out")
    assert os.listdir(tmp_path / "a" / "b") == ["out"]


@pytest.mark.parametrize("parent", ["in/prompts.parquet", "/proc"])
def test_a_parent_that_cannot_be_written_is_an_error_of_the_output(job, tmp_path, parent):
    with pytest.raises(OutputError, match="cannot be written"):
        job.run(output=tmp_path / parent / "x" / "out")


def test_a_link_to_a_folder_stays_a_link_and_the_folder_is_replaced(job, tmp_path):
    (tmp_path / "disk").mkdir()
    job.out.symlink_to(tmp_path / "disk" / "tonight")
    job.run()
    job.run(top_k=3, overwrite=True)
    assert job.out.is_symlink()
    assert len(pq.read_table(job.out)["item_ids"][0]) == 3
    assert os.listdir(tmp_path / "disk") == ["tonight"]


def test_the_current_folder_can_be_the_result(job, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    job.run(output=Path())
    assert is_finished(tmp_path / "empty")
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("in", "is or holds the input"),
        ("in/out", "inside the input"),
        (".", "is or holds the input"),
        ("in/prompts.parquet", "inside the input"),
        ("items.parquet", "is or holds --items"),
        ("catalogue/out", "lies inside --items"),
        ("catalogue", "is or holds --items"),
    ],
)
def test_an_output_that_is_an_input_or_the_items_is_refused(job, tmp_path, output, message):
    (tmp_path / "catalogue").mkdir()
    items = tmp_path / ("catalogue" if output.startswith("catalogue") else "items.parquet")
    with pytest.raises(UsageError, match=message):
        job.run(output=tmp_path / output, inputs=(str(tmp_path / "in"),), items=items)


def test_without_an_output_the_result_is_named_after_the_one_input(job):
    job.run(output=None)
    assert is_finished(Path("prompts.topk"))
    for inputs in ((str(job.inputs), "other.parquet"), (str(job.inputs.parent / "*.parquet"),)):
        with pytest.raises(UsageError, match="give -o/--output"):
            job.run(output=None, inputs=inputs)


# --- the same command again, or another -------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_command_over_a_finished_result_changes_nothing(job, overwrite):
    first = job.run()
    before, folder = snapshot(job.out), job.out.stat().st_mtime_ns
    again = job.run(overwrite=overwrite)
    assert again == first | {"status": "unchanged"}
    assert (snapshot(job.out), job.out.stat().st_mtime_ns) == (before, folder)


def test_options_of_speed_and_display_do_not_make_another_run(job):
    job.run()
    again = job.run(max_batch_tokens=33, max_rejects="50%", json=True, quiet=True, log_format="json", offline=True)
    assert again["status"] == "unchanged"


def test_a_result_that_was_moved_is_told_under_its_new_name(job, tmp_path):
    job.run()
    job.out.rename(tmp_path / "moved")
    again = job.run(output=tmp_path / "moved")
    assert (again["status"], again["output"]) == ("unchanged", str(tmp_path / "moved"))


def other_items(job, tmp_path):
    from conftest import write_items

    return {"items": write_items(tmp_path / "other.parquet", n=49)}


def other_inputs(job, tmp_path):
    return {"inputs": (str(write_prompts(tmp_path / "in2" / "prompts.parquet", random_prompts(29))),)}


def other_model(job, tmp_path):
    shutil.copytree(job.model, tmp_path / "model")
    from safetensors.numpy import load_file, save_file

    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    return {"model": str(tmp_path / "model")}


def deny_list(job, tmp_path):
    (tmp_path / "deny.txt").write_text("i3\n")
    return {"deny": tmp_path / "deny.txt"}


DIFFERENT = {  # what another run differs in → what the refusal names, and nothing else
    "top_k (5, now 6)": lambda *_: {"top_k": 6},
    "prefix (none, now w1 )": lambda *_: {"prefix": "w1 "},
    "dtype (float32, now bfloat16)": lambda *_: {"dtype": "bfloat16"},
    "shard_rows (6, now 7)": lambda *_: {"shard_rows": 7},
    "keep_columns (none, now ['prompt'])": lambda *_: {"keep_columns": ("prompt",)},
    "score (dot, now cosine)": lambda *_: {"score": "cosine"},
    "pooling (last, now mean)": lambda *_: {"pooling": "mean"},
    "items": other_items,
    "inputs": other_inputs,
    "model_weights": other_model,
    "allow_and_deny": deny_list,
}


@pytest.mark.parametrize("named", DIFFERENT)
def test_another_run_is_refused_by_a_result_and_by_leftovers_and_told_what_differs(job, tmp_path, named):
    given = {"shard_rows": 6} | DIFFERENT[named](job, tmp_path)
    job.run(shard_rows=6)
    before = snapshot(job.out)
    with pytest.raises(OutputError) as refusal:
        job.run(**given)
    assert str(refusal.value).endswith(
        f"out holds the result of another run; different: {named}. Give --overwrite to replace it"
    )
    assert snapshot(job.out) == before
    shutil.rmtree(job.out)
    leave(job)
    with pytest.raises(OutputError) as refusal:
        job.run(**given)
    assert f"holds leftovers of another run; different: {named}. Give --overwrite" in str(refusal.value)
    assert job.run(shard_rows=6)["status"] == "done", "the refusal left the leftovers as they were"


def test_all_that_differs_is_named(job):
    job.run()
    with pytest.raises(OutputError, match=r"different: layout \(nested, now long\), top_k \(5, now 2\)\. Give"):
        job.run(top_k=2, layout="long")


@pytest.mark.parametrize("over", ["a result", "leftovers", "both"])
def test_overwrite_replaces_what_another_run_left(job, over):
    if over != "leftovers":
        job.run()
    if over != "a result":
        leave(job, top_k=4, overwrite=True)
    assert job.run(top_k=3, overwrite=True)["status"] == "done"
    assert len(pq.read_table(job.out)["item_ids"][0]) == 3
    assert not staged(job).exists()


def test_the_old_result_stands_until_the_new_one_is_whole(job):
    job.run()
    before = snapshot(job.out)
    leave(job, top_k=4, overwrite=True)
    assert snapshot(job.out) == before


def test_leftovers_without_any_receipt_never_block(job):
    leave(job, top_k=4)
    for receipt in (staged(job) / "receipts").iterdir():
        receipt.unlink()
    assert job.run()["status"] == "done"


def test_a_run_that_fails_before_its_first_shard_leaves_nothing(job, tmp_path):
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UsageError, match="leaves no room"):
        job.run(max_length=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", ["", '{"fingerp', "[]", "{}", '{"fingerprint": {}}'])
def test_receipts_of_which_nothing_tells_the_run_are_not_trusted(job, content):
    leave(job)
    (staged(job) / "run.json").write_text(content)
    with pytest.raises(OutputError, match=r"leftovers of a run that its run\.json does not name\. Give --overwrite"):
        job.run(shard_rows=6)
    totals = job.run(shard_rows=6, overwrite=True)
    assert (totals["status"], totals["rows_out"]) == ("done", 30)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_in_the_place_of_the_staging_folder_is_not_touched(job, overwrite):
    staged(job).mkdir()
    (staged(job) / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match=r"\.out\.staging: not a staging folder of prefill-score"):
        job.run(overwrite=overwrite)
    assert os.listdir(staged(job)) == ["thesis.txt"]


def test_a_foreign_file_in_the_place_of_the_staging_folder_is_not_touched(job):
    staged(job).write_text("years")
    with pytest.raises(OutputError, match=r"\.out\.staging: not a staging folder of prefill-score"):
        job.run(overwrite=True)
    assert staged(job).read_text() == "years"


# --- receipts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["part gone", "part shortened", "receipt torn", "receipt empty", "receipt gone"])
def test_a_shard_whose_part_or_receipt_is_not_whole_is_done_again(tmp_path, harm):
    out = tmp_path / "out"
    write(out, "new", publish=False)
    staging = Staging(out)
    part, receipt = staging.part(SHARDS[1]), staging.folder / "receipts" / "00001.json"
    if harm == "part shortened":
        part.write_bytes(b"ne")
    elif harm.startswith("receipt t"):
        receipt.write_text(receipt.read_text()[:10])
    elif harm.startswith("receipt e"):
        receipt.write_text("{}")
    else:
        (part if harm.startswith("part") else receipt).unlink()
    assert write(out, "new") == [1]
    assert read(out) == "new"


def test_a_shard_whose_rejects_are_gone_is_done_again(job, tmp_path):
    inputs = (str(write_prompts(tmp_path / "bad.parquet", [*random_prompts(12), None, *random_prompts(17)])),)
    leave(job, inputs=inputs, shard_rows=10, max_rejects="50%")
    shutil.rmtree(staged(job) / "result" / "_rejects")
    totals = job.run(inputs=inputs, shard_rows=10, max_rejects="50%")
    assert totals["rejects"] == pq.read_table(job.out / "_rejects").num_rows == 1


def test_files_that_were_being_written_are_removed_by_the_next_start(tmp_path):
    out = tmp_path / "out"
    write(out, "new", publish=False, shards=SHARDS[:2])
    staging = Staging(out)
    for folder in (staging.folder, staging.result, staging.folder / "receipts"):
        (folder / ".part-00002.parquet.tmp").write_bytes(b"half")
    assert write(out, "new") == [2]
    assert read(out) == "new"


def test_choices_of_the_first_start_are_those_of_a_resume(tmp_path):
    staging = Staging(tmp_path / "out")
    assert staging.begin({"name": "a"}, {"max_batch_tokens": 64}, False) == {"max_batch_tokens": 64}
    assert staging.begin({"name": "a"}, {"max_batch_tokens": 99}, False) == {"max_batch_tokens": 64}
    assert staging.begin({"name": "b"}, {"max_batch_tokens": 99}, False) == {"max_batch_tokens": 99}


# --- small files ------------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        assert not path.exists()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    write_json(path, {"a": 1})
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert read_json(path) == {"a": 1}


def test_names_that_are_not_text_survive_in_json(tmp_path):
    name = os.fsdecode(b"caf\xe9 \xe2\x82\xac")
    write_json(tmp_path / "x.json", {"name": name})
    assert read_json(tmp_path / "x.json") == {"name": name}
    assert json.loads((tmp_path / "x.json").read_text("utf-8"))["name"] == name


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"3", b"\xff\xfe\x00"])
def test_what_is_not_an_object_in_json_reads_as_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    assert read_json(tmp_path / "x.json") is None


def test_an_output_that_an_input_glob_would_match_tomorrow_is_refused(job, tmp_path):
    with pytest.raises(UsageError, match="would be read again"):
        job.run(output=tmp_path / "in" / "out", inputs=(str(tmp_path / "in" / "*"),))


@pytest.mark.parametrize("harm", ["missing", "cut", "no success"])
def test_a_result_that_lost_something_is_made_whole_by_the_same_command(job, harm):
    job.run(shard_rows=10)
    part = job.out / "part-00001.parquet"
    before = {p.name: p.read_bytes() for p in job.out.glob("*.parquet")}
    if harm == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        (part if harm == "missing" else job.out / SUCCESS).unlink()
    assert job.run(shard_rows=10)["status"] == "done"
    assert {p.name: p.read_bytes() for p in job.out.glob("*.parquet")} == before


def test_damage_in_what_json_says_makes_the_file_unknown(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"rows": 12, "parts": {"a": 1}})
    assert read_json(path) == {"rows": 12, "parts": {"a": 1}}
    path.write_text(path.read_text().replace("12", "13"))
    assert read_json(path) is None


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_json_without_end_reads_as_nothing(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    assert read_json(tmp_path / "x.json") is None


def test_a_receipt_that_was_changed_makes_its_shard_be_done_again(job):
    def engine(*arguments):
        done = run_shards(*arguments)
        yield next(done)
        raise KeyboardInterrupt

    config = job.config(shard_rows=10)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config, engine, Watcher())
    (receipt,) = (job.out.parent / ".out.staging" / "receipts").glob("*.json")
    receipt.write_text(receipt.read_text().replace('"rows": 10', '"rows": 99'))
    assert job.run(shard_rows=10)["rows"] == 30
