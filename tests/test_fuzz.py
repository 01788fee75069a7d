"""Damaged files of every kind: whatever a byte says, the answer is the right rows or one sentence.

Two hundred of them; three thousand with `pytest --thorough`.
"""

import os
import subprocess
import sys
from pathlib import Path

import fuzzing
import pyarrow as pa
import pytest
from conftest import PROJECT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefill_cli.config import resolve
from prefill_cli.data.disk import read_json
from prefill_cli.errors import ItemsError, UsageError
from prefill_cli.scoring.filters import ItemIndex

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def run_cases(model: Path, log: Path, stop: int) -> list[str]:
    """Faults of all cases. A process that dies is a fault of the case that it was at; another goes on behind it."""
    first, faults = 0, []
    environ = os.environ | {"PYTHONPATH": str(PROJECT)}  # this checkout's code, wherever another is installed
    while first < stop:
        log.unlink(missing_ok=True)
        command = [sys.executable, PROJECT / "tests" / "fuzzing.py", model, log, str(first), str(stop)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        told = log.read_text().splitlines() if log.exists() else []
        assert told, done.stderr[-2_000:]
        faults += [line for line in told if line.startswith("fault ")]
        last = told[-1]
        if last.startswith("done "):
            break
        faults.append(f"exit status {done.returncode} at {last}: {done.stderr[-300:]}")
        number = next(int(line.split()[1]) for line in reversed(told) if line.startswith("case "))
        first = number + 1
    return faults


def test_a_damaged_file_gives_the_right_rows_or_one_sentence(thorough, llama, tmp_path):
    cases = 3_000 if thorough else 210
    faults = run_cases(llama, tmp_path / "log", cases)
    assert not faults, f"{len(faults)} of {cases} cases:\n" + "\n".join(line[:600] for line in faults[:20])


# --- contents that hypothesis makes ----------------------------------------------------------------------------------

quiet = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quiet
@given(content=st.text(max_size=80) | st.binary(max_size=80) | JSON.map(lambda value: f"top-k = {value!r}"))
def test_any_configuration_file_is_taken_or_a_usage_error(tmp_path, content):
    path = tmp_path / "odd.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    try:
        resolve({"inputs": ["x"]}, path, {}, needs=())
    except UsageError as error:
        assert str(path) in str(error)


@quiet
@given(content=JSON | st.binary(max_size=40))
def test_any_json_in_our_place_reads_as_nothing_but_ours(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_bytes(content if isinstance(content, bytes) else fuzzing.json.dumps(content).encode())
    assert read_json(path) is None


@quiet
@given(content=st.binary(max_size=60) | st.lists(st.integers()).map(lambda ids: "\n".join(map(str, ids)).encode()))
@pytest.mark.parametrize("ids", [pa.array([1, 2]), pa.array(["1", "2"]), pa.array([b"1"]), pa.array([1, 2], pa.uint8())])
def test_any_list_of_ids_is_taken_or_an_items_error(tmp_path, ids, content):
    path = tmp_path / "odd"
    path.write_bytes(content)
    try:
        rows, _ = ItemIndex(ids).rows_in_file(path, "item_id")
    except ItemsError as error:
        assert str(path) in str(error)
    else:
        assert set(rows.tolist()) <= {0, 1}
