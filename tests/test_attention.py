"""Attention of a packed row against the formula, written out: for PyTorch's tiles and for the kernel of our own."""

from pathlib import Path

import pytest
import torch

from prefill_cli import machine
from prefill_cli.encoding import kernels
from prefill_cli.encoding.attention import TILE, PackedAttention, PrefixStates, Run
from prefill_cli.encoding.kernels import load_kernels
from prefill_cli.encoding.varlen import Varlen, load_varlen

SIZE = 32


def by_formula(query, key, value, scale, window=None, softcap=None):
    """[L, heads, size] of one whole prompt in float64."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    hidden = (j > i) | ((i - j >= window) if window else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def random(length, heads, seed, dtype):
    return torch.randn(length, heads, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(dtype, heads, kv_heads):
    """Packed rows, runs and, for each run's sequences, the whole prompt's query, key and value."""
    prefix = [random(70, n, 1, dtype) for n in (heads, kv_heads, kv_heads)]
    second = [torch.cat([p, random(9, n, 2, dtype)]) for p, n in zip(prefix, (heads, kv_heads, kv_heads), strict=True)]
    shapes = [(1, 1, -1), (3, 20, -1), (1, 64, -1), (2, 33, 0), (1, 130, 0), (1, 5, 1), (1, 60, 1)]  # count, length, context
    runs = [Run(0, 1, 70, prefix=0), Run(70, 1, 9, 70, context=0, prefix=1)]
    packed = [[p, s[70:]] for p, s in zip(prefix, second, strict=True)]
    whole = []
    for number, (count, length, context) in enumerate(shapes):
        before = [[x[:0] for x in prefix], prefix, second][context + 1]
        runs.append(Run(runs[-1].stop, count, length, len(before[0]), context))
        for i in range(count):
            own = [random(length, n, 100 + 10 * number + i, dtype) for n in (heads, kv_heads, kv_heads)]
            for parts, x in zip(packed, own, strict=True):
                parts.append(x)
            whole.append((runs[-1], i, [torch.cat([b, x]) for b, x in zip(before, own, strict=True)]))
    filling = [random(11, n, 99, dtype) for n in (heads, kv_heads, kv_heads)]
    return [torch.cat([*parts, x]) for parts, x in zip(packed, filling, strict=True)], runs, whole


@pytest.fixture(scope="module")
def own_kernel(tmp_path_factory):
    """Built here, by the compiler of this machine; where it has no tile units PyTorch's way is tested twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_kernels()


OPTIONS = [{}, {"window": 24}, {"window": 100}, {"softcap": 2.0}]


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (3, 3), (18, 1)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", ["float32", "bfloat16", "kernel"])
def test_every_sequence_attends_to_itself_and_its_prefix_only(way, options, heads, own_kernel):
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    packed, runs, whole = case(dtype, *heads)
    attention = PackedAttention(runs, PrefixStates(), own_kernel if way == "kernel" else None)
    out = attention(0, *packed, scale=0.3, **options)
    last = attention(0, *packed, scale=0.3, last_tile_only=True, **options)
    for run, i, (query, key, value) in whole:
        wanted = by_formula(query, key, value, 0.3, **options)[run.start :]
        rows = slice(run.row + i * run.length, run.row + (i + 1) * run.length)
        found = out[rows].view(run.length, heads[0], SIZE)
        assert (found - wanted).abs().max() < (1e-5 if way == "float32" else 0.03)
        assert torch.equal(last[rows][-1], out[rows][-1])
    assert not out[runs[-1].stop :].any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", ["float32", "bfloat16", "kernel"])
def test_a_sequence_has_the_same_bits_alone_and_without_its_prefix(way, options, own_kernel):
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    own = own_kernel if way == "kernel" else None
    packed, runs, whole = case(dtype, 6, 2)
    out = PackedAttention(runs, PrefixStates(), own)(0, *packed, scale=0.3, **options)
    for run, i, (query, key, value) in whole:
        alone = PackedAttention([Run(0, 1, len(query))], PrefixStates(), own)(0, query, key, value, scale=0.3, **options)
        rows = slice(run.row + i * run.length, run.row + (i + 1) * run.length)
        assert torch.equal(alone[run.start :], out[rows])


@pytest.mark.parametrize("way", ["bfloat16", "kernel"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_reaches_its_own_prompt_only(bad, way, own_kernel):
    packed, runs, _ = case(torch.bfloat16, 4, 2)
    clean = PackedAttention(runs, PrefixStates(), own_kernel if way == "kernel" else None)(0, *packed, scale=0.3)
    run = runs[4]
    for tensor in packed[:2]:
        broken = [t.clone() for t in packed]
        broken[0 if tensor is packed[0] else 1][run.stop - 5] = bad
        out = PackedAttention(runs, PrefixStates(), own_kernel if way == "kernel" else None)(0, *broken, scale=0.3)
        assert not torch.isfinite(out[run.stop - 5]).all()
        others = torch.ones(len(out), dtype=torch.bool)
        others[run.stop - TILE : run.stop] = False
        assert torch.equal(out[others], clean[others])


def causal_only(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal, scale):
    """The kernel of torch 2.10 in words: sequences end to end, queries aligned with the ends of their keys."""
    assert is_causal
    return windowed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=(-1, 0))


def windowed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False, num_splits=1):
    """That of torch 2.12 and later."""
    assert enable_gqa == (query.shape[1] != key.shape[1]) or window_size == (-1, 0)
    assert (num_splits, window_size[1], cu_seq_q.dtype, cu_seq_k.dtype) == (1, 0, torch.int32, torch.int32)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    parts = []
    for i in range(len(cu_seq_q) - 1):
        q, k, v = (x[e[i] : e[i + 1]] for x, e in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k)))
        whole = torch.cat([q.new_zeros(len(k) - len(q), *q.shape[1:]), q])
        window = None if window_size[0] < 0 else window_size[0] + 1
        parts.append(by_formula(whole, k, v, scale, window)[len(k) - len(q) :].to(q.dtype))
    return torch.cat(parts)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel", [causal_only, windowed])
def test_variable_length_attention_is_given_the_same_sequences(kernel, options, heads):
    packed, runs, whole = case(torch.bfloat16, *heads)
    calls = []
    kernel_of_torch = Varlen(kernel)
    kernel_of_torch._call = lambda *args, **named: (calls.append(named), kernel(*args, **named))[1]
    attention = PackedAttention(runs, PrefixStates(), varlen=kernel_of_torch)
    out = attention(0, *packed, scale=0.3, **options)
    last = attention(0, *packed, scale=0.3, last_tile_only=True, **options)
    for run, i, (query, key, value) in whole:
        wanted = by_formula(query, key, value, 0.3, **options)[run.start :]
        rows = slice(run.row + i * run.length, run.row + (i + 1) * run.length)
        assert (out[rows].view(run.length, heads[0], SIZE) - wanted).abs().max() < 0.03
        assert torch.equal(last[rows][-1], out[rows][-1])
    assert not out[runs[-1].stop :].any()
    served = "softcap" not in options and (kernel is windowed or "window" not in options)
    assert len(calls) == (2 if served else 0), "where the kernel does not know the kind, tiles serve"


def test_without_a_gpu_there_is_no_variable_length_attention(monkeypatch, caplog):
    assert load_varlen(torch.device("cpu")) is None
    assert not caplog.text
    assert load_varlen(torch.device("cuda")) is None or torch.cuda.is_available()
    assert torch.cuda.is_available() or "tiles serve" in caplog.text


def test_without_a_compiler_the_other_way_is_taken_and_said(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("/nowhere/g++", "false"):
        caplog.clear()
        monkeypatch.setenv("CXX", compiler)
        assert load_kernels() is None
        assert "no kernels.cpp is compiled" in caplog.text
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    caplog.clear()
    assert load_kernels() is None
    assert not caplog.text, "nothing is missing on a machine that has no use for it"


def test_the_kernel_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = []

    def compiler(command):
        built.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"library")

    monkeypatch.setattr(machine, "_compile", compiler)
    first = machine.library_path(kernels.SOURCE, ["g++"])
    assert first.read_bytes() == b"library"
    assert [p.name for p in (tmp_path / "prefill-score").iterdir()] == [first.name], "no scratch is left"
    assert machine.library_path(kernels.SOURCE, ["g++"]) == first
    assert len(built) == 1
    assert machine.library_path(kernels.SOURCE, ["clang++"]) != first
