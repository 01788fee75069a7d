"""Where options come from, what they may be, and what the command line says about them."""

import os
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.config import RunConfig, option, resolve
from prefill_cli.errors import UsageError

NEEDED = {"inputs": ["x.parquet"], "model": "m", "items": Path("i.parquet")}
# One field of every kind: three different values as a line, a variable and a file say them, and what they become.
KINDS = {
    "top_k": ((7, 7), ("8", 8), ("9", 9)),
    "max_length": ((7, 7), (" 8 ", 8), ("9", 9)),
    "max_batch_tokens": (("7", 7), ("8", 8), ("9", 9)),
    "max_rejects": (("7%", "7%"), ("8", "8"), ("9", "9")),
    "model": (("a", "a"), ("b", "b"), ('"c"', "c")),
    "revision": (("a", "a"), ("b", "b"), ('"c"', "c")),
    "items": ((Path("a"), Path("a")), ("b", Path("b")), ('"c"', Path("c"))),
    "allow": ((Path("a"), Path("a")), ("b", Path("b")), ('"c"', Path("c"))),
    "keep_columns": (("a,b", ("a", "b")), ("c, d", ("c", "d")), ('["e", "f"]', ("e", "f"))),
    "truncate": (("right", "right"), ("reject", "reject"), ('"left"', "left")),
    "normalize": ((False, False), ("Yes", True), ("false", False)),
    "generation_prompt": ((True, True), ("off", False), ("true", True)),
    "log_format": (("json", "json"), ("text", "text"), ('"json"', "json")),
}


def toml(text: str, name: str = "prefill-score.toml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def settings(environ: dict[str, str] | None = None, **given: object) -> RunConfig:
    return resolve(NEEDED | given, environ=environ or {})


@pytest.mark.parametrize("name", KINDS)
def test_the_line_beats_the_variable_beats_the_file_beats_the_default(name):
    (line, on_line), (text, in_environment), (written, in_file) = KINDS[name]
    given = {k: v for k, v in NEEDED.items() if k != name}
    variable = {"PREFILL_SCORE_" + name.upper(): text}
    if name not in NEEDED:
        assert getattr(resolve(given, environ={}), name) == RunConfig.__dataclass_fields__[name].default
    toml(f"{name} = {written}")
    assert getattr(resolve(given, environ={}), name) == in_file
    assert getattr(resolve(given, environ=variable), name) == in_environment
    assert getattr(resolve(given | {name: line}, environ=variable), name) == on_line
    assert getattr(resolve(given | {name: None}, environ=variable), name) == in_environment, "None says nothing"


def test_the_environment_of_the_process_is_read_where_none_is_given(monkeypatch):
    monkeypatch.setenv("PREFILL_SCORE_TOP_K", "11")
    assert resolve(NEEDED).top_k == 11


@pytest.mark.parametrize("key", ["top-k", "top_k"])
def test_a_key_may_be_spelled_with_a_dash_or_an_underscore(key):
    toml(f"{key} = 3")
    assert settings().top_k == 3


def test_a_key_spelled_both_ways_is_refused():
    toml("top-k = 3\ntop_k = 4")
    with pytest.raises(UsageError, match=r"prefill-score\.toml: .*top_k.* twice"):
        settings()


@pytest.mark.parametrize(
    ("text", "named"), [("topk = 3", "'top_k'"), ("max-lenght = 3", "'max_length'"), ("inputs = 1", "")]
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(text, named):
    toml(text)
    with pytest.raises(UsageError, match=rf"^prefill-score\.toml: unknown key '{text.split()[0]}' .*{named}"):
        settings()


def test_an_unknown_variable_is_an_error_that_names_the_nearest():
    with pytest.raises(UsageError, match=r"PREFILL_SCORE_TOPK \(did you mean 'PREFILL_SCORE_TOP_K'\?\)"):
        settings({"PREFILL_SCORE_TOPK": "3"})
    with pytest.raises(UsageError, match="PREFILL_SCORE_INPUTS"):
        settings({"PREFILL_SCORE_INPUTS": "x"})


def test_the_debug_switch_is_not_an_option():
    assert settings({"PREFILL_SCORE_DEBUG": "1", "OTHER_TOP_K": "x"}).top_k == 100


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("top-k = '3'x", None),
        ("top-k = true", "a whole number"),
        ("top-k = 3.0", "a whole number"),
        ("top-k = 'many'", "a whole number"),
        ("normalize = 1", "true or false"),
        ("normalize = 'maybe'", "true or false"),
        ("items = 3", "a path"),
        ("items = ''", "a path"),
        ("prefix = 3", "text"),
        ("keep-columns = 3", "column names"),
        ("keep-columns = [1]", "column names"),
        ("keep-columns = 'a,,b'", "column names"),
        ("truncate = 'middle'", "left, right or reject"),
        ("truncate = ['left']", "left, right or reject"),
        ("max-rejects = 0.5", "text"),
    ],
)
def test_a_value_of_the_wrong_kind_names_the_file_and_the_key(line, expected):
    toml(line)
    with pytest.raises(UsageError) as caught:
        settings()
    assert str(caught.value).startswith("prefill-score.toml: ")
    if expected:
        assert repr(line.split()[0]) in str(caught.value)
        assert expected in str(caught.value)


def test_a_value_of_the_wrong_kind_names_the_option_or_the_variable():
    with pytest.raises(UsageError, match=r"option --max-batch-tokens: expected a whole number, not '12x'"):
        settings(max_batch_tokens="12x")
    with pytest.raises(UsageError, match=r"environment variable PREFILL_SCORE_NORMALIZE: expected true or false"):
        settings({"PREFILL_SCORE_NORMALIZE": "perhaps"})
    with pytest.raises(UsageError, match=r"option --layout: must be nested or long"):
        settings(layout="wide")


def test_auto_as_a_token_budget_overrules_the_file():
    toml("max-batch-tokens = 64")
    assert settings(max_batch_tokens="auto").max_batch_tokens is None


def test_numbers_of_rows_may_be_numbers_in_the_file():
    toml("max-rejects = 5")
    assert settings().allowed_rejects(1000) == 5


def test_paths_in_a_file_are_relative_to_that_file():
    (Path("conf") / "net").mkdir(parents=True)
    path = toml(
        "model = 'net'\nitems = 'i.parquet'\noutput = '../out'\nallow = '/abs/a.txt'\nitem-ids = 'ids.parquet'",
        "conf/night.toml",
    )
    found = resolve({"inputs": ["x"]}, path, {})
    assert (found.model, found.items, found.output) == ("conf/net", Path("conf/i.parquet"), Path("conf/../out"))
    assert (found.allow, found.item_ids) == (Path("/abs/a.txt"), Path("conf/ids.parquet"))


def test_a_hub_name_in_a_file_stays_a_hub_name():
    assert resolve({"inputs": ["x"]}, toml("model = 'org/name'\nitems = 'i'", "conf/c.toml"), {}).model == "org/name"


def test_paths_on_the_line_and_in_variables_are_relative_to_the_current_folder():
    path = toml("top-k = 2", "conf/night.toml")
    found = resolve(NEEDED | {"items": Path("i")}, path, {"PREFILL_SCORE_OUTPUT": "o"})
    assert (found.items, found.output, found.top_k) == (Path("i"), Path("o"), 2)


def test_the_table_of_a_pyproject_serves_where_there_is_no_file_of_our_own():
    toml("[tool.other]\ntop-k = 1\n[tool.prefill-score]\ntop-k = 4", "pyproject.toml")
    assert settings().top_k == 4
    toml("top-k = 5")
    assert settings().top_k == 5


def test_a_pyproject_without_our_table_is_no_configuration():
    toml("[project]\nname = 'x'", "pyproject.toml")
    assert settings().top_k == 100


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nprefill-score = 3"])
def test_a_pyproject_whose_table_is_none_is_refused(text):
    toml(text, "pyproject.toml")
    with pytest.raises(UsageError, match=r"pyproject\.toml: tool\.prefill-score is not a table"):
        settings()


def test_the_named_file_replaces_the_one_of_the_current_folder():
    toml("top-k = 5\nprefix = 'x'")
    found = resolve(NEEDED, toml("top-k = 6", "other/any.toml"), {})
    assert (found.top_k, found.prefix) == (6, "")
    assert resolve(NEEDED, toml("[tool.prefill-score]\ntop-k = 7", "other/pyproject.toml"), {}).top_k == 7


def test_a_named_file_that_is_not_there_is_an_error():
    with pytest.raises(UsageError, match=r"--config gone\.toml: no such file"):
        resolve(NEEDED, Path("gone.toml"), {})


@pytest.mark.parametrize("content", [b"top-k = = 3", b"prefix = '\xff'"])
def test_broken_toml_is_an_error_that_names_the_file(content):
    Path("prefill-score.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"prefill-score\.toml: not readable as TOML"):
        settings()


def test_a_folder_in_the_place_of_the_file_is_an_error():
    Path("conf.toml").mkdir()
    with pytest.raises(UsageError, match=r"conf\.toml: not readable as TOML"):
        resolve(NEEDED, Path("conf.toml"), {})


@pytest.mark.parametrize("name", ["model", "items"])
def test_what_is_missing_is_named_with_both_ways_to_say_it(name):
    given = {k: v for k, v in NEEDED.items() if k != name}
    with pytest.raises(UsageError, match=rf"no --{name}: .*'{name}' in prefill-score\.toml"):
        resolve(given, environ={})
    assert getattr(resolve(given, environ={}, needs=()), name) == RunConfig.__dataclass_fields__[name].default


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 0}, "--top-k must be at least 1, not 0"),
        ({"max_length": 0}, "--max-length must be at least 1"),
        ({"dims": 0}, "--dims must be at least 1"),
        ({"max_batch_tokens": "-1"}, "--max-batch-tokens must be at least 1, not -1"),
        ({"shard_rows": 0}, "--shard-rows must be at least 1"),
        ({"keep_head": -1}, "--keep-head must not be negative"),
        ({"keep_head": 2, "truncate": "right"}, "--keep-head needs --truncate left, not right"),
        ({"keep_head": 2, "truncate": "reject"}, "--keep-head needs --truncate left, not reject"),
        ({"messages_column": "m", "token_ids_column": "t"}, "exclude each other"),
        ({"prefix": "p", "messages_column": "m"}, "--prefix is joined to prompt text; column 'm'"),
        ({"prefix": "p", "token_ids_column": "t"}, "--prefix is joined to prompt text; column 't'"),
        ({"append_eos": True, "token_ids_column": "t"}, "--append-eos with --token-ids-column"),
        ({"device": "tpu"}, "--device must be"),
        ({"device": "cuda:x"}, "--device must be"),
    ],
)
def test_options_that_contradict_each_other_or_their_range_are_refused(given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        settings(**given)


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:1"])
def test_devices_are_spelled_as_torch_spells_them(device):
    assert settings(device=device).device == device


@pytest.mark.parametrize(
    ("limit", "rows", "allowed"),
    [("0", 100, 0), ("7", 100, 7), ("0%", 100, 0), ("100%", 100, 100), ("1%", 99, 0), ("1%", 100, 1), (" 2% ", 50, 1),
     ("0.5%", 1000, 5), ("4.1%", 1_000_000, 41_000), ("16.4%", 1_000_000, 164_000), ("1%", 5_000_000_000, 50_000_000)],
)  # fmt: skip
def test_the_limit_of_rejects_is_a_number_or_an_exact_share(limit, rows, allowed):
    assert settings(max_rejects=limit).allowed_rejects(rows) == allowed


@pytest.mark.parametrize("limit", ["", "-1", "1.5", "101%", "%", "1 %", "many", "1e3", "nan%"])
def test_other_limits_of_rejects_are_refused(limit):
    with pytest.raises(UsageError, match=r"--max-rejects must be a number of rows or a share like 2%"):
        settings(max_rejects=limit)


# --- the command line and the dataclass say the same ------------------------------------------------------------------


OF_SEARCH = {"vector_column", "user_ids"}
OF_EMBED = {"from_lm_head"}


def test_the_command_line_has_every_field_and_no_other():
    import inspect

    of_run, of_embed, of_search = (
        set(inspect.signature(command).parameters) - {"config", "dry_run"} for command in (cli.run, cli.embed, cli.search)
    )
    assert of_run | of_embed | of_search == {f.name for f in fields(RunConfig)}
    assert of_search - of_run == OF_SEARCH
    assert of_embed - of_run == OF_EMBED


def help_of(command: str) -> str:
    """One line an option: wide enough for any, and the short ones' second column pulled up to the flags."""
    result = CliRunner().invoke(cli.app, [command, "--help"], terminal_width=400)
    assert result.exit_code == 0
    return re.sub(r"\n {12,}", "  ", result.output)


def test_every_default_that_the_help_shows_is_the_one_that_applies():
    shown = {}
    for line in help_of("run").splitlines():
        name, default = re.search(r"--([a-z-]+)", line), re.search(r"\[default: (.*?)\]", line)
        if name and default:
            shown[name[1].replace("-", "_")] = default[1]
    words = {"output": "<input stem>.topk", "max_length": "the model's", "max_batch_tokens": "auto"}
    applies = {
        f.name: words.get(f.name, str(f.default))
        for f in fields(RunConfig)
        if f.name in words or (f.default not in (None, MISSING, "", ()) and f.default is not True and f.default is not False)
    }
    assert shown.pop("config") == "./prefill-score.toml"
    assert applies.pop("keep_head") == "0"
    shown.pop("keep_head", None)
    assert shown == applies


def test_every_option_is_spelled_as_its_field_and_switches_can_be_said_either_way():
    for f in fields(RunConfig):
        text = help_of("search" if f.name in OF_SEARCH else "embed" if f.name in OF_EMBED else "run")
        if f.name != "inputs":
            assert f"{option(f.name)} " in text or f"{option(f.name)} /" in text
        if isinstance(f.default, bool):
            assert f"{option(f.name)} / --no-{f.name.replace('_', '-')} " in text


def test_what_the_line_does_not_say_leaves_the_variable_standing(monkeypatch):
    """A command-line default that is not None would hide the environment and the file."""
    monkeypatch.setattr(
        cli, "resolve", lambda given, *_, **__: (_ for _ in ()).throw(UsageError(repr(sorted(given.items()))))
    )
    result = CliRunner().invoke(cli.app, ["run", "x.parquet"])
    assert result.exit_code == 2
    given = dict(eval(result.stderr.removeprefix("error: ")))
    assert {name for name, value in given.items() if value is not None} == {"inputs"}


def test_no_variable_of_the_machine_reaches_these_tests():
    assert not [name for name in os.environ if name.startswith("PREFILL_SCORE_")]
