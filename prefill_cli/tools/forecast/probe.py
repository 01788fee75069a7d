"""A rehearsal of a run: the model loaded as the run loads it, some of the run's own batches, a search of their vectors.

What is built once a machine (compiled kernels) is built before anything is timed, since the run will find it.
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefill_cli.data.rows import ShardRows
from prefill_cli.data.tokenization import Ids
from prefill_cli.encoding.batching import padded_batches, spread
from prefill_cli.encoding.choice import choose_encoder, plain_encoder
from prefill_cli.encoding.encoder import Encoder
from prefill_cli.encoding.kernels import load_kernels
from prefill_cli.encoding.loading import load_base_model
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.errors import OutputError
from prefill_cli.job import CHECKED_PROMPTS, Job
from prefill_cli.machine import Stopwatch, use_all_threads
from prefill_cli.outcome import Outcome, outcome_of
from prefill_cli.scoring import kernels as search_kernels
from prefill_cli.tools.forecast.estimate import Timed

log = logging.getLogger(__name__)
SEARCHED_ROWS = (16, 1_024, 8_192)  # few rows at once cost more each, so as many as there is time for
FINISH_SEC = 2.0  # after which no more are searched for


@dataclass(frozen=True)
class Encoding:
    """What was found of the model: which encoder, seconds until it is ready, some of its batches, their vectors [m, d]."""

    encoder: str
    max_batch_tokens: int
    start_sec: float
    batches: tuple[Timed, ...]
    busy: float  # threads at work meanwhile, on average
    vectors: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Finishing:
    """What was found of search and writing: seconds that come once, and those of a row; see Encoding.busy."""

    once_sec: float
    search_sec: float
    write_sec: float
    rows: int
    busy: float


def build_kernels(job: Job) -> None:
    """Build what the run will find built."""
    if job.device == "cpu" and job.compile and job.dtype == "bfloat16":
        load_kernels()
    if job.device == "cpu" and job.scoring and job.scoring.compiled:
        search_kernels.load_kernels()


def prepare(job: Job) -> tuple[Outcome, float]:
    """What makes lists of vectors, and seconds until it was ready."""
    began = time.perf_counter()
    return outcome_of(job), time.perf_counter() - began


def rehearse_encoding(job: Job, fresh: Sequence[Ids], share: float, for_sec: float) -> Encoding:
    """Load the model and encode some of the batches of `fresh` prompts, as a run does that has to encode so large a share.

    Raises:
        ModelError: the model cannot be loaded.
    """
    assert job.folder
    began = time.perf_counter()
    model = load_base_model(job.folder, job.device, job.dtype, job.config.trust_remote_code)
    options = job.encoder_options(job.folder, share)
    encoder: Encoder
    if job.encoder == "plain":
        encoder = plain_encoder(model, options)
    else:
        encoder = choose_encoder(model, options, fresh[:CHECKED_PROMPTS])
    start_sec, watch = time.perf_counter() - began, Stopwatch()

    def enough() -> bool:
        return watch.sec > for_sec

    timed: list[Timed] = []
    vectors: list[npt.NDArray[np.float32]] = []
    if isinstance(encoder, PrefillEncoder):
        for row in encoder.rehearse(fresh, enough):
            timed.append(Timed(row.cells, row.pairs, row.sec, row.of_prefixes))
            vectors.append(row.vectors)
    else:
        lengths = np.fromiter(map(len, fresh), np.int64, len(fresh))
        plan = list(padded_batches(lengths, encoder.max_batch_tokens))
        for batch in (plan[i] for i in spread(len(plan))):
            if enough():
                break
            before, longest = time.perf_counter(), int(lengths[batch[0]])
            vectors.append(encoder.encode([fresh[i] for i in batch], lambda *_: None).vectors)
            sec = time.perf_counter() - before
            timed.append(Timed(len(batch) * longest, len(batch) * longest * longest, sec, False))
    together = np.concatenate(vectors) if vectors else np.empty((0, job.user_width), np.float32)
    busy = watch.work_sec / watch.sec
    return Encoding(encoder.name, encoder.max_batch_tokens, start_sec, tuple(timed), busy, together)


def rehearse_finishing(outcome: Outcome, rows: ShardRows, vectors: npt.NDArray[np.float32]) -> Finishing | None:
    """Make parts of some rows in a scratch folder, with `vectors` [m, d] again and again; None where nothing can be made."""
    vectors = vectors[np.isfinite(vectors).all(axis=1)]
    if not (rows.input_ids and len(vectors)):
        return None
    # In a thread of its own, as the run does: how many threads PyTorch takes depends on the thread that asks.
    with ThreadPoolExecutor(1, "finish", use_all_threads) as finisher:
        return finisher.submit(_finish_some, outcome, rows, vectors).result()


def _finish_some(outcome: Outcome, rows: ShardRows, vectors: npt.NDArray[np.float32]) -> Finishing | None:
    n = len(rows.input_ids)
    with contextlib.suppress(OSError, OutputError), tempfile.TemporaryDirectory(prefix="prefill-score-") as scratch:

        def finish(some: int) -> tuple[float, float]:
            fitting, found = outcome.fit(_first(rows, some), vectors[np.arange(some) % len(vectors)])
            began = time.perf_counter()
            written = outcome.write(Path(scratch) / "part.parquet", fitting, found)
            return written.search_sec, time.perf_counter() - began - written.search_sec

        began, first = time.perf_counter(), sum(finish(min(n, SEARCHED_ROWS[0])))
        once = max(0.0, first - sum(finish(min(n, SEARCHED_ROWS[0]))))
        found = None
        for some in sorted({min(n, most) for most in SEARCHED_ROWS[1:]}):
            if found is None or time.perf_counter() - began < FINISH_SEC:
                watch = Stopwatch()
                search_sec, write_sec = finish(some)
                found = Finishing(once, search_sec / some, write_sec / some, some, watch.work_sec / watch.sec)
        return found
    return None


def _first(rows: ShardRows, some: int) -> ShardRows:
    """The first of some rows."""
    return replace(
        rows,
        columns=rows.columns.slice(0, some),
        exclude=None if rows.exclude is None else rows.exclude.slice(0, some),
        candidates=None if rows.candidates is None else rows.candidates.slice(0, some),
        input_ids=rows.input_ids[:some],
        source_file=rows.source_file[:some],
        source_row=rows.source_row[:some],
    )
