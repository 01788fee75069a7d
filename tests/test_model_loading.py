"""Model folders: what is wrong with them is said in one sentence, before weights, code or the network are touched."""

import json
import logging
import os
import shutil
import socket
import sys

import pytest
import torch
from conftest import WORDS, write_prompts
from safetensors.torch import load_file, save_file

from prefill_cli.config import RunConfig
from prefill_cli.encoding.loading import choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.errors import ModelError, UsageError

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaModel):
    config_class = OwnConfig
"""
LAYER = "model.layers.1.self_attn.q_proj.weight"


def run_config(model, **options):
    return RunConfig(inputs=("-",), model=str(model), **options)


def load(model, **options):
    config = run_config(model, **options)
    return load_base_model(open_model_folder(config), "cpu", "float32", config.trust_remote_code)


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of the tiny Llama to be spoilt."""
    return shutil.copytree(llama, tmp_path / "model")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def one_sentence(raised) -> str:
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 450
    return text


def test_a_folder_tells_its_widths_positions_and_pooling(llama, gpt2):
    found = open_model_folder(run_config(llama))
    assert (found.hidden_size, found.vocabulary, found.positions, found.pooling) == (32, 65, 64, "last")
    assert open_model_folder(run_config(gpt2)).positions == 16


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/no-such-folder-here"])
def test_a_missing_folder_is_named_and_never_asked_of_the_hub(name):
    with pytest.raises(ModelError, match="no such folder") as raised:
        open_model_folder(run_config(name))
    assert name in one_sentence(raised)


def test_a_file_is_no_model_folder(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="no such folder"):
        open_model_folder(run_config("model.gguf"))


def test_a_folder_without_configuration_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json") as raised:
        open_model_folder(run_config(tmp_path))
    one_sentence(raised)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{broken", "", "5", "null", "[]", "\x00\xff"])
def test_a_broken_configuration_is_named(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="JSON") as raised:
        open_model_folder(run_config(folder))
    assert str(folder / name) in one_sentence(raised)


@pytest.mark.parametrize("settings", [{}, {"model_type": "nonesuch"}, {"model_type": "vit"}, {"model_type": "t5"}])
def test_a_configuration_that_is_no_causal_language_model_is_refused(folder, settings):
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"config\.json is ") as raised:
        open_model_folder(run_config(folder))
    one_sentence(raised)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights \(\*\.safetensors\)"):
        open_model_folder(run_config(folder))


def test_pickled_weights_alone_are_refused_by_name_with_the_way_to_convert_them(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        open_model_folder(run_config(folder))


def test_pickled_weights_beside_safetensors_are_not_read(folder):
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    assert load(folder).config.hidden_size == 32


def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop(LAYER))
    with pytest.raises(ModelError, match=r"missing from the weights \(1\): layers\.1\.self_attn\.q_proj\.weight") as raised:
        load(folder)
    one_sentence(raised)


def test_a_missing_layer_is_an_error_and_not_random_numbers(folder):
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    with pytest.raises(ModelError, match=r"missing from the weights \(9\): layers\.1\.input_layernorm\.weight"):
        load(folder)


def test_an_extra_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=r"without a place in the model \(1\): model\.layers\.2\.mlp\.up_proj\.weight"):
        load(folder)


def test_an_ill_shaped_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.update({LAYER: torch.zeros(32, 31)}))
    with pytest.raises(ModelError, match=r"another shape .*\(1\): layers\.1\.self_attn\.q_proj\.weight") as raised:
        load(folder)
    one_sentence(raised)


def test_a_checkpoint_that_lacks_only_the_vocabulary_head_is_fine(folder, llama):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    changed, original = load(folder).state_dict(), load(llama).state_dict()
    assert changed.keys() == original.keys()
    assert all(torch.equal(changed[name], original[name]) for name in original)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000])
def test_damaged_weights_are_an_error_of_the_model(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot be loaded") as raised:
        load(folder)
    assert str(folder) in one_sentence(raised)


def shard(folder):
    """The weights in two files and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_weights_load_and_a_missing_shard_is_named(folder, llama):
    shard(folder)
    loaded, original = load(folder).state_dict(), load(llama).state_dict()
    assert all(torch.equal(loaded[name], original[name]) for name in original)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete: model-00002-of-00002\.safetensors is missing"):
        open_model_folder(run_config(folder))


@pytest.mark.parametrize("text", ["{broken", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_of_the_weights_is_named(folder, text):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        open_model_folder(run_config(folder))


def with_own_code(folder, marker):
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    edit_json(
        folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    )


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_does_not_run_unasked_and_nobody_is_asked(folder, tmp_path, monkeypatch, where):
    class Silent:
        def __getattr__(self, name):
            raise AssertionError(f"stdin.{name} was used")

    monkeypatch.setattr(sys, "stdin", Silent())
    marker = tmp_path / "marker"
    if where == "config.json":
        with_own_code(folder, marker)
    else:
        edit_json(folder / where, auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    with pytest.raises(ModelError, match=r"auto_map.*--trust-remote-code"):
        load(folder)
    assert not marker.exists()


def test_code_of_the_model_runs_where_it_is_trusted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with_own_code(folder, tmp_path / "marker")
    assert type(load(folder, trust_remote_code=True)).__name__ == "OwnModel"
    assert (tmp_path / "marker").exists()


def test_changed_code_vocabulary_or_weights_change_the_fingerprint(folder):
    def digests():
        found = open_model_folder(run_config(folder))
        return found.weights_sha256, found.files_sha256

    seen = [digests()]
    (folder / "merges.txt").write_text("a b")
    seen.append(digests())
    (folder / "own.py").write_text("x = 1")
    seen.append(digests())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(digests())
    assert len({files for _, files in seen}) == 4
    assert len({weights for weights, _ in seen}) == 1
    edit(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert digests()[0] != seen[0][0]
    assert digests()[1] == seen[-1][1]


def test_a_revision_belongs_to_a_hub_name(llama):
    with pytest.raises(UsageError, match="--revision"):
        open_model_folder(run_config(llama, revision="main"))


@pytest.fixture
def attempts(monkeypatch) -> list[object]:
    """The network is cut and online mode is on; whoever tries is remembered, since libraries swallow the failure."""
    tried: list[object] = []

    def refuse(*arguments, **options):
        tried.append(arguments)
        raise OSError("the network is cut")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


def test_a_local_folder_never_asks_the_network(folder, job, attempts):
    assert job.run(model=str(folder))["rows_out"] == 30
    assert attempts == []


def test_a_hub_name_that_is_not_in_the_cache_fails_offline_without_the_network(monkeypatch, tmp_path, attempts):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"no-such-org/model: .*not in the local cache.*--offline") as raised:
        open_model_folder(run_config("no-such-org/model", offline=True))
    assert "local_files_only" not in one_sentence(raised)
    assert attempts == []


def test_a_hub_name_without_a_connection_is_an_error_of_the_model(monkeypatch, tmp_path, attempts):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="no-such-org/model: no such folder") as raised:
        open_model_folder(run_config("no-such-org/model"))
    assert "no connection" in one_sentence(raised)
    assert attempts


def test_a_name_that_the_hub_could_not_have_is_an_error_of_the_model():
    with pytest.raises(ModelError, match="my model") as raised:
        open_model_folder(run_config("my model", offline=True))
    one_sentence(raised)


def test_a_stored_pooling_serves_as_auto_and_an_option_wins(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert open_model_folder(run_config(folder)).pooling == "mean"
    assert open_model_folder(run_config(folder, pooling="first")).pooling == "first"


def test_an_unknown_stored_pooling_is_an_error_unless_an_option_says_otherwise(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    with pytest.raises(ModelError, match="max is not one of"):
        open_model_folder(run_config(folder))
    assert open_model_folder(run_config(folder, pooling="last")).pooling == "last"


@pytest.mark.parametrize(("native", "expected"), [(False, "float32"), (True, "bfloat16")])
def test_auto_takes_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert choose_dtype("auto", "cpu") == expected
    assert choose_dtype("float32", "cpu") == "float32"


@pytest.mark.parametrize(
    ("native", "dtype", "warned"),
    [(False, "bfloat16", True), (False, "float16", True), (True, "float16", True), (True, "bfloat16", False),
     (False, "float32", False), (False, "auto", False)],
)  # fmt: skip
def test_a_half_precision_that_the_cpu_lacks_is_taken_with_a_warning(monkeypatch, caplog, native, dtype, warned):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    with caplog.at_level(logging.WARNING):
        chosen = choose_dtype(dtype, "cpu")
    assert chosen == ("float32" if dtype == "auto" else dtype)
    assert bool([r for r in caplog.records if dtype in r.getMessage()]) == warned


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_auto_takes_bfloat16_on_gpus_from_ampere_on(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", "cuda") == expected


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(1, 1, "cuda"), (0, 1, "mps"), (0, 0, "cpu")])
def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    assert choose_device("auto") == expected
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f"--device {device}"):
        choose_device(device)


def test_a_second_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda:0") == "cuda:0"
    with pytest.raises(UsageError, match="cuda:1"):
        choose_device("cuda:1")


def test_weights_stored_in_bfloat16_load_in_the_dtype_that_was_asked_for(folder):
    edit(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    edit_json(folder / "config.json", dtype="bfloat16")
    assert {p.dtype for p in load(folder).parameters()} == {torch.float32}


def test_the_model_is_in_evaluation_mode(folder):
    edit_json(folder / "config.json", attention_dropout=0.5)
    assert not load(folder).training


def test_a_model_too_large_for_the_memory_is_an_error_of_the_model(folder, monkeypatch):
    def too_large(*arguments, **options):
        return torch.empty(1 << 50)

    found = open_model_folder(run_config(folder))
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", too_large)
    with pytest.raises(ModelError, match="does not fit the memory of cpu"):
        load_base_model(found, "cpu", "float32", False)


def test_loading_writes_nothing_to_the_terminal(folder, capfd):
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_prompts_up_to_the_learned_positions_score_and_longer_ones_are_cut(gpt2, job, tmp_path):
    prompts = [" ".join(WORDS[:n]) for n in (15, 16, 17, 50, 1)]
    totals = job.run(model=str(gpt2), inputs=(str(write_prompts(tmp_path / "in.parquet", prompts)),))
    assert (totals["rows_out"], totals["truncated_rows"]) == (5, 2)


def test_a_relative_folder_and_a_home_folder_are_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    paths = [open_model_folder(run_config(name)).path for name in ("model", "./model", "~/model")]
    assert [os.path.realpath(path) for path in paths] == [str(folder)] * 3
