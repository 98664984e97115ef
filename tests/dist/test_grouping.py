"""Workers find out whether a bucket's reductions are one launch, and say it where the plan thought otherwise."""

from collections.abc import Callable

import pytest
import torch

from canzona_cli.megatron import owner_collectives
from canzona_cli.megatron.owner_bucket_group import REDUCTIONS, judged, serial_factor
from tests.dist.ranks import run_ranks


def _rank() -> tuple[float, float]:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    issued: list[int] = []
    real = owner_collectives._reduce

    def counting(data: torch.Tensor, owner: int, group: torch.distributed.ProcessGroup) -> torch.distributed.Work:
        issued.append(owner)
        return real(data, owner, group)

    owner_collectives._reduce = counting

    def clock(of_each: float) -> Callable[[Callable[[], None]], float]:
        """Seconds of a device on which every reduction but the first adds `of_each`."""

        def seconds(operation: Callable[[], None]) -> float:
            issued.clear()
            operation()
            assert set(issued) <= set(range(group.size()))
            return 1.0 + of_each * (len(issued) - 1)

        return seconds

    slow_here = 1.0 if group.rank() == 0 else 0.0
    return serial_factor(group, torch.device("cpu"), clock(0.1)), serial_factor(
        group, torch.device("cpu"), clock(slow_here)
    )


def test_the_slowest_rank_decides_on_all_of_them() -> None:
    for grouped, serial in run_ranks(3, _rank):
        assert grouped == pytest.approx(1 + 0.1 * (REDUCTIONS - 1))
        assert serial == REDUCTIONS
        assert judged(grouped, assumed=True) is None
        assert judged(serial, assumed=False) is None


def test_what_is_otherwise_than_planned_is_said_with_the_setting() -> None:
    serial, grouped = judged(16.0, assumed=True), judged(1.5, assumed=False)
    assert serial is not None
    assert "16 small reductions take 16.0 times as long as one" in serial
    assert "cluster.grouped_collectives=false" in serial
    assert grouped is not None
    assert "cluster.grouped_collectives=true" in grouped
