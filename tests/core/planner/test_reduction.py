"""The ways of gradients to owners: prices by hand, and rings only where they are worth their memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.costs.links import Group, Links
from canzona_cli.core.costs.padding import bucket_end
from canzona_cli.core.planner.plan import Bucket, PlanSettings, Range
from canzona_cli.core.planner.reduction import (
    WORTH,
    ReductionModel,
    Segment,
    collectives,
    handovers,
    scratch_bytes,
    sent_elements,
    uniform_buckets,
)
from canzona_cli.core.setup import ClusterConfig, Gathering, Reduction
from tests.sizes import H100, layout, run

CANZONA = PlanSettings(strategy="canzona")
FAST_MEMORY = replace(H100, memory_gb_per_s=1e15, launch_us=0.0)
MIB = 1 << 20
MACHINE = 360e9
"""Bytes per second inside a machine."""


def model(dp: int = 4, cluster: ClusterConfig = H100, grad: str = "fp32") -> ReductionModel:
    config = run("8b", dp, strategy="canzona", cluster=cluster, grad_reduce_dtype=grad)  # type: ignore[arg-type]
    return ReductionModel(config.setup, layout(dp=dp))


def bucket(sizes: Sequence[int], owners: Sequence[int] | None = None, reduction: Reduction = "reduce") -> Bucket:
    """Ranges of `sizes`, of owners 0, 1, ... if not told."""
    ranges, start = [], 0
    for place, (size, owner) in enumerate(zip(sizes, owners or range(len(sizes)), strict=True)):
        ranges.append(Range(start=start, end=start + size, owner=owner, matrices=(place,)))
        start += size
    return Bucket(index=0, stage=0, parameters=(), elements=start, padding=0, ranges=tuple(ranges), reduction=reduction)


def test_per_owner_reductions_pass_every_share_but_the_least_and_are_issued_by_range() -> None:
    cluster = replace(FAST_MEMORY, launch_us=7.0)
    one = bucket([4 * MIB, 3 * MIB, 2 * MIB, MIB, MIB], [0, 1, 2, 3, 0])
    found = model(cluster=cluster).reduce(one)
    assert found.link_s == pytest.approx(4 * 10 * MIB / MACHINE)
    hops = 4 * H100.intra_node_latency_us * 1e-6 * 3 / 4
    chunks = 3 * 24 * (512 << 10) / MACHINE
    assert found.latency_s == pytest.approx(hops + chunks + 4 * 7e-6), "five ranges are four launches more than one"
    assert model(cluster=cluster).gather(one).link_s == pytest.approx(found.link_s / 2)


def test_one_rank_reduces_nothing() -> None:
    one = bucket([MIB])
    for how in get_args(Reduction):
        assert model(1).reduce(replace(one, reduction=how)).seconds == 0
    for back in get_args(Gathering):
        assert model(1).gather(replace(one, gathering=back)).seconds == 0
    assert model(1).choose([one], CANZONA) == (one,)


def test_a_chain_overlaps_the_next_one_as_far_as_its_owner_lies_before_that_ones() -> None:
    """Ranks are done with a chain one after another, the owner's successor first, and may go on with the next one."""
    prices, ranks = model(8, cluster=replace(H100, gpus_per_node=1, launch_us=0.0)), 8
    fill_s = prices.reduce(bucket([64 * MIB])).latency_s

    def overlap(*roots: Sequence[int], way: Reduction = "reduce") -> list[float]:
        held = [bucket([64 * MIB] * len(owners), owners) for owners in roots]
        held = [held[0], *(replace(one, reduction=way) for one in held[1:])]
        held = [replace(one, elements=bucket_end(one.elements, ranks)) for one in held]
        return [reduced.fill_s / fill_s for reduced, _ in prices.in_sequence(held)]

    assert overlap([3], [3]) == pytest.approx([1, 0]), "nothing overlaps the last one"
    assert overlap([3], [4]) == pytest.approx([6 / 7, 0])
    assert overlap([7], [0]) == pytest.approx([6 / 7, 0]), "the ring of ranks is closed"
    assert overlap([3], [2]) == pytest.approx([0, 0]), "the predecessor is the last to be done"
    assert overlap([1, 2], [2, 4]) == pytest.approx([4 / 7, 0]), "from the first owner to the last one"
    assert overlap([0, 7], [0, 7]) == pytest.approx([0, 0])
    assert overlap([3], [3], way="ring") == pytest.approx([0, 0]), "a ring needs all ranks at once"


def test_chains_are_chosen_together_where_they_overlap_and_rings_where_they_do_not() -> None:
    """Each alone would be a ring: filling a chain of 64 machines takes longer than handing the share on."""
    prices = model(64, cluster=replace(H100, gpus_per_node=1))

    def ways(*roots: int) -> list[Reduction]:
        buckets = [bucket([8 * MIB], [owner]) for owner in roots]
        return [found.reduction for found in prices.choose(buckets, CANZONA)]

    assert ways(5) == ["ring"]
    assert ways(5, 5, 6, 7) == ["reduce", "reduce", "reduce", "ring"]
    assert ways(7, 6, 5, 4) == ["ring"] * 4
    chosen = prices.in_sequence(prices.choose([bucket([8 * MIB], [owner]) for owner in (5, 5, 6)], CANZONA))
    rings = prices.in_sequence([replace(bucket([8 * MIB], [owner]), reduction="ring") for owner in (5, 5, 6)])
    taken, most = (sum(way.seconds - way.fill_s for way, _ in moves) for moves in (chosen, rings))
    assert taken < most


def test_weights_go_the_other_way() -> None:
    prices = model(8, cluster=replace(H100, gpus_per_node=1))
    ascending = [bucket([64 * MIB], [owner]) for owner in (2, 3)]
    overlaps = [
        [[moved.fill_s > 0 for moved in moves] for moves in prices.in_sequence(buckets)]
        for buckets in (ascending, ascending[::-1])
    ]
    assert overlaps == [[[True, False], [False, False]], [[False, False], [False, True]]]


@given(
    dp=st.sampled_from([2, 4, 8, 16]),
    sizes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=16),
    scratch=st.booleans(),
    strategy=st.sampled_from(["canzona", "paper", "asc"]),
    latency=st.sampled_from([1.0, 10.0, 500.0]),
)
def test_a_ring_is_chosen_only_where_it_is_faster_and_there_is_memory(
    dp: int, sizes: list[int], scratch: bool, strategy: str, latency: float
) -> None:
    prices = model(dp, cluster=replace(H100, intra_node_latency_us=latency))
    one = bucket(sizes, [place % dp for place in range(len(sizes))])
    one = replace(one, elements=bucket_end(one.elements, dp))
    wanted = PlanSettings(strategy=strategy)  # type: ignore[arg-type]
    (chosen,) = prices.choose([one], wanted) if scratch else uniform_buckets([one], wanted)
    assert replace(chosen, reduction="reduce", gathering="broadcast") == one
    if not scratch:
        assert chosen == one
    if (chosen.reduction, chosen.gathering) != ("reduce", "broadcast"):
        for priced in (prices.reduce, prices.gather):
            assert priced(chosen) == priced(one) or priced(chosen).seconds <= WORTH * priced(one).seconds


def test_what_is_asked_for_is_what_is_done() -> None:
    one = bucket([MIB, 5])
    ways: list[tuple[Reduction, Gathering]] = [("reduce", "broadcast"), ("ring", "ring")]
    for asked, back in ways:
        for strategy in ("canzona", "asc"):
            wanted = PlanSettings(strategy=strategy, reduction=asked)
            [chosen] = model(2).choose([one], wanted)
            assert (chosen.reduction, chosen.gathering) == (asked, back)


@given(
    ranks=st.sampled_from([2, 4, 8]),
    held=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 7), st.integers(0, 63)), min_size=1, max_size=12),
)
def test_a_ring_hands_over_every_element_once_by_ascending_owners(ranks: int, held: list[tuple[int, int, int]]) -> None:
    ranges, position = [], 0
    for place, (size, owner, gap) in enumerate(held):
        ranges.append(Range(start=position, end=position + size, owner=owner % ranks, matrices=(place,)))
        position += size + gap
    one = replace(bucket([1]), elements=bucket_end(position, ranks), ranges=tuple(ranges))
    part = one.elements // ranks
    found: list[list[Segment]] = [[] for _ in range(ranks)]
    messages = handovers(one, ranks)
    if not messages:
        assert all(p.owner * part <= p.start < p.end <= (p.owner + 1) * part for p in ranges), "all is with its owner"
        return
    for runs in messages:
        assert any(runs)
        for rank, message in enumerate(runs):
            assert all(a.end == b.start and a.owner < b.owner for a, b in pairwise(message))
            found[rank] += message
    owner_of = [owned.owner for owned in ranges for _ in range(owned.start, owned.end)]
    position_of = [place for owned in ranges for place in range(owned.start, owned.end)]
    handover_sizes = {place: segment.owner for of_rank in found for segment in of_rank for place in range(*segment[1:])}
    assert [handover_sizes[place] for place in position_of] == owner_of
    assert len(handover_sizes) == one.elements == sum(end - start for of_rank in found for _, start, end in of_rank)
    for rank, segments in enumerate(found):
        assert all(rank * part <= start < end <= (rank + 1) * part for _, start, end in segments)


def test_a_ring_is_native_collectives_of_the_bucket_and_what_is_not_with_its_owner() -> None:
    cluster = replace(FAST_MEMORY, intra_node_latency_us=0.0)
    one = bucket([6 * MIB, MIB, MIB], [0, 1, 2], "ring")
    # Parts of two: 4 of owner 0's six are elsewhere; rank 3's part is of owners 1 and 2, and rank 1 and 2 have none.
    assert model(cluster=cluster).reduce(one).seconds == pytest.approx((8 * 3 / 4 + 4) * MIB * 4 / MACHINE)
    assert model(cluster=cluster).gather(replace(one, gathering="ring")).seconds == pytest.approx(
        (8 * 3 / 4 + 4) * MIB * 2 / MACHINE
    )
    assert collectives(replace(one, gathering="ring"), 4) == (2, 2)
    assert collectives(replace(one, ranges=one.ranges[::-1]), 1) == (0, 0)
    assert scratch_bytes(one, one.reduction, 4, 4) == {0: 24 * MIB, 1: 4 * MIB, 2: 4 * MIB}
    assert scratch_bytes(one, "ring", 4, 2) == {0: 12 * MIB, 1: 2 * MIB, 2: 2 * MIB}
    assert sent_elements(one, "ring", 4) == 8 * MIB


def test_a_ring_of_equal_shares_is_the_native_collective_alone() -> None:
    """Nothing is handed on, whatever pads the shares: Megatron's own reduce-scatter and all-gather."""
    one = replace(bucket([3 * MIB, MIB, 2 * MIB]), elements=12 * MIB)
    starts = [
        part._replace(start=k * 3 * MIB, end=k * 3 * MIB + part.end - part.start) for k, part in enumerate(one.ranges)
    ]
    one = replace(one, ranges=tuple(starts), reduction="ring", gathering="ring")
    prices, links = model(), Links(cluster=H100)
    group = Group(size=4, per_machine=4)
    assert prices.reduce(one) == links.reduce_scatter(12 * MIB * 4, group)
    assert prices.gather(one) == links.all_gather(12 * MIB * 2, group)
    assert handovers(one, 4) == ()
    assert collectives(one, 4) == (1, 1)
    assert sent_elements(one, "ring", 4) == 9 * MIB
    assert scratch_bytes(one, one.reduction, 4, 4) == scratch_bytes(one, one.gathering, 4, 2) == {}


UNEVEN = bucket([16 * MIB, *[4 * MIB] * 6, 2 * MIB])
OF_32B = bucket([6_553_600, 5_242_880, 16_384_000, 16_384_000, 16_384_000], [0, 1, 3, 4, 5])
"""The second bucket of 32B on 32 owners: padding would be eight times as much as there is."""


@pytest.mark.parametrize(("one", "ranks"), [(UNEVEN, 8), (OF_32B, 32)], ids=["uneven", "32B"])
def test_a_ring_is_chosen_where_each_owners_is_a_launch_of_its_own(one: Bucket, ranks: int) -> None:
    one = replace(one, elements=bucket_end(one.elements, ranks))

    def ways(*, grouped: bool) -> tuple[str, str]:
        cluster = replace(H100, gpus_per_node=1, inter_node_latency_us=14.0, grouped_collectives=grouped)
        [found] = model(ranks, cluster=cluster).choose([one], CANZONA)
        return found.reduction, found.gathering

    assert ways(grouped=True) == ("reduce", "broadcast")
    assert ways(grouped=False) == ("ring", "ring")
