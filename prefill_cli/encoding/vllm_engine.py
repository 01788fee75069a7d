"""Starting vLLM in this process: on a model folder, with room for the longest prompt, as a guest that disturbs nobody.

Its own process for the engine is turned off (vllm.py says why), and with it that threads are bound to cores. It would
print on stdout, ask the network, tie memory to one node of the machine, and leave PyTorch with one thread; `_guest` keeps
it from that.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

import torch

from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import ModelFolder, is_out_of_memory, load_base_model
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.encoding.vllm import SHARING, VllmEncoder
from prefill_cli.errors import ModelError, UsageError, first_line
from prefill_cli.machine import free_memory, threads

log = logging.getLogger(__name__)
POOLING_TYPES = {"last": "LAST", "mean": "MEAN", "first": "CLS"}
MOST_IN_A_STEP = 256  # prompts
KEPT_TOKENS = 131_072  # whose keys and values vLLM has room for where there is memory: those at work, and prefixes
SHARE_OF_MEMORY = 0.5  # for them, of what the weights leave
SPARE_TOKENS = 256  # vLLM gives out whole blocks, of 128 tokens at most, and keeps one for itself
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the limit was checked already, against what Transformers says of the model
    "VLLM_CONFIGURE_LOGGING": "0",  # it would log on stdout
    "VLLM_NO_USAGE_STATS": "1",  # it would tell its makers over the network
}
QUIET = logging.CRITICAL + 1  # its errors come as exceptions as well, without the token ids that it logs


def load_vllm(
    folder: ModelFolder, options: EncoderOptions, device: str, limit: int | None, trust_remote_code: bool
) -> VllmEncoder:
    """Start vLLM on a model folder.

    limit: tokens of the longest prompt that can come, None: any.

    Raises:
        ModelError: vLLM does not know the model, or the memory does not suffice. UsageError: it is built for another device.
    """
    kept_bytes, longest = room(folder, options.dtype, device, limit)
    if limit and longest < limit:
        log.warning("vLLM has memory for prompts of %d tokens; longer ones will be rejected as out_of_memory", longest)
    sharing = options.pooling in SHARING
    budget = options.max_batch_tokens if sharing else max(options.max_batch_tokens, longest)
    with _guest():
        from vllm import EngineArgs, LLMEngine
        from vllm.config import PoolerConfig
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext

        if device == "cpu":
            setattr(torch.ops._C, "init_cpu_memory_env", _unbound)  # noqa: B010
        if current_platform.device_type != device.partition(":")[0]:
            raise UsageError(
                f"--device {device}: the installed vLLM is built for {current_platform.device_type or 'no device here'}"
            )
        try:
            arguments = EngineArgs(
                model=str(folder.path),
                runner="pooling",
                convert="embed",
                pooler_config=PoolerConfig(seq_pooling_type=POOLING_TYPES[options.pooling], use_activation=False),
                skip_tokenizer_init=True,
                trust_remote_code=trust_remote_code,
                dtype=options.dtype,
                max_model_len=longest,
                max_num_batched_tokens=budget,
                max_num_seqs=min(budget, MOST_IN_A_STEP),
                enable_prefix_caching=options.share and sharing,
                enable_chunked_prefill=sharing,
                enforce_eager=not options.compiled,
                kv_cache_memory_bytes=kept_bytes,
                load_format="safetensors",
                use_tqdm_on_load=False,
                disable_log_stats=True,
                generation_config="vllm",
            )
            config = arguments.create_engine_config(UsageContext.LLM_CLASS)  # for batches, not for requests one by one
            if ":" in device:
                config.device_config.device = torch.device(device)
            engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise ModelError(f"{folder.path}: vLLM does not fit the memory of {device}: {_told(error)}") from error
            raise ModelError(
                f"{folder.path}: vLLM cannot serve this model: {_told(error)}; the other backend, the default, may"
            ) from error

    def in_float32() -> PlainEncoder:
        model = load_base_model(folder, "cpu", "float32", trust_remote_code)  # the device's memory is vLLM's
        return PlainEncoder(
            model,
            pooling=options.pooling,
            dims=options.dims,
            normalize=options.normalize,
            max_batch_tokens=1,
        )

    return VllmEncoder(engine, longest, in_float32, folder.hidden_size, options)


def room(folder: ModelFolder, dtype: str, device: str, limit: int | None) -> tuple[int, int]:
    """Bytes for keys and values, and the tokens of the longest prompt that has room in them.

    Raises:
        ModelError: not even a short one has.
    """
    text = folder.config.get_text_config()
    size = getattr(torch, dtype).itemsize
    heads = getattr(text, "num_attention_heads", None) or 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = getattr(text, "num_hidden_layers", None) or 1
    of_token = 2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * head_dim * size
    stored = getattr(torch, str(getattr(text, "dtype", None) or "float32").removeprefix("torch."), torch.float32)
    weights = sum(stamp[1] for _, stamp in folder.stamps) * size / stored.itemsize
    affordable = int(SHARE_OF_MEMORY * max(0.0, free_memory(device) - weights) / of_token)
    tokens = min(max(limit or 0, KEPT_TOKENS) + SPARE_TOKENS, affordable)
    longest = tokens - SPARE_TOKENS
    if longest < SPARE_TOKENS:
        raise ModelError(f"{folder.path}: the memory of {device} does not suffice for vLLM beside the model's weights")
    return tokens * of_token, min(longest, limit or longest)


def _told(error: BaseException) -> str:
    """What vLLM says: of what pydantic wraps around it, the part that is a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), None)
    return first_line(ValueError(said.removeprefix("Value error, ").partition(" [type=")[0])) if said else first_line(error)


@contextlib.contextmanager
def _guest() -> Iterator[None]:
    """vLLM in the block as a guest of this process: it prints, asks and changes nothing that concerns others."""
    from huggingface_hub import constants

    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # else it looks for one
    logger = logging.getLogger("vllm")
    logger.handlers[:] = logging.getLogger("prefill_cli").handlers
    logger.propagate = False
    logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "").upper() or QUIET)
    number, set_threads, offline = threads(), torch.set_num_threads, constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # all that it needs is in the model's folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        setattr(torch, "set_num_threads", set_threads)  # noqa: B010, on a CPU it puts a function there that does nothing
        torch.set_num_threads(number)


def _unbound(*_: object) -> None:
    """In the place of what would tie all memory of this process to one of the machine's nodes, with a warning."""
