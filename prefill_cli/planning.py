"""What a run will do, found and checked before any weight is read: inputs, model folder, items, device, fingerprint."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefill_cli import storage
from prefill_cli.arrow import working_type
from prefill_cli.config import RunConfig
from prefill_cli.data import manifest, results
from prefill_cli.data.cache import seen_segments
from prefill_cli.data.file_staging import FileStaging, is_one_file
from prefill_cli.data.inputs import InputPlan, plan_inputs
from prefill_cli.data.remote_staging import RemoteStaging, published_in
from prefill_cli.data.staging import Staging, output_folder
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.data.vectors import VectorReader, width_of_vectors
from prefill_cli.encoding.budget import auto_batch_tokens
from prefill_cli.encoding.loading import ModelFolder, choose_device, choose_dtype, open_model_folder
from prefill_cli.encoding.vllm import BATCH_TOKENS, check_usable
from prefill_cli.errors import InputError, ItemsError, ModelError, OutputError, PrefillScoreError, UsageError, os_errors_as
from prefill_cli.job import COMPILE_FROM, COMPILE_VLLM_FROM, Job, Scoring, pays, pays_to_compile_search, vector_space
from prefill_cli.places import Place, is_uri, local, place
from prefill_cli.scoring.filters import ItemIndex
from prefill_cli.scoring.heads import Head, PairHead, load_head
from prefill_cli.scoring.item_files import PROVENANCE_KEY, provenance
from prefill_cli.scoring.items import Items, check_provenance, load_items

log = logging.getLogger(__name__)
Planned = tuple[Job, manifest.Fingerprint]
FETCHED = ("items", "item_ids", "head", "allow", "deny")  # files that a run holds in memory or maps: copied here first
BYTES_PER_TOKEN = 4  # of an input file, about: most of it is prompts
NOT_OF_EMBED = (
    "vector_column", "user_ids", "items", "item_ids", "item_id_column", "item_bias_column", "top_k", "score", "head",
    "bad_items", "strict_provenance", "exclude_column", "candidates_column", "allow", "deny", "layout",
)  # fmt: skip


def plan_job(config: RunConfig) -> Planned:
    """Prompts → lists. What can be wrong is found cheapest first, before any weight is read."""
    config = config.without("vector_column", "user_ids", "from_lm_head")  # which a file of options may hold for others
    out, plan = _places(config, ".topk")
    with os_errors_as(ModelError, "--model"):
        folder = open_model_folder(config)
    scoring, digests = _scoring(config, plan, folder.hidden_size)
    form = results.plan_format(config, plan, scoring.items.ids.type)
    job, fingerprint = _with_model(config, plan, folder, scoring, form, staging_of(out, config.slice_name))
    made_with = _made_with(config, folder)
    if "model_sha256" in scoring.items.provenance:  # which says more than a name
        made_with = {name: value for name, value in made_with.items() if name not in ("model", "revision")}
    check_provenance(scoring.items, config, made_with)
    log.info(
        "%s rows in %s, %s items, %s in %s on %s, at most %s tokens a prompt",
        f"{plan.rows:,}",
        _counted_files(plan),
        f"{len(scoring.items):,}",
        config.model,
        job.dtype,
        job.device,
        job.tokenize.limit or "any number of",
    )
    return job, fingerprint | digests


def plan_embed(config: RunConfig) -> Planned:
    """Texts → vectors, or token ids → rows of an embedding matrix."""
    config = config.without(*NOT_OF_EMBED)
    if config.from_lm_head is not None:
        config = config.without("cache", "encoder", "backend")
        if not config.token_ids_column:
            matrix = "--from-lm-head" if config.from_lm_head else "--from-input-embeddings"
            raise UsageError(f"{matrix} needs --token-ids-column, the column with each item's token ids")
    out, plan = _places(config, ".vectors")
    with os_errors_as(ModelError, "--model"):
        folder = open_model_folder(config)
    if config.dims and config.dims > folder.hidden_size:
        raise UsageError(f"--dims {config.dims} is more than the model's width of {folder.hidden_size}")
    made_with = {PROVENANCE_KEY: json.dumps(_made_with(config, folder))}
    form = results.plan_vectors(config, plan, config.dims or folder.hidden_size, made_with)
    job, fingerprint = _with_model(config, plan, folder, None, form, staging_of(out, config.slice_name, with_files=True))
    what = {None: "prompts", True: "items, rows of the output embeddings,", False: "items, rows of the input embeddings,"}
    log.info(
        "%s %s in %s, %s in %s on %s",
        f"{plan.rows:,}",
        what[config.from_lm_head],
        _counted_files(plan),
        config.model,
        job.dtype,
        job.device,
    )
    return job, fingerprint | {"result": "vectors"}


def plan_search(config: RunConfig) -> Planned:
    """Vectors that are there already → lists."""
    config = replace(config.without("from_lm_head", "backend"), vector_column=config.vector_column or "embedding")
    out, plan = _places(config, ".topk")
    with os_errors_as(InputError, "input"):
        width = width_of_vectors(plan, config)
    scoring, digests = _scoring(config, plan, width or None)
    for file in plan.files:
        stored = (file.schema.metadata or {}).get(PROVENANCE_KEY.encode())
        check_provenance(scoring.items, config, provenance(file.path, stored))
    job = Job(
        config=config,
        plan=plan,
        folder=None,
        user_width=config.dims or width or scoring.items.width,
        scoring=scoring,
        tokenize=VectorReader(width),
        form=results.plan_format(config, plan, scoring.items.ids.type),
        device=choose_device(config.device, elsewhere=config.engine == "ray"),
        dtype="float32",
        max_batch_tokens=0,
        encoder="stored",
        compile=False,
        probe=False,
        expected_tokens=0.0,
        cached=(),
        staging=staging_of(out, config.slice_name),
    )
    log.info(
        "%s vectors in %s, %s items on %s", f"{plan.rows:,}", _counted_files(plan), f"{len(scoring.items):,}", job.device
    )
    of_ids = {"user_ids_sha256": manifest.digest(config.user_ids.read_bytes())} if config.user_ids else {}
    return job, _fingerprint(job) | {"vector_width": width} | of_ids | digests


def _with_model(
    config: RunConfig,
    plan: InputPlan,
    folder: ModelFolder,
    scoring: Scoring | None,
    form: results.Format,
    staging: Staging | RemoteStaging,
) -> Planned:
    """A job in which a model makes the vectors."""
    tokenize = PromptTokenizer(load_tokenizer(str(folder.path), config), config, folder.positions, folder.vocabulary)
    elsewhere = config.engine == "ray"
    device = choose_device(config.device, elsewhere=elsewhere)
    with_vllm = config.backend == "vllm"
    if with_vllm:
        check_usable(device)
    dtype = choose_dtype(config.dtype, device, elsewhere=elsewhere)
    tokens = sum(file.data_bytes for file in plan.files) / BYTES_PER_TOKEN
    matrices = {None: "vllm" if with_vllm else config.encoder, True: "output embeddings", False: "input embeddings"}
    if with_vllm:
        threshold, budget = COMPILE_VLLM_FROM, BATCH_TOKENS[device.partition(":")[0]]
    else:
        threshold, budget = COMPILE_FROM, auto_batch_tokens(folder.hidden_size, dtype, device)
    job = Job(
        config=config,
        plan=plan,
        folder=folder,
        user_width=config.dims or folder.hidden_size,
        scoring=scoring,
        tokenize=tokenize,
        form=form,
        device=device,
        dtype=dtype,
        max_batch_tokens=config.max_batch_tokens or budget,
        encoder=matrices[config.from_lm_head],
        compile=pays(threshold, tokens, folder, device) if config.compile is None else config.compile,
        probe=not (config.max_batch_tokens or with_vllm),
        expected_tokens=tokens,
        cached=(),
        staging=staging,
    )
    if config.cache:
        with os_errors_as(OutputError, "--cache"):
            job = replace(job, cached=tuple(seen_segments(config.cache, vector_space(job, folder))))
    model = {
        "dtype": dtype,
        "pooling": folder.pooling,
        "model_weights_sha256": folder.weights_sha256,
        "model_files_sha256": folder.files_sha256,
    }
    return job, _fingerprint(job) | model


def _made_with(config: RunConfig, folder: ModelFolder) -> dict[str, Any]:
    """What makes vectors comparable, for the metadata of their file. Values of None are not compared."""
    return {
        "model": config.model,
        "revision": config.revision,
        "model_sha256": folder.weights_sha256,
        "pooling": None if config.from_lm_head is not None else folder.pooling,
        "dims": config.dims,
        "normalized": config.normalize,
    }


def _places(config: RunConfig, suffix: str) -> tuple[Place, InputPlan]:
    """Where the result goes and what is read. suffix: of the result's own name."""
    with os_errors_as(OutputError, "--output"):
        out = output_folder(config, suffix)
    with os_errors_as(InputError, "input"):
        read = [_published(place(text), InputError) if "://" in text else text for text in config.inputs]
        return out, plan_inputs(replace(config, inputs=tuple(map(str, read))))


def _published(where: Place, kind: type[PrefillScoreError]) -> Place:
    """A place that may be a result elsewhere, of embed, as readers find it."""
    if not is_uri(where):
        return where
    with storage.reaching(where, kind):
        return published_in(where)


PLANS: dict[str, Callable[[RunConfig], Planned]] = {"run": plan_job, "embed": plan_embed, "search": plan_search}


def staging_of(out: Place, part: str = "", *, with_files: bool = False) -> Staging | RemoteStaging:
    """part: see Staging. with_files: a name that ends in .parquet or .safetensors means one file."""
    if with_files and is_one_file(out):
        if is_uri(out):
            raise UsageError(f"--output {out}: one file is written on this machine; name a folder there, or a file here")
        return FileStaging(local(out), part)
    return RemoteStaging(out) if is_uri(out) else Staging(local(out), part)


def _scoring(config: RunConfig, plan: InputPlan, user_width: int | None) -> tuple[Scoring, dict[str, str | None]]:
    """What users are scored against, and digests of it. user_width: None where the input has no vector."""
    named = {name: getattr(config, name) for name in FETCHED}
    named["items"] = _published(named["items"], ItemsError)
    fetched: dict[str, Any] = {name: storage.fetch(where, ItemsError) for name, where in named.items()}
    here = replace(config, **fetched)
    with os_errors_as(ItemsError, "--items"), storage.naming_origins():
        head, items = _head_and_items(here, user_width)
        allowed, unknown, digests = _allowed_items(here, items)
    _check_filter_types(config, plan, items)
    scoring = Scoring(items, head, allowed, unknown, pays_to_compile_search(config, plan.rows, items))
    return scoring, digests | {"items_sha256": items.sha256, "head_sha256": head.sha256 if head else None}


def _counted_files(plan: InputPlan) -> str:
    return "1 file" if len(plan.files) == 1 else f"{len(plan.files):,} files"


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
