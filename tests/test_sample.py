"""The sample data: what the README says of it, and every one of its users against the reference."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, Watcher, reference_vectors

from prefill_cli import pipeline
from prefill_cli.config import RunConfig
from prefill_cli.engines.local import run_shards

SAMPLE = PROJECT / "sample_data"
K = 50


def run(output, inputs=(str(SAMPLE / "prompts.parquet"),), **options):
    config = RunConfig(
        inputs=inputs, model=str(SAMPLE / "model"), items=SAMPLE / "items.parquet", output=output, top_k=K,
        exclude_column="seen_items", keep_columns=("next_item",), device="cpu", dtype="float32", **options,
    )  # fmt: skip
    return pipeline.run(config, run_shards, Watcher())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The whole sample in one run: the folder."""
    out = tmp_path_factory.mktemp("sample") / "out"
    run(out)
    return out


def test_all_users_lists_equal_plain_transformers_one_at_a_time_and_brute_force(published):
    from transformers import AutoTokenizer

    prompts, items = pq.read_table(SAMPLE / "prompts.parquet"), pq.read_table(SAMPLE / "items.parquet")
    ids = AutoTokenizer.from_pretrained(SAMPLE / "model")(prompts["prompt"].to_pylist())["input_ids"]
    assert max(map(len, ids)) <= 512
    matrix = np.stack(items["embedding"].to_numpy())
    scores = (reference_vectors(SAMPLE / "model", ids).astype(np.float64) @ matrix.astype(np.float64).T).astype(np.float32)
    number = {item: i for i, item in enumerate(items["item_id"].to_pylist())}
    for row, seen in enumerate(prompts["seen_items"].to_pylist()):
        scores[row, [number[item] for item in seen]] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :K]

    result = pq.read_table(published)
    assert result["user_id"] == prompts["user_id"]
    found = np.array([[number[item] for item in row] for row in result["item_ids"].to_pylist()])
    expected = np.take_along_axis(scores, order, 1)
    assert np.abs(np.array(result["scores"].to_pylist()) - expected).max() < 1e-4
    # Two items may change places only where the reference itself can hardly tell them apart.
    assert np.abs(np.take_along_axis(scores, found, 1) - expected).max() < 1e-5


@pytest.mark.parametrize("options", [{"shard_rows": 100}, {"max_batch_tokens": 512}, {"files": 5, "max_batch_tokens": 8192}])
def test_files_shards_and_budgets_do_not_change_the_result(published, tmp_path, options):
    prompts, n = pq.read_table(SAMPLE / "prompts.parquet"), options.pop("files", 1)
    for i in range(n):
        pq.write_table(prompts.slice(i * 2000 // n, 2000 // n), tmp_path / f"prompts-{i}.parquet")
    run(tmp_path / "out", inputs=(str(tmp_path / "prompts-*.parquet"),), **options)

    once, again = pq.read_table(published), pq.read_table(tmp_path / "out")
    expected = np.array(once["scores"].to_pylist())
    assert np.abs(np.array(again["scores"].to_pylist()) - expected).max() < 1e-5
    differing = np.array(again["item_ids"].to_pylist()) != np.array(once["item_ids"].to_pylist())
    gaps = np.abs(np.diff(expected, axis=1, prepend=np.inf, append=-np.inf))
    assert (np.minimum(gaps[:, 1:], gaps[:, :-1])[differing] < 1e-5).all()


def test_held_out_recall_is_what_the_readme_quotes_and_far_above_popularity(published):
    result = pq.read_table(published)
    hits = sum(
        held_out in items[:10]
        for held_out, items in zip(result["next_item"].to_pylist(), result["item_ids"].to_pylist(), strict=True)
    )
    readme = (PROJECT / "README.md").read_text()
    quoted = re.search(r"is \*\*(0\.\d+)\*\*; the list of the most popular items\s+gets (0\.\d+)", readme)
    assert quoted
    assert f"{hits / 2000:.3f}" == quoted[1]
    assert hits / 2000 >= 3 * float(quoted[2])


def test_the_sample_is_small_enough_for_every_clone():
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) < 6_000_000
