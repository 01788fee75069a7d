"""Batches by padded cells: within the budget, longest first, every prompt once."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefill_cli.encoding.batching import padded_batches


def plan(lengths: list[int], budget: int) -> list[list[int]]:
    return [rows.tolist() for rows in padded_batches(np.array(lengths, np.int64), budget)]


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 300))
def test_every_row_goes_once_longest_first_within_the_budget_or_alone(lengths, budget):
    batches = plan(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in rows) for rows in batches]
    assert longest == sorted(longest, reverse=True)
    for rows, length in zip(batches, longest, strict=True):
        assert len(rows) * length <= budget or len(rows) == 1
    for rows, following in pairwise(batches):  # no batch ends early
        assert (len(rows) + 1) * lengths[rows[0]] > budget
        assert lengths[rows[-1]] >= lengths[following[0]]


def test_a_batch_is_as_full_as_its_longest_row_allows():
    assert plan([3, 9, 5, 2, 9, 1], 18) == [[1, 4], [2, 0, 3], [5]]


def test_a_row_above_the_budget_goes_alone():
    assert plan([10, 500, 65, 30], 64) == [[1], [2], [3, 0]]


def test_a_budget_of_one_token_gives_each_row_its_own_batch():
    assert plan([1, 2, 1], 1) == [[1], [0], [2]]


def test_equal_lengths_keep_their_order():
    assert plan([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]


def test_no_rows_make_no_batch():
    assert plan([], 100) == []
