"""Figures of lists: metrics against trec_eval, intervals against SciPy, the rest against brute force and by hand."""

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from conftest import PROJECT, random_prompts, write_prompts
from judging import evaluated, random_lists, random_truths, refused, values_of, write_result
from scipy import stats
from typer.testing import CliRunner

from prefill_cli import cli, views
from prefill_cli.tools.judging import bootstrap
from prefill_cli.tools.judging.bootstrap import Bootstrap, Tally

KS = (1, 3, 5, 10, 20)
IN = "-k", ",".join(map(str, KS))


def catalogue(kind: str, n: int = 100) -> list:
    """Ids that are no row numbers."""
    numbers = np.random.default_rng(5).permutation(10 * n)[:n]
    return [f"item {i}" for i in numbers] if kind == "string" else [int(i) * 7 - 300 for i in numbers]


def trec_eval(truths: list[list], lists: list[list], ks=KS) -> dict[tuple[str, int], float]:
    """Means of all metrics by trec_eval; who has no list counts with 0."""
    names = {
        "recall": "recall_{}",
        "precision": "P_{}",
        "hit_rate": "success_{}",
        "ndcg": "ndcg_cut_{}",
        "map": "map_cut_{}",
    }
    wanted = {re.sub("_{}$", "", form) + "." + ",".join(map(str, ks)) for form in names.values()}
    relevant = {f"u{i}": {str(item): 1 for item in some} for i, some in enumerate(truths)}
    runs = {
        f"u{i}": {str(item): float(1000 - rank) for rank, item in enumerate(some)} for i, some in enumerate(lists) if some
    }
    scores = list(pytrec_eval.RelevanceEvaluator(relevant, wanted).evaluate(runs).values())
    found = {(name, k): sum(s[form.format(k)] for s in scores) / len(truths) for name, form in names.items() for k in ks}
    for k in ks:
        first = {user: dict(list(run.items())[:k]) for user, run in runs.items()}
        scores = pytrec_eval.RelevanceEvaluator(relevant, {"recip_rank"}).evaluate(first).values()
        found["mrr", k] = sum(s["recip_rank"] for s in scores) / len(truths)
    return found


def table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["integer", "string"])
@pytest.mark.parametrize("layout", ["nested", "long"])
@pytest.mark.parametrize("most", [1, 3, 12])
def test_metrics_equal_trec_evals(tmp_path, kind, layout, most):
    rng, ids = np.random.default_rng(most), catalogue(kind)
    lists, truths = random_lists(rng, 300, ids[:80]), random_truths(rng, 300, ids, most)
    users = list(range(300))
    out = write_result(tmp_path / "out", users, lists, layout=layout, part_rows=90)
    inputs = table(tmp_path / "in.parquet", user_id=users)
    if layout == "long":  # which leaves users without an item out: the input tells of them
        shutil.rmtree(out)
        out = write_result(tmp_path / "out", users, lists, layout=layout, part_rows=90, inputs=inputs)
    order = rng.permutation(300)
    table(tmp_path / "truth.parquet", user_id=order, next=[truths[i] for i in order])
    found = evaluated(out, "--truth", "next", "--truth-file", tmp_path / "truth.parquet", *IN)
    expected = trec_eval(truths, lists)
    assert values_of(found["metrics"]) == pytest.approx(expected, abs=1e-9)
    assert expected["recall", 20] > 0.05
    empty = sum(not one for one in lists)
    assert (found["truth"]["users"], found["truth"]["without_list"], found["truth"]["not_in_run"]) == (300, empty, 0)
    assert empty > 3


@pytest.mark.parametrize("single", [True, False])
def test_held_out_items_may_be_a_column_of_the_result_one_a_user_or_several(tmp_path, single):
    rng, ids = np.random.default_rng(0), catalogue("string")
    lists, truths = random_lists(rng, 200, ids), random_truths(rng, 200, ids, 1 if single else 6)
    column = [one[0] for one in truths] if single else [[*one, None, one[0]] for one in truths]  # said twice: counts once
    out = write_result(tmp_path / "out", [5] * 200, lists, kept={"next": column})  # ids need not be distinct
    assert values_of(evaluated(out, "--truth", "next", *IN)["metrics"]) == pytest.approx(trec_eval(truths, lists), abs=1e-9)


def test_metrics_of_a_list_worked_by_hand(tmp_path):
    out = write_result(tmp_path / "out", [1], [["a", "b", "c", "d"]], kept={"next": [["d", "z", "b"]]}, top_k=4)
    found = values_of(evaluated(out, "--truth", "next", "-k", "1,2,4")["metrics"])
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert found == pytest.approx(
        {
            ("recall", 1): 0, ("recall", 2): 1 / 3, ("recall", 4): 2 / 3,
            ("precision", 1): 0, ("precision", 2): 1 / 2, ("precision", 4): 2 / 4,
            ("hit_rate", 1): 0, ("hit_rate", 2): 1, ("hit_rate", 4): 1,
            ("ndcg", 1): 0, ("ndcg", 2): (1 / math.log2(3)) / (1 + 1 / math.log2(3)),
            ("ndcg", 4): (1 / math.log2(3) + 1 / math.log2(5)) / ideal,
            ("mrr", 1): 0, ("mrr", 2): 1 / 2, ("mrr", 4): 1 / 2,
            ("map", 1): 0, ("map", 2): (1 / 2) / 3, ("map", 4): (1 / 2 + 2 / 4) / 3,
        }
    )  # fmt: skip


def test_users_without_held_out_items_are_left_out_and_counted(tmp_path):
    column = pa.array([["a"], [], None, [None], ["b"]], pa.list_(pa.string()))
    out = write_result(tmp_path / "out", [1, 2, 3, 4, 5], [["a", "b"]] * 5, kept={"next": column})
    found = evaluated(out, "--truth", "next", "-k", 1)
    assert (found["truth"]["users"], found["truth"]["without_truth"]) == (2, 3)
    assert found["metrics"]["recall"]["1"]["mean"] == 0.5


def test_where_nobody_has_held_out_items_there_is_no_metric(tmp_path):
    out = write_result(tmp_path / "out", [1], [["a"]], kept={"next": pa.array([None], pa.string())})
    found = evaluated(out, "--truth", "next")
    assert (found["metrics"], found["truth"]["users"], found["catalogue"]["coverage"]["1"]) == (None, 0, 0.01)


REJECTS = {
    "user_id": [3, 7],
    "source_file": ["in.parquet"] * 2,
    "source_row": [2, 6],
    "reason": ["", ""],
    "detail": ["", ""],
}


@pytest.mark.parametrize("layout", ["nested", "long"])
@pytest.mark.parametrize("source", ["file", "input"])
def test_rejected_rows_and_empty_lists_count_as_misses(tmp_path, layout, source):
    users, lists = [1, 2, 4, 5, 6, 8], [["a"], ["b"], [], ["a"], ["b"], []]
    inputs = table(tmp_path / "in.parquet", user_id=range(1, 9), next=["a"] * 7 + [None])
    inputs = inputs.relative_to(tmp_path)
    out = write_result(tmp_path / "out", users, lists, layout=layout, inputs=inputs, rejects=REJECTS)
    named = ()
    if source == "file":  # which knows people of whom the run never heard
        table(tmp_path / "truth.parquet", user_id=[20, *range(1, 9), 30], next=["b", *["a"] * 7, None, "a"])
        named = "--truth-file", "truth.parquet"
    found = evaluated(out, "--truth", "next", *named, "-k", 1)
    strangers = 2 if source == "file" else 0
    assert found["truth"]["users"] == 7
    assert (found["truth"]["without_list"], found["truth"]["not_in_run"]) == (3, strangers)
    assert found["metrics"]["hit_rate"]["1"]["mean"] == pytest.approx(2 / 7)


def test_a_column_of_the_result_says_how_many_rows_it_cannot_know(tmp_path):
    rows = {"user_id": [1, 2, 3], "lists": [["a"], [], ["b"]]}
    for layout, unknown in (("nested", 2), ("long", 3)):
        out = write_result(tmp_path / layout, *rows.values(), layout=layout, kept={"next": ["a", "a", "a"]}, rejects=REJECTS)
        assert evaluated(out, "--truth", "next")["truth"]["unknown"] == unknown


def test_repeated_ids_do_not_matter_where_the_input_has_the_column(tmp_path):
    rng, ids = np.random.default_rng(1), catalogue("integer")
    lists, truths = random_lists(rng, 60, ids), random_truths(rng, 60, ids, 3)
    inputs = table(tmp_path / "in.parquet", user_id=[i // 2 for i in range(60)], next=truths)
    out = write_result(tmp_path / "out", [i // 2 for i in range(60)], lists, inputs=inputs)
    assert values_of(evaluated(out, "--truth", "next", *IN)["metrics"]) == pytest.approx(trec_eval(truths, lists), abs=1e-9)


def test_segments_are_what_each_gives_alone(tmp_path):
    rng, ids = np.random.default_rng(2), catalogue("string")
    lists, truths = random_lists(rng, 240, ids), random_truths(rng, 240, ids, 6)
    country = [["NO", "KE", None][i] for i in rng.integers(0, 3, 240)]
    seen = random_lists(rng, 240, ids, 9)
    columns = {"user_id": range(240), "next": truths, "country": country, "seen": seen}
    inputs = table(tmp_path / "in.parquet", **columns)
    out = write_result(tmp_path / "out", range(240), lists, inputs=inputs, exclude="seen")
    found = evaluated(out, "--truth", "next", "--by", "country", *IN)
    assert [segment["value"] for segment in found["segments"]] == ["KE", "NO", None]
    for segment in found["segments"]:
        mine = [i for i in range(240) if country[i] == segment["value"]]
        assert segment["users"] == len(mine)
        assert values_of(segment["metrics"]) == pytest.approx(trec_eval([truths[i] for i in mine], [lists[i] for i in mine]))
        shown = {k: len({item for i in mine for item in lists[i][:k]}) / 100 for k in KS}
        assert segment["catalogue"]["coverage"] == pytest.approx({str(k): share for k, share in shown.items()})
        base = popular_lists(seen, seen)
        alone = trec_eval([truths[i] for i in mine], [base[i] for i in mine])
        assert values_of(segment["popularity_baseline"]["metrics"]) == pytest.approx(alone)
        counted = Counter(item for i in mine for item in base[i][:5])
        assert segment["popularity_baseline"]["catalogue"]["coverage"]["5"] == len(counted) / 100


def popular_lists(histories: list, excluded: list, k: int = 20) -> list[list]:
    """The most popular items without the excluded ones, made by hand for every user."""
    counts = Counter(item for history in histories for item in set(history or ()))
    order = sorted(counts, key=lambda item: (-counts[item], item))
    return [[item for item in order if item not in set(gone or ())][:k] for gone in excluded]


def catalogue_by_hand(lists: list[list], histories: list, items: int, k: int) -> dict[str, float]:
    degree = Counter(item for history in histories for item in set(history or ()))
    places = [item for one in lists for item in one[:k]]
    counts = sorted([*Counter(places).values(), *[0] * (items - len(set(places)))])
    users = len(histories)
    popularity = np.mean([degree[item] / users for item in places])
    usual = np.mean([degree[item] / users for history in histories for item in set(history or ())])
    return {
        "coverage": len(set(places)) / items,
        "gini": sum((2 * j - items - 1) * c for j, c in enumerate(counts, 1)) / ((items - 1) * sum(counts)),
        "popularity": popularity,
        "popularity_lift": popularity / usual - 1,
        "novelty": np.mean([math.log2(users / max(degree[item], 1)) for item in places]),
    }


@pytest.mark.parametrize("kind", ["integer", "string"])
@pytest.mark.parametrize("exclude", ["seen", "other", None])
@pytest.mark.parametrize("most", [1, 8])
def test_the_baseline_is_the_list_that_one_would_make_by_hand(tmp_path, kind, exclude, most):
    rng, ids = np.random.default_rng(3), catalogue(kind)
    lists, truths = random_lists(rng, 250, ids), random_truths(rng, 250, ids, most)
    popular = [ids[int(i)] for i in rng.zipf(1.4, 3000) if i <= 90]
    seen = [[popular[i] for i in rng.integers(0, len(popular), rng.integers(0, 40))] for _ in range(250)]  # repeats too
    seen[3] = seen[4] = None
    other = random_lists(rng, 250, ids, 30)
    gone = {"seen": seen, "other": other, None: [[]] * 250}[exclude]
    inputs = table(tmp_path / "in.parquet", user_id=range(250), next=truths, seen=seen, other=other)
    out = write_result(tmp_path / "out", range(250), lists, inputs=inputs, exclude=exclude)
    base = popular_lists(seen, gone)
    for source in ((), ("--truth-file", inputs)):
        found = evaluated(out, "--truth", "next", "--history-column", "seen", *IN, *source)
        assert values_of(found["popularity_baseline"]["metrics"]) == pytest.approx(trec_eval(truths, base), abs=1e-9)
    for k in KS:
        for what, own in ((found, lists), (found["popularity_baseline"], base)):
            told = {name: values[str(k)] for name, values in what["catalogue"].items()}
            assert told == pytest.approx(catalogue_by_hand(own, seen, 100, k), abs=1e-9)


def test_with_the_column_in_the_result_and_rejected_rows_the_baseline_is_for_the_same_users(tmp_path):
    seen, truth = [["a", "b"], ["b"], ["b", "c"], ["c"]], ["c", "b", "a", "b"]
    inputs = table(tmp_path / "in.parquet", user_id=[1, 2, 3, 4], seen=seen)
    rejects = {"user_id": [2], "source_file": ["in.parquet"], "source_row": [1], "reason": [""], "detail": [""]}
    out = write_result(
        tmp_path / "out", [1, 3, 4], [["c"], ["a"], ["a"]], inputs=inputs.relative_to(tmp_path), exclude="seen",
        kept={"next": [truth[0], *truth[2:]]}, rejects=rejects,
    )  # fmt: skip
    found = evaluated(out, "--truth", "next", "-k", 1)
    assert popular_lists(seen, seen, 1) == [["c"], ["c"], ["a"], ["b"]]
    assert found["metrics"]["recall"]["1"]["mean"] == pytest.approx(2 / 3)
    assert found["popularity_baseline"]["metrics"]["recall"]["1"]["mean"] == 1.0, "of users 1, 3 and 4"


def test_without_histories_the_rest_is_told_and_why(tmp_path, caplog):
    out = write_result(tmp_path / "out", [1, 2], [["a"], ["b"]], kept={"next": ["a", "a"]})
    found = evaluated(out, "--truth", "next")
    assert found["popularity_baseline"] is None
    assert list(found["catalogue"]) == ["coverage", "gini"]
    inputs = table(tmp_path / "in.parquet", user_id=[1, 2], seen=[["a"], ["b"]])
    out = write_result(tmp_path / "out2", [1, 2], [["a"], ["b"]], inputs=inputs, exclude="seen")
    assert evaluated(out)["popularity_baseline"]["metrics"] is None
    table(inputs, user_id=[1, 2], seen=[["a"], ["c"]])
    assert evaluated(out)["popularity_baseline"] is None, "the input is another one now"
    code, line = refused(out, "--history-column", "seen")
    assert (code, line) == (3, f"error: {inputs}: the input was changed after {out} was made from it")


def monte_carlo_error(values: np.ndarray, replicates: int) -> float:
    """Standard error of an interval's end: of a 2.5 % quantile of a normal sample of so many means."""
    return values.std() / math.sqrt(len(values)) * math.sqrt(0.025 * 0.975 / replicates) / stats.norm.pdf(1.96)


@pytest.mark.parametrize(("users", "groups"), [(400, 8_192), (4_000, 1_024)])
def test_intervals_are_those_of_plain_resampling(monkeypatch, users, groups):
    monkeypatch.setattr(bootstrap, "GROUPS", groups)
    values = np.random.default_rng(7).beta(0.3, 2, users)
    values[: users // 3] = 0
    tally = Tally((1,), users)
    tally.add(np.arange(users), np.zeros(users, np.int64), np.tile(values, (len(tally.sums), 1)))
    told = tally.summary(Bootstrap(4_000, seed=1))["recall"]["1"]
    plain = stats.bootstrap((values,), np.mean, n_resamples=4_000, method="percentile", rng=np.random.default_rng(2))
    error = math.sqrt(2) * monte_carlo_error(values, 4_000)
    if users > groups:  # the spread itself is known from so many groups
        error += values.std() / math.sqrt(users) * 1.96 / math.sqrt(2 * groups)
    assert told["mean"] == pytest.approx(values.mean(), abs=1e-12)
    assert told["low"] == pytest.approx(plain.confidence_interval.low, abs=3 * error)
    assert told["high"] == pytest.approx(plain.confidence_interval.high, abs=3 * error)
    assert 3 * error < 0.35 * (told["high"] - told["low"])


def test_intervals_hold_the_mean_of_nineteen_populations_in_twenty(monkeypatch):
    """400 samples of 80 users: the share of intervals with the true mean in them, within 3 standard errors of 0.94."""
    rng, inside = np.random.default_rng(0), 0
    for seed in range(400):
        tally = Tally((1,), 80)
        tally.add(np.arange(80), np.zeros(80, np.int64), np.tile((rng.random(80) < 0.4).astype(float), (len(tally.sums), 1)))
        told = tally.summary(Bootstrap(300, seed))["recall"]["1"]
        inside += told["low"] <= 0.4 <= told["high"]
    assert abs(inside / 400 - 0.94) < 3 * math.sqrt(0.94 * 0.06 / 400)


def test_figures_do_not_depend_on_parts_row_groups_and_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "GROUPS", 64)
    rng, ids = np.random.default_rng(4), catalogue("string")
    lists = [one or ids[:1] for one in random_lists(rng, 500, ids)]
    truths, seen = random_truths(rng, 500, ids, 6), random_lists(rng, 500, ids, 12)
    inputs = table(tmp_path / "in.parquet", user_id=range(500), seen=seen)
    found = []
    for layout, rows in (("nested", 500), ("nested", 33), ("long", 41)):
        out = write_result(tmp_path / f"{layout}-{rows}", range(500), lists, layout=layout, part_rows=rows, inputs=inputs,
                           exclude="seen", kept={"next": truths})  # fmt: skip
        told = evaluated(out, "--truth", "next", *IN)
        assert told.pop("output") == told["truth"].pop("source") == str(out)
        found.append(told)
    assert found[0] == found[1] == found[2], "to the last bit"
    assert found[0]["metrics"]["ndcg"]["10"]["low"] < found[0]["metrics"]["ndcg"]["10"]["mean"]


def test_the_seed_and_the_number_of_replicates_are_options(tmp_path):
    rng, ids = np.random.default_rng(4), catalogue("integer")
    out = write_result(
        tmp_path / "out", range(90), random_lists(rng, 90, ids), kept={"next": random_truths(rng, 90, ids, 2)}
    )
    first, again, other, none = (
        evaluated(out, "--truth", "next", *more)["metrics"] for more in ((), (), ("--seed", 1), ("--bootstrap", 0))
    )
    assert first == again
    assert values_of(first) == values_of(other) == values_of(none)
    assert first != other
    assert none["map"]["5"].keys() == {"mean"}


def test_a_run_of_the_command_is_evaluated_with_what_it_left_out(job, tmp_path):
    """The whole way: rejects, histories and held-out items of a real run, truths from its own input."""
    rng, ids = np.random.default_rng(8), [f"i{i}" for i in range(50)]
    seen, truths = random_lists(rng, 40, ids, 6), random_truths(rng, 40, ids, 3)
    prompts = [None if i in (4, 20) else text for i, text in enumerate(random_prompts(40))]
    inputs = write_prompts(job.inputs, prompts, seen=pa.array(seen, pa.list_(pa.string())), next=pa.array(truths))
    job.run(exclude_column="seen", keep_columns=("next",), max_rejects="10%", layout="long")
    rows = pq.read_table(job.out).to_pylist()
    lists = [[row["item_id"] for row in rows if row["user_id"] == 1000 + i] for i in range(40)]
    for more, who in (((), [i for i in range(40) if i not in (4, 20)]), (("--truth-file", inputs), range(40))):
        found = evaluated(job.out, "--truth", "next", "-k", "1,3,5", *more)
        expected = trec_eval([truths[i] for i in who], [lists[i] for i in who], (1, 3, 5))
        assert values_of(found["metrics"]) == pytest.approx(expected, abs=1e-9)
        base = popular_lists(seen, seen, 5)
        expected = trec_eval([truths[i] for i in who], [base[i] for i in who], (1, 3, 5))
        assert values_of(found["popularity_baseline"]["metrics"]) == pytest.approx(expected, abs=1e-9)
        assert found["truth"]["unknown"] == (0 if more else 2)


@pytest.fixture
def small(tmp_path):
    inputs = table(tmp_path / "in.parquet", user_id=[1, 2], seen=[["a"], ["b"]], later=["a", "b"], age=[30, 40])
    kept = {"next": ["a", "b"], "size": [1, 2], "pairs": [[1], [2]]}
    return write_result(tmp_path / "out", [1, 2], [["a"], ["b"]], top_k=10, inputs=inputs, exclude="seen", kept=kept)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--truth", "nxt"), 3, r"column 'nxt' is not in \S+ \(did you mean 'next'\?\), and .* not in its input \(.*"),
        (("--truth", "size"), 3, r"\S+out: column 'size' holds integer values, but the result's item ids are text"),
        (("--truth", "age"), 3, r"\S+in.parquet: column 'age' holds integer values, but the result's item ids are text"),
        (("--truth", "next", "--by", "pairs"), 3, r"\S+out: column 'pairs' is .*list.*; segments are text, .*"),
        (("--truth", "next", "-k", "1,11"), 2, r"--top-k 11: the lists of \S+out have at most 10 items"),
        (("--truth", "next", "-k", "0"), 2, r"--top-k must be numbers from 1 on, not 0"),
        (("--truth", "next", "-k", "1;2"), 2, r"--top-k must be numbers like 1,10,100, not '1;2'"),
        (("--truth-file", "in.parquet"), 2, r"--truth-file needs --truth COLUMN, its column of held-out items"),
        (("--rbo-p", "1"), 2, r"--rbo-p must lie between 0 and 1, not be 1.0"),
        (("--truth", "next", "--truth-file", "gone.parquet"), 3, r"gone.parquet: no such file or folder.*"),
        (("--truth", "next", "--truth-file", "in.parquet"), 3, r"in.parquet: no column 'next'.*"),
        (("--history-column", "age"), 3, r"\S+in.parquet: column 'age' is int64, which is not a list of item ids"),
        (("--history-column", "sen"), 3, r"\S+in.parquet: no column 'sen' \(did you mean 'seen'\?\)"),
        (("--against", "gone"), 6, r"gone: not the result folder of a run \(no readable _manifest.json\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(small, arguments, code, sentence):
    found, line = refused(small, *arguments)
    assert re.fullmatch("error: " + sentence + r"(; name a --truth-file|; see .*)?", line), line
    assert found == code


def test_ids_that_occur_more_than_once_are_not_joined(tmp_path):
    truth = table(tmp_path / "truth.parquet", user_id=[1, 2, 2], next=["a", "b", "a"])
    out = write_result(tmp_path / "out", [1, 2], [["a"], ["b"]])
    code, line = refused(out, "--truth", "next", "--truth-file", truth)
    assert code == 3
    assert line == (
        f"error: {truth}: user ids that occur more than once (2) cannot be joined; a user's held-out items belong into one "
        "row, as a list"
    )
    truth = table(tmp_path / "truth.parquet", user_id=[1, 2], next=["a", "b"])
    out = write_result(tmp_path / "twice", [1, 1, 2], [["a"], ["b"], ["b"]])
    code, line = refused(out, "--truth", "next", "--truth-file", truth)
    assert code == 3
    assert line == (
        f"error: {out}: user ids that occur more than once (1) cannot be joined; keep the column in the output instead "
        "(run --keep-columns)"
    )


def test_ids_of_two_kinds_are_not_joined(tmp_path):
    truth = table(tmp_path / "truth.parquet", user_id=["1", "2"], next=["a", "b"])
    out = write_result(tmp_path / "out", [1, 2], [["a"], ["b"]])
    code, line = refused(out, "--truth", "next", "--truth-file", truth)
    assert (code, line) == (3, f"error: {truth}: its ids ('user_id') are text, those of {out} integer")


def test_too_many_segments_are_refused(tmp_path):
    out = write_result(tmp_path / "out", range(300), [["a"]] * 300, kept={"next": ["a"] * 300, "age": range(300)})
    code, line = refused(out, "--truth", "next", "--by", "age")
    assert code == 2
    assert line == f"error: {out}: column 'age' has more than 256 values; --by takes a column of few, like a country"


@pytest.mark.parametrize("harm", ["success", "size", "bytes"])
def test_an_unfinished_or_damaged_result_is_an_error_of_the_output(small, harm):
    part = small / "part-00000.parquet"
    if harm == "success":
        (small / "_SUCCESS").unlink()
    elif harm == "size":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        content = bytearray(part.read_bytes())
        content[60] ^= 0xFF
        part.write_bytes(content)
    code, line = refused(small, "--truth", "next", "--bootstrap", 0)
    assert code == 6
    assert str(small) in line


def test_without_questions_the_catalogue_is_told(small):
    found = evaluated(small)
    assert (found["lists"], found["truth"], found["metrics"], found["segments"]) == (2, None, None, None)
    assert found["catalogue"]["coverage"] == {"1": 0.02, "5": 0.02, "10": 0.02}


def test_a_result_of_no_rows_has_no_figures(job):
    write_prompts(job.inputs, [], next=pa.array([], pa.string()), seen=pa.array([], pa.list_(pa.string())))
    job.run(keep_columns=("next",), exclude_column="seen")
    found = evaluated(job.out, "--truth", "next", "--by", "next")
    assert (found["lists"], found["metrics"], found["segments"]) == (0, None, [])
    assert found["catalogue"]["gini"] == {"1": None, "5": None}


def test_people_get_tables_and_machines_one_json_object(small):
    reading, window = pty.openpty()
    command = [sys.executable, "-m", "prefill_cli", "evaluate", small, "--truth", "next", "--against", small, "-k", "1,10"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(PROJECT), "NO_COLOR": "1"}
    subprocess.run(command, stdout=window, stderr=subprocess.PIPE, env=environment, check=True, timeout=60)
    os.close(window)
    text = b""
    while True:
        try:
            text += os.read(reading, 65_536)
        except OSError:  # all is read
            break
    os.close(reading)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode().replace("\r", ""))
    assert re.search(r"^ +@1 +@10 *$", plain, re.M)
    assert re.search(r"^recall +1\.0000 ±0\.0000 +1\.0000 ±0\.0000 *$", plain, re.M)
    assert re.search(r"^coverage +0\.0200 +0\.0200 *$", plain, re.M)
    assert re.search(r"^unchanged +100\.00% *$", plain, re.M)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert json.loads(done.stdout)["against"]["unchanged"] == 1.0
    assert done.stdout.count("\n") == 1


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The sample data's result, in the folder of that name."""
    from conftest import Watcher

    from prefill_cli import pipeline
    from prefill_cli.config import RunConfig
    from prefill_cli.engines.local import run_shards

    folder, data = tmp_path_factory.mktemp("sample"), PROJECT / "sample_data"
    config = RunConfig(
        inputs=(str(data / "prompts.parquet"),), model=str(data / "model"), items=data / "items.parquet", top_k=50,
        output=folder / "prompts.topk", exclude_column="seen_items", keep_columns=("next_item",), device="cpu",
        dtype="float32",
    )  # fmt: skip
    pipeline.run(config, run_shards, Watcher())
    return folder


def test_the_document_shows_what_the_command_prints(sample, monkeypatch):
    monkeypatch.chdir(sample)
    monkeypatch.setattr(views, "on_terminal", lambda _: True)
    line = ["evaluate", "prompts.topk", "--truth", "next_item", "-k", "1,10,50"]
    printed = CliRunner().invoke(cli.app, line, env={"COLUMNS": "100"}).stdout
    shown = re.search(r"```text\n(output  .*?)```", (PROJECT / "docs" / "evaluate.md").read_text(), re.DOTALL)
    assert shown
    number = r"-?\d+\.\d+"
    words = [[re.sub(number, "0", line).split() for line in text.strip().splitlines()] for text in (shown[1], printed)]
    assert words[0] == words[1], printed
    figures = [[float(one) for one in re.findall(number, text)] for text in (shown[1], printed)]
    assert figures[0] == pytest.approx(figures[1], abs=0.005), "another machine rounds otherwise: a user or two of 2,000"
    assert len(figures[0]) > 80


def test_a_user_whom_no_replicate_draws_has_no_interval():
    tally = Tally((1,), 1)
    tally.add(np.array([0]), np.array([0]))
    seed = next(seed for seed in range(50) if np.random.default_rng(seed).poisson(1.0, 1)[0] == 0)
    assert tally.summary(Bootstrap(1, seed))["recall"]["1"] == {"mean": 0.0}
