"""The order in which an owner's ranks go through the stages of their micro-groups."""

from itertools import pairwise

import pytest

from canzona_cli.planner.order import LANES, order, turns


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
