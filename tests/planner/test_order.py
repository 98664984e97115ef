"""The order of an owner's work by hand, and refreshes that take turns: no step longer than it must be, few long."""

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import KroneckerConfig
from canzona_cli.planner.make import make_plan
from canzona_cli.planner.order import (
    LANES,
    RankWork,
    by_rank,
    one_by_one,
    order,
    refreshes,
    slowest,
    step_by_step,
    take_turns,
    turns,
)

WORKS = st.builds(
    lambda every_s, refreshes_s: RankWork(every_s=every_s, refreshes_s=refreshes_s),
    st.integers(0, 5),
    st.lists(st.integers(0, 20), max_size=3),
)


@given(
    costs=st.lists(st.floats(min_value=0, max_value=1e3), max_size=40),
    period=st.integers(min_value=1, max_value=12),
)
def test_refreshes_of_one_rank_are_spread(costs: list[float], period: int) -> None:
    """The dearest step is at most 4/3 of any schedule's, so of neither the mean nor the dearest matrix alone; greedy in
    any order is at most mean + dearest."""
    offsets = one_by_one(costs, period)
    assert len(offsets) == len(costs)
    assert all(0 <= offset < period for offset in offsets)
    loads = [sum(cost for cost, at in zip(costs, offsets, strict=True) if at == offset) for offset in range(period)]
    assert max(loads) <= sum(costs) / period + max(costs, default=0.0) * (1 - 1 / period) + 1e-6
    assert offsets == one_by_one(costs, period)


def test_equal_costs_take_turns() -> None:
    assert sorted(one_by_one([1.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_a_period_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="period is 0"):
        one_by_one([1.0], 0)


@given(ranks=st.lists(WORKS, min_size=1, max_size=3), period=st.integers(1, 3))
def test_turns_of_several_ranks_lie_between_the_best_there_are_and_each_rank_for_itself(
    ranks: list[RankWork], period: int
) -> None:
    """The best, by trying all."""
    turns = take_turns(ranks, period)
    assert [len(own) for own in turns] == [len(rank.refreshes_s) for rank in ranks]
    assert all(0 <= turn < period for own in turns for turn in own)
    each = [one_by_one(rank.refreshes_s, period) for rank in ranks]
    found, alone = slowest(ranks, turns, period), slowest(ranks, each, period)
    ways = itertools.product(*(itertools.product(range(period), repeat=len(rank.refreshes_s)) for rank in ranks))
    best = min(sum(slowest(ranks, way, period)) for way in ways)
    most = max(period * rank.every_s + sum(rank.refreshes_s) for rank in ranks)
    assert most <= best + 1e-9
    assert best - 1e-9 <= sum(found) <= sum(alone) + 1e-9
    assert max(found) <= max(alone) * (1 + 1e-6)


def test_a_rank_refreshes_what_it_can_while_another_has_a_long_step() -> None:
    large, small = RankWork(every_s=1.0, refreshes_s=[10.0]), RankWork(every_s=1.0, refreshes_s=[5.0, 5.0])
    assert step_by_step([large, small], 2) == take_turns([large, small], 2) == [[0], [0, 0]]
    assert slowest([large, small], [[0], [0, 0]], 2) == (11.0, 1.0)
    assert slowest([large, small], [[0], one_by_one([5.0, 5.0], 2)], 2) == (11.0, 6.0)


@pytest.mark.parametrize(
    "name", ["soap", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("shampoo", "kl-shampoo", "soap-muon"))]
)
def test_of_few_matrices_on_each_rank_few_steps_are_long(name: str) -> None:
    """Qwen3-32B on 256 GPUs: one to three matrices on each rank. What refreshes add to the slowest rank's updates, in a
    mean step, is at least a fifth less than where each rank takes turns for itself, and the longest step is no longer.

    Compared without what a step takes that refreshes nothing, which is another share of it at other prices.
    """
    run = compose_run(["recipe=qwen3-32b", "gpus=256", "cluster=h100-80g", f"optimizer={name}"])
    config, layout = fit.resolve(run.config)
    plan, chosen = make_plan(config, layout), config.optimizer
    assert isinstance(chosen, KroneckerConfig)
    ranks = by_rank(plan.matrices, plan.assignment.cells)
    assert sorted(matrix.index for own in ranks for matrix in own) == [matrix.index for matrix in plan.matrices]
    found = refreshes(config, chosen, ranks)
    each = [refreshes(config, chosen, [own]) for own in ranks]
    alone = [max(steps) for steps in zip(*(one.steps_s for one in each), strict=True)]
    assert found.turns.keys() == {matrix.index for matrix in plan.matrices}
    plain_s = min(alone)
    assert found.mean_s - plain_s <= 0.8 * (sum(alone) / len(alone) - plain_s)
    assert max(found.steps_s) <= max(alone) * (1 + 1e-6)
    assert found.most_s == pytest.approx(max(one.mean_s for one in each))
    assert found.mean_s >= found.most_s


def test_hosted_groups_by_hand() -> None:
    """Two groups' gradients ahead, weights one group behind."""
    assert [*order(0)] == []
    assert [*order(1)] == [(0, 0), (0, 1), (0, 2)]
    assert [*order(3)] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_group_goes_through_its_stages_in_order_beside_few_others(count: int) -> None:
    turns = [*order(count)]
    for group in range(count):
        assert [stage for number, stage in turns if number == group] == [0, 1, 2]
    for stage in range(3):
        assert [group for group, own in turns if own == stage] == [*range(count)]
    begun: set[int] = set()
    for group, stage in turns:
        begun.add(group)
        assert len(begun) <= 4
        if stage == 2:
            begun.remove(group)


def test_of_each_exchange_two_are_in_flight_at_most() -> None:
    """Behind stage s of a group, until its next: messages have two sets."""
    turns = [*order(9)]
    for stage in range(2):
        open_now: list[int] = []
        for group, own in turns:
            if own == stage:
                open_now.append(group)
                assert len(open_now) <= 2
            if own == stage + 1:
                open_now.remove(group)
    assert all(a != b for a, b in pairwise(turns))


def test_two_shared_matrices_take_turns_by_hand() -> None:
    assert [*turns([])] == []
    assert [*turns([3])] == [(0, 0), (0, 1), (0, 2)]
    assert [*turns([3, 3])] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [*turns([1, 3, 2])] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_of_those_that_share_scratch_one_is_done_before_the_next_begins() -> None:
    parts = [2, 5, 4, 1, 3, 3, 2]
    for lane in range(LANES):
        own = [turn for turn in turns(parts) if turn[0] % LANES == lane]
        assert own == [(matrix, part) for matrix in range(lane, len(parts), LANES) for part in range(parts[matrix])]
