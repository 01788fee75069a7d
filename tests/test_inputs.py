"""Which files a command means, and what their columns are together."""

import logging
import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefill_cli.config import RunConfig
from prefill_cli.data import manifest
from prefill_cli.data.inputs import InputFile, InputPlan, Shard, find_files, plan_inputs, read_footer
from prefill_cli.errors import InputError, UsageError


def write(path, **columns):
    """A Parquet file with one row, user_id and prompt unless given; a column of None is left out."""
    table = {"user_id": pa.array([1]), "prompt": pa.array(["w1"])} | columns
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: column for name, column in table.items() if column is not None}), path)
    return str(path)


def tree(root, *names):
    return [write(root / name) for name in names]


def plan(*inputs, **options):
    return plan_inputs(RunConfig(inputs=tuple(map(str, inputs)), **options))


def files_of(*inputs):
    return find_files(map(str, inputs))


# --- which files ---------------------------------------------------------------------------------------------------


def test_a_folder_is_read_recursively_in_natural_order(tmp_path):
    expected = tree(tmp_path / "in", "a/part-1.parquet", "a/part-2.parquet", "a/part-10.parquet", "b.parq", "c.pq")
    assert files_of(tmp_path / "in") == expected


def test_hidden_names_underscore_names_and_other_kinds_are_skipped_inside_folders(tmp_path):
    (expected,) = tree(tmp_path, "part-0.parquet")
    tree(tmp_path, ".hidden.parquet", "_x.parquet", "_temporary/part-0.parquet", ".git/part-0.parquet")
    (tmp_path / "notes.txt").write_text("not Parquet")
    assert files_of(tmp_path) == [expected]


def test_a_hidden_file_or_folder_that_is_named_itself_is_read(tmp_path):
    names = tree(tmp_path, "_x.parquet", "_parts/part-0.parquet")
    assert files_of(names[0], tmp_path / "_parts") == names


def test_files_folders_and_globs_come_in_the_order_given(tmp_path):
    z, b, a, x2, x10 = tree(tmp_path, "z.parquet", "f/b.parquet", "a.parquet", "g/x-2.parquet", "g/x-10.parquet")
    assert files_of(z, tmp_path / "f", tmp_path / "g" / "*-*.parquet", a) == [z, b, x2, x10, a]


def test_names_that_differ_in_leading_zeros_have_one_order(tmp_path):
    names = tree(tmp_path, *(f"part-{zeros}1.parquet" for zeros in ("0000", "000", "00", "0", "")))
    assert files_of(tmp_path) == files_of(tmp_path / "part*") == names


def test_digits_that_are_no_decimal_numbers_are_letters(tmp_path):
    names = tree(tmp_path, "1².parquet", "²/x.parquet")
    assert sorted(files_of(tmp_path)) == sorted(names)


def test_a_glob_that_matches_a_folder_means_the_files_in_it(tmp_path):
    names = tree(tmp_path, "day=01/part-0.parquet", "day=02/part-0.parquet")
    assert files_of(tmp_path / "day=*") == names


def test_a_glob_passes_over_hidden_names_on_the_whole_way(tmp_path):
    (expected,) = tree(tmp_path, "a/part-0.parquet")
    tree(tmp_path, "_temporary/part-0.parquet", "a/_part-0.parquet", ".old/part-0.parquet", "_rejects/deep/part-0.parquet")
    (tmp_path / "_empty").mkdir()
    assert files_of(tmp_path / "*") == files_of(tmp_path / "**" / "*.parquet") == files_of(tmp_path / "**") == [expected]


def test_a_glob_that_spells_the_underscore_means_it(tmp_path):
    names = tree(tmp_path, "_x/part-0.parquet", "_x/part-1.parquet")
    assert files_of(tmp_path / "_*" / "*.parquet") == names


def test_a_name_with_glob_characters_that_exists_is_a_file(tmp_path):
    (name,) = tree(tmp_path, "a[1].parquet")
    tree(tmp_path, "a1.parquet")
    assert files_of(name) == [name]


def test_the_same_file_named_twice_is_read_once_with_a_warning(tmp_path, caplog):
    (name,) = tree(tmp_path, "in/a.parquet")
    link = tmp_path / "link.parquet"
    link.symlink_to(name)
    for again in (name, str(link), os.path.relpath(name), f"file://{name}", tmp_path / "in", tmp_path / "in" / "*"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert files_of(name, again) == [name]
        assert "named twice and is read once" in caplog.text


def test_a_folder_alone_is_no_reason_for_a_warning(tmp_path, caplog):
    names = tree(tmp_path, "a/part-0.parquet", "b/part-0.parquet")
    assert files_of(tmp_path / "**") == names
    assert caplog.text == ""


def test_links_that_lead_in_a_circle_end(tmp_path):
    (name,) = tree(tmp_path, "in/a/part-0.parquet")
    (tmp_path / "in" / "a" / "loop").symlink_to(tmp_path / "in")
    assert files_of(tmp_path / "in") == [name]


def test_a_file_uri_is_a_path_with_percent_signs_undone(tmp_path):
    a, b = tree(tmp_path, "my prompts#1.parquet", "my prompts/b.parquet")
    uri = f"file://{tmp_path}"
    assert files_of(f"{uri}/my%20prompts%231.parquet", f"{uri}/my%20prompts") == [a, b]
    assert files_of(f"{uri}/my%20*/*.parquet") == [b]


@pytest.mark.parametrize("text", ["s3a://bucket/a.parquet", "ftp://host/*.parquet", "https://host/a.parquet"])
def test_other_schemes_are_refused_by_name(text):
    with pytest.raises(UsageError, match=f"{text[: text.index(':')]}:// is not one of file, s3"):
        files_of(text)


def test_a_file_uri_with_a_host_is_refused(tmp_path):
    (name,) = tree(tmp_path, "a.parquet")
    with pytest.raises(UsageError, match="file:///"):
        files_of(f"file:/{name}")
    assert files_of(f"file://localhost{name}") == [name]


def test_a_glob_without_a_match_is_an_error_with_the_pattern(tmp_path):
    with pytest.raises(InputError, match=r"no file matches '.*nothing-\*\.parquet'"):
        files_of(tmp_path / "nothing-*.parquet")


def test_a_folder_without_parquet_is_an_error(tmp_path):
    (tmp_path / "in" / "_rejects").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no Parquet file"):
        files_of(tmp_path / "in")


def test_a_missing_path_is_named_with_the_nearest_name(tmp_path):
    tree(tmp_path, "prompts-0.parquet", "other.parquet")
    with pytest.raises(InputError, match=r"promts-0.parquet: no such file or folder \(did you mean 'prompts-0.parquet'\?\)"):
        files_of(tmp_path / "promts-0.parquet")
    with pytest.raises(InputError, match=r"no such file or folder$"):
        files_of(tmp_path / "absent" / "prompts-0.parquet")


def test_a_name_that_is_not_utf8_is_refused_before_the_rejects_would_have_to_name_it(tmp_path):
    write(tmp_path / "a.parquet")
    os.rename(tmp_path / "a.parquet", os.fsencode(tmp_path) + b"/\xff.parquet")
    with pytest.raises(InputError, match=r"udcff\.parquet.*not UTF-8"):
        files_of(tmp_path)


# --- whether they can be read --------------------------------------------------------------------------------------


def test_a_file_of_zero_bytes_is_said_to_be_one(tmp_path):
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"a\.parquet: the file is empty \(0 bytes\)"):
        plan(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"x", b"user_id,prompt\n1,hello\n", b"PAR1" + bytes(20) + b"PAR1", b"\xff" * 64])
def test_a_file_that_is_not_parquet_is_named(tmp_path, content):
    tree(tmp_path, "in/a.parquet")
    (tmp_path / "in" / "b.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"b\.parquet: not readable as Parquet: \S"):
        plan(tmp_path / "in")


@pytest.mark.parametrize("cut", [1, 8, 100, 400])
def test_a_truncated_file_is_named(tmp_path, cut):
    (name,) = tree(tmp_path, "a.parquet")
    os.truncate(name, os.path.getsize(name) - cut)
    with pytest.raises(InputError, match=r"a\.parquet: not readable as Parquet"):
        plan(name)


def test_a_folder_entry_that_leads_nowhere_is_an_error_and_not_skipped(tmp_path):
    tree(tmp_path, "in/a.parquet")
    (tmp_path / "in" / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(InputError, match=r"b\.parquet: not readable"):
        plan(tmp_path / "in")


def test_a_column_name_that_is_not_utf8_is_an_error_and_no_traceback(tmp_path):
    schema = pa.schema([pa.field(b"\xff", pa.int64())])
    pq.write_table(pa.table([pa.array([1])], schema=schema), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="not readable as Parquet"):
        plan(tmp_path / "a.parquet")


# --- columns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "missing", "near"),
    [
        ({"id_column": "userid"}, "userid", "user_id"),
        ({"prompt_column": "promt"}, "promt", "prompt"),
        ({"keep_columns": ("contry",)}, "contry", "country"),
        ({"exclude_column": "seen_item"}, "seen_item", "seen_items"),
        ({"candidates_column": "seenitems"}, "seenitems", "seen_items"),
        ({"messages_column": "mesages"}, "mesages", "messages"),
    ],
)
def test_a_missing_column_is_named_with_the_nearest_one(tmp_path, options, missing, near):
    extra = {"country": ["BR"], "seen_items": [["i1"]], "messages": [[{"role": "user", "content": "w1"}]]}
    name = write(tmp_path / "a.parquet", **extra)
    with pytest.raises(InputError, match=rf"a\.parquet: no column '{missing}' \(did you mean '{near}'\?\)"):
        plan(name, **options)


def test_a_column_that_only_one_file_lacks_is_an_error_about_that_file(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", prompt=None)
    with pytest.raises(InputError, match=r"b\.parquet: no column 'prompt'"):
        plan(tmp_path)


def test_a_column_that_stands_twice_is_refused(tmp_path):
    schema = pa.schema([("user_id", pa.int64()), ("prompt", pa.string()), ("prompt", pa.string())])
    pq.write_table(pa.table([pa.array([1]), pa.array(["a"]), pa.array(["b"])], schema=schema), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="'prompt' stands in the schema more than once"):
        plan(tmp_path)


ID_TYPES = [
    pa.int8(), pa.int64(), pa.uint64(), pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
    pa.binary(4), pa.date32(),
]  # fmt: skip


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
def test_ids_of_every_allowed_type_keep_it(tmp_path, kind):
    assert plan(write(tmp_path / "a.parquet", user_id=pa.nulls(1, kind))).id_type == kind


NO_IDS = [pa.float32(), pa.float64(), pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.bool_(), pa.timestamp("us")]


@pytest.mark.parametrize("kind", [*NO_IDS, pa.decimal128(5)], ids=str)
def test_ids_of_other_types_are_refused(tmp_path, kind):
    name = write(tmp_path / "a.parquet", user_id=pa.nulls(1, kind))
    with pytest.raises(InputError, match=r"a\.parquet: column 'user_id' is .*, which is not an id"):
        plan(name)


PARTS = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())]))


@pytest.mark.parametrize(
    ("options", "column", "what"),
    [
        ({}, pa.array([1]), "prompt text"),
        ({}, pa.array([b"w1"]), "prompt text"),
        ({}, pa.array([["w1"]]), "prompt text"),
        ({"messages_column": "x"}, pa.array(["w1"]), "chat messages"),
        ({"messages_column": "x"}, pa.array([["w1"]]), "chat messages"),
        ({"messages_column": "x"}, pa.array([[{"role": "user", "text": "w1"}]]), "chat messages"),
        ({"messages_column": "x"}, pa.nulls(1, pa.list_(pa.struct([("role", pa.string()), ("content", PARTS)]))),
         "chat messages"),
        ({"messages_column": "x"}, pa.array([[{"role": "user", "content": 5}]]), "chat messages"),
        ({"token_ids_column": "x"}, pa.array([1]), "token ids"),
        ({"token_ids_column": "x"}, pa.array([[1.0]]), "token ids"),
        ({"token_ids_column": "x"}, pa.array([["1"]]), "token ids"),
        ({"exclude_column": "x"}, pa.array(["i1"]), "a list of item ids"),
        ({"candidates_column": "x"}, pa.array([{"a": 1}]), "a list of item ids"),
    ],
)  # fmt: skip
def test_a_column_of_the_wrong_type_is_named_with_its_type(tmp_path, options, column, what):
    name = write(tmp_path / "a.parquet", x=column, **({} if options else {"prompt": column}))
    with pytest.raises(InputError, match=rf"a\.parquet: column '\w+' is .*, which is not {what}"):
        plan(name, **options)


def reconciled(tmp_path, *columns):
    for i, column in enumerate(columns):
        write(tmp_path / f"{i}.parquet", user_id=column, x=column)
    found = plan(tmp_path, keep_columns=("x",))
    assert found.id_type == found.kept[0].type
    return found.id_type


@pytest.mark.parametrize(
    ("kinds", "wider"),
    [
        ([pa.int32(), pa.int64()], pa.int64()),
        ([pa.int64(), pa.int8(), pa.int32()], pa.int64()),
        ([pa.uint8(), pa.int8()], pa.int16()),
        ([pa.uint32(), pa.int32()], pa.int64()),
        ([pa.string(), pa.large_string()], pa.large_string()),
        ([pa.string(), pa.string_view()], pa.large_string()),
        ([pa.dictionary(pa.int8(), pa.string()), pa.string()], pa.string()),
        ([pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string())], pa.string()),
        ([pa.null(), pa.string()], pa.string()),
        ([pa.int64(), pa.null()], pa.int64()),
        ([pa.null(), pa.null()], pa.null()),
    ],
    ids=str,
)
def test_a_column_has_one_type_over_all_files(tmp_path, kinds, wider):
    assert reconciled(tmp_path, *(pa.nulls(1, kind) for kind in kinds)) == wider


@pytest.mark.parametrize(
    "kinds",
    [(pa.int64(), pa.string()), (pa.int64(), pa.uint64()), (pa.string(), pa.binary()), (pa.date32(), pa.int32())],
    ids=str,
)
def test_types_that_do_not_go_together_are_an_error_that_names_both_files(tmp_path, kinds):
    with pytest.raises(InputError) as error:
        reconciled(tmp_path, *(pa.nulls(1, kind) for kind in kinds))
    for part in (*map(str, kinds), "column 'user_id'", "0.parquet", "1.parquet"):
        assert part in str(error.value)


def test_lists_of_ids_are_reconciled_by_their_values(tmp_path):
    write(tmp_path / "0.parquet", seen=pa.array([[1]], pa.list_(pa.int32())))
    write(tmp_path / "1.parquet", seen=pa.array([[]], pa.list_(pa.null())))
    write(tmp_path / "2.parquet", seen=pa.array([[1, 2]], pa.list_(pa.int64(), 2)))
    write(tmp_path / "3.parquet", seen=pa.nulls(1))
    assert plan(tmp_path, exclude_column="seen").columns.field("seen").type == pa.large_list(pa.int64())
    write(tmp_path / "4.parquet", seen=pa.array([["i1"]]))
    with pytest.raises(InputError, match=r"'seen' is .*int64.* but list<element: string> in .*4\.parquet"):
        plan(tmp_path, exclude_column="seen")


# --- folder names --------------------------------------------------------------------------------------------------


def test_folder_names_are_text_columns_where_keep_columns_names_them(tmp_path):
    tree(tmp_path, "day=01/country=S%C3%A3o%20Tom%C3%A9/a.parquet", "day=02/country=BR/a.parquet")
    assert plan(tmp_path, keep_columns=("day", "country")).kept == (
        pa.field("day", pa.string()),
        pa.field("country", pa.string()),
    )
    assert plan(tmp_path).kept == ()


def test_folder_names_never_serve_as_id_prompt_or_filter(tmp_path):
    name = write(tmp_path / "user_id=7" / "a.parquet", user_id=None)
    with pytest.raises(InputError, match="no column 'user_id'"):
        plan(name)
    name = write(tmp_path / "prompt=hello" / "a.parquet", prompt=None)
    with pytest.raises(InputError, match="no column 'prompt'"):
        plan(name)
    with pytest.raises(InputError, match="no column 'seen'"):
        plan(write(tmp_path / "seen=1" / "a.parquet"), exclude_column="seen")


def test_a_column_in_the_file_goes_before_the_folder_name(tmp_path):
    write(tmp_path / "day=01" / "a.parquet", day=pa.array([5]))
    assert plan(tmp_path, keep_columns=("day",)).kept[0].type == pa.int64()


# --- the plan ------------------------------------------------------------------------------------------------------


def rows_plan(*rows):
    files = tuple(InputFile(f"{i}", (n,), pa.schema([]), 0, 0, "", 0) for i, n in enumerate(rows))
    return InputPlan(files, pa.schema([]), pa.int64(), ())


def test_shards_cut_the_rows_of_all_files_without_gaps():
    assert rows_plan(3, 0, 4).shards(3) == [Shard(0, 0, 3), Shard(1, 3, 3), Shard(2, 6, 1)]
    assert rows_plan(3, 3).shards(3) == [Shard(0, 0, 3), Shard(1, 3, 3)]


def test_no_rows_make_one_empty_shard():
    assert rows_plan(0, 0).shards(5) == [Shard(0, 0, 0)]


def test_five_thousand_million_rows_are_counted():
    found = rows_plan(5_000_000_000, 1)
    assert found.rows == 5_000_000_001
    assert found.shards(2_500_000_000)[-1] == Shard(2, 5_000_000_000, 1)
    assert manifest.describe_inputs(found)["files"][0]["rows"] == 5_000_000_000


def test_a_plan_can_travel_to_another_process(tmp_path):
    tree(tmp_path, "a.parquet", "b.parquet")
    found = plan(tmp_path, keep_columns=("prompt",))
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_identity_of_a_file_changes_with_its_content(tmp_path):
    (name,) = tree(tmp_path, "a.parquet")
    before = plan(name)
    assert manifest.input_fingerprint(plan(name)) == manifest.input_fingerprint(before)
    stat = os.stat(name)
    write(tmp_path / "a.parquet", prompt=pa.array(["w2"]))
    os.utime(name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.path.getsize(name) == stat.st_size
    assert manifest.input_fingerprint(plan(name)) != manifest.input_fingerprint(before)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(InputError, match="not a regular file"):
        read_footer(str(tmp_path / "pipe.parquet"))
