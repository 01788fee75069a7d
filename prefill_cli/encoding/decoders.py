"""The layers of a model over a packed row of tokens: hidden states out, no logits, nothing kept between layers.

Two ways, one seam (Decoder). FusedDecoder is this project's own forward pass for the Llama family: one product for
query, key and value, one for gate and up, everything between products in one kernel where compiled. TransformersDecoder
runs Transformers' own code for every other family that takes its attention from the attention interface.

Both work through position-wise layers in chunks of a constant number of rows: one kernel choice whatever the batch, so
a row's bits do not depend on its neighbours, and memory for the widest layer's output stays that of a chunk however
long a prompt is (hybrid prefilling, PrefillOnly, arXiv 2505.07203).
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prefill_cli.encoding.attention import PackedAttention
from prefill_cli.encoding.kernels import Kernels

FUSED = ("llama", "mistral", "qwen2", "qwen3")
# Rotary tables that depend on the longest sequence of a call would make a prompt depend on its neighbours.
ROTARY_BY_LENGTH = ("dynamic", "longrope")
# What an attention layer may ask for and is not done here: sinks (GPT-OSS), position biases (T5, MPT).
NOT_DONE = ("s_aux", "position_bias")
# Layers that attend; any other kind keeps a state that would run from one prompt into the next.
ATTENDING = {"full_attention", "sliding_attention"}
INTERFACE = "prefill_score"
PROBED_LAYERS = 2  # enough for what one layer leaves in the cache for the next


class UnsupportedModelError(Exception):
    """The model needs something of attention or positions that packed batches do not give it."""


@dataclass(frozen=True)
class PackedRow:
    """One batch: sequences end to end, then filling up to a whole number of chunks.

    input_ids, positions: [R] int64 on the model's device. longest: tokens of the longest prompt in it. wanted: [w] rows
    whose hidden states are read, None: all.
    """

    input_ids: Tensor
    positions: Tensor
    longest: int
    attention: PackedAttention
    wanted: Tensor | None


class Decoder(Protocol):
    """A model's layers."""

    chunk: int  # rows of a packed row are a multiple of it

    def __call__(self, row: PackedRow) -> Tensor:
        """Hidden states after the final norm, [w, hidden] for the wanted rows or [R, hidden]."""
        ...

    def shallow(self) -> "Decoder | None":
        """Its first layers only, over the same weights, to time rows with; None where they cannot be had apart."""
        ...


def choose_decoder(model: Any, *, chunk: int, compiled: bool = False, kernels: Kernels | None = None) -> Decoder:
    """The fastest decoder that knows this model (a Transformers base model).

    Raises:
        UnsupportedModelError: none does; its text says why.
    """
    rotary = getattr(model, "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", "default")
    if set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(ROTARY_BY_LENGTH):
        raise UnsupportedModelError("its rotary positions depend on the longest prompt of a batch")
    if model.config.model_type in FUSED and model.config.hidden_act == "silu":
        return FusedDecoder(model, chunk=chunk, compiled=compiled, kernels=kernels)
    kept = set(getattr(model.config, "layer_types", None) or ()) - ATTENDING
    if kept:
        raise UnsupportedModelError(f"it has layers of kind {', '.join(sorted(kept))}")
    if getattr(model, "_supports_attention_backend", False):
        return TransformersDecoder(model, chunk=chunk)
    raise UnsupportedModelError("its attention (or what it has instead) is not Transformers' exchangeable one")


# --- the Llama family, fused ---


class _Layer(NamedTuple):
    """Weights of a layer. qkv: query, key and value heads end to end; gate_up: gate, then up."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # Qwen 3: over each head
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


class FusedDecoder:
    """Llama, Mistral, Qwen 2 and Qwen 3: pre-norm layers, rotary positions over whole heads, SiLU-gated MLP."""

    def __init__(self, model: Any, *, chunk: int, compiled: bool = False, kernels: Kernels | None = None) -> None:
        """compiled: by PyTorch's compiler. kernels: those of this project instead, where the model's sizes fit them.

        Joins the model's weights; the model's own parameters become views of the joined ones, so nothing is twice.
        """
        config = model.config
        attention = model.layers[0].self_attn
        self.chunk = chunk
        self._embed = model.embed_tokens
        self._rotary = model.rotary_emb
        self._norm = model.norm.weight.detach()
        self._eps = config.rms_norm_eps
        self._head_size = attention.head_dim
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._scale = attention.scaling
        self._layers = [_layer(layer, config) for layer in model.layers]
        self._rotations = torch.empty(0), torch.empty(0)
        self._before: Callable[..., None] = _before_attention
        self._after: Callable[..., None] = _after_attention
        if kernels and not (config.hidden_size % 16 or config.intermediate_size % 16 or self._head_size % 32):
            self._before = partial(_before_attention_by_kernels, kernels)
            self._after = partial(_after_attention_by_kernels, kernels)
        elif compiled:
            # Weights are arguments and chunks have one shape: one graph each, whatever the number of layers.
            self._before = torch.compile(_before_attention, dynamic=False)
            self._after = torch.compile(_after_attention, dynamic=False)

    def __call__(self, row: PackedRow) -> Tensor:
        cos, sin = self._rotation(row.positions, row.longest)
        hidden = self._embed(row.input_ids)
        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1 and row.wanted is not None
            query = hidden.new_empty(len(hidden), self._heads, self._head_size)
            key, value = hidden.new_empty(2, len(hidden), self._kv_heads, self._head_size)
            for rows in self._chunks(len(hidden)):
                self._before(
                    hidden[rows], cos[rows], sin[rows], layer.norm, layer.qkv, layer.qkv_bias,
                    layer.query_norm, layer.key_norm, self._eps, query[rows], key[rows], value[rows],
                )  # fmt: skip
            attended = row.attention(index, query, key, value, scale=self._scale, window=layer.window, last_tile_only=last)
            if last:  # nobody reads the other rows
                assert row.wanted is not None
                padded = F.pad(row.wanted, (0, -len(row.wanted) % self.chunk))
                hidden, attended = hidden[padded], attended[padded]
            for rows in self._chunks(len(hidden)):
                self._after(
                    hidden[rows], attended[rows], layer.out, layer.out_bias, layer.mlp_norm,
                    layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, self._eps,
                )  # fmt: skip
        normed = _rms_norm(hidden, self._norm, self._eps)
        return normed if row.wanted is None else normed[: len(row.wanted)]

    def shallow(self) -> "FusedDecoder":
        """See Decoder."""
        other = copy.copy(self)
        other._layers = self._layers[:PROBED_LAYERS]
        return other

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, rows, self.chunk)]

    def _rotation(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, head size / 2] in float32, from a table that grows with the longest prompt."""
        # Read once, as one: another lane may put a shorter table there at any time.
        cosines, sines = self._rotations
        if longest > len(cosines):
            length = max(1_024, 1 << (longest - 1).bit_length())
            wide = torch.zeros(1, dtype=torch.float32, device=positions.device)
            cos, sin = self._rotary(wide, torch.arange(length, device=positions.device)[None])
            half = self._head_size // 2  # the second half repeats the first
            cosines, sines = (x[0, :, :half].float().contiguous() for x in (cos, sin))
            self._rotations = cosines, sines
        return cosines[positions], sines[positions]


def _before_attention(
    hidden: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor | None,
    query_norm: Tensor | None, key_norm: Tensor | None, eps: float, query: Tensor, key: Tensor, value: Tensor,
) -> None:  # fmt: skip
    """Norm, projections, rotary positions: hidden [C, d] → into query [C, heads, size], key, value [C, KV heads, size]."""
    heads = [x.shape[1] for x in (query, key, value)]
    joined = F.linear(_rms_norm(hidden, norm, eps), qkv, bias).view(len(hidden), sum(heads), -1)
    q, k, v = torch.split(joined, heads, 1)
    if query_norm is not None and key_norm is not None:
        q, k = _rms_norm(q, query_norm, eps), _rms_norm(k, key_norm, eps)
    query.copy_(_rotate(q, cos, sin))
    key.copy_(_rotate(k, cos, sin))
    value.copy_(v)


def _after_attention(
    hidden: Tensor, attended: Tensor, out: Tensor, out_bias: Tensor | None, norm: Tensor,
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Output projection, residual, norm, MLP, residual: hidden [C, d] in place."""
    middle = hidden + F.linear(attended, out, out_bias)
    gate, up = F.linear(_rms_norm(middle, norm, eps), gate_up, gate_up_bias).chunk(2, -1)
    hidden.copy_(middle + F.linear((F.silu(gate.float()) * up.float()).to(hidden.dtype), down, down_bias))


def _before_attention_by_kernels(
    kernels: Kernels, hidden: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor | None,
    query_norm: Tensor | None, key_norm: Tensor | None, eps: float, query: Tensor, key: Tensor, value: Tensor,
) -> None:  # fmt: skip
    """The same as _before_attention."""
    joined = F.linear(kernels.add_norm(hidden, None, norm, eps), qkv, bias)
    kernels.rotate(joined, cos, sin, (query_norm, key_norm), eps, (query, key, value))


def _after_attention_by_kernels(
    kernels: Kernels, hidden: Tensor, attended: Tensor, out: Tensor, out_bias: Tensor | None, norm: Tensor,
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """The same as _after_attention."""
    normed = kernels.add_norm(hidden, F.linear(attended, out, out_bias), norm, eps)
    hidden += F.linear(kernels.gate(F.linear(normed, gate_up, gate_up_bias)), down, down_bias)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864), the halves of a head as pairs: x [C, heads, size], cos [C, size/2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _layer(layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _join(mlp.gate_proj, mlp.up_proj)
    by_layer = getattr(attention, "sliding_window", None)
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        norm=layer.input_layernorm.weight.detach(),
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=None if query_norm is None else query_norm.weight.detach(),
        key_norm=None if key_norm is None else key_norm.weight.detach(),
        out=attention.o_proj.weight.detach(),
        out_bias=_detached(attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight.detach(),
        down_bias=_detached(mlp.down_proj.bias),
        window=config.sliding_window if config.model_type == "mistral" else by_layer,
    )


def _join(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of several layers over the same input, end to end; theirs become views of these."""

    def join(name: str) -> Tensor:
        parts = [getattr(linear, name).detach() for linear in linears]
        whole = torch.cat(parts)
        for linear, view in zip(linears, torch.split(whole, [len(part) for part in parts]), strict=True):
            setattr(linear, name, nn.Parameter(view, requires_grad=False))
        return whole

    return join("weight"), None if linears[0].bias is None else join("bias")


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


# --- every other family, through Transformers' own code ---

_current = threading.local()  # .row: the batch that this thread is at


class TransformersDecoder:
    """Transformers' own forward pass over [1, R], with attention per sequence."""

    def __init__(self, model: Any, *, chunk: int) -> None:
        """Takes a copy of the model's structure over the same weights, so that the model itself stays as it is."""
        from transformers import AttentionInterface

        AttentionInterface.register(INTERFACE, _attention_interface)
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self.chunk = chunk
        self._model = copy.deepcopy(model, shared)
        self._model.set_attn_implementation(INTERFACE)  # a name without a mask function: no mask is made
        attending = [m for m in self._model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        for module in attending:
            module.is_last_of_model = module.layer_idx == max(m.layer_idx for m in attending)
        for layer in [m for m in self._model.modules() if isinstance(getattr(m, "mlp", None), nn.Module)]:
            is_last = any(getattr(m, "is_last_of_model", False) for m in layer.modules())
            layer.mlp = _InChunks(layer.mlp, chunk, wanted_only=is_last)

    def __call__(self, row: PackedRow) -> Tensor:
        _current.row = row
        hidden: Tensor = self._model(
            input_ids=row.input_ids[None], position_ids=row.positions[None], use_cache=False
        ).last_hidden_state[0]
        return hidden if row.wanted is None else hidden[row.wanted]

    def shallow(self) -> None:
        """See Decoder: families keep their layers in different places."""


class _InChunks(nn.Module):
    """A position-wise module, called on `chunk` positions at a time. wanted_only: on those that are read; others are 0."""

    def __init__(self, inner: nn.Module, chunk: int, wanted_only: bool) -> None:
        super().__init__()
        self._inner = inner
        self._chunk = chunk
        self._wanted_only = wanted_only

    def forward(self, hidden: Tensor) -> Tensor:
        wanted = _current.row.wanted if self._wanted_only else None
        if wanted is None:
            return self._in_chunks(hidden)
        out = torch.zeros_like(hidden)
        padded = F.pad(wanted, (0, -len(wanted) % self._chunk))
        out[:, wanted] = self._in_chunks(hidden[:, padded])[:, : len(wanted)]
        return out

    def _in_chunks(self, hidden: Tensor) -> Tensor:
        return torch.cat([self._inner(part) for part in torch.split(hidden, self._chunk, 1)], 1)


def _attention_interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls for attention: query [1, heads, R, size] and so on → [1, R, heads, size], no weights."""
    asked = sorted(name for name in NOT_DONE if others.get(name) is not None)
    if attention_mask is not None or asked or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"its attention is not only causal ({', '.join(asked) or 'a mask of its own'})")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    row: PackedRow = _current.row
    attended = row.attention(
        module.layer_idx,
        q,
        k,
        v,
        scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        last_tile_only=row.wanted is not None and module.is_last_of_model,
    )
    return attended.view(1, *q.shape[:2], -1), None
