"""From a name to a model in memory, with everything that can be wrong with a model folder said before the weights load."""

import copy
import hashlib
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.encoding.pooling import read_json, stored_pooling
from prefill_cli.errors import ModelError, UsageError, first_line
from prefill_cli.machine import MAPPED

log = logging.getLogger(__name__)
Stamp = tuple[int, int, int]  # inode, size and mtime
# Tensors of a checkpoint that the forward pass has no use for: the vocabulary head, under the names that families give it.
UNUSED_HEADS = ("lm_head.", "embed_out.", "output_layer.", "head.")
UNUSED_BUFFERS = (".masked_bias", ".attn.bias", ".attention.bias", ".inv_freq")  # what old checkpoints stored beside weights
PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
# What shapes the answer beside the weights: configuration, vocabulary, template, pooling, code (under --trust-remote-code).
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*_Pooling/config.json")
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # the CPU, MPS, and cuBLAS and cuDNN


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder says of itself before any weight is read."""

    name: str  # as the user gave it
    path: Path
    config: Any  # transformers' configuration
    hidden_size: int
    vocabulary: int  # rows of the embedding matrix
    positions: int | None  # tokens that the model can attend to; None where nothing limits them
    pooling: str
    weights_sha256: str
    files_sha256: str  # SMALL_FILES
    stamps: tuple[tuple[Path, "Stamp"], ...] = ()  # of the weights, which the model may read from their mapped files

    def check_unchanged(self, *, replaced: bool = False) -> None:
        """That no weights were written over. replaced: nor replaced by other files, which a loaded model does not see.

        Raises:
            ModelError: they were.
        """
        for path, stamp in self.stamps:
            try:
                now = _stamp(path)
            except OSError:
                now = None
            written_over = now is not None and now != stamp and now[0] == stamp[0]
            if written_over or (replaced and now != stamp):
                raise ModelError(f"{path}: the weights changed while the run was using them; start the run again")

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a token in the layers, about: 2 for each of 12 hidden² weights of each layer."""
        text = self.config.get_text_config()
        return 24.0 * self.hidden_size**2 * (getattr(text, "num_hidden_layers", None) or 1)


def open_model_folder(config: RunConfig) -> ModelFolder:
    """Find the model's folder (fetching it from the hub where it is a hub name) and check it.

    Raises:
        ModelError: not found, incomplete, pickled weights only, code of its own without --trust-remote-code.
    """
    path = _find_folder(config)
    weights = check_files(path, config.trust_remote_code)
    stamps = tuple((file, _stamp(file)) for file in weights)  # before their digest
    with ThreadPoolExecutor(1) as pool:
        weights_sha256 = pool.submit(_digest, weights)  # meanwhile
        settings = _read_config(path, config)
    text = settings.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    widths = [getattr(text, name, None) for name in ("hidden_size", "vocab_size")]
    if not all(isinstance(width, int) for width in widths) or getattr(settings, "is_encoder_decoder", False):
        raise ModelError(f"{path}: config.json is a {settings.model_type} model, not a causal language model")
    pooling = config.pooling if config.pooling != "auto" else stored_pooling(path) or "last"
    others = sorted(p for pattern in SMALL_FILES for p in path.glob(pattern))
    return ModelFolder(
        config.model,
        path,
        settings,
        getattr(text, "word_embed_proj_dim", text.hidden_size),  # OPT projects its last hidden states to this width
        text.vocab_size,
        positions if isinstance(positions, int) and positions > 0 else None,  # XLNet says -1 for "no limit"
        pooling,
        weights_sha256.result(),
        _digest(others),
        stamps,
    )


def _read_config(path: Path, config: RunConfig) -> Any:
    """Transformers' configuration of a folder, which also imports Transformers."""
    quiet_transformers()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a broken config.json surfaces as any kind
        raise ModelError(f"{path}: config.json is not a model that this Transformers knows: {first_line(error)}") from None


def _find_folder(config: RunConfig) -> Path:
    path = Path(config.model).expanduser()
    if path.is_dir():
        if config.revision:
            raise UsageError(f"--revision belongs to a hub name, but --model {config.model} is a folder")
        return path
    looks_local = config.model.startswith((".", "/", "~")) or config.model.count("/") > 1
    if path.exists() or looks_local:
        raise ModelError(f"--model {config.model}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    patterns = ["*.safetensors", *(p for p in SMALL_FILES if p != "*.py" or config.trust_remote_code)]
    try:
        return Path(
            snapshot_download(
                config.model, revision=config.revision, local_files_only=config.offline, allow_patterns=patterns
            )
        )
    except LocalEntryNotFoundError:  # its own text advises on Python arguments
        why = "--offline forbids to ask the hub" if config.offline else "the hub cannot be asked (offline, or no connection)"
        raise ModelError(f"--model {config.model}: no such folder, not in the local cache, and {why}") from None
    except Exception as error:  # network, permission, absence: the library has a class for each
        raise ModelError(f"--model {config.model}: no such folder, and not from the hub: {first_line(error)}") from None


def check_files(path: Path, trust_remote_code: bool) -> list[Path]:
    """The weight files of a model folder.

    Raises:
        ModelError: no configuration, no safetensors, a missing piece, code of its own.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = path / name
        if name == "config.json" and not file.exists():
            raise ModelError(f"{path}: no config.json, so this is not a Transformers model folder")
        if file.exists() and "auto_map" in read_json(file) and not trust_remote_code:
            raise ModelError(
                f"{file}: the model names Python code of its own (auto_map), which runs only with --trust-remote-code; "
                "read that code first, or remove auto_map where Transformers' own class is meant"
            )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickles = sorted(p.name for pattern in PICKLED for p in path.glob(pattern))
        if pickles:
            raise ModelError(
                f"{path}: only pickled weights ({', '.join(pickles[:3])}), which can run code when they are loaded; convert "
                "them where you trust them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise ModelError(f"{path}: no weights (*.safetensors)")
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: no weight_map, so there is no telling where the tensors are")
        missing = sorted(set(map(str, weight_map.values())) - {p.name for p in weights})
        if missing:
            raise ModelError(f"{path}: the weights are incomplete: {', '.join(missing[:3])} is missing")
    return weights


def quiet_transformers() -> None:
    """No bars and no advice on stderr: what matters is checked and said here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def choose_device(requested: str, *, elsewhere: bool = False) -> str:
    """'cpu', 'cuda', 'cuda:1' or 'mps'. elsewhere: a GPU that is asked for by name may be another machine's.

    Raises:
        UsageError: the requested one is not there.
    """
    import torch

    kind = requested.partition(":")[0]
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if requested == "auto":
        return next(name for name, available in there.items() if available)
    if elsewhere and requested == "cuda":
        return requested
    if not there[kind] or (":" in requested and int(requested[5:]) >= torch.cuda.device_count()):
        raise UsageError(f"--device {requested}: this machine has no such device that torch can use")
    return requested


def choose_dtype(requested: str, device: str, *, elsewhere: bool = False) -> str:
    """'auto' → bfloat16 where the hardware multiplies it natively, else float32. elsewhere: see choose_device.

    Raises:
        UsageError: 'auto' for a GPU that this machine does not have.
    """
    import torch

    if elsewhere and device == "cuda" and not torch.cuda.is_available():
        if requested == "auto":
            raise UsageError("--device cuda: this machine has no GPU to look at, so give --dtype, bfloat16 or float32")
        return requested
    if device.startswith("cuda"):
        native = torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
    else:
        native = device == "cpu" and torch.cpu._is_avx512_bf16_supported()
    if requested == "auto":
        return "bfloat16" if native else "float32"
    if device == "cpu" and (requested == "float16" or (requested == "bfloat16" and not native)):
        log.warning("this CPU has no fast %s; --dtype float32 will most likely be faster", requested)
    return requested


def load_base_model(folder: ModelFolder, device: str, dtype: str, trust_remote_code: bool) -> Any:
    """The model without its vocabulary head, in evaluation mode.

    Raises:
        ModelError: a tensor is missing, superfluous or ill-shaped; not enough memory.
    """
    quiet_transformers()
    import torch
    from transformers import AutoModel

    folder.check_unchanged(replaced=True)  # first, because Transformers would take a folder that is gone for a hub name
    MAPPED.update({path: (size, ModelError) for path, (_, size, _) in folder.stamps})
    try:
        model, report = AutoModel.from_pretrained(
            folder.path,
            dtype=getattr(torch, dtype),
            ignore_mismatched_sizes=True,  # reported below by name; Transformers' own error names none
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        model = model.to(device)
    except Exception as error:  # damaged safetensors, unknown class, ill-shaped tensors
        if is_out_of_memory(error):
            raise ModelError(f"{folder.path}: the model does not fit the memory of {device}: {first_line(error)}") from None
        raise ModelError(f"{folder.path}: the model cannot be loaded: {first_line(error)}") from None
    folder.check_unchanged(replaced=True)
    unexpected = [k for k in report["unexpected_keys"] if not (k.startswith(UNUSED_HEADS) or k.endswith(UNUSED_BUFFERS))]
    ill_shaped = [str(k[0] if isinstance(k, tuple) else k) for k in report["mismatched_keys"]]
    for what, names in (
        ("missing from the weights", report["missing_keys"]),
        ("without a place in the model", unexpected),
        ("of another shape than config.json says", ill_shaped),
    ):
        if names:
            raise ModelError(f"{folder.path}: tensors {what} ({len(names)}): {', '.join(sorted(names)[:3])}")
    torch.set_float32_matmul_precision("highest")  # float32 means float32, whatever a model's own code asked for
    return model.eval()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; most of torch's allocators say so in words only."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def float32_copy(model: Any) -> Any:
    """The same weights in float32, the model itself where it is float32 already."""
    return model if next(model.parameters()).element_size() == 4 else copy.deepcopy(model).float()


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(files: Iterable[Path]) -> str:
    """One digest of several files' names and contents."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
