"""Packings are complete, close to the best there is, and never below what is proven impossible."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.planner.packing import pack, packing_bound
from tests.planner.planning import least_height

COSTS = st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=9)
REPEATED = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


@given(costs=COSTS, bins=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_bound_is_at_most_the_optimum_and_the_packing_close_to_it(costs: list[int], bins: int) -> None:
    optimum = least_height(costs, bins)
    assert packing_bound(costs, bins) <= optimum * (1 + 1e-9)
    packing = pack(costs, bins)
    # Graham 1969: largest first alone stays within 4/3 - 1 / (3 bins).
    assert optimum * (1 - 1e-9) <= packing.height <= optimum * (4 / 3 - 1 / (3 * bins)) * (1 + 1e-9)


@given(kinds=REPEATED, bins=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_every_item_is_in_one_bin_and_the_height_is_theirs(kinds: list[tuple[int, int]], bins: int) -> None:
    costs = [float(cost) for cost, count in kinds for _ in range(count)]
    packing = pack(costs, bins)
    assert len(packing.bins) == bins
    assert sorted(item for held in packing.bins for item in held) == list(range(len(costs)))
    assert packing.height == pytest.approx(max(sum(costs[item] for item in held) for held in packing.bins))
    assert packing_bound(costs, bins) <= packing.height * (1 + 1e-9)
    assert pack(costs, bins) == packing


@pytest.mark.parametrize(
    ("costs", "bins", "best"),
    [
        # One more item than bins: one bin holds two.
        ([3.0] * 4, 3, 6.0),
        # Largest first ends at 11; {5, 4}, {5, 4}, {3, 3, 3} is level.
        ([5.0, 5, 4, 4, 3, 3, 3], 3, 9.0),
        # Qwen3-8B over 128 cells: below 20 a 14 keeps its cell to itself, and 20 cells of three 6 are too few for 72.
        ([14.0] * 108 + [6.0] * 72, 128, 20.0),
    ],
)
def test_known_optima_are_reached_and_proven(costs: list[float], bins: int, best: float) -> None:
    assert pack(costs, bins).height == best
    assert packing_bound(costs, bins) == pytest.approx(best, rel=1e-5)


def test_more_bins_than_items_leave_the_largest_item_alone() -> None:
    packing = pack([3.0, 2.0], 1000)
    assert packing.height == 3.0
    assert sum(bool(held) for held in packing.bins) == 2


def test_a_thousand_different_costs_are_packed_without_a_search() -> None:
    costs = [float(1000 + item) for item in range(1500)]
    packing = pack(costs, 96)
    assert sorted(item for held in packing.bins for item in held) == list(range(1500))
    assert packing.height <= packing_bound(costs, 96) * 1.05
