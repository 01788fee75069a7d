"""docs/nightly.md: every command, unit, manifest, rule and program in it is one that works with this version."""

import ast
import configparser
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from conftest import PROJECT, random_prompts, write_prompts
from test_console import SHARD, STAMP

from prefill_cli import cli, metrics, signals
from prefill_cli.config import resolve, seconds, size_bytes
from prefill_cli.errors import Interrupted, PrefillScoreError, TimeLimitError

TEXT = (PROJECT / "docs" / "nightly.md").read_text()
KILLED_AFTER_SEC = signals.STOP_WITHIN_SEC + signals.LAST_WORDS_SEC
ENDS_OF_A_COMMAND = re.compile(r"\s*(\d?>|\|\||&&|[;)])")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


def manifest() -> dict:
    return next(d for d in map(yaml.safe_load, blocks("yaml")) if "kind" in d)


def rules() -> list[dict]:
    found = next(d for d in map(yaml.safe_load, blocks("yaml")) if "groups" in d)
    return [rule for group in found["groups"] for rule in group["rules"]]


def units() -> list[configparser.ConfigParser]:
    found = []
    for text in blocks("ini"):
        parser = configparser.ConfigParser(interpolation=None, strict=True)
        parser.optionxform = str
        parser.read_string(text)
        found.append(parser)
    return found


def container() -> dict:
    (found,) = manifest()["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return found


def texts_of_python() -> list[str]:
    nodes = (node for text in blocks("python") for node in ast.walk(ast.parse(text)))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def commands() -> list[list[str]]:
    """Words of every prefill-score command in a block, whatever the block's language."""
    lines = [line for language in ("cron", "sh", "ini") for text in blocks(language) for line in text.splitlines()]
    starts = [
        line[m.start() :] for line in (*lines, *texts_of_python()) for m in re.finditer(r"prefill-score [a-z]+ ", line)
    ]
    found = [shlex.split(ENDS_OF_A_COMMAND.split(text)[0]) for text in starts]
    return [*found, [*container()["command"], *container()["args"]]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_one_that_the_program_takes(words):
    command = typer.main.get_command(cli.app).commands[words[1]]
    given = dict(command.make_context(words[1], list(words[2:])).params)
    if words[1] == "run":
        del given["config"], given["dry_run"]
        resolve(given, environ={}, needs=())
    elif given["prune"]:
        assert seconds(given["older_than"], "")
        assert size_bytes(given["max_size"], "")


def test_commands_were_found_in_every_way_of_starting_them():
    assert len(commands()) >= 9
    assert sum(words[1] == "run" for words in commands()) >= 6


def test_every_option_in_running_text_exists():
    known = {option for name in ("run", "cache") for option in options_of(name)} | {"--kill-after"}  # of timeout(1)
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    assert named
    assert named <= known


def options_of(command: str) -> list[str]:
    params = typer.main.get_command(cli.app).commands[command].params
    return [option for param in params for option in (*param.opts, *param.secondary_opts)]


def test_the_options_file_is_one(tmp_path):
    (text,) = blocks("toml")
    assert tomllib.loads(text)
    (tmp_path / "prefill-score.toml").write_text(text)
    assert resolve({"inputs": ["prompts"]}, environ={}).top_k == 100


def test_a_crontab_line_has_five_fields_of_time_and_no_percent_sign():
    (text,) = blocks("cron")
    lines = [line for line in text.splitlines() if line and not re.match(r"[A-Z]+=\S", line)]
    assert len(lines) == 2
    for line in lines:
        assert re.match(r"(\*|\d+) (\*|\d+) (\*|\d+) (\*|\d+) (\*|[0-7])  \S", line)
        assert not re.search(r"(?<!\\)%", line)
        check = subprocess.run(["sh", "-n", "-c", line.split("  ", 1)[1]], capture_output=True, check=False)
        assert check.returncode == 0, check.stderr


def test_the_crontab_prints_nothing_after_a_success_and_the_code_after_a_failure(tmp_path):
    line = blocks("cron")[0].splitlines()[3].split("  ", 1)[1]
    line = line.replace("/srv/rec", str(tmp_path)).replace("/var/log/rec", str(tmp_path))
    for code, said in ((0, ""), (4, "prefill-score: exit 4\nerror: stub\n")):
        done = run_stubbed(line, tmp_path, f"echo summary; [ {code} = 0 ] || echo error: stub >&2; exit {code}")
        assert done.stdout == said


def run_stubbed(script: str, tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A script with a prefill-score that only does `body`."""
    stub = tmp_path / "bin" / "prefill-score"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f"#!/bin/sh\n{body}\n")
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.mark.parametrize("text", blocks("sh"))
def test_every_script_is_one(text):
    assert subprocess.run(["sh", "-n", "-c", text], capture_output=True, check=False).returncode == 0


def test_the_script_of_dated_folders_moves_the_link_and_removes_old_nights(tmp_path):
    (script,) = (text for text in blocks("sh") if "mv -T" in text)
    script = script.replace("/srv/rec", str(tmp_path))
    old, current = tmp_path / "lists" / "2001-01-01", tmp_path / "lists" / "current"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    for text in ("one", "two"):
        assert run_stubbed(script, tmp_path, f"mkdir -p topk; echo {text} > topk/part").returncode == 0
        assert (current / "part").read_text() == f"{text}\n"
    assert not old.exists()
    assert run_stubbed(script, tmp_path, "exit 7").returncode == 7
    assert (current / "part").read_text() == "two\n"


def test_the_script_of_the_copy_keeps_yesterday_without_taking_space(tmp_path):
    (script,) = (text for text in blocks("sh") if "cp -al" in text)
    script = script.replace("/srv/rec", str(tmp_path))
    assert run_stubbed(script, tmp_path, "").returncode == 0
    (tmp_path / "topk").mkdir()
    (tmp_path / "topk" / "part").touch()
    assert run_stubbed(script, tmp_path, "").returncode == 0
    assert (tmp_path / "topk.yesterday" / "part").samefile(tmp_path / "topk" / "part")


def test_the_units_leave_a_run_the_time_to_end_and_do_not_retry_what_a_retry_cannot_mend():
    service, timer = units()
    assert service["Service"]["Type"] == "oneshot"
    assert int(service["Service"]["TimeoutStopSec"]) > KILLED_AFTER_SEC
    assert {*map(int, service["Service"]["RestartPreventExitStatus"].split())} == NO_RETRY
    assert service["Unit"]["OnFailure"]
    assert timer["Timer"]["Persistent"] == "true"
    assert timer["Install"]["WantedBy"] == "timers.target"


NO_RETRY = {2, 3, 4, 5, 7}


def test_the_cron_job_retries_by_exit_code_and_leaves_a_run_the_time_to_end():
    job = manifest()["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    assert (manifest()["apiVersion"], manifest()["kind"]) == ("batch/v1", "CronJob")
    assert manifest()["spec"]["concurrencyPolicy"] == "Forbid"
    assert pod["restartPolicy"] == "Never", "the API takes a podFailurePolicy with no other"
    assert pod["terminationGracePeriodSeconds"] > KILLED_AFTER_SEC
    codes = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container()["name"]
            values = rule["onExitCodes"]["values"]
            assert values == sorted(set(values)), "the API takes no others"
            codes[rule["action"]] = set(values)
    assert codes == {"FailJob": NO_RETRY, "Count": {6, 124, 137, 143}}
    assert {m["name"] for m in container()["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    output = next(word.partition("=")[2] for word in container()["args"] if word.startswith("--output="))
    assert output not in {m["mountPath"] for m in container()["volumeMounts"]}
    limit = next(word.partition("=")[2] for word in container()["args"] if word.startswith("--time-limit="))
    assert job["activeDeadlineSeconds"] > seconds(limit, "")


def test_the_airflow_task_does_not_retry_what_a_retry_cannot_mend():
    (text,) = (text for text in blocks("python") if "airflow" in text)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    words = {k.arg: k.value for call in calls for k in call.keywords}
    assert set(ast.literal_eval(words["skip_on_exit_code"])) == NO_RETRY
    assert ast.literal_eval(words["retries"]) > 0


def test_every_rule_asks_for_metrics_that_exist_and_every_metric_is_told():
    known = {metrics.PREFIX + name for name in metrics.FIGURES | metrics.ALWAYS}
    assert len(rules()) >= 6
    for rule in rules():
        named = set(re.findall(r"\bprefill_score_\w+", rule["expr"]))
        assert named
        assert named <= known
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert set(re.findall(r"`(prefill_score_\w+)`", TEXT)) == known
    stages = re.search(r"by `stage`: ([\w, ]+);", TEXT)
    assert stages
    assert tuple(stages[1].split(", ")) == metrics.STAGES


def test_every_exit_code_is_in_the_table_once():
    told = [int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.M)]
    kinds = [PrefillScoreError, *PrefillScoreError.__subclasses__()]
    codes = {0, 137, TimeLimitError().exit_code, *(Interrupted(n).exit_code for n in (2, 15)), *(k.exit_code for k in kinds)}
    assert told == sorted(codes)
    retried = {int(code) for code in re.findall(r"^\| (\d+) \|[^|]*\| (?:yes|once) \|", TEXT, re.M)}
    assert set(told) - retried == NO_RETRY | {0}


def test_the_lines_of_the_log_are_as_a_run_writes_them():
    (text,) = (text for text in blocks("text") if " info " in text)
    plan, shard = text.splitlines()
    assert re.fullmatch(rf"{STAMP} info [\d,]+ rows in \d files, [\d,]+ items, .*, at most \d+ tokens a prompt", plan)
    assert re.fullmatch(rf"{STAMP} info {SHARD.pattern}", shard)


@pytest.mark.parametrize("layout", ["nested", "long"])
def test_the_reader_reads_a_whole_result_and_refuses_another(job, layout):
    (text,) = (text for text in blocks("python") if "def load(" in text)
    names: dict = {}
    exec(text, names)
    write_prompts(job.inputs, [*random_prompts(29), None])
    totals = job.run(layout=layout, shard_rows=10, max_rejects="1")
    table = names["load"](job.out)
    assert table.num_rows == totals["part_rows"] == 29 * (5 if layout == "long" else 1)
    assert table["user_id"].to_pylist()[0] == 1000
    (job.out / "_SUCCESS").unlink()
    with pytest.raises(FileNotFoundError):
        names["load"](job.out)


def test_the_readme_leads_there_and_links_lead_somewhere():
    assert "(docs/nightly.md)" in (PROJECT / "README.md").read_text()
    for path, heading in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", TEXT):
        target = (PROJECT / "docs" / path).resolve()
        assert target.exists()
        assert not heading or f"\n## {heading.capitalize()}\n" in target.read_text()
