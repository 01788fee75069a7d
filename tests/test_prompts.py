"""Shards out of Parquet files: the right rows in working types, little memory, and an error where a file changed."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefill_cli.config import RunConfig
from prefill_cli.data import prompts
from prefill_cli.data.inputs import Shard, plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.errors import InputError, PrefillScoreError

GOOD, BAD = b"good", b"\xed\xa0\x80"  # half of a surrogate pair, which UTF-8 does not allow
TEXT = pa.string()
TEXT_KINDS = [TEXT, pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def broken_text(cells, kind=TEXT):
    """A text array whose cells are any bytes, as other writers leave them in files."""
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array(range(len(cells)), kind.index_type), broken_text(cells))
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}[kind]
    return pa.Array.from_buffers(kind, len(cells), pa.array(cells, binary).buffers())


def write(path, rows, start=0, group=None, **columns):
    """user_id and prompt count on from `start`; row groups of `group` rows."""
    table = {
        "user_id": pa.array(range(start, start + rows), pa.int64()),
        "prompt": [f"w{i}" for i in range(start, start + rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table | columns), path, row_group_size=group or max(rows, 1))
    return path


class Reading:
    """A reader over what was named, and the plan behind it."""

    def __init__(self, *inputs, **options):
        config = RunConfig(inputs=tuple(map(str, inputs)), **options)
        self.plan = plan_inputs(config)
        self.reader = ShardReader(self.plan, config)

    def pieces(self, start=0, rows=None):
        return list(self.reader.read(Shard(0, start, self.plan.rows if rows is None else rows)))

    def ids(self, start=0, rows=None):
        return [i for piece in self.pieces(start, rows) for i in piece.ids.to_pylist()]


# --- which rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 10, 50])
@pytest.mark.parametrize("shard_rows", [1, 4, 10, 17, 100])
def test_shards_hold_every_row_once_whatever_the_row_groups_and_files(tmp_path, group, shard_rows):
    for i, rows in enumerate((10, 0, 23, 1)):
        write(tmp_path / f"{i}.parquet", rows, start=(0, 10, 10, 33)[i], group=group)
    reading = Reading(tmp_path)
    for shard in reading.plan.shards(shard_rows):
        assert reading.ids(shard.start, shard.rows) == list(range(shard.start, shard.start + shard.rows))


def test_shards_may_be_read_in_any_order_and_again(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.parquet", 20, start=20 * i, group=7)
    reading = Reading(tmp_path)
    shards = reading.plan.shards(9)
    for i in [*np.random.default_rng(0).permutation(len(shards)), 0, 0, 3]:
        assert reading.ids(shards[i].start, shards[i].rows) == list(range(shards[i].start, shards[i].start + shards[i].rows))


def test_a_piece_says_which_file_and_row_it_begins_with(tmp_path):
    a, b = write(tmp_path / "a.parquet", 5), write(tmp_path / "b.parquet", 5, start=5)
    pieces = Reading(tmp_path).pieces(start=3, rows=4)
    assert [(p.path, p.first_row, p.ids.to_pylist()) for p in pieces] == [(str(a), 3, [3, 4]), (str(b), 0, [5, 6])]


def test_reading_in_order_opens_each_file_once(tmp_path, monkeypatch):
    opened = []
    real = prompts.open_parquet
    monkeypatch.setattr(prompts, "open_parquet", lambda path, **options: opened.append(path) or real(path, **options))
    names = [str(write(tmp_path / f"{i}.parquet", 20, start=20 * i, group=6)) for i in range(3)]
    reading = Reading(tmp_path)
    for shard in reading.plan.shards(7):
        reading.ids(shard.start, shard.rows)
    assert opened == names


def test_prompts_filters_and_kept_columns_stay_with_their_ids(tmp_path):
    extra = {"n": range(50), "seen": [[i] for i in range(50)], "may": [[i, i] for i in range(50)]}
    write(tmp_path / "a.parquet", 50, group=8, **extra)
    reading = Reading(tmp_path, keep_columns=("n",), exclude_column="seen", candidates_column="may")
    for piece in reading.pieces(start=5, rows=30):
        ids = piece.ids.to_pylist()
        assert piece.prompts.to_pylist() == [f"w{i}" for i in ids]
        assert piece.kept.to_pydict() == {"n": ids}
        assert piece.exclude.to_pylist() == [[i] for i in ids]
        assert piece.candidates.to_pylist() == [[i, i] for i in ids]


def test_column_names_with_dots_are_names(tmp_path):
    write(tmp_path / "a.parquet", 3, **{"user.id": ["a", "b", "c"], "prompt.text": ["w1", "w2", "w3"]})
    reading = Reading(tmp_path, id_column="user.id", prompt_column="prompt.text")
    (piece,) = reading.pieces()
    assert (piece.ids.to_pylist(), piece.prompts.to_pylist()) == (["a", "b", "c"], ["w1", "w2", "w3"])


# --- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXT_KINDS, ids=str)
def test_text_of_every_kind_reads_the_same(tmp_path, kind):
    text = pa.array(["a", None, "é€😀"])
    write(tmp_path / "a.parquet", 3, user_id=text.cast(kind), prompt=text.cast(kind), kept=text.cast(kind))
    (piece,) = Reading(tmp_path, keep_columns=("kept",)).pieces()
    for column in (piece.ids, piece.prompts, piece.kept["kept"]):
        assert column.to_pylist() == text.to_pylist()
    assert {i: r.reason for i, r in piece.rejects.items()} == {1: "null_id"}


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a", "b"], [], None]),
        pa.array([["a", "b"], [], None], pa.large_list(pa.large_string())),
        pa.array([["a", "b"], ["c", None], None], pa.list_(pa.string(), 2)),
        pa.array([["a", "b"], [], None], pa.list_(pa.string_view())),
        pa.array([["a", "b"], [], None]).cast(pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        pa.array([[1, 2], [], None], pa.list_(pa.int16())),
        pa.array([[], [None], None], pa.list_(pa.null())),
        pa.nulls(3),
    ],
    ids=lambda column: str(column.type),
)
def test_filter_lists_of_every_kind_read_the_same(tmp_path, column):
    write(tmp_path / "a.parquet", 3, seen=column)
    (piece,) = Reading(tmp_path, exclude_column="seen").pieces()
    assert piece.exclude.to_pylist() == column.to_pylist()


def test_pieces_of_all_files_have_the_same_types(tmp_path):
    columns = [
        {"user_id": pa.nulls(1), "prompt": pa.nulls(1), "n": pa.nulls(1), "seen": pa.nulls(1)},
        {"user_id": pa.array([1], pa.int32()), "prompt": pa.array(["b"], pa.large_string()), "n": pa.array([2], pa.int32()),
         "seen": pa.array([[]], pa.list_(pa.null()))},
        {"user_id": pa.array([2**53 + 1]), "prompt": pa.array(["c"], pa.string_view()), "n": pa.array([2**40]),
         "seen": pa.array([[5]], pa.list_(pa.int32()))},
        {"user_id": pa.array([3], pa.int8()), "prompt": pa.array(["d"]), "n": pa.array([4], pa.uint8()),
         "seen": pa.array([[2**40]])},
    ]  # fmt: skip
    for i, given in enumerate(columns):
        write(tmp_path / f"{i}.parquet", 1, **given)
    pieces = Reading(tmp_path, keep_columns=("n",), exclude_column="seen").pieces()
    assert [p.ids.to_pylist() for p in pieces] == [[None], [1], [2**53 + 1], [3]]
    assert [p.prompts.to_pylist() for p in pieces] == [[None], ["b"], ["c"], ["d"]]
    assert [p.kept["n"].to_pylist() for p in pieces] == [[None], [2], [2**40], [4]]
    assert [p.exclude.to_pylist() for p in pieces] == [[None], [[]], [[5]], [[2**40]]]
    types = {(p.ids.type, p.prompts.type, p.kept.schema.types[0], p.exclude.type) for p in pieces}
    assert types == {(pa.int64(), pa.large_string(), pa.int64(), pa.large_list(pa.int64()))}


def test_roles_of_messages_may_be_dictionary_encoded(tmp_path):
    chat = pa.array([[{"role": "user", "content": "w1"}], None, []])
    kind = pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.string())]))
    write(tmp_path / "a.parquet", 3, chat=chat.cast(kind))
    (piece,) = Reading(tmp_path, messages_column="chat").pieces()
    assert piece.prompts.take(pa.array([0, 2])).to_pylist() == [chat[0].as_py(), []]


def test_folder_names_are_read_as_text(tmp_path):
    write(tmp_path / "day=01" / "a.parquet", 2)
    write(tmp_path / "day=02" / "a.parquet", 1, start=2)
    pieces = Reading(tmp_path, keep_columns=("day",)).pieces()
    assert [v for p in pieces for v in p.kept["day"].to_pylist()] == ["01", "01", "02"]
    (piece,) = Reading(tmp_path / "day=02" / "a.parquet", keep_columns=("day",)).pieces()
    assert piece.kept["day"].to_pylist() == ["02"]


# --- rows that cannot be scored ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TEXT_KINDS, ids=str)
def test_bytes_that_are_not_utf8_reject_their_row_alone(tmp_path, kind):
    broken = broken_text([GOOD, BAD, GOOD], kind)
    write(tmp_path / "ids.parquet", 3, user_id=broken)
    (piece,) = Reading(tmp_path / "ids.parquet").pieces()
    assert {i: (r.reason, r.detail) for i, r in piece.rejects.items()} == {1: ("bad_text", "column user_id is not UTF-8")}
    write(tmp_path / "kept.parquet", 3, kept=broken)
    (piece,) = Reading(tmp_path / "kept.parquet", keep_columns=("kept",)).pieces()
    assert {i: (r.reason, r.detail) for i, r in piece.rejects.items()} == {1: ("bad_text", "column kept is not UTF-8")}


def test_a_row_with_several_faults_tells_the_one_of_its_id(tmp_path):
    write(tmp_path / "a.parquet", 2, user_id=broken_text([BAD, None]), kept=broken_text([BAD, BAD]))
    (piece,) = Reading(tmp_path, keep_columns=("kept",)).pieces()
    assert [(piece.rejects[i].reason, piece.rejects[i].detail) for i in (0, 1)] == [
        ("bad_text", "column user_id is not UTF-8"), ("null_id", ""),
    ]  # fmt: skip


# --- memory --------------------------------------------------------------------------------------------------------

CELL = 2_000_000


def big_cells(rows, seed=0):
    """Prompts of 2 MB that differ, so that no dictionary makes them small."""
    letters = np.random.default_rng(seed).integers(97, 123, (rows, CELL), np.uint8)
    return pa.array([row.tobytes().decode() for row in letters])


@pytest.mark.parametrize("name", ["prompt", "prompt.text"])
def test_a_row_group_of_large_cells_comes_in_pieces_of_few_rows(tmp_path, monkeypatch, name):
    monkeypatch.setattr(prompts, "BATCH_BYTES", 4 * CELL)
    cells = big_cells(40)
    path = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_batch_size": 1}  # a page is held whole: small ones
    pq.write_table(pa.table({"user_id": range(40), name: cells}), path, **plain)
    assert pq.read_metadata(path).num_row_groups == 1
    reading = Reading(path, prompt_column=name)
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    for piece in reading.reader.read(Shard(0, 0, 40)):
        assert len(piece.ids) <= 4
        assert piece.prompts.equals(cells.slice(seen, len(piece.ids)))
        seen += len(piece.ids)
        most = max(most, pa.total_allocated_bytes() - before)
    assert seen == 40
    assert most < 16 * CELL  # the column has 40


def test_a_row_group_of_large_cells_behind_one_of_small_ones_is_read_in_small_pieces_too(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "BATCH_BYTES", 4 * CELL)
    small = pa.table({"user_id": range(100), "prompt": [f"w{i}" for i in range(100)]})
    large = pa.table({"user_id": range(100, 120), "prompt": big_cells(20)})
    with pq.ParquetWriter(tmp_path / "a.parquet", small.schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(small)
        writer.write_table(large)
    sizes = [len(p.ids) for p in Reading(tmp_path).pieces()]
    assert sizes[0] == 100
    assert max(sizes[1:]) <= 4
    assert sum(sizes) == 120


def test_small_row_groups_are_read_together(tmp_path):
    write(tmp_path / "a.parquet", 1_000, group=10)
    assert len(Reading(tmp_path).pieces()) == 1


def test_memory_stays_level_over_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "BATCH_BYTES", 1 << 20)
    cells = pa.array(["x" * 1_000 + str(i) for i in range(2_000)])
    for i in range(12):
        write(tmp_path / f"{i}.parquet", 2_000, start=2_000 * i, group=500, prompt=cells)
    reading = Reading(tmp_path)
    before, held = pa.total_allocated_bytes(), []
    for shard in reading.plan.shards(3_000):
        for piece in reading.reader.read(shard):
            held.append(pa.total_allocated_bytes() - before)
            del piece
    assert max(held) < 8 << 20  # the files hold 24 MB
    assert max(held[-len(held) // 4 :]) <= 1.1 * max(held[: len(held) // 2])


# --- files that are not as planned ---------------------------------------------------------------------------------


def test_a_file_that_vanished_after_planning_is_an_input_error(tmp_path):
    path = write(tmp_path / "a.parquet", 5)
    reading = Reading(path)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.parquet: the file was there when the run began"):
        reading.pieces()


@pytest.mark.parametrize("rows", [4, 5, 6])
def test_a_file_that_changed_after_planning_is_an_input_error(tmp_path, rows):
    path = write(tmp_path / "a.parquet", 5)
    reading = Reading(path)
    os.utime(write(path, rows), ns=(0, 0))
    with pytest.raises(InputError, match=r"a\.parquet: the file changed while the run was reading it"):
        reading.pieces()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("damage", [b"\xff" * 64, bytes(64)])
def test_a_damaged_data_page_is_an_input_error_that_names_the_file_and_no_prompt(tmp_path, compression, damage):
    path = tmp_path / "a.parquet"
    words = pa.array([f"SECRET-{i * 7919 % 1000}" for i in range(1_000)])
    pq.write_table(pa.table({"user_id": range(1_000), "prompt": words}), path, compression=compression, use_dictionary=False)
    offset = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    with path.open("r+b") as file:  # the page's header and the beginning of what it holds
        file.seek(offset)
        file.write(damage)
    reading = Reading(path)
    with pytest.raises(InputError, match=r"a\.parquet: damaged near row 0") as error:
        reading.pieces()
    assert "SECRET" not in str(error.value)


def test_a_run_over_a_damaged_page_ends_with_an_input_error_and_publishes_nothing(job, tmp_path):
    path = tmp_path / "damaged.parquet"
    pq.write_table(pq.read_table(job.inputs), path, row_group_size=10)
    offset = pq.read_metadata(path).row_group(2).column(1).data_page_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 32)
    with pytest.raises(InputError, match=r"damaged\.parquet: damaged near row"):
        job.run(inputs=(str(path),), shard_rows=10)
    assert not job.out.exists()


def test_damage_in_a_column_that_nobody_asked_for_does_not_matter(tmp_path):
    path = write(tmp_path / "a.parquet", 10, other=[str(i) for i in range(10)])
    offset = pq.read_metadata(path).row_group(0).column(2).data_page_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 16)
    assert Reading(path).ids() == list(range(10))


def test_random_damage_never_ends_in_anything_but_rows_or_an_error_of_ours(tmp_path):
    """Any byte before the footer may be wrong: headers, lengths, indices, text."""
    path = tmp_path / "a.parquet"
    chat = [[{"role": "user", "content": f"w{i}"}] for i in range(200)]
    columns = {"user_id": [f"u{i % 9}" for i in range(200)], "chat": chat, "seen": [["a", "b"]] * 200, "n": range(200)}
    pq.write_table(pa.table(columns), path, row_group_size=64)
    whole, rng, outcomes = path.read_bytes(), np.random.default_rng(0), set()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for _ in range(150):
        broken = bytearray(whole)
        for position in rng.integers(4, end, 4):
            broken[position] ^= int(rng.integers(1, 256))
        path.write_bytes(broken)
        try:
            rows = sum(len(p.ids) for p in Reading(
                path, messages_column="chat", exclude_column="seen", keep_columns=("n",)).pieces())  # fmt: skip
            outcomes.add("rows" if rows == 200 else "other rows")
        except PrefillScoreError as error:
            outcomes.add(type(error).__name__)
    assert {"rows", "InputError"} <= outcomes
