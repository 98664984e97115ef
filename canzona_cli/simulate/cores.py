"""Which processor cores CPU ranks share, for predictions; no plan depends on it."""

from dataclasses import replace

from canzona_cli.config.schema import RunConfig
from canzona_cli.run.machine import cores


def with_cores(config: RunConfig) -> RunConfig:
    """CPU ranks of a profile that does not say how many cores they share have those of this machine."""
    cluster = config.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return config
    return replace(config, cluster=replace(cluster, cores=cores()))
