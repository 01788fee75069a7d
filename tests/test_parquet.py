"""Damaged Parquet: page checksums are verified, and nothing that a footer says ends the process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, write_items, write_prompts

from prefill_cli.errors import InputError, ItemsError, OutputError
from prefill_cli.tools.show import UserQuery, read_lists


def test_no_footer_ends_the_process(llama, tmp_path):
    """Size statistics that do not fit their column make pyarrow abort where a footer is asked for one column."""
    script = """
import sys, pathlib
from prefill_cli.config import RunConfig
from prefill_cli.data.inputs import plan_inputs
from prefill_cli.data.prompts import ShardReader
from prefill_cli.errors import InputError
path = pathlib.Path(sys.argv[1])
whole = path.read_bytes()
config = RunConfig(inputs=(str(path),), exclude_column="seen")
first, refused = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), 0
for place in range(first, len(whole)):
    for bit in (1, 4):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        try:
            plan = plan_inputs(config)
            for shard in plan.shards(100):
                list(ShardReader(plan, config).read(shard))
        except InputError:
            refused += 1
print(refused)
"""
    path = write_prompts(tmp_path / "in.parquet", ["w1", "w2"], seen=pa.array([["i1"], []]))
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert (done.returncode, done.stderr[-300:]) == (0, "")
    assert int(done.stdout) > 500


def test_a_footer_whose_row_groups_do_not_add_up_is_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr("prefill_cli.parquet.group_rows", lambda metadata: (29,))
    with pytest.raises(InputError, match=r"prompts\.parquet: not readable as Parquet: the footer is damaged"):
        job.run()


def rot(path: Path, value: object) -> None:
    """Change one number of a column chunk, which no codec guards."""
    raw, needle = path.read_bytes(), np.array(value).tobytes()
    assert raw.count(needle) == 1
    path.write_bytes(raw.replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))


def test_a_page_that_is_not_what_its_checksum_says_is_refused(job, tmp_path):
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    inputs, items = tmp_path / "in.parquet", write_items(tmp_path / "items.parquet")
    pq.write_table(pa.table({"user_id": [123_456_789_123, 5], "prompt": ["w1", "w2"]}), inputs, **plain)
    rot(inputs, np.int64(123_456_789_123))
    with pytest.raises(InputError, match=r"in\.parquet: damaged near row 0: .*CRC"):
        job.run(inputs=(str(inputs),))
    table = pq.read_table(items)
    pq.write_table(table, items, **plain)
    rot(items, np.array(table["embedding"][7].as_py(), np.float32))
    with pytest.raises(ItemsError, match=r"items\.parquet: not readable as Parquet: .*CRC"):
        job.run(items=items)


def test_parts_have_page_checksums_which_show_verifies(job):
    job.run()
    part = job.out / "part-00000.parquet"
    raw = bytearray(part.read_bytes())
    raw[pq.read_metadata(part).row_group(0).column(2).data_page_offset + 60] ^= 1
    part.write_bytes(raw)
    with pytest.raises(OutputError, match=r"cannot be read: .*CRC"):
        read_lists(UserQuery(job.out, (), 5, 5, None, None, None))


@pytest.mark.parametrize("column", ["item_id", "embedding"])
def test_an_item_column_that_stands_twice_in_the_schema_is_refused(job, column):
    table = pq.read_table(job.items)
    pq.write_table(table.append_column(column, table[column]), job.items)
    with pytest.raises(ItemsError, match=rf"column '{column}' stands in the schema more than once"):
        job.run()


def test_show_says_of_titles_that_are_not_text_that_they_cannot_be_read(job):
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    titles = job.items.with_name("titles.parquet")
    pq.write_table(pa.table({"item_id": ["i0"], "title": broken}), titles)
    job.run()
    with pytest.raises(ItemsError, match=r"titles\.parquet: cannot be read: .*UTF8"):
        read_lists(UserQuery(job.out, (), 5, 5, titles, None, None))
