"""Workers find out whether a bucket's reductions are one launch, and say it where the plan thought otherwise."""

from collections.abc import Callable, Sequence

import pytest
import torch

from canzona_cli.core.megatron import owner_bucket_group
from canzona_cli.core.megatron.owner_bucket_group import REDUCTIONS, describe_contradiction, grouped_time_ratio
from canzona_cli.core.megatron.owner_collectives import reduce_each
from tests.dist.ranks import run_ranks

Parts = Sequence[tuple[torch.Tensor, int]]


def _rank() -> list[float]:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    batches: list[int] = []

    def counting(parts: Parts, group: torch.distributed.ProcessGroup) -> list[torch.distributed.Work]:
        assert {owner for _, owner in parts} <= set(range(group.size()))
        batches.append(len(parts))
        return reduce_each(parts, group)

    setattr(owner_bucket_group, "reduce_each", counting)  # noqa: B010  # of this rank
    owner_bucket_group._AHEAD_BYTES = 1 << 10

    def clock(channels: int) -> Callable[[Callable[[], None]], float]:
        """Seconds of a device whose batches take a launch, and a second for what each channel has of them."""

        def seconds(operation: Callable[[], None]) -> float:
            batches.clear()
            operation()
            assert sum(batches) == REDUCTIONS
            return sum(0.1 + -(-count // channels) for count in batches)

        return seconds

    slow_here = 1 if group.rank() == 0 else 24
    return [grouped_time_ratio(group, torch.device("cpu"), clock(channels)) for channels in (24, 2, slow_here)]


def test_few_channels_are_no_sign_of_reductions_one_by_one_and_the_slowest_rank_decides() -> None:
    for many, few, serial in run_ranks(3, _rank):
        assert many == pytest.approx(1.1 / (REDUCTIONS * 1.1))
        assert few == pytest.approx((REDUCTIONS / 2 + 0.1) / (REDUCTIONS * 1.1))
        assert serial == pytest.approx((REDUCTIONS + 0.1) / (REDUCTIONS * 1.1))
        assert (
            describe_contradiction(many, assumed=True)
            is describe_contradiction(few, assumed=True)
            is describe_contradiction(serial, assumed=False)
            is None
        )
        assert None not in (describe_contradiction(few, assumed=False), describe_contradiction(serial, assumed=True))


def test_what_is_otherwise_than_planned_is_said_with_the_setting() -> None:
    serial, grouped = describe_contradiction(0.96, assumed=True), describe_contradiction(0.4, assumed=False)
    assert serial is not None
    assert "16 small reductions submitted together take 96% as long as one by one" in serial
    assert "cluster.grouped_collectives=false" in serial
    assert grouped is not None
    assert "cluster.grouped_collectives=true" in grouped
