"""Who runs which shard. An engine knows nothing of what is in one."""
