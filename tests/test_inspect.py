"""What `inspect` says of models, item files, prompts and results, whole and broken."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, random_prompts, write_items, write_prompts
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.data.manifest import MANIFEST, SUCCESS


def inspect(*arguments: object):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})


def finding(*arguments: object) -> dict:
    result = inspect(*arguments, "--json")
    (found,) = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code
    assert bool(found["problem"]) == bool(result.exit_code)
    assert result.stderr == ""
    return found


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_told_with_an_example_of_its_special_tokens(llama):
    found = finding(llama)
    assert (found["kind"], found["exit_code"]) == ("model", 0)
    facts = found["facts"]
    assert (facts["architecture"], facts["hidden_size"], facts["positions"]) == ("LlamaConfig", HIDDEN, 64)
    assert (facts["vocabulary"], facts["pooling"], facts["max_length"], facts["chat_template"]) == (65, "last", 64, "yes")
    assert facts["example"].endswith("→ <s>:1 <unk>:0 <unk>:0 <unk>:0 <unk>:0")
    assert int(facts["parameters"].split()[0].replace(",", "")) == sum(
        v.size for k, v in load_file(llama / "model.safetensors").items() if not k.startswith("lm_head")
    )


def test_a_model_without_a_template_says_so(gpt2):
    found = finding(gpt2)
    assert (found["facts"]["chat_template"], found["facts"]["positions"]) == ("no", 16)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def config_of_no_known_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "oracle"}')


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def torn_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "x.Y"}}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (no_config, "no config.json"),
        (config_that_is_no_json, "config.json: not JSON"),
        (config_of_no_known_model, "config.json is not a model"),
        (no_weights, "no weights"),
        (pickled_weights, "only pickled weights (pytorch_model.bin)"),
        (cut_weights, "the model cannot be loaded"),
        (missing_tensor, "norm.weight"),
        (torn_tokenizer, "the tokenizer cannot be loaded"),
        (code_of_its_own, "--trust-remote-code"),
    ],
)
def test_a_broken_model_has_the_exit_code_of_models(llama, tmp_path, harm, message):
    folder = shutil.copytree(llama, tmp_path / "model")
    harm(folder)
    found = finding(folder)
    assert (found["kind"], found["exit_code"]) == ("model", 5)
    assert message in found["problem"]


def test_a_folder_with_nothing_in_it_is_taken_for_a_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in finding(tmp_path / "empty")["problem"]


# --- items ------------------------------------------------------------------------------------------------------------


def test_items_are_told_with_their_norms(tmp_path):
    vectors = np.array([[3, 4], [0, 1], [0, 2]], np.float32)
    found = finding(write_items(tmp_path / "i.parquet", vectors=vectors))
    assert (found["kind"], found["exit_code"]) == ("items", 0)
    assert found["facts"] == {
        "items": "3", "width": 2, "id_type": "string", "norms": "1 / 2 / 5 (least / median / greatest)",
        "provenance": "not stored",
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_matrix_is_taken_for_items(tmp_path, suffix):
    vectors, path = np.ones((4, 3), np.float32), tmp_path / f"m.{suffix}"
    if suffix == "npy":
        np.save(path, vectors)
    else:
        save_file({"embeddings": vectors}, path)
    found = finding(path)
    assert (found["kind"], found["facts"]["items"], found["facts"]["id_type"]) == ("items", "4", "int64")


def test_a_folder_of_parts_is_one_catalogue(tmp_path):
    (tmp_path / "parts").mkdir()
    for name in "ab":
        write_items(tmp_path / "parts" / f"{name}.parquet", n=3, ids=pa.array([f"{name}{i}" for i in range(3)]))
    assert finding(tmp_path / "parts")["facts"]["items"] == "6"


@pytest.mark.parametrize(
    ("vectors", "ids", "message"),
    [
        ([[1, np.nan], [1, 1]], None, "1 items have NaN or infinity in the embedding: i0"),
        ([[1, 2], [1, 1]], pa.array(["a", "a"]), "more than once: a"),
        ([[1, 2], [1, 1]], pa.array(["a", None]), "1 item ids are null"),
        ([[1, 2], [1, 1]], pa.array([1.5, 2.5]), "item ids are double"),
    ],
)
def test_broken_items_have_the_exit_code_of_items(tmp_path, vectors, ids, message):
    found = finding(write_items(tmp_path / "i.parquet", vectors=np.array(vectors, np.float32), ids=ids))
    assert (found["kind"], found["exit_code"]) == ("items", 4)
    assert message in found["problem"]


def test_names_of_columns_come_from_the_configuration(tmp_path):
    table = pq.read_table(write_items(tmp_path / "i.parquet"))
    pq.write_table(table.rename_columns(["sku", "vector"]), tmp_path / "i.parquet")
    (tmp_path / "prefill-score.toml").write_text("item-id-column = 'sku'\nembedding-column = 'vector'")
    assert finding(tmp_path / "i.parquet")["kind"] == "items"


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_told_with_what_would_be_rejected(tmp_path):
    prompts = ["ab", "ab", None, " \n", "", "abcd"]
    ids = pa.array([1, 1, 2, None, 3, 4])
    found = finding(write_prompts(tmp_path / "p.parquet", prompts, user_id=ids))
    assert (found["kind"], found["exit_code"]) == ("prompts", 0)
    assert found["facts"] == {
        "files": 1, "rows": "6", "row_groups": 1, "columns": "user_id int64, prompt string", "null_ids": 1,
        "repeated_ids": 1, "null_prompts": 1, "blank_prompts": 2, "repeated_prompts": 1,
        "characters": "0 / 2.0 / 4 (least / median / greatest)",
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "parq", "pq"])
def test_a_folder_of_prompts_is_one_input(tmp_path, suffix):
    for i in range(3):
        write_prompts(tmp_path / "day" / f"p{i}.{suffix}", random_prompts(4, seed=i))
    found = finding(tmp_path / "day")
    assert (found["kind"], found["facts"]["files"], found["facts"]["rows"]) == ("prompts", 3, "12")


def test_an_input_without_rows_is_no_problem(tmp_path):
    assert finding(write_prompts(tmp_path / "p.parquet", []))["facts"]["rows"] == "0"


@pytest.mark.parametrize("key", ["messages-column", "token-ids-column"])
def test_messages_and_token_ids_are_prompts_too(tmp_path, key):
    chat = pa.array([[{"role": "user", "content": "hi"}]])
    write_prompts(tmp_path / "p.parquet", ["x"], m=chat if key.startswith("m") else pa.array([[1, 2]]))
    (tmp_path / "prefill-score.toml").write_text(f"{key} = 'm'")
    assert finding(tmp_path / "p.parquet")["exit_code"] == 0


def damaged_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:-600] = b"\xff" * len(content[4:-600])
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def other_format(path: Path) -> None:
    path.write_text("user_id,prompt\n1,x\n")


def other_id_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).rename_columns(["uid", "prompt"]), path)


def prompts_that_are_numbers(path: Path) -> None:
    pq.write_table(pa.table({"user_id": [1], "prompt": [2]}), path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damaged_pages, "p.parquet"),
        (cut_short, "not readable as Parquet"),
        (emptied, "the file is empty"),
        (other_format, "not readable as Parquet"),
        (other_id_column, "no column 'user_id' (did you mean 'uid'?)"),
        (prompts_that_are_numbers, "column 'prompt' is int64, which is not prompt text"),
        (Path.unlink, "no such file or folder"),
    ],
)
def test_broken_prompts_have_the_exit_code_of_inputs(tmp_path, harm, message):
    path = write_prompts(tmp_path / "p.parquet", random_prompts(200))
    harm(path)
    found = finding(path)
    assert found["exit_code"] == 3
    assert message in found["problem"]


def test_text_that_is_not_utf8_is_a_problem_in_one_line(tmp_path):
    bad = pa.array([b"\xff\xfe", b"fine"], pa.binary())
    broken = pa.StringArray.from_buffers(2, bad.buffers()[1], bad.buffers()[2])
    write_prompts(tmp_path / "p.parquet", ["a", "b"], prompt=broken)
    result = inspect(tmp_path / "p.parquet")
    assert result.exit_code in (0, 3)
    assert "Traceback" not in result.output


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_a_result_is_told_with_what_made_it(job, tmp_path, layout):
    inputs = write_prompts(tmp_path / "in" / "prompts.parquet", [*random_prompts(9), None])
    job.run(inputs=(str(inputs),), layout=layout, max_rejects="50%")
    found = finding(job.out)
    assert (found["kind"], found["exit_code"]) == ("result", 0)
    facts = found["facts"]
    assert (facts["rows"], facts["rows_out"], facts["rejects"], facts["parts"]) == (10, 9, 1, 1)
    assert (facts["model"], facts["items"], facts["top_k"], facts["layout"]) == (str(job.model), str(job.items), 5, layout)


def not_finished(out: Path) -> None:
    (out / SUCCESS).unlink()


def part_gone(out: Path) -> None:
    (out / "part-00001.parquet").unlink()


def part_cut(out: Path) -> None:
    (out / "part-00001.parquet").write_bytes(b"garbage")


def part_damaged(out: Path) -> None:
    path = out / "part-00001.parquet"
    path.write_bytes(b"\0" * path.stat().st_size)


def part_added(out: Path) -> None:
    shutil.copy(out / "part-00001.parquet", out / "part-00009.parquet")


def rejects_gone(out: Path) -> None:
    shutil.rmtree(out / "_rejects")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (not_finished, "no _SUCCESS in it"),
        (part_gone, "part-00001.parquet is missing"),
        (part_cut, "part-00001.parquet has 7 bytes, but"),
        (part_damaged, "a part cannot be read"),
        (part_added, "35 rows and 1 rejects are there, but 25 and 1 were written"),
        (rejects_gone, "_rejects/part-00002.parquet is missing"),
    ],
)
def test_a_broken_result_has_the_exit_code_of_outputs(job, tmp_path, harm, message):
    inputs = write_prompts(tmp_path / "in" / "prompts.parquet", [*random_prompts(25), None])
    job.run(inputs=(str(inputs),), shard_rows=10, max_rejects="1")
    harm(job.out)
    found = finding(job.out)
    assert (found["kind"], found["exit_code"]) == ("result", 6)
    assert message in found["problem"]


def test_a_torn_manifest_makes_a_folder_of_unknown_parquet_files(job):
    job.run()
    (job.out / MANIFEST).write_text('{"made_by": "prefill-score"}')
    assert finding(job.out)["exit_code"] == 3


# --- several, and garbage ---------------------------------------------------------------------------------------------


def test_several_paths_are_told_in_order_and_the_first_problem_gives_the_exit_code(job, tmp_path):
    bad_items = write_items(tmp_path / "bad.parquet", vectors=np.full((2, 3), np.nan, np.float32))
    paths = [job.model, job.items, job.inputs, bad_items, tmp_path / "gone.parquet"]
    result = inspect(*paths, "--json")
    found = json.loads(result.stdout)
    assert [f["path"] for f in found] == list(map(str, paths))
    assert [f["kind"] for f in found] == ["model", "items", "prompts", "items", "unknown"]
    assert [f["exit_code"] for f in found] == [0, 0, 0, 4, 3]
    assert result.exit_code == 4


def test_people_get_a_table(job):
    result = inspect(job.items, job.inputs.with_name("gone.parquet"))
    assert result.exit_code == 3
    assert re.search(r"^/.*items\.parquet +items *$", result.stdout, re.M)
    assert re.search(r"^width +32 *$", result.stdout, re.M)
    assert re.search(r"^problem +.*gone\.parquet: no such file or folder", result.stdout, re.M)
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("name", ["x.parquet", "x.npy", "x.safetensors", "x.pkl", "x.json", "x"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PAR1garbagePAR1", bytes(range(256)) * 8, b"\x93NUMPY\x01\x00", b"{}"]
)
def test_garbage_is_a_problem_and_never_a_traceback(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    found = finding(tmp_path / name)
    assert found["exit_code"] in (3, 4)
    assert "\n" not in found["problem"]
