"""Every input row ends in the output or in the rejects, with the id that it came with."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_tokenizer, random_prompts, save_llama, write_prompts
from test_prompts import BAD, TEXT_KINDS, broken_text

from prefill_cli.config import RunConfig
from prefill_cli.data import prompts
from prefill_cli.data.inputs import Shard, plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rejects import Reject
from prefill_cli.data.rows import read_rows
from prefill_cli.data.tokenization import PromptTokenizer
from prefill_cli.errors import InputError


def read(*inputs, start=0, rows=None, **options):
    """A shard's rows, by default all of the inputs'."""
    config = RunConfig(inputs=tuple(map(str, inputs)), **options)
    plan = plan_inputs(config)
    tokenize = PromptTokenizer(make_tokenizer(), config, 64, 65)
    shard = Shard(0, start, plan.rows if rows is None else rows)
    return read_rows(ShardReader(plan, config), tokenize, plan, config.id_column, shard)


def output(job, inputs, **options):
    """(output, rejects or None) of a run over files."""
    totals = job.run(inputs=tuple(map(str, inputs)), max_rejects="100%", overwrite=True, **options)
    result = pq.read_table(job.out)
    folder = job.out / "_rejects"
    rejected = pq.read_table(folder) if folder.exists() else None
    assert totals["rows"] == totals["rows_out"] + (rejected.num_rows if rejected else 0)
    assert totals["rows_out"] == result.num_rows
    return result, rejected


# --- aligned arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_rows", [1, 3, 2_048])
def test_what_is_kept_of_a_shard_stays_aligned(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr(prompts, "BATCH_ROWS", batch_rows)
    texts = [None if i % 5 == 2 else "w0 " * (i + 1) for i in range(20)]
    lists = [[i] for i in range(20)]
    path = write_prompts(tmp_path / "a.parquet", texts, n=pa.array(range(20)), seen=lists, may=lists)
    rows = read(path, start=3, rows=15, keep_columns=("n",), exclude_column="seen", candidates_column="may")
    kept = [i for i in range(3, 18) if i % 5 != 2]
    assert rows.columns.to_pydict() == {"user_id": [1000 + i for i in kept], "n": kept}
    assert rows.exclude.to_pylist() == rows.candidates.to_pylist() == [[i] for i in kept]
    assert [len(ids) for ids in rows.input_ids] == [i + 2 for i in kept]
    assert rows.tokens == sum(i + 2 for i in kept)
    assert rows.source_row.tolist() == kept
    assert set(rows.source_file) == {str(path)}
    assert rows.rejects.to_pydict() == {
        "user_id": [1007, 1012, 1017], "source_file": [str(path)] * 3, "source_row": [7, 12, 17],
        "reason": ["null_prompt"] * 3, "detail": [""] * 3,
    }  # fmt: skip


def test_rows_that_are_taken_out_later_go_to_the_rejects_with_their_place(tmp_path):
    a = write_prompts(tmp_path / "a.parquet", ["w1", None, "w2"], seen=[[1], [2], [3]])
    b = write_prompts(tmp_path / "b.parquet", ["w3", "w4"], seen=[[4], None])
    rows = read(a, b, exclude_column="seen")
    assert rows.without(np.zeros(4, bool), Reject("not_finite", "")) is rows
    fewer = rows.without(np.array([False, True, True, False]), Reject("not_finite", "why"))
    assert fewer.columns["user_id"].to_pylist() == [1000, 1001]
    assert fewer.exclude.to_pylist() == [[1], None]
    assert [ids.tolist() for ids in fewer.input_ids] == [[1, 6], [1, 9]]
    assert list(zip(fewer.source_file, fewer.source_row.tolist(), strict=True)) == [(str(a), 0), (str(b), 1)]
    told = [tuple(row.values()) for row in fewer.rejects.to_pylist()]
    assert told == [(1001, str(a), 1, "null_prompt", ""), (1002, str(a), 2, "not_finite", "why"),
                    (1000, str(b), 0, "not_finite", "why")]  # fmt: skip
    nobody = fewer.without(np.ones(2, bool), Reject("not_finite", "why"))
    assert (nobody.columns.num_rows, nobody.input_ids, nobody.tokens, nobody.rejects.num_rows) == (0, [], 0, 5)


def test_a_shard_without_rows_has_columns(tmp_path):
    rows = read(write_prompts(tmp_path / "a.parquet", [], kept=pa.array([], pa.string())), keep_columns=("kept",))
    assert rows.columns.schema == pa.schema([("user_id", pa.int64()), ("kept", pa.string())])
    assert (rows.input_ids, rows.source_row.tolist(), rows.rejects.num_rows) == ([], [], 0)


# --- ids leave as they came ----------------------------------------------------------------------------------------

EXACT = [
    pa.array([2**53 + 1, None, 2**62 + 3]),
    pa.array([2**63 + 1, None, 2**64 - 1], pa.uint64()),
    pa.array([-128, None, 127], pa.int8()),
    pa.array(["007", None, ""]),
    pa.array(["007", None, "é"], pa.large_string()),
    pa.array(["007", None, "a string longer than a view holds inline"], pa.string_view()),
    pa.array([b"\x00\xff", None, b""]),
    pa.array([b"\x00\xff", None, b""], pa.large_binary()),
    pa.array([b"\x00\xff", None, b"ab"], pa.binary(2)),
    pa.array([datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31)]),
]


@pytest.mark.parametrize("ids", EXACT, ids=lambda ids: str(ids.type))
@pytest.mark.parametrize("layout", ["nested", "long"])
def test_ids_leave_with_the_type_and_value_they_came_with(job, tmp_path, ids, layout):
    path = write_prompts(tmp_path / "a.parquet", ["w1", "w2", None], user_id=ids, kept=ids)
    result, rejected = output(job, [path], keep_columns=("kept",), layout=layout, top_k=1)
    assert result.schema.field("user_id").type == result.schema.field("kept").type == ids.type
    assert result["user_id"].to_pylist() == result["kept"].to_pylist() == ids.to_pylist()[:1]
    assert rejected.schema.field("user_id").type == ids.type
    assert rejected["user_id"].to_pylist() == ids.to_pylist()[1:]
    assert rejected["reason"].to_pylist() == ["null_id", "null_prompt"]


@pytest.mark.parametrize("index", [pa.int8(), pa.int32(), pa.uint32()], ids=str)
def test_dictionary_ids_leave_as_their_values(job, tmp_path, index):
    ids = pa.array(["b", "a", "b", None])
    columns = {"user_id": ids.cast(pa.dictionary(index, pa.string())), "kept": ids.cast(pa.dictionary(index, pa.string()))}
    path = write_prompts(tmp_path / "a.parquet", ["w1", "w2", None, "w4"], **columns)
    result, rejected = output(job, [path], keep_columns=("kept",))
    assert result.schema.types[:2] == [pa.string(), pa.string()]
    assert result["user_id"].to_pylist() == result["kept"].to_pylist() == ["b", "a"]
    assert rejected["user_id"].to_pylist() == ["b", None]


def test_the_same_prompts_give_the_same_lists_whatever_kind_of_text_they_are(job, tmp_path):
    texts = pa.array(random_prompts(5))
    found = [output(job, [write_prompts(tmp_path / f"{i}.parquet", [""] * 5, prompt=texts.cast(kind))])[0]
             for i, kind in enumerate(TEXT_KINDS)]  # fmt: skip
    assert all(result == found[0] for result in found)


def test_ids_and_kept_columns_of_files_that_differ_leave_in_one_type(job, tmp_path):
    a = write_prompts(tmp_path / "a.parquet", ["w1"], user_id=pa.array([1], pa.int32()), n=pa.array([1], pa.int8()),
                      text=pa.nulls(1), seen=pa.nulls(1))  # fmt: skip
    b = write_prompts(tmp_path / "b.parquet", ["w1", None], user_id=pa.array([2**53 + 1, 3]), n=pa.array([2**40, 2]),
                      text=pa.array(["x", "y"]).cast(pa.dictionary(pa.int8(), pa.string())), seen=[["i1"], []])  # fmt: skip
    for files, order in (([a, b], [0, 1]), ([b, a], [1, 0])):
        result, rejected = output(job, files, keep_columns=("n", "text"), exclude_column="seen", top_k=50)
        assert result.schema.types[:3] == [pa.int64(), pa.int64(), pa.string()]
        assert result["user_id"].to_pylist() == [[1, 2**53 + 1][i] for i in order]
        assert result["n"].to_pylist() == [[1, 2**40][i] for i in order]
        assert result["text"].to_pylist() == [[None, "x"][i] for i in order]
        assert [len(items) for items in result["item_ids"].to_pylist()] == [[50, 49][i] for i in order]
        assert rejected["user_id"].to_pylist() == [3]


KEPT = [
    pa.array([["a"], None, []]),
    pa.array([["a"], None, []], pa.large_list(pa.string_view())),
    pa.array([["a", "b"], None, ["c", None]], pa.list_(pa.string(), 2)),
    pa.array([["a"], None, ["b", "a"]]).cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    pa.array([[["a"], None], None, []]),
    pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
    pa.array([{"b": "x"}, None, {"b": None}], pa.struct([("b", pa.string_view())])),
    pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
    pa.array([0.1, None, float("nan")], pa.float32()),
    pa.array([True, None, False]),
    pa.array([datetime.datetime(2026, 11, 30), None, None], pa.timestamp("us", "UTC")),
    pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
    pa.nulls(3),
]


@pytest.mark.parametrize("column", KEPT, ids=lambda column: str(column.type))
def test_kept_columns_of_any_type_leave_as_they_came(job, tmp_path, column):
    path = write_prompts(tmp_path / "a.parquet", ["w1", "w2", "w3"], kept=column)
    as_read = pq.read_table(path)["kept"]
    for layout in ("nested", "long"):
        result, _ = output(job, [path], keep_columns=("kept",), layout=layout, top_k=1)
        assert result.schema.field("kept").type == as_read.type
        assert repr(result["kept"].to_pylist()) == repr(as_read.to_pylist())


def test_folder_names_leave_as_text(job, tmp_path):
    for day in ("01", "02"):
        write_prompts(tmp_path / "tree" / f"day={day}" / "a.parquet", ["w1"])
    result, _ = output(job, [tmp_path / "tree"], keep_columns=("day",))
    assert result["day"].to_pylist() == ["01", "02"]
    assert result.schema.field("day").type == pa.string()


# --- rejects -------------------------------------------------------------------------------------------------------


def test_rejects_can_be_joined_to_the_input_by_file_and_row(job, tmp_path):
    a = write_prompts(tmp_path / "in" / "part-2.parquet", [None, "w1", ""])
    b = write_prompts(tmp_path / "in" / "part-10.parquet", ["w1", "w2", "  "])
    for shard_rows in (1, 2, 100):
        _, rejected = output(job, [tmp_path / "in"], shard_rows=shard_rows)
        found = [(r["source_file"], r["source_row"], r["reason"]) for r in rejected.to_pylist()]
        assert found == [(str(a), 0, "null_prompt"), (str(a), 2, "empty_prompt"), (str(b), 2, "empty_prompt")]
        assert rejected.schema.names == ["user_id", "source_file", "source_row", "reason", "detail"]
        assert rejected.schema.types == [pa.int64(), pa.string(), pa.int64(), pa.string(), pa.string()]


@pytest.mark.parametrize("kind", TEXT_KINDS, ids=str)
def test_bytes_that_are_not_utf8_anywhere_reject_their_row_and_leave_readable_files(job, tmp_path, kind):
    good = [b"a", b"b", b"c", b"d", b"e"]

    def broken_at(i):
        return broken_text([BAD if i == n else cell for n, cell in enumerate(good)], kind)

    table = pa.table({"user_id": broken_at(0), "prompt": broken_at(1), "kept": broken_at(2)})
    pq.write_table(table, tmp_path / "a.parquet")
    result, rejected = output(job, [tmp_path / "a.parquet"], keep_columns=("kept",))
    assert result["user_id"].to_pylist() == result["kept"].to_pylist() == ["d", "e"]
    assert rejected["user_id"].to_pylist() == [None, "b", "c"]
    assert rejected["reason"].to_pylist() == ["bad_text"] * 3
    assert rejected["detail"].to_pylist() == [
        "column user_id is not UTF-8",
        "the prompt is not UTF-8",
        "column kept is not UTF-8",
    ]
    result.validate(full=True)
    rejected.validate(full=True)


def test_an_id_column_without_any_value_rejects_every_row(job, tmp_path):
    path = write_prompts(tmp_path / "a.parquet", ["w1", "w2"], user_id=pa.nulls(2))
    result, rejected = output(job, [path])
    assert result.num_rows == 0
    assert rejected["reason"].to_pylist() == ["null_id", "null_id"]


@pytest.mark.parametrize("options", [{"max_length": 2, "truncate": "reject"}, {"messages_column": "chat"}], ids=str)
def test_no_text_of_a_prompt_is_in_rejects_manifest_or_messages(job, tmp_path, caplog, options):
    model = save_llama(
        tmp_path / "model", tokenizer=make_tokenizer(template="{{ raise_exception(messages[0]['content']) }}")
    )
    secret = "w1 SECRET-123"
    path = write_prompts(tmp_path / "a.parquet", [secret], chat=[[{"role": "user", "content": secret}]])
    _, rejected = output(job, [path], model=str(model), **options)
    assert rejected["reason"].to_pylist() == ["bad_text" if "messages_column" in options else "too_long"]
    assert "SECRET" not in (job.out / "_manifest.json").read_text() + caplog.text + str(rejected.to_pylist())


# --- filters -------------------------------------------------------------------------------------------------------


LISTS = [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.string(), 2), pa.list_(pa.string_view())]


@pytest.mark.parametrize("kind", [*LISTS, pa.list_(pa.dictionary(pa.int8(), pa.string()))], ids=str)
def test_seen_items_act_whatever_kind_of_list_holds_them(job, tmp_path, kind):
    lists = [["i0", "i49"], ["i1", "unknown"], None]
    seen = pa.array(lists, kind) if not pa.types.is_dictionary(kind.value_type) else pa.array(lists).cast(kind)
    path = write_prompts(tmp_path / "a.parquet", ["w1", "w2", "w3"], seen=seen)
    result, _ = output(job, [path], exclude_column="seen", top_k=50)
    everything = {f"i{i}" for i in range(50)}
    assert [everything - set(items) for items in result["item_ids"].to_pylist()] == [{"i0", "i49"}, {"i1"}, set()]
    result, _ = output(job, [path], candidates_column="seen", top_k=50)
    assert [set(items) for items in result["item_ids"].to_pylist()] == [{"i0", "i49"}, {"i1"}, everything]


def test_seen_items_of_another_type_than_the_catalogue_are_an_error(job, tmp_path):
    path = write_prompts(tmp_path / "a.parquet", ["w1"], seen=[[1]])
    with pytest.raises(InputError, match="none could ever match"):
        job.run(inputs=(str(path),), exclude_column="seen")
