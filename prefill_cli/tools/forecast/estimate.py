"""From what a survey counted and a probe timed to seconds and bytes of a run.

A batch costs a constant, something for each cell of its position-wise products and something for each (query, key) pair
of its attention: a least-squares fit without negative terms over the probe's batches. The batches of a shard then go to
lanes as in the run: each to the lane that is free first.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefill_cli.data.results import group_rows
from prefill_cli.encoding.budget import STATES_PER_TOKEN
from prefill_cli.encoding.vllm_engine import room
from prefill_cli.job import Job
from prefill_cli.scoring.scan import ROOM, SCAN_CELLS
from prefill_cli.scoring.topk import PASS_BYTES, PASS_QUERIES
from prefill_cli.tools.forecast.survey import Batch, Group

SHARDS_AT_WORK = 3  # one is read, one encoded, one finished
READING_BYTES = 192 << 20  # of a record batch, its text, and what the tokenizer keeps of a batch of texts
WEIGHTS = 1.75  # times the weights' own size: as they are in the file, and most of them once more, fused
BYTES = {"float32": 4, "float64": 8}  # of a number; others have 2


class Stages(NamedTuple):
    """A figure for each of the three steps that a shard takes."""

    read: float
    encode: float
    finish: float


@dataclass(frozen=True)
class Timed:
    """A batch of the probe."""

    cells: int
    pairs: int
    sec: float
    of_prefixes: bool


@dataclass(frozen=True)
class Cost:
    """Seconds of a batch. `prefixes`: how many times as long a batch of prefixes takes, which has the device to itself.

    spread: of the probe's batches around the fit, as a share of the mean batch.
    """

    constant: float
    cell: float
    pair: float
    prefixes: float
    spread: float

    def of(self, batches: Iterable[Batch]) -> list[float]:
        return [self.constant + self.cell * batch.cells + self.pair * batch.pairs for batch in batches]

    def of_group(self, group: Group, lanes: int) -> float:
        """Seconds of encoding a group."""
        first = self.prefixes * sum(self.of(group.batches.prefixes))
        return group.pack_sec + first + makespan(self.of(group.batches.own), lanes)


def fit(timed: Sequence[Timed]) -> Cost | None:
    """The cost of batches like these; None without any."""
    own = [t for t in timed if not t.of_prefixes] or list(timed)
    if not own:
        return None
    seconds = np.array([t.sec for t in own])
    terms = _terms(own)
    best = _least_squares(terms, seconds)
    predicted = terms @ best
    best *= seconds.sum() / predicted.sum()
    spread = float(np.sqrt(np.mean((terms @ best - seconds) ** 2)) / seconds.mean())
    chains = [t for t in timed if t.of_prefixes]
    alone = _terms(chains) @ best if chains else np.ones(1)
    factor = sum(t.sec for t in chains) / float(alone.sum()) if chains else 1.0
    return Cost(float(best[0]), float(best[1]), float(best[2]), factor, spread)


def _terms(timed: Sequence[Timed]) -> npt.NDArray[np.float64]:
    return np.array([(1.0, t.cells, t.pairs) for t in timed])


def _least_squares(terms: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[3] factors, none negative: of all choices of terms the one that fits best, fewer terms first where few are timed."""
    best, least = np.array([0.0, seconds.sum() / terms[:, 1].sum(), 0.0]), np.inf  # seconds a cell
    for number in range(1, min(3, len(seconds) - 1) + 1):
        for chosen in map(list, itertools.combinations(range(3), number)):
            some = np.linalg.lstsq(terms[:, chosen], seconds, rcond=None)[0]
            left = float(np.square(terms[:, chosen] @ some - seconds).sum())
            if (some >= 0).all() and left < 0.98 * least:  # one more term has to say something
                least, best = left, np.zeros(3)
                best[chosen] = some
    return best


def makespan(seconds: Iterable[float], lanes: int) -> float:
    """When `lanes` have done all, each of which takes the next as soon as it is free."""
    free = [0.0] * lanes
    for sec in seconds:
        heapq.heapreplace(free, free[0] + sec)
    return max(free)


def wall_sec(stages: Sequence[Stages], busy: Stages) -> float:
    """Of reading, encoding and finishing shards in turn, where a shard is encoded while its neighbours are at theirs.

    busy: the share of the processor's cores that each stage keeps at work, alone. Stages that together want more than all
    of them gain nothing from each other's waiting, so the whole is never less than its work.
    """
    read = encoded = finished = 0.0
    taken = 0.0  # when the encoder took the shard before
    for stage in stages:
        read = max(read, taken) + stage.read  # the next is read when the encoder has taken this one
        taken = max(read, encoded)
        encoded = taken + stage.encode
        finished = max(finished, encoded) + stage.finish
    work = sum(seconds * share for stage in stages for seconds, share in zip(stage, busy, strict=True))
    return max(finished, work)


def memory(job: Job, groups: Sequence[Group], base_bytes: int, lanes: int, max_batch_tokens: int) -> dict[str, int]:
    """Bytes that a run needs at most, by what they are for. base: of the program with its items, before the model.

    On a CPU weights and batches are in the same memory as all else; elsewhere they are the device's.
    """
    assert job.folder
    text = job.folder.config.get_text_config()
    size = BYTES.get(job.dtype, 2)
    weights = sum(path.stat().st_size for path, _ in job.folder.stamps) * size // BYTES.get(_stored_dtype(text), 2)
    heads = getattr(text, "num_attention_heads", None) or 1
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    layers, hidden = getattr(text, "num_hidden_layers", None) or 1, job.folder.hidden_size
    kept = max((group.batches.kept_tokens for group in groups), default=0)
    keys_and_values = 2 * kept * layers * hidden * key_value_heads // heads * size
    if job.encoder == "vllm":
        keys_and_values, _ = room(job.folder, job.dtype, job.device, job.tokenize.limit)
    rows, at_work = min(job.config.shard_rows, job.plan.rows), min(SHARDS_AT_WORK, len(job.shards))
    held = max((group.held_bytes / max(1, group.rows) for group in groups), default=0.0) + 8.0 * job.user_width
    return {
        "program_and_items": base_bytes,
        "weights": int(WEIGHTS * weights),
        "batches": STATES_PER_TOKEN * hidden * size * lanes * max_batch_tokens + keys_and_values,
        "reading": min(READING_BYTES, 6 * sum(file.data_bytes for file in job.plan.files)),
        "shards": int(held * rows * at_work),
        "search": _search_bytes(job, rows) if job.scoring else 0,
    }


def _stored_dtype(text: Any) -> str:
    return str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")


def _search_bytes(job: Job, rows: int) -> int:
    """The items in bfloat16, what survives a scan, all scores of a block where there are no kernels, a row group."""
    assert job.scoring
    items, k = job.scoring.items, min(job.config.top_k, len(job.scoring.items))
    lists = min(PASS_BYTES, 16 * rows * min(2 * k + ROOM, len(items)))
    scores = 0 if job.scoring.compiled else 8 * min(SCAN_CELLS, len(items) * min(rows, PASS_QUERIES))
    return 2 * len(items) * items.width + lists + scores + 32 * k * min(rows, group_rows(k))
