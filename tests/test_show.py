"""What a person sees of a result: lists with titles, histories, and errors in the result's own words."""

import datetime
import io
import json
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, random_prompts, write_prompts
from typer.testing import CliRunner

from prefill_cli import cli, views
from prefill_cli.data.manifest import MANIFEST


def show(*arguments: object):
    return CliRunner().invoke(cli.app, ["show", *map(str, arguments)], env={"COLUMNS": "120"})


def lists(*arguments: object) -> list[dict]:
    result = show(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def titled_items(path, ids=None, **columns):
    vectors = np.random.default_rng(3).standard_normal((20, HIDDEN), dtype=np.float32)
    given = {
        "item_id": pa.array([f"i{i}" for i in range(20)]) if ids is None else ids,
        "genre": pa.array([f"genre {i % 3}" for i in range(20)]),
        "title": pa.array([f"Title {i}" for i in range(20)]),
        "year": pa.array(range(1980, 2000)),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), HIDDEN),
    }
    table = {name: column for name, column in (given | columns).items() if column is not None}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def night(job, tmp_path):
    """A result with titles and histories."""
    seen = pa.array([["i1", "i2"], [], None, *[[f"i{i}" for i in range(12)]] * 5], pa.list_(pa.string()))
    job.inputs = write_prompts(tmp_path / "in" / "prompts.parquet", random_prompts(8), seen=seen)
    job.items = titled_items(tmp_path / "items.parquet")
    job.run(items=job.items, exclude_column="seen")
    return job


def test_the_first_users_are_shown_with_titles_and_histories(night):
    shown = lists(night.out)
    table = pq.read_table(night.out).slice(0, 3).to_pylist()
    assert [user["id"] for user in shown] == [1000, 1001, 1002]
    assert [user["history"] for user in shown] == [["Title 1", "Title 2"], [], []]
    for user, row in zip(shown, table, strict=True):
        assert [item["item_id"] for item in user["items"]] == row["item_ids"]
        assert [item["rank"] for item in user["items"]] == [1, 2, 3, 4, 5]
        assert [item["title"] for item in user["items"]] == [f"Title {i[1:]}" for i in row["item_ids"]]
        assert np.allclose([item["score"] for item in user["items"]], row["scores"])


def test_people_get_a_table(night):
    text = show(night.out, "--users", 4, "--top", 2).stdout
    assert "user_id 1000\nhistory: Title 1, Title 2\n" in text
    assert "user_id 1001\nhistory: nothing\n" in text
    assert "history: … 4 earlier, Title 4, " in text, "the newest eight of twelve"
    assert re.search(r"^rank +score +item_id +title +genre *$", text, re.M)
    assert len(re.findall(r"^ +1 +-?\d+\.\d{4} +i\d+ +Title \d+ +genre \d *$", text, re.M)) == 4
    assert not re.search(r"^ +3 ", text, re.M)


def test_options_say_how_many_users_and_items(night):
    shown = lists(night.out, "--users", 5, "--top", 2)
    assert [len(user["items"]) for user in shown] == [2] * 5


def test_named_users_are_shown(night):
    assert [user["id"] for user in lists(night.out, "--user", 1006)] == [1006]
    assert [user["id"] for user in lists(night.out, "-u", 1006, "-u", "1001")] == [1001, 1006]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "date32", "date64", "uint8", "dictionary"])
def test_users_are_named_whatever_the_type_of_their_ids(night, kind):
    values, column = [f"user-{i}" for i in range(8)], None
    if kind.startswith("date"):
        values = [datetime.date(2026, 11, day) for day in range(1, 9)]
    elif kind == "uint8":
        values = list(range(248, 256))
    elif kind == "dictionary":
        column = pa.array(values).dictionary_encode()
    ids = column or pa.array(values, getattr(pa, kind)())
    write_prompts(night.inputs, random_prompts(8), user_id=ids, seen=pa.array([["i1"]] * 8))
    night.run(items=night.items, overwrite=True)
    shown = lists(night.out, "--user", values[6], "--history-column", "seen")
    assert [user["history"] for user in shown] == [["Title 1"]]


@pytest.mark.parametrize("users", [[7], ["zoe"], ["10.5"], [1001, 7]])
def test_a_user_who_is_not_there_is_an_error_of_the_input(night, users):
    result = show(night.out, *(part for user in users for part in ("--user", user)))
    assert (result.exit_code, result.stdout) == (3, "")
    assert re.fullmatch(r"error: .*(7|zoe|10\.5).*\n", result.stderr)
    assert "1001" not in result.stderr


def test_a_user_with_several_rows_gets_a_list_for_each(night, tmp_path):
    ids = pa.array([5, 6, 5, 7, 5, 8, 9, 9])
    write_prompts(night.inputs, random_prompts(8), user_id=ids)
    for layout in ("nested", "long"):
        night.run(items=night.items, layout=layout, output=tmp_path / layout)
        assert [user["id"] for user in lists(tmp_path / layout, "--user", 5)] == [5, 5, 5]
    assert lists(tmp_path / "nested", "--users", 8) == lists(tmp_path / "long", "--users", 8)


def test_both_layouts_show_the_same(night, tmp_path):
    for layout in ("nested", "long"):
        night.run(items=night.items, exclude_column="seen", layout=layout, output=tmp_path / layout, shard_rows=3)
    assert len(lists(tmp_path / "nested", "--users", 9)) == 8
    for which in (("--users", 9), ("--user", 1004)):
        assert lists(tmp_path / "long", *which) == lists(tmp_path / "nested", *which)


def test_an_empty_list_is_said_to_be_empty(night):
    everything = pa.array([[f"i{i}" for i in range(20)]] * 8, pa.list_(pa.string()))
    write_prompts(night.inputs, random_prompts(8), seen=everything)
    night.run(items=night.items, exclude_column="seen", overwrite=True)
    assert "an empty list" in show(night.out, "--users", 1).stdout
    assert lists(night.out, "--users", 1)[0]["items"] == []


def test_a_result_of_no_rows_shows_nothing(job, tmp_path):
    write_prompts(job.inputs, [])
    job.run()
    assert lists(job.out) == []
    assert show(job.out).exit_code == 0


def test_without_a_title_column_another_text_serves_or_the_id(night, tmp_path):
    plain = titled_items(tmp_path / "plain.parquet", title=None)
    first = lists(night.out, "--items", plain)[0]
    assert first["history"] == ["genre 1", "genre 2"]
    assert list(first["items"][0]) == ["rank", "score", "item_id", "genre"]
    bare = titled_items(tmp_path / "bare.parquet", title=None, genre=None)
    first = lists(night.out, "--items", bare)[0]
    assert first["history"] == ["i1", "i2"]
    assert list(first["items"][0]) == ["rank", "score", "item_id"]


def test_a_title_column_can_be_named(night):
    first = lists(night.out, "--title-column", "genre")[0]
    assert list(first["items"][0])[3] == "genre"
    assert first["history"] == ["genre 1", "genre 2"]
    for name in ("titel", "year"):
        result = show(night.out, "--title-column", name)
        assert result.exit_code == 4
        assert re.fullmatch(rf"error: .*items\.parquet: no text column '{name}'.*'?title'?.*\n", result.stderr)


def test_an_item_without_a_text_shows_its_id_in_a_history(night, tmp_path):
    titles = pa.array([None, None, *(f"Title {i}" for i in range(2, 20))])
    assert lists(night.out, "--items", titled_items(tmp_path / "x.parquet", title=titles))[0]["history"] == ["i1", "Title 2"]


def test_with_the_item_file_gone_ids_are_shown(night):
    night.items.unlink()
    first = lists(night.out)[0]
    assert first["history"] == ["i1", "i2"]
    assert list(first["items"][0]) == ["rank", "score", "item_id"]


@pytest.mark.parametrize("form", ["folder", "glob"])
def test_titles_come_from_a_catalogue_in_parts_too(night, tmp_path, form):
    night.items.unlink()
    titled_items(tmp_path / "parts" / "a.parquet")
    titled_items(tmp_path / "parts" / "b.parquet", ids=pa.array([f"j{i}" for i in range(20)]))
    items = tmp_path / "parts" if form == "folder" else tmp_path / "parts" / "*.parquet"
    night.run(items=items, overwrite=True)
    assert lists(night.out)[0]["items"][0]["title"].startswith("Title ")
    assert lists(night.out, "--items", items)[0]["items"][0]["title"].startswith("Title ")


def test_a_matrix_of_items_has_no_titles(night, tmp_path):
    np.save(tmp_path / "m.npy", np.random.default_rng(0).standard_normal((20, HIDDEN), dtype=np.float32))
    night.run(items=tmp_path / "m.npy", overwrite=True)
    assert list(lists(night.out)[0]["items"][0]) == ["rank", "score", "item_id"]


@pytest.mark.parametrize(("content", "code"), [(None, 4), (b"garbage", 4), (b"", 4)])
def test_a_named_item_file_that_cannot_be_read_is_an_error_of_the_items(night, tmp_path, content, code):
    if content is not None:
        (tmp_path / "other.parquet").write_bytes(content)
    result = show(night.out, "--items", tmp_path / "other.parquet")
    assert (result.exit_code, result.stdout) == (code, "")
    assert re.fullmatch(r"error: .*other\.parquet.*\n", result.stderr)


def test_an_item_file_without_the_id_column_is_an_error_that_names_it(night, tmp_path):
    table = pq.read_table(night.items)
    pq.write_table(table.rename_columns(["id", *table.column_names[1:]]), tmp_path / "other.parquet")
    result = show(night.out, "--items", tmp_path / "other.parquet")
    assert result.exit_code == 4
    assert re.fullmatch(r"error: .*other\.parquet: no column 'item_id'.*\n", result.stderr)


def test_without_inputs_there_is_no_history(night):
    night.inputs.unlink()
    assert [user["history"] for user in lists(night.out)] == [None] * 3
    assert "history" not in show(night.out).stdout


def test_a_history_column_can_be_named(night):
    night.run(items=night.items, overwrite=True)
    assert lists(night.out)[0]["history"] is None
    assert lists(night.out, "--history-column", "seen")[0]["history"] == ["Title 1", "Title 2"]


@pytest.mark.parametrize(
    ("name", "message"), [("sene", r"no column 'sene'.*'seen'"), ("prompt", r"'prompt' is .*not a list")]
)
def test_a_history_column_that_is_none_is_an_error(night, name, message):
    result = show(night.out, "--history-column", name)
    assert (result.exit_code, result.stdout) == (3, "")
    assert re.fullmatch(rf"error: .*prompts\.parquet: .*{message}.*\n", result.stderr)


def test_an_input_that_was_damaged_since_is_an_error_in_one_line(night):
    night.inputs.write_bytes(b"garbage")
    result = show(night.out)
    assert result.exit_code == 3
    assert re.fullmatch(r"error: .*prompts\.parquet.*\n", result.stderr)


def test_a_name_with_brackets_is_a_name(night, tmp_path):
    night.run(items=night.items, output=tmp_path / "night [1]")
    assert len(lists(tmp_path / "night [1]")) == 3


@pytest.mark.parametrize("what", ["nothing", "empty folder", "foreign folder", "file", "torn manifest", "other manifest"])
def test_what_is_no_result_is_an_error_of_the_output(night, tmp_path, what):
    path = tmp_path / "thing"
    if what == "file":
        path.write_text("x")
    elif what != "nothing":
        path.mkdir()
    if what == "foreign folder":
        shutil.copy(night.items, path)
    if what.endswith("manifest"):
        (path / MANIFEST).write_text('{"made' if what.startswith("torn") else '{"made_by": "prefill-score"}')
    result = show(path)
    assert (result.exit_code, result.stdout) == (6, "")
    assert re.fullmatch(r"error: .*thing: not the result folder of a run.*\n", result.stderr)


@pytest.mark.parametrize("harm", ["gone", "garbage"])
def test_parts_that_are_not_there_any_more_are_an_error_of_the_output(night, harm):
    part = night.out / "part-00000.parquet"
    part.unlink()
    if harm == "garbage":
        part.write_bytes(b"garbage")
    result = show(night.out)
    assert (result.exit_code, result.stdout) == (6, "")
    assert re.fullmatch(r"error: .*out.*\n", result.stderr)


# --- on a terminal ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


@pytest.fixture
def seen_on(monkeypatch):
    """What views.print_lists puts on a terminal with these variables."""

    def see(users, stdout=None, **variables) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm-256color", "COLUMNS": "100"} | variables).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", stdout or Terminal())
        views.print_lists(users, as_json=False)
        return sys.stdout.getvalue()

    return see


def user_with(*scores: float, title: str = "T") -> dict:
    items = [{"rank": i + 1, "score": s, "item_id": f"i{i}", "title": title} for i, s in enumerate(scores)]
    return {"id_column": "user_id", "id": 1, "history": None, "least_score": scores[-1], "items": items}


def bars_in(text: str) -> list[str]:
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    return [line[:10].rstrip() for line in re.findall(r"^ +\d+ +-?\d+\.\d{4}  (.*)$", plain, re.M)]


@pytest.mark.parametrize("shift", [0, -4, -20])
def test_a_bar_says_where_a_score_stands_between_the_last_and_the_best_whatever_their_signs(seen_on, shift):
    user = user_with(*(score + shift for score in (8.0, 6.0, 4.5, 0.0)))
    assert bars_in(seen_on([user])) == ["█" * 10, "█" * 7 + "▌", "█" * 5 + "▋", ""]


def test_bars_measure_by_the_whole_list_though_its_end_is_not_shown(night, seen_on):
    users = lists(night.out, "--top", 3, "--users", 8)
    table = pq.read_table(night.out).to_pylist()
    assert [user["least_score"] for user in users] == pytest.approx([row["scores"][-1] for row in table])
    drawn = bars_in(seen_on(users))
    for i, row in enumerate(table):
        best, *_, last = row["scores"]
        for bar, score in zip(drawn[3 * i : 3 * i + 3], row["scores"][:3], strict=True):
            eighths = 8 * bar.count("█") + sum(" ▏▎▍▌▋▊▉".index(c) for c in bar.replace("█", ""))
            assert eighths == round(80 * (score - last) / (best - last))


def test_one_item_and_equal_scores_have_full_bars_and_an_empty_list_has_none(seen_on):
    assert bars_in(seen_on([user_with(-3.0), user_with(2.0, 2.0)])) == ["█" * 10] * 3
    empty = user_with(1.0) | {"items": [], "least_score": None}
    assert "an empty list" in seen_on([empty])


def test_colours_go_where_they_are_not_wanted_and_bars_stay(seen_on):
    coloured, plain = seen_on([user_with(2, 1, 0)]), seen_on([user_with(2, 1, 0)], NO_COLOR="1")
    assert re.search(r"\x1b\[36m", coloured)
    assert not re.search(r"\x1b\[[39]\d", plain)
    assert bars_in(plain) == bars_in(coloured) == ["█" * 10, "█" * 5, ""]


def test_where_blocks_cannot_be_written_bars_are_ascii(seen_on):
    text = seen_on([user_with(2, 1, 0)], Terminal("ascii"))
    assert bars_in(text) == ["#" * 10, "#" * 5, ""]
    assert text.isascii()


@pytest.mark.parametrize("where", ["dumb", "narrow", "pipe"])
def test_a_pipe_a_dumb_terminal_and_a_narrow_one_have_no_bars(seen_on, where):
    variables = {"dumb": {"TERM": "dumb"}, "narrow": {"COLUMNS": "50"}, "pipe": {}}[where]
    text = seen_on([user_with(2, 1, 0)], io.StringIO() if where == "pipe" else None, **variables)
    assert not re.search("[█#]", text)
    assert re.search(r"^ *1 +2\.0000 +i0 +T *$", re.sub(r"\x1b\[[\d;]*m", "", text), re.M)
    assert ("\x1b" in text) is (where == "narrow")


def test_control_characters_of_a_title_do_not_reach_a_terminal(seen_on):
    users = [user_with(1.0, title="a\x1b[31mb\x07\r\n\x9bc") | {"history": ["x\x1b]0;y\x07"]}]
    assert set(re.findall("[\x00-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[\d;]*m", "", seen_on(users, NO_COLOR="1")))) == {"\n"}
