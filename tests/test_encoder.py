"""The plain encoder against Transformers one prompt at a time: padding, order, precision, what is never computed."""

import json
import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import HIDDEN, WORDS, make_tokenizer, reference_vectors, save_llama, write_prompts
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, BloomConfig, BloomForCausalLM

from prefill_cli.config import RunConfig
from prefill_cli.encoding.loading import load_base_model, open_model_folder
from prefill_cli.encoding.plain import PADDING_ID, PlainEncoder
from prefill_cli.errors import ModelError

EOS = 2
VOCABULARY = 5 + len(WORDS)


def load(folder, dtype="float32"):
    config = RunConfig(inputs=("-",), model=str(folder))
    return load_base_model(open_model_folder(config), "cpu", dtype, False)


def encoder(model, *, pooling="last", dims=None, normalize=False, max_batch_tokens=256):
    return PlainEncoder(model, pooling=pooling, dims=dims, normalize=normalize, max_batch_tokens=max_batch_tokens)


def encode(model, rows, **options):
    return encoder(model, **options).encode([np.array(row, np.int32) for row in rows], lambda rows, tokens: None)


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def alone(folder, row: list[int]) -> np.ndarray:
    """[T, d] final states of one prompt by plain Transformers."""
    with torch.inference_mode():
        return AutoModel.from_pretrained(folder).eval()(torch.tensor([row])).last_hidden_state[0].numpy()


@pytest.fixture(scope="module")
def model(llama):
    return load(llama)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """`change(name, edit)`: a copy of the tiny Llama whose tensors `edit` has changed."""
    root = tmp_path_factory.mktemp("changed")
    base = save_llama(root / "base")

    def change(name, edit):
        folder = shutil.copytree(base, root / name)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return SimpleNamespace(base=base, change=change)


@pytest.mark.parametrize("lengths", [[2, 5, 9], [1, 40], [40, 1, 1, 40], [7], list(range(1, 31))])
@pytest.mark.parametrize("max_batch_tokens", [1, 90, 4096])
def test_vectors_equal_plain_transformers_one_at_a_time_in_input_order(llama, model, lengths, max_batch_tokens):
    rows = random_rows(lengths)
    encoded = encode(model, rows, max_batch_tokens=max_batch_tokens)
    assert encoded.vectors.dtype == np.float32
    assert np.abs(encoded.vectors - reference_vectors(llama, rows)).max() < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_mean_and_first_pooling_equal_a_computation_by_hand(llama, model, pooling):
    rows = random_rows([2, 5, 9, 1, 40])
    states = [alone(llama, row) for row in rows]
    expected = np.stack([s.mean(0) if pooling == "mean" else s[0] for s in states])
    assert np.abs(encode(model, rows, pooling=pooling).vectors - expected).max() < 1e-5


def test_learned_positions_count_from_the_first_real_token(gpt2):
    rows = random_rows([16, 1, 3, 16, 9])
    assert np.abs(encode(load(gpt2), rows).vectors - reference_vectors(gpt2, rows)).max() < 1e-5


def test_a_family_without_fused_attention_is_encoded_too(tmp_path):
    torch.manual_seed(2)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=2, n_head=4, initializer_range=0.2)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    rows = random_rows([2, 5, 9])
    vectors = encode(load(tmp_path / "bloom"), rows).vectors
    assert np.abs(vectors - reference_vectors(tmp_path / "bloom", rows)).max() < 1e-5


@pytest.mark.parametrize(
    "row", [[PADDING_ID] * 4, [1, 7, PADDING_ID], [1, EOS, 8, EOS, 9], [1, 8, EOS], [EOS], [PADDING_ID]]
)
def test_masks_come_from_lengths_never_from_token_values(llama, model, row):
    rows = [row, *random_rows([12, 12])]
    for pooling, expected in (("last", alone(llama, row)[-1]), ("mean", alone(llama, row).mean(0))):
        vectors = encode(model, rows, pooling=pooling).vectors
        assert np.abs(vectors[0] - expected).max() < 1e-5


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_does_not_matter(tmp_path, padding_side):
    tokenizer = make_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = padding_side, "</s>"
    folder = save_llama(tmp_path / "sided", tokenizer=tokenizer)
    rows = random_rows([2, 5, 9])
    assert np.abs(encode(load(folder), rows).vectors - reference_vectors(folder, rows)).max() < 1e-5


def test_the_state_after_the_final_norm_is_pooled(llamas):
    folder = llamas.change("norm-3", lambda tensors: tensors["model.norm.weight"].fill_(3.0))
    rows = random_rows([2, 5, 9])
    vectors = encode(load(folder), rows).vectors
    assert np.abs(vectors - reference_vectors(folder, rows)).max() < 1e-5
    assert np.sqrt(np.square(vectors).mean(1)) == pytest.approx(3.0, rel=1e-3)  # only after RMSNorm


def test_dims_are_cut_and_then_normalised(llama, model):
    rows = random_rows([2, 5, 9])
    cut = reference_vectors(llama, rows)[:, :8]
    vectors = encode(model, rows, dims=8, normalize=True).vectors
    assert vectors.shape == (3, 8)
    assert np.abs(vectors - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_float32_vectors_near_the_reference(llama, dtype):
    rows = random_rows([1, 40, 9])
    encoded = encode(load(llama, dtype), rows)
    reference = reference_vectors(llama, rows)
    cosine = (
        (encoded.vectors * reference).sum(1) / np.linalg.norm(encoded.vectors, axis=1) / np.linalg.norm(reference, axis=1)
    )
    assert encoded.vectors.dtype == np.float32
    assert np.isfinite(encoded.vectors).all()
    assert cosine.min() > 0.99
    assert encoded.retried_rows == 0


def test_two_runs_give_the_same_bits(model):
    rows = random_rows(list(range(1, 20)))
    assert encode(model, rows).vectors.tobytes() == encode(model, rows).vectors.tobytes()


def test_counts_are_of_batches_padded_cells_rows_and_tokens(model):
    done = []
    rows = [np.array(row, np.int32) for row in random_rows([3, 9, 5, 2, 9, 1])]
    encoded = encoder(model, max_batch_tokens=18).encode(rows, lambda rows, tokens: done.append((rows, tokens)))
    assert (encoded.batches, encoded.computed_tokens) == (3, 18 + 15 + 1)
    assert done == [(2, 18), (3, 10), (1, 1)]


def test_no_prompts_give_no_vectors(model):
    encoded = encode(model, [])
    assert (len(encoded.vectors), encoded.batches, encoded.computed_tokens, encoded.retried_rows) == (0, 0, 0, 0)


class Shapes(TorchDispatchMode):
    """Remembers the last axis of whatever torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim:
            self.widths.add(result.shape[-1])
        return result


def test_neither_logits_nor_a_key_value_cache_are_made(model):
    assert not [name for name, _ in model.named_modules() if "head" in name]
    calls, outputs = [], []
    hooks = [
        model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True),
        model.register_forward_hook(lambda module, args, output: outputs.append(output)),
    ]
    with Shapes() as shapes:
        encode(model, random_rows([2, 5, 9]), max_batch_tokens=10)
    for hook in hooks:
        hook.remove()
    assert [call["use_cache"] for call in calls] == [False, False]
    assert [output.past_key_values for output in outputs] == [None, None]
    assert HIDDEN in shapes.widths
    assert VOCABULARY not in shapes.widths


class Faulty(torch.nn.Module):
    """A model that gives infinity for rows that start with `first` wherever there is more than one row."""

    def __init__(self, model, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, input_ids, **options):
        output = self.model(input_ids=input_ids, **options)
        if len(input_ids) > 1:
            output.last_hidden_state[input_ids[:, 0] == self.first] = torch.inf
        return output


def test_a_vector_that_is_not_finite_is_tried_again_alone_and_counted(llama, model):
    rows = [[5, 6], [9, 7, 8], [5, 8, 9, 9], [5]]
    encoded = encode(Faulty(model, first=9), rows)
    assert np.abs(encoded.vectors - reference_vectors(llama, rows)).max() < 1e-5
    assert encoded.retried_rows == 1
    assert encoded.computed_tokens == 16 + 3


def test_a_vector_beyond_float16_is_rescued_in_float32(llamas):
    def overflow(tensors):
        tensors["model.embed_tokens.weight"][9] = 6e4  # fits float16, but not twice
        tensors["model.embed_tokens.weight"][9, ::2] = -6e4
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1e4

    folder = llamas.change("large", overflow)
    rows = [[5, 6, 7], [5, 9], [9, 6, 8, 5]]
    half = load(folder, "float16")
    with torch.inference_mode():
        assert not half(torch.tensor([[5, 9]])).last_hidden_state.isfinite().all()
    encoded = encode(half, rows)
    assert np.isfinite(encoded.vectors).all()
    assert encoded.retried_rows >= 1
    assert next(half.parameters()).dtype == torch.float16  # the model itself stays as it was
    assert np.abs(encoded.vectors[1] - reference_vectors(folder, rows)[1]).max() < 0.05


def test_a_row_that_is_never_finite_is_rejected_and_the_others_are_unaffected(llamas, job, tmp_path):
    def poison(tensors):
        tensors["model.embed_tokens.weight"][5 + 7] = torch.nan  # the word w7

    folder = llamas.change("poisoned", poison)
    prompts = ["w1 w2", "w3 w7", "w7", "w4 w5 w6", "w7 w8 w9", "w9"]
    totals = job.run(model=str(folder), inputs=(str(write_prompts(tmp_path / "in.parquet", prompts)),), max_rejects="100%")
    healthy = write_prompts(tmp_path / "healthy.parquet", [prompts[i] for i in (0, 3, 5)])
    job.run(model=str(folder), inputs=(str(healthy),), output=tmp_path / "healthy")

    rejects = pq.read_table(job.out / "_rejects").to_pylist()
    assert [(r["user_id"], r["reason"]) for r in rejects] == [
        (1001, "not_finite"),
        (1002, "not_finite"),
        (1004, "not_finite"),
    ]
    assert not any(word in json.dumps(rejects) for word in ("w3", "w7", "w8"))
    table = pq.read_table(job.out)
    assert table["user_id"].to_pylist() == [1000, 1003, 1005]
    assert table["item_ids"] == pq.read_table(tmp_path / "healthy")["item_ids"]
    assert (totals["rows_out"], totals["rejects"], totals["retried_rows"]) == (3, 3, 3)


class Hungry(torch.nn.Module):
    """A model that asks torch for more memory than any machine has, or fails in another way."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.error = error

    def forward(self, input_ids, **options):
        if self.error:
            raise self.error
        return torch.empty(1 << 50)


@pytest.mark.parametrize(
    "error",
    [None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("MPS backend out of memory (…)"),
     RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_the_memory_alone_is_told_apart(error):
    encoded = encode(Hungry(error), random_rows([3, 5]))
    assert encoded.out_of_memory.tolist() == [0, 1]
    assert (encoded.batches, encoded.retried_rows) == (0, 0)


def test_another_failure_of_the_model_stays_loud():
    with pytest.raises(RuntimeError, match="shape"):
        encode(Hungry(RuntimeError("shape '[3]' is invalid")), random_rows([3]))


class NoCopy(torch.nn.Module):
    """A half-precision model, never finite, whose copy does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))

    def forward(self, input_ids, **options):
        return SimpleNamespace(last_hidden_state=torch.full((*input_ids.shape, 2), torch.nan))

    def __deepcopy__(self, memo):
        return torch.empty(1 << 50)


def test_memory_that_does_not_suffice_for_the_float32_copy_is_an_error_of_the_model():
    with pytest.raises(ModelError, match=r"float32 copy.*--dtype"):
        encode(NoCopy(), random_rows([3]))
