"""Exact search against what people use instead, on the same vectors: torch.topk over all scores, FAISS, USearch."""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from prefill_cli.config import RunConfig
from prefill_cli.encoding.loading import choose_device
from prefill_cli.scoring.filters import Filters
from prefill_cli.scoring.items import Items, load_items
from prefill_cli.scoring.kernels import load_kernels
from prefill_cli.scoring.matrix import Matrix
from prefill_cli.scoring.topk import Catalogue, search
from prefill_cli.tools.peers import PEERS, load_package

SEARCHERS = ("faiss", "usearch")
Vectors = npt.NDArray[np.float32]
Find = Callable[[Vectors], npt.NDArray[np.int64]]  # queries [n, d] → item rows [n, k]


def made_up_items(n: int = 200_000, width: int = 576, seed: int = 0) -> Items:
    """`n` standard-normal vectors; their ids are row numbers."""
    vectors = np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32)
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
    return Items(pa.array(np.arange(n)), Matrix(vectors, width), norms, None, "", 0, {})


def bench_search_only(
    config: RunConfig, made_up: tuple[int, ...], queries: int, repeat: int, peers: Sequence[str]
) -> dict[str, Any]:
    """The search alone, without a model, for made-up queries near items.

    made_up: number and width of made-up items; none: those of --items, where there are any. Peers that are installed are
    measured without being named.
    """
    items = made_up_items(*made_up) if made_up or not config.items else load_items(config, None)
    rng = np.random.default_rng(1)
    near = items.matrix.take(rng.integers(0, len(items), queries))
    noise = rng.standard_normal(near.shape, dtype=np.float32) * near.std()
    installed = [name for name in SEARCHERS if find_spec(PEERS[name][0].partition(".")[0])]
    device = choose_device(config.device)
    return bench_search(near + noise / 2, items, config.top_k, repeat, device, list(dict.fromkeys((*peers, *installed))))


def bench_search(queries: Vectors, items: Items, k: int, repeat: int, device: str, peers: Sequence[str]) -> dict[str, Any]:
    """`repeat` passes of each way over all queries, taken in turn, the best of each.

    Returns sizes, and for each way `sec`, `queries_per_sec`, `ratio` (how many times as long as this tool it takes) and
    `same`, the share of its places that hold the same item.

    Raises:
        UsageError: a peer is not installed.
    """
    k = min(k, len(items))
    catalogue, nothing = Catalogue(items, None, device, load_kernels() if device == "cpu" else None), Filters()

    def own(queries: Vectors) -> npt.NDArray[np.int64]:
        return search(queries, catalogue, k, nothing).rows.reshape(len(queries), k)

    ways: dict[str, Find] = {"prefill-score": own, "torch.topk": _topk(items.vectors, k, device)}
    for name in peers:
        ways[name] = {"faiss": _faiss, "usearch": _usearch}[name](load_package(name), items.vectors, k)
    seconds, found = dict.fromkeys(ways, float("inf")), {}
    for way in ways.values():
        way(queries[:8])  # first-call costs
    for _ in range(repeat):
        for name, way in ways.items():
            began = time.perf_counter()
            found[name] = way(queries)
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return {
        "queries": len(queries),
        "items": len(items),
        "width": items.width,
        "k": k,
        "ways": {
            name: {
                "sec": round(seconds[name], 6),
                "queries_per_sec": round(len(queries) / seconds[name]),
                "ratio": round(seconds[name] / seconds["prefill-score"], 3),
                "same": round(float((found[name] == found["prefill-score"]).mean()), 6),
            }
            for name in ways
        },
    }


def _topk(vectors: Vectors, k: int, device: str, cells: int = 1 << 26) -> Find:
    """The product and torch.topk, as many queries at a time as 256 MB of scores allow."""
    on_device = torch.from_numpy(np.ascontiguousarray(vectors)).to(device)
    step = max(1, cells // len(vectors))

    def find(queries: Vectors) -> npt.NDArray[np.int64]:
        parts = torch.split(torch.from_numpy(queries), step)
        rows = [(part.to(device) @ on_device.T).topk(k).indices.cpu() for part in parts]
        return torch.cat(rows).numpy()

    return find


def _faiss(faiss: Any, vectors: Vectors, k: int) -> Find:
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors))

    def find(queries: Vectors) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = index.search(queries, k)[1]
        return rows

    return find


def _usearch(index: Any, vectors: Vectors, k: int) -> Find:
    def find(queries: Vectors) -> npt.NDArray[np.int64]:
        keys: npt.NDArray[np.int64] = index.search(vectors, queries, k, index.MetricKind.IP, exact=True).keys.astype(
            np.int64
        )
        return keys

    return find
