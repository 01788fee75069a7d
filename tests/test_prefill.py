"""The prefill engine against the plain encoder: every family, every pooling, and bits that nothing around a prompt moves."""

from functools import partial
from threading import Event, Thread

import numpy as np
import pytest
import torch
import transformers as tf

from prefill_cli.encoding import attention, choice, decoders, prefill, prefix
from prefill_cli.encoding.budget import CHUNK
from prefill_cli.encoding.choice import compare, fast_encoder, plain_encoder
from prefill_cli.encoding.decoders import FusedDecoder, TransformersDecoder, choose_decoder
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.kernels import load_kernels
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.encoding.prefill import PrefillEncoder

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": None,
}  # fmt: skip
HEAD = {"head_dim": 16}  # not hidden / heads
CONFIGS = {
    "llama": tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": tf.Qwen2Config(**SIZES),
    "qwen2-window": tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": tf.Qwen3Config(**SIZES, **HEAD),
    "mistral": tf.MistralConfig(**SIZES, **HEAD, sliding_window=None),
    "mistral-window": tf.MistralConfig(**SIZES, sliding_window=70),
    "gemma2": tf.Gemma2Config(**SIZES, **HEAD, sliding_window=24, query_pre_attn_scalar=16),
    "gemma3": tf.Gemma3TextConfig(**SIZES, **HEAD, sliding_window=24, query_pre_attn_scalar=16),
    "gpt2": tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=512, initializer_range=0.2),
    "gpt_neox": tf.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "phi3": tf.Phi3Config(**SIZES),
    "olmo2": tf.Olmo2Config(**SIZES),
    "granite": tf.GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "mixtral": tf.MixtralConfig(**SIZES, num_local_experts=4),
    "opt": tf.OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                        max_position_embeddings=512, word_embed_proj_dim=32),
}  # fmt: skip
FUSED = ("llama", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-window")


def make(config, dtype=torch.float32):
    torch.manual_seed(3)
    return tf.AutoModel.from_config(config).to(dtype).eval()


def encoders(model, *, pooling="last", dtype="float32", budget=1024, share=True, normalize=False):
    options = EncoderOptions(pooling, None, normalize, dtype, budget, share=share)
    plain = plain_encoder(model, options)
    return fast_encoder(model, plain, options), plain


def encode(encoder, prompts):
    return encoder.encode(prompts, lambda rows, tokens: None)


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    """200 prompts of 1 to 300 tokens: half begin with one of three instructions of two levels, one in ten is a copy."""
    rng = np.random.default_rng(5)

    def random(length):
        return rng.integers(0, VOCABULARY, length).astype(np.int32)

    instruction = random(121)
    starts = [np.concatenate([instruction, random(n)]) for n in (7, 12, 40)]
    made = []
    for i in range(180):
        own = random(min(170, 1 + int(rng.lognormal(3, 1))))
        made.append(np.concatenate([starts[i % 3], own]) if i % 2 else own)
    made += [made[i].copy() for i in range(0, 180, 10)]
    made += [instruction.copy(), starts[0].copy()]  # prompts that end where a prefix ends
    return made


@pytest.fixture(scope="module")
def llama():
    return make(CONFIGS["llama"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_gives_the_plain_encoders_vectors(name, prompts):
    model = make(CONFIGS[name])
    fast, plain = encoders(model)
    assert isinstance(fast._decoder, FusedDecoder if name in FUSED else TransformersDecoder)
    found = compare(fast, plain, prompts[::4])
    assert len(found) == len(prompts[::4])
    assert max(c.largest_difference for c in found) <= 1e-5


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_pooling_gives_the_plain_encoders_vectors(name, pooling, prompts):
    fast, plain = encoders(make(CONFIGS[name]), pooling=pooling)
    assert max(c.largest_difference for c in compare(fast, plain, prompts[::4])) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma3", "gpt2"])
def test_a_prompts_bits_do_not_depend_on_its_neighbours(name, dtype, prompts):
    fast, _ = encoders(make(CONFIGS[name], getattr(torch, dtype)), dtype=dtype)
    together = encode(fast, prompts).vectors
    backwards = encode(fast, prompts[::-1]).vectors[::-1]
    alone = np.concatenate([encode(fast, [ids]).vectors for ids in prompts])
    assert np.array_equal(together, backwards)
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_bits_do_not_depend_on_sharing_or_the_budget(pooling, dtype, prompts):
    model = make(CONFIGS["llama"], getattr(torch, dtype))
    shared = encode(encoders(model, pooling=pooling, dtype=dtype)[0], prompts)
    whole = encode(encoders(model, pooling=pooling, dtype=dtype, share=False)[0], prompts)
    assert np.array_equal(shared.vectors, whole.vectors)
    assert shared.computed_tokens < 0.75 * whole.computed_tokens
    for budget in (1, 512, 8192):
        assert np.array_equal(
            encode(encoders(model, pooling=pooling, dtype=dtype, budget=budget)[0], prompts).vectors, shared.vectors
        )


def test_equal_prompts_are_computed_once_and_all_are_told(llama):
    rows, tokens = [], []
    prompts = [np.arange(1, 40, dtype=np.int32)] * 7 + [np.arange(2, 30, dtype=np.int32)]
    encoded = encoders(llama)[0].encode(prompts, lambda r, t: (rows.append(r), tokens.append(t)))
    assert (sum(rows), sum(tokens)) == (8, 7 * 39 + 28)
    assert (encoded.computed_tokens, encoded.batches) == (CHUNK["cpu"], 1)
    assert (encoded.vectors[:7] == encoded.vectors[0]).all()
    assert not np.array_equal(encoded.vectors[7], encoded.vectors[0])


def test_no_prompts_make_no_vectors(llama):
    encoded = encode(encoders(llama)[0], [])
    assert (len(encoded.vectors), encoded.batches, encoded.computed_tokens, len(encoded.out_of_memory)) == (0, 0, 0, 0)


def test_the_models_own_weights_stay_what_they_were(prompts):
    """The fused decoder joins them, the other copies the modules around them: neither costs the memory again."""
    for name in ("llama", "gpt2"):
        model = make(CONFIGS[name])
        before = {k: v.clone() for k, v in model.state_dict().items()}
        size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}.values())
        fast, _ = encoders(model)
        encode(fast, prompts[:3])
        decoder = fast._decoder
        tensors = [t for layer in decoder._layers for t in layer if isinstance(t, torch.Tensor)] if name == "llama" else []
        tensors += list(model.parameters()) + ([] if name == "llama" else list(decoder._model.parameters()))
        assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) == size
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_prompt_above_the_budget_goes_alone_in_chunks(name):
    """The widest position-wise layer sees a chunk at a time, however long the prompt is."""
    config = CONFIGS[name].__class__(**(CONFIGS[name].to_dict() | {"max_position_embeddings": 4096}))
    fast, plain = encoders(make(config))
    seen = []
    if name == "llama":
        after = fast._decoder._after
        fast._decoder._after = lambda hidden, *rest: (seen.append(len(hidden)), after(hidden, *rest))
    else:
        for layer in fast._decoder._model.layers:
            layer.mlp._inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    long = np.random.default_rng(0).integers(0, VOCABULARY, 3_000).astype(np.int32)
    found = encode(fast, [long, long[:5]])
    assert set(seen) == {CHUNK["cpu"]}
    assert np.abs(found.vectors - encode(plain, [long, long[:5]]).vectors).max() < 1e-4


def test_two_lanes_grow_the_table_of_rotations_at_once():
    """A lane with short prompts, which began when there was no table, ends while another reads from its longer one."""
    config = CONFIGS["llama"].__class__(**(CONFIGS["llama"].to_dict() | {"max_position_embeddings": 4096}))
    decoder = encoders(make(config))[0]._decoder
    rotary, computing, go_on = decoder._rotary, Event(), Event()

    def late(wide, positions):
        table = rotary(wide, positions)
        if positions.shape[1] == 1_024:
            computing.set()
            assert go_on.wait(60)
        return table

    class Compared(int):
        def __gt__(self, other):
            found = int(self) > other
            go_on.set()
            other_lane.join()
            return found

    decoder._rotary = late
    other_lane = Thread(target=lambda: decoder._rotation(torch.arange(5), 5))
    other_lane.start()
    assert computing.wait(60)
    positions = torch.arange(3_000)
    decoder._rotation(positions, 3_000)
    cos, sin = decoder._rotation(positions, Compared(3_000))
    expected = [x[0, :, : decoder._head_size // 2] for x in rotary(torch.zeros(1), positions[None])]
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_the_last_layers_mlp_and_attention_see_pooled_rows_only(name, prompts):
    fast, _ = encoders(make(CONFIGS[name]), share=False)
    rows, tiles = [], []
    if name == "llama":
        after = fast._decoder._after
        fast._decoder._after = lambda hidden, *rest: (rows.append(len(hidden)), after(hidden, *rest))
    else:
        fast._decoder._model.layers[-1].mlp._inner.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    attend = attention.PackedAttention.__call__

    def count(self, layer, *args, last_tile_only=False, **options):
        tiles.append((layer, last_tile_only))
        return attend(self, layer, *args, last_tile_only=last_tile_only, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.PackedAttention, "__call__", count)
        encode(fast, [prompts[0], *prompts[::20]])
    batches = len(tiles) // 3
    of_last = rows if name == "gpt_neox" else rows[sum(rows) // CHUNK["cpu"] - batches :]
    assert of_last == [CHUNK["cpu"]] * batches, "a chunk is enough for the pooled rows of all prompts of a batch"
    assert set(tiles) == {(0, False), (1, False), (2, True)}


class Small:
    """A decoder on a machine whose memory holds `rows` rows of a batch."""

    def __init__(self, decoder, rows: int) -> None:
        self._decoder, self._rows, self.chunk = decoder, rows, 8
        decoder.chunk = 8
        self.refused = []

    def __call__(self, row):
        if len(row.input_ids) > self._rows:
            self.refused.append(len(row.input_ids))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._decoder(row)


def test_memory_that_runs_out_halves_the_batch_and_is_remembered(llama, prompts, caplog):
    fast, _ = encoders(llama, share=False)
    wanted = encode(fast, prompts).vectors
    fast._decoder = small = Small(fast._decoder, 352)
    found = encode(fast, prompts)
    assert np.abs(found.vectors - wanted).max() < 1e-5
    assert len(found.out_of_memory) == 0
    limits = [record.args[1] for record in caplog.records if "out of memory" in record.getMessage()]
    assert limits == sorted(limits, reverse=True)
    assert 176 <= limits[-1] <= 352
    refused = len(small.refused)
    encode(fast, prompts)
    assert len(small.refused) == refused, "the next shard is planned with what was learnt"


def test_a_prompt_that_does_not_fit_alone_is_told_and_the_others_are_encoded(llama, prompts):
    fast, plain = encoders(llama)
    fast._decoder = Small(fast._decoder, 128)
    lengths = np.array([len(p) for p in prompts])
    found = encode(fast, [*prompts, prompts[int(lengths.argmax())]])
    assert len(prompts) in found.out_of_memory, "each copy of it"
    assert not np.isfinite(found.vectors[found.out_of_memory]).any()
    rest = np.setdiff1d(np.arange(len(prompts)), found.out_of_memory)
    assert len(rest) > 100
    assert np.abs(found.vectors[rest] - encode(plain, [prompts[i] for i in rest]).vectors).max() < 1e-5


def test_prefixes_that_do_not_fit_are_computed_with_every_prompt(llama, prompts, caplog):
    fast, plain = encoders(llama)
    assert prefix.shared_prefixes(prompts).prefixes
    found = []
    decoder = fast._decoder

    def refuse_prefixes(row):  # once: the row that holds them
        if not found:
            found.append(row)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decoder(row)

    refuse_prefixes.chunk = decoder.chunk
    fast._decoder = refuse_prefixes
    vectors = encode(fast, prompts).vectors
    assert "prefixes that prompts share" in caplog.text
    assert np.abs(vectors - encode(plain, prompts).vectors).max() < 1e-5


def test_a_vector_that_is_not_finite_is_tried_again_in_float32(prompts):
    model = make(CONFIGS["llama"], torch.float16)
    with torch.no_grad():
        model.norm.weight.fill_(6e4)  # a component above 1.1 leaves float16
    fast, _ = encoders(model, dtype="float16")
    found = encode(fast, prompts)
    assert np.isfinite(found.vectors).all()
    assert 0 < found.retried_rows <= len(prompts)


# --- the budget that is found by itself ---


@pytest.mark.parametrize(("slow", "found"), [((), 1024), ((1024,), 2048), ((1024, 2048), 4096)])
def test_a_probe_takes_the_smallest_budget_that_is_as_fast_as_the_fastest(llama, prompts, monkeypatch, slow, found):
    clock, lengths = [0.0], []
    monkeypatch.setattr(prefill.time, "perf_counter", lambda: clock[0])
    fast, _ = encoders(llama)
    vectors = PrefillEncoder._vectors

    def timed(self, shard, members):
        tokens = int(shard.lengths[members].sum())
        assert len(self._decoder._layers) == decoders.PROBED_LAYERS
        lengths.append(tokens)
        clock[0] += tokens * (1.2 if tokens in slow else 1.0) / fast.lanes
        return vectors(self, shard, members)

    monkeypatch.setattr(PrefillEncoder, "_vectors", timed)
    fast.probe([1024, 2048, 4096], prompts)
    assert fast.max_batch_tokens == found
    assert sorted(set(lengths)) == [1024, 2048, 4096], "rows are full to the token"
    assert len(fast._decoder._layers) == 3


def test_a_probe_without_prompts_or_layers_of_its_own_leaves_the_budget(llama, prompts):
    fast, _ = encoders(llama)
    fast.probe([4096], [])
    assert fast.max_batch_tokens == 1024
    other, _ = encoders(make(CONFIGS["gpt2"]))
    other.probe([4096], prompts)
    assert other.max_batch_tokens == 1024


def test_the_probe_comes_after_the_check_and_says_what_it_found(llama, prompts, caplog):
    caplog.set_level("INFO", logger="prefill_cli.encoding.choice")
    options = EncoderOptions("last", None, False, "float32", 1024, probe=True)
    found = choice.choose_encoder(llama, options, prompts)
    assert f"{found.max_batch_tokens} tokens a batch, by a short probe" in caplog.text


# --- which encoder a run gets ---


def choose(model, prompts, dtype="float32"):
    return choice.choose_encoder(model, EncoderOptions("last", None, False, dtype, 1024), prompts)


def test_a_model_that_agrees_goes_the_fast_way_silently(llama, prompts, caplog):
    assert isinstance(choose(llama, prompts), PrefillEncoder)
    assert not caplog.text


@pytest.mark.parametrize(
    "config",
    [
        tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
        tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        tf.Qwen3NextConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
                           num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
                           moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2,
                           linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
        tf.GptOssConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
                        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        tf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_packed_rows_cannot_serve_go_the_plain_way_and_say_so(config, prompts, caplog):
    encoder = choose(make(config), prompts)
    assert isinstance(encoder, PlainEncoder)
    assert config.model_type in caplog.text
    assert "plain way" in caplog.text


def test_a_fast_encoder_that_differs_is_not_used(llama, prompts, caplog, monkeypatch):
    rotate = decoders._rotate
    monkeypatch.setattr(decoders, "_rotate", lambda x, cos, sin: rotate(x, cos, -sin))
    assert isinstance(choose(llama, prompts), PlainEncoder)
    assert "this llama model differ" in caplog.text


def test_a_fast_encoder_that_fails_is_not_used(llama, prompts, caplog, monkeypatch):
    def fail(self, row):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(FusedDecoder, "__call__", fail)
    assert isinstance(choose(llama, prompts), PlainEncoder)
    assert "no such kernel" in caplog.text


def test_the_check_sees_a_shared_prefix_and_more_than_one_tile(prompts):
    chosen = choice.samples(prompts)
    assert 4 <= len(chosen) <= 8
    assert max(map(len, chosen)) == choice.CHECKED_TOKENS
    assert prefix.shared_prefixes(chosen).prefixes
    assert choice.samples([]) == []


WIDE = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}  # sizes that the kernels fit


@pytest.mark.parametrize(
    "config",
    [tf.LlamaConfig(**WIDE, attention_bias=True), tf.Qwen3Config(**WIDE), tf.MistralConfig(**WIDE, sliding_window=50)],
    ids=lambda config: config.model_type,
)
def test_kernels_give_the_same_vectors_with_the_same_independence(config, prompts):
    """On machines that have tile units; on others this is PyTorch's own code once more."""
    model = make(config, torch.bfloat16)
    options = EncoderOptions("last", None, False, "bfloat16", 2048, compiled=True)
    plain = plain_encoder(model, options)
    fast = fast_encoder(model, plain, options)
    assert isinstance(fast._decoder._before, partial) == bool(load_kernels())
    exact = plain_encoder(make(config), EncoderOptions("last", None, False, "float32", 2048))
    ours, theirs = (min(c.cosine for c in compare(encoder, exact, prompts[::4])) for encoder in (fast, plain))
    assert ours > min(theirs, 0.9998) - 2e-4, "as near to float32 as Transformers in bfloat16 is"
    together = encode(fast, prompts).vectors
    assert np.array_equal(together, np.concatenate([encode(fast, [ids]).vectors for ids in prompts]))
    assert np.array_equal(together, encode(fast.without_sharing(), prompts).vectors)


def test_layers_go_through_pytorchs_compiler_with_the_same_vectors(prompts, monkeypatch):
    """As on a GPU. Traced and functionalised here, run without code generation: a user's machine may have no compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    model = make(CONFIGS["qwen3"])
    plain = plain_encoder(model, EncoderOptions("last", None, False, "float32", 2048))
    decoder = choose_decoder(model, chunk=256, compiled=True)
    assert decoder._before is not decoders._before_attention
    fast = PrefillEncoder(decoder, plain, pooling="last", dims=None, normalize=False, max_batch_tokens=2048)
    assert max(c.largest_difference for c in compare(fast, plain, prompts[::8])) <= 1e-5
