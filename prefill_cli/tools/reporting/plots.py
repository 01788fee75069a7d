"""Plots as inline SVG for the report: drawn once by Matplotlib, coloured by the page's CSS.

Matplotlib gets colours that stand for CSS variables (COLOURS), so that one drawing serves light and dark pages. Texts stay
texts in the page's own font; ids are the plot's own, so that plots on one page do not clash; equal figures give equal bytes.
No text from data is drawn: Matplotlib would read mathematics in it.
"""

import io
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefill_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = npt.NDArray[Any]
WIDTH, HEIGHT, FONT = 400, 250, 12  # CSS pixels where the page shows a plot in its own size
INK, GRID, MAIN, OTHER = "#010101", "#020202", "#030303", "#040404"
COLOURS = {INK: "var(--muted)", GRID: "var(--line)", MAIN: "var(--main)", OTHER: "var(--other)"}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "prefill-score",
    "font.size": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "axes.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "xtick.major.pad": 6,  # so that the zeros of two axes do not meet
    "ytick.major.pad": 6,
    "xtick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
}
POWERS = [2**i for i in range(31)]


def require_matplotlib() -> None:
    """Raises UsageError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("report needs Matplotlib: pip install 'prefill-score[report]'") from None


def lengths(lower: Numbers, upper: Numbers, rows: Numbers, limit: int | None) -> str:
    """Histogram of prompt lengths on a logarithmic axis: bins (lower, upper] in tokens; limit: a line there."""

    def draw(axes: "Axes") -> None:
        for low, high, count in zip(lower, upper, rows, strict=True):
            axes.fill_between([low + 0.5, high + 0.5], [count, count], color=MAIN, linewidth=0)
        if limit:
            axes.axvline(limit + 0.5, color=OTHER, linestyle="--", linewidth=1.5)
        left, right = lower[0] + 0.5, max(upper[-1] + 0.5, (limit or 0) * 1.06)
        axes.set_xscale("log", base=2)
        axes.set_xlim(left, right)
        ticks = [tick for tick in POWERS if left <= tick <= right]
        _ticks(axes.xaxis, ticks[:: -(-len(ticks) // 7)] if len(ticks) > 1 else [int(upper[-1])])
        _from_zero(axes)

    return _svg("lengths", "tokens of a prompt", "prompts", draw)


def over_shards(name: str, borders: Numbers, values: Numbers, label: str) -> str:
    """A figure of each shard (or of a few neighbouring ones) in the order of the input; nan where there is none."""

    def draw(axes: "Axes") -> None:
        axes.stairs(np.nan_to_num(values), borders + 0.5, fill=True, color=MAIN, alpha=0.3, linewidth=0)
        axes.stairs(values, borders + 0.5, baseline=None, color=MAIN, linewidth=2)
        axes.set_xlim(0.5, borders[-1] + 0.5)
        _whole(axes.xaxis)
        _from_zero(axes)

    return _svg(name, "shard", label, draw)


def score_by_rank(ranks: Numbers, quantiles: Numbers) -> str:
    """quantiles: [ranks, 5] the scores at 10, 25, 50, 75 and 90 % of the lists."""

    def draw(axes: "Axes") -> None:
        axes.fill_between(ranks, quantiles[:, 0], quantiles[:, 4], color=MAIN, alpha=0.2, linewidth=0)
        axes.fill_between(ranks, quantiles[:, 1], quantiles[:, 3], color=MAIN, alpha=0.25, linewidth=0)
        axes.plot(ranks, quantiles[:, 2], color=MAIN)
        axes.set_xlim(ranks[0], ranks[-1])
        _whole(axes.xaxis)
        _plain(axes.yaxis)

    return _svg("ranks", "rank in the list", "score", draw)


def score_distribution(every_score: Numbers, best: Numbers, edges: Numbers) -> str:
    """Shares of all listed scores (filled) and of each list's best one (line), in %: [bins], and [bins + 1] edges."""

    def draw(axes: "Axes") -> None:
        axes.stairs(every_score, edges, fill=True, color=MAIN, alpha=0.45, linewidth=0)
        axes.stairs(best, edges, color=OTHER, linewidth=2)
        _plain(axes.xaxis)
        _from_zero(axes)

    return _svg("scores", "score", "% of the scores", draw)


def coverage(items: Numbers, recommendations: Numbers) -> str:
    """Lorenz curve: shares (0 to 1) of the catalogue and of all recommendations."""

    def draw(axes: "Axes") -> None:
        axes.plot([0, 100], [0, 100], color=INK, linestyle="--", linewidth=1)
        axes.fill_between(items * 100, recommendations * 100, items * 100, color=MAIN, alpha=0.2, linewidth=0)
        axes.plot(items * 100, recommendations * 100, color=MAIN)
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 103)
        for axis in (axes.xaxis, axes.yaxis):
            _ticks(axis, [0, 25, 50, 75, 100])

    return _svg("coverage", "% of the catalogue, most recommended first", "% of all recommendations", draw)


def short(number: float, _: object = None) -> str:
    """A number of few characters: 950, 1.2k, 34M."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def _svg(name: str, x_label: str, y_label: str, draw: Callable[["Axes"], None]) -> str:
    """What `draw` puts on the axes, as an element of a page."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its fonts and the folder of its cache are no news here
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = io.StringIO()
    with matplotlib.style.context(["default", STYLE]):  # default: whatever a matplotlibrc of the machine says
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="none", layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5))
            axis.set_major_formatter(short)
        draw(axes)
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return _inline(drawn.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """A file's SVG with colours, fonts and ids of the page. The page tells what it shows."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"\s*\n\s*", " ", svg).strip()


def _from_zero(axes: "Axes") -> None:
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top if top > 0 else 1)


def _whole(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True))


def _plain(axis: Any) -> None:
    """Scores are told in full: those of one list may differ in their last digits alone."""
    from matplotlib.ticker import ScalarFormatter

    axis.set_major_formatter(ScalarFormatter(useOffset=False))


def _ticks(axis: Any, at: list[int]) -> None:
    from matplotlib.ticker import FixedLocator

    axis.set_major_locator(FixedLocator(at))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(short)
