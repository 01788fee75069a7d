"""`prefill-score search`: vectors that are there already, to the same output as a run's, without a model."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Watcher, reference_top_k, write_items
from safetensors.numpy import save_file

from prefill_cli import pipeline
from prefill_cli.config import RunConfig
from prefill_cli.data.disk import read_json
from prefill_cli.data.manifest import MANIFEST
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import InputError, ItemsError, OutputError, UsageError
from prefill_cli.tools.inspect import inspect_path

WIDTH = 16
FLOAT = pa.float32()


@pytest.fixture
def world(tmp_path):
    """50 users' vectors, 80 items, and `search(**options)`, which returns the totals."""
    vectors = np.random.default_rng(0).standard_normal((50, WIDTH), dtype=np.float32)
    items = np.random.default_rng(1).standard_normal((80, WIDTH), dtype=np.float32)
    write_items(tmp_path / "items.parquet", vectors=items)

    def search(*inputs, **options):
        given = {"items": tmp_path / "items.parquet", "output": tmp_path / "out", "top_k": 7, "device": "cpu"} | options
        return pipeline.run(RunConfig(inputs=tuple(map(str, inputs)), **given), run_shards, Watcher(), "search")

    return SimpleNamespace(vectors=vectors, items=items, search=search, out=tmp_path / "out")


def write(path, vectors, kind=FLOAT, **columns):
    """users.parquet with user_id u0, u1, … and a list column, in which None is a null."""
    table = {"user_id": pa.array([f"u{i}" for i in range(len(vectors))])}
    lists = pa.array([None if v is None else list(map(float, v)) for v in vectors], pa.list_(kind))
    pq.write_table(pa.table(table | {"embedding": lists} | columns), path)
    return path


def lists(out):
    return pq.read_table(out / "part-00000.parquet")


def expected(vectors, items, k=7):
    return [[f"i{row}" for row in rows] for rows in reference_top_k(vectors, items, k)[0]]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_vectors_in_parquet_give_the_lists_of_brute_force(world, tmp_path, kind):
    vectors = world.vectors.astype(np.float16).astype(np.float32)
    totals = world.search(write(tmp_path / "users.parquet", vectors, kind))
    found = lists(world.out)
    assert found["item_ids"].to_pylist() == expected(vectors, world.items)
    assert found["user_id"].to_pylist() == [f"u{i}" for i in range(50)]
    assert (totals["rows"], totals["rows_out"], totals["tokens"], totals["encoder"]) == (50, 50, 0, "stored")
    made = read_json(world.out / MANIFEST)
    assert (made["model"]["name"], made["model"]["hidden_size"]) == (None, WIDTH)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_matrices_give_the_same_lists_under_row_numbers_or_given_ids(world, tmp_path, suffix):
    path = tmp_path / f"users{suffix}"
    np.save(path, world.vectors) if suffix == ".npy" else save_file({"embeddings": world.vectors}, path)
    world.search(path)
    found = lists(world.out)
    assert (found["user_id"].type, found["user_id"].to_pylist()) == (pa.int64(), list(range(50)))
    assert found["item_ids"].to_pylist() == expected(world.vectors, world.items)
    pq.write_table(pa.table({"user_id": [f"n{i}" for i in range(50)]}), tmp_path / "ids.parquet")
    world.search(path, user_ids=tmp_path / "ids.parquet", output=tmp_path / "named", shard_rows=9)
    named = pq.read_table(tmp_path / "named")
    assert named["user_id"].to_pylist() == [f"n{i}" for i in range(50)]
    assert named["item_ids"].to_pylist() == expected(world.vectors, world.items)


def test_rows_that_have_no_vector_are_rejected_with_a_reason(world, tmp_path):
    vectors = [*world.vectors[:3], None, world.vectors[3][:5], [*world.vectors[4][:-1], np.nan], world.vectors[5] * 1e38]
    path = write(tmp_path / "users.parquet", vectors)
    totals = world.search(path, max_rejects="100%")
    assert totals["reject_reasons"] == {"not_finite": 2, "null_vector": 1, "bad_vector": 1}
    rejects = pq.read_table(world.out / "_rejects").to_pylist()
    assert sorted((r["source_row"], r["reason"], r["detail"]) for r in rejects)[:3] == [
        (3, "null_vector", ""), (4, "bad_vector", "the vector has 5 numbers, not 16"),
        (5, "not_finite", "the vector holds a number that is not finite"),
    ]  # fmt: skip
    assert lists(world.out)["user_id"].to_pylist() == ["u0", "u1", "u2"]


def test_a_null_inside_a_vector_is_told(world, tmp_path):
    column = pa.array(
        [list(map(float, world.vectors[0])), [*map(float, world.vectors[1][:-1]), None]], pa.list_(pa.float32())
    )
    pq.write_table(pa.table({"user_id": [1, 2], "embedding": column}), tmp_path / "users.parquet")
    totals = world.search(tmp_path / "users.parquet", max_rejects="1")
    assert totals["reject_reasons"] == {"bad_vector": 1}


def test_filters_kept_columns_and_the_long_layout_are_those_of_a_run(world, tmp_path):
    exclude = pa.array([[f"i{j}" for j in range(40)]] * 50)
    path = write(tmp_path / "users.parquet", world.vectors, seen=exclude, country=pa.array(["NO"] * 50))
    world.search(path, exclude_column="seen", keep_columns=("country",), layout="long")
    found = lists(world.out)
    assert found.column_names == ["user_id", "country", "rank", "item_id", "score"]
    wanted = [[f"i{row + 40}" for row in rows] for rows in reference_top_k(world.vectors, world.items[40:], 7)[0]]
    assert found["item_id"].to_pylist() == [item for row in wanted for item in row]


def test_dims_and_cosine_apply_to_both_sides(world, tmp_path):
    world.search(write(tmp_path / "users.parquet", world.vectors), dims=5, score="cosine")
    unit = [x[:, :5] / np.linalg.norm(x[:, :5], axis=1, keepdims=True) for x in (world.vectors, world.items)]
    assert lists(world.out)["item_ids"].to_pylist() == expected(*unit)


def test_the_same_line_does_nothing_and_other_ids_are_another_result(world, tmp_path):
    np.save(tmp_path / "users.npy", world.vectors)
    assert world.search(tmp_path / "users.npy")["status"] == "done"
    assert world.search(tmp_path / "users.npy")["status"] == "unchanged"
    pq.write_table(pa.table({"user_id": list(range(50))}), tmp_path / "ids.parquet")
    with pytest.raises(OutputError, match="user_ids"):
        world.search(tmp_path / "users.npy", user_ids=tmp_path / "ids.parquet")
    np.save(tmp_path / "users.npy", world.vectors + 1)
    with pytest.raises(OutputError, match="inputs"):
        world.search(tmp_path / "users.npy")


def test_what_cannot_be_searched_for_is_told(world, tmp_path):
    with pytest.raises(ItemsError, match="embeddings are 16 wide, but the input gives vectors of 5"):
        world.search(write(tmp_path / "users.parquet", world.vectors[:, :5]))
    pq.write_table(pa.table({"user_id": [1], "embedding": ["a prompt"]}), tmp_path / "text.parquet")
    with pytest.raises(InputError, match=r"which is not vectors \(a list of floats\)"):
        world.search(tmp_path / "text.parquet")
    np.save(tmp_path / "users.npy", world.vectors)
    with pytest.raises(UsageError, match="--keep-columns needs Parquet input"):
        world.search(tmp_path / "users.npy", keep_columns=("country",))
    pq.write_table(pa.table({"user_id": [1, 2]}), tmp_path / "ids.parquet")
    with pytest.raises(InputError, match="has 2 ids, but the input has 50 rows"):
        world.search(tmp_path / "users.npy", user_ids=tmp_path / "ids.parquet")
    (tmp_path / "users.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match="not readable as npy"):
        world.search(tmp_path / "users.npy")


def test_what_is_no_matrix_alone_is_told_without_waiting(world, tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(InputError, match="not a regular file"):
        world.search(tmp_path / "pipe.npy")
    np.save(tmp_path / "users.npy", world.vectors)
    path = write(tmp_path / "users.parquet", world.vectors)
    for inputs in ((str(tmp_path / "users.npy"), str(path)), (str(path), str(tmp_path / "users.npy"))):
        with pytest.raises(UsageError, match="goes alone"):
            world.search(*inputs)
    pq.write_table(pa.table({"user_id": list(range(50))}), tmp_path / "ids.parquet")
    with pytest.raises(UsageError, match="--user-ids goes with"):
        world.search(path, user_ids=tmp_path / "ids.parquet")
    with pytest.raises(UsageError, match="both 'embedding'"):
        world.search(tmp_path / "users.npy", id_column="embedding")
    with pytest.raises(UsageError, match="more than the input's width of 16"):
        world.search(path, dims=17)
    for shape in ((3, 0), (0, 3_000_000_000)):
        np.save(tmp_path / "strange.npy", np.empty((0, 1), np.float32))
        text = (tmp_path / "strange.npy").read_bytes().replace(b"(0, 1), }" + b" " * 20, f"{shape}, }}".encode().ljust(29))
        (tmp_path / "strange.npy").write_bytes(text)
        with pytest.raises(InputError, match="a width is from 1"):
            world.search(tmp_path / "strange.npy")
    shutil.move(tmp_path / "users.npy", tmp_path / "USERS.NPY")
    assert world.search(tmp_path / "USERS.NPY")["rows_out"] == 50


def test_short_vectors_are_rejects_wherever_they_stand(world, tmp_path):
    path = write(tmp_path / "users.parquet", [[], [1.0], *world.vectors[:5]])
    totals = world.search(path, max_rejects="100%")
    assert (totals["rows_out"], totals["reject_reasons"]) == (5, {"bad_vector": 2})
    pq.write_table(pa.table({"user_id": [1, 2, 3], "embedding": pa.nulls(3)}), tmp_path / "nulls.parquet")
    totals = world.search(tmp_path / "nulls.parquet", max_rejects="100%", overwrite=True)
    assert totals["reject_reasons"] == {"null_vector": 3}
    path = write(tmp_path / "empty.parquet", [[], []])
    assert world.search(path, max_rejects="100%", overwrite=True)["reject_reasons"] == {"bad_vector": 2}


def test_inspect_knows_vectors_from_items(world, tmp_path):
    path = write(tmp_path / "users.parquet", world.vectors)
    found = inspect_path(path, RunConfig(inputs=()))
    assert (found.kind, found.facts["rows"], found.facts["width"], found.problem) == ("vectors", "50", 16, "")


def test_an_input_of_nulls_only_rejects_all_rows(world, tmp_path):
    totals = world.search(write(tmp_path / "users.parquet", [None, None]), max_rejects="100%")
    assert (totals["rows_out"], totals["reject_reasons"]) == (0, {"null_vector": 2})


def test_the_command_imports_no_transformers(world, tmp_path):
    path = write(tmp_path / "users.parquet", world.vectors)
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['tokenizers'] = None\n"
        "sys.argv = ['prefill-score', *sys.argv[1:]]\n"
        "from prefill_cli.cli import main; main()"
    )
    line = ["search", path, "-i", tmp_path / "items.parquet", "-o", world.out, "-k", "7", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, line)], check=True, capture_output=True, text=True, timeout=100
    )
    assert json.loads(done.stdout)["rows_out"] == 50
    assert lists(world.out)["item_ids"].to_pylist() == expected(world.vectors, world.items)
