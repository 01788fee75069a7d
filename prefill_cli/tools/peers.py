"""What people would use instead, over the same prompts: for `prefill-score bench --peer`.

vLLM is among them as the run has it, behind the seam of an encoder and with the same token ids (encoding/vllm.py).
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prefill_cli.encoding.vllm import check_usable
from prefill_cli.errors import UsageError

# Name → module, and what pip calls it.
PEERS = {
    "sentence-transformers": ("sentence_transformers", "sentence-transformers"),
    "vllm": ("vllm", "vllm"),
    "faiss": ("faiss", "faiss-cpu"),
    "usearch": ("usearch.index", "usearch"),
}
OF_TEXTS = ("sentence-transformers",)
SEARCHERS = ("faiss", "usearch")


def load_package(name: str) -> Any:
    """A peer's module; vLLM's is left for later.

    Raises:
        UsageError: no such peer, or it is not installed.
    """
    if name not in PEERS:
        raise UsageError(f"--peer must be one of {', '.join(PEERS)}, not {name!r}")
    module, package = PEERS[name]
    if name == "vllm":  # which is imported with care, in its own time
        return check_usable("cpu", "--peer vllm")
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"--peer {name} needs a package that is not installed: pip install {package}") from None


def load_encoder(name: str, folder: Path, dtype: str, device: str, limit: int | None) -> Callable[[Sequence[str]], Any]:
    """A function from prompts' texts to their last-token embeddings."""
    load = {"sentence-transformers": _sentence_transformers}[name]
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
