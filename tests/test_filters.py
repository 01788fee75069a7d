"""Exclude, candidates, allow and deny lists: typed as the catalogue is, counted, and equal to a loop over the lists."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_items, write_prompts
from hypothesis import given
from hypothesis import strategies as st

from prefill_cli.errors import InputError, ItemsError
from prefill_cli.scoring.filters import ItemIndex
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.matrix import Matrix
from prefill_cli.scoring.topk import Catalogue, search

LETTERS = pa.array(["a", "b", "c", "d"])


def column(lists, kind=None):
    return pa.chunked_array([pa.array(lists, pa.list_(kind or pa.string()))])


def pairs(found):
    return list(zip(found.users.tolist(), found.items.tolist(), strict=True))


def catalogue(scores, ids=None, allowed=None):
    """Items of width 1 whose score for the user [1.0] is given."""
    vectors = np.array(scores, np.float32)[:, None]
    ids = pa.array(range(len(scores))) if ids is None else ids
    return Catalogue(Items(ids, Matrix(vectors, 1), np.abs(vectors[:, 0]).astype(np.float64), None, "", 0, {}), allowed)


def lists(found):
    return [rows.tolist() for rows in np.split(found.rows, found.offsets[1:-1])]


@given(st.data())
def test_filters_equal_a_loop_over_the_lists(data):
    n_items = data.draw(st.integers(1, 12))
    ids = data.draw(st.permutations(range(100, 100 + n_items)))
    one = st.none() | st.lists(st.none() | st.integers(98, 102 + n_items), max_size=8)
    n = data.draw(st.integers(1, 6))
    exclude, candidates = (data.draw(st.none() | st.lists(one, min_size=n, max_size=n)) for _ in range(2))
    allow = data.draw(st.none() | st.sets(st.sampled_from(ids)))
    k = data.draw(st.integers(1, n_items + 3))
    scores = data.draw(st.lists(st.integers(-3, 3), min_size=n_items, max_size=n_items))

    mask = None if allow is None else np.array([i in allow for i in ids])
    filters = ItemIndex(pa.array(ids, pa.int64())).filters(
        None if exclude is None else column(exclude, pa.int32()),
        None if candidates is None else column(candidates, pa.int64()),
    )
    found = search(np.ones((n, 1), np.float32), catalogue(scores, allowed=mask), k, filters)

    unknown, expected = 0, []
    for user in range(n):
        seen = (exclude[user] if exclude else None) or []
        may = candidates[user] if candidates else None
        unknown += sum(i is not None and i not in ids for i in [*seen, *(may or [])])
        left = [
            r for r, i in enumerate(ids) if i not in seen and (may is None or i in may) and (allow is None or i in allow)
        ]
        expected.append(sorted(left, key=lambda row: (-scores[row], row))[:k])
    assert lists(found) == expected
    assert filters.unknown_ids == unknown


def test_the_item_in_row_0_can_be_recommended_and_excluded():
    filters = ItemIndex(LETTERS).filters(column([None, ["a"], [], ["d"]]), None)
    assert lists(search(np.ones((4, 1), np.float32), catalogue([9, 3, 2, 1]), 2, filters)) == [
        [0, 1],
        [1, 2],
        [0, 1],
        [0, 1],
    ]


def test_lists_are_as_long_as_k_or_as_what_is_left():
    index = ItemIndex(pa.array(range(10)))
    deny = np.array([i not in (8, 9) for i in range(10)])
    filters = index.filters(column([[1, 2, 9], list(range(10)), [0]], pa.int64()), None)
    found = search(np.ones((3, 1), np.float32), catalogue(range(10), allowed=deny), 5, filters)
    assert lists(found) == [[7, 6, 5, 4, 3], [], [7, 6, 5, 4, 3]]


def test_an_empty_candidate_list_gives_an_empty_list_and_a_null_one_gives_all():
    filters = ItemIndex(LETTERS).filters(None, column([[], None, ["c"], ["nothing of ours"], [None]]))
    assert lists(search(np.ones((5, 1), np.float32), catalogue([4, 3, 2, 1]), 9, filters)) == [[], [0, 1, 2, 3], [2], [], []]
    assert filters.unknown_ids == 1


def test_excluded_candidates_are_excluded():
    filters = ItemIndex(LETTERS).filters(column([["b"]]), column([["b", "c"]]))
    assert lists(search(np.ones((1, 1), np.float32), catalogue([4, 3, 2, 1]), 4, filters)) == [[2]]


def test_null_lists_and_null_elements_are_no_unknown_ids():
    filters = ItemIndex(LETTERS).filters(column([None, ["a", None, "x"], [None], []]), None)
    assert pairs(filters.exclude) == [(1, 0)]
    assert filters.unknown_ids == 1
    assert filters.limited is None


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null())])
def test_a_column_of_nulls_filters_nothing(kind):
    empty = pa.chunked_array([pa.array([None, None], kind)])
    filters = ItemIndex(LETTERS).filters(empty, empty)
    assert lists(search(np.ones((2, 1), np.float32), catalogue([4, 3, 2, 1]), 2, filters)) == [[0, 1], [0, 1]]
    assert filters.unknown_ids == 0


def test_an_id_that_stands_in_a_list_twice_counts_once():
    filters = ItemIndex(LETTERS).filters(column([["b", "b"]]), column([["b", "a", "a"]]))
    assert lists(search(np.ones((1, 1), np.float32), catalogue([1, 2, 3, 4]), 4, filters)) == [[0]]


def test_several_chunks_and_slices_of_a_column_keep_their_users():
    whole = pa.array([["a"], ["b"], None, ["d"], ["a", "c"]], pa.large_list(pa.large_string()))
    chunked = pa.chunked_array([whole.slice(1, 2), whole.slice(3)])
    filters = ItemIndex(LETTERS).filters(chunked, None)
    assert pairs(filters.exclude) == [(0, 1), (2, 3), (3, 0), (3, 2)]
    assert pairs(filters.of_users(2, 4).exclude) == [(0, 3), (1, 0), (1, 2)]
    assert pairs(filters.of_users(1, 2).exclude) == []


@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)])
def test_every_kind_of_list_serves(list_of):
    values = pa.chunked_array([pa.array([["a", "d"], None, ["b", "x"]], list_of(pa.string()))])
    filters = ItemIndex(LETTERS).filters(values, None)
    assert pairs(filters.exclude) == [(0, 0), (0, 3), (2, 1)]
    assert filters.unknown_ids == 1


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        (pa.array([1, 2]), pa.array([["1"]])),
        (pa.array(["1", "2"]), pa.array([[1]])),
        (pa.array(["1", "2"]), pa.array([[b"1"]])),
        (pa.array([b"1", b"2"]), pa.array([["1"]])),
        (pa.array([1, 2]), pa.array([[1.0]])),
        (pa.array([1, 2]), pa.array([[True]])),
    ],
    ids=str,
)
def test_ids_that_could_never_match_are_refused_by_both_types(ids, values):
    for what, columns in (("exclude", (values, None)), ("candidates", (None, values))):
        with pytest.raises(InputError, match=f"the {what} column has ids of type .*, but item ids are {ids.type}"):
            ItemIndex(ids).filters(*(c and pa.chunked_array([c]) for c in columns))


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("wanted", INTEGERS, ids=str)
@pytest.mark.parametrize("own", INTEGERS, ids=str)
def test_integers_match_by_value_whatever_their_width(own, wanted):
    index = ItemIndex(pa.array([7, 0, 100], own))
    assert index.rows_of(pa.array([100, 5, None, 7], wanted), InputError, "here").tolist() == [2, -1, -1, 0]


def test_large_unsigned_and_negative_integers_are_never_mistaken_for_each_other():
    large = [2**64 - 1, 2**63, 2**63 - 1, 1]
    negative = [-1, -(2**63), 2**63 - 1, 1]
    unsigned, signed = pa.array(large, pa.uint64()), pa.array(negative, pa.int64())
    assert ItemIndex(unsigned).rows_of(signed, InputError, "here").tolist() == [-1, -1, 2, 3]
    assert ItemIndex(signed).rows_of(unsigned, InputError, "here").tolist() == [-1, -1, 2, 3]
    assert ItemIndex(unsigned).rows_of(unsigned, InputError, "here").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("own", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("wanted", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_matches_whatever_its_layout(own, wanted):
    rows = ItemIndex(pa.array(["é", "", "b"], own)).rows_of(pa.array(["b", "e", "", None], wanted), InputError, "here")
    assert rows.tolist() == [2, -1, 1, -1]


@pytest.mark.parametrize("own", [pa.binary(), pa.large_binary(), pa.binary(1)], ids=str)
@pytest.mark.parametrize("wanted", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)], ids=str)
def test_binary_matches_whatever_its_layout(own, wanted):
    rows = ItemIndex(pa.array([b"\xff", b"\x00"], own)).rows_of(pa.array([b"\x00", b"a", None], wanted), InputError, "here")
    assert rows.tolist() == [1, -1, -1]


def test_an_empty_column_filters_nobody():
    filters = ItemIndex(LETTERS).filters(column([]), column([]))
    assert (len(filters.exclude.users), len(filters.limited), filters.unknown_ids) == (0, 0, 0)


# --allow and --deny files


def test_a_parquet_file_names_items_by_the_id_column_or_its_only_one(tmp_path):
    index = ItemIndex(LETTERS)
    pq.write_table(pa.table({"other": [1, 2, 3], "item_id": ["d", "x", "a"]}), tmp_path / "two.parquet")
    pq.write_table(pa.table({"sku": pa.array(["d", "d", "a"]).dictionary_encode()}), tmp_path / "one.parquet")
    found = [index.rows_in_file(tmp_path / name, "item_id") for name in ("two.parquet", "one.parquet")]
    assert [(rows.tolist(), unknown) for rows, unknown in found] == [([0, 3], 1), ([0, 3], 0)]


@pytest.mark.parametrize("suffix", [".txt", ".list", ".csv", ".TXT"])
@pytest.mark.parametrize("text", ["d\nx\n\n  a  \n", "d\r\nx\r\na", "\ufeffd\nx\na\n"])
def test_a_text_file_names_one_item_a_line(tmp_path, suffix, text):
    path = tmp_path / f"ids{suffix}"
    path.write_text(text, "utf-8", newline="")
    rows, unknown = ItemIndex(LETTERS).rows_in_file(path, "item_id")
    assert (rows.tolist(), unknown) == ([0, 3], 1)


@pytest.mark.parametrize("kind", [*INTEGERS, pa.binary(), pa.large_binary(), pa.large_string()], ids=str)
def test_a_text_file_serves_ids_of_every_type(tmp_path, kind):
    (tmp_path / "ids.txt").write_text("7\n9\n")
    integers = pa.types.is_integer(kind)
    ids = pa.array([1, 7] if integers else ["1", "7"]).cast(kind)
    rows, unknown = ItemIndex(ids).rows_in_file(tmp_path / "ids.txt", "item_id")
    assert (rows.tolist(), unknown) == ([1], 1)


@pytest.mark.parametrize(
    ("content", "ids", "words"),
    [
        (b"seven\n", pa.array([7]), "ids that are not int64"),
        (b"7.5\n", pa.array([7]), "ids that are not int64"),
        (b"300\n", pa.array([7], pa.int8()), "ids that are not int8"),
        (b"abc\n", pa.array([b"ab"], pa.binary(2)), "ids that are not fixed_size_binary"),
        (b"\xff\xfe\x00", LETTERS, "not readable as text"),
        (None, LETTERS, "not readable as text"),
    ],
)
def test_a_text_file_that_cannot_be_meant_is_refused(tmp_path, content, ids, words):
    path = tmp_path / "ids.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ItemsError, match=words) as raised:
        ItemIndex(ids).rows_in_file(path, "item_id")
    assert str(path) in str(raised.value)


def test_a_parquet_file_that_cannot_be_meant_is_refused(tmp_path):
    path, index = tmp_path / "ids.parquet", ItemIndex(LETTERS)
    for content, words in (
        ({"item_id": [1, 2]}, "ids of type int64, but item ids are string"),
        ({"item": ["a"], "b": [1]}, "no column 'item_id'"),
    ):
        pq.write_table(pa.table(content), path)
        with pytest.raises(ItemsError, match=words):
            index.rows_in_file(path, "item_id")
    path.write_bytes(b"nothing")
    with pytest.raises(ItemsError, match="not readable as Parquet"):
        index.rows_in_file(path, "item_id")
    with pytest.raises(ItemsError, match="no such file"):
        index.rows_in_file(tmp_path / "none.parquet", "item_id")


# In a whole run


def test_a_run_keeps_to_all_four_lists(job, tmp_path):
    write_items(tmp_path / "items.parquet", n=8)
    seen = pa.array([["i0", "i1"], None, [], ["i2", "gone"]])
    may = pa.array([None, ["i0", "i3", "i7"], [], ["i2", "i5"]])
    inputs = write_prompts(tmp_path / "in.parquet", ["w1", "w2", "w3", "w4"], seen=seen, may=may)
    (tmp_path / "allow.txt").write_text("\n".join(f"i{i}" for i in range(7)) + "\nunknown\n")
    pq.write_table(pa.table({"item_id": ["i6", "also unknown"]}), tmp_path / "deny.parquet")
    totals = job.run(inputs=(str(inputs),), items=tmp_path / "items.parquet", exclude_column="seen", candidates_column="may",
                     allow=tmp_path / "allow.txt", deny=tmp_path / "deny.parquet", top_k=10)  # fmt: skip
    found = [set(ids) for ids in pq.read_table(job.out)["item_ids"].to_pylist()]
    assert found == [{"i2", "i3", "i4", "i5"}, {"i0", "i3"}, set(), {"i5"}]
    assert (totals["unknown_ids"], totals["empty_lists"]) == (3, 1)


@pytest.mark.parametrize("content", ["", "gone\n"])
def test_an_allow_list_that_leaves_nothing_is_refused_and_such_a_deny_list_is_counted(job, tmp_path, content):
    (tmp_path / "ids.txt").write_text(content)
    with pytest.raises(ItemsError, match=r"--allow .*ids\.txt: no id in it"):
        job.run(allow=tmp_path / "ids.txt")
    totals = job.run(deny=tmp_path / "ids.txt")
    assert totals["unknown_ids"] == len(content.split())


def test_a_run_refuses_seen_items_of_another_type(job, tmp_path):
    inputs = write_prompts(tmp_path / "in.parquet", ["w1"], seen=pa.array([[1]]))
    with pytest.raises(InputError, match=r"int64.*string"):
        job.run(inputs=(str(inputs),), exclude_column="seen")
