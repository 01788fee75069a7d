"""`prefill-score embed`: texts → item files and users' vectors that run and search take, and take for what they are."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf
from conftest import HIDDEN, SPECIALS, WORDS, Watcher, make_tokenizer, reference_vectors, save_llama, write_prompts
from safetensors.torch import load_file

from prefill_cli import pipeline, planning, worker
from prefill_cli.config import RunConfig
from prefill_cli.data import file_staging
from prefill_cli.data.disk import read_json, write_json
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import InputError, ItemsError, ModelError, OutputError, TooManyRejectsError, UsageError
from prefill_cli.places import Uri
from prefill_cli.tools.inspect import inspect_path
from prefill_cli.tools.show import UserQuery, read_lists

TITLES = [f"{a} {b}" for a in WORDS[:8] for b in WORDS[20:25]]


def ids_of(text: str) -> list[int]:
    return [1, *(len(SPECIALS) + int(word[1:]) for word in text.split())]


@pytest.fixture
def shelf(tmp_path, llama):
    """40 titles, and `do(plan, *inputs, **options)`, which returns the totals; `embed(**options)` of the titles."""
    table = pa.table({"item_id": [f"t{i}" for i in range(40)], "title": TITLES, "year": list(range(40))})
    titles = tmp_path / "titles.parquet"
    pq.write_table(table, titles)

    def do(plan, *inputs, **options):
        given = {"model": str(llama), "device": "cpu", "dtype": "float32"} | options
        return pipeline.run(RunConfig(inputs=tuple(map(str, inputs)), **given), run_shards, Watcher(), plan)

    def embed(**options):
        given = {"id_column": "item_id", "prompt_column": "title", "output": tmp_path / "items.parquet"} | options
        return do("embed", titles, **given)

    return SimpleNamespace(do=do, embed=embed, titles=titles, out=tmp_path / "items.parquet", model=llama)


def matrix(column) -> np.ndarray:
    return np.stack(column.to_numpy())


def test_vectors_are_those_of_plain_transformers_in_each_kind_of_output(shelf, tmp_path):
    expected = reference_vectors(shelf.model, [ids_of(title) for title in TITLES])
    totals = shelf.embed(keep_columns=("year",), shard_rows=7)
    assert (totals["status"], totals["rows_out"], totals["part_rows"], totals["shards"]) == ("done", 40, 40, 6)
    file = pq.read_table(shelf.out)
    assert file.schema.names == ["item_id", "embedding", "year"]
    assert file.schema.field("embedding").type == pa.list_(pa.float32(), HIDDEN)
    assert np.abs(matrix(file["embedding"]) - expected).max() < 1e-5
    assert file.select(["item_id", "year"]) == pq.read_table(shelf.titles, columns=["item_id", "year"])

    shelf.embed(output=tmp_path / "items.safetensors", keep_columns=("year",))
    tensors = load_file(tmp_path / "items.safetensors")
    assert tensors["embeddings"].numpy().tobytes() == matrix(file["embedding"]).tobytes()
    assert pq.read_table(tmp_path / "items.ids.parquet") == file.select(["item_id", "year"])

    shelf.embed(output=tmp_path / "folder", keep_columns=("year",), shard_rows=7)
    assert pq.read_table(tmp_path / "folder") == file
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [], "no leftovers"


def test_the_default_output_is_a_folder_named_after_the_input(shelf, tmp_path):
    assert shelf.embed(output=None)["output"] == "titles.vectors"
    assert (tmp_path / "titles.vectors" / "_SUCCESS").exists()


@pytest.mark.parametrize("name", ["items.parquet", "items.safetensors", "items"])
def test_each_texts_nearest_item_is_itself(shelf, tmp_path, name):
    shelf.embed(output=tmp_path / name)
    ids = {"item_ids": tmp_path / "items.ids.parquet"} if name.endswith(".safetensors") else {}
    options = {"id_column": "item_id", "prompt_column": "title", "output": tmp_path / "top", "top_k": 3, "score": "cosine"}
    shelf.do("run", shelf.titles, items=tmp_path / name, strict_provenance=True, **options, **ids)
    found = pq.read_table(tmp_path / "top" / "part-00000.parquet")
    assert [items[0] for items in found["item_ids"].to_pylist()] == found["item_id"].to_pylist()
    assert all(abs(scores[0] - 1) < 1e-6 for scores in found["scores"].to_pylist())


def test_search_over_embedded_prompts_gives_the_bytes_of_run(shelf, tmp_path):
    shelf.embed()
    prompts = write_prompts(tmp_path / "prompts.parquet", TITLES[::-1])
    shelf.do("run", prompts, items=shelf.out, output=tmp_path / "run", top_k=5)
    for name in ("users.parquet", "users", "users.safetensors"):
        shelf.do("embed", prompts, output=tmp_path / name)
        ids = {"user_ids": tmp_path / "users.ids.parquet"} if name.endswith(".safetensors") else {}
        shelf.do(
            "search", tmp_path / name, items=shelf.out, output=tmp_path / "search", top_k=5, overwrite=True,
            strict_provenance=True, **ids,
        )  # fmt: skip
        parts = [(tmp_path / folder / "part-00000.parquet").read_bytes() for folder in ("run", "search")]
        assert parts[0] == parts[1]


def test_dims_and_normalize_are_done_and_told(shelf):
    shelf.embed(dims=12, normalize=True)
    file = pq.read_table(shelf.out)
    expected = reference_vectors(shelf.model, [ids_of(title) for title in TITLES])[:, :12]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(matrix(file["embedding"]) - expected).max() < 1e-5
    made_with = json.loads(file.schema.metadata[b"prefill-score"])
    assert made_with.keys() == {"model", "revision", "model_sha256", "pooling", "dims", "normalized"}
    assert (made_with["dims"], made_with["normalized"], made_with["pooling"]) == (12, True, "last")
    with pytest.raises(UsageError, match=rf"--dims 33 is more than the model's width of {HIDDEN}"):
        shelf.embed(dims=HIDDEN + 1)


@pytest.mark.parametrize("name", ["items.parquet", "items.safetensors", "items"])
def test_items_of_another_model_are_noticed(shelf, tmp_path, name, caplog, gpt2):
    shelf.embed(output=tmp_path / name)
    ids = {"item_ids": tmp_path / "items.ids.parquet"} if name.endswith(".safetensors") else {}
    prompts = write_prompts(tmp_path / "prompts.parquet", ["w1 w2", "w3"])
    given = {"items": tmp_path / name, "output": tmp_path / "top", "model": str(gpt2)} | ids
    with pytest.raises(ItemsError, match="was made with another model_sha256"):
        shelf.do("run", prompts, strict_provenance=True, **given)
    shelf.do("run", prompts, **given)
    assert "made with another model_sha256" in caplog.text
    given["model"] = str(shelf.model)
    with pytest.raises(ItemsError, match=r"made with another pooling \(last, now mean\)"):
        shelf.do("run", prompts, strict_provenance=True, pooling="mean", **given)
    shelf.do("embed", prompts, output=tmp_path / "users.parquet", model=str(gpt2))
    with pytest.raises(ItemsError, match="was made with another"):
        users = tmp_path / "users.parquet"
        shelf.do("search", users, items=tmp_path / name, output=tmp_path / "s", strict_provenance=True, **ids)


def test_a_matrix_goes_with_the_ids_that_were_written_with_it(shelf, tmp_path):
    out, ids = tmp_path / "items.safetensors", tmp_path / "items.ids.parquet"
    shelf.embed(output=out)
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(ids).slice(0, 40).take(list(range(39, -1, -1))), other)
    run = {"items": out, "output": tmp_path / "top", "id_column": "item_id", "prompt_column": "title"}
    for given, words in (({}, "give --item-ids"), ({"item_ids": other}, "not the ids that were written with")):
        with pytest.raises(ItemsError, match=words):
            shelf.do("run", shelf.titles, **run, **given)
    search = {"items": out, "item_ids": ids, "output": tmp_path / "top", "id_column": "item_id"}
    for given, words in (({}, "give --user-ids"), ({"user_ids": other}, "not the ids that were written with")):
        with pytest.raises(InputError, match=words):
            shelf.do("search", out, **search, **given)


@pytest.mark.parametrize("name", ["items.parquet", "items.safetensors", "items"])
def test_the_same_command_does_nothing_and_another_needs_overwrite(shelf, tmp_path, name):
    out = tmp_path / name
    shelf.embed(output=out)
    before = {p: p.read_bytes() for p in tmp_path.rglob("items*") if p.is_file()}
    assert shelf.embed(output=out)["status"] == "unchanged"
    assert {p: p.read_bytes() for p in tmp_path.rglob("items*") if p.is_file()} == before
    with pytest.raises(OutputError, match=r"holds the result of another run; different: dims \(none, now 4\)"):
        shelf.embed(output=out, dims=4)
    assert shelf.embed(output=out, dims=4, overwrite=True)["status"] == "done"


@pytest.mark.parametrize("name", ["items.parquet", "items.safetensors", "items"])
def test_a_file_or_folder_that_no_embed_made_is_never_replaced(shelf, tmp_path, name):
    out = tmp_path / name
    shelf.do("run", shelf.titles, id_column="item_id", prompt_column="title", output=tmp_path / "lists",
             items=write_own(tmp_path / "own.parquet"))  # fmt: skip
    out.write_text("mine") if "." in name else (tmp_path / "lists").rename(out)
    words = "which is lists, and this command makes vectors" if name == "items" else "no run of prefill-score made this file"
    with pytest.raises(OutputError, match=words):
        shelf.embed(output=out, overwrite=True)
    out = tmp_path / "dir.parquet"
    out.mkdir()
    with pytest.raises(OutputError, match="there is a folder of that name"):
        shelf.embed(output=out, overwrite=True)


def write_own(path: Path) -> Path:
    flat = pa.array(np.random.default_rng(0).standard_normal(5 * HIDDEN, dtype=np.float32))
    pq.write_table(pa.table({"item_id": list(range(5)), "embedding": pa.FixedSizeListArray.from_arrays(flat, HIDDEN)}), path)
    return path


def test_a_run_does_not_replace_vectors_either(shelf, tmp_path):
    shelf.embed(output=tmp_path / "folder")
    with pytest.raises(OutputError, match="which is vectors, and this command makes lists"):
        shelf.do("run", shelf.titles, id_column="item_id", prompt_column="title", output=tmp_path / "folder",
                 items=write_own(tmp_path / "own.parquet"), overwrite=True)  # fmt: skip


def test_leftovers_of_the_other_command_are_no_result(shelf, tmp_path, monkeypatch):
    """Nothing is lost with them: an embed that was killed before its first receipt, then a run of the same name."""
    folder = tmp_path / ".both.staging"
    folder.mkdir()
    write_json(folder / "run.json", {"fingerprint": {"result": "vectors"}, "choices": {}})
    done = shelf.do("run", shelf.titles, id_column="item_id", prompt_column="title", output=tmp_path / "both",
                    items=write_own(tmp_path / "own.parquet"))  # fmt: skip
    assert (done["status"], folder.exists()) == ("done", False)


def columns_of(out: Path) -> pa.Table:
    return pq.read_table(out).replace_schema_metadata()


def test_a_stopped_embed_goes_on_where_it_was(shelf, tmp_path, monkeypatch):
    shelf.embed(output=tmp_path / "whole.parquet", shard_rows=7)
    encode, calls = worker.Worker.encode, []

    def stop_at_the_third(self, read, on_batch):
        calls.append(read.shard.index)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, read, on_batch)

    monkeypatch.setattr(worker.Worker, "encode", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        shelf.embed(shard_rows=7)
    assert not shelf.out.exists()
    calls.clear()
    monkeypatch.setattr(worker.Worker, "encode", lambda self, *rest: (calls.append(1), encode(self, *rest))[1])
    shelf.embed(shard_rows=7)
    assert len(calls) == 4, "two of six shards were done"
    assert columns_of(shelf.out) == columns_of(tmp_path / "whole.parquet")


def test_an_end_between_ids_and_matrix_never_gives_ids_of_others(shelf, tmp_path, monkeypatch):
    """Of two files one is first; what stands there then is refused by whoever reads it, and mended by either command."""
    out, ids = tmp_path / "items.safetensors", tmp_path / "items.ids.parquet"
    shelf.embed(output=out)
    matrix_before = out.read_bytes()
    other = tmp_path / "fewer.parquet"
    pq.write_table(pq.read_table(shelf.titles).slice(3, 30), other)
    header = file_staging.safetensors_header
    monkeypatch.setattr(file_staging, "safetensors_header", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    again = {"id_column": "item_id", "prompt_column": "title", "output": out, "overwrite": True}
    with pytest.raises(KeyboardInterrupt):
        shelf.do("embed", other, **again)
    assert (out.read_bytes(), pq.read_table(ids).num_rows) == (matrix_before, 30)
    with pytest.raises(ItemsError, match="not the ids that were written with"):
        shelf.do("run", shelf.titles, items=out, item_ids=ids, output=tmp_path / "top", id_column="item_id",
                 prompt_column="title")  # fmt: skip
    monkeypatch.setattr(file_staging, "safetensors_header", header)
    assert shelf.embed(output=out, overwrite=True)["status"] == "done", "the first command sees that its ids are gone"
    assert out.read_bytes()[-1000:] == matrix_before[-1000:]
    assert pq.read_table(ids).num_rows == 40


@pytest.mark.parametrize("name", ["items.parquet", "items.safetensors"])
def test_rejects_lie_beside_a_file_and_go_with_the_next(shelf, tmp_path, name):
    rejected = tmp_path / "items.rejects.parquet"
    pq.write_table(pa.table({"item_id": ["a", "b", None], "title": ["w1", "", "w2"]}), tmp_path / "bad.parquet")
    bad = {"id_column": "item_id", "prompt_column": "title", "output": tmp_path / name}
    with pytest.raises(TooManyRejectsError):
        shelf.do("embed", tmp_path / "bad.parquet", **bad)
    assert not rejected.exists()
    totals = shelf.do("embed", tmp_path / "bad.parquet", **bad, max_rejects="2")
    assert (totals["rows_out"], totals["reject_reasons"]) == (1, {"empty_prompt": 1, "null_id": 1})
    assert pq.read_table(rejected)["source_row"].to_pylist() == [1, 2]
    shelf.embed(output=tmp_path / name, overwrite=True)
    assert not rejected.exists()
    rejected.write_text("mine")
    with pytest.raises(OutputError, match=r"items\.rejects\.parquet: no run of prefill-score made this file"):
        shelf.embed(output=tmp_path / name, overwrite=True, dims=3)


def test_no_rows_make_a_file_with_a_schema(shelf, tmp_path):
    pq.write_table(pq.read_table(shelf.titles).slice(0, 0), tmp_path / "none.parquet")
    given = {"id_column": "item_id", "prompt_column": "title"}
    shelf.do("embed", tmp_path / "none.parquet", output=shelf.out, **given)
    assert pq.read_schema(shelf.out).field("embedding").type == pa.list_(pa.float32(), HIDDEN)
    shelf.do("embed", tmp_path / "none.parquet", output=tmp_path / "n.safetensors", **given)
    assert load_file(tmp_path / "n.safetensors")["embeddings"].shape == (0, HIDDEN)


def test_what_belongs_to_lists_only_is_ignored_where_a_file_of_options_holds_it(shelf, tmp_path):
    shelf.embed(score="cosine", top_k=7, layout="long", items=tmp_path / "nowhere.parquet", exclude_column="seen")
    assert shelf.embed()["status"] == "unchanged"
    assert np.linalg.norm(matrix(pq.read_table(shelf.out)["embedding"]), axis=1).max() > 1.5, "not normalised for cosine"


def test_column_names_do_not_collide(shelf):
    with pytest.raises(UsageError, match="'year' would stand twice in the output"):
        shelf.embed(keep_columns=("year",), embedding_column="year")
    shelf.embed(embedding_column="vector")
    assert pq.read_schema(shelf.out).names == ["item_id", "vector"]


def test_the_manifest_tells_lengths_and_shards(shelf, tmp_path):
    shelf.embed(output=tmp_path / "folder", shard_rows=16)
    told = read_json(tmp_path / "folder" / "_manifest.json")
    assert told["items"] is None
    assert told["lengths"] == {"3": 40}
    assert told["shards"]["rows"] == [16, 16, 8]
    assert sum(told["shards"]["tokens"]) == told["totals"]["tokens"] == 120
    inside = json.loads(pq.read_schema(write_again(shelf)).metadata[b"prefill-score-manifest"])
    assert inside["totals"]["rows_out"] == 40


def write_again(shelf) -> Path:
    shelf.embed()
    return shelf.out


def test_show_and_inspect_tell_vectors_from_lists(shelf, tmp_path):
    shelf.embed(output=tmp_path / "folder")
    with pytest.raises(OutputError, match="holds vectors, made by embed"):
        read_lists(UserQuery(tmp_path / "folder", (), 1, 1, None, None, None))
    found = inspect_path(tmp_path / "folder", RunConfig(inputs=("x",)))
    assert (found.kind, found.exit_code, found.facts["rows_out"]) == ("result", 0, 40)
    shelf.embed()
    found = inspect_path(shelf.out, RunConfig(inputs=("x",)))
    assert (found.kind, found.facts["items"], found.facts["width"]) == ("items", "40", HIDDEN)


def test_one_file_elsewhere_is_refused(shelf):
    with pytest.raises(UsageError, match="one file is written on this machine; name a folder there"):
        planning.staging_of(Uri("s3://bucket/items.parquet"), with_files=True)


def test_the_command_as_its_help_shows_it(shelf, command, tmp_path):
    line = ["embed", "titles.parquet", "--id-column", "item_id", "--prompt-column", "title", "-m", shelf.model]
    done = command(*line, "-o", "items.parquet", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)
    assert (totals["status"], totals["output"], totals["rows_out"]) == ("done", "items.parquet", 40)
    assert command("embed", "titles.parquet", cwd=tmp_path).returncode == 2


# --- items that are tokens of the model ------------------------------------------------------------------------------


def token_items(path: Path, column: pa.Array) -> Path:
    pq.write_table(pa.table({"item_id": [f"t{i}" for i in range(len(column))], "tokens": column}), path)
    return path


TOKENS = [[7], [8, 9], [10, 11, 12], [7, 7]]


@pytest.fixture
def tokens(shelf, tmp_path, monkeypatch):
    """`embed(column, **options)` of token ids, in which no model is loaded; returns [n, d]."""
    monkeypatch.setattr(worker, "load_base_model", None)

    def embed(column=None, **options):
        column = pa.array(TOKENS, pa.list_(pa.int32())) if column is None else column
        given = {"id_column": "item_id", "token_ids_column": "tokens", "output": tmp_path / "rows.parquet"}
        path = token_items(tmp_path / "tokens.parquet", column)
        totals = shelf.do("embed", path, **given | {"overwrite": True, "from_lm_head": True} | options)
        return SimpleNamespace(vectors=matrix(pq.read_table(tmp_path / "rows.parquet")["embedding"]), totals=totals)

    return embed


def mean_rows(weight: torch.Tensor, rows: list[list[int]] = TOKENS) -> np.ndarray:
    wide = weight.detach().double().numpy()
    return np.stack([wide[ids].mean(axis=0) for ids in rows]).astype(np.float32)


@pytest.mark.parametrize("output", [True, False])
def test_rows_of_the_embedding_matrices_are_averaged_over_an_items_tokens(tokens, shelf, output):
    model = tf.AutoModelForCausalLM.from_pretrained(shelf.model, dtype=torch.float32)
    layer = model.get_output_embeddings() if output else model.get_input_embeddings()
    found = tokens(from_lm_head=output)
    assert np.array_equal(found.vectors, mean_rows(layer.weight))
    name = "output embeddings (lm_head.weight)" if output else "input embeddings (model.embed_tokens.weight)"
    assert found.totals["encoder"] == name
    assert (found.totals["computed_tokens"], found.totals["tokens"]) == (0, 8)


def test_tied_embeddings_are_one_matrix(tokens, gpt2):
    model = tf.AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32)
    found = tokens(model=str(gpt2))
    assert np.array_equal(found.vectors, mean_rows(model.transformer.wte.weight))
    assert "wte.weight" in found.totals["encoder"]
    assert np.array_equal(tokens(model=str(gpt2), from_lm_head=False).vectors, found.vectors)


def test_a_column_of_single_ids_does_and_bad_ids_are_rejected(tokens, shelf):
    weight = tf.AutoModelForCausalLM.from_pretrained(shelf.model, dtype=torch.float32).lm_head.weight
    assert np.array_equal(tokens(pa.array([5, 9, 64])).vectors, mean_rows(weight, [[5], [9], [64]]))
    found = tokens(pa.array([5, None, 65, -1]), max_rejects="100%")
    assert np.array_equal(found.vectors, mean_rows(weight, [[5]]))
    assert found.totals["reject_reasons"] == {"bad_token_ids": 2, "null_prompt": 1}


def test_the_scores_of_such_items_are_the_logits_of_their_tokens(tokens, shelf, tmp_path, monkeypatch):
    tokens(pa.array(range(65)))
    monkeypatch.undo()
    prompts = write_prompts(tmp_path / "prompts.parquet", ["w1 w2 w3", "w7"])
    shelf.do("run", prompts, items=tmp_path / "rows.parquet", output=tmp_path / "top", top_k=65,
             strict_provenance=True)  # fmt: skip
    model = tf.AutoModelForCausalLM.from_pretrained(shelf.model, dtype=torch.float32).eval()
    found = pq.read_table(tmp_path / "top" / "part-00000.parquet")
    for text, items, scores in zip(["w1 w2 w3", "w7"], found["item_ids"].to_pylist(), found["scores"], strict=True):
        logits = model(torch.tensor([ids_of(text)])).logits[0, -1].detach().numpy()
        assert items == [f"t{i}" for i in np.argsort(-logits, kind="stable")]
        assert np.allclose(np.sort(logits)[::-1], scores.values, atol=1e-5)


def test_dims_and_normalize_hold_for_rows_too(tokens, shelf):
    weight = tf.AutoModelForCausalLM.from_pretrained(shelf.model, dtype=torch.float32).lm_head.weight
    expected = mean_rows(weight)[:, :5]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(tokens(dims=5, normalize=True).vectors, expected, atol=1e-6)


def test_many_tokens_are_gathered_in_pieces(tokens, shelf, monkeypatch):
    from prefill_cli.encoding import token_rows

    weight = tf.AutoModelForCausalLM.from_pretrained(shelf.model, dtype=torch.float32).lm_head.weight
    monkeypatch.setattr(token_rows, "GATHERED_TOKENS", 4)
    rows = [[5 + (i * j) % 60 for j in range(1 + i % 6)] for i in range(50)]
    assert np.array_equal(tokens(pa.array(rows)).vectors, mean_rows(weight, rows))


def test_what_has_no_such_matrix_is_refused(tokens, tmp_path, shelf):
    tf.AutoModel.from_pretrained(shelf.model).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"hold no output embeddings \(lm_head\.weight\); those of the input"):
        tokens(model=str(tmp_path / "base"))
    tokens(model=str(tmp_path / "base"), from_lm_head=False)
    config = tf.PhiConfig(
        vocab_size=65, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    tf.PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    make_tokenizer().save_pretrained(tmp_path / "phi")
    with pytest.raises(ModelError, match="the vocabulary head adds a bias"):
        tokens(model=str(tmp_path / "phi"))
    with pytest.raises(UsageError, match="--from-lm-head needs --token-ids-column"):
        tokens(token_ids_column=None, prompt_column="tokens")


def test_a_model_that_is_loaded_for_prompts_is_not_changed_by_the_option(shelf, tmp_path):
    """Left in a file of options, from-lm-head concerns embed alone."""
    prompts = write_prompts(tmp_path / "prompts.parquet", ["w1 w2", "w3"])
    shelf.embed()
    shelf.do("run", prompts, items=shelf.out, output=tmp_path / "top")
    assert shelf.do("run", prompts, items=shelf.out, output=tmp_path / "top", from_lm_head=True)["status"] == ("unchanged")


def test_save_llama_is_not_tied(tmp_path):
    """What the tests above need to tell the two matrices apart."""
    model = tf.AutoModelForCausalLM.from_pretrained(save_llama(tmp_path / "m"))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
