"""`prefill-score report`: one HTML page about a result, whole in itself: no network, no scripts, plots as inline SVG.

Equal results give equal pages. What comes from data (titles, ids, paths) is escaped by the template's engine; the plots are
the only markup that is put in as it is, and hold no text from data.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
import pyarrow as pa
from markupsafe import Markup

from prefill_cli.data.disk import replacing
from prefill_cli.data.manifest import SUCCESS
from prefill_cli.errors import OutputError, UsageError
from prefill_cli.tools.judging.comparison import compare_runs
from prefill_cli.tools.judging.result_lists import open_result
from prefill_cli.tools.reporting import page
from prefill_cli.tools.reporting.figures import ListFigures, read_list_figures
from prefill_cli.tools.reporting.panels import panels
from prefill_cli.tools.reporting.plots import require_matplotlib
from prefill_cli.tools.reporting.wording import clip
from prefill_cli.tools.titles import item_texts

TEMPLATE = "report.html.jinja"
GENERATOR = b'<meta name="generator" content="prefill-score report">'  # how a page of ours is known
SHOWN_ITEMS = 15
UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")  # characters that HTML cannot hold


@dataclass(frozen=True)
class ReportQuery:
    """Which result, where the page goes (None: <OUTPUT's name>.html here), what to compare with, where titles are."""

    output: Path
    file: Path | None
    against: Path | None
    items: Path | None
    title_column: str | None
    overwrite: bool


def write_report(query: ReportQuery) -> dict[str, Any]:
    """Write the page; returns its path and size.

    Raises:
        UsageError: Matplotlib is not installed. OutputError: no whole result of ours, or the page cannot be written.
        ItemsError: an item file or title column that was named is not there.
    """
    require_matplotlib()
    file = (query.file or Path(f"{query.output.resolve().name}.html")).resolve()
    _check_place(file, query)
    manifest = open_result(query.output).manifest
    figures = read_list_figures(query.output, manifest["options"]["layout"], page.top_k_of(manifest))
    html = render(manifest, figures, query)
    with replacing(file) as out:
        out.write(html)
    return {"report": str(query.file or file.name), "bytes": len(html)}


def render(manifest: dict[str, Any], figures: ListFigures, query: ReportQuery) -> bytes:
    """The page, in UTF-8."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_showable,
    )
    most, least = _picked(len(figures.counts))
    titles = _titles(query, manifest, figures, [*most, *least])
    text = environment.get_template(TEMPLATE).render(
        name=query.output.resolve().name,
        status=manifest["totals"].get("status", "done"),
        published=_published(query.output),
        tiles=page.tiles(manifest, figures),
        notes=page.notes(manifest, figures),
        facts=page.facts(manifest),
        panels=panels(manifest, figures, page.catalogue_of(manifest, figures)),
        stages=page.stages(manifest["totals"]),
        rejects=page.rejects(manifest["totals"]),
        most=page.item_rows(figures, most, titles),
        least=page.item_rows(figures, least, titles),
        most_note=f"Bars compare with the first. {figures.lists:,} lists have items in them.",
        least_note=page.never_recommended(manifest, figures),
        comparison=_comparison(query, manifest) if query.against else None,
        clip=clip,
    )
    return text.encode("utf-8", "backslashreplace")  # paths may hold bytes that are no text


def _comparison(query: ReportQuery, manifest: dict[str, Any]) -> dict[str, Any]:
    """How the result differs from another one."""
    assert query.against
    other, k = open_result(query.against).manifest, page.top_k_of(manifest)
    found = compare_runs(query.output, query.against, sorted({min(n, k) for n in (1, 10, k)}))
    return {
        "name": query.against.resolve().name,
        "published": _published(query.against),
        "differs": page.what_differs(manifest, other),
        "lists": page.compared_lists(found),
        "totals": page.compared_totals(manifest["totals"], other["totals"]),
    }


def _published(output: Path) -> str:
    return f"{datetime.fromtimestamp((output / SUCCESS).stat().st_mtime, UTC):%Y-%m-%d %H:%M} UTC"


def _check_place(file: Path, query: ReportQuery) -> None:
    """Refuse what a page must not replace, before anything is read."""
    if file.is_relative_to(query.output.resolve()):
        raise UsageError(f"{file}: a report does not go into the result folder itself; name another place with -o")
    if not file.parent.is_dir():
        raise OutputError(f"{file}: there is no folder {file.parent}")
    if not file.exists():
        return
    if not file.is_file():
        raise OutputError(f"{file}: is there and is no regular file; name another one with -o")
    try:
        with file.open("rb") as old:
            ours = GENERATOR in old.read(1000)
    except OSError as error:
        raise OutputError(f"{file}: cannot be read: {error.strerror}") from None
    if not ours and not query.overwrite:
        raise OutputError(f"{file}: is there and is no report of ours; name another file with -o, or say --overwrite")


def _picked(items: int) -> tuple[range, range]:
    """Places of the most and the least recommended items; none is in both."""
    most = range(min(SHOWN_ITEMS, items))
    return most, range(items - 1, max(items - 1 - SHOWN_ITEMS, len(most) - 1), -1)


def _titles(query: ReportQuery, manifest: dict[str, Any], figures: ListFigures, picked: list[int]) -> dict[Any, str | None]:
    ids = pl.Series(pl.from_arrow(figures.items.take(pa.array(picked, pa.int64()))))
    texts = item_texts(query.items, query.title_column, manifest["options"], ids)
    return {item: next(iter(columns.values()), None) for item, columns in texts.items()}


def _showable(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", value)
