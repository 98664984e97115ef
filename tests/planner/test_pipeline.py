"""The order in which an owner's ranks go through the stages of their micro-groups."""

from itertools import pairwise

import pytest

from canzona_cli.planner.pipeline import LANES, in_flight, order, turns


def test_hosted_groups_by_hand() -> None:
    """Two groups' gradients ahead, weights one group behind."""
    assert [*order([])] == []
    assert [*order([1])] == [(0, 0), (0, 1), (0, 2)]
    assert [*order([1, 1, 1])] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("rounds", [[1, 1], [2], [2, 2, 2, 2, 2, 2, 2], [1, 2, 1, 2, 2, 1, 1, 1], [3, 1, 3], [3] * 9])
def test_every_group_goes_through_its_stages_in_order_beside_few_others(rounds: list[int]) -> None:
    turns = [*order(rounds)]
    for group, count in enumerate(rounds):
        assert [stage for number, stage in turns if number == group] == [*range(2 * count + 1)]
    for stage in range(2 * max(rounds) + 1):
        groups = [group for group, own in turns if own == stage]
        assert groups == sorted(groups)
    begun: set[int] = set()
    most = 0
    for group, stage in turns:
        begun.add(group)
        most = max(most, len(begun))
        if stage == 2 * rounds[group]:
            begun.remove(group)
    assert most <= in_flight(max(rounds))
    if rounds == [3] * 9:
        assert most == in_flight(3)


def test_of_each_exchange_two_are_in_flight_at_most() -> None:
    """Behind stage s of a group, until its next: messages have two sets."""
    turns = [*order([2] * 9)]
    for stage in range(4):
        open_now: list[int] = []
        for group, own in turns:
            if own == stage:
                open_now.append(group)
                assert len(open_now) <= 2
            if own == stage + 1:
                open_now.remove(group)
    assert all(a != b for a, b in pairwise(turns))


def test_two_matrices_cut_by_rows_take_turns_by_hand() -> None:
    assert [*turns([])] == []
    assert [*turns([3])] == [(0, 0), (0, 1), (0, 2)]
    assert [*turns([3, 3])] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [*turns([1, 3, 2])] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_of_those_that_share_scratch_one_is_done_before_the_next_begins() -> None:
    parts = [2, 5, 4, 1, 3, 3, 2]
    for lane in range(LANES):
        own = [turn for turn in turns(parts) if turn[0] % LANES == lane]
        assert own == [(matrix, part) for matrix in range(lane, len(parts), LANES) for part in range(parts[matrix])]
