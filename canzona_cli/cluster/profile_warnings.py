"""Warnings to the user of a hardware profile."""

from canzona_cli.config.schema import ClusterConfig


def profile_warnings(cluster: ClusterConfig, *, training: bool = True) -> tuple[str, ...]:
    """Lists what a user of a profile should know. Without `training` it may be for another machine, as in a plan."""
    if not training:
        return _gaps(cluster)
    from canzona_cli.cluster.machine import profile_mismatches  # here, for plans do without

    return (*_gaps(cluster), *profile_mismatches(cluster))


def _gaps(cluster: ClusterConfig) -> tuple[str, ...]:
    """Lists what an interrupted calibration did not measure; empty for a complete one."""
    if not cluster.not_measured:
        return ()
    missing = ", ".join(cluster.not_measured)
    return (
        f"cluster profile {cluster.name} is incomplete, its calibration was interrupted: {missing} "
        f"come from profile {cluster.measured_on.get('base', 'it started from')}",
    )
