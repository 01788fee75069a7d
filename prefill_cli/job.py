"""What a run works with: the same for all of its shards."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from prefill_cli.config import RunConfig
from prefill_cli.data import manifest, results
from prefill_cli.data.cache import Space, VectorCache
from prefill_cli.data.inputs import InputPlan, Shard
from prefill_cli.data.remote_staging import RemoteStaging
from prefill_cli.data.staging import Staging
from prefill_cli.data.tokenization import PromptTokenizer
from prefill_cli.data.vectors import VectorReader
from prefill_cli.encoding import vllm
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import ModelFolder
from prefill_cli.machine import threads
from prefill_cli.scoring.heads import Head, PairHead
from prefill_cli.scoring.items import Items
from prefill_cli.scoring.kernels import load_kernels
from prefill_cli.scoring.topk import Catalogue

log = logging.getLogger(__name__)
# Floating-point operations from which compiling (2 s on a CPU, once a machine; a minute on a GPU) costs less than it saves,
# and from which a probe of token budgets (a second or two) does.
COMPILE_FROM = {"cpu": 2e12, "mps": float("inf"), "cuda": 1e16}
SEARCH_FROM = 1e11  # products of a search from which compiling its kernels costs less than it saves
COMPILE_VLLM_FROM = {"cpu": 5e13, "cuda": 1e16}  # it takes two minutes on a CPU, and halves the time
PROBE_FROM = {"cpu": 2e14, "mps": 1e15, "cuda": 1e16}
CHECKED_PROMPTS = 64  # of the first shard, of which an encoder is checked with a few of different lengths
PACE = ("max_batch_tokens", "encoder", "compile", "share", "cache")  # options


@dataclass(frozen=True)
class Scoring:
    """What users' vectors are scored against."""

    items: Items
    head: Head | None
    allowed: npt.NDArray[np.bool_] | None  # [N] items that anybody may get; None: all
    unknown_ids: int  # in --allow and --deny
    compiled: bool

    def catalogue(self, user_width: int, device: str) -> Catalogue:
        """What is searched; it makes itself ready at the first search, so one is enough for a process."""
        kernels = load_kernels() if self.compiled and device == "cpu" else None
        pair_head = PairHead(self.head, user_width) if self.head and self.head.kind == "mlp" else None
        return Catalogue(self.items, self.allowed, device, kernels, head=pair_head)


@dataclass(frozen=True)
class Job:
    """Everything that is the same for all shards of a run."""

    config: RunConfig
    plan: InputPlan
    folder: ModelFolder | None  # None: the vectors are there already
    user_width: int  # of the vectors that the encoder gives
    scoring: Scoring | None  # None: the vectors are the result
    tokenize: PromptTokenizer | VectorReader
    form: results.Format
    device: str
    dtype: str
    max_batch_tokens: int
    encoder: str  # auto, plain or vllm; or which matrix of the model, or stored
    compile: bool
    probe: bool  # whether the first encoder may choose another budget
    expected_tokens: float  # of all prompts, as far as the footers tell
    cached: tuple[str, ...]  # the segments of the cache that this run sees
    staging: Staging | RemoteStaging

    @property
    def is_cosine(self) -> bool:
        return self.config.score == "cosine"

    @property
    def normalizes(self) -> bool:
        """Whether the encoder scales vectors to length 1. Cosine is of what a head makes of them."""
        return self.config.normalize or (self.is_cosine and not (self.scoring and self.scoring.head))

    def encoder_options(self, folder: ModelFolder, share: float = 1.0) -> EncoderOptions:
        """share: of the prompts, as far as known, that have to be encoded."""
        probe = self.probe and pays(PROBE_FROM, share * self.expected_tokens, folder, self.device)
        return EncoderOptions(
            pooling=folder.pooling,
            dims=self.config.dims,
            normalize=self.normalizes,
            dtype=self.dtype,
            max_batch_tokens=self.max_batch_tokens,
            compiled=self.compile,
            share=self.config.share,
            probe=probe,
        )

    @property
    def backend_version(self) -> dict[str, str]:
        """Of what runs the model beside PyTorch and Transformers, by its name."""
        return {"vllm": vllm.version()} if self.encoder == "vllm" else {}

    @property
    def choices(self) -> dict[str, Any]:
        """What a resume repeats, whatever it is told: other batches or kernels round in other ways."""
        return {
            "max_batch_tokens": self.max_batch_tokens,
            "encoder": self.encoder,
            "compile": self.compile,
            "cached": self.cached,
        }

    def open_cache(self) -> VectorCache | None:
        """The vectors that are kept between runs, as they were when this run first began."""
        if not (self.config.cache and self.folder):
            return None
        return VectorCache(self.config.cache, vector_space(self, self.folder), self.cached, self.user_width)

    @property
    def pace(self) -> dict[str, Any]:
        """What decides how long the job takes here, beside what its answer depends on."""
        asked = {name: str(getattr(self.config, name)) for name in PACE}
        return asked | {"device": self.device, "cpus": os.cpu_count(), "threads": threads()}

    @cached_property
    def shards(self) -> list[Shard]:
        return self.plan.shards(self.config.shard_rows)

    @cached_property
    def own_shards(self) -> list[Shard]:
        """Those that this run does: all, or every n-th."""
        number, of = self.config.slice or (0, 1)
        return self.shards[number::of]


def vector_space(job: Job, folder: ModelFolder) -> Space:
    """Everything that makes a vector of token ids, by names that users know.

    The budget and sharing are not in it: the packed encoder gives the same bits for any. Another PyTorch, Transformers or
    release of ours may round in another way, so each makes its own vectors.
    """
    versions = manifest.versions() | job.backend_version
    return {
        "model_weights_sha256": folder.weights_sha256,
        "model_files_sha256": folder.files_sha256,
        "trust_remote_code": job.config.trust_remote_code,
        "device": job.device.partition(":")[0],
        "dtype": job.dtype,
        "pooling": folder.pooling,
        "dims": job.config.dims,
        "normalize": job.normalizes,
        "encoder": job.encoder,
        "compile": job.compile,
        **{name: versions[name] for name in ("prefill-score", "torch", "transformers", *job.backend_version)},
    }


def pays(threshold: Mapping[str, float], tokens: float, folder: ModelFolder, device: str) -> bool:
    """Whether so many tokens are enough work for something that costs time first."""
    return tokens * folder.flops_per_token >= threshold[device.partition(":")[0]]


def pays_to_compile_search(config: RunConfig, rows: int, items: Items) -> bool:
    """Whether so many users and items are enough work for the kernels of search."""
    return rows * len(items) * items.width >= SEARCH_FROM if config.compile is None else config.compile
