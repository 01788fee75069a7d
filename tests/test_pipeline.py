"""The whole job against plain Transformers one prompt at a time and NumPy brute force."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, random_prompts, reference_top_k, reference_vectors, write_items, write_prompts

from prefill_cli.errors import TooManyRejectsError


def word_ids(prompt: str) -> list[int]:
    """BOS, then one id a word: what the tiny Llama's tokenizer must give."""
    return [1, *(int(word[1:]) + 5 for word in prompt.split())]


def test_lists_and_scores_equal_the_reference(job):
    totals = job.run()

    table = pq.read_table(job.out)
    items = np.stack(pq.read_table(job.items)["embedding"].to_numpy())
    rows, scores = reference_top_k(reference_vectors(job.model, [word_ids(p) for p in job.prompts]), items, 5)
    assert table["user_id"].to_pylist() == list(range(1000, 1030))
    assert table["item_ids"].to_pylist() == [[f"i{i}" for i in row] for row in rows]
    assert np.abs(np.array(table["scores"].to_pylist()) - scores).max() < 1e-4
    assert totals["rows_out"] == 30
    assert totals["tokens"] == sum(len(p.split()) + 1 for p in job.prompts)


@pytest.mark.parametrize("options", [{"shard_rows": 7}, {"max_batch_tokens": 1}, {"max_batch_tokens": 100}])
def test_the_result_does_not_depend_on_shards_or_batches(job, options):
    job.run(output=job.out.with_name("once"))
    job.run(**options)

    once, cut = pq.read_table(job.out.with_name("once")), pq.read_table(job.out)
    assert cut["item_ids"] == once["item_ids"]
    difference = np.array(cut["scores"].to_pylist()) - np.array(once["scores"].to_pylist())
    assert np.abs(difference).max() < 1e-5


def test_one_file_or_five_give_the_same(job, tmp_path):
    job.run(output=tmp_path / "once")
    whole = pq.read_table(job.inputs)
    for i in range(5):
        pq.write_table(whole.slice(6 * i, 6), tmp_path / f"five-{i}.parquet")
    job.run(inputs=(str(tmp_path / "five-*.parquet"),))
    assert pq.read_table(job.out)["item_ids"] == pq.read_table(tmp_path / "once")["item_ids"]


def test_rows_end_in_the_output_or_in_the_rejects(job, tmp_path):
    prompts = ["w1 w2", None, "", " \n", "w3"]
    inputs = write_prompts(tmp_path / "mixed.parquet", prompts)
    totals = job.run(inputs=(str(inputs),), max_rejects="100%")
    rejects = pq.read_table(job.out / "_rejects").to_pylist()
    assert pq.read_table(job.out)["user_id"].to_pylist() == [1000, 1004]
    assert [(r["user_id"], r["source_row"], r["reason"]) for r in rejects] == [
        (1001, 1, "null_prompt"), (1002, 2, "empty_prompt"), (1003, 3, "empty_prompt"),
    ]  # fmt: skip
    assert {r["source_file"] for r in rejects} == {str(inputs)}
    assert (totals["rows"], totals["rows_out"], totals["rejects"]) == (5, 2, 3)


def test_more_rejects_than_allowed_publish_nothing_and_a_higher_limit_goes_on(job, tmp_path):
    inputs = write_prompts(tmp_path / "bad.parquet", [*random_prompts(8), None, None])
    with pytest.raises(TooManyRejectsError, match=r"2 of 10 rows .*2 null_prompt"):
        job.run(inputs=(str(inputs),), max_rejects="1")
    assert not job.out.exists()
    job.run(inputs=(str(inputs),), max_rejects="20%")
    assert pq.read_table(job.out).num_rows == 8


def test_zero_rows_publish_a_valid_empty_result(job, tmp_path):
    inputs = write_prompts(tmp_path / "none.parquet", [])
    totals = job.run(inputs=(str(inputs),))
    table = pq.read_table(job.out)
    assert totals["rows"] == table.num_rows == 0
    assert [str(t) for t in table.schema.types] == ["int64", "list<element: string>", "list<element: float>"]
    assert (job.out / "_SUCCESS").exists()


def test_dims_cut_and_normalize_on_both_sides(job, tmp_path):
    narrow = write_items(tmp_path / "narrow.parquet", vectors=np.random.default_rng(5).standard_normal((40, 8), np.float32))
    job.run(items=narrow, dims=8, normalize=True)
    items = np.stack(pq.read_table(narrow)["embedding"].to_numpy())
    queries = reference_vectors(job.model, [word_ids(p) for p in job.prompts])[:, :8]
    assert queries.shape[1] < HIDDEN
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (queries, items)]
    rows, scores = reference_top_k(*unit, 5)
    assert pq.read_table(job.out)["item_ids"].to_pylist() == [[f"i{i}" for i in row] for row in rows]
    assert np.abs(np.array(pq.read_table(job.out)["scores"].to_pylist()) - scores).max() < 1e-5
