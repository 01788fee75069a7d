"""`prefill-score verify`: a run's own prompts through the fast encoder and through plain Transformers, side by side."""

from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.encoding.choice import TOLERANCE, Comparison, compare, fast_encoder, plain_encoder
from prefill_cli.encoding.decoders import UnsupportedModelError
from prefill_cli.tools.subject import load_subject


def verify(config: RunConfig, rows: int) -> dict[str, Any]:
    """Compare vectors of the first `rows` prompts (of the synthetic workload without an input).

    Returns `status` (same, different, or plain: this model has no fast encoder), why, the tolerance, and `prompts`, a
    list of tokens, cosine and largest difference of a component, of vectors of length 1.
    """
    subject = load_subject(config, rows)
    model, options = subject.model, subject.options
    plain = plain_encoder(model, options)
    found: list[Comparison] = []
    try:
        found = compare(fast_encoder(model, plain, options), plain, subject.prompts)
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
        "model_type": model.config.model_type,
        "device": subject.device,
        "dtype": options.dtype,
        "compiled": options.compiled,
        "tolerance": TOLERANCE[options.dtype],
        "lowest_cosine": worst,
        "largest_difference": max((c.largest_difference for c in found), default=0.0),
        "prompts": [vars(c) for c in found],
    }
