"""`prefill-score inspect`: what a path is, what it holds, and what is wrong with it, in the words that `run` would use."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from prefill_cli.config import RunConfig
from prefill_cli.data import manifest
from prefill_cli.data.inputs import PARQUET_SUFFIXES, find_files, plan_inputs, read_footer
from prefill_cli.data.results import REJECTS_FOLDER
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.data.vectors import width_of_vectors
from prefill_cli.encoding.loading import load_base_model, open_model_folder
from prefill_cli.errors import InputError, OutputError, PrefillScoreError, first_line
from prefill_cli.matrices import MATRIX_SUFFIXES, metadata_of
from prefill_cli.parquet import FAULTS, open_parquet
from prefill_cli.scoring.items import load_items
from prefill_cli.tools.tables import reading, scan

EXAMPLE = "The last title watched"


@dataclass
class Finding:
    """What was found at a path. `exit_code` is 0 where nothing is wrong, else what `run` would exit with."""

    path: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    exit_code: int = 0


def inspect_path(path: Path, config: RunConfig) -> Finding:
    """Look at one path; a problem is part of the finding, not an error."""
    finding = Finding(str(path), "unknown")
    try:
        finding.kind, look = _kind(path, config)
        look(path, config, finding.facts)
    except PrefillScoreError as error:
        finding.problem, finding.exit_code = str(error), error.exit_code
    return finding


def _kind(path: Path, config: RunConfig) -> tuple[str, Any]:
    if manifest.read_manifest(path) is not None:
        return "result", _result
    if path.is_dir() and ((path / "config.json").exists() or not any(p.suffix in PARQUET_SUFFIXES for p in path.rglob("*"))):
        return "model", _model
    if path.suffix == ".safetensors" and "head" in metadata_of(path):
        return "head", _head
    if path.suffix in MATRIX_SUFFIXES:
        return "items", _items
    names = read_footer(find_files([str(path)])[0]).schema.names
    if config.embedding_column in names and config.id_column in names and config.item_id_column not in names:
        return "vectors", _vectors
    return ("items", _items) if config.embedding_column in names else ("prompts", _prompts)


def _model(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    config = replace(config, model=str(path), revision=None)
    folder = open_model_folder(config)
    facts |= {
        "architecture": type(folder.config).__name__,
        "hidden_size": folder.hidden_size,
        "positions": folder.positions or "no limit",
        "vocabulary": folder.vocabulary,
        "pooling": folder.pooling,
        "weights_sha256": folder.weights_sha256,
    }
    tokenizer = load_tokenizer(str(path), config)
    prompts = PromptTokenizer(tokenizer, config, folder.positions, folder.vocabulary)
    facts |= {
        "max_length": prompts.limit or "no limit",
        "chat_template": "yes" if tokenizer.chat_template else "no",
        "example": f"{EXAMPLE!r} → " + " ".join(f"{token}:{i}" for i, token in prompts.describe(EXAMPLE)),
    }
    model = load_base_model(folder, "cpu", "bfloat16", config.trust_remote_code)
    facts["parameters"] = f"{sum(p.numel() for p in model.parameters()):,} without the vocabulary head"


def _items(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    items = load_items(replace(config, items=path), None)
    low, middle, high = np.quantile(items.norms, (0, 0.5, 1))
    facts |= {
        "items": f"{len(items):,}",
        "width": items.width,
        "id_type": str(items.ids.type),
        "norms": f"{low:.4g} / {middle:.4g} / {high:.4g} (least / median / greatest)",
        "provenance": json.dumps(items.provenance) if items.provenance else "not stored",
    }


def _vectors(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    config = replace(config, inputs=(str(path),), vector_column=config.vector_column or config.embedding_column)
    plan = plan_inputs(config)
    facts |= {"rows": f"{plan.rows:,}", "width": width_of_vectors(plan, config), "id_type": str(plan.id_type)}


def _head(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    from prefill_cli.scoring.heads import load_head

    head = load_head(path, metadata_of(path)["head"], None)
    facts |= {
        "head": head.kind,
        "activation": head.activation,
        "takes": f"{head.inputs} numbers" + (" (the user's, then the item's)" if head.kind == "mlp" else ""),
        "layers": " → ".join(str(len(bias)) for _, bias in head.layers),
    }


def _prompts(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    files = [read_footer(p) for p in find_files([str(path)])]
    facts |= {
        "files": len(files),
        "rows": f"{sum(f.rows for f in files):,}",
        "row_groups": sum(len(f.group_rows) for f in files),
        "columns": ", ".join(f"{f.name} {f.type}" for f in files[0].schema),
    }
    plan_inputs(replace(config, inputs=(str(path),)))
    if not (config.messages_column or config.token_ids_column):
        text, user = pl.col("prompt"), pl.col("user")
        characters = text.str.len_chars()
        with reading(path, InputError):
            table = scan(
                [f.path for f in files],
                pl.col(config.prompt_column).cast(pl.String).alias("prompt"),
                pl.col(config.id_column).alias("user"),
            )
            row = table.select(
                null_ids=user.null_count(),
                repeated_ids=pl.len() - user.n_unique(),
                null_prompts=text.null_count(),
                blank_prompts=text.str.strip_chars().eq("").sum(),
                repeated_prompts=pl.len() - text.n_unique(),
                least=characters.min(), median=characters.median(), greatest=characters.max(),
            ).collect(engine="streaming").to_dicts()[0]  # fmt: skip
        spread = f"{row.pop('least')} / {row.pop('median')} / {row.pop('greatest')} (least / median / greatest)"
        facts |= row | {"characters": spread}


def _result(path: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    stored = manifest.read_manifest(path) or {}
    totals = stored["totals"]
    facts |= {name: totals[name] for name in ("rows", "rows_out", "rejects", "empty_lists", "tokens", "device", "dtype")}
    facts |= {
        "model": stored["model"]["name"],
    }
    if stored["items"]:
        options = stored["options"]
        facts |= {"items": stored["items"]["path"], "top_k": options["top_k"], "layout": options["layout"]}
    if damage := manifest.damage(path, stored):
        raise OutputError(f"{path}: {damage}, so it was changed after it was published; the command that made it mends it")
    parts = sorted(path.glob("part-*.parquet"))
    try:
        rows = sum(open_parquet(p).metadata.num_rows for p in parts)
        rejects = sum(open_parquet(p).metadata.num_rows for p in (path / REJECTS_FOLDER).glob("*.parquet"))
    except FAULTS as error:
        raise OutputError(f"{path}: a part cannot be read: {first_line(error)}") from None
    facts["parts"] = len(parts)
    if rejects != totals["rejects"] or rows != totals["part_rows"]:
        raise OutputError(
            f"{path}: {rows} rows and {rejects} rejects are there, but {totals['part_rows']} and {totals['rejects']} "
            "were written"
        )
