"""What the documents say is what the program does. `python tests/test_docs.py` puts current help texts into the README."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import PROJECT

from prefill_cli.config import RunConfig
from prefill_cli.errors import PrefillScoreError

README = (PROJECT / "README.md").read_text()


def help_of(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-c", "from prefill_cli.cli import app; app(prog_name='prefill-score')", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


COMMANDS = ("run", "embed", "search", "show", "cache", "inspect", "bench", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_texts_in_the_readme_are_those_of_the_program(command):
    shown = re.search(rf"<!-- help: {command} -->\n```text\n(.*?)\n```", README, re.DOTALL)
    assert shown, f"the README shows `prefill-score {command} --help`"
    assert shown[1] == help_of(command), "update it: python tests/test_docs.py"


def test_every_option_of_run_stands_in_the_readme():
    for name in (f.name for f in fields(RunConfig) if f.name != "inputs"):
        assert f"--{name.replace('_', '-')}" in README


def test_every_exit_code_stands_in_the_readme():
    kinds = [PrefillScoreError, *PrefillScoreError.__subclasses__()]
    for code in (0, *(kind.exit_code for kind in kinds), 130, 143):
        assert re.search(rf"^\|[ \d,]*\b{code}\b", README, re.MULTILINE), code


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert Path(PROJECT / name).exists(), name


def test_each_target_that_the_makefile_announces_exists():
    makefile = (PROJECT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


if __name__ == "__main__":
    for command in COMMANDS:
        block = f"<!-- help: {command} -->\n```text\n{help_of(command)}\n```"
        README = re.sub(rf"<!-- help: {command} -->\n```text\n.*?\n```", lambda _, new=block: new, README, flags=re.DOTALL)
    (PROJECT / "README.md").write_text(README)
