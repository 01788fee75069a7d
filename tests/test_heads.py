"""Heads: what a file must hold, and scores that equal the network over concatenated pairs."""

import json
import re
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import HIDDEN, PROJECT, make_tokenizer, reference_vectors, write_items
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.errors import ItemsError, UsageError
from prefill_cli.scoring import scan, topk
from prefill_cli.scoring.filters import ItemIndex
from prefill_cli.scoring.heads import ACTIVATIONS, PairHead, load_head
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.matrix import Matrix
from prefill_cli.scoring.topk import Catalogue, search

MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class Network(nn.Module):
    """What a user has trained: `layers` as docs/models.md says, saved by one line."""

    def __init__(self, widths, activation="relu", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activation = MODULES[activation]()

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(self.activation(x) if i else x)
        return x


def save(path, network, kind="mlp", activation="relu", **changes):
    tensors = {k: v.detach().contiguous() for k, v in network.state_dict().items()} | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"head": kind, "activation": activation})
    return path


def items_of(vectors, bias=None):
    norms = np.linalg.norm(vectors.astype(float), axis=1)
    return Items(pa.array(range(len(vectors))), Matrix(vectors, vectors.shape[1]), norms, bias, "", 0, {})


def by_pairs(network, queries, vectors, bias=0.0):
    """[n, N] scores in float64 of the network over concatenated pairs, as float32."""
    n, m = len(queries), len(vectors)
    pairs = np.hstack([np.repeat(queries, m, 0), np.tile(vectors, (n, 1))]).astype(np.float64)
    with torch.inference_mode():
        return network.double()(torch.from_numpy(pairs)).numpy().reshape(n, m) + bias


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.standard_normal((23, 20), dtype=np.float32), rng.standard_normal((400, 12), dtype=np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("widths", [(32, 40, 1), (32, 16, 24, 1), (32, 9, 8, 7, 1)], ids=len)
def test_scores_are_the_networks_over_concatenated_pairs(tmp_path, data, widths, activation):
    queries, vectors = data
    network = Network(widths, activation)
    bias = np.random.default_rng(1).standard_normal(400).astype(np.float32)
    head = PairHead(load_head(save(tmp_path / "h.safetensors", network, activation=activation), "mlp", 20), 20)
    found = search(queries, Catalogue(items_of(vectors, bias), head=head), 50, topk.Filters())
    expected = by_pairs(network, queries, vectors, bias)
    rows, scores = found.rows.reshape(23, 50), found.scores.reshape(23, 50)
    assert np.abs(scores - np.take_along_axis(expected, rows, 1)).max() < 1e-5
    best = -np.sort(-expected, axis=1)[:, :50]
    assert np.abs(scores - best).max() < 1e-5
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize("widths", [(32, 40, 1), (32, 16, 24, 1)], ids=len)
def test_a_pairs_score_has_the_same_bits_in_any_company(tmp_path, data, widths, monkeypatch):
    queries, vectors = data
    head = PairHead(load_head(save(tmp_path / "h.safetensors", Network(widths)), "mlp", 20), 20)

    def table(queries, k, catalogue):
        found = search(queries, catalogue, k, topk.Filters())
        return found.rows.reshape(len(queries), k), found.scores.reshape(len(queries), k)

    rows, scores = table(queries, 400, Catalogue(items_of(vectors), head=head))
    known = np.empty((23, 400), np.float32)
    np.put_along_axis(known, rows, scores, 1)
    shorter = table(queries, 7, Catalogue(items_of(vectors), head=head))
    assert shorter[0].tolist() == rows[:, :7].tolist()
    assert shorter[1].tobytes() == scores[:, :7].tobytes()
    monkeypatch.setattr(scan, "PAIR_BLOCK", 64)
    monkeypatch.setattr(scan, "SHARE_OF_MEMORY", 0)  # parts are computed block by block
    monkeypatch.setattr(scan, "EXACT_PAIRS", 3)
    alone = table(queries[[5]], 9, Catalogue(items_of(vectors), head=head))
    assert alone[0].tolist() == rows[[5], :9].tolist()
    assert alone[1].tobytes() == scores[[5], :9].tobytes()
    some = np.array([399, 3, 17, 200])
    few = table(queries, 2, Catalogue(items_of(vectors[some]), head=head))
    assert few[1].tobytes() == np.take_along_axis(known[:, some], few[0], 1).tobytes()


def test_filters_and_short_candidate_lists_go_with_a_head(tmp_path, data):
    queries, vectors = data
    network = Network((32, 40, 1))
    head = PairHead(load_head(save(tmp_path / "h.safetensors", network), "mlp", 20), 20)
    index = ItemIndex(pa.array(range(400)))
    exclude = pa.chunked_array([pa.array([[7, 8, 9]] * 23)])
    candidates = pa.chunked_array([pa.array([None, list(range(30))] * 11 + [list(range(300))], pa.list_(pa.int64()))])
    for longest in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topk, "SHORT_LIST", longest)
            found = search(queries, Catalogue(items_of(vectors), head=head), 10, index.filters(exclude, candidates))
        scores = by_pairs(network, queries, vectors)
        for user, (a, b) in enumerate(pairwise(found.offsets)):
            may = np.setdiff1d(np.arange(400 if user % 2 == 0 and user < 22 else 30 if user < 22 else 300), [7, 8, 9])
            expected = may[np.argsort(-scores[user, may], kind="stable")][:10]
            assert found.rows[a:b].tolist() == expected.tolist()


def test_items_that_a_head_cannot_tell_apart_stand_in_row_order(tmp_path, data, monkeypatch):
    monkeypatch.setattr(scan, "ROOM", 10)
    queries, vectors = data
    head = PairHead(load_head(save(tmp_path / "h.safetensors", Network((32, 40, 1))), "mlp", 20), 20)
    found = search(queries, Catalogue(items_of(np.tile(vectors[:1], (300, 1))), head=head), 20, topk.Filters())
    assert found.rows.reshape(23, 20).tolist() == [list(range(20))] * 23


def test_the_bound_of_a_scan_holds(tmp_path, data):
    queries, vectors = data
    for activation in ACTIVATIONS:
        for scale in (1, 1e4):
            network = Network((32, 64, 32, 1), activation)
            head = PairHead(load_head(save(tmp_path / "h.safetensors", network, activation=activation), "mlp", 20), 20)
            users, items = head.users(queries * np.float32(scale)), head.items(vectors * np.float32(scale))
            reach, error = head.reach_and_error(users, items.abs().amax(0).double().numpy())
            for user in range(23):
                scanned = head.scanned(users[user], items, torch.empty_like(items)).double().numpy()
                exact = head.exact(users[user].expand_as(items), items, None)
                assert (np.abs(scanned - exact) <= error[user] + 2.0**-24 * np.abs(exact)).all()
                assert (np.abs(exact) <= reach[user]).all()


def test_a_user_tower_comes_before_the_product(tmp_path, data):
    queries, _ = data
    network = Network((20, 30, 12), "tanh")
    head = load_head(save(tmp_path / "h.safetensors", network, "user_tower", "tanh"), "user_tower", 20)
    together = head.tower(queries)
    with torch.inference_mode():
        assert np.abs(together - network(torch.from_numpy(queries)).numpy()).max() < 1e-5
    assert np.concatenate([head.tower(queries[[i]]) for i in range(23)]).tobytes() == together.tobytes()
    assert head.tower(queries[:0]).shape == (0, 12)


BAD = [
    ({"layers.1.bias": None}, {}, "tensors missing: layers.1.bias"),
    ({"layers.0.weight": None}, {}, "tensors missing: layers.0.weight"),
    ({"scale": torch.ones(1)}, {}, "tensors without a place in the head: scale"),
    ({"layers.3.weight": torch.ones(1, 1)}, {}, "tensors missing: layers.2.weight, layers.2.bias, layers.3.bias"),
    ({"layers.0.bias": torch.ones(39)}, {}, r"layers.0.bias is \[39\]; it must be \[40\]"),
    ({"layers.1.weight": torch.ones(2, 40)}, {}, r"layers.1.weight is \[2, 40\]; it must be \[1, 40\]"),
    ({"layers.1.weight": torch.ones(1, 41)}, {}, r"layers.1.weight is \[1, 41\]; it must be \[1, 40\]"),
    ({"layers.0.weight": torch.ones(40, 20)}, {}, r"its columns are the user's, 20, and then the item's"),
    ({"layers.1.bias": torch.tensor([float("nan")])}, {}, "layers.1.bias holds NaN or infinity"),
    ({"layers.1.bias": torch.ones(1, dtype=torch.int32)}, {}, "not of floats: layers.1.bias"),
    ({}, {"kind": "tower"}, "head = mlp or user_tower, not 'tower'"),
    ({}, {"kind": "user_tower"}, "kind user_tower, which goes with --score dot or cosine"),
    ({}, {"activation": "rely"}, r"activation must be relu, gelu, silu, tanh, not 'rely' \(did you mean 'relu'\?\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "metadata", "message"), BAD, ids=[m for _, _, m in BAD])
def test_what_is_wrong_with_a_head_is_named(tmp_path, changes, metadata, message):
    path = save(tmp_path / "h.safetensors", Network((32, 40, 1)), **(metadata | changes))
    with pytest.raises(ItemsError, match=message):
        load_head(path, "mlp", 20)


def test_a_head_that_is_no_file_or_no_safetensors_is_an_error(tmp_path):
    with pytest.raises(ItemsError, match="no such file"):
        load_head(tmp_path / "h.safetensors", "mlp", 20)
    (tmp_path / "h.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ItemsError, match="not readable as safetensors"):
        load_head(tmp_path / "h.safetensors", "mlp", 20)


def test_a_run_scores_with_a_head_and_says_so(job, tmp_path):
    network = Network((HIDDEN + 12, 16, 1))
    path = save(tmp_path / "h.safetensors", network)
    items = write_items(tmp_path / "small.parquet", dim=12)
    with pytest.raises(UsageError, match="--score mlp needs --head"):
        job.config(score="mlp")
    job.run(score="mlp", head=path, items=items)
    made = json.loads((job.out / "_manifest.json").read_text())
    assert made["fingerprint"]["head_sha256"]
    found = pq.read_table(job.out / "part-00000.parquet")
    queries = reference_vectors(job.model, make_tokenizer()(job.prompts)["input_ids"])
    vectors = np.stack(pq.read_table(items)["embedding"].to_numpy())
    expected = by_pairs(network, queries, vectors)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :5]
    assert found["item_ids"].to_pylist() == [[f"i{i}" for i in row] for row in order]
    assert np.abs(np.array(found["scores"].to_pylist()) - np.take_along_axis(expected, order, 1)).max() < 1e-4


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_a_run_with_a_user_tower(job, tmp_path, score):
    network = Network((HIDDEN, 16, 12))
    path = save(tmp_path / "h.safetensors", network, "user_tower")
    items = write_items(tmp_path / "small.parquet", dim=12)
    job.run(score=score, head=path, items=items)
    queries = reference_vectors(job.model, make_tokenizer()(job.prompts)["input_ids"])
    vectors = np.stack(pq.read_table(items)["embedding"].to_numpy())
    with torch.inference_mode():
        users = network(torch.from_numpy(queries)).numpy()
    if score == "cosine":
        users, vectors = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (users, vectors))
    order = np.argsort(-(users @ vectors.T), axis=1, kind="stable")[:, :5]
    assert pq.read_table(job.out / "part-00000.parquet")["item_ids"].to_pylist() == [[f"i{i}" for i in r] for r in order]


def test_items_of_another_width_than_the_heads_are_refused_with_4(job, tmp_path):
    path = save(tmp_path / "h.safetensors", Network((HIDDEN + 12, 16, 1)))
    line = ["run", str(job.inputs), "-m", str(job.model), "-i", str(job.items), "--score", "mlp", "--head", str(path)]
    done = CliRunner().invoke(cli.app, line)
    assert (done.exit_code, "takes items of 12" in done.stderr) == (4, True)


def test_a_user_whose_scores_would_leave_float32_is_rejected(tmp_path, job):
    network = Network((HIDDEN + 12, 16, 1))
    with torch.no_grad():
        network.layers[1].weight.fill_(3e38)
    path = save(tmp_path / "h.safetensors", network)
    items = write_items(tmp_path / "small.parquet", dim=12)
    totals = job.run(score="mlp", head=path, items=items, max_rejects="100%")
    assert totals["reject_reasons"] == {"not_finite": 30}


def test_a_layer_within_that_leaves_float32_is_told_apart(tmp_path):
    network = Network((2, 2, 1, 1))
    numbers = ([[1e20, 1e20], [1e20, 5e19]], [0, 0], [[1e20, -5e19]], [0], [[1e-20]], [0])
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), numbers, strict=True):
            parameter.copy_(torch.tensor(values))
    head = PairHead(load_head(save(tmp_path / "h.safetensors", network), "mlp", 1), 1)
    items = items_of(np.linspace(0.1, 1, 5, dtype=np.float32)[:, None])
    assert Catalogue(items, head=head).overflowing(np.array([[0.5], [0.0]], np.float32)).tolist() == [True, True]


def test_inspect_says_what_a_head_is(tmp_path):
    path = save(tmp_path / "h.safetensors", Network((32, 40, 1), "gelu"), activation="gelu")
    done = CliRunner().invoke(cli.app, ["inspect", str(path), "--json"])
    found = json.loads(done.stdout)
    found = found[0] if isinstance(found, list) else found
    assert (done.exit_code, found["kind"], found["facts"]["layers"]) == (0, "head", "40 → 1")
    save(path, Network((32, 40, 1)), **{"layers.0.bias": None})
    done = CliRunner().invoke(cli.app, ["inspect", str(path), "--json"])
    assert (done.exit_code, "tensors missing: layers.0.bias" in done.stdout) == (4, True)


def test_the_documents_lines_save_a_head_that_is_read():
    block = next(
        b
        for b in re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / "models.md").read_text(), re.DOTALL)
        if "layers." in b
    )
    network = Network((32, 40, 1))
    exec(textwrap.dedent(block), {"layers": network.layers})
    assert load_head(Path("head.safetensors"), "mlp", 20).outputs == 1
