"""The report's sentences and tables, from a result's manifest and figures; the template lays them out."""

import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from prefill_cli.data.manifest import differences
from prefill_cli.tools.reporting.figures import ListFigures
from prefill_cli.tools.reporting.wording import count, duration, number, percent, shown_id

STAGES = {
    "start": "load, check and compile the model",
    "read": "read and tokenise",
    "cache": "look up and keep vectors",
    "encode": "prefill pass",
    "search": "score and choose",
    "write": "write the parts",
}
REASONS = {
    "null_id": "the user's id is null",
    "null_prompt": "the prompt is null",
    "empty_prompt": "the prompt is nothing but white space",
    "bad_text": "the prompt is not UTF-8",
    "too_long": "longer than the limit, and --truncate says reject",
    "bad_token_ids": "ids that are none of the model's vocabulary",
    "not_finite": "the vector or its scores are not finite",
    "out_of_memory": "the memory did not suffice for this prompt alone",
    "null_vector": "the vector is null",
    "bad_vector": "the vector is not finite or has another width",
}


def tiles(manifest: dict[str, Any], figures: ListFigures) -> list[tuple[str, str, str]]:
    """The figures that a person wants first: name, value, and what it is a part of."""
    totals, catalogue = manifest["totals"], catalogue_of(manifest, figures)
    rows = totals["rows"]
    shown = [
        ("lists", f"{totals['rows_out'] - totals.get('empty_lists', 0):,}", f"of {count(rows, 'input row', 'input rows')}"),
        ("rejected", f"{totals['rejects']:,}", f"{percent(totals['rejects'] / max(rows, 1))} of the rows"),
        (
            "catalogue covered",
            percent(len(figures.counts) / max(catalogue, 1)),
            f"{len(figures.counts):,} of {catalogue:,} items",
        ),
        ("wall time", duration(totals.get("wall_sec", 0)), f"on {totals.get('device', 'an unknown device')}"),
    ]
    if totals.get("tokens"):
        rate = totals.get("tokens_per_sec", 0)
        shown.append(("tokens a second", number(rate), f"{number(totals['tokens'])} tokens, prefill pass alone"))
        cut = totals.get("truncated_rows", 0)
        shown.append(("prompts cut", f"{cut:,}", f"{percent(cut / max(rows, 1))} of the rows"))
    return shown


def notes(manifest: dict[str, Any], figures: ListFigures) -> list[str]:
    """What deserves a look, a sentence each."""
    totals = manifest["totals"]
    short_lists = figures.lists - figures.full_lists
    counted = {
        "rejects": "{} rejected; the reasons stand below, the rows in the folder _rejects.",
        "truncated_rows": "{} cut to the token limit, at the end that --truncate names.",
        "control_token_rows": "{} with text that spells a control token; see --plain-special-tokens.",
        "retried_rows": "{} encoded again, with more care or in smaller batches.",
        "empty_lists": "{} without any item: the filters left none.",
    }
    said = [text.format(count(totals[name], "row is", "rows are")) for name, text in counted.items() if totals.get(name)]
    if short_lists:
        shorter = f"{count(short_lists, 'list is', 'lists are')} shorter than {top_k_of(manifest):,}"
        said.append(f"{shorter}: the filters left no more items.")
    if totals.get("unknown_ids"):
        said.append(f"{count(totals['unknown_ids'], 'id', 'ids')} in filters that the catalogue does not have.")
    if totals.get("dropped_items"):
        said.append(f"{count(totals['dropped_items'], 'item', 'items')} left out of the catalogue: bad embeddings.")
    if totals.get("tokens") and "plain" in str(totals.get("encoder")) and manifest["options"].get("encoder") != "plain":
        said.append("The fast encoder did not serve for this model; prefill-score verify shows how the two ways differ.")
    return said


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """What ran, on what, with what."""
    model, items, totals = manifest["model"], manifest["items"], manifest["totals"]
    inputs, environment, tokens = manifest["inputs"], manifest.get("environment", {}), manifest.get("tokens", {})
    files = inputs["files"]
    paths = ", ".join(str(file["path"]) for file in files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")
    named = [
        model.get("name"),
        model.get("architecture"),
        f"{model['hidden_size']} wide" if model.get("hidden_size") else "",
    ]
    weights = model.get("weights_sha256")
    if model.get("name"):
        named += [
            f"pooling {model.get('pooling')}",
            f"at most {tokens['max_length']:,} tokens" if tokens.get("max_length") else "",
        ]
        named += [f"weights {weights[:12]}" if weights else ""]
    else:
        named = ["none: the users' vectors were given"]
    return [
        ("input", f"{count(inputs['rows'], 'row', 'rows')} in {count(len(files), 'file', 'files')}: {paths}"),
        ("model", ", ".join(str(part) for part in named if part)),
        ("items", f"{items['path']}, {items.get('items', 0):,} items, {items.get('width', '?')} wide"),
        (
            "lists",
            f"top {top_k_of(manifest):,} by {manifest['options'].get('score', 'dot')}, {manifest['options']['layout']}",
        ),
        ("ran on", ", ".join(str(totals[name]) for name in ("device", "dtype", "encoder") if totals.get(name))),
        ("machine", ", ".join(str(environment[n]) for n in ("host", "system") if environment.get(n)) or "not told"),
        ("command", _command(environment.get("command", [])) or "not told"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items()) or "not told"),
    ]


def _command(words: Sequence[str]) -> str:
    """A command line as it was typed: the program by its name."""
    return shlex.join([PurePath(words[0]).name, *words[1:]]) if words else ""


def stages(totals: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Name, what it is, how long, and its part of the longest (0 to 1)."""
    told = {name: totals[f"{name}_sec"] for name in STAGES if f"{name}_sec" in totals}
    most = max(told.values(), default=0) or 1
    return [(name, STAGES[name], duration(sec), sec / most) for name, sec in told.items()]


def rejects(totals: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Reason, what it means, how many rows, and their part of the most frequent reason's (0 to 1)."""
    reasons = totals.get("reject_reasons", {})
    most = max(reasons.values(), default=0) or 1
    return [(name, REASONS.get(name, ""), f"{n:,}", n / most) for name, n in reasons.items()]


def never_recommended(manifest: dict[str, Any], figures: ListFigures) -> str:
    """How many items are in no list, as a sentence."""
    catalogue = catalogue_of(manifest, figures)
    never = catalogue - len(figures.counts)
    told = f"{count(never, 'item is', 'items are')} in no list ({percent(never / max(catalogue, 1))} of the catalogue)."
    return f"Of those that are in a list at all. {told}" if never else "Every item is in a list."


def top_k_of(manifest: dict[str, Any]) -> int:
    """The length of a list that no filter shortens."""
    k = int(manifest["options"]["top_k"])
    return min(k, int(manifest["items"].get("items", k)))


def catalogue_of(manifest: dict[str, Any], figures: ListFigures) -> int:
    """How many items there are: those of the run, which an older manifest may not tell."""
    return max(int(manifest["items"].get("items", 0)), len(figures.counts))


def item_rows(
    figures: ListFigures, picked: Sequence[int], titles: dict[Any, str | None]
) -> list[tuple[int, str, str, str, str, float]]:
    """Of the picked items: place, title, id, lists, share of the lists, and that share as a part of the greatest shown."""
    places = np.array(picked, np.int64)
    ids, n = figures.items.take(pa.array(places)).to_pylist(), figures.counts[places]
    most = max(n.max(initial=0), 1)
    return [
        (place + 1, titles.get(item) or "", shown_id(item), f"{c:,}", percent(c / figures.lists), c / most)
        for place, item, c in zip(picked, ids, n, strict=True)
    ]


def compared_totals(now: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Name, this run's total, the other's, and the change; of those that both manifests tell."""
    forms = {
        "rows": ("input rows", "{:,}"), "rows_out": ("rows out", "{:,}"),
        "rejects": ("rejects", "{:,}"), "empty_lists": ("empty lists", "{:,}"), "tokens": ("tokens", "{:,}"),
        "computed_tokens": ("tokens computed", "{:,}"), "truncated_rows": ("prompts cut", "{:,}"),
        "cached_rows": ("vectors from the cache", "{:,}"), "tokens_per_sec": ("tokens a second", "{:,.0f}"),
        "wall_sec": ("wall time, s", "{:,.1f}"),
    }  # fmt: skip
    rows = []
    for name, (label, form) in forms.items():
        if name in now and name in other and (now[name] or other[name]):
            a, b = now[name], other[name]
            change = "same" if a == b else f"{100 * (a - b) / b:+.1f} %" if b else "new"
            rows.append((label, form.format(a), form.format(b), change))
    return rows


def compared_lists(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What comparison.compare_runs found: name, value, what it says."""
    rows = [
        (
            "users in both",
            f"{found['users']:,}",
            f"{found['only_in_output']:,} only here, {found['only_in_other']:,} only there",
        ),
    ]
    if found["users"]:
        rows += [
            ("unchanged lists", percent(found["unchanged"]), "the same items in the same order"),
            *(
                (f"overlap at {k}", percent(share), f"of the first {k} items are among the other's first {k}")
                for k, share in found["overlap"].items()
            ),
            ("rank-biased overlap", f"{found['rbo']:.3f}", f"1 the same, 0 nothing in common; p = {found['rbo_p']:g}"),
        ]
    return rows


def what_differs(now: dict[str, Any], other: dict[str, Any]) -> str:
    """Options, inputs, model and items that are not the same in both manifests, as a sentence."""
    names = differences(other["fingerprint"], now["fingerprint"])
    return (
        f"What differs in what went in (then, now here): {names}."
        if names
        else "Inputs, model, items and options are equal."
    )
