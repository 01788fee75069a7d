"""Nights in a row in one process: prompts change, items change, one cache, pruned now and then. `soak.py MINUTES`.

Prints memory and open files every half minute and fails where the last third has more than the second.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]
from conftest import HIDDEN, Watcher, random_prompts, save_llama, write_items, write_prompts

from prefill_cli import pipeline
from prefill_cli.config import RunConfig
from prefill_cli.engines.local import run_shards
from prefill_cli.tools.cache import describe, prune


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def main(minutes: float) -> None:
    rng, began, nights, seen = np.random.default_rng(0), time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model = save_llama(place / "model")
        prompts = random_prompts(2_000)
        last = -30.0
        while (now := time.monotonic() - began) < 60 * minutes:
            for i in rng.choice(len(prompts), 400, replace=False):
                prompts[i] = random_prompts(1, seed=int(rng.integers(1 << 30)))[0]
            seed = nights // 5
            vectors = np.random.default_rng(seed).standard_normal((5_000, HIDDEN), dtype=np.float32)
            config = RunConfig(
                inputs=(str(write_prompts(place / "prompts.parquet", prompts)),), model=str(model), output=place / "out",
                items=write_items(place / "items.parquet", vectors=vectors, ids=pa.array(range(5_000))),
                top_k=20, device="cpu", shard_rows=300, cache=place / "vectors", overwrite=True,
            )  # fmt: skip
            totals = pipeline.run(config, run_shards, Watcher())
            assert totals["rows_out"] == len(prompts)
            nights += 1
            if nights % 20 == 0:
                prune(place / "vectors", None, 10_000 * 100)
            if now - last >= 30:
                last = now
                gc.collect()
                cache = describe(place / "vectors")
                seen.append((resident_mb(), len(os.listdir("/proc/self/fd"))))
                print(f"{now:6.0f} s  {nights:5d} nights  {seen[-1][0]:7.1f} MB  {seen[-1][1]:3d} files open  "
                      f"{totals['cached_rows']:5d} cached  {cache['vectors']:6d} kept", flush=True)  # fmt: skip
    third = max(1, len(seen) // 3)
    for what, column in (("MB", 0), ("files open", 1)):
        middle, end = (statistics.mean(row[column] for row in part) for part in (seen[third:-third], seen[-third:]))
        print(f"{what}: second third {middle:.1f}, last third {end:.1f}")
        assert end <= 1.05 * middle + 1, f"{what} grow"


if __name__ == "__main__":
    main(float(sys.argv[1]))
