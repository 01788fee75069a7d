"""Two runs' lists side by side: rank-biased overlap against its formula, the rest against brute force."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from judging import evaluated, random_lists, random_truths, write_result
from test_evaluate import catalogue, trec_eval

from prefill_cli.errors import InputError, OutputError
from prefill_cli.tools.judging import comparison
from prefill_cli.tools.judging.comparison import compare_runs

KS = (1, 3, 10, 20)


def rbo_by_formula(a: list, b: list, p: float) -> float:
    """Equation 32 of Webber, Moffat and Zobel (2010), term by term."""
    short, long = sorted((a, b), key=len)
    s, n = len(short), len(long)

    def x(d: int) -> int:
        return len(set(short[:d]) & set(long[:d]))

    first = sum(x(d) / d * p**d for d in range(1, n + 1))
    second = sum(x(s) * (d - s) / (s * d) * p**d for d in range(s + 1, n + 1))
    return (1 - p) / p * (first + second) + ((x(n) - x(s)) / n + x(s) / s) * p**n


def compared(tmp_path: Path, mine: list[list], theirs: list[list], p: float = 0.9) -> dict:
    for name, lists in (("a", mine), ("b", theirs)):
        write_result(tmp_path / name, range(len(lists)), lists, item_type=pa.string())
    return compare_runs(tmp_path / "a", tmp_path / "b", KS, rbo_p=p)


@pytest.mark.parametrize(
    ("a", "b", "p", "rbo"),
    [
        ("abc", "abc", 0.9, 1.0),
        ("abc", "xyz", 0.9, 0.0),
        ("ab", "ba", 0.5, 0.5),  # (1 - p) / p * p^2 + p^2
        ("a", "ab", 0.9, 1.0),  # (1 - p) / p * (p + p^2 / 2 + p^2 / 2) + p^2
        ("ab", "ax", 0.5, 0.75),  # (1 - p) / p * (p + p^2 / 2) + p^2 / 2
    ],
)
def test_rank_biased_overlap_worked_by_hand(tmp_path, a, b, p, rbo):
    found = compared(tmp_path, [list(a)], [list(b)], p)
    assert found["rbo"] == pytest.approx(rbo, abs=1e-12)
    assert rbo_by_formula(list(a), list(b), p) == pytest.approx(rbo, abs=1e-12)


@pytest.mark.parametrize("p", [0.5, 0.9, 0.98])
def test_rank_biased_overlap_of_lists_of_any_lengths_follows_the_paper(tmp_path, p):
    rng, ids = np.random.default_rng(0), catalogue("string", 30)
    mine, theirs = ([one or ids[:1] for one in random_lists(rng, 200, ids)] for _ in range(2))
    found = compared(tmp_path, mine, theirs, p)
    assert found["rbo"] == pytest.approx(
        np.mean([rbo_by_formula(a, b, p) for a, b in zip(mine, theirs, strict=True)]), abs=1e-9
    )


def by_hand(mine: dict, theirs: dict) -> dict:
    """The same means over users with a list in both."""
    both = [user for user in mine if mine[user] and theirs.get(user)]
    pairs = [(mine[user], theirs[user]) for user in both]
    common = {k: [len(set(a[:k]) & set(b[:k])) for a, b in pairs] for k in KS}
    return {
        "users": len(both),
        "only_in_output": sum(map(bool, mine.values())) - len(both),
        "only_in_other": sum(map(bool, theirs.values())) - len(both),
        "unchanged": np.mean([a == b for a, b in pairs]),
        "overlap": {str(k): np.mean(common[k]) / k for k in KS},
        "jaccard": {
            str(k): np.mean([n / len(set(a[:k]) | set(b[:k])) for (a, b), n in zip(pairs, common[k], strict=True)])
            for k in KS
        },
        "rbo": np.mean([rbo_by_formula(a, b, 0.9) for a, b in pairs]),
    }


@pytest.mark.parametrize("kind", ["integer", "string"])
@pytest.mark.parametrize("layouts", [("nested", "nested"), ("long", "nested"), ("long", "long")])
@pytest.mark.parametrize("order", ["same", "other"])
def test_runs_are_compared_user_by_user(tmp_path, monkeypatch, kind, layouts, order):
    monkeypatch.setattr(comparison, "BLOCK_ELEMENTS", 500)
    monkeypatch.setattr(comparison, "STEP_ELEMENTS", 300)
    rng, ids = np.random.default_rng(1), catalogue(kind, 60)
    mine = dict(enumerate(random_lists(rng, 300, ids[:40])))
    theirs = {}
    for user in rng.permutation(330)[:260].tolist() if order == "other" else range(20, 320):
        theirs[user] = mine[user] if user in mine and user % 3 == 0 else random_lists(rng, 1, ids[10:])[0]
    for name, lists, layout, rows in (("a", mine, layouts[0], 70), ("b", theirs, layouts[1], 45)):
        users = [f"user {user:03}" for user in lists]
        write_result(tmp_path / name, users, list(lists.values()), layout=layout, part_rows=rows)
    found = compare_runs(tmp_path / "a", tmp_path / "b", KS)
    expected = by_hand(mine, theirs)
    assert 0 < expected["unchanged"] < 1
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("order", ["same", "other"])
def test_the_difference_of_metrics_is_that_of_paired_users(tmp_path, monkeypatch, order):
    monkeypatch.setattr(comparison, "BLOCK_ELEMENTS", 500)
    rng, ids = np.random.default_rng(2), catalogue("integer")
    mine, theirs = random_lists(rng, 200, ids), random_lists(rng, 200, ids)
    truths = random_truths(rng, 200, ids, 5)
    users = rng.permutation(200) if order == "other" else np.arange(200)
    write_result(tmp_path / "a", range(200), mine, kept={"next": truths}, part_rows=60)
    write_result(tmp_path / "b", users, [theirs[i] for i in users], part_rows=50)
    found = evaluated(tmp_path / "a", "--truth", "next", "--against", tmp_path / "b", "-k", "3,10")["against"]
    both = [i for i in range(200) if mine[i] and theirs[i]]
    assert found["users_with_truth"] == len(both) < 200
    ours, others = (trec_eval([truths[i] for i in both], [lists[i] for i in both], (3, 10)) for lists in (mine, theirs))
    for (name, k), value in ours.items():
        told = found["difference"][name][str(k)]
        assert told["mean"] == pytest.approx(value - others[name, k], abs=1e-9)
        assert told["low"] <= told["mean"] <= told["high"]


def test_a_run_does_not_differ_from_itself(tmp_path):
    rng, ids = np.random.default_rng(3), catalogue("string")
    lists = [one or ids[:2] for one in random_lists(rng, 50, ids)]
    out = write_result(tmp_path / "out", [1] * 50, lists, kept={"next": random_truths(rng, 50, ids, 2)})
    found = evaluated(out, "--truth", "next", "--against", out)["against"]
    assert (found["users"], found["unchanged"], found["jaccard"]["1"]) == (50, 1.0, 1.0)
    assert found["rbo"] == pytest.approx(1.0)
    assert set(found["difference"]["ndcg"]["5"].values()) == {0.0}


def test_runs_without_common_users_have_no_means(tmp_path):
    write_result(tmp_path / "a", [1, 2], [["x"], ["y"]])
    write_result(tmp_path / "b", [3], [["x"]])
    found = compare_runs(tmp_path / "a", tmp_path / "b", (1,))
    assert (found["users"], found["only_in_output"], found["only_in_other"]) == (0, 2, 1)
    assert (found["rbo"], found["unchanged"], found["overlap"]) == (None, None, {"1": None})


def test_repeated_ids_are_matched_only_where_the_rows_are_the_same(tmp_path):
    write_result(tmp_path / "a", [1, 1, 2], [["x"], ["y"], ["z"]])
    write_result(tmp_path / "b", [1, 1, 2], [["x"], ["q"], ["z"]])
    write_result(tmp_path / "c", [1, 2], [["x"], ["y"]])
    assert compare_runs(tmp_path / "a", tmp_path / "b", (1,))["unchanged"] == pytest.approx(2 / 3)
    for pair in ("ac", "ca"):
        with pytest.raises(InputError, match=r"a: user ids that occur more than once \(1\) cannot be matched") as error:
            compare_runs(tmp_path / pair[0], tmp_path / pair[1], (1,))
        assert "\n" not in str(error.value)


def test_runs_with_ids_of_two_kinds_are_not_compared(tmp_path):
    write_result(tmp_path / "a", [1], [["x"]])
    write_result(tmp_path / "b", ["1"], [["x"]])
    write_result(tmp_path / "c", [1], [[5]])
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'b'}: its user ids are text, those of")):
        compare_runs(tmp_path / "a", tmp_path / "b", (1,))
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'c'}: its item ids are integer, those of")):
        compare_runs(tmp_path / "a", tmp_path / "c", (1,))
    with pytest.raises(OutputError, match="not the result folder of a run"):
        compare_runs(tmp_path / "a", tmp_path, (1,))
