"""The report page: figures against brute force, hostile texts, what is missing, and how a real browser shows it.

`python tests/test_report.py docs/report.png` makes the picture in the documents (needs Chromium): the sample data scored in
twenty shards, and compared with a run that reads the last 64 tokens of each prompt only.
"""

import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import CHROMIUM, Browser
from conftest import HIDDEN, PROJECT, random_prompts, write_items, write_prompts
from PIL import Image
from typer.testing import CliRunner

from prefill_cli import cli, pipeline
from prefill_cli.config import RunConfig
from prefill_cli.data.disk import read_json, write_json
from prefill_cli.data.lengths import histogram
from prefill_cli.data.manifest import MANIFEST
from prefill_cli.engines.local import run_shards
from prefill_cli.tools.judging.comparison import compare_runs
from prefill_cli.tools.reporting import figures, plots
from prefill_cli.tools.reporting.figures import read_list_figures

HOSTILE = [
    "<script>alert(1)</script>", "\"><img src=x onerror='alert(2)'>", "</style></svg><b>&amp;", "{{ 7 * 7 }}{% raw %}",
    "\u202eevil\u202c \u05d0\u05d1\u05d2", "👩‍👩‍👧 naïve 日本語", "a" * 500, "many words " * 40,
    "nul\x00 bell\x07 esc\x1b[31m",
    "$\\frac{1}{2}$ 'q' `b`",
]  # fmt: skip


def report(*arguments: object):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """What stands in a page: texts, tags with their attributes, and whether every element is closed in order."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(output, *arguments: object) -> Page:
    result = report(output, "-o", "page.html", *arguments)
    assert result.exit_code == 0, result.stderr
    return Page(Path("page.html").read_text())


def change(output, **changes) -> None:
    """Another manifest; None takes a part away."""
    told = read_json(output / MANIFEST)
    told |= changes
    write_json(output / MANIFEST, {name: value for name, value in told.items() if value is not None})


@pytest.fixture
def night(job, tmp_path):
    """Lists of which one is empty, one short and the others full; two rejects; a prompt that is cut."""
    seen = [["i1"], [f"i{i}" for i in range(50)], [f"i{i}" for i in range(48)], *[["i3", "i4"]] * 25]
    prompts = [*random_prompts(27), " ".join(["w1"] * 90), None, " "]
    write_prompts(job.inputs, prompts, seen=pa.array([*seen, [], []], pa.list_(pa.string())))
    job.options = {"exclude_column": "seen", "max_rejects": "2", "shard_rows": 4}
    job.run(**job.options)
    return job


@pytest.fixture
def unplotted(monkeypatch):
    """Plots are drawn by none: they are not what the test is about, and most of the time."""
    monkeypatch.setattr(plots, "_svg", lambda *_: "<svg></svg>")


# --- figures ----------------------------------------------------------------------------------------------------------


def lists_of(output) -> list[tuple[list, list]]:
    """(item ids, scores) of each list that has any, from the nested layout."""
    table = pq.read_table(output)
    pairs = zip(table["item_ids"].to_pylist(), table["scores"].to_pylist(), strict=True)
    return [pair for pair in pairs if pair[0]]


@pytest.mark.parametrize("layout", ["nested", "long"])
@pytest.mark.parametrize("batch_entries", [1, 13, 1 << 20])
def test_figures_equal_brute_force_in_both_layouts(night, tmp_path, monkeypatch, layout, batch_entries):
    monkeypatch.setattr(figures, "BATCH_ENTRIES", batch_entries)
    monkeypatch.setattr(figures, "COUNTED_ROWS", 10)
    night.run(**night.options, layout=layout, output=tmp_path / layout)
    found, lists = read_list_figures(tmp_path / layout, layout, 5), lists_of(night.out)
    assert (len(lists), sorted({len(ids) for ids, _ in lists})) == (27, [2, 5])
    assert (found.lists, found.full_lists, found.every) == (27, 26, 1)
    counts = Counter(item for ids, _ in lists for item in ids)
    expected = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    assert list(zip(found.items.to_pylist(), found.counts.tolist(), strict=True)) == expected
    for rank, quantiles in figures.quantiles_by_rank(found).items():
        column = [scores[rank - 1] for _, scores in lists if len(scores) >= rank]
        assert np.allclose(quantiles, np.quantile(column, figures.QUANTILES), rtol=1e-12)
    assert set(figures.quantiles_by_rank(found)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_of_many_lists_evenly_spaced_ones_give_the_scores(job, tmp_path, monkeypatch, layout, unplotted):
    job.run(shard_rows=7, layout=layout)
    job.run(output=tmp_path / "nested")
    monkeypatch.setattr(figures, "SAMPLE_SCORES", 30)
    monkeypatch.setattr(figures, "BATCH_ENTRIES", 11)
    found = read_list_figures(job.out, layout, 5)
    assert (found.every, found.lists, found.entries) == (5, 30, 150), "all are counted"
    assert found.scores.tolist() == [score for _, scores in lists_of(tmp_path / "nested")[::5] for score in scores]
    assert found.ranks.tolist() == [1, 2, 3, 4, 5] * 6
    assert "From one list in 5." in page_of(job.out).text


@pytest.mark.parametrize("kind", ["int64", "uint8", "binary", "large_string"])
def test_item_ids_of_any_type_are_counted_and_titled(job, tmp_path, kind, unplotted):
    values = {"binary": [b"\xff%d" % i for i in range(50)], "large_string": [f"ü{i}" for i in range(50)]}
    ids = pa.array(values.get(kind, range(50)), getattr(pa, kind)())
    table = pq.read_table(write_items(tmp_path / "titled.parquet", ids=ids))
    items = tmp_path / "titled.parquet"
    pq.write_table(table.append_column("title", pa.array([f"Title {i}" for i in range(50)])), items)
    job.run(items=items)
    text = page_of(job.out).text
    best = read_list_figures(job.out, "nested", 5).items[0].as_py()
    assert f"1 Title {ids.to_pylist().index(best)} " in text


@pytest.mark.parametrize(("counts", "catalogue"), [([9, 4, 4, 1], 4), ([9, 4, 4, 1], 30), ([1] * 12, 12), ([5], 1), ([], 7)])
def test_the_coverage_curve_is_what_its_definition_says(counts, catalogue):
    every = np.array([*counts, *[0] * (catalogue - len(counts))], float)
    items, shares = figures.coverage_curve(np.array(counts, np.int64), catalogue)
    assert (items[0], shares[0], items[-1]) == (0, 0, 1)
    for x, y in zip(items, shares, strict=True):
        assert y == pytest.approx(every[: round(x * catalogue)].sum() / max(every.sum(), 1))


def test_length_bins_hold_the_lengths_that_were_counted():
    lengths = [1, 2, 8, 9, 10, 11, 63, 64, 65, 5_000]
    lower, upper, rows = figures.length_bins({str(bound): n for bound, n in histogram(lengths).items()})
    assert rows.tolist() == [sum(low < n <= high for n in lengths) for low, high in zip(lower, upper, strict=True)]
    assert rows.sum() == len(lengths)


@pytest.mark.parametrize(("shards", "bins"), [(1, 1), (7, 7), (60, 60), (61, 60), (5_000, 60)])
def test_shards_are_added_up_in_bins_without_losing_any(shards, bins):
    given = {"tokens": list(range(shards)), "encode_sec": [0.5] * shards}
    borders, sums = figures.shard_bins(given, ("tokens", "encode_sec"), 60)
    assert (len(borders), borders[0], borders[-1]) == (bins + 1, 0, shards)
    for i, (start, stop) in enumerate(itertools.pairwise(borders)):
        assert stop > start
        assert sums["tokens"][i] == sum(range(start, stop))
    assert sums["encode_sec"].sum() == pytest.approx(shards / 2)


def test_nothing_is_divided_by_nothing():
    assert np.array_equal(figures.ratio(np.array([4.0, 4.0]), np.array([2.0, 0.0])), [2.0, np.nan], equal_nan=True)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_manifest_and_the_lists_say(night):
    page = page_of(night.out)
    totals, found = read_json(night.out / MANIFEST)["totals"], read_list_figures(night.out, "nested", 5)
    for said in (
        "lists 27 of 30 input rows", "rejected 2 6.7 % of the rows", f"catalogue covered {2 * len(found.counts)}.0 %",
        "prompts cut 1 3.3 % of the rows", "1 row is without any item", "1 list is shorter than 5",
        "1 prompt was longer than the limit of 64 and lost tokens (3.3 %)", "null_prompt the prompt is null 1",
        "empty_prompt the prompt is nothing but white space 1", f"{totals['tokens']:,} tokens",
        f"{50 - len(found.counts)} items are in no list", f"1 {found.items[0]} {found.counts[0]} ",
        f"{found.items[-1]} {found.counts[-1]} ", "30 rows in 1 file", "LlamaConfig, 32 wide", "top 5 by dot, nested",
        "torch 2",
    ):  # fmt: skip
        assert said in page.text, said
    assert [tag for tag, _ in page.tags].count("svg") == 6
    assert [tag for tag, _ in page.tags].count("details") == 6, "each plot's figures stand in a table too"
    images = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(images) == 6
    assert all(len(image["aria-label"]) > 30 for image in images)


def test_equal_results_give_equal_pages_and_ids_are_unique(night):
    page = page_of(night.out)
    first = Path("page.html").read_bytes()
    page_of(night.out)
    assert Path("page.html").read_bytes() == first
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    referred = re.findall(r'(?:href="|url\()#([^")]+)', first.decode())
    assert set(referred) < set(ids)


def test_nothing_is_fetched_and_nothing_runs(night):
    page = page_of(night.out)
    html = Path("page.html").read_text()
    assert "://" not in re.sub(r">[^<]*<", "><", html), "no address of anything in any tag"
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")], tag
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in html
    assert "font-family" not in html


def hostile_items(path) -> Path:
    ids = pa.array([*HOSTILE, *(f"i{i}" for i in range(10, 20))])
    table = pq.read_table(write_items(path, ids=ids, vectors=np.random.default_rng(3).standard_normal((20, HIDDEN))))
    pq.write_table(table.append_column("title", pa.array([*HOSTILE, *[None] * 5, *[""] * 5])), path)
    return path


def test_hostile_texts_are_texts(job, tmp_path, monkeypatch, unplotted):
    monkeypatch.setattr("prefill_cli.tools.report.SHOWN_ITEMS", 20)
    output = tmp_path / "<b onclick='x'>&amp; {{ 1 }}.topk"
    job.run(items=hostile_items(tmp_path / "items.parquet"), top_k=20, output=output)
    page = page_of(output)
    assert {tag for tag, _ in page.tags} >= {"svg", "bdi"}
    assert not {"script", "img", "b onclick"} & {tag for tag, _ in page.tags}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    whole = [attributes["title"] for tag, attributes in page.tags if tag == "bdi" and "title" in attributes]
    for title in HOSTILE:
        shown = re.sub("[\x00\x07\x1b]", "\ufffd", title)
        assert whole.count(shown) == 2, "as a title and as an id"
        assert shown in page.texts or shown[:119] + "…" in page.texts
    assert output.name in page.texts
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", Path("page.html").read_text())


def test_a_name_that_is_no_text_does_no_harm(job, unplotted):
    output = Path(os.fsdecode(b"night-\xff"))
    job.run(output=output)
    assert "night-\\udcff" in page_of(output).text


def test_titles_come_from_another_item_file_or_column_when_named(night, tmp_path, unplotted):
    table = pq.read_table(night.items).append_column("name", pa.array([f"Name {i}" for i in range(50)]))
    pq.write_table(table, tmp_path / "named.parquet")
    assert "Name " not in page_of(night.out).text
    for arguments in (("-i", tmp_path / "named.parquet"), ("-i", tmp_path / "named.parquet", "--title-column", "name")):
        assert len(re.findall("Name ", page_of(night.out, *arguments).text)) == 30
    result = report(night.out, "-o", "page.html", "--title-column", "nme")
    assert (result.exit_code, result.stdout) == (4, "")


def test_no_rows_and_nothing_but_rejects_give_a_page_without_plots(job):
    for prompts in ([], [None, None]):
        write_prompts(job.inputs, prompts)
        job.run(max_rejects="100%", overwrite=True)
        page = page_of(job.out)
        assert "svg" not in {tag for tag, _ in page.tags}
        for said in ("No prompt was tokenised", "There is no list with an item in it", "No item is in any list", "lists 0"):
            assert said in page.text, said


def test_lists_of_one_item_and_of_one_score_are_told_in_words(job, unplotted):
    write_items(job.items, vectors=np.ones((50, HIDDEN), np.float32))
    write_prompts(job.inputs, ["w1"] * 3)
    job.run(top_k=1)
    text = page_of(job.out).text
    assert "The lists have one item each" in text
    assert "All scores are " in text
    assert "There is one shard, so there is no course to show." in text


def test_a_search_tells_of_users_and_has_no_tokens(job, tmp_path, unplotted):
    vectors = np.random.default_rng(1).standard_normal((40, HIDDEN)).astype(np.float32)
    np.save(tmp_path / "users.npy", vectors)
    config = RunConfig(inputs=(str(tmp_path / "users.npy"),), items=job.items, output=job.out, top_k=5, shard_rows=10)

    class Silent:
        def start(self, *_): ...
        def advance(self, *_): ...

    pipeline.run(config, run_shards, Silent(), "search")
    page = page_of(job.out)
    for said in ("No prompt was tokenised", "users a second of the search", "none: the users' vectors were given"):
        assert said in page.text, said
    assert "Computed per token" not in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 4


def test_what_an_older_manifest_lacks_is_said(night, unplotted):
    kept = ("status", "output", "rows", "rows_out", "rejects", "tokens", "encode_sec")
    totals = read_json(night.out / MANIFEST)["totals"]
    older = {name: totals[name] for name in kept}
    change(night.out, lengths=None, shards=None, versions=None, environment=None, parts=None, totals=older)
    page = page_of(night.out)
    for said in ("kept no lengths", "kept no figures of single shards", "versions not told", "machine not told"):
        assert said in page.text, said
    assert [tag for tag, _ in page.tags].count("svg") == 3


def test_a_comparison_says_what_comparison_py_finds_and_what_differs(night, tmp_path, unplotted):
    night.run(**night.options | {"max_rejects": "3"}, top_k=4, output=tmp_path / "before")
    page, found = page_of(night.out, "--against", tmp_path / "before"), compare_runs(night.out, tmp_path / "before", (1, 5))
    assert found["users"] == 27
    for said in (
        "Compared with before Published 20", "top_k (4, now 5)", "users in both 27 0 only here, 0 only there",
        f"overlap at 5 {100 * found['overlap']['5']:.1f} %", "overlap at 1 100 %", "unchanged lists 3.7 %",
        f"rank-biased overlap {found['rbo']:.3f}", "input rows 30 30 same",
    ):  # fmt: skip
        assert said in page.text, said
    assert "Inputs, model, items and options are equal." in page_of(night.out, "--against", night.out).text
    assert "Compared" not in page_of(night.out).text
    result = report(night.out, "--against", "nowhere")
    assert (result.exit_code, result.stdout) == (6, "")
    assert re.fullmatch(r"error: nowhere: not the result folder.*\n", result.stderr)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.1234, "12.3 %"), (0.00001, "0.001 %"), (0.99999, "99.99 %"), (0.9994, "99.94 %")],
)
def test_a_share_is_never_rounded_to_nothing_or_all(share, text):
    from prefill_cli.tools.reporting.wording import percent

    assert percent(share) == text


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_page_goes_beside_the_caller_under_the_results_name(night, monkeypatch, unplotted):
    monkeypatch.chdir(night.out)
    Path("../elsewhere").mkdir()
    os.chdir("../elsewhere")
    result = report("../out/")
    assert json.loads(result.stdout) == {"report": "out.html", "bytes": Path("out.html").stat().st_size}
    assert [path.name for path in Path().iterdir()] == ["out.html"], "nothing temporary is left"
    assert report("../out").exit_code == 0, "a page of ours is replaced"


@pytest.mark.parametrize("what", ["text", "page", "folder", "empty"])
def test_what_is_no_report_of_ours_is_kept(night, what, unplotted):
    path = Path("mine.html")
    path.mkdir() if what == "folder" else path.write_text({"text": "x", "page": "<!doctype html><p>", "empty": ""}[what])
    result = report(night.out, "-o", path)
    assert (result.exit_code, result.stdout) == (6, "")
    assert re.fullmatch(r"error: .*mine\.html: .*\n", result.stderr)
    result = report(night.out, "-o", path, "--overwrite")
    assert result.exit_code == (6 if what == "folder" else 0)


def test_places_that_cannot_be_are_refused_in_one_line(night, unplotted):
    for where, code in ((night.out / "page.html", 2), ("gone/page.html", 6), ("/dev/null", 6)):
        result = report(night.out, "-o", where, "--overwrite")
        assert (result.exit_code, result.stdout) == (code, ""), where
        assert len(result.stderr.splitlines()) == 1
    assert not (night.out / "page.html").exists()


@pytest.mark.parametrize("harm", ["nothing there", "a part is gone", "a part is garbage", "vectors"])
def test_what_is_no_whole_result_is_an_error_of_the_output(night, harm):
    part = night.out / "part-00000.parquet"
    if harm == "vectors":
        words = ["embed", night.inputs, "-m", night.model, "-o", "vectors", "--device", "cpu", "--max-rejects", "2"]
        assert CliRunner().invoke(cli.app, list(map(str, words))).exit_code == 0
    elif harm == "a part is garbage":
        part.write_bytes(b"x" * part.stat().st_size)
    elif harm == "a part is gone":
        part.unlink()
    result = report({"nothing there": "nowhere", "vectors": "vectors"}.get(harm, night.out), "-o", "page.html")
    assert (result.exit_code, result.stdout) == (6, "")
    assert re.fullmatch(r"error: .*\n", result.stderr)
    assert not Path("page.html").exists()


def test_without_matplotlib_the_error_says_how_to_get_it_and_nothing_else_needs_it(night):
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv = ['prefill-score', *sys.argv[1:]]\n"
        "from prefill_cli.cli import main; main()"
    )
    told = {"report": (2, "error: report needs Matplotlib: pip install 'prefill-score[report]'\n"), "show": (0, "")}
    for command, expected in told.items():
        words = [sys.executable, "-c", code, command, night.out]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == expected


# --- colours ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_and_lines_stand_out_in_light_dark_and_print():
    template = (PROJECT / "prefill_cli" / "tools" / "reporting" / "report.html.jinja").read_text()
    palettes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", template, re.DOTALL)
    ]
    assert len(palettes) == 3
    for palette in palettes:
        for name, least in (("ink", 7), ("muted", 4.5), ("good", 4.5), ("main", 3), ("other", 3)):
            for ground in ("page", "card"):
                bright, dim = sorted((luminance(palette[name]), luminance(palette[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= least, (name, ground)


# --- in a browser -----------------------------------------------------------------------------------------------------

INSIDE = """(() => {
  const said = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) said.push(`the page is ${wide} wide`);
  for (const element of document.querySelectorAll('body *'))
    if (!element.closest('.scroll') && element.getBoundingClientRect().right > innerWidth + 0.5)
      said.push(`${element.tagName} ${element.className} leaves the window`);
  for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    if (texts.length < 4) said.push('a plot without texts');
    for (const [text, at] of texts) {
      if (at.left < box.left - 0.5 || at.right > box.right + 0.5 || at.top < box.top - 0.5 || at.bottom > box.bottom + 0.5)
        said.push(`"${text}" leaves its plot`);
      if (at.height < 8) said.push(`"${text}" is too small to read`);
      for (const [other, there] of texts)
        if (at !== there && at.left < there.right && there.left < at.right && at.top < there.bottom && there.top < at.bottom)
          said.push(`"${text}" overlaps "${other}"`);
    }
  }
  return said;
})()"""
WINDOWS = {"desktop": 1280, "tablet": 800, "phone": 360}


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def busy(job, tmp_path):
    """A page with everything on it: hostile titles, many shards, rejects, cut prompts, large numbers."""
    prompts = [*random_prompts(57), *[" ".join(["w1"] * 90)] * 3, None, " "]
    write_prompts(job.inputs, prompts)
    job.run(items=hostile_items(tmp_path / "items.parquet"), top_k=8, shard_rows=8, max_rejects="2")
    told = read_json(job.out / MANIFEST)
    shards = {name: [value * 1_000_003 for value in values] for name, values in told["shards"].items()}
    lengths = {bound: rows * 123_457 for bound, rows in told["lengths"].items()}
    job.run(items=job.items, output=tmp_path / "before", top_k=8, max_rejects="2")
    change(job.out, shards=shards | {"encode_sec": told["shards"]["encode_sec"]}, lengths=lengths)
    page_of(job.out, "--against", tmp_path / "before")
    return Path("page.html")


def image_of(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


@pytest.mark.browser
def test_the_page_fits_every_window_and_no_text_is_cut_off_or_overlaps(browser, busy):
    for name, width in WINDOWS.items():
        browser.open(busy, width)
        assert browser.ask("document.querySelectorAll('svg text').length") > 50
        assert browser.ask(INSIDE) == [], name
        browser.ask("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert browser.ask(INSIDE) == [], f"{name}, tables open"
        assert browser.told == [], "nothing on the console, nothing fetched"


@pytest.mark.browser
def test_pages_with_little_on_them_fit_too(browser, job):
    for prompts in ([], ["w1"], random_prompts(3)):
        write_prompts(job.inputs, prompts)
        job.run(overwrite=True, shard_rows=1)
        page_of(job.out)
        browser.open(Path("page.html"), WINDOWS["phone"])
        assert (browser.ask(INSIDE), browser.told) == ([], [])


@pytest.mark.browser
def test_the_page_is_seen_in_light_and_dark(browser, busy):
    for width in (WINDOWS["desktop"], WINDOWS["phone"]):
        shots = []
        for dark in (False, True):
            browser.open(busy, width, dark=dark)
            ground = browser.ask("getComputedStyle(document.body).backgroundColor")
            shots.append(image_of(browser.screenshot()))
            assert shots[-1].getpixel((2, 2)) == tuple(map(int, re.findall(r"\d+", ground)))
            assert shots[-1].width == width
            plots = browser.ask(
                "[...document.querySelectorAll('svg')].map(s => Object.values(s.getBoundingClientRect().toJSON()))"
            )
            assert len(plots) == 6
            for left, top, wide, high, *_ in plots:
                plot = shots[-1].crop((int(left), int(top), int(left + wide), int(top + high)))
                assert len(plot.getcolors(1 << 20)) > 20, "something is drawn"
        assert shots[0].size == shots[1].size
        light, dark = (np.asarray(shot.convert("L")).mean() for shot in shots)
        assert light > 180
        assert dark < 80


@pytest.mark.browser
def test_the_page_can_be_printed(browser, busy):
    browser.open(busy, WINDOWS["desktop"], dark=True)
    browser.do("Emulation.setEmulatedMedia", media="print")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
    browser.do("Emulation.setEmulatedMedia", media="")


def picture(path: Path) -> None:
    """Make the documents' picture of the sample's report, without the part that tells of the machine."""
    sample = PROJECT / "sample_data"
    given = ["-m", sample / "model", "-i", sample / "items.parquet", "--exclude-column", "seen_items", "-k", "50", "--quiet"]

    def command(*words: object) -> None:
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        subprocess.run([sys.executable, "-m", "prefill_cli", *map(str, words)], check=True, cwd=folder, env=environment)

    with tempfile.TemporaryDirectory() as folder:
        command("run", sample / "prompts.parquet", *given, "--shard-rows", "100")
        command("run", sample / "prompts.parquet", *given, "--max-length", "64", "-o", "before.topk")
        command("report", "prompts.topk", "--against", "before.topk")
        browser = Browser()
        browser.open(Path(folder) / "prompts.topk.html", 1200)
        high = browser.ask("document.getElementById('facts').getBoundingClientRect().top + scrollY")
        shot = image_of(browser.screenshot())
        browser.close()
    shot.crop((0, 0, shot.width, int(high))).quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


if __name__ == "__main__":
    assert CHROMIUM, "there is no Chromium on this machine"
    picture(Path(sys.argv[1]).resolve())
