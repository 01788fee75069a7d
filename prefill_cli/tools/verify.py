"""`prefill-score verify`: a run's own prompts through the fast encoder and through plain Transformers, side by side."""

from dataclasses import replace
from typing import Any

from prefill_cli.config import RunConfig
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.encoding.choice import TOLERANCE, Comparison, compare, fast_encoder, plain_encoder
from prefill_cli.encoding.decoders import UnsupportedModelError
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.job import AUTO_BATCH_TOKENS
from prefill_cli.tools.bench import read_prompts


def verify(config: RunConfig, rows: int) -> dict[str, Any]:
    """Compare vectors of the first `rows` prompts (of the synthetic workload without an input).

    Returns `status` (same, different, or plain: this model has no fast encoder), why, the tolerance, and `prompts`, a
    list of tokens, cosine and largest difference of a component, of vectors of length 1.
    """
    config = replace(config, exclude_column=None, candidates_column=None, keep_columns=())
    folder = open_model_folder(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    prompts, _ = read_prompts(config, rows, tokenize)
    model = load_base_model(folder, device, dtype, config.trust_remote_code)
    options = EncoderOptions(
        pooling=folder.pooling,
        dims=config.dims,
        normalize=config.normalize,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or AUTO_BATCH_TOKENS[device.partition(":")[0]],
        compiled=bool(config.compile),
    )
    plain = plain_encoder(model, options)
    found: list[Comparison] = []
    try:
        found = compare(fast_encoder(model, plain, options), plain, prompts)
        status, why = "same", ""
    except UnsupportedModelError as error:
        status, why = "plain", f"{model.config.model_type} models go the plain way: {error}"
    worst = min((c.cosine for c in found), default=1.0)
    if 1 - worst > TOLERANCE[dtype]:
        status, why = "different", f"1 - cosine is {1 - worst:.1e} at worst, allowed {TOLERANCE[dtype]:.0e}"
    return {
        "status": status,
        "why": why,
        "model": config.model,
        "model_type": model.config.model_type,
        "device": device,
        "dtype": dtype,
        "compiled": options.compiled,
        "tolerance": TOLERANCE[dtype],
        "lowest_cosine": worst,
        "largest_difference": max((c.largest_difference for c in found), default=0.0),
        "prompts": [vars(c) for c in found],
    }
