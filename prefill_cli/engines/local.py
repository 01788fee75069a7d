"""All shards in this process, one after another."""

from collections.abc import Iterator, Sequence

from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.job import Job
from prefill_cli.pipeline import Progress, Worker


def run_shards(job: Job, shards: Sequence[Shard], progress: Progress) -> Iterator[tuple[Shard, Receipt]]:
    """Score `shards` in order; see pipeline.Engine. The model is loaded once, and only where there is a shard to do."""
    if shards:
        worker = Worker(job)
        for shard in shards:
            yield shard, worker.score(shard, progress)
