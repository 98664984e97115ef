"""Which strategies take turns in one process group: as many as fit into memory together, each beside the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from canzona_cli.bench.lineup import Contender, LineUp
from canzona_cli.config.schema import ClusterConfig
from canzona_cli.planner.memory import GIB, capacity

SHARE = 0.9
"""Of the machine's free memory, what CPU ranks may take."""


@dataclass(frozen=True, kw_only=True)
class Seating:
    """The contenders of one sitting."""

    contenders: tuple[Contender, ...]
    alone: bool = False
    """Its only contender does not fit beside the reference."""


def seat(line_up: LineUp, available_bytes: int | None) -> tuple[Seating, ...]:
    """Fill sittings in order; the first one begins with the reference.

    Args:
        available_bytes: free memory of the machine that CPU ranks share; None where ranks have their own.
    """
    reference, *others = line_up.contenders
    ranks = line_up.layout.world_size

    def fits(members: Sequence[Contender]) -> bool:
        needed = sum(member.state_bytes for member in members) + max(member.transient_bytes for member in members)
        if needed > capacity(reference.config):
            return False
        each = needed + _process_bytes(reference.config.cluster)
        return available_bytes is None or ranks * each <= SHARE * available_bytes

    tables: list[list[Contender]] = [[reference]]
    alone = []
    for contender in others:
        if not fits([reference, contender]):
            alone.append(Seating(contenders=(contender,), alone=True))
            continue
        table = next((members for members in tables if fits([*members, contender])), None)
        if table is None:
            tables.append([reference, contender])
        else:
            table.append(contender)
    return (*(Seating(contenders=tuple(members)) for members in tables), *alone)


def available_bytes(cluster: ClusterConfig) -> int | None:
    """Free memory of this machine, where ranks share it."""
    return int(psutil.virtual_memory().available) if cluster.device == "cpu" else None


def _process_bytes(cluster: ClusterConfig) -> int:
    """What a CPU rank takes before its first tensor: Python, torch and megatron-core."""
    return int(cluster.reserved_gib * GIB)
