"""All shards in this process: the model computes one while its neighbours are read, searched and written."""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.job import Job
from prefill_cli.machine import use_all_threads
from prefill_cli.pipeline import Progress
from prefill_cli.worker import Worker

T = TypeVar("T")


class _StoppedError(Exception):
    """Ends the encoding of a shard that nobody waits for any more."""


def run_shards(job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]:
    """Do `shards` in order; see pipeline.Engine. The model is loaded once, and only where there is a shard to do.

    Three shards are in memory at most: one being read, one in the model, one being searched and written. An error in
    any of the three ends the run within a batch, and so does whoever closes this generator.
    """
    if not shards:
        return
    worker = Worker(job)
    stop = threading.Event()

    def on_batch(rows: int, tokens: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress.advance(rows, tokens)

    try:
        # Left in the order reader, encoder, finisher, each after its last task.
        with (
            ThreadPoolExecutor(1, "finish", use_all_threads) as finisher,
            ThreadPoolExecutor(1) as encoder,
            ThreadPoolExecutor(1) as reader,
        ):
            behind: tuple[Shard, Future[Receipt]] | None = None
            try:
                ahead: Future[Any] = reader.submit(worker.read, shards[0])
                for following in (*shards[1:], None):
                    read = ahead.result()
                    ahead = reader.submit(worker.read, following) if following else reader.submit(lambda: None)
                    encoding = encoder.submit(worker.encode, read, on_batch)
                    if behind:
                        yield behind[0], _result(behind[1], encoding, ahead)
                        behind = None
                    vectors = _result(encoding, ahead)
                    progress.advance(read.shard.rows - len(read.rows.input_ids), 0)
                    behind = read.shard, finisher.submit(worker.finish, vectors)
                if behind:
                    yield behind[0], behind[1].result()
            except (Exception, KeyboardInterrupt):
                if behind:  # its vectors are there, so its lists are not lost
                    yield behind[0], behind[1].result()
                raise
            finally:
                stop.set()
    finally:
        worker.close()


def _result(wanted: Future[T], *others: Future[Any]) -> T:
    """What `wanted` comes to; an error of the others is raised as soon as it is there."""
    waiting: set[Future[Any]] = {wanted, *others}
    while not wanted.done():
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    return wanted.result()
