"""The house as DESIGN draws it: who imports whom, and what `--help` does without."""

import ast
import re
import subprocess
import sys

from conftest import PROJECT

PACKAGE = PROJECT / "prefill_cli"
BASE = {
    "errors",
    "places",
    "config",
    "arrow",
    "machine",
    "matrices",
    "parquet",
    "storage",
}  # every room may use these; they use one another only, in this order of depth
# What a room may import beside the base. Nothing else, in either direction.
ALLOWED = {
    "arrow": set(),
    "places": set(),
    "storage": set(),
    "errors": set(),
    "config": set(),
    "machine": set(),
    "matrices": set(),
    "parquet": set(),
    "data": set(),
    "encoding": set(),
    "scoring": set(),
    "job": {"data", "encoding", "scoring"},
    "summary": {"data", "encoding", "job"},
    "outcome": {"data", "encoding", "scoring", "job"},
    "planning": {"data", "encoding", "scoring", "job"},
    "worker": {"data", "encoding", "job", "outcome"},
    "pipeline": {"data", "job", "planning", "summary"},
    "engines": {"data", "job", "pipeline", "worker"},
    "tools": {"data", "encoding", "scoring", "job", "outcome", "planning"},
    "console": set(),
    "views": {"console"},
    "metrics": {"data"},
    "options": set(),
    "signals": {"console"},
    "cli": {"console", "engines", "metrics", "options", "pipeline", "signals", "tools", "views"},
}


def rooms_imported() -> dict[str, set[str]]:
    """Room → rooms that any of its files imports, at the top or inside a function."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        names = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module] if node.module != "prefill_cli" else [f"prefill_cli.{a.name}" for a in node.names]
            names |= {m.split(".")[1] for m in modules if m.startswith("prefill_cli.")}
        names -= {room, "__version__"}
    return found


def test_imports_run_one_way():
    imported = rooms_imported()
    assert imported.keys() == ALLOWED.keys()
    for room, rooms in imported.items():
        assert rooms - BASE <= ALLOWED[room], f"{room} must not import {rooms - BASE - ALLOWED[room]}"


def test_data_encoding_and_scoring_do_not_know_one_another():
    imported = rooms_imported()
    for room in ("data", "encoding", "scoring"):
        assert imported[room] <= BASE


def test_the_picture_in_the_readme_is_the_import_graph():
    picture = re.search(r"```mermaid\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert picture, "the README has a mermaid picture of the rooms"
    drawn: set[tuple[str, str]] = set()
    for sources, targets in re.findall(r"^\s*([\w &]+?)\s*-->\s*([\w &]+?)\s*$", picture[1], re.MULTILINE):
        drawn |= {(s.strip(), t.strip()) for s in sources.split("&") for t in targets.split("&")}
    real = {(room, other) for room, others in rooms_imported().items() for other in others - BASE}
    assert drawn == real


def test_only_the_command_line_exits():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "signals.py", "processes.py"):  # the last is a process of its own, which must end
            assert not re.search(r"sys\.exit|typer\.Exit|os\._exit", path.read_text()), path


def test_help_imports_neither_torch_nor_transformers_nor_polars_nor_pyarrow():
    code = (
        "import sys, prefill_cli.cli as cli; from typer.testing import CliRunner\n"
        "for words in (['--help'], ['run', '--help'], ['show', '--help']):\n"
        "    result = CliRunner().invoke(cli.app, words); assert result.exit_code == 0, result.output\n"
        "print([m for m in ('torch', 'transformers', 'polars', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_run_works_where_polars_is_absent(job):
    code = (
        "import sys; sys.modules['polars'] = None; sys.argv = ['prefill-score', 'run', *sys.argv[1:]]\n"
        "from prefill_cli.cli import main; main()"
    )
    arguments = [job.inputs, "-m", job.model, "-i", job.items, "-o", job.out, "--device", "cpu", "--quiet"]
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True, timeout=100)
    assert (job.out / "_SUCCESS").exists()
