"""Vectors kept between runs: the same answers, less work, and nothing that harms a cache reaches a result."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, Watcher, random_prompts, save_llama, write_items, write_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_cli import pipeline, worker
from prefill_cli.config import seconds, size_bytes
from prefill_cli.data import cache as vector_cache
from prefill_cli.data.cache import VectorCache, compact, folder_of, keys_of, open_segment, segment_names, write_segment
from prefill_cli.data.disk import read_json
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import OutputError, UsageError
from prefill_cli.tools.cache import describe, prune

SPACE = {"model": "toy"}
DAY = 86_400


def prompts_of(numbers) -> list[np.ndarray]:
    return [np.array([number, 7], np.int32) for number in numbers]


def vectors_of(numbers, width: int = 4) -> np.ndarray:
    """Vectors that tell which prompt they are of, and that bfloat16 does not hold."""
    return np.outer(np.array(list(numbers), np.float32), np.ones(width, np.float32)) + np.float32(0.123456)


def opened(cache: Path, width: int = 4) -> VectorCache:
    return VectorCache(cache, SPACE, segment_names(folder_of(cache, SPACE)), width)


def filled(cache: Path, *groups) -> VectorCache:
    """A cache with a segment for each group of prompts."""
    for group in groups:
        opened(cache).add(keys_of(prompts_of(group)), vectors_of(group))
    return opened(cache)


def parts(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def segments(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.arrow"))


# --- the index --------------------------------------------------------------------------------------------------------


def test_what_was_added_is_found_with_its_bits_and_nothing_else_is(tmp_path):
    cache = filled(tmp_path, range(100), range(200, 260), [999])
    known = cache.look_up(prompts_of([5, 150, 259, 999, 5, 100]))
    assert known.found.tolist() == [True, False, True, True, True, False]
    assert known.vectors[known.found].tobytes() == vectors_of([5, 259, 999, 5]).tobytes()
    assert np.isnan(known.vectors[~known.found]).all()
    assert len(cache) == 161


def test_an_empty_cache_knows_nothing(tmp_path):
    known = opened(tmp_path).look_up(prompts_of(range(3)))
    assert not known.found.any()
    assert opened(tmp_path).look_up([]).vectors.shape == (0, 4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.lists(st.integers(0, 3), max_size=8))
def test_keys_that_share_their_first_half_are_told_apart(pairs, cuts):
    cache = VectorCache.__new__(VectorCache)
    keys = np.array(pairs, np.uint64).reshape(-1, 2)
    order = np.argsort(keys[:, 0], kind="stable")
    cache._high, cache._low, cache._position = keys[order, 0], keys[order, 1], order
    asked = np.array([(a, b) for a in range(5) for b in range(5)], np.uint64)
    wanted = [next((i for i, pair in enumerate(pairs) if pair == (a, b)), -1) for a, b in asked.tolist()]
    assert cache._positions(asked).tolist() == wanted


def test_the_key_is_a_digest_of_the_ids_and_their_order():
    one, two = np.array([1, 2], np.int32), np.array([2, 1], np.int32)
    keys = keys_of([one, two, np.array([1], np.int32), one.astype(np.int64)])
    assert len(np.unique(keys, axis=0)) == 3
    assert (keys[0] == keys[3]).all()


def test_vectors_that_bfloat16_holds_take_half_the_room_and_come_back_with_their_bits(tmp_path):
    vectors = np.array([[1.5, -0.0, 3e38, 2**-126]], np.float32)
    vectors = (vectors.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert compact(vectors).dtype == np.uint16
    cache = opened(tmp_path)
    cache.add(keys_of(prompts_of([1])), vectors)
    assert opened(tmp_path).look_up(prompts_of([1])).vectors.tobytes() == vectors.tobytes()
    assert compact(vectors_of([1])).dtype == np.float32


def test_vectors_that_are_not_finite_are_not_kept(tmp_path):
    vectors = vectors_of(range(3))
    vectors[1, 2] = np.inf
    opened(tmp_path).add(keys_of(prompts_of(range(3))), vectors)
    assert opened(tmp_path).look_up(prompts_of(range(3))).found.tolist() == [True, False, True]
    opened(tmp_path).add(keys_of(prompts_of([7])), np.full((1, 4), np.nan, np.float32))
    assert len(segments(tmp_path)) == 1


def test_equal_prompts_of_a_shard_are_kept_once(tmp_path):
    opened(tmp_path).add(keys_of(prompts_of([3, 3, 4])), vectors_of([3, 3, 4]))
    assert len(opened(tmp_path)) == 2


def test_a_cache_sees_what_was_there_when_it_was_opened_and_two_writers_leave_one_segment(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        for cache in (first, second):
            pool.submit(cache.add, keys_of(prompts_of(range(50))), vectors_of(range(50)))
    assert not first.look_up(prompts_of([1])).found.any()
    assert len(segments(tmp_path)) == 1
    assert opened(tmp_path).look_up(prompts_of(range(50))).found.all()


def test_a_key_takes_at_most_24_bytes(tmp_path):
    cache = filled(tmp_path, range(3000))
    index = (cache._high, cache._low, cache._position, cache._used)
    assert sum(array.nbytes for array in index) <= 24 * len(cache)
    assert not any(s.stored.flags.owndata or s.keys.flags.owndata for s in cache._segments), "they stay in their files"


# --- harm -------------------------------------------------------------------------------------------------------------


def test_a_torn_a_foreign_and_an_absent_segment_are_left_out_and_told(tmp_path, caplog):
    filled(tmp_path, range(10), range(10, 20), range(20, 30))
    folder = folder_of(tmp_path, SPACE)
    names = segment_names(folder)
    torn = folder / names[0]
    torn.write_bytes(torn.read_bytes()[:300])
    other = folder_of(tmp_path, {"model": "another"})
    other.mkdir()
    foreign = write_segment(other, np.zeros((1, 2), np.uint64), np.ones((1, 4), np.float32), np.zeros(1, np.int64))
    (folder / foreign.name).write_bytes(foreign.read_bytes())
    (folder / names[1]).unlink()
    (folder / "notes.txt").write_text("mine")
    cache = VectorCache(tmp_path, SPACE, [*names, foreign.name], 4)
    assert len(cache) == 10
    told = [record.getMessage() for record in caplog.records]
    assert [any(name in line and why in line for line in told) for name, why in (
        (names[0], "left out"), (foreign.name, "made in another way"), (names[1], "gone since"))] == [True] * 3  # fmt: skip
    assert (folder / "notes.txt").exists()


def test_vectors_of_another_width_are_left_out(tmp_path, caplog):
    filled(tmp_path, range(10))
    assert len(opened(tmp_path, width=5)) == 0
    assert "4 wide, not 5" in caplog.text


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_byte_anywhere_gives_no_wrong_vector(tmp_path, seed, caplog):
    filled(tmp_path, range(40))
    path = segments(tmp_path)[0]
    whole, rng = path.read_bytes(), np.random.default_rng(seed)
    for _ in range(60):
        harmed = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            harmed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(harmed)
        known = opened(tmp_path).look_up(prompts_of(range(50)))
        assert not known.found[40:].any()
        right = vectors_of(range(50))[known.found]
        assert known.vectors[known.found].tobytes() == right.tobytes()
        caplog.clear()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 500, -1, -8, -40])
def test_a_segment_of_any_other_length_gives_no_wrong_vector(tmp_path, size):
    filled(tmp_path, range(40))
    path = segments(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:size])
    assert len(opened(tmp_path)) == 0
    filled(tmp_path, range(40))
    assert opened(tmp_path).look_up(prompts_of(range(40))).found.all(), "the next run heals it"


def test_a_cache_that_cannot_be_written_serves_all_the_same(tmp_path, caplog, monkeypatch):
    cache = filled(tmp_path, range(10))

    def full(*_):
        raise OutputError("no space")

    monkeypatch.setattr(vector_cache, "write_segment", full)
    for group in (range(20, 30), range(30, 40)):
        cache.add(keys_of(prompts_of(group)), vectors_of(group))
    assert cache.look_up(prompts_of(range(10))).found.all()
    assert caplog.text.count("the cache stays as it is: no space") == 1


def test_a_cache_folder_that_cannot_be_made_is_an_error(job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        job.run(cache=tmp_path / "file")


# --- runs -------------------------------------------------------------------------------------------------------------


def test_the_second_night_encodes_what_changed_and_its_result_has_the_same_bytes(job, tmp_path):
    cache = tmp_path / "vectors"
    first = job.run(cache=cache, shard_rows=7)
    assert (first["cached_rows"], first["computed_tokens"] > 0) == (0, True)
    changed = job.prompts[:12] + random_prompts(6, seed=4) + job.prompts[18:]
    inputs = (str(write_prompts(tmp_path / "in" / "today.parquet", changed)),)
    second = job.run(cache=cache, shard_rows=7, inputs=inputs, overwrite=True)
    assert second["cached_rows"] == 24
    assert 0 < second["computed_tokens"] < first["computed_tokens"]
    job.run(inputs=inputs, shard_rows=7, output=tmp_path / "fresh")
    assert parts(job.out) == parts(tmp_path / "fresh")
    third = job.run(cache=cache, shard_rows=11, inputs=inputs, output=tmp_path / "other-shards")
    assert (third["cached_rows"], third["computed_tokens"]) == (30, 0), "what the second night added is there too"


def test_new_items_load_no_model_where_every_vector_is_kept(job, tmp_path, monkeypatch):
    cache = tmp_path / "vectors"
    job.run(cache=cache)
    monkeypatch.setattr(worker, "load_base_model", None)
    items = write_items(
        tmp_path / "new.parquet", vectors=np.random.default_rng(8).standard_normal((50, HIDDEN)).astype("f4")
    )
    totals = job.run(cache=cache, items=items, overwrite=True)
    assert (totals["cached_rows"], totals["encoder"], totals["batches"]) == (30, "cached", 0)
    monkeypatch.undo()
    job.run(items=items, output=tmp_path / "fresh")
    assert parts(job.out) == parts(tmp_path / "fresh")


@pytest.mark.parametrize(
    "options",
    [{"dims": 8}, {"normalize": True}, {"pooling": "mean"}, {"encoder": "plain"}, {"dtype": "bfloat16"}, {"compile": True}],
)
def test_vectors_made_in_another_way_are_not_taken(job, tmp_path, options):
    cache = tmp_path / "vectors"
    job.run(cache=cache, compile=False)
    totals = job.run(cache=cache, **{"compile": False, "overwrite": True} | options)
    assert totals["cached_rows"] == 0


def test_another_model_s_vectors_are_not_taken(job, tmp_path):
    job.run(cache=tmp_path / "vectors")
    other = save_llama(tmp_path / "other", positions=48)
    assert job.run(cache=tmp_path / "vectors", model=str(other), overwrite=True)["cached_rows"] == 0


def test_options_that_change_the_prompt_only_change_the_key(job, tmp_path):
    cache = tmp_path / "vectors"
    job.run(cache=cache)
    assert job.run(cache=cache, max_length=30, top_k=3, score="dot", overwrite=True)["cached_rows"] > 15


def test_damaged_vectors_are_made_anew_and_the_result_has_the_same_bytes(job, tmp_path, caplog):
    cache = tmp_path / "vectors"
    job.run(cache=cache)
    path = segments(cache)[0]
    content = bytearray(path.read_bytes())
    middle = open_segment(path, path.parent.name).stored.tobytes()[64 * 4 : 64 * 4 + 16]
    content[content.index(middle)] ^= 1
    path.write_bytes(content)
    totals = job.run(cache=cache, output=tmp_path / "again")
    assert totals["cached_rows"] == 29
    assert "damaged; vectors of it are made anew" in caplog.text
    assert parts(job.out) == parts(tmp_path / "again")


def test_a_resumed_run_sees_the_cache_as_its_first_start_saw_it(job, tmp_path):
    cache, options = tmp_path / "vectors", {"shard_rows": 5}
    half = (str(write_prompts(tmp_path / "half.parquet", job.prompts[:15])),)
    job.run(cache=cache, inputs=half, output=tmp_path / "half", **options)

    def stopped(job, todo, progress):
        for number, done in enumerate(run_shards(job, todo, progress)):
            yield done
            if number == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job.config(cache=cache, **options), stopped, Watcher())
    job.run(cache=cache, output=tmp_path / "meanwhile", **options)  # adds the other half
    totals = job.run(cache=cache, **options)
    assert totals["cached_rows"] == 15
    assert parts(job.out) == parts(tmp_path / "meanwhile")
    assert job.run(cache=cache, output=tmp_path / "later", **options)["cached_rows"] == 30


def test_a_prompt_that_has_no_vector_is_rejected_again_the_next_night(job, tmp_path, monkeypatch):
    choose, longest = worker.Worker._choose_encoder, 1 + max(len(prompt.split()) for prompt in job.prompts)

    def choose_broken(self, *arguments):
        encoder = choose(self, *arguments)
        encode = encoder.encode

        def broken(input_ids, on_batch):
            encoded = encode(input_ids, on_batch)
            encoded.vectors[[i for i, ids in enumerate(input_ids) if len(ids) == longest]] = np.nan
            return encoded

        encoder.encode = broken
        return encoder

    monkeypatch.setattr(worker.Worker, "_choose_encoder", choose_broken)
    first = job.run(cache=tmp_path / "vectors", max_rejects="50%")
    second = job.run(cache=tmp_path / "vectors", max_rejects="50%", output=tmp_path / "again")
    assert first["rejects"] == second["rejects"] > 0
    assert second["cached_rows"] == second["rows_out"]
    assert parts(job.out) == parts(tmp_path / "again")


def test_two_runs_at_once_share_a_cache_and_give_the_right_bytes(job, tmp_path):
    cache = tmp_path / "vectors"
    line = [sys.executable, "-m", "prefill_cli", "run", job.inputs, "-m", job.model, "-i", job.items, "-k", "5",
            "--device", "cpu", "--dtype", "float32", "--shard-rows", "4", "--cache", cache, "--quiet"]  # fmt: skip
    outs = [tmp_path / name for name in ("one", "two")]
    running = [subprocess.Popen([*map(str, line), "-o", str(out)], stdout=subprocess.DEVNULL) for out in outs]
    assert [process.wait(100) for process in running] == [0, 0]
    job.run(shard_rows=4)
    assert parts(outs[0]) == parts(outs[1]) == parts(job.out)
    assert job.run(cache=cache, output=tmp_path / "third")["cached_rows"] == 30


# --- showing and pruning ----------------------------------------------------------------------------------------------


def age(cache: Path, group, days: float) -> None:
    """Write the group's segment as it would have been so many days ago."""
    numbers = prompts_of(group)
    keys = keys_of(numbers)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    then = np.full(len(keys), int(time.time() - days * DAY))
    write_segment(folder_of(cache, SPACE), keys[order], vectors_of(group)[order], then)


def test_the_cache_tells_sizes_hit_rates_and_ages(tmp_path):
    filled(tmp_path, range(10))
    age(tmp_path, range(10, 20), 8)
    cache = opened(tmp_path)
    cache.look_up(prompts_of([1, 2, 12, 77]))
    cache.close()
    space = describe(tmp_path)["spaces"][0]
    assert (space["vectors"], space["segments"], space["width"], space["hit_rate"]) == (20, 2, 4, 0.75)
    assert space["made_by"] == SPACE
    assert space["days_since_use"]["least"] < 0.1
    assert 7.9 < space["days_since_use"]["most"] < 8.1
    assert space["bytes"] == sum(path.stat().st_size for path in segments(tmp_path))


def test_pruning_by_age_goes_by_the_last_use_of_each_vector(tmp_path):
    filled(tmp_path)
    age(tmp_path, range(10), 40)
    age(tmp_path, range(10, 20), 10)
    cache = opened(tmp_path)
    cache.look_up(prompts_of([3, 4]))
    cache.close()
    for _ in range(2):  # the second time what the first wrote is all that tells
        prune(tmp_path, 30 * DAY, None)
        assert opened(tmp_path).look_up(prompts_of(range(20))).found.tolist() == [i in (3, 4) or i >= 10 for i in range(20)]
        assert len(segments(tmp_path)) == 1
        assert not list(tmp_path.glob("*/uses/*"))
    space = describe(tmp_path)["spaces"][0]
    assert space["days_since_use"]["least"] < 0.1
    assert 9.9 < space["days_since_use"]["most"] < 10.1


def test_pruning_by_size_keeps_what_was_used_last(tmp_path):
    filled(tmp_path)
    for days in range(1, 6):
        age(tmp_path, range(10 * days, 10 * days + 10), days)
    prune(tmp_path, None, 25 * (4 * 4 + 28))
    known = opened(tmp_path).look_up(prompts_of(range(10, 60)))
    assert known.found.sum() == 25
    assert known.found[:20].all()


def test_pruning_joins_segments_and_loses_nothing(tmp_path, monkeypatch):
    filled(tmp_path, *[range(5 * i, 5 * i + 6) for i in range(20)])  # neighbours share a prompt
    monkeypatch.setattr("prefill_cli.tools.cache.SEGMENT_BYTES", 50 * 16)
    assert prune(tmp_path, None, None)["vectors"] == 101
    assert len(segments(tmp_path)) == 3
    known = opened(tmp_path).look_up(prompts_of(range(101)))
    assert known.found.all()
    assert known.vectors.tobytes() == vectors_of(range(101)).tobytes()
    before = [path.read_bytes() for path in segments(tmp_path)]
    prune(tmp_path, None, None)
    assert [path.read_bytes() for path in segments(tmp_path)] == before


def test_pruning_joins_vectors_that_are_stored_wide_and_narrow(tmp_path):
    narrow = np.arange(20, dtype=np.float32).reshape(5, 4)
    opened(tmp_path).add(keys_of(prompts_of(range(5))), narrow)
    filled(tmp_path, range(5, 9))
    prune(tmp_path, None, None)
    known = opened(tmp_path).look_up(prompts_of(range(9)))
    assert known.vectors.tobytes() == narrow.tobytes() + vectors_of(range(5, 9)).tobytes()


def test_pruning_removes_damaged_rows_segments_and_old_torn_files_and_nothing_of_others(tmp_path):
    filled(tmp_path, range(10), range(10, 20))
    folder = folder_of(tmp_path, SPACE)
    torn, flipped = segments(tmp_path)
    torn.write_bytes(b"ARROW1")
    content = bytearray(flipped.read_bytes())
    content[content.index(open_segment(flipped, folder.name).stored[4].tobytes())] ^= 1
    flipped.write_bytes(content)
    (folder / "notes.txt").write_text("mine")
    for name, hours in ((".old.tmp", 30), (".young.tmp", 1)):
        (folder / name).write_text("half")
        os.utime(folder / name, (time.time() - hours * 3600,) * 2)
    assert describe(tmp_path)["spaces"][0]["left_out"].keys() == {torn.name}
    assert prune(tmp_path, None, None)["vectors"] == 9
    assert {path.name for path in folder.iterdir()} - {path.name for path in segments(tmp_path)} == {
        "space.json", "uses", "notes.txt", ".young.tmp",
    }  # fmt: skip


def test_a_space_whose_vectors_are_all_old_goes_away(tmp_path):
    filled(tmp_path)
    age(tmp_path, range(10), 40)
    assert prune(tmp_path, 30 * DAY, None) == {
        "cache": str(tmp_path), "vectors_before": 10, "vectors": 0, "removed_files": 2,
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_went_back_makes_nothing_old(tmp_path):
    filled(tmp_path)
    age(tmp_path, range(10), -3)
    assert describe(tmp_path)["spaces"][0]["days_since_use"]["most"] == 0
    assert prune(tmp_path, 1 * DAY, None)["vectors"] == 10


def test_a_run_that_pruning_overtakes_goes_on_with_the_files_it_has_open(tmp_path):
    cache = filled(tmp_path, range(10), range(10, 20))
    age(tmp_path, range(20, 30), 40)
    prune(tmp_path, None, None)
    assert cache.look_up(prompts_of(range(20))).found.all()


def test_the_command_shows_and_prunes(command, tmp_path):
    filled(tmp_path / "vectors", range(10))
    shown = command("cache", tmp_path / "vectors")
    assert shown.returncode == 0
    assert "10, 4 wide, in 1 segment" in shown.stdout
    done = command("cache", tmp_path / "vectors", "--prune", "--max-size", "100B", "--json")
    assert json.loads(done.stdout)["pruned"]["vectors"] == 2
    for arguments, why in (
        ((tmp_path / "nothing",), "no such folder"),
        ((tmp_path / "vectors", "--older-than", "3d"), "go with --prune"),
        ((tmp_path / "vectors", "--prune", "--older-than", "soon"), "length of time"),
        ((tmp_path / "vectors", "--prune", "--max-size", "big"), "must be a size"),
    ):
        refused = command("cache", *arguments)
        assert refused.returncode == 2
        assert why in refused.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("")
    assert command("cache", tmp_path / "other", "--prune").returncode == 2
    assert (tmp_path / "other" / "precious").exists()


def test_lengths_of_time_and_sizes_are_read_as_people_write_them():
    assert [seconds(text, "x") for text in ("3h30m", "45m", "90s", "30d", "1D2H")] == [12_600, 2_700, 90, 30 * DAY, 93_600]
    assert [size_bytes(text, "x") for text in ("500MB", "2GiB", "1.5 kb", "7B")] == [500_000_000, 2 << 30, 1_500, 7]
    for text in ("", "0s", "3", "h", "-3h", "3h30", "30m3h"):
        with pytest.raises(UsageError, match="length of time"):
            seconds(text, "x")
    for text in ("", "5", "-1MB", "MB", "5XB"):
        with pytest.raises(UsageError, match="size"):
            size_bytes(text, "x")


def test_the_manifest_and_space_tell_what_made_the_vectors(job, tmp_path):
    job.run(cache=tmp_path / "vectors")
    space = read_json(next((tmp_path / "vectors").glob("*/space.json")))
    assert {"model_weights_sha256", "dtype", "pooling", "dims", "normalize", "encoder", "torch"} <= space.keys()
    assert read_json(job.out / "_manifest.json")["options"]["cache"] == str(tmp_path / "vectors")
    assert pq.read_table(job.out).num_rows == 30
