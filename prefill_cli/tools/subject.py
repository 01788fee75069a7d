"""What bench and verify work on: a loaded model and some prompts, the user's or made-up ones."""

import time
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.data.rows import read_rows
from prefill_cli.data.tokenization import Ids, PromptTokenizer, load_tokenizer
from prefill_cli.encoding.budget import auto_batch_tokens
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import ModelFolder, choose_device, choose_dtype, load_base_model, open_model_folder
from prefill_cli.encoding.vllm import BATCH_TOKENS, VllmEncoder
from prefill_cli.encoding.vllm_engine import load_vllm
from prefill_cli.errors import InputError
from prefill_cli.tools.workload import synthetic_prompts


@dataclass(frozen=True)
class Subject:
    """A model in memory, token ids of prompts, and the texts that they come from (none where they were not text)."""

    folder: ModelFolder
    model: Any
    device: str
    prompts: list[Ids]
    texts: list[str]
    limit: int | None  # tokens of a prompt
    read_sec: float  # of reading and tokenising
    options: EncoderOptions

    def load_vllm(self, config: RunConfig, **others: Any) -> VllmEncoder:
        """vLLM on the same model and for the same prompts, with the token budget that it takes in a run.

        others: of the options.

        Raises:
            ModelError: it cannot serve them.
        """
        budget = config.max_batch_tokens or BATCH_TOKENS[self.device.partition(":")[0]]
        options = replace(self.options, max_batch_tokens=budget, **others)
        return load_vllm(self.folder, options, self.device, self.limit, config.trust_remote_code)


def load_subject(config: RunConfig, rows: int, *, with_texts: bool = False) -> Subject:
    """The first `rows` prompts of the input, or of the synthetic workload without one, and the model.

    Raises:
        InputError: there is no prompt among them.
    """
    config = replace(config, exclude_column=None, candidates_column=None, keep_columns=())  # read what encoding needs
    folder = open_model_folder(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    began = time.perf_counter()
    if config.inputs:
        plan = plan_inputs(config)
        shard = plan.shards(rows)[0]
        prompts = read_rows(ShardReader(plan, config), tokenize, plan, config.id_column, shard).input_ids
        texts = []
        if with_texts and not (config.messages_column or config.token_ids_column):
            cells = [cell for piece in ShardReader(plan, config).read(shard) for cell in piece.prompts.to_pylist()]
            texts = [config.prefix + cell for cell in cells if isinstance(cell, str) and cell.strip()]
    else:
        texts = synthetic_prompts(rows)
        prompts = [ids for ids in tokenize(pa.array(texts)).input_ids if ids is not None]
    read_sec = time.perf_counter() - began
    if not prompts:
        raise InputError("there is no prompt to measure with: every row of the first shard is rejected")
    options = EncoderOptions(
        pooling=folder.pooling,
        dims=config.dims,
        normalize=config.normalize,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or auto_batch_tokens(folder.hidden_size, dtype, device),
        compiled=bool(config.compile),
    )
    model = load_base_model(folder, device, dtype, config.trust_remote_code)
    return Subject(folder, model, device, prompts, texts, tokenize.limit, read_sec, options)
