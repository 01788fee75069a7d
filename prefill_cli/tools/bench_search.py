"""Exact search against what people use instead, on the same vectors: torch.topk over all scores, FAISS, USearch."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from prefill_cli.scoring.filters import Filters
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.topk import Catalogue, search
from prefill_cli.tools.peers import load_package

Vectors = npt.NDArray[np.float32]
Find = Callable[[Vectors], npt.NDArray[np.int64]]  # queries [n, d] → item rows [n, k]


def made_up_items(n: int, width: int, seed: int = 0) -> Items:
    """`n` standard-normal vectors; their ids are row numbers."""
    vectors = np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32)
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
    return Items(pa.array(np.arange(n)), vectors, norms, None, "", 0, {})


def bench_search(queries: Vectors, items: Items, k: int, repeat: int, device: str, peers: Sequence[str]) -> dict[str, Any]:
    """`repeat` passes of each way over all queries, taken in turn, the best of each.

    Returns sizes, and for each way `sec`, `queries_per_sec`, `ratio` (how many times as long as this tool it takes) and
    `same`, the share of its places that hold the same item.

    Raises:
        UsageError: a peer is not installed.
    """
    k = min(k, len(items))
    catalogue, nothing = Catalogue(items, None, device), Filters()

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
