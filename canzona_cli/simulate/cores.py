"""Which processor cores CPU ranks share, for predictions; no plan depends on it."""

import os
from dataclasses import replace

from canzona_cli.config.schema import RunConfig


def with_cores(config: RunConfig) -> RunConfig:
    """CPU ranks of a profile that does not say how many cores they share have those of this machine."""
    cluster = config.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return config
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return replace(config, cluster=replace(cluster, cores=cores))
