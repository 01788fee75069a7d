"""Which encoder a run gets: the fast one where it knows the model and agrees with the plain one, else the plain one.

vLLM's, which a run has to ask for, is held to the plain one in the same way.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefill_cli.encoding.budget import CHUNK, affordable
from prefill_cli.encoding.decoders import UnsupportedModelError, choose_decoder
from prefill_cli.encoding.encoder import Encoder, EncoderOptions
from prefill_cli.encoding.kernels import load_kernels
from prefill_cli.encoding.loading import ModelFolder, load_base_model
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.encoding.vllm import VllmEncoder
from prefill_cli.encoding.vllm_engine import load_vllm
from prefill_cli.errors import ModelError, first_line

log = logging.getLogger(__name__)
Ids = npt.NDArray[np.int32]

# How far vectors of length 1 may lie apart, as 1 - cosine, and still be the same but for rounding.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3, "float16": 5e-4}
CHECKED_PROMPTS = 3
CHECKED_TOKENS = 160  # of each: enough for several tiles of attention, and a second or so of a small model


@dataclass(frozen=True)
class Comparison:
    """Of one prompt's fast and plain vector, both scaled to length 1."""

    tokens: int
    cosine: float
    largest_difference: float  # of a component


def choose_vllm(
    folder: ModelFolder,
    options: EncoderOptions,
    prompts: Sequence[Ids],
    device: str,
    limit: int | None,
    trust_remote_code: bool,
) -> VllmEncoder:
    """vLLM's encoder, if it gives some of the run's own `prompts` the vectors that the plain one gives them.

    The plain one goes first and leaves its memory to vLLM.

    Raises:
        ModelError: vLLM cannot serve the model, or gives other vectors.
    """
    some = samples(prompts)
    expected: list[npt.NDArray[np.float32]] | None = None
    try:
        model = load_base_model(folder, device, options.dtype, trust_remote_code)
    except ModelError as error:  # quantised weights, or too many of them: what people have vLLM for
        log.warning("vLLM's vectors are not held to plain Transformers': %s", error)
    else:
        expected = one_by_one(plain_encoder(model, options), some)
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    encoder = load_vllm(folder, options, device, limit, trust_remote_code)
    found = encoder.encode(some, lambda *_: None).vectors
    worst = 0.0 if expected is None else max((1 - c.cosine for c in comparisons(some, found, expected)), default=0.0)
    if worst > TOLERANCE[options.dtype]:
        raise ModelError(
            f"{folder.path}: vLLM's vectors differ from plain Transformers' (1 - cosine {worst:.1e}, allowed "
            f"{TOLERANCE[options.dtype]:.0e}); prefill-score verify --backend vllm shows them; leave out --backend vllm"
        )
    return encoder


def choose_encoder(model: Any, options: EncoderOptions, prompts: Sequence[Ids]) -> Encoder:
    """The fast encoder, if it gives some of the run's own `prompts` the vectors that the plain one gives them."""
    plain = plain_encoder(model, options)
    try:
        fast = fast_encoder(model, plain, options)
        worst = max((1 - c.cosine for c in compare(fast, plain, samples(prompts))), default=0.0)
        if options.probe and worst <= TOLERANCE[options.dtype]:
            fast.probe(affordable(model.config.get_text_config().hidden_size, options.dtype, str(plain.device)), prompts)
            log.info("%d tokens a batch, by a short probe", fast.max_batch_tokens)
    except UnsupportedModelError as error:
        log.warning("%s models go the plain way, which is slower: %s", model.config.model_type, error)
        return plain
    except Exception as error:  # whatever Transformers' own code or a compiler trips over
        log.warning(
            "the fast encoder fails on this %s model, which goes the plain way: %s",
            model.config.model_type,
            first_line(error),
        )
        return plain
    if worst > TOLERANCE[options.dtype]:
        log.warning(
            "the fast encoder's vectors of this %s model differ from the plain one's (1 - cosine %.1e, allowed %.0e), so it "
            "goes the plain way; prefill-score verify shows them",
            model.config.model_type,
            worst,
            TOLERANCE[options.dtype],
        )
        return plain
    return fast


def plain_encoder(model: Any, options: EncoderOptions) -> PlainEncoder:
    """Transformers' own forward pass over padded batches."""
    return PlainEncoder(
        model,
        pooling=options.pooling,
        dims=options.dims,
        normalize=options.normalize,
        max_batch_tokens=options.max_batch_tokens,
    )


def fast_encoder(model: Any, plain: PlainEncoder, options: EncoderOptions) -> PrefillEncoder:
    """The packed one, compiled where the options say so.

    Raises:
        UnsupportedModelError: it does not know this model.
    """
    # Compiling means a second or two of C++ on a CPU, for bfloat16, and PyTorch's compiler elsewhere.
    on_cpu = plain.device.type == "cpu"
    kernels = load_kernels() if options.compiled and on_cpu and options.dtype == "bfloat16" else None
    decoder = choose_decoder(
        model, chunk=CHUNK[plain.device.type], compiled=options.compiled and not on_cpu, kernels=kernels
    )
    return PrefillEncoder(
        decoder,
        plain,
        pooling=options.pooling,
        dims=options.dims,
        normalize=options.normalize,
        max_batch_tokens=options.max_batch_tokens,
        share=options.share,
        kernels=kernels,
    )


def samples(prompts: Sequence[Ids]) -> list[Ids]:
    """Prompts for a check: the ends of some, and the longest without its last token or two, so that a prefix is shared."""
    ends = sorted({ids[-CHECKED_TOKENS:].tobytes(): ids[-CHECKED_TOKENS:] for ids in prompts}.values(), key=len)
    chosen = ends[:: max(1, len(ends) // CHECKED_PROMPTS)][: CHECKED_PROMPTS - 1] + ends[-1:]
    return chosen + [chosen[-1][:-cut] for cut in (1, 2) if chosen and len(chosen[-1]) > cut]


def compare(fast: Encoder, plain: Encoder, prompts: Sequence[Ids]) -> list[Comparison]:
    """Vectors of `prompts` from `fast`, all together, and from `plain`, one at a time.

    Prompts that the plain encoder has no finite vector for are left out.
    """
    return comparisons(prompts, fast.encode(prompts, lambda *_: None).vectors, one_by_one(plain, prompts))


def one_by_one(plain: Encoder, prompts: Sequence[Ids]) -> list[npt.NDArray[np.float32]]:
    """[n] vectors of prompts that have no company."""
    return [plain.encode([ids], lambda *_: None).vectors[0] for ids in prompts]


def comparisons(
    prompts: Sequence[Ids], together: npt.NDArray[np.float32], alone: Sequence[npt.NDArray[np.float32]]
) -> list[Comparison]:
    """Of vectors [n, d] and what they should be; see compare."""
    found = []
    for ids, ours, theirs in zip(prompts, together, alone, strict=True):
        if not np.isfinite(theirs).all():
            continue
        wide = (ours.astype(np.float64), theirs.astype(np.float64))
        a, b = (v / max(float(np.linalg.norm(v)), 1e-300) for v in wide)
        cosine = 1.0 if not (a.any() or b.any()) else float(a @ b)
        found.append(Comparison(len(ids), cosine if np.isfinite(cosine) else -1.0, float(np.abs(a - b).max())))
    return found
