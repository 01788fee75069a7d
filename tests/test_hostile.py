"""What a nightly job meets besides good data: files that change under it, strange places, lists that hit nothing."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, make_tokenizer, random_prompts, write_prompts

from prefill_cli import pipeline
from prefill_cli.config import RunConfig, resolve
from prefill_cli.data import tokenization
from prefill_cli.data.tokenization import PromptTokenizer
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import InputError, ItemsError, ModelError, OutputError, UsageError
from prefill_cli.tools.inspect import inspect_path
from prefill_cli.tools.show import UserQuery, read_lists


class Meddler:
    """A Progress that does something once, after the first batch."""

    def __init__(self, deed) -> None:
        self._deed = deed

    def start(self, rows: int, done: int) -> None:
        pass

    def advance(self, rows: int, tokens: int) -> None:
        deed, self._deed = self._deed, lambda: None
        deed()


def test_an_input_that_is_written_over_in_place_never_gives_a_mix(job, tmp_path):
    inputs = write_prompts(tmp_path / "live.parquet", random_prompts(40, seed=1))
    other = write_prompts(tmp_path / "other.parquet", random_prompts(40, seed=2))
    config = job.config(inputs=(str(inputs),), shard_rows=10)
    with pytest.raises(InputError, match=r"live\.parquet: the file changed while the run was reading it"):
        pipeline.run(config, run_shards, Meddler(lambda: shutil.copyfile(other, inputs)))
    assert not job.out.exists()


def test_a_memory_mapped_item_file_that_is_written_over_ends_the_run(job, tmp_path):
    np.save(tmp_path / "v.npy", np.random.default_rng(0).standard_normal((50, HIDDEN), np.float32))
    config = job.config(items=tmp_path / "v.npy", shard_rows=10)

    def deed() -> None:
        with open(tmp_path / "v.npy", "r+b") as file:
            file.seek(-400, os.SEEK_END)
            file.write(b"\0" * 400)

    with pytest.raises(ItemsError, match=r"v\.npy: the item file changed"):
        pipeline.run(config, run_shards, Meddler(deed))
    assert not job.out.exists()


def test_an_output_that_is_a_mount_point_is_refused_before_any_work(job, monkeypatch):
    job.out.mkdir()
    monkeypatch.setattr(type(job.out), "is_mount", lambda path: path == job.out)
    with pytest.raises(OutputError, match="mount point"):
        pipeline.run(job.config(), run_shards, Meddler(lambda: pytest.fail("work was done")))


@pytest.mark.parametrize(
    ("name", "kind"), [("inputs", InputError), ("items", ItemsError), ("model", ModelError), ("output", OutputError)]
)
def test_what_the_system_refuses_is_told_as_the_error_of_who_must_act(job, tmp_path, name, kind):
    too_long = tmp_path / ("x" * 300)
    with pytest.raises(kind, match=r"File name too long|no such file"):
        job.run(**{name: (str(too_long),) if name == "inputs" else str(too_long) if name == "model" else too_long})


def test_filter_ids_of_a_type_that_cannot_match_are_refused_before_the_model_is_read(job, tmp_path):
    inputs = write_prompts(tmp_path / "in.parquet", ["w1"], seen=pa.array([[1, 2]]))
    with pytest.raises(InputError, match=r"exclude column 'seen' has ids of type int64, but item ids are string"):
        pipeline.run(
            job.config(inputs=(str(inputs),), exclude_column="seen"), run_shards, Meddler(lambda: pytest.fail("encoded"))
        )


def test_a_deny_list_that_denies_nothing_is_warned_of(job, tmp_path, caplog):
    (tmp_path / "deny").write_text('"i1"\n"i2"\n')
    job.run(deny=tmp_path / "deny")
    assert "it denies nothing" in caplog.text


def test_a_list_of_ids_is_told_by_its_content_and_not_by_its_name(job, tmp_path):
    (tmp_path / "deny").write_text("i1\n")
    pq.write_table(pa.table({"item_id": ["i2"]}), tmp_path / "parquet.dat")
    for name in ("deny", "parquet.dat"):
        assert job.run(deny=tmp_path / name, overwrite=True, top_k=50)["unknown_ids"] == 0
        gone = {"deny": "i1", "parquet.dat": "i2"}[name]
        assert {gone} == {f"i{i}" for i in range(50)} - set(pq.read_table(job.out)["item_ids"][0].as_py())


def test_kept_lists_of_text_that_is_not_utf8_send_their_row_to_the_rejects(job, tmp_path):
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffb"))
    tags = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), bad)
    inputs = write_prompts(tmp_path / "in.parquet", ["w1", "w2", "w3"], tags=tags)
    job.run(inputs=(str(inputs),), keep_columns=("tags",), max_rejects="50%")
    assert pq.read_table(job.out)["tags"].to_pylist() == [["a"], ["b"]]
    (reject,) = pq.read_table(job.out / "_rejects").to_pylist()
    assert (reject["source_row"], reject["reason"], reject["detail"]) == (1, "bad_text", "column tags is not UTF-8")


def test_long_texts_are_tokenised_few_at_a_time(monkeypatch):
    monkeypatch.setattr(tokenization, "TOKENIZER_CHARS", 100)
    sizes = [len(batch) for batch in tokenization._bounded(["x" * 60, "x" * 30, "x" * 20, "x" * 500, "x"])]
    assert sizes == [2, 1, 1, 1]
    tokenize = PromptTokenizer(make_tokenizer(), RunConfig(inputs=("x",)), 64, 65)
    texts = [" ".join(["w1"] * n) for n in (40, 1, 50, 2)]
    assert [len(ids) - 1 for ids in tokenize(pa.array(texts)).input_ids] == [40, 1, 50, 2]


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 19])
def test_numbers_without_end_are_usage_errors(digits):
    with pytest.raises(UsageError, match="PREFILL_SCORE_TOP_K"):
        resolve({"inputs": ["x"]}, environ={"PREFILL_SCORE_TOP_K": digits}, needs=())
    with pytest.raises(UsageError, match="--max-rejects"):
        resolve({"inputs": ["x"], "max_rejects": digits}, needs=())


@pytest.mark.parametrize(
    "given", [{"inputs": [""]}, {"inputs": ["x"], "prefix": "\udcff"}, {"inputs": ["x"], "items": "a\0b"}]
)
def test_text_that_cannot_be_meant_is_a_usage_error(given):
    with pytest.raises(UsageError):
        resolve(given, needs=())


def test_a_configuration_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "prefill-score.toml").write_bytes(b"\xef\xbb\xbftop-k = 7\n")
    assert resolve({"inputs": ["x"]}, needs=()).top_k == 7


def test_inspect_and_show_take_files_that_run_takes(job, tmp_path):
    seen, folder = pa.array([["i1"]] * 2), tmp_path / "mixed"
    write_prompts(folder / "a.parquet", ["w1", "w2"], seen=seen)
    table = pq.read_table(folder / "a.parquet")
    narrow = table.set_column(0, "user_id", pa.array([7, 8], pa.int32()))
    pq.write_table(narrow.set_column(1, "prompt", table["prompt"].dictionary_encode()), folder / "b.parquet")
    job.run(inputs=(str(folder),), exclude_column="seen")
    assert inspect_path(folder, job.config(inputs=("x",))).exit_code == 0
    query = UserQuery(job.out, ("8",), 1, 3, None, None, None)
    assert [user["history"] for user in read_lists(query)] == [["i1"]]


def test_a_type_that_polars_does_not_know_is_told_in_one_sentence(job, tmp_path):
    inputs = write_prompts(tmp_path / "in.parquet", ["w1"], odd=pa.array([[1]], pa.list_view(pa.int32())))
    found = inspect_path(inputs, job.config())
    assert (found.exit_code, "\n" in found.problem) in ((0, False), (3, False))
