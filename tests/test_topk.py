"""Top-k against brute force: exact, ties in row order, and the same bits whatever the block, the batch, k or the threads."""

import sys
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import reference_top_k
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_cli import machine
from prefill_cli.scoring import rescore, scan, topk
from prefill_cli.scoring.filters import Filters, ItemIndex
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.kernels import load_kernels
from prefill_cli.scoring.matrix import Matrix
from prefill_cli.scoring.topk import Catalogue, search


def make_items(vectors, bias=None):
    vectors = np.asarray(vectors, np.float32)
    norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
    return Items(pa.array(range(len(vectors))), Matrix(vectors, vectors.shape[1]), norms, bias, "", 0, {})


class Way(NamedTuple):
    """How a test searches: by the kernels or by PyTorch, in which type, with which sizes."""

    kernels: bool
    dtype: str | None
    sizes: dict


# Rooms and blocks so small that lists are cut back and given up; a catalogue that does not fit the memory.
WAYS = {
    "torch": Way(False, None, {}),
    "torch, bfloat16": Way(False, "bfloat16", {}),
    "torch, small": Way(False, None, {"BLOCK_ITEMS": 64, "RUN": 4, "ROOM": 0}),
    "kernels": Way(True, None, {}),
    "kernels, float32": Way(True, "float32", {"SIFT_ROWS": 64}),
    "kernels, small": Way(True, None, {"ROOM": 0, "GROUP_QUERIES": 3}),
    "kernels, streamed": Way(True, None, {"SHARE_OF_MEMORY": 0, "STREAM_BYTES": 1}),
}
kernels = load_kernels()
used = Way(False, None, {})


@pytest.fixture(params=WAYS)
def sizes(request, monkeypatch):
    """Each way of searching."""
    way = WAYS[request.param]
    monkeypatch.setattr(sys.modules[__name__], "used", way)
    for name, value in way.sizes.items():
        monkeypatch.setattr(scan, name, value)


def run(queries, vectors, k, *, bias=None, filters=None, allowed=None):
    items = make_items(vectors, bias)
    catalogue = Catalogue(items, allowed, kernels=kernels if used.kernels else None, scan_dtype=used.dtype)
    return search(np.asarray(queries, np.float32), catalogue, k, filters or Filters())


def table(found, k):
    """[n, k] rows and scores; every list has to be k long."""
    assert np.diff(found.offsets).tolist() == [k] * (len(found.offsets) - 1)
    return found.rows.reshape(-1, k), found.scores.reshape(-1, k)


def assert_exact(queries, vectors, k, bias=None):
    """Against brute force in float64. The bias enters it as one more dimension."""
    rows, scores = table(run(queries, vectors, k, bias=bias), min(k, len(vectors)))
    if bias is not None:
        queries = np.hstack([queries, np.ones((len(queries), 1), np.float32)])
        vectors = np.hstack([vectors, bias[:, None]])
    expected_rows, expected_scores = reference_top_k(queries, vectors, k)
    assert scores.tolist() == expected_scores.tolist()
    assert rows.tolist() == expected_rows.tolist()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    machine.threads.cache_clear()
    yield request.param
    torch.set_num_threads(before)
    machine.threads.cache_clear()


def integers(rng, shape, bound=9):
    """Whole numbers: every sum is exact in float64, whatever its order."""
    return rng.integers(-bound, bound + 1, shape).astype(np.float32)


@pytest.mark.parametrize("k", [1, 10, 300])
def test_random_vectors_give_the_exact_lists(sizes, threads, k):
    rng = np.random.default_rng(0)
    assert_exact(integers(rng, (20, 48), 1000), integers(rng, (300, 48), 1000), k)


@pytest.mark.parametrize("k", [1, 10, 120])
def test_clustered_vectors_give_the_exact_lists(sizes, k):
    rng = np.random.default_rng(1)
    centres = integers(rng, (4, 32), 2000)
    vectors = centres[rng.integers(0, 4, 250)] + integers(rng, (250, 32), 1)
    assert_exact(centres[rng.integers(0, 4, 12)] + integers(rng, (12, 32), 1), vectors, k)


def test_a_bias_counts_like_one_more_dimension(sizes):
    rng = np.random.default_rng(2)
    for bound in (3, 100_000):
        assert_exact(integers(rng, (9, 16)), integers(rng, (200, 16)), 13, bias=integers(rng, 200, bound))


@pytest.mark.parametrize("k", [1, 5, 50])
def test_equal_items_stand_in_row_order_and_a_list_is_a_prefix_of_a_longer_one(sizes, threads, k):
    vectors = np.tile(np.array([[0.1, 0.2, 0.3]], np.float32), (230, 1))
    queries = np.array([[1, 2, 3], [-1, 0, 0.5], [0, 0, 0]], np.float32)
    rows, scores = table(run(queries, vectors, k), k)
    assert rows.tolist() == [list(range(k))] * 3
    longer, longer_scores = table(run(queries, vectors, k + 1), k + 1)
    assert longer[:, :k].tolist() == rows.tolist()
    assert longer_scores[:, :k].tobytes() == scores.tobytes()


def test_lists_for_every_k_are_prefixes_of_the_longest(sizes):
    rng = np.random.default_rng(3)
    queries, vectors = integers(rng, (5, 2), 2), integers(rng, (60, 2), 2)
    longest, scores = table(run(queries, vectors, 60), 60)
    for k in range(1, 60):
        rows, shorter = table(run(queries, vectors, k), k)
        assert rows.tolist() == longest[:, :k].tolist()
        assert shorter.tobytes() == scores[:, :k].tobytes()


def test_scores_that_differ_in_the_last_place_are_told_apart(sizes):
    """Scores 1 + i ulp in shuffled order, behind a large common part that cancels: float32 sums lose the difference."""
    rng = np.random.default_rng(4)
    order = rng.permutation(120)
    steps = (1 + order * 2.0**-23).astype(np.float32)
    large = np.full(120, 2.0**12, np.float32)
    vectors = np.stack([large, steps, -large, np.zeros(120)], axis=1).astype(np.float32)
    rows, scores = table(run(np.ones((3, 4)), vectors, 30), 30)
    expected = np.argsort(-order)[:30].tolist()
    assert rows.tolist() == [expected] * 3
    assert scores[0].tolist() == steps[expected].tolist()
    assert_exact(np.ones((3, 4), np.float32), vectors, 30)


@pytest.mark.parametrize("scale", [2**10, 2**16, 2**22])
def test_large_parts_that_cancel_do_not_hide_the_exact_order(sizes, threads, scale):
    rng = np.random.default_rng(5)
    half = rng.integers(-scale, scale, (150, 64)).astype(np.float64)
    small = rng.integers(0, 3, (150, 1))
    vectors = np.hstack([half, -half, small]).astype(np.float32)
    mirrored = rng.permutation(64)
    queries = np.ones((6, 129), np.float32)
    queries[:, mirrored[:32]] = 3
    queries[:, 64 + mirrored[:32]] = 3  # the same weight on both halves: all that is left is the last dimension
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    assert np.array_equal(exact, np.tile(small[:, 0], (6, 1)))
    if scale == 2**22:
        scanned = (torch.from_numpy(queries) @ torch.from_numpy(vectors).T).numpy()
        assert not np.array_equal(scanned, exact)  # the scan alone would be wrong
    assert_exact(queries, vectors, 25)


def test_real_numbers_stay_within_rounding_of_the_reference_and_are_ordered():
    rng = np.random.default_rng(6)
    queries, vectors = (rng.standard_normal((n, 576)).astype(np.float32) for n in (40, 3000))
    rows, scores = table(run(queries, vectors, 50), 50)
    expected_rows, expected = reference_top_k(queries, vectors, 50)
    assert np.abs(scores - expected).max() <= np.spacing(np.abs(expected).max())
    assert (rows == expected_rows).mean() > 0.999
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scan_bound_holds_for_hostile_sums(dtype):
    """|scanned score - exact score| <= E, the claim of the module's proof, where Cauchy-Schwarz is nearly tight."""
    rng = np.random.default_rng(7)
    for d in (1, 3, 64, 1000):
        signs = rng.choice([-1, 1], (200, d))
        vectors = (signs * rng.uniform(0.5, 1, (200, d)) * 10.0 ** rng.integers(-3, 4, (200, 1))).astype(np.float32)
        queries = rng.uniform(0.5, 1, (20, d)).astype(np.float32)
        items = make_items(vectors)
        q, x = (torch.from_numpy(array).to(dtype).float() for array in (queries, vectors))
        residuals = np.linalg.norm(vectors.astype(np.float64) - x.double().numpy(), axis=1)
        error = scan.error_of(queries, q.numpy(), items, d)
        exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
        off = np.abs((q @ x.T).double().numpy() - exact)
        bound = error.of_norm[:, None] * items.norms + error.of_residual[:, None] * residuals + error.constant[:, None]
        assert (off <= bound).all()
        if dtype == torch.bfloat16 or d < 64:  # sums of float32 are far better than what can be proven of them
            assert (off > bound / 1000).any(), "and it is no bound that holds for nothing"


def test_products_that_underflow_are_in_the_bound(sizes):
    vectors = (np.arange(1, 51)[::-1, None] * np.full((1, 8), 1e-30)).astype(np.float32)
    rows, scores = table(run(np.full((2, 8), 1e-12), vectors, 7), 7)
    assert rows.tolist() == [list(range(7))] * 2
    assert (np.diff(scores, axis=1) <= 0).all()
    rows, _ = table(run(np.full((2, 8), 1e-9), vectors[::-1].copy(), 7), 7)
    assert rows.tolist() == [list(range(49, 42, -1))] * 2


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_whole_numbers_filters_and_k_equal_a_loop(data):
    d, n, n_items = (data.draw(st.integers(1, high)) for high in (3, 5, 25))
    numbers = st.integers(-2, 2)
    vectors, queries = (
        np.array(data.draw(st.lists(numbers, min_size=m * d, max_size=m * d)), np.float32).reshape(m, d)
        for m in (n_items, n)
    )
    bias = data.draw(st.none() | st.lists(numbers, min_size=n_items, max_size=n_items))
    k = data.draw(st.integers(1, n_items + 2))
    exclude = data.draw(st.lists(st.lists(st.integers(0, n_items - 1)), min_size=n, max_size=n))
    candidates = data.draw(st.lists(st.none() | st.lists(st.integers(0, n_items - 1)), min_size=n, max_size=n))
    filters = ItemIndex(pa.array(range(n_items))).filters(*(
        pa.chunked_array([pa.array(lists, pa.list_(pa.int64()))]) for lists in (exclude, candidates)
    ))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "used", data.draw(st.sampled_from(list(WAYS.values()))))
        for name, value in used.sizes.items():
            patch.setattr(scan, name, value)
        patch.setattr(topk, "SHORT_LIST", data.draw(st.sampled_from([0, 3, 1000])))
        patch.setattr(topk, "SHORT_SHARE", 1000)
        patch.setattr(topk, "PASS_QUERIES", data.draw(st.sampled_from([1, 2, 1000])))
        patch.setattr(topk, "PAIRS_AT_ONCE", data.draw(st.sampled_from([1, 30, 1000])))
        found = run(queries, vectors, k, bias=None if bias is None else np.array(bias, np.float32), filters=filters)
    for user, (a, b) in enumerate(pairwise(found.offsets)):
        scores = vectors @ queries[user] + (0 if bias is None else np.array(bias))
        may = set(range(n_items) if candidates[user] is None else candidates[user]) - set(exclude[user])
        expected = sorted(may, key=lambda row: (-scores[row], row))[:k]
        assert found.rows[a:b].tolist() == expected
        assert found.scores[a:b].tolist() == scores[expected].tolist()


def test_a_pairs_score_has_the_same_bits_in_any_company(monkeypatch, sizes):
    rng = np.random.default_rng(8)
    queries, vectors = (rng.standard_normal((n, 100)).astype(np.float32) for n in (16, 400))
    bias = rng.standard_normal(400).astype(np.float32)
    rows, scores = table(run(queries, vectors, 400, bias=bias), 400)
    known = np.empty((16, 400), np.float32)
    np.put_along_axis(known, rows, scores, 1)

    def check(queries, vectors, k, users, items):
        rows, scores = table(run(queries, vectors, k, bias=bias[items]), k)
        assert scores.tobytes() == np.take_along_axis(known[np.ix_(users, items)], rows, 1).tobytes()

    everyone, everything = np.arange(16), np.arange(400)
    for k in (1, 3, 100):
        check(queries, vectors, k, everyone, everything)
        check(np.asfortranarray(queries), vectors, k, everyone, everything)
    for user in everyone:
        check(queries[[user]], vectors, 7, [user], everything)
    for items in (np.array([5]), np.array([399, 0, 17]), np.arange(13, 250)):
        check(queries, vectors[items], 1, everyone, items)
    for cells in (1, 300, 1000):
        monkeypatch.setattr(rescore, "CELLS", cells)
        check(queries, vectors, 9, everyone, everything)


def test_runs_with_one_thread_and_with_two_give_the_same_bits(monkeypatch):
    rng = np.random.default_rng(9)
    queries, vectors = (rng.standard_normal((n, 64)).astype(np.float32) for n in (30, 2000))
    found = []
    for count in (1, 2):
        monkeypatch.setattr(scan, "threads", lambda count=count: count)
        found.append(run(queries, vectors, 20))
    assert found[0].rows.tobytes() == found[1].rows.tobytes()
    assert found[0].scores.tobytes() == found[1].scores.tobytes()


@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_user_near_whose_kth_item_are_too_many_is_scored_against_everything(monkeypatch, by_kernels):
    gone = []
    against_all = topk._against_all
    monkeypatch.setattr(topk, "_against_all", lambda *a: (gone.append(a[0][0, 0]), against_all(*a))[1])
    monkeypatch.setattr(scan, "ROOM", 50)
    wider = []
    monkeypatch.setattr(topk, "WIDER", 2)
    for kind in (scan.KernelScan, scan.TorchScan):
        survivors = kind.survivors
        monkeypatch.setattr(
            kind, "survivors", lambda self, *a, survivors=survivors: (wider.append(a[3:]), survivors(self, *a))[1]
        )
    monkeypatch.setattr(sys.modules[__name__], "used", Way(by_kernels, None, {}))
    rising = np.arange(4000, dtype=np.float32)[:, None]
    assert table(run(np.ones((8, 1)), rising, 25), 25)[0].tolist() == [list(range(3999, 3974, -1))] * 8
    assert not gone, "what was best at first is soon overtaken"
    assert wider == [()]
    queries = np.ones((8, 2), np.float32)
    queries[::2, 1] = 0
    mixed = np.hstack([np.ones((4000, 1)), rising])
    expected = [list(range(25)) if user % 2 == 0 else list(range(3999, 3974, -1)) for user in range(8)]
    assert table(run(queries, mixed, 25), 25)[0].tolist() == expected
    assert len(gone) == 4, "the others are not slowed down"
    assert wider == [(), (), (2,)]
    near = np.concatenate([np.ones(120, np.float32), rising[:380, 0] / 1000])[:, None]
    gone.clear()
    assert table(run(np.ones((2, 1)), near, 25), 25)[0].tolist() == [list(range(25))] * 2
    assert not gone, "a list of twice the room was enough"


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 9), (3, 2, 1), (1, 40, 1), (33, 1, 4)])
def test_one_user_one_item_one_dimension_and_k_above_the_catalogue(sizes, shape):
    n, n_items, d = shape
    rng = np.random.default_rng(10)
    assert_exact(integers(rng, (n, d)), integers(rng, (n_items, d)), n_items + 5)


def near_ties(rng, queries, vectors):
    vectors[:] = vectors[0] * (1 + 1e-7 * rng.integers(0, 9, (900, 1)))


def one_huge_item(rng, queries, vectors):
    vectors[450] *= np.float32(1e15)


def orthogonal(rng, queries, vectors):
    queries[:, :20], vectors[:, 20:] = 0, 0


def subnormal(rng, queries, vectors):
    vectors *= np.float32(1e-42)


def tiny(rng, queries, vectors):
    queries *= np.float32(1e-20)
    vectors *= np.float32(1e-22)


def large(rng, queries, vectors):
    queries *= np.float32(1e18)
    vectors *= np.float32(1e18)


def duplicates(rng, queries, vectors):
    vectors[:] = vectors[rng.integers(0, 30, 900)]


def magnitudes(rng, queries, vectors):
    vectors *= (10.0 ** rng.integers(-20, 20, (900, 1))).astype(np.float32)


def beyond_bfloat16(rng, queries, vectors):
    vectors *= np.float32(1e-6)
    queries[3, 5] = np.finfo(np.float32).max


def a_query_beyond_float32(rng, queries, vectors):
    vectors *= np.float32(1e-6)
    queries[3] = 2e38


def an_item_beyond_float32(rng, queries, vectors):
    queries *= np.float32(1e-42)
    queries[4], vectors[450] = 0, 2e38


HOSTILE = (
    near_ties, one_huge_item, orthogonal, subnormal, tiny, large, duplicates, magnitudes, beyond_bfloat16,
    a_query_beyond_float32, an_item_beyond_float32,
)  # fmt: skip


@pytest.mark.parametrize("k", [1, 30, 899, 1000])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_vectors_give_the_lists_of_exact_scores(sizes, kind, k):
    """Vectors of which a low-precision scan tells little."""
    rng = np.random.default_rng(13)
    queries, vectors = (rng.standard_normal((n, 40)).astype(np.float32) for n in (17, 900))
    kind(rng, queries, vectors)
    every = rescore.pair_scores(
        queries, Matrix(vectors, 40), None, *(a.ravel() for a in np.indices((17, 900))), kernels=None
    ).reshape(17, 900)
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    assert (
        np.abs(every - exact) <= np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64) + 1e-12 * np.abs(exact)
    ).all()
    rows, scores = table(run(queries, vectors, k), min(k, 900))
    order = np.lexsort((np.broadcast_to(np.arange(900), every.shape), -every), axis=1)[:, :k]
    assert rows.tolist() == order.tolist()
    assert scores.tobytes() == np.take_along_axis(every, order, 1).tobytes()


def test_no_users_give_no_lists():
    found = run(np.empty((0, 3)), np.ones((5, 3)), 2)
    assert (found.offsets.tolist(), len(found.rows), len(found.scores)) == ([0], 0, 0)
    assert (found.rows.dtype, found.scores.dtype) == (np.int64, np.float32)


def test_results_are_int64_rows_and_float32_scores():
    found = run(np.ones((2, 3)), np.ones((5, 3)), 2)
    assert (found.offsets.dtype, found.rows.dtype, found.scores.dtype) == (np.int64, np.int64, np.float32)


def test_negative_and_zero_scores_are_scores_like_any_other(sizes):
    vectors = np.array([[-3], [0], [-1], [-2], [0]], np.float32)
    rows, scores = table(run([[1.0], [0.0], [-1.0]], vectors, 3), 3)
    assert rows.tolist() == [[1, 4, 2], [0, 1, 2], [0, 3, 2]]
    assert scores.tolist() == [[0, 0, -1], [0, 0, 0], [3, 2, 1]]


def test_memory_mapped_items_and_read_only_queries_are_searched_without_a_warning(tmp_path, sizes):
    rng = np.random.default_rng(11)
    np.save(tmp_path / "i.npy", integers(rng, (90, 6)))
    np.save(tmp_path / "q.npy", integers(rng, (4, 6)))
    vectors, queries = (np.load(tmp_path / name, mmap_mode="r") for name in ("i.npy", "q.npy"))
    bias = integers(rng, 90)
    bias.flags.writeable = False
    assert_exact(queries, vectors, 8, bias=bias)


def test_reduced_precision_that_somebody_set_for_products_does_not_reach_the_scan(sizes):
    rng = np.random.default_rng(12)
    vectors = integers(rng, (4000, 64), 1000)
    torch.set_float32_matmul_precision("medium")  # bfloat16 products, on CPUs that have them
    try:
        assert_exact(integers(rng, (64, 64), 3), vectors, 100)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_denied_items_never_appear_even_where_they_are_all_that_is_good(sizes):
    vectors = np.arange(60, dtype=np.float32)[:, None]
    allowed = np.arange(60) < 4
    rows = run(np.ones((3, 1)), vectors, 10, allowed=allowed).rows.reshape(3, 4)
    assert rows.tolist() == [[3, 2, 1, 0]] * 3
    assert len(run(np.ones((3, 1)), vectors, 10, allowed=np.zeros(60, bool)).rows) == 0


@pytest.mark.parametrize(
    ("query", "too_far"),
    [([1, 0], False), ([1e38, 0], True), ([1e37, 0], False), ([np.nan, 0], True), ([np.inf, 0], True), ([0, 0], False)],
)
def test_users_whose_scores_might_leave_float32_are_told_apart(query, too_far):
    items = make_items([[1, 0], [0, 3]])
    assert Catalogue(items).overflowing(np.array([query, [1, 1]], np.float32)).tolist() == [too_far, False]


def test_a_large_bias_counts_towards_the_range_of_scores():
    items = make_items([[1.0, 0]], bias=np.array([-1e38], np.float32))
    assert Catalogue(items).overflowing(np.array([[1.0, 0]], np.float32)).tolist() == [True]


def test_scores_just_inside_the_range_are_exact():
    vectors = np.array([[2.0**60], [2.0**61], [-(2.0**61)]], np.float32)
    queries = np.array([[2.0**64]], np.float32)
    assert not Catalogue(make_items(vectors)).overflowing(queries).any()
    assert_exact(queries, vectors, 3)
