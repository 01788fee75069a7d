"""What people would use instead, over the same texts: for `prefill-score bench --peer`."""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prefill_cli.errors import UsageError

# Name → module, and what pip calls it.
PEERS = {
    "sentence-transformers": ("sentence_transformers", "sentence-transformers"),
    "vllm": ("vllm", "vllm"),
    "faiss": ("faiss", "faiss-cpu"),
    "usearch": ("usearch.index", "usearch"),
}
ENCODERS = ("sentence-transformers", "vllm")  # the others search


def load_package(name: str) -> Any:
    """A peer's module.

    Raises:
        UsageError: no such peer, or it is not installed.
    """
    if name not in PEERS:
        raise UsageError(f"--peer must be one of {', '.join(PEERS)}, not {name!r}")
    module, package = PEERS[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"--peer {name} needs a package that is not installed: pip install {package}") from None


def load_encoder(name: str, folder: Path, dtype: str, device: str, limit: int | None) -> Callable[[Sequence[str]], Any]:
    """A function from prompts' texts to their last-token embeddings."""
    load = {"sentence-transformers": _sentence_transformers, "vllm": _vllm}[name]
    return load(load_package(name), folder, dtype, device, limit)


def _sentence_transformers(
    package: Any, folder: Path, dtype: str, device: str, limit: int | None
) -> Callable[[Sequence[str]], Any]:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # type: ignore[import-not-found]

    # Said outright that it is text: version 6 puts plain strings through a chat template otherwise.
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    words = Transformer(str(folder), modality_config=text, module_output_name="token_embeddings")
    words.auto_model.to(getattr(torch, dtype))
    pooling = Pooling(words.auto_model.config.hidden_size, pooling_mode="lasttoken")
    model = package.SentenceTransformer(modules=[words, pooling], device=device)
    if limit:
        model.max_seq_length = limit
    return lambda texts: model.encode(list(texts), batch_size=32, show_progress_bar=False)


def _vllm(package: Any, folder: Path, dtype: str, device: str, limit: int | None) -> Callable[[Sequence[str]], Any]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    model = package.LLM(
        model=str(folder), runner="pooling", dtype=dtype, max_model_len=min(limit or 4096, 4096), enable_prefix_caching=True
    )

    def encode(texts: Sequence[str]) -> Any:
        model.reset_prefix_cache()  # every pass begins where a nightly run begins
        return model.embed(list(texts), use_tqdm=False)

    return encode
