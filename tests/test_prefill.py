"""The prefill engine against the plain encoder: every family, every pooling, and bits that nothing around a prompt moves."""

import numpy as np
import pytest
import torch
import transformers as tf

from prefill_cli.encoding.choice import compare, fast_encoder, plain_encoder
from prefill_cli.encoding.decoders import FusedDecoder, TransformersDecoder
from prefill_cli.encoding.encoder import EncoderOptions

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
