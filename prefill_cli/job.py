"""What a run will do, found and checked before any weight is read: inputs, model folder, items, device, fingerprint."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli import storage
from prefill_cli.arrow import working_type
from prefill_cli.config import RunConfig
from prefill_cli.data import manifest, results
from prefill_cli.data.cache import Space, VectorCache, seen_segments
from prefill_cli.data.inputs import InputPlan, Shard, plan_inputs
from prefill_cli.data.remote_staging import RemoteStaging
from prefill_cli.data.staging import Staging, output_folder
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.data.vectors import VectorReader, width_of_vectors
from prefill_cli.encoding.budget import auto_batch_tokens
from prefill_cli.encoding.encoder import EncoderOptions
from prefill_cli.encoding.loading import ModelFolder, choose_device, choose_dtype, open_model_folder
from prefill_cli.errors import InputError, ItemsError, ModelError, OutputError, os_errors_as
from prefill_cli.places import Place, is_uri, local
from prefill_cli.scoring.filters import ItemIndex
from prefill_cli.scoring.heads import Head, PairHead, load_head
from prefill_cli.scoring.items import Items, check_provenance, load_items
from prefill_cli.scoring.kernels import load_kernels
from prefill_cli.scoring.topk import Catalogue

log = logging.getLogger(__name__)
# Floating-point operations from which compiling (2 s on a CPU, once a machine; a minute on a GPU) costs less than it saves,
# and from which a probe of token budgets (a second or two) does.
COMPILE_FROM = {"cpu": 2e12, "mps": float("inf"), "cuda": 1e16}
SEARCH_FROM = 1e11  # products of a search from which compiling its kernels costs less than it saves
PROBE_FROM = {"cpu": 2e14, "mps": 1e15, "cuda": 1e16}
FETCHED = ("items", "item_ids", "head", "allow", "deny")  # files that a run holds in memory or maps: copied here first
BYTES_PER_TOKEN = 4  # of an input file, about: most of it is prompts


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
    encoder: str  # auto or plain
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
    def shards(self) -> list[Shard]:
        return self.plan.shards(self.config.shard_rows)


def vector_space(job: Job, folder: ModelFolder) -> Space:
    """Everything that makes a vector of token ids, by names that users know.

    The budget and sharing are not in it: the packed encoder gives the same bits for any. Another PyTorch, Transformers or
    release of ours may round in another way, so each makes its own vectors.
    """
    versions = manifest.versions()
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
        **{name: versions[name] for name in ("prefill-score", "torch", "transformers")},
    }


def plan_job(config: RunConfig) -> tuple[Job, manifest.Fingerprint]:
    """Find and check everything that can be wrong with a run, cheapest first, before any weight is read."""
    config = replace(config, vector_column=None, user_ids=None)  # which a file of options may hold for `search`
    out, plan = _places(config)
    with os_errors_as(ModelError, "--model"):
        folder = open_model_folder(config)
    scoring, digests = _scoring(config, plan, folder.hidden_size)
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    tokens = sum(file.data_bytes for file in plan.files) / BYTES_PER_TOKEN
    made_with = {
        "model_sha256": folder.weights_sha256,
        "pooling": folder.pooling,
        "dims": config.dims,
        "normalized": config.normalize,
    }
    if "model_sha256" not in scoring.items.provenance:
        made_with |= {"model": config.model, "revision": config.revision}
    check_provenance(scoring.items, config, made_with)
    job = Job(
        config=config,
        plan=plan,
        folder=folder,
        user_width=config.dims or folder.hidden_size,
        scoring=scoring,
        tokenize=tokenize,
        form=results.plan_format(config, plan, scoring.items.ids.type),
        device=device,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or auto_batch_tokens(folder.hidden_size, dtype, device),
        encoder=config.encoder,
        compile=pays(COMPILE_FROM, tokens, folder, device) if config.compile is None else config.compile,
        probe=not config.max_batch_tokens,
        expected_tokens=tokens,
        cached=(),
        staging=staging_of(out),
    )
    if config.cache:
        with os_errors_as(OutputError, "--cache"):
            job = replace(job, cached=tuple(seen_segments(config.cache, vector_space(job, folder))))
    log.info(
        "%s rows in %s, %s items, %s in %s on %s, at most %s tokens a prompt",
        f"{plan.rows:,}",
        _counted_files(plan),
        f"{len(scoring.items):,}",
        config.model,
        dtype,
        device,
        tokenize.limit or "any number of",
    )
    model = {
        "dtype": dtype,
        "pooling": folder.pooling,
        "model_weights_sha256": folder.weights_sha256,
        "model_files_sha256": folder.files_sha256,
    }
    return job, _fingerprint(job) | model | digests


def plan_search(config: RunConfig) -> tuple[Job, manifest.Fingerprint]:
    """The same for vectors that are there already."""
    config = replace(config, vector_column=config.vector_column or "embedding")
    out, plan = _places(config)
    with os_errors_as(InputError, "input"):
        width = width_of_vectors(plan, config)
    scoring, digests = _scoring(config, plan, width or None)
    job = Job(
        config=config,
        plan=plan,
        folder=None,
        user_width=config.dims or width or scoring.items.width,
        scoring=scoring,
        tokenize=VectorReader(width),
        form=results.plan_format(config, plan, scoring.items.ids.type),
        device=choose_device(config.device),
        dtype="float32",
        max_batch_tokens=0,
        encoder="stored",
        compile=False,
        probe=False,
        expected_tokens=0.0,
        cached=(),
        staging=staging_of(out),
    )
    log.info(
        "%s vectors in %s, %s items on %s", f"{plan.rows:,}", _counted_files(plan), f"{len(scoring.items):,}", job.device
    )
    of_ids = {"user_ids_sha256": manifest.digest(config.user_ids.read_bytes())} if config.user_ids else {}
    return job, _fingerprint(job) | {"vector_width": width} | of_ids | digests


def _places(config: RunConfig) -> tuple[Place, InputPlan]:
    """Where the result goes and what is read."""
    with os_errors_as(OutputError, "--output"):
        out = output_folder(config)
    with os_errors_as(InputError, "input"):
        return out, plan_inputs(config)


def staging_of(out: Place) -> Staging | RemoteStaging:
    return RemoteStaging(out) if is_uri(out) else Staging(local(out))


def _scoring(config: RunConfig, plan: InputPlan, user_width: int | None) -> tuple[Scoring, dict[str, str | None]]:
    """What users are scored against, and digests of it. user_width: None where the input has no vector."""
    fetched: dict[str, Any] = {name: storage.fetch(getattr(config, name), ItemsError) for name in FETCHED}
    here = replace(config, **fetched)
    with os_errors_as(ItemsError, "--items"), storage.naming_origins():
        head, items = _head_and_items(here, user_width)
        allowed, unknown, digests = _allowed_items(here, items)
    _check_filter_types(config, plan, items)
    scoring = Scoring(items, head, allowed, unknown, pays_to_compile_search(config, plan.rows, items))
    return scoring, digests | {"items_sha256": items.sha256, "head_sha256": head.sha256 if head else None}


def _counted_files(plan: InputPlan) -> str:
    return "1 file" if len(plan.files) == 1 else f"{len(plan.files):,} files"


def pays(threshold: Mapping[str, float], tokens: float, folder: ModelFolder, device: str) -> bool:
    """Whether so many tokens are enough work for something that costs time first."""
    return tokens * folder.flops_per_token >= threshold[device.partition(":")[0]]


def pays_to_compile_search(config: RunConfig, rows: int, items: Items) -> bool:
    """Whether so many users and items are enough work for the kernels of search."""
    return rows * len(items) * items.width >= SEARCH_FROM if config.compile is None else config.compile


def _head_and_items(config: RunConfig, user_width: int | None) -> tuple[Head | None, Items]:
    """Both checked, and that they go together."""
    if not (config.head and user_width):
        return None, load_items(config, user_width)
    width = min(config.dims or user_width, user_width)
    head = load_head(local(config.head), "mlp" if config.score == "mlp" else "user_tower", width)
    return head, load_items(config, user_width, PairHead(head, width).item_width if head.kind == "mlp" else head.outputs)


def _check_filter_types(config: RunConfig, plan: InputPlan, items: Items) -> None:
    """That ids in the exclude and candidates columns can be those of items at all."""
    for what, name in (("exclude", config.exclude_column), ("candidates", config.candidates_column)):
        if name and not pa.types.is_null(kind := working_type(plan.columns.field(name).type)):
            ItemIndex(items.ids).rows_of(pa.array([], kind.value_type), InputError, f"the {what} column {name!r}")


def _allowed_items(config: RunConfig, items: Items) -> tuple[npt.NDArray[np.bool_] | None, int, dict[str, str]]:
    """--allow and --deny as one mask, their unknown ids, and digests of which items they named."""
    if not (config.allow or config.deny):
        return None, 0, {}
    index, allowed, unknown = ItemIndex(items.ids), np.ones(len(items), bool), 0
    if config.allow:
        rows, missing = index.rows_in_file(local(config.allow), config.item_id_column)
        if not len(rows):
            raise ItemsError(f"--allow {config.allow}: no id in it is one of the catalogue's, so nobody would get anything")
        allowed[:] = False
        allowed[rows] = True
        unknown += missing
    if config.deny:
        rows, missing = index.rows_in_file(local(config.deny), config.item_id_column)
        if not len(rows):
            log.warning("--deny %s: no id in it is one of the catalogue's, so it denies nothing", config.deny)
        allowed[rows] = False
        unknown += missing
    return allowed, unknown, {"allow_and_deny_sha256": manifest.digest(allowed.tobytes())}


def _fingerprint(job: Job) -> manifest.Fingerprint:
    """What the answer depends on, by names that users know."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in job.config.answer_options().items()}
    return options | {
        "device": job.device.partition(":")[0],
        "inputs_sha256": manifest.input_fingerprint(job.plan),
    }
