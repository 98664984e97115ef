"""Whether the reductions of one bucket go out as one NCCL group, as plans assume: found by timing some.

It is a property of torch's backend, not of a signature: the same calls are one group in torch's legacy NCCL backend and
one launch after another in the one that torch 2.15 chooses by default (`TORCH_DIST_USE_NCCL2`).
"""

import statistics
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from canzona_cli.megatron.owner_bucket_group import matrix_groups
from canzona_cli.megatron.owner_collectives import reduce_each
from canzona_cli.megatron.trainee import Trainee

REDUCTIONS = 16
"""Timed together. In a group they take little longer than one, each after the other as many times as long."""
SERIAL = REDUCTIONS / 4
"""Times one reduction, from which on they are not grouped."""
_REPEATS = 7


def contradiction(trainee: Trainee) -> str | None:
    """What is otherwise than the plan assumes of grouped reductions; None where there is nothing to say. Collective."""
    group, device = trainee.world.groups.dp_cp, trainee.world.device
    planned = (bucket.planned for bucket in matrix_groups(trainee.chunks))
    # Also of a plan that does without, because it assumes that they are not grouped.
    several = any(len(bucket.ranges) > 1 for bucket in planned)
    if device.type != "cuda" or group.size() == 1 or not several:
        return None
    return judged(serial_factor(group, device, device_seconds), assumed=trainee.config.cluster.grouped_collectives)


def judged(factor: float, *, assumed: bool) -> str | None:
    """In words, what a `serial_factor` says against `cluster.grouped_collectives`; None where they agree."""
    if grouped(factor) == assumed:
        return None
    found = f"{REDUCTIONS} small reductions take {factor:.1f} times as long as one"
    if assumed:
        return (
            f"reductions of a bucket go out one after another here ({found}), but the plan prices them as one launch: "
            "plan with cluster.grouped_collectives=false, or let TORCH_DIST_USE_NCCL2=0 choose torch's other backend"
        )
    return f"reductions of a bucket are grouped here ({found}): plan with cluster.grouped_collectives=true"


def grouped(factor: float) -> bool:
    """What a `serial_factor` says."""
    return factor < SERIAL


def serial_factor(group: ProcessGroup, device: torch.device, seconds: Callable[[Callable[[], None]], float]) -> float:
    """How many times as long `REDUCTIONS` small reductions to different owners take as one; the same on every rank."""
    data = torch.zeros(REDUCTIONS, device=device)
    parts = [(data[place : place + 1], place % group.size()) for place in range(REDUCTIONS)]

    def reduce(count: int) -> None:
        for work in reduce_each(parts[:count], group):
            work.wait()

    def median(count: int) -> float:
        reduce(count)  # the first one also builds what it runs on
        return statistics.median(seconds(lambda: reduce(count)) for _ in range(_REPEATS))

    one = median(1)
    ratio = torch.full((), median(REDUCTIONS) / one, device=device)
    torch.distributed.all_reduce(ratio, op=torch.distributed.ReduceOp.MAX, group=group)
    return float(ratio.item())


def device_seconds(operation: Callable[[], None]) -> float:
    """From one event on the current stream to the next, `operation` between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
