"""Results written by hand, and what evaluate finds in them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from prefill_cli import cli
from prefill_cli.data.disk import write_json
from prefill_cli.data.inputs import read_footer


def evaluated(*arguments: object) -> dict:
    result = CliRunner().invoke(cli.app, ["evaluate", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: object) -> tuple[int, str]:
    """Exit code and the one sentence on stderr."""
    result = CliRunner().invoke(cli.app, ["evaluate", *map(str, arguments)])
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return result.exit_code, line


def write_result(
    folder: Path, users: list, lists: list[list], *, items: int = 100, top_k: int = 20, layout: str = "nested",
    part_rows: int = 1_000, kept: dict | None = None, inputs: Path | None = None, exclude: str | None = None,
    rejects: dict | None = None, item_type: pa.DataType | None = None,
) -> Path:  # fmt: skip
    """A result folder as a run writes it. kept: column → values. rejects: of each column of the rejects."""
    folder.mkdir()
    item_type = item_type or pa.infer_type([i for items in lists for i in items])
    parts = {}
    for number, start in enumerate(range(0, max(len(users), 1), part_rows)):
        rows = slice(start, start + part_rows)
        columns = {
            "user_id": pa.array(users)[rows],
            **{name: pa.array(values)[rows] for name, values in (kept or {}).items()},
        }
        some = lists[rows]
        if layout == "nested":
            columns["item_ids"] = pa.array(some, pa.list_(item_type))
            columns["scores"] = pa.array([[-float(i) for i in range(len(one))] for one in some], pa.list_(pa.float32()))
        else:
            owner = pa.array(np.repeat(np.arange(len(some)), [len(one) for one in some]))
            columns = {name: column.take(owner) for name, column in columns.items()}
            columns["rank"] = pa.array([rank for one in some for rank in range(1, len(one) + 1)], pa.int32())
            columns["item_id"] = pa.array([item for one in some for item in one], item_type)
            columns["score"] = pa.array([-float(r) for one in some for r in range(len(one))], pa.float32())
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=max(7, part_rows // 3), write_page_checksum=True)
        parts[path.name] = path.stat().st_size
    if rejects:
        (folder / "_rejects").mkdir()
        pq.write_table(pa.table(rejects), folder / "_rejects" / "part-00000.parquet")
    files = [read_footer(str(inputs)).identity] if inputs else []
    write_json(
        folder / "_manifest.json",
        {
            "made_by": "prefill-score", "format_version": 1, "fingerprint": {}, "model": {}, "parts": parts,
            "options": {"id_column": "user_id", "top_k": top_k, "layout": layout, "exclude_column": exclude},
            "inputs": {"rows": len(users), "files": files},
            "items": {"items": items, "path": "gone.parquet"},
            "totals": {
                "rejects": len(rejects["user_id"]) if rejects else 0,
                "empty_lists": sum(not one for one in lists),
            },
        },
    )  # fmt: skip
    (folder / "_SUCCESS").touch()
    return folder


def random_lists(rng: np.random.Generator, users: int, ids: list, longest: int = 20) -> list[list]:
    """Lists of all lengths, some empty."""
    return [[ids[i] for i in rng.permutation(len(ids))[: rng.integers(0, longest + 1)]] for _ in range(users)]


def random_truths(rng: np.random.Generator, users: int, ids: list, most: int) -> list[list]:
    """1 ... most distinct items a user, some in no catalogue."""
    return [[ids[i] for i in rng.permutation(len(ids))[: rng.integers(1, most + 1)]] for _ in range(users)]


def values_of(metrics: dict) -> dict[tuple[str, int], float]:
    return {(name, int(k)): value["mean"] for name, values in metrics.items() for k, value in values.items()}
