"""Parts of a result: one schema whatever the rows hold, row groups of bounded size, whole or absent, open to any reader."""

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import random_prompts, write_items, write_prompts

from prefill_cli.config import RunConfig
from prefill_cli.data import results
from prefill_cli.data.inputs import InputPlan
from prefill_cli.data.results import Lists, plan_format, write_part, write_rejects
from prefill_cli.errors import OutputError, UsageError

NESTED = ["int64", "string", "list<element: string>", "list<element: float>"]
INTEGER, COUNTRY = pa.int64(), (("country", pa.string()),)
LONG = ["int64", "string", "int32", "string", "float"]


def form_of(layout="nested", *, id_type=INTEGER, kept=COUNTRY, **options):
    fields = tuple(pa.field(*field) for field in kept)
    plan = InputPlan((), pa.schema([]), id_type, fields)
    config = RunConfig(inputs=(), layout=layout, keep_columns=tuple(f.name for f in fields), **options)
    return plan_format(config, plan, pa.string())


def group(users, lengths, country="BR", first=0):
    """Columns and lists of users whose lists have the given lengths: items a, b, c, …, scores 0, -1, -2, …"""
    offsets = np.cumsum([0, *lengths])
    items = pa.array([chr(97 + i % 26) for length in lengths for i in range(length)], pa.string())
    scores = np.array([-float(i) for length in lengths for i in range(length)], np.float32)
    columns = pa.table({"user_id": pa.array(range(first, first + users), pa.int64()), "country": [country] * users})
    return columns, Lists(offsets, items, scores)


def written(tmp_path, form, *groups):
    path = tmp_path / "part-00000.parquet"
    rows = write_part(path, form, iter(groups))
    table = pq.read_table(path)
    assert table.num_rows == rows
    return table


# --- layouts -------------------------------------------------------------------------------------------------------


def test_nested_is_one_row_a_user_with_two_lists(tmp_path):
    table = written(tmp_path, form_of(), group(3, [2, 0, 1]))
    assert list(map(str, table.schema.types)) == NESTED
    assert table.to_pylist() == [
        {"user_id": 0, "country": "BR", "item_ids": ["a", "b"], "scores": [0.0, -1.0]},
        {"user_id": 1, "country": "BR", "item_ids": [], "scores": []},
        {"user_id": 2, "country": "BR", "item_ids": ["a"], "scores": [0.0]},
    ]


def test_long_is_one_row_a_user_and_rank_and_none_for_an_empty_list(tmp_path):
    table = written(tmp_path, form_of("long"), group(3, [2, 0, 1]))
    assert list(map(str, table.schema.types)) == LONG
    assert table.schema.names == ["user_id", "country", "rank", "item_id", "score"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, "BR", 1, "a", 0.0), (0, "BR", 2, "b", -1.0), (2, "BR", 1, "a", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("layout", "types"), [("nested", NESTED), ("long", LONG)])
@pytest.mark.parametrize("groups", [[], [(2, [0, 0])], [(2, [0, 0]), (2, [1, 2])], [(2, [1, 2]), (2, [0, 0])], [(0, [])]])
def test_types_are_the_same_whether_lists_are_empty_first_or_all(tmp_path, layout, types, groups):
    table = written(tmp_path, form_of(layout), *(group(*g) for g in groups))
    assert list(map(str, table.schema.types)) == types
    entries = sum(sum(lengths) for _, lengths in groups)
    assert table.num_rows == (entries if layout == "long" else sum(users for users, _ in groups))


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_a_run_whose_first_shard_holds_rejects_only_has_parts_of_one_schema(job, tmp_path, layout):
    inputs = write_prompts(tmp_path / "a.parquet", [None] * 10 + random_prompts(10))
    job.run(inputs=(str(inputs),), shard_rows=10, layout=layout, max_rejects="50%")
    first, second = (pq.read_schema(job.out / f"part-0000{i}.parquet") for i in range(2))
    assert first.equals(second, check_metadata=True)
    assert len(pc.unique(pq.read_table(job.out)["user_id"])) == 10


def test_working_types_go_back_to_those_of_the_input(tmp_path):
    form = form_of(id_type=pa.string_view(), kept=(("country", pa.string()), ("tags", pa.list_(pa.string()))))
    columns = pa.table({
        "user_id": pa.array(["u"], pa.large_string()), "country": pa.array(["BR"], pa.large_string()),
        "tags": pa.array([["x"]], pa.large_list(pa.large_string())),
    })  # fmt: skip
    table = written(tmp_path, form, (columns, group(1, [1])[1]))
    assert list(map(str, table.schema.types[:3])) == ["string_view", "string", "list<element: string>"]
    assert table["user_id"].to_pylist() == ["u"]


# --- row groups ----------------------------------------------------------------------------------------------------


def test_a_row_group_has_a_bounded_number_of_list_elements(monkeypatch):
    assert results.group_rows(100) * 100 <= results.GROUP_ELEMENTS
    assert results.group_rows(100_000) * 100_000 <= results.GROUP_ELEMENTS
    assert results.group_rows(10**9) == 1
    monkeypatch.setattr(results, "GROUP_ELEMENTS", 20)
    assert [results.group_rows(k) for k in (1, 3, 20, 21)] == [20, 6, 1, 1]


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_a_run_writes_row_groups_within_the_bound_and_the_same_rows(job, monkeypatch, tmp_path, layout):
    job.run(output=tmp_path / "once", layout=layout)
    monkeypatch.setattr(results, "GROUP_ELEMENTS", 20)
    job.run(layout=layout)
    metadata = pq.read_metadata(job.out / "part-00000.parquet")
    elements = [metadata.row_group(i).num_rows * (5 if layout == "nested" else 1) for i in range(metadata.num_row_groups)]
    assert elements == [20] * 7 + [10]
    assert pq.read_table(job.out).equals(pq.read_table(tmp_path / "once"))


def test_wide_kept_columns_do_not_widen_the_row_groups_of_the_long_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "GROUP_BYTES", 100_000)
    cell = "x" * 5_000
    table = written(tmp_path, form_of("long"), group(4, [30, 0, 30, 7], cell))
    metadata = pq.read_metadata(tmp_path / "part-00000.parquet")
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert max(sizes) <= 20
    assert sum(sizes) == 67
    assert table["user_id"].to_pylist() == [0] * 30 + [2] * 30 + [3] * 7
    assert table["rank"].to_pylist() == [*range(1, 31), *range(1, 31), *range(1, 8)]
    assert table["item_id"].to_pylist() == group(4, [30, 0, 30, 7])[1].item_ids.to_pylist()
    assert set(table["country"].to_pylist()) == {cell}


def test_ids_are_dictionary_encoded_and_scores_are_not(tmp_path):
    for layout in ("nested", "long"):
        written(tmp_path, form_of(layout), group(3, [26, 26, 26]))
        chunks = pq.read_metadata(tmp_path / "part-00000.parquet").row_group(0)
        encoded = {chunks.column(i).path_in_schema.split(".")[0]: chunks.column(i).has_dictionary_page
                   for i in range(chunks.num_columns)}  # fmt: skip
        assert {name for name, has in encoded.items() if not has} == {"scores" if layout == "nested" else "score"}


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("nested", {"kept": (("item_ids", pa.string()),)}),
        ("nested", {"kept": (("scores", pa.string()),)}),
        ("nested", {"id_column": "scores"}),
        ("long", {"kept": (("rank", pa.string()),)}),
        ("long", {"kept": (("item_id", pa.string()),)}),
        ("long", {"kept": (("score", pa.string()),)}),
        ("long", {"id_column": "item_id"}),
        ("nested", {"kept": (("user_id", pa.int64()),)}),
        ("nested", {"kept": (("a", pa.string()), ("b", pa.string()), ("a", pa.string()))}),
    ],
)
def test_a_column_that_would_stand_twice_is_refused(layout, options):
    with pytest.raises(UsageError, match="would stand twice in the output"):
        form_of(layout, **options)


def test_names_of_the_other_layout_are_free():
    assert form_of("nested", kept=(("rank", pa.string()), ("score", pa.string()))).result.names[1:3] == ["rank", "score"]
    assert form_of("long", kept=(("scores", pa.string()),)).result.names[1] == "scores"


@pytest.mark.parametrize("name", ["source_file", "source_row", "reason", "detail"])
def test_an_id_column_named_like_a_column_of_the_rejects_is_refused(name):
    with pytest.raises(UsageError, match="name of a column of the rejects"):
        form_of(id_column=name)
    assert form_of(kept=((name, pa.string()),)).result.names[1] == name


def test_a_collision_ends_a_run_before_the_model_is_read(job, tmp_path):
    inputs = write_prompts(tmp_path / "a.parquet", ["w1"], scores=[1.0])
    with pytest.raises(UsageError, match="'scores' would stand twice"):
        job.run(inputs=(str(inputs),), keep_columns=("scores",))
    assert not job.out.exists()


# --- whole or absent -----------------------------------------------------------------------------------------------


class BreaksError(Exception):
    pass


@pytest.mark.parametrize("layout", ["nested", "long"])
@pytest.mark.parametrize("error", [BreaksError, KeyboardInterrupt])
def test_a_part_whose_making_fails_in_the_middle_leaves_nothing_new(tmp_path, layout, error):
    def groups(fails):
        yield group(3, [2, 0, 1])
        if fails:
            raise error
        yield group(3, [1, 1, 1], first=3)

    path = tmp_path / "part-00000.parquet"
    with pytest.raises(error):
        write_part(path, form_of(layout), groups(True))
    assert list(tmp_path.iterdir()) == []

    write_part(path, form_of(layout), groups(False))
    whole = path.read_bytes()
    with pytest.raises(error):
        write_part(path, form_of(layout), groups(True))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == whole


def test_the_same_rows_make_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_part(tmp_path / name, form_of(), [group(3, [2, 0, 1]), group(3, [1, 1, 1])])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        write_part(tmp_path / "gone" / "part-00000.parquet", form_of(), [group(1, [1])])
    rejects = form_of().rejects.empty_table()
    row = pa.table([[1], ["f"], [0], ["null_prompt"], [""]], schema=rejects.schema)
    with pytest.raises(OutputError, match="cannot be written"):
        write_rejects(tmp_path / "gone" / "_rejects" / "part-00000.parquet", row)


def test_rejects_have_a_file_only_where_there_are_any(tmp_path):
    path = tmp_path / "_rejects" / "part-00000.parquet"
    schema = form_of(id_type=pa.string()).rejects
    row = pa.table([["u1"], ["in.parquet"], [7], ["null_prompt"], [""]], schema=schema)
    write_rejects(path, row)
    assert pq.read_table(path).equals(row)
    write_rejects(path, schema.empty_table())
    assert not path.exists()
    write_rejects(tmp_path / "_other" / "part-00000.parquet", schema.empty_table())
    assert not (tmp_path / "_other").exists()


# --- readers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(job, tmp_path):
    """A finished run in both layouts, three parts each: exact ids, a kept column, a user without any item."""
    ids = pa.array([2**53 + 1 + i for i in range(30)])
    seen = [[f"i{n}" for n in range(50)] if i == 4 else [] for i in range(30)]
    extra = {"user_id": ids, "country": ["BR"] * 30, "seen": seen}
    inputs = write_prompts(tmp_path / "a.parquet", job.prompts, **extra)
    options = {"inputs": (str(inputs),), "keep_columns": ("country",), "exclude_column": "seen", "shard_rows": 12}
    for layout in ("nested", "long"):
        totals = job.run(layout=layout, output=tmp_path / layout, **options)
        assert (totals["empty_lists"], totals["rows_out"]) == (1, 30)
    return tmp_path


@pytest.mark.parametrize(("layout", "rows"), [("nested", 30), ("long", 145)])
def test_polars_duckdb_and_pandas_read_the_folder_with_the_right_types(finished, layout, rows):
    folder, first = finished / layout, 2**53 + 1
    arrow = pq.read_table(folder)
    assert arrow.num_rows == rows

    frame = pl.read_parquet(folder / "*.parquet")
    lists = {"item_ids": pl.List(pl.String), "scores": pl.List(pl.Float32)}
    columns = {"rank": pl.Int32, "item_id": pl.String, "score": pl.Float32}
    expected = {"user_id": pl.Int64, "country": pl.String} | (lists if layout == "nested" else columns)
    assert dict(frame.schema) == expected
    assert frame.to_dicts() == arrow.to_pylist()

    with duckdb.connect() as connection:
        relation = connection.sql(f"SELECT * FROM '{folder}/*.parquet'")
        kinds = ["VARCHAR[]", "FLOAT[]"] if layout == "nested" else ["INTEGER", "VARCHAR", "FLOAT"]
        assert list(map(str, relation.types)) == ["BIGINT", "VARCHAR", *kinds]
        assert relation.aggregate("min(user_id), count(*)").fetchall() == [(first, rows)]

    table = pd.read_parquet(folder)
    assert (len(table), table["user_id"].dtype, table["user_id"].min()) == (rows, np.int64, first)
    if layout == "nested":
        assert [len(items) for items in table["item_ids"]] == [0 if i == 4 else 5 for i in range(30)]
    else:
        assert (table["rank"].dtype, table["score"].dtype) == (np.int32, np.float32)
        assert table.groupby("user_id")["rank"].apply(list).tolist() == [[1, 2, 3, 4, 5]] * 29


def test_the_two_layouts_say_the_same(finished):
    nested, long = (pl.read_parquet(finished / layout / "*.parquet") for layout in ("nested", "long"))
    exploded = nested.filter(pl.col("item_ids").list.len() > 0).explode("item_ids", "scores")
    assert exploded["item_ids"].to_list() == long["item_id"].to_list()
    assert exploded["scores"].to_list() == long["score"].to_list()


ITEM_IDS = [
    pa.array([2**53 + 1 + i for i in range(50)]),
    pa.array([bytes([i]) for i in range(50)]),
    pa.array(range(50), "uint8"),
]


@pytest.mark.parametrize("item_ids", ITEM_IDS, ids=lambda ids: str(ids.type))
def test_item_ids_leave_with_the_type_of_the_catalogue(job, tmp_path, item_ids):
    items = write_items(tmp_path / "typed.parquet", ids=item_ids)
    job.run(items=items, top_k=50)
    table = pq.read_table(job.out)
    assert table.schema.field("item_ids").type == pa.list_(item_ids.type)
    assert all(sorted(row) == item_ids.to_pylist() for row in table["item_ids"].to_pylist())


def test_views_leave_as_what_other_readers_read_as_text(job, tmp_path):
    ids = pa.array(["a", "an id that is longer than a view holds inline"], pa.string_view())
    inputs = write_prompts(tmp_path / "a.parquet", ["w1", "w2"], user_id=ids)
    job.run(inputs=(str(inputs),))
    assert pl.read_parquet(job.out / "*.parquet")["user_id"].to_list() == ids.to_pylist()
    assert pd.read_parquet(job.out)["user_id"].tolist() == ids.to_pylist()
    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT user_id FROM '{job.out}/*.parquet'")
        assert (list(map(str, found.types)), found.fetchall()) == (["VARCHAR"], [(i,) for i in ids.to_pylist()])
