"""`plan --nodes`: the simulation against analysis and against a loop over events, requests against a server's log."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, random_prompts
from s3_server import s3, s3_server  # noqa: F401
from typer.testing import CliRunner

from prefill_cli import cli, storage, views
from prefill_cli.data.disk import to_json
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.errors import OutputError, UsageError
from prefill_cli.places import Uri, beside
from prefill_cli.tools import scale
from prefill_cli.tools.forecast import cluster
from prefill_cli.tools.forecast.cluster import Pace, Spread, Work, forecast, simulate, spread_of
from prefill_cli.tools.forecast.requests import Layout, requests_of, times_read

OPTIONS = ("nodes", "prompts", "measured", "failures", "launch", "cost", "cores")
EQUAL = Spread((), 0.0)
PACE = Pace(read_sec=0.001, encode_sec=0.04, finish_sec=0.002, start_sec=5.0, launch_sec=3.0, commit_sec=0.0, once_sec=2.0,
            spread=EQUAL)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home-cache"))
    storage._system.cache_clear()


@pytest.fixture
def store(s3, s3_server):  # noqa: F811
    """An empty bucket, and what its server was asked."""
    return SimpleNamespace(uri=s3, requests=lambda: s3_server.requests(s3.removeprefix("s3://")))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- the simulation ---------------------------------------------------------------------------------------------------


def test_one_worker_takes_its_start_and_the_sum_of_its_shards():
    fate = simulate(PACE, Work(1, 1_050, 100), rng())
    first_read, last_finish = 100 * 0.001, 100 * 0.002
    # The last shard has 50 rows, and its finishing is told as that of a whole one.
    assert fate.sec == pytest.approx(2 + 3 + 5 + first_read + 1_050 * 0.04 + last_finish, abs=1e-9)
    assert fate.busy == pytest.approx(1_050 * 0.04 / (fate.sec - 2))
    assert (fate.lost, fate.given_up) == (0, 0)
    one = forecast(PACE, Work(1, 40, 100), replicates=3)
    assert one.sec == one.low == one.high == pytest.approx(2 + 8 + 40 * 0.043)


@pytest.mark.parametrize(("workers", "shards"), [(2, 7), (3, 12), (5, 3), (8, 8), (7, 50), (64, 65)])
@pytest.mark.parametrize("overlap", [True, False])
def test_equal_shards_take_as_many_rounds_as_the_fullest_worker_has(workers, shards, overlap):
    pace = replace(PACE, overlap=overlap)
    fate = simulate(pace, Work(workers, 100 * shards, 100), rng())
    rounds = -(-shards // workers)
    of_shard, beside_it = (4.0, 0.3) if overlap else (4.3, 0.0)
    assert fate.sec == pytest.approx(10 + beside_it + rounds * of_shard, abs=1e-9)
    assert fate.busy == pytest.approx(shards * of_shard / (workers * (fate.sec - 2)))


@pytest.mark.parametrize("workers", [2, 5, 16])
@pytest.mark.parametrize("seed", range(5))
def test_list_scheduling_keeps_grahams_bound(workers, seed):
    """R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969: total / N at least, and at
    most total / N + (1 - 1 / N) of the longest."""
    pace = replace(
        PACE, spread=Spread((0.5, 0.9, 1.0, 1.6), 0.0), overlap=False, launch_sec=0.0, start_sec=0.0, once_sec=0.0
    )
    fate = simulate(pace, Work(workers, 4_000, 100), rng(seed))
    total, longest = fate.busy * workers * fate.sec, 100 * 0.043 * 1.6
    assert total / workers <= fate.sec <= total / workers + (1 - 1 / workers) * longest
    assert fate.sec < 40 * longest
    ahead = replace(
        pace, overlap=True, read_sec=0.0, finish_sec=0.0
    )  # a worker has one more, which others would be free for
    fate, longest = simulate(ahead, Work(workers, 4_000, 100), rng(seed)), 100 * 0.04 * 1.6
    total = fate.busy * workers * fate.sec
    assert total / workers <= fate.sec <= total / workers + 2 * longest


class Given(Spread):
    """Shards' times by worker and place in its row."""

    def __init__(self, table: np.ndarray) -> None:
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "done", 0)

    def draw(self, rng, shape):
        begin = self.done
        object.__setattr__(self, "done", begin + shape[1])
        return self.table[: shape[0], begin : begin + shape[1]]


def by_events(factors: np.ndarray, pace: Pace, work: Work) -> float:
    """The same by a heap of askings: whoever asks first gets the next shard; commits wait for one another."""
    full, begin = min(work.shard_rows, work.rows), pace.launch_sec + pace.start_sec
    read, finish = full * pace.read_sec, full * pace.finish_sec
    asking = [(begin, 0, w) for w in range(work.workers)]
    heapify(asking)
    free, finished = [begin + read] * work.workers, []
    for shard in range(work.shards):
        now, k, w = heappop(asking)
        assert now <= free[w]
        rows = min(full, work.rows - shard * full)
        heappush(asking, (free[w], k + 1, w))  # when this one goes into the model
        free[w] += rows * pace.step_sec * factors[w, k]
        finished.append(free[w] + finish)
    clock = 0.0
    for sec in sorted(finished):
        clock = max(clock, sec) + pace.commit_sec
    return pace.once_sec + clock


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("commit_sec", [0.0, 1.0])
def test_sorting_all_askings_is_the_loop_over_events(workers, commit_sec):
    pace = replace(PACE, commit_sec=commit_sec)
    for seed, rows in enumerate((10, 990, 1_000, 5_555)):
        factors = rng(seed).lognormal(0, 0.6, (workers, 60))
        work = Work(workers, rows, 100)
        assert simulate(replace(pace, spread=Given(factors)), work, rng()).sec == pytest.approx(
            by_events(factors, pace, work)
        )


def test_many_workers_wait_for_the_driver_where_it_commits_slower_than_they_finish():
    pace = replace(PACE, commit_sec=0.5)
    alone = 10 + 0.3 + 4.0  # a round
    assert simulate(pace, Work(100, 10_000, 100), rng()).sec == pytest.approx(alone + 100 * 0.5)
    assert simulate(pace, Work(1, 10_000, 100), rng()).sec == pytest.approx(10 + 0.3 + 400 + 0.5)


@pytest.mark.parametrize(("mtbf", "step"), [(10.0, 4.0), (5.0, 10.0), (100.0, 4.0)])
def test_a_shard_that_is_begun_again_takes_what_the_formula_says(mtbf, step):
    """(exp(t / m) - 1) (m + again), of cluster._deaths: within 4 standard errors, so wrong once in 16 000 seeds."""
    pace = replace(PACE, read_sec=0.0, finish_sec=0.0, encode_sec=step / 100, once_sec=0.0)
    work = Work(1, 100, 100, mtbf, attempts=10**6)
    seconds = np.array([simulate(pace, work, rng(seed)).sec for seed in range(4_000)])
    expected = 8.0 + (math.exp(step / mtbf) - 1) * (mtbf + 8.0)
    assert abs(seconds.mean() - expected) < 4 * seconds.std() / math.sqrt(len(seconds))
    assert (seconds >= 8.0 + step).all()


def test_a_shard_that_kills_three_workers_is_given_up():
    pace = replace(PACE, read_sec=0.0, finish_sec=0.0, encode_sec=0.04)
    dying = [simulate(pace, Work(1, 10_000, 100, mtbf_sec=8.0), rng(seed)) for seed in range(100)]
    share = np.array([fate.given_up for fate in dying]) / 100
    probability = (1 - math.exp(-4.0 / 8.0)) ** 3
    assert abs(share.mean() - probability) < 4 * math.sqrt(probability * (1 - probability) / 10_000)
    hopeless = simulate(pace, Work(2, 1_000, 100, mtbf_sec=1e-9), rng())
    assert hopeless.given_up == 10
    assert hopeless.sec == pytest.approx(2 + 8 + 5 * 3 * 8.0)
    assert hopeless.busy == 0


def test_seeds_repeat_and_no_forecast_depends_on_another():
    pace, work = replace(PACE, spread=Spread((), 0.2)), Work(8, 5_000, 100, mtbf_sec=500.0)
    first = forecast(pace, work)
    forecast(pace, Work(3, 700, 100))
    assert forecast(pace, work) == first != forecast(pace, work, seed=1)
    assert first.low < first.sec < first.high
    other = [forecast(pace, work, seed=seed).sec for seed in range(2, 42)]
    assert np.mean([abs(sec / first.sec - 1) <= 2 * first.error for sec in other]) > 0.9


def test_a_thousand_million_prompts_are_no_more_events_than_are_allowed():
    found = forecast(replace(PACE, spread=Spread((), 0.1)), Work(256, 10**9, 16_384, mtbf_sec=3.6e6))
    assert cluster.FEWEST_REPLICATES < found.replicates <= cluster.CELLS // 61_036
    whole = 10**9 * 0.04 / 256
    assert whole < found.sec < whole * 1.01
    assert found.error < 0.001


def test_measured_shards_are_drawn_again_and_few_are_not_trusted():
    rows, seconds = [100] * 8 + [30], [4.0, 4.4, 3.6, 4.0, 5.0, 3.0, 4.0, 4.0, 9.0]
    spread = spread_of(seconds, rows, 0.05)
    assert sorted(spread.shares) == pytest.approx(sorted(sec / 4 for sec in seconds[:8])), "the short last one is left out"
    drawn = spread.draw(rng(), (1_000, 3))
    assert set(drawn.ravel()) == set(spread.shares)
    assert spread_of(seconds[:7], rows[:7], 0.05) == Spread((), 0.05)
    drawn = Spread((), 0.3).draw(rng(), (200_000,))
    assert drawn.mean() == pytest.approx(1.0, abs=0.005)
    assert np.log(drawn).std() == pytest.approx(0.3, abs=0.005)


# --- requests ---------------------------------------------------------------------------------------------------------


def kinds(found: list[tuple[str, str]]) -> dict[str, int]:
    """The requests of a log by the kinds that are forecast."""
    names = {"PUT": "puts", "POST": "puts", "GET": "gets", "HEAD": "heads", "DELETE": "deletes"}
    counts = Counter(
        "lists" if "list-type" in path else "deletes" if path.endswith("?delete") else names[method]
        for method, path in found
    )
    return {name: counts[name] for name in ("puts", "lists", "gets", "heads", "deletes")}


def put_files(folder: Uri, rows: int, layout: Layout, tmp_path: Path) -> None:
    prompts = random_prompts(rows, longest=6)
    for start in range(0, rows, layout.file_rows):
        some = prompts[start : start + layout.file_rows]
        table = pa.table({"user_id": range(start, start + len(some)), "prompt": some})
        pq.write_table(table, tmp_path / "part.parquet", row_group_size=layout.group_rows)
        storage.write(beside(folder, f"{start:06d}.parquet"), (tmp_path / "part.parquet").read_bytes())


def layout_of(file_rows: int, group_rows: int) -> Layout:
    return Layout(file_rows, group_rows, row_bytes=50.0, columns=2, part_row_bytes=90.0)


@pytest.mark.parametrize(
    ("rows", "file_rows", "group_rows", "shard_rows"), [(30, 30, 30, 30), (40, 40, 20, 10), (60, 30, 10, 7), (50, 20, 5, 60)]
)
def test_the_requests_of_a_run_are_those_in_the_servers_log(job, store, tmp_path, rows, file_rows, group_rows, shard_rows):
    layout = layout_of(file_rows, group_rows)
    put_files(Uri(f"{store.uri}/in"), rows, layout, tmp_path)
    before = len(store.requests())
    totals = job.run(inputs=(f"{store.uri}/in",), output=Uri(f"{store.uri}/out"), shard_rows=shard_rows)
    assert totals["rows_out"] == rows
    found = kinds(store.requests()[before:])
    assert found == vars(requests_of(layout, rows, shard_rows, workers=1))
    assert min(found.values()) > 0


def read_in_turn(job, store, layout: Layout, rows: int, shard_rows: int) -> dict[str, int]:
    """Requests of two readers that take shards in turn, beside what is forecast of them.

    What planning and publishing send is the same for one worker, of whose readers' requests the forecast is known.
    """
    config = job.config(inputs=(f"{store.uri}/in",), shard_rows=shard_rows)
    plan = plan_inputs(config)
    readers, before = [ShardReader(plan, config) for _ in range(2)], len(store.requests())
    for shard in plan.shards(shard_rows):
        assert sum(len(piece.ids) for piece in readers[shard.index % 2].read(shard)) == shard.rows
    found = kinds(store.requests()[before:])
    several, files = requests_of(layout, rows, shard_rows, workers=2), -(-rows // layout.file_rows)
    pieces = len({*range(0, rows, layout.file_rows), *range(0, rows, shard_rows)})
    assert found["heads"] == 5 * pieces
    assert several.heads == found["heads"] + 3 + 3 * files + 3 + 5 + 3 + 2 * -(-rows // shard_rows)
    assert several.gets == found["gets"] + 3 * files
    return found


@pytest.mark.parametrize(
    ("rows", "file_rows", "group_rows", "shard_rows"),
    [(12_000, 12_000, 12_000, 3_000), (12_000, 6_000, 1_024, 3_000), (9_000, 2_500, 2_500, 2_048)],
)
def test_workers_that_take_shards_in_turn_send_the_requests_that_are_forecast(
    job, store, tmp_path, rows, file_rows, group_rows, shard_rows
):
    layout = layout_of(file_rows, group_rows)
    put_files(Uri(f"{store.uri}/in"), rows, layout, tmp_path)
    read_in_turn(job, store, layout, rows, shard_rows)


def test_a_column_of_many_megabytes_is_asked_for_in_pieces_and_again_by_every_worker(job, store, tmp_path):
    rows, random = 10_240, rng()
    table = pa.table({"user_id": range(rows), "prompt": [random.bytes(1_024).hex() for _ in range(rows)]})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=rows, use_dictionary=False, compression="none")
    content = (tmp_path / "part.parquet").read_bytes()
    storage.write(Uri(f"{store.uri}/in/part.parquet"), content)
    layout = Layout(rows, rows, len(content) / rows, 2, 90.0)
    found = read_in_turn(job, store, layout, rows, 2_048)
    # Shard i begins at 4.2 i MB of the column: 1, 1, 2, 2, 3 buffers of 8 MB until its end; ids and footer of each.
    assert found["gets"] == (1 + 1 + 2 + 2 + 3) + 5 + 5 + 2


def test_requests_of_many_shards_come_in_pages_and_large_files_in_pieces():
    layout = Layout(1 << 20, 1 << 14, 1_000.0, 3, 1_200.0)
    found = requests_of(layout, 10**9, 16_384, workers=64)
    assert found.puts == 3 * (5 + 61_036) + (2 + 2) * 61_036 + 2  # a part of 19.7 MB in two pieces
    assert found.lists == 2 + 1 + 1 + 123 + 62 + 62
    assert found.deletes == 62 + 2
    assert found.gets == 954 * 3 + 61_036 + 61_036 * (2 + 2) - 1  # 16.4 MB of prompts in two pieces, the last shard's in one
    assert times_read(layout, 10**9, 16_384, 64) == pytest.approx(1.0, abs=1e-4)
    # Row groups of four shards: a worker decodes 1, 2, 3 or 4 of them for one.
    assert times_read(replace(layout, group_rows=1 << 16), 1 << 22, 16_384, 64) == 2.5
    assert times_read(replace(layout, group_rows=1 << 16), 1 << 22, 16_384, 1) == 1.0


# --- the command ------------------------------------------------------------------------------------------------------


def write_run(folder: Path, *, count: int = 10, seconds: float = 4.0, wall_sec: float = 51.3, **more: object) -> Path:
    """A finished result of 100 rows a shard, as its manifest tells it."""
    each = {"rows": 100, "tokens": 5_000, "read_sec": 0.1, "encode_sec": seconds, "search_sec": 0.15, "write_sec": 0.05,
            "cache_sec": 0.0, "threads": 2}  # fmt: skip
    totals = {name: value * count for name, value in each.items() if name != "threads"}
    manifest = {
        "made_by": "prefill-score", "fingerprint": {}, "model": {}, "items": {}, "environment": {"cpus": 2},
        "options": {"shard_rows": 100, "top_k": 10, "keep_columns": ["a"]},
        "inputs": {"files": [{"rows": 100 * count, "size_bytes": 50_000 * count}]},
        "totals": totals | {"wall_sec": wall_sec, "start_sec": 6.0, "device": "cpu", "dtype": "bfloat16"},
        "shards": {name: [value] * count for name, value in each.items()} | {"start_sec": [6.0] + [0.0] * (count - 1)},
        "parts": {},
    } | more  # fmt: skip
    return save_run(folder, manifest)


def save_run(folder: Path, manifest: dict) -> Path:
    folder.mkdir()
    (folder / "_manifest.json").write_bytes(to_json(manifest))
    (folder / "_SUCCESS").touch()
    return folder


def call(*arguments: object):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def told_of(*arguments: object) -> dict:
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_measured_run_simulated_takes_what_it_took(tmp_path):
    """51.3 = 5 s of planning, 6 of starting, 0.1 of the first reading, 40 of encoding, 0.2 of the last writing."""
    folder = write_run(tmp_path / "run")
    told = told_of("--measured", folder, "--nodes", "1,2,20", "--prompts", "1K", "--failures", "0")
    one, two, many = told["forecasts"]
    assert told["shard_rows"] == 100, "the run's own"
    assert told["figures"]["once_sec"] == {"value": pytest.approx(5.0), "from": "measured"}
    assert told["figures"]["tokens_per_sec"] == {"value": pytest.approx(1250.0), "from": "measured"}
    assert one["hours"] * 3600 == pytest.approx(51.3 + 0.02)
    assert two["hours"] * 3600 == pytest.approx(5 + 10 + 6 + 0.1 + 20 + 0.2 + 2 * 0.02), "commits of two at once"
    assert many["hours"] * 3600 == pytest.approx(5 + 10 + 6 + 0.1 + 4 + 0.2 + 10 * 0.02)
    assert (many["shards"], many["idle"]) == (10, pytest.approx((20 * 20.5 - 10 * 20.3 - 10 * 16.0) / (20 * 20.5)))


def test_workers_of_a_measured_run_share_its_shards_and_their_launch_is_in_it(tmp_path):
    folder = write_run(tmp_path / "run", wall_sec=44.3, workers=[{}, {}])  # 18 s beside starting, reading, 5 rounds, writing
    told = told_of("--measured", folder, "--nodes", "2", "--prompts", "1K", "--failures", "0", "--launch", "8s")
    assert told["figures"]["once_sec"]["value"] == pytest.approx(18.0)
    assert told["forecasts"][0]["hours"] * 3600 == pytest.approx(44.3 + 0.04)


def test_a_resumed_run_whose_wall_time_is_not_of_all_shards_tells_no_planning(tmp_path):
    told = told_of("--measured", write_run(tmp_path / "run", wall_sec=12.0), "--nodes", "1", "--prompts", "1K")
    assert told["figures"]["once_sec"] == {"value": 0.0, "from": "assumed"}


def test_workers_with_another_number_of_cores_are_assumed_in_proportion(tmp_path):
    folder = write_run(tmp_path / "run")
    told = told_of("--measured", folder, "--nodes", "1", "--prompts", "1K", "--failures", "0", "--cores", "1")
    assert told["worker"]["threads"] == 1
    assert told["figures"]["tokens_per_sec"]["value"] == pytest.approx(625.0)
    assert told["figures"]["tokens_per_sec"]["from"] == "measured with 2 threads, in proportion"
    assert told["forecasts"][0]["hours"] * 3600 == pytest.approx(5 + 6 + 0.1 + 80 + 0.4 + 0.02)


def test_a_run_that_was_done_is_a_source_and_says_by_how_many_threads(job):
    job.run(shard_rows=10)
    manifest = json.loads((job.out / "_manifest.json").read_text())
    assert all(manifest["shards"]["threads"])
    told = told_of("--measured", job.out, "--nodes", "1,3", "--prompts", "30,2K")
    assert told["figures"]["threads"] == {"value": manifest["shards"]["threads"][0], "from": "measured"}
    assert [(row["prompts"], row["workers"], row["shards"]) for row in told["forecasts"]] == [
        (30, 1, 3), (30, 3, 3), (2_000, 1, 200), (2_000, 3, 200),
    ]  # fmt: skip
    for row in told["forecasts"]:
        assert row["hours_low"] <= row["hours"] <= row["hours_high"]
        assert 0 < row["efficiency"] <= 1
        assert row["cost"] == pytest.approx(row["workers"] * row["hours"])


def test_without_a_run_the_probe_tells_the_pace(job):
    told = told_of(job.inputs, "-m", job.model, "-i", job.items, "--device", "cpu", "--dtype", "float32", "--quiet",
                   "--nodes", "2", "--shard-rows", "10", "--probe", "2s", "--prompts", "1K,0.5M", "--cost", "2.5",
                   "--failures", "20h")  # fmt: skip
    assert told["worker"]["as"] == "a probe"
    assert [row["prompts"] for row in told["forecasts"]] == [1_000, 500_000]
    figures = told["figures"]
    assert {figures[name]["from"] for name in ("tokens_per_sec", "start_sec", "once_sec", "file_rows")} == {"measured"}
    assert {figures[name]["from"] for name in ("shard_spread", "launch_sec", "commit_sec")} == {"assumed"}
    assert (figures["cost_per_hour"], figures["hours_between_failures"]) == (
        {"value": 2.5, "from": "given"}, {"value": 20.0, "from": "given"},
    )  # fmt: skip


def test_every_figure_says_where_it_is_from_and_the_table_tells_the_same(tmp_path, monkeypatch, capsys):
    told = told_of("--measured", write_run(tmp_path / "run"), "--nodes", "1,64", "--prompts", "1M,1B",
                   "--shard-rows", "16384", "--failures", "50h")  # fmt: skip
    assert all(re.match("measured|assumed|given", figure["from"]) for figure in told["figures"].values())
    views.print_scale(told, as_json=True)
    assert json.loads(capsys.readouterr().out) == told
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", "80")
    views.print_scale(told, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[:5])
    assert lines[0].split()[:4] == ["prompts", "workers", "shards", "hours"]
    for line, row in zip(lines[1:5], told["forecasts"], strict=True):
        words = line.split()
        assert words[0] == {10**6: "1M", 10**9: "1B"}[row["prompts"]]
        assert float(words[3].replace(",", "")) == pytest.approx(row["hours"], rel=0.006)
        assert int(words[-1].replace(",", "")) == row["advised_shard_rows"]
    for name in told["figures"]:
        assert any(line.startswith(name.replace("_", " ")) for line in lines)


def test_fewer_rows_a_shard_are_advised_where_workers_wait_and_more_where_the_driver_is_slow(tmp_path):
    told = told_of("--measured", write_run(tmp_path / "run"), "--nodes", "1,40", "--prompts", "1M", "--shard-rows", "16384")
    one, many = told["forecasts"]
    assert one["advised_shard_rows"] == 16_384
    assert many["idle"] > 0.1
    assert many["advised_shard_rows"] < 16_384
    tried = {size["shard_rows"]: size for size in many["shard_sizes"]}
    best = tried[many["advised_shard_rows"]]
    assert best["hours"] < tried[16_384]["hours"]
    assert best["hours"] <= 1.02 * min(size["hours"] for size in tried.values())
    assert best["requests"] > tried[16_384]["requests"]
    sizes = [{"shard_rows": 1_024, "hours": 3.0}, {"shard_rows": 4_096, "hours": 1.01}, {"shard_rows": 16_384, "hours": 1.0}]
    assert scale.advise(1_024, sizes) == 4_096
    assert scale.advise(16_384, sizes) == 16_384
    # 100 000 commits of 20 ms are longer than the shards of a thousand workers.
    told = told_of("--measured", tmp_path / "run", "--nodes", "10000", "--prompts", "100M", "--shard-rows", "1024")
    assert told["forecasts"][0]["advised_shard_rows"] > 1_024


def test_shards_that_would_be_given_up_and_rows_that_are_read_often_are_told(tmp_path, monkeypatch, capsys):
    told = told_of("--measured", write_run(tmp_path / "run"), "--nodes", "8", "--prompts", "1M", "--shard-rows", "16384",
                   "--failures", "10m")  # fmt: skip
    assert told["forecasts"][0]["given_up_shards"] > 1
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    views.print_scale(told, as_json=False)
    shown = capsys.readouterr().out
    assert "shards would be given up after three deaths each" in shown
    assert "each row is decoded up to 4.5 times: write the input in row groups no larger than a shard" in shown


def test_a_run_in_small_shards_is_said_to_tell_too_slow_a_pace(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run")
    for shard_rows, said in ((16_384, True), (200, False)):
        told = told_of("--measured", folder, "--nodes", "1", "--prompts", "2K", "--shard-rows", shard_rows)
        assert told["worker"]["shard_rows"] == 100
        with monkeypatch.context() as patch:
            patch.setattr(views, "on_terminal", lambda _: True)
            views.print_scale(told, as_json=False)
        assert ("measured in shards of 100 rows: larger ones share more" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nodes", "two"], "--nodes must be numbers of workers like 1,8,64, each from 1 to 100,000, not 'two'"),
        (["--nodes", "0"], "--nodes must be"),
        (["--nodes", "1,,2"], "--nodes must be"),
        (["--nodes", "1.5"], "--nodes must be"),
        (["--nodes", "1", "--prompts", "1T"], "--prompts must be numbers of prompts like 2000,1M,1B"),
        (["--nodes", "1", "--prompts", "2000B"], "--prompts must be"),
        (["--nodes", "1", "--failures", "often"], "--failures must be a length of time"),
        (["--nodes", "1", "--launch", "soon"], "--launch must be a length of time"),
        (["--nodes", "1", "--cost", "$2"], "--cost must be what a worker's hour costs, a number like 2.5, not '$2'"),
        (["--nodes", "1", "--cost", "-1"], "--cost must be"),
        (["--nodes", "1", "--cores", "0"], "--cores"),
        (["--nodes", "1", "--shard-rows", "10"], "--prompts 1,000,000,000 in shards of 10 rows are 100,000,000 shards"),
        (["--nodes", "1", "--shard-rows", "0"], "--shard-rows must be at least 1"),
        ([], "--measured goes with --nodes N,N, the numbers of workers"),
        (
            ["--nodes", "1", "prompts.parquet"],
            "--nodes needs a worker's pace: from INPUT, by a probe, or from --measured OUTPUT",
        ),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(tmp_path, options, sentence):
    done = call("--measured", write_run(tmp_path / "run"), *options)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_tells_no_pace_is_refused(job, tmp_path):
    plan = [job.inputs, "-m", job.model, "-i", job.items, "--device", "cpu", "--dtype", "float32", "--quiet"]
    for arguments, sentence in (
        ([], "Missing argument 'INPUT...'"),
        (["--nodes", "1"], "--nodes needs a worker's pace"),
        ([*plan, "--nodes", "1", "--probe", "0"], "--nodes needs the pace of a worker"),
        ([*plan, "--prompts", "1M"], "--prompts goes with --nodes"),
    ):
        done = call(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    torn, old, idle = (write_run(tmp_path / name, **more) for name, more in (
        ("torn", {"parts": {"part-00000.parquet": 7}}), ("old", {"shards": {}}), ("idle", {"seconds": 0.0})))  # fmt: skip
    for folder, sentence in (
        (tmp_path / "absent", "not the whole result of a run"),
        (torn, "not the whole result of a run: part-00000.parquet is missing"),
        (old, "encoded nothing, or does not tell how long"),
        (idle, "encoded nothing, or does not tell how long"),
    ):
        with pytest.raises(OutputError, match=sentence):
            scale.of_run(folder)
        assert call("--measured", folder, "--nodes", "1").exit_code == 6
    on_gpu = scale.of_run(write_run(tmp_path / "run"))
    question = scale.ask(dict.fromkeys(OPTIONS) | {"nodes": "1", "cores": 4})
    with pytest.raises(UsageError, match="--cores is of workers on CPUs, and the measured one is on cuda"):
        scale._answer(question, replace(on_gpu, device="cuda"), None)


def test_a_plan_without_nodes_is_what_it_was(job):
    told = told_of(
        job.inputs, "-m", job.model, "-i", job.items, "--device", "cpu", "--dtype", "float32", "--probe", "0", "--quiet"
    )
    assert "forecasts" not in told
    assert told["rows"] == 30


def shown_of_the_worked_run(folder: Path, capsys) -> str:
    """What a terminal shows of the run that docs/scale.md tells of: 2 000 prompts, SmolLM2-135M, two cores."""
    of_shard = {"rows": 2_000, "tokens": 565_918, "start_sec": 3.47, "read_sec": 0.71, "encode_sec": 84.74, "cache_sec": 0.0,
                "search_sec": 3.12, "write_sec": 0.05}  # fmt: skip
    manifest = {
        "made_by": "prefill-score", "fingerprint": {}, "model": {}, "items": {}, "environment": {"cpus": 2},
        "options": {"shard_rows": 16_384, "top_k": 100, "keep_columns": [], "exclude_column": "seen_items"},
        "inputs": {"files": [{"rows": 2_000, "size_bytes": 462_000}]},
        "totals": of_shard | {"wall_sec": 96.03, "device": "cpu", "dtype": "bfloat16"},
        "shards": {name: [value] for name, value in of_shard.items()} | {"threads": [2]},
        "parts": {"part-00000.parquet": 842_000},
    }  # fmt: skip
    save_run(folder, manifest)
    (folder / "part-00000.parquet").write_bytes(bytes(842_000))
    question = scale.ask(dict.fromkeys(OPTIONS) | {"nodes": "1,8,64,1024", "prompts": "1M,100M,1B"})
    views.print_scale(scale.scale_measured(question, Path(folder.name), None), as_json=False)
    return "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_the_worked_table_is_what_the_command_tells_of_that_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = shown_of_the_worked_run(tmp_path / "prompts.topk", capsys)
    assert f"```text\n{shown}\n```" in (PROJECT / "docs" / "scale.md").read_text()
