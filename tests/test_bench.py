"""`prefill-score bench`: the same prompts in every way, and numbers that belong together."""

import json

import pytest
from conftest import random_prompts, write_prompts
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.errors import InputError
from prefill_cli.tools.bench import bench


def test_every_way_computes_the_same_tokens_and_states_its_padding(job):
    measured = bench(job.config(max_batch_tokens=1), rows=20, repeat=2)
    tokens = sum(len(prompt.split()) + 1 for prompt in job.prompts[:20])
    assert (measured["rows"], measured["tokens"], measured["device"], measured["dtype"]) == (20, tokens, "cpu", "float32")
    longest = max(len(prompt.split()) + 1 for prompt in job.prompts[:20])
    padding = {name: way["padding"] for name, way in measured["ways"].items()}
    # A budget of one token leaves every prompt alone and so unpadded; the loop pads its 20 to the longest.
    loop = round(20 * longest / tokens, 3)
    assert padding == {"prefill-score": 1.0, "loop, arrival order": loop, "loop, sorted": loop}
    for way in measured["ways"].values():
        assert way["tokens_per_sec"] == pytest.approx(tokens / way["sec"], rel=0.05)


def test_the_command_ends_with_one_json_line(job):
    result = CliRunner().invoke(cli.app, ["bench", str(job.inputs), "-m", str(job.model), "--rows", "5", "--repeat", "1"])
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["rows"] == 5


def test_an_input_without_a_prompt_to_measure_is_refused(job, tmp_path):
    inputs = write_prompts(tmp_path / "none.parquet", [None, "", *random_prompts(3)])
    with pytest.raises(InputError, match="no prompt to measure"):
        bench(job.config(inputs=(str(inputs),)), rows=2, repeat=1)
