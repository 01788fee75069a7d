"""Who runs which shard. An engine knows nothing of what is in one."""

from prefill_cli.config import RunConfig
from prefill_cli.pipeline import Engine


def engine_of(config: RunConfig) -> Engine:
    """The one that the options ask for; what it needs is imported now.

    Raises:
        UsageError: a package is missing.
    """
    if config.engine == "ray":
        from prefill_cli.engines import ray

        ray.load_package()
        return ray.run_shards
    if config.worker_range[1] > 1:
        from prefill_cli.engines import processes

        return processes.run_shards
    from prefill_cli.engines import local

    return local.run_shards
