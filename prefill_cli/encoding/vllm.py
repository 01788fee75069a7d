"""The vLLM encoder: token ids through vLLM's pooling runner, in this process.

vLLM gets ready-made ids, never text, and gives back pooled hidden states as they are: its activation, which would scale
them to length 1, is off, so that --dims and --normalize mean what they mean everywhere (pooling.py). Equal prompts are
sent once; prefixes that prompts share are served from vLLM's own cache of keys and values, and prompts come in an order
that puts those with one prefix side by side.

vLLM's engine would by default be a process of its own, which a kill of this one leaves behind; here it is none, and
between two of its steps an interrupt ends the run. How vLLM rounds depends on what is in a step, so unlike with the other
encoders a prompt's vector is not the same bits in any company.

Written for vLLM 0.32: EngineArgs, LLMEngine, PoolingParams.
"""

import contextlib
import importlib.metadata
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefill_cli.encoding.encoder import Encoded, EncoderOptions, OnBatch
from prefill_cli.encoding.loading import is_out_of_memory
from prefill_cli.encoding.packing import Ids, distinct
from prefill_cli.encoding.plain import PlainEncoder
from prefill_cli.encoding.pooling import finish
from prefill_cli.errors import ModelError, UsageError, first_line

log = logging.getLogger(__name__)
# Poolings; for the others vLLM wants all hidden states of a prompt in one step: no prefix from its cache, no piece.
SHARING = ("last",)
AT_WORK = 1_024  # prompts that vLLM knows of at once: enough for any step, few enough for an interrupt to be heard
BATCH_TOKENS = {"cpu": 4_096, "cuda": 8_192, "mps": 4_096}  # of a step, by device type: what vLLM takes for batches


def check_usable(device: str, asked_by: str = "--backend vllm") -> None:
    """That there is a vLLM, as far as can be said without loading it, which takes ten seconds.

    Raises:
        UsageError: there is none, or it cannot use the device.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"{asked_by} needs a package that is not installed: pip install 'prefill-score[vllm]'")
    if device == "mps":
        raise UsageError(f"{asked_by} runs on cpu or cuda, not on mps; give --device cpu, or leave it out")


def version() -> str:
    """Of the installed vLLM, whose package has another name in builds for other devices."""
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return importlib.metadata.version(names[0])


class VllmEncoder:
    """An Encoder over a vLLM engine.

    engine: an LLMEngine of the pooling runner. longest: tokens of the longest prompt that it has memory for. in_float32:
    loads the plain encoder for prompts that vLLM refuses or whose vector is not finite.
    """

    name = "vllm"

    def __init__(
        self, engine: Any, longest: int, in_float32: Callable[[], PlainEncoder], width: int, options: EncoderOptions
    ) -> None:
        from vllm import PoolingParams
        from vllm.exceptions import VLLMClientError

        self._refusals = (VLLMClientError, ValueError)  # what it raises where a request is at fault
        self._engine = engine
        self._longest = longest
        self._in_float32 = in_float32
        self._width = width
        self._options = options
        self._task = PoolingParams(task="embed", use_activation=False)
        self.max_batch_tokens: int = engine.vllm_config.scheduler_config.max_num_batched_tokens

    def forget(self) -> None:
        """Empty vLLM's cache of prefixes, as it is at the beginning of a run."""
        self._engine.reset_prefix_cache()

    def encode(self, input_ids: Sequence[Ids], on_batch: OnBatch) -> Encoded:
        """See Encoder. Prompts that vLLM refuses, and vectors that are not finite, go through plain Transformers, alone and
        in float32, on the CPU. `computed_tokens` are those that did not come from vLLM's cache.
        """
        found = distinct(input_ids, self._options.share)
        prompts, copies = found.prompts, found.copies
        lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        too_long = np.flatnonzero(lengths > self._longest)
        fitting = np.flatnonzero(lengths <= self._longest)
        if self._options.share:  # by their ids, so that neighbours share a prefix while it is still there
            fitting = np.array(sorted(fitting, key=lambda i: prompts[i].astype(">i4").tobytes()), np.int64)
        pooled = np.full((len(prompts), self._width), np.nan, np.float32)
        steps = computed = 0
        on_batch(int(copies[too_long].sum()), int((copies * lengths)[too_long].sum()))
        for members, vectors, tokens in self._steps(prompts, fitting.tolist()):
            if len(vectors) and vectors.shape[1] != self._width:
                raise ModelError(f"vLLM gives vectors of {vectors.shape[1]}, not of {self._width} as config.json says")
            pooled[members] = vectors
            steps += 1
            computed += tokens
            on_batch(int(copies[members].sum()), int((copies * lengths)[members].sum()))
        vectors = finish(torch.from_numpy(pooled), self._options.dims, self._options.normalize).numpy()
        again = self._retry(prompts, vectors, too_long)
        return Encoded(
            vectors[found.of_row],
            batches=steps,
            computed_tokens=computed + int(lengths[again].sum()),
            retried_rows=int(copies[again].sum()),
            out_of_memory=np.flatnonzero(np.isin(found.of_row, too_long)),
        )

    def _steps(
        self, prompts: Sequence[Ids], order: Sequence[int]
    ) -> Iterator[tuple[list[int], npt.NDArray[np.float32], int]]:
        """Steps of the engine: prompts that are done, their pooled hidden states [m, hidden], tokens computed for them.

        Of a prompt that was refused, the vector is not finite.
        """
        waiting, at_work = deque(order), set[int]()
        try:
            while waiting or at_work:
                refused = []
                while waiting and len(at_work) < AT_WORK:
                    i = waiting.popleft()
                    if self._takes(i, prompts[i]):
                        at_work.add(i)
                    else:
                        refused.append(i)
                done = self._step() if at_work else []
                members = [int(output.request_id) for output in done]
                at_work.difference_update(members)
                rows = [_vector(output, self._width) for output in done] + [_nothing(self._width)] * len(refused)
                computed = sum(len(prompts[int(o.request_id)]) - (o.num_cached_tokens or 0) for o in done)
                yield members + refused, np.stack(rows) if rows else np.empty((0, self._width), np.float32), computed
        finally:  # an error or an interrupt: what vLLM still has is not wanted any more
            if at_work:
                with contextlib.suppress(Exception):
                    self._engine.abort_request([str(i) for i in at_work])

    def _takes(self, i: int, ids: Ids) -> bool:
        """Hand a prompt to vLLM; whether it takes it."""
        try:
            self._engine.add_request(str(i), {"type": "token", "prompt_token_ids": ids.tolist()}, self._task)
        except self._refusals as error:
            log.debug("vLLM refuses a prompt of %d tokens: %s", len(ids), first_line(error))
            return False
        return True

    def _step(self) -> list[Any]:
        try:
            return [output for output in self._engine.step() if output.finished]
        except Exception as error:
            advice = "lower --max-batch-tokens" if is_out_of_memory(error) else "the other backend, the default, may serve"
            raise ModelError(f"vLLM fails on this model: {first_line(error)}; {advice}") from error

    def _retry(
        self, prompts: Sequence[Ids], vectors: npt.NDArray[np.float32], too_long: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        bad = np.setdiff1d(np.flatnonzero(~np.isfinite(vectors).all(axis=1)), too_long)
        if len(bad):
            log.warning("%d prompts have no finite vector from vLLM; plain Transformers makes it in float32", len(bad))
            self._in_float32().retry(prompts, vectors, except_for=too_long.tolist())
        return bad


def _vector(output: Any, width: int) -> npt.NDArray[np.float32]:
    """Of a request that is done; one that failed has none."""
    data = output.outputs.data if getattr(output, "error", None) is None else None
    vector: npt.NDArray[np.float32] = _nothing(width) if data is None else data.float().numpy()
    return vector


def _nothing(width: int) -> npt.NDArray[np.float32]:
    return np.full(width, np.nan, np.float32)
