"""Several processes that run one model, each a shard of it: `crew` starts and leads the others."""
