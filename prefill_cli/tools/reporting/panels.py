"""The report's plots with what they say, from a result's manifest and figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from prefill_cli.tools.judging.catalogue_metrics import gini
from prefill_cli.tools.reporting import plots
from prefill_cli.tools.reporting.figures import (
    QUANTILES,
    ListFigures,
    coverage_curve,
    length_bins,
    quantiles_by_rank,
    ratio,
    shard_bins,
)
from prefill_cli.tools.reporting.wording import count, number, percent

SHOWN_SHARDS, SHARDS_OF_TABLE = 60, 12
SCORE_BINS = 60


@dataclass(frozen=True)
class Panel:
    """A plot with what it says and its figures as a table; or the reason why there is none."""

    title: str
    says: str
    svg: Markup | None = None
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = field(default_factory=list)


def panels(manifest: dict[str, Any], figures: ListFigures, catalogue: int) -> list[Panel]:
    """All plots of a result, in the order of the page. catalogue: how many items there are."""
    return [
        _lengths(manifest),
        *_shards(manifest),
        _score_by_rank(figures),
        _score_distribution(figures),
        _coverage(figures, catalogue),
    ]


def _lengths(manifest: dict[str, Any]) -> Panel:
    title, totals = "Prompt lengths", manifest["totals"]
    if not totals.get("tokens"):
        return Panel(title, "No prompt was tokenised: the users' vectors were given.")
    if not manifest.get("lengths"):
        return Panel(title, "The version that made this result kept no lengths.")
    lower, upper, rows = length_bins(manifest["lengths"])
    half = int(upper[np.searchsorted(np.cumsum(rows), rows.sum() / 2)])
    limit, cut = manifest.get("tokens", {}).get("max_length"), totals.get("truncated_rows", 0)
    says = f"Half of the prompts have at most {half:,} tokens, all of them at most {upper[-1]:,}. "
    if limit:
        says += f"{count(cut, 'prompt was', 'prompts were') if cut else 'None was'} longer than the limit of {limit:,}"
        says += f" and lost tokens ({percent(cut / max(totals['rows'], 1))})." if cut else "."
    near = limit if limit and limit <= 2 * upper[-1] else None
    spans = [_spans(bin)[0] for bin in zip(lower, upper, strict=True)]
    return Panel(
        title,
        says + (" Dashed: the limit." if near else ""),
        Markup(plots.lengths(lower, upper, rows, near)),
        ("tokens", "prompts"),
        [(span, f"{n:,}") for span, n in zip(spans, rows, strict=True)],
    )


def _shards(manifest: dict[str, Any]) -> list[Panel]:
    """Throughput, and what went through the model for each token of the prompts."""
    totals = manifest["totals"]
    if not totals.get("tokens"):
        return [_course(manifest, "throughput", "Throughput over shards", "rows_out", "search_sec", "users/s",
                        "{} users a second of the search, over all shards.")]  # fmt: skip
    return [
        _course(manifest, "throughput", "Throughput over shards", "tokens", "encode_sec", "tokens/s",
                "{} tokens of the prompts a second of the prefill pass, over all shards."),
        _course(manifest, "computed", "Computed per token over shards", "computed_tokens", "tokens", "computed per token",
                "{} tokens went through the model for each token of the prompts: below 1 where prompts are equal, begin "
                "alike or are cached, above 1 where passes are padded."),
    ]  # fmt: skip


def _course(
    manifest: dict[str, Any], name: str, title: str, numerator: str, denominator: str, label: str, says: str
) -> Panel:
    """The quotient of two figures of each shard, and of their totals. says: with {} for the latter."""
    totals, shards, names = manifest["totals"], manifest.get("shards") or {}, (numerator, denominator)
    if any(n not in totals for n in names) or not totals[denominator]:
        return Panel(title, "The manifest does not tell it.")
    says = says.format(number(totals[numerator] / totals[denominator]))
    if any(n not in shards for n in names):
        return Panel(title, f"{says} The version that made this result kept no figures of single shards.")
    borders, sums = shard_bins(shards, names, SHOWN_SHARDS)
    if len(borders) < 3:
        return Panel(title, f"{says} There is one shard, so there is no course to show.")
    if borders[-1] > SHOWN_SHARDS:
        says += f" Each step is {borders[-1] / SHOWN_SHARDS:.0f} shards or so."
    svg = Markup(plots.over_shards(name, borders, ratio(sums[numerator], sums[denominator]), label))
    borders, sums = shard_bins(shards, names, SHARDS_OF_TABLE)
    values = ratio(sums[numerator], sums[denominator])
    return Panel(title, says, svg, ("shards", label), list(zip(_spans(borders), map(number, values), strict=True)))


def _spans(borders: Iterable[int]) -> list[str]:
    """'1 to 4', '5', … of the whole numbers above one border, up to the next."""
    return [f"{a + 1:,}" if a + 1 == b else f"{a + 1:,} to {b:,}" for a, b in pairwise(borders)]


def _score_by_rank(figures: ListFigures) -> Panel:
    title = "Score by rank"
    by_rank = quantiles_by_rank(figures)
    if not by_rank:
        return Panel(title, "There is no list with an item in it.")
    if len(by_rank) == 1:
        return Panel(title, f"The lists have one item each; half of its scores are above {by_rank[1][2]:.4g}.")
    ranks = np.array(list(by_rank))
    told = np.unique(np.geomspace(1, len(ranks), 12).round().astype(int))
    says = "Line: the median of the lists. Bands: the middle half, and 10 % to 90 %. "
    says += f"The median falls from {by_rank[1][2]:.4g} to {by_rank[len(ranks)][2]:.4g}.{_sampled(figures)}"
    return Panel(
        title,
        says,
        Markup(plots.score_by_rank(ranks, np.array(list(by_rank.values())))),
        ("rank", *(f"{100 * q:.0f} %" for q in QUANTILES)),
        [(f"{rank:,}", *(f"{value:.4f}" for value in by_rank[rank])) for rank in map(int, told)],
    )


def _score_distribution(figures: ListFigures) -> Panel:
    title, scores, best = "Scores", figures.scores, figures.scores[figures.ranks == 1]
    if not len(scores):
        return Panel(title, "There is no list with an item in it.")
    low, high = float(scores.min()), float(scores.max())
    if low == high:
        return Panel(title, f"All scores are {low:.4g}.")
    edges = np.linspace(low, high, SCORE_BINS + 1)
    all_shares, best_shares = (100 * np.histogram(values, edges)[0] / len(values) for values in (scores, best))
    says = f"Filled: all listed scores, from {low:.4g} to {high:.4g}. Line: each list's best.{_sampled(figures)}"
    rows = [
        (f"{100 * q:.0f} %", f"{np.quantile(scores, q):.4f}", f"{np.quantile(best, q):.4f}") for q in (0.0, *QUANTILES, 1.0)
    ]
    svg = Markup(plots.score_distribution(all_shares, best_shares, edges))
    return Panel(title, says, svg, ("of them are below", "all scores", "best scores"), rows)


def _sampled(figures: ListFigures) -> str:
    return f" From one list in {figures.every:,}." if figures.every > 1 else ""


def _coverage(figures: ListFigures, catalogue: int) -> Panel:
    title = "Coverage of the catalogue"
    if not figures.entries:
        return Panel(title, "No item is in any list.")
    items, shares = coverage_curve(figures.counts, catalogue)
    there, head = len(figures.counts), max(1, catalogue // 100)
    says = (
        f"{there:,} of {catalogue:,} items ({percent(there / catalogue)}) are in a list. The most recommended 1 % "
        f"({count(head, 'item', 'items')}) make {percent(figures.counts[:head].sum() / figures.entries)} of all "
        f"recommendations; Gini index {gini(figures.counts, catalogue) or 0:.2f}. Dashed: every item equally often."
    )
    steps = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
    taken = [(step, max(1, round(step * catalogue))) for step in steps if step * catalogue >= 1]
    rows = [(percent(step), f"{n:,}", percent(figures.counts[:n].sum() / figures.entries)) for step, n in taken]
    return Panel(title, says, Markup(plots.coverage(items, shares)), ("of the catalogue", "items", "recommendations"), rows)
