"""Megatron's process groups, each set of ranks joined once.

Megatron makes a group for each of its purposes, also where it has one rank or the very ranks of another purpose: 118 of
them for 8 ranks, 8,091 for 1,024. Here purposes of the same ranks share a group, and all purposes of one rank alone
share that rank's. Every rank names every group, in the same order; where the backend connects a group's ranks only when
they first use it (NCCL without a device given in advance), that is all that the others cost.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from canzona_cli.config.schema import Layout

Group = ProcessGroup | object
"""What torch gives for a group: to a rank outside of it, a number."""
AMONG_ALL: Final = frozenset(
    {
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    }
)
"""Purposes, in Megatron's words, of small numbers: the norm of the gradients, scales of fp8."""


def make_groups(layout: Layout, *, timeout: timedelta, alive: Callable[[], None]) -> ProcessGroupCollection:
    """All that Megatron's parallelism of this layout takes. Collective.

    Args:
        timeout: of the collectives of each.
        alive: called at every group.
    """
    with _joined_once(timeout, alive):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            # Extra gloo groups serve Megatron's own (legacy) optimizer checkpoints, which canzona does not write.
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


@contextmanager
def _joined_once(timeout: timedelta, alive: Callable[[], None]) -> Iterator[None]:
    """Inside the block, Megatron gets its groups from here."""
    rank = torch.distributed.get_rank()
    # Buckets have no part in the world's own group: what all ranks tell each other would wait behind them.
    # For the same reason attention, which waits for keys and values, shares none with buckets where dp is 1.
    groups: dict[tuple[bool, tuple[int, ...]], Group] = {}
    alone = torch.distributed.new_group([rank], timeout=timeout, use_local_synchronization=True)

    def create_group(ranks: Sequence[int], *, group_desc: str, **options: object) -> Group:
        alive()
        if len(ranks) == 1:
            return alone
        if group_desc in AMONG_ALL and len(ranks) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        members = (group_desc == "CONTEXT_PARALLEL_GROUP", tuple(sorted(ranks)))
        if members not in groups:
            groups[members] = torch.distributed.new_group(list(ranks), timeout=timeout, group_desc=group_desc)
        return groups[members]

    original = parallel_state.create_group
    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original
