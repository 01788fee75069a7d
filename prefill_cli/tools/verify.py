"""`prefill-score verify`: a run's own prompts through the fast encoder, or vLLM, and through plain Transformers."""

from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.encoding.choice import TOLERANCE, Comparison, compare, fast_encoder, plain_encoder
from prefill_cli.encoding.decoders import UnsupportedModelError
from prefill_cli.encoding.encoder import Encoder
from prefill_cli.encoding.loading import choose_device
from prefill_cli.encoding.vllm import check_usable
from prefill_cli.tools.subject import load_subject


def verify(config: RunConfig, rows: int) -> dict[str, Any]:
    """Compare vectors of the first `rows` prompts (of the synthetic workload without an input).

    `config.backend` says which encoder: the fast one, or vLLM's. Returns `status` (same, different, or plain: this model has
    no fast encoder), why, the tolerance, and `prompts`, a list of tokens, cosine and largest difference of a component, of
    vectors of length 1.
    """
    if config.backend == "vllm":
        check_usable(choose_device(config.device))  # now, not after the model is loaded
    subject = load_subject(config, rows)
    model, options = subject.model, subject.options
    plain = plain_encoder(model, options)
    found: list[Comparison] = []
    try:
        if config.backend == "vllm":
            fast: Encoder = subject.load_vllm(config)
        else:
            fast = fast_encoder(model, plain, options)
        found = compare(fast, plain, subject.prompts)
        status, why = "same", ""
    except UnsupportedModelError as error:
        status, why = "plain", f"{model.config.model_type} models go the plain way: {error}"
    worst = min((c.cosine for c in found), default=1.0)
    if 1 - worst > TOLERANCE[options.dtype]:
        status, why = "different", f"1 - cosine is {1 - worst:.1e} at worst, allowed {TOLERANCE[options.dtype]:.0e}"
    return {
        "status": status,
        "why": why,
        "model": config.model,
        "backend": config.backend,
        "model_type": model.config.model_type,
        "device": subject.device,
        "dtype": options.dtype,
        "compiled": options.compiled,
        "tolerance": TOLERANCE[options.dtype],
        "lowest_cosine": worst,
        "largest_difference": max((c.largest_difference for c in found), default=0.0),
        "prompts": [vars(c) for c in found],
    }
