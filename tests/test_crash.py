"""Killed anywhere, at any moment: the old result or the new one, a sound cache, and the same command finishes the job."""

import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import random_prompts, write_prompts
from crash_server import STEPS

from prefill_cli.data.cache import open_segment
from prefill_cli.data.manifest import is_finished
from prefill_cli.errors import ItemsError
from prefill_cli.matrices import IDS_DIGEST, TENSOR, ids_digest, open_matrix

KILLED = -signal.SIGKILL
# Steps that a run without one of these does not have.
ONLY_WITHOUT_EXCHANGE = {"two renames"}
WHEN = ("before", "after")


def parts(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


@pytest.fixture
def night(job, tmp_path):
    """Yesterday's result and its cache, and the command of tonight, whose prompts changed in part."""
    before = tmp_path / "before"
    old = (str(write_prompts(tmp_path / "yesterday.parquet", job.prompts)),)
    job.run(inputs=old, shard_rows=8, output=before / "out", cache=before / "vectors")
    changed = [*job.prompts[:9], None, *random_prompts(11, seed=8), *job.prompts[21:]]
    today = write_prompts(tmp_path / "today.parquet", changed)
    options = {"inputs": (str(today),), "shard_rows": 8, "max_rejects": "1"}
    job.run(**options, output=tmp_path / "fresh")
    place = tmp_path / "place"
    argv = ["run", today, "-m", job.model, "-i", job.items, "-k", 5, "--device", "cpu", "--dtype", "float32", "--quiet",
            "--shard-rows", 8, "--max-rejects", 1, "--overwrite",
            "-o", place / "out", "--cache", place / "vectors"]  # fmt: skip
    whole = tmp_path / "whole"
    shutil.copytree(before, whole)
    job.run(**options, cache=whole / "vectors", output=whole / "out", overwrite=True)
    vectors: dict[bytes, bytes] = {}  # of every prompt, by key, as a run that nobody killed leaves them
    for path in whole.glob("vectors/*/*.arrow"):
        segment = open_segment(path, path.parent.name)
        vectors |= {key.tobytes(): row.tobytes() for key, row in zip(segment.keys, segment.stored, strict=True)}
    return SimpleNamespace(
        before=before,
        place=place,
        argv=[str(word) for word in argv],
        old=parts(before / "out"),
        new=parts(tmp_path / "fresh"),
        vectors=vectors,
    )


def reset(night) -> None:
    shutil.rmtree(night.place, ignore_errors=True)
    shutil.copytree(night.before, night.place)


def check_cache(night) -> None:
    """Every segment is whole and holds the right bits."""
    for path in night.place.glob("vectors/*/*.arrow"):
        segment = open_segment(path, path.parent.name)
        raw, sound = segment.vectors(np.arange(len(segment)))
        assert sound.all()
        for key, row in zip(segment.keys, raw, strict=True):
            assert night.vectors[key.tobytes()] == row.tobytes()


def check_after_a_kill(night, may_be_absent: bool = False) -> None:
    out = night.place / "out"
    if not (may_be_absent and not out.exists()):
        assert parts(out) in (night.old, night.new)
        assert is_finished(out)
    check_cache(night)


def check_after_the_end(night) -> None:
    assert parts(night.place / "out") == night.new
    assert is_finished(night.place / "out")
    assert {path.name for path in night.place.iterdir()} == {"out", "vectors"}, "no staging folder, no lock"
    check_cache(night)
    held = [s.keys for p in night.place.glob("vectors/*/*.arrow") for s in [open_segment(p, p.parent.name)]]
    assert {key.tobytes() for key in np.concatenate(held)} == night.vectors.keys()


def kill_at_every_step(server, night, steps, thorough: bool, **order) -> int:
    """Each step before or after its middle call (thorough: both, and the first and the last too); returns how many kills."""
    reset(night)
    counted = server.run(night.argv, **order)
    assert counted["status"] == 0
    check_after_the_end(night)
    kills = 0
    for number, step in enumerate(steps):
        calls = counted["calls"].get(step, 0)
        assert calls, f"no call of {step}: has its function another name now?"
        middle = (1 + calls) // 2
        for call in sorted({1, middle, calls}) if thorough else [middle]:
            for when in WHEN if thorough else WHEN[number % 2 :][:1]:
                reset(night)
                died = server.run(night.argv, step=step, call=call, when=when, **order)
                if died["status"] == 0:  # threads take turns in another order: there were fewer calls this time
                    continue
                assert died["status"] == KILLED, (step, call, when)
                kills += 1
                check_after_a_kill(night, may_be_absent="without_exchange" in order)
                assert server.run(night.argv, **order)["status"] == 0, (step, call, when)
                check_after_the_end(night)
    return kills


def test_a_kill_at_any_step_leaves_the_old_result_or_the_new_and_the_same_command_finishes(server, night, thorough):
    steps = STEPS.keys() - ONLY_WITHOUT_EXCHANGE
    assert kill_at_every_step(server, night, sorted(steps), thorough) >= len(steps) - 4


def test_a_kill_between_two_renames_is_mended_by_the_same_command(server, night, thorough):
    steps = ["two renames", "publish", "discard", "success marker"]
    assert kill_at_every_step(server, night, steps, thorough, without_exchange=True) >= 4
    reset(night)
    for call in (1, 2):  # OUT goes out of the way; the new one comes
        assert (
            server.run(night.argv, step="two renames", call=call, when="before", without_exchange=True)["status"] == KILLED
        )
        check_after_a_kill(night, may_be_absent=True)
    assert server.run(night.argv, without_exchange=True)["status"] == 0
    check_after_the_end(night)


def test_kills_at_random_moments_one_after_another(server, night, thorough):
    """Again and again the same command, killed whenever it is, until it gets through; then from the beginning."""
    rng, done, kills = random.Random(5), 0, 200 if thorough else 15
    reset(night)
    while done < kills:
        ended = server.run(night.argv, kill_after=rng.uniform(0.0, 0.8))
        assert ended["status"] in (KILLED, 0)
        check_after_a_kill(night)
        done += ended["status"] == KILLED
        if ended["status"] == 0:
            check_after_the_end(night)
            reset(night)
    assert server.run(night.argv)["status"] == 0
    check_after_the_end(night)


def ids_and_vectors(out: Path) -> dict[int, bytes] | None:
    """Id → vector of a matrix and its ids, as someone reads them who heeds the digest; None where it is not right."""
    ids = out.with_suffix(".ids.parquet")
    rows, metadata = open_matrix(out, TENSOR, ItemsError)
    if metadata[IDS_DIGEST] != ids_digest(ids):
        return None
    return {i: row.tobytes() for i, row in zip(pq.read_table(ids)["user_id"].to_pylist(), rows, strict=True)}


def test_a_kill_while_one_file_is_made_leaves_the_old_one_or_the_new(server, job, tmp_path, thorough):
    """embed into a matrix and a file of its ids: each rename, the joining, the publication, the removal of leftovers."""
    place, before = tmp_path / "place", tmp_path / "before"
    before.mkdir()
    write_prompts(tmp_path / "today.parquet", [*job.prompts[5:], None])

    def line(inputs: Path) -> list[str]:
        return [str(word) for word in ("embed", inputs, "-m", job.model, "--device", "cpu", "--dtype", "float32", "--quiet",
                "--shard-rows", 9, "--max-rejects", 1, "--overwrite", "-o", place / "v.safetensors")]  # fmt: skip

    def begin() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(before, place)

    begin()
    assert server.run(line(job.inputs))["status"] == 0
    old = ids_and_vectors(place / "v.safetensors")
    shutil.copytree(place, before, dirs_exist_ok=True)
    counted = server.run(line(tmp_path / "today.parquet"))
    new = ids_and_vectors(place / "v.safetensors")
    assert (counted["status"], len(old), len(new)) == (0, 30, 25)
    at_the_end = {path.name for path in place.iterdir()}
    assert at_the_end == {"v.safetensors", "v.ids.parquet", "v.rejects.parquet"}
    kills = 0
    for step in ("rename", "write", "remove", "fsync"):
        calls = counted["calls"][step]
        for call in range(1, calls + 1) if thorough else sorted({calls, calls - 1}):
            begin()
            when = WHEN[call % 2]
            assert server.run(line(tmp_path / "today.parquet"), step=step, call=call, when=when)["status"] == KILLED
            kills += 1
            assert ids_and_vectors(place / "v.safetensors") in (old, new, None)
            assert server.run(line(tmp_path / "today.parquet"))["status"] == 0
            assert ids_and_vectors(place / "v.safetensors") == new
            assert {path.name for path in place.iterdir()} == at_the_end
    assert kills >= 6
