"""What the documents say is what the program does. `python tests/test_docs.py` puts current help texts into
docs/commands.md."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from conftest import PROJECT

from prefill_cli.cli import app
from prefill_cli.config import RunConfig
from prefill_cli.errors import PrefillScoreError

README = (PROJECT / "README.md").read_text()
COMMANDS_PAGE = PROJECT / "docs" / "commands.md"
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")), *sorted((PROJECT / "examples").glob("*/*.md"))]


def help_of(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-c", "from prefill_cli.cli import app; app(prog_name='prefill-score')", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


COMMANDS = ("run", "finish", "embed", "search", "plan", "show", "evaluate", "report", "cache", "inspect", "bench", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_texts_in_the_documents_are_those_of_the_program(command):
    shown = re.search(rf"<!-- help: {command} -->\n```text\n(.*?)\n```", COMMANDS_PAGE.read_text(), re.DOTALL)
    assert shown, f"docs/commands.md shows `prefill-score {command} --help`"
    assert shown[1] == help_of(command), "update it: python tests/test_docs.py"


def test_every_command_and_option_is_there():
    page = COMMANDS_PAGE.read_text()
    assert set(typer.main.get_command(app).commands) == set(COMMANDS)
    for name in (f.name for f in fields(RunConfig) if f.name != "inputs"):
        assert f"--{name.replace('_', '-')}" in page


def test_every_exit_code_stands_in_the_readme():
    kinds = [PrefillScoreError, *PrefillScoreError.__subclasses__()]
    for code in (0, *(kind.exit_code for kind in kinds), 130, 143):
        assert re.search(rf"^\|[ \d,]*\b{code}\b", README, re.MULTILINE), code


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked to by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for name, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), name
        assert not heading or heading in anchors(target), f"{name}#{heading}"


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [PROJECT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            names = re.findall(r"\]\((?!http)([^)#]+\.md)[^)]*\)", page.read_text())
            waiting += [(page.parent / name).resolve() for name in names]
    assert {page.resolve() for page in PAGES} <= seen


def test_each_target_that_the_makefile_announces_exists():
    makefile = (PROJECT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


if __name__ == "__main__":
    text = COMMANDS_PAGE.read_text()
    for command in COMMANDS:
        block = f"<!-- help: {command} -->\n```text\n{help_of(command)}\n```"
        text = re.sub(rf"<!-- help: {command} -->\n```text\n.*?```", lambda _, new=block: new, text, flags=re.DOTALL)
    COMMANDS_PAGE.write_text(text)
