"""Item files of every format: what is read, what is refused, and what the message names."""

import json
import logging
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import write_items
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from prefill_cli.config import RunConfig
from prefill_cli.errors import ItemsError, UsageError
from prefill_cli.scoring.items import check_provenance, load_items

WIDTH = 4
VECTORS = np.array([[1, 2, 3, 4], [0, -1, 0.5, 2], [5, 0, 0, 0], [0, 0, 0, 7]], np.float32)


def run_config(path, **options):
    return RunConfig(**({"inputs": ("-",), "items": path} | options))


def load(path, *, hidden_size=WIDTH, **options):
    return load_items(run_config(path, **options), hidden_size)


def write(path, embeddings, ids=None, *, kind=None, row_group_size=None, metadata=None, **columns):
    """A Parquet item file; `embeddings` are Python lists (or an Arrow array), ids "a", "b", … unless given."""
    if not isinstance(embeddings, pa.Array):
        embeddings = pa.array(embeddings, kind or pa.list_(pa.float32()))
    ids = pa.array([chr(97 + i) for i in range(len(embeddings))]) if ids is None else ids
    table = pa.table({"item_id": ids, "embedding": embeddings} | columns).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def good(n=4):
    return VECTORS[:n].tolist()


# What is read


@pytest.mark.parametrize("values", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list, lambda values: pa.list_(values, WIDTH)])
@pytest.mark.parametrize("row_group_size", [None, 1, 3])
def test_every_kind_of_list_of_floats_is_read(tmp_path, values, list_of, row_group_size):
    items = load(write(tmp_path / "i.parquet", good(), kind=list_of(values), row_group_size=row_group_size))
    assert items.vectors.dtype == np.float32
    assert items.vectors.flags.c_contiguous
    assert items.vectors.tolist() == VECTORS.tolist()
    assert items.ids.to_pylist() == ["a", "b", "c", "d"]
    assert items.norms.tolist() == np.linalg.norm(VECTORS.astype(np.float64), axis=1).tolist()
    assert (len(items), items.width, items.dropped, items.bias) == (4, WIDTH, 0, None)


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([3, 1, 2, 0], pa.int8()),
        pa.array([2**63 + 1, 1, 2, 0], pa.uint64()),
        pa.array(["x", "y", "", "é"], pa.string()),
        pa.array(["x", "y", "", "é"], pa.large_string()),
        pa.array([b"x", b"\xff", b"", b"z"], pa.binary()),
        pa.array([b"x", b"\xff", b"", b"z"], pa.large_binary()),
        pa.array([b"xx", b"\xff\x00", b"yy", b"zz"], pa.binary(2)),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_keep_their_type_and_value(tmp_path, ids):
    assert load(write(tmp_path / "i.parquet", good(), ids)).ids.equals(ids)


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (pa.array(["x", "y", "z", "w"]).dictionary_encode(), pa.string()),
        (pa.array([5, 6, 7, 8], pa.int32()).dictionary_encode(), pa.int32()),
        (pa.array(["x", "y", "z", "w"], pa.string_view()), pa.large_string()),
        (pa.array([b"x", b"y", b"z", b"w"], pa.binary_view()), pa.large_binary()),
    ],
    ids=str,
)
def test_dictionaries_and_views_become_plain_ids(tmp_path, ids, kind):
    items = load(write(tmp_path / "i.parquet", good(), ids, row_group_size=2))
    assert items.ids.type == kind
    assert items.ids.to_pylist() == ids.to_pylist()


def test_a_folder_or_a_glob_of_parts_is_one_catalogue_in_name_order(tmp_path):
    folder = tmp_path / "parts"
    write(folder / "part-1.parquet", good(2), pa.array(["a", "b"]))
    write(folder / "sub" / "part-2.parquet", good()[2:], pa.array(["c", "d"]))
    write(folder / "_rejects" / "part-1.parquet", [[9.0]], pa.array(["r"]))
    write(folder / ".hidden" / "part-1.parquet", [[9.0]], pa.array(["h"]))
    write(folder / "_part.parquet", [[9.0]], pa.array(["u"]))
    for path in (folder, folder / "**" / "part-[12].parquet"):
        if path != folder:
            (folder / "_rejects" / "part-1.parquet").unlink()
        items = load(path)
        assert items.ids.to_pylist() == ["a", "b", "c", "d"]
        assert items.vectors.tolist() == VECTORS.tolist()


def test_a_folder_whose_own_name_starts_with_an_underscore_is_read(tmp_path):
    write(tmp_path / "_items" / "part.parquet", good())
    assert len(load(tmp_path / "_items")) == 4


def test_parts_of_differing_precision_and_text_type_are_joined_without_loss(tmp_path):
    exact = [[1.0009765625 + 2**-20, 0, 0, 1]]
    write(tmp_path / "p" / "1.parquet", good(1), pa.array(["a"]), kind=pa.list_(pa.float16()))
    write(tmp_path / "p" / "2.parquet", exact, pa.array(["b"], pa.large_string()))
    write(tmp_path / "p" / "3.parquet", good(1), pa.array(["c"]).dictionary_encode(), kind=pa.list_(pa.float64()))
    items = load(tmp_path / "p")
    assert items.vectors.tolist() == [good(1)[0], exact[0], good(1)[0]]
    assert items.ids.to_pylist() == ["a", "b", "c"]


def test_parts_with_integers_of_differing_width_are_joined(tmp_path):
    write(tmp_path / "p" / "1.parquet", good(1), pa.array([7], pa.int32()))
    write(tmp_path / "p" / "2.parquet", good(1), pa.array([2**40], pa.int64()))
    assert load(tmp_path / "p").ids.equals(pa.array([7, 2**40], pa.int64()))


def test_parts_whose_ids_do_not_go_together_are_refused_with_both_types(tmp_path):
    write(tmp_path / "p" / "1.parquet", good(1), pa.array([7]))
    write(tmp_path / "p" / "2.parquet", good(1), pa.array(["7"]))
    with pytest.raises(ItemsError, match=r"int64 in .*1\.parquet, but string in .*2\.parquet"):
        load(tmp_path / "p")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [(VECTORS, VECTORS), (VECTORS.astype(np.float16), VECTORS), (VECTORS.astype(np.float64), VECTORS)],
    ids=["float32", "float16", "float64"],
)
def test_safetensors_are_read_with_row_numbers_as_ids(tmp_path, tensor, expected):
    metadata = {"prefill-score": json.dumps({"model": "A", "dims": None})}
    save_file({"embeddings": tensor, "other": np.zeros(2)}, tmp_path / "i.safetensors", metadata)
    items = load(tmp_path / "i.safetensors")
    assert items.vectors.tolist() == expected.tolist()
    assert items.vectors.dtype == np.float32
    assert items.ids.equals(pa.array([0, 1, 2, 3], pa.int64()))
    assert items.provenance == {"model": "A", "dims": None}


def test_bfloat16_safetensors_are_read_exactly(tmp_path):
    save_torch({"embeddings": torch.from_numpy(VECTORS).bfloat16()}, tmp_path / "i.safetensors", {"prefill-score": "{}"})
    assert load(tmp_path / "i.safetensors").vectors.tolist() == VECTORS.tolist()


def test_npy_stays_memory_mapped_and_read_only(tmp_path):
    np.save(tmp_path / "i.npy", VECTORS)
    items = load(tmp_path / "i.npy")
    assert items.vectors.tolist() == VECTORS.tolist()
    assert not items.vectors.flags.writeable
    assert isinstance(items.vectors, np.memmap)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", ">f4"])
def test_npy_of_other_floats_becomes_float32(tmp_path, dtype):
    np.save(tmp_path / "i.npy", np.asfortranarray(VECTORS.astype(dtype)))
    items = load(tmp_path / "i.npy")
    assert items.vectors.tolist() == VECTORS.tolist()
    assert items.vectors.dtype == np.float32
    assert items.vectors.flags.c_contiguous


@pytest.mark.parametrize("column", ["item_id", "only"])
def test_ids_for_a_matrix_come_from_a_parquet_file(tmp_path, column):
    np.save(tmp_path / "i.npy", VECTORS)
    pq.write_table(pa.table({column: ["p", "q", "r", "s"]}), tmp_path / "ids.parquet")
    assert load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet").ids.to_pylist() == ["p", "q", "r", "s"]


def test_columns_may_have_other_names(tmp_path):
    path = write(tmp_path / "i.parquet", good())
    pq.write_table(pq.read_table(path).rename_columns(["sku", "vec"]), path)
    assert load(path, item_id_column="sku", embedding_column="vec").ids.to_pylist() == ["a", "b", "c", "d"]


def test_the_digest_changes_with_the_file_and_with_its_ids(tmp_path):
    np.save(tmp_path / "i.npy", VECTORS)
    pq.write_table(pa.table({"item_id": [1, 2, 3, 4]}), tmp_path / "ids.parquet")
    digests = [load(tmp_path / "i.npy").sha256, load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet").sha256]
    pq.write_table(pa.table({"item_id": [1, 2, 4, 3]}), tmp_path / "ids.parquet")
    digests.append(load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet").sha256)
    np.save(tmp_path / "i.npy", VECTORS + 1)
    digests.append(load(tmp_path / "i.npy").sha256)
    assert len(set(digests)) == 4


# Widths, dims, lengths


def test_a_wrong_width_names_both_numbers(tmp_path):
    with pytest.raises(ItemsError, match=r"i\.parquet: embeddings are 4 wide, but the-model gives vectors of 32"):
        load(write(tmp_path / "i.parquet", good()), hidden_size=32, model="the-model")


@pytest.mark.parametrize("name", ["i.npy", "i.safetensors"])
def test_a_wrong_width_of_a_matrix_names_both_numbers(tmp_path, name):
    np.save(tmp_path / "i.npy", VECTORS)
    save_file({"embeddings": VECTORS}, tmp_path / "i.safetensors")
    with pytest.raises(ItemsError, match=r"4 wide.* 3$"):
        load(tmp_path / name, hidden_size=3)


def test_without_a_model_the_width_is_the_files_own(tmp_path):
    assert load(write(tmp_path / "i.parquet", good()), hidden_size=None).width == WIDTH


def test_dims_take_full_or_cut_embeddings_and_nothing_else(tmp_path):
    full = load(write(tmp_path / "full.parquet", good()), dims=2)
    cut = load(write(tmp_path / "cut.parquet", VECTORS[:, :2].tolist()), dims=2)
    assert full.vectors.tolist() == cut.vectors.tolist() == VECTORS[:, :2].tolist()
    assert full.norms.tolist() == cut.norms.tolist()
    with pytest.raises(ItemsError, match=r"3 wide, but .* of 4 or --dims 2"):
        load(write(tmp_path / "odd.parquet", VECTORS[:, :3].tolist()), dims=2)
    with pytest.raises(UsageError, match=r"--dims 5 is more than the input's width of 4"):
        load(tmp_path / "full.parquet", dims=5)


@pytest.mark.parametrize("options", [{"score": "cosine"}, {"normalize": True}])
def test_vectors_are_cut_and_then_normalised(tmp_path, options):
    cut = VECTORS[:3, :2].astype(np.float64)
    items = load(write(tmp_path / "i.parquet", good(3)), dims=2, **options)
    assert np.abs(items.vectors - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < 1e-7
    assert items.norms == pytest.approx(1)


def test_dot_leaves_lengths_alone(tmp_path):
    assert load(write(tmp_path / "i.parquet", [[3.0, 0, 0, 0], [0, 0.5, 0, 0]])).norms.tolist() == [3.0, 0.5]


@pytest.mark.parametrize("length", [3e38, 1e-30, 1e-40])
def test_lengths_at_the_ends_of_float32_are_normalised_all_the_same(tmp_path, length):
    items = load(write(tmp_path / "i.parquet", [[length] * 4, [1.0, 0, 0, 0]]), score="cosine")
    assert items.vectors[0] == pytest.approx(0.5, rel=1e-4)


def test_a_float64_embedding_that_is_zero_in_float32_has_no_direction(tmp_path):
    path = write(tmp_path / "i.parquet", [[1e-60] * 4, [1.0, 0, 0, 0]], kind=pa.list_(pa.float64()))
    with pytest.raises(ItemsError, match="zero length"):
        load(path, score="cosine")


# Bad rows

NAN, INF = float("nan"), float("inf")
BAD_ROWS = {
    "NaN": ([1, NAN, 0, 0], "NaN or infinity"),
    "infinity": ([1, INF, 0, 0], "NaN or infinity"),
    "null": (None, "null or ragged"),
    "short": ([1, 2], "null or ragged"),
    "long": ([1, 2, 3, 4, 5], "null or ragged"),
    "empty": ([], "null or ragged"),
    "null element": ([1, None, 2, 3], "null or ragged"),
}


@pytest.mark.parametrize("row_group_size", [None, 1, 2])
@pytest.mark.parametrize("position", [0, 1, 4])
@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_is_named_and_may_be_dropped(tmp_path, caplog, fault, position, row_group_size):
    row, words = BAD_ROWS[fault]
    rows, ids = good(), ["a", "b", "c", "d"]
    rows.insert(position, row)
    ids.insert(position, "bad-one")
    path = write(tmp_path / "i.parquet", rows, pa.array(ids), row_group_size=row_group_size)
    with pytest.raises(ItemsError, match=rf"1 items have {words}.*: bad-one; .*--bad-items drop"):
        load(path)
    with caplog.at_level(logging.WARNING):
        items = load(path, bad_items="drop")
    assert items.ids.to_pylist() == ["a", "b", "c", "d"]
    assert items.vectors.tolist() == VECTORS.tolist()
    assert items.dropped == 1
    assert "1 of 5 items are left out (--bad-items drop): bad-one" in caplog.text


@pytest.mark.parametrize("row", [None, [1, None, 2, 3], [NAN, 0, 0, 0]])
def test_bad_rows_of_fixed_size_lists_are_found_too(tmp_path, row):
    path = write(tmp_path / "i.parquet", [*good(), row], kind=pa.list_(pa.float32(), WIDTH))
    with pytest.raises(ItemsError, match=r"1 items have .*: e;"):
        load(path)
    assert load(path, bad_items="drop").vectors.tolist() == VECTORS.tolist()


@pytest.mark.parametrize("row", [None, []])
def test_a_first_part_of_bad_rows_only_is_told_like_any_other(tmp_path, row):
    write(tmp_path / "p" / "1.parquet", [row, row], pa.array(["x", "y"]))
    write(tmp_path / "p" / "2.parquet", good())
    with pytest.raises(ItemsError, match="2 items have null or ragged embeddings: x, y;"):
        load(tmp_path / "p")
    items = load(tmp_path / "p", bad_items="drop")
    assert items.ids.to_pylist() == ["a", "b", "c", "d"]
    assert items.vectors.tolist() == VECTORS.tolist()


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_a_zero_row_is_an_error_where_directions_count(tmp_path, score):
    path = write(tmp_path / "i.parquet", [*good(), [0, 0, 0, 0]])
    if score == "dot":
        assert len(load(path)) == 5
        return
    for options in ({"score": "cosine"}, {"normalize": True}):
        with pytest.raises(ItemsError, match=r"1 items have an embedding of zero length.*: e;"):
            load(path, **options)
        assert load(path, bad_items="drop", **options).dropped == 1


def test_a_row_that_is_zero_after_the_cut_has_no_direction(tmp_path):
    with pytest.raises(ItemsError, match=r"1 items have an embedding of zero length.*: d;"):
        load(write(tmp_path / "i.parquet", good()), dims=2, score="cosine")


def test_a_float64_beyond_float32_counts_as_infinity(tmp_path):
    path = write(tmp_path / "i.parquet", [*good(), [1e300, 0, 0, 0]], kind=pa.list_(pa.float64()))
    with pytest.raises(ItemsError, match=r"NaN or infinity.*: e;"):
        load(path)
    assert load(path, bad_items="drop").dropped == 1


def test_bad_rows_of_every_kind_are_dropped_and_counted_together(tmp_path):
    rows = [None, *good(), [NAN] * 4, [0, 0, 0, 0], [1.0], [INF, 0, 0, 0]]
    items = load(write(tmp_path / "i.parquet", rows), score="cosine", bad_items="drop")
    assert items.ids.to_pylist() == ["b", "c", "d", "e"]
    assert items.dropped == 5


def test_no_more_than_five_bad_items_are_named(tmp_path):
    path = write(tmp_path / "i.parquet", [*good(), *[[NAN] * 4] * 7])
    with pytest.raises(ItemsError, match=r"7 items have .*: e, f, g, h, i, …;"):
        load(path)


@pytest.mark.parametrize("rows", [[[NAN] * 4], [[INF] * 4] * 3])
def test_dropping_every_item_is_an_error(tmp_path, rows):
    with pytest.raises(ItemsError, match="every item is left out"):
        load(write(tmp_path / "i.parquet", rows), bad_items="drop")


@pytest.mark.parametrize("rows", [[None], [[]], [None, []]])
def test_a_column_of_nothing_is_an_error(tmp_path, rows):
    with pytest.raises(ItemsError, match="every embedding is null or empty"):
        load(write(tmp_path / "i.parquet", rows), bad_items="drop")


@pytest.mark.parametrize("name", ["i.npy", "i.safetensors"])
def test_bad_rows_of_a_matrix_are_named_by_their_number(tmp_path, name):
    vectors = VECTORS.copy()
    vectors[2, 1], vectors[3, 0] = NAN, INF
    np.save(tmp_path / "i.npy", vectors)
    save_file({"embeddings": vectors}, tmp_path / "i.safetensors")
    with pytest.raises(ItemsError, match=r"2 items have NaN or infinity in the embedding: 2, 3;"):
        load(tmp_path / name)
    items = load(tmp_path / name, bad_items="drop")
    assert items.ids.to_pylist() == [0, 1]
    assert items.vectors.tolist() == VECTORS[:2].tolist()


# Ids


def test_duplicate_ids_are_refused_with_up_to_five_of_them(tmp_path):
    with pytest.raises(ItemsError, match=r"1 item ids stand there more than once: b$"):
        load(write(tmp_path / "i.parquet", good(), pa.array(["a", "b", "b", "c"])))
    many = [[1.0, 0, 0, 0]] * 14
    with pytest.raises(ItemsError, match=r"7 item ids stand there more than once: 0, 1, 2, 3, 4, …$"):
        load(write(tmp_path / "i.parquet", many, pa.array([*range(7), *range(7)])))


def test_duplicate_ids_in_different_parts_are_found(tmp_path):
    write(tmp_path / "p" / "1.parquet", good(2), pa.array(["a", "b"]))
    write(tmp_path / "p" / "2.parquet", good(2), pa.array(["c", "a"]))
    with pytest.raises(ItemsError, match="more than once: a"):
        load(tmp_path / "p")


@pytest.mark.parametrize("bad_items", ["fail", "drop"])
def test_null_ids_are_refused(tmp_path, bad_items):
    with pytest.raises(ItemsError, match="2 item ids are null"):
        load(write(tmp_path / "i.parquet", good(), pa.array(["a", None, "c", None])), bad_items=bad_items)


@pytest.mark.parametrize(
    "ids",
    [pa.array([1.0, 2, 3, 4]), pa.array([True, False, True, False]), pa.array([[1], [2], [3], [4]]), pa.nulls(4)],
    ids=lambda ids: str(ids.type),
)
def test_ids_of_another_type_are_refused(tmp_path, ids):
    with pytest.raises(ItemsError, match=r"item ids are .*; they must be integers, text or binary"):
        load(write(tmp_path / "i.parquet", good(), ids))


def test_ids_that_are_not_utf8_are_refused(tmp_path):
    ids = pa.Array.from_buffers(
        pa.string(), 4, [None, pa.py_buffer(np.array([0, 1, 3, 4, 5], np.int32)), pa.py_buffer(b"a\xff\xfebc")]
    )
    with pytest.raises(ItemsError, match="1 item ids are not UTF-8, the first in row 1"):
        load(write(tmp_path / "i.parquet", good(), ids))


def test_a_list_of_ids_of_another_length_names_both_numbers(tmp_path):
    np.save(tmp_path / "i.npy", VECTORS)
    pq.write_table(pa.table({"item_id": ["p", "q"]}), tmp_path / "ids.parquet")
    with pytest.raises(ItemsError, match=r"ids\.parquet has 2 ids, but .*i\.npy has 4 rows"):
        load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet")


def test_a_list_of_ids_has_to_be_there_and_to_have_the_column(tmp_path):
    np.save(tmp_path / "i.npy", VECTORS)
    with pytest.raises(ItemsError, match=r"ids\.parquet: no such file"):
        load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet")
    pq.write_table(pa.table({"item": ["p"] * 4, "other": [1] * 4}), tmp_path / "ids.parquet")
    with pytest.raises(ItemsError, match=r"no column 'item_id' \(did you mean 'item'\?\)"):
        load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet")
    (tmp_path / "ids.parquet").write_bytes(b"PAR1")
    with pytest.raises(ItemsError, match=r"ids\.parquet: not readable as Parquet"):
        load(tmp_path / "i.npy", item_ids=tmp_path / "ids.parquet")


def test_a_list_of_ids_beside_a_parquet_file_is_a_contradiction(tmp_path):
    with pytest.raises(UsageError, match="--item-ids goes with"):
        load(write(tmp_path / "i.parquet", good()), item_ids=tmp_path / "ids.parquet")


# Files


@pytest.mark.parametrize("name", ["i.pt", "i.pth", "i.pkl", "i.pickle", "i.bin", "i.npz", "I.PKL"])
def test_pickles_are_refused_by_name_before_they_are_opened(tmp_path, name):
    with pytest.raises(ItemsError, match=r"pickled files can run code.*\.safetensors"):
        load(tmp_path / name)  # there is no such file at all


@pytest.mark.parametrize("name", ["i.parquet", "i.npy", "i.safetensors", "none-*.parquet", "folder"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ItemsError, match="no such file") as raised:
        load(tmp_path / name)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["i.parquet", "i.npy", "i.safetensors"])
@pytest.mark.parametrize("keep", [0, 10, 150])
def test_a_damaged_file_is_named(tmp_path, name, keep):
    write(tmp_path / "i.parquet", good())
    np.save(tmp_path / "i.npy", VECTORS)
    save_file({"embeddings": VECTORS}, tmp_path / "i.safetensors")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:keep] if keep < 150 else b"\x00" * keep)
    with pytest.raises(ItemsError, match="not readable as") as raised:
        load(tmp_path / name)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damage_inside_a_parquet_file_is_an_error_of_the_items(tmp_path):
    path = write_items(tmp_path / "i.parquet", n=500)
    raw = bytearray(path.read_bytes())
    raw[200:30000] = bytes(29800)
    path.write_bytes(raw)
    with pytest.raises(ItemsError, match=r"i\.parquet: not readable as Parquet"):
        load(path, hidden_size=32)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[1, "a"]], object), r"found object \[1, 2\]"),
        (np.arange(8).reshape(2, 4), r"expected a matrix of floats .* found int64 \[2, 4\]"),
        (np.zeros(4, np.float32), r"found float32 \[4\]"),
        (np.zeros((2, 2, 4), np.float32), r"\[2, 2, 4\]"),
        (np.array(["a"]), "expected a matrix"),
    ],
)
def test_an_npy_that_is_no_matrix_of_floats_is_refused(tmp_path, array, words):
    np.save(tmp_path / "i.npy", array, allow_pickle=True)
    with pytest.raises(ItemsError, match=words):
        load(tmp_path / "i.npy")


def test_an_archive_under_the_name_of_an_npy_is_refused(tmp_path):
    np.savez(tmp_path / "i.npz", embeddings=VECTORS)
    (tmp_path / "i.npz").rename(tmp_path / "i.npy")
    with pytest.raises(ItemsError, match=r"\.npz"):
        load(tmp_path / "i.npy")


def test_safetensors_without_the_tensor_name_the_nearest(tmp_path):
    save_file({"embedding": VECTORS}, tmp_path / "i.safetensors")
    with pytest.raises(ItemsError, match=r"no tensor 'embeddings' \(did you mean 'embedding'\?\)"):
        load(tmp_path / "i.safetensors")


def test_safetensors_of_integers_are_refused(tmp_path):
    save_file({"embeddings": np.arange(8).reshape(2, 4)}, tmp_path / "i.safetensors")
    with pytest.raises(ItemsError, match="expected a matrix of floats"):
        load(tmp_path / "i.safetensors")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"item_id_column": "item_ids"}, r"no column 'item_ids' \(did you mean 'item_id'\?\)"),
        ({"embedding_column": "embeddings"}, r"no column 'embeddings' \(did you mean 'embedding'\?\)"),
        ({"item_bias_column": "bias"}, r"no column 'bias'"),
    ],
)
def test_a_missing_column_names_the_nearest(tmp_path, options, words):
    with pytest.raises(ItemsError, match=words):
        load(write(tmp_path / "i.parquet", good()), **options)


@pytest.mark.parametrize(
    "column", [pa.array([1.0, 2]), pa.array([[1], [2]]), pa.array([["a"], ["b"]]), pa.array(["a", "b"])]
)
def test_an_embedding_column_of_another_type_is_refused(tmp_path, column):
    with pytest.raises(ItemsError, match=r"the embedding column is .*; it must be a list of float16"):
        load(write(tmp_path / "i.parquet", column))


@pytest.mark.parametrize("name", ["i.parquet", "i.npy", "i.safetensors"])
def test_a_file_without_items_is_refused(tmp_path, name):
    write(tmp_path / "i.parquet", [], pa.array([], pa.string()))
    np.save(tmp_path / "i.npy", VECTORS[:0])
    save_file({"embeddings": VECTORS[:0]}, tmp_path / "i.safetensors")
    with pytest.raises(ItemsError, match="there are no items in it"):
        load(tmp_path / name)


def test_an_empty_part_among_others_is_no_matter(tmp_path):
    write(tmp_path / "p" / "1.parquet", [], pa.array([], pa.string()))
    write(tmp_path / "p" / "2.parquet", good())
    assert len(load(tmp_path / "p")) == 4


# Bias


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int64()])
def test_a_bias_is_read_from_any_number(tmp_path, kind):
    path = write(tmp_path / "i.parquet", good(), popularity=pa.array([1, 2, -3, 0], kind))
    bias = load(path, item_bias_column="popularity").bias
    assert bias.tolist() == [1, 2, -3, 0]
    assert bias.dtype == np.float32


@pytest.mark.parametrize("value", [None, NAN, INF, 1e300])
def test_a_bias_that_is_null_or_not_finite_is_a_bad_item(tmp_path, value):
    path = write(tmp_path / "i.parquet", good(), bias=pa.array([1, value, 3, 4], pa.float64()), row_group_size=2)
    with pytest.raises(ItemsError, match="1 items have a bias that is null or not finite: b;"):
        load(path, item_bias_column="bias")
    items = load(path, item_bias_column="bias", bad_items="drop")
    assert (items.ids.to_pylist(), items.bias.tolist(), items.dropped) == (["a", "c", "d"], [1, 3, 4], 1)
    assert items.vectors.tolist() == VECTORS[[0, 2, 3]].tolist()


def test_a_whole_number_too_long_for_a_float_is_rounded(tmp_path):
    path = write(tmp_path / "i.parquet", good(1), bias=pa.array([2**60 + 1]))
    assert load(path, item_bias_column="bias").bias.tolist() == [2.0**60]


def test_a_bias_of_text_is_refused(tmp_path):
    with pytest.raises(ItemsError, match="bias column 'bias' is string; it must be a number"):
        load(write(tmp_path / "i.parquet", good(2), bias=pa.array(["1", "2"])), item_bias_column="bias")


def test_a_matrix_has_no_bias_column(tmp_path):
    np.save(tmp_path / "i.npy", VECTORS)
    with pytest.raises(UsageError, match="--item-bias-column needs a Parquet item file"):
        load(tmp_path / "i.npy", item_bias_column="bias")


# Provenance

MADE_WITH = {"model": "B", "pooling": "last", "dims": None}


def with_provenance(tmp_path, value):
    return write(tmp_path / "i.parquet", good(), metadata={"prefill-score": value})


def test_another_model_is_a_warning_that_names_both(tmp_path, caplog):
    path = with_provenance(tmp_path, '{"model": "A", "pooling": "last", "note": 5}')
    with caplog.at_level(logging.WARNING):
        check_provenance(load(path), run_config(path), MADE_WITH)
    assert "model (A, now B)" in caplog.text
    assert "pooling" not in caplog.text


def test_another_model_is_an_error_where_provenance_is_strict(tmp_path):
    path = with_provenance(tmp_path, '{"model": "A", "pooling": "mean"}')
    with pytest.raises(ItemsError, match=r"model \(A, now B\), pooling \(mean, now last\).*--strict-provenance"):
        check_provenance(load(path), run_config(path, strict_provenance=True), MADE_WITH)


@pytest.mark.parametrize("value", ["{}", '{"model": "B"}', '{"model": null}', '{"other": 1}', "[1]", '"text"'])
def test_provenance_that_agrees_or_says_nothing_is_silent(tmp_path, caplog, value):
    path = with_provenance(tmp_path, value)
    check_provenance(load(path), run_config(path, strict_provenance=True), MADE_WITH)
    assert caplog.text == ""


def test_parts_of_two_models_match_neither(tmp_path, caplog):
    for i, model in enumerate("ABA"):
        metadata = {"prefill-score": json.dumps({"model": model, "pooling": "last"})}
        write(tmp_path / "p" / f"{i}.parquet", good(1), pa.array([i]), metadata=metadata)
    items = load(tmp_path / "p")
    for model in "AB":
        check_provenance(items, run_config(tmp_path / "p"), {"model": model, "pooling": "last"})
        assert f"model (A and B, now {model})" in caplog.text
    assert "pooling" not in caplog.text


@pytest.mark.parametrize("value", ["{broken", b"\xff\xfe"])
def test_provenance_that_is_not_json_is_refused(tmp_path, value):
    with pytest.raises(ItemsError, match="metadata 'prefill-score' is not JSON"):
        load(with_provenance(tmp_path, value))


def test_a_run_with_another_model_warns_or_refuses(job, tmp_path, caplog):
    table = pq.read_table(job.items).replace_schema_metadata({"prefill-score": '{"model": "another"}'})
    pq.write_table(table, tmp_path / "other.parquet")
    with pytest.raises(ItemsError, match="another"):
        job.run(items=tmp_path / "other.parquet", strict_provenance=True)
    assert not job.out.exists()
    with caplog.at_level(logging.WARNING):
        job.run(items=tmp_path / "other.parquet")
    assert "was made with another model (another, now" in caplog.text


@pytest.mark.parametrize("name", ["pipe.parquet", "pipe.npy", "pipe.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(job, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ItemsError, match="not a regular file"):
        job.run(items=tmp_path / name)


def test_what_a_damaged_file_puts_into_a_message_is_escaped(job):
    table = pq.read_table(job.items)
    pq.write_table(table.rename_columns(["item_id", "emb\x1b[2J\nding"]), job.items)
    with pytest.raises(
        ItemsError, match=r"no column 'embedding' \(did you mean 'emb\\x1b\[2J\\nding'\?\)|there are: emb\\x1b"
    ):
        job.run()
