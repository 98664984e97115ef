"""Packings are complete, close to the best there is, and never below what is proven impossible."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canzona_cli.core.costs.memory import layerwise_placement
from canzona_cli.core.costs.sharing import SharedCost
from canzona_cli.core.model.matrices import Matrix, layer_shapes
from canzona_cli.core.planner.bounds import RESOLUTION, lower_bound, packing_bound
from canzona_cli.core.planner.packing import pack
from tests.core.planner.planning import least_height, least_makespan, megatrons_layout
from tests.sizes import Size, matrix, model

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


def _matrices(units: list[list[int]]) -> tuple[tuple[Matrix, ...], list[float]]:
    owned = [(unit, cost) for unit, costs in enumerate(units) for cost in costs]
    return tuple(
        replace(matrix(index, 1, cost, None), layer=0, parameter=str(unit), unit=unit)
        for index, (unit, cost) in enumerate(owned)
    ), [float(cost) for _, cost in owned]


@given(
    units=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=2), min_size=1, max_size=3),
    shares=st.dictionaries(st.integers(1, 8), st.integers(1, 10), max_size=4),
    dp=st.integers(1, 2),
    tp=st.integers(2, 3),
)
@settings(max_examples=150, deadline=None)
@example(units=[[3, 3], [3, 6], [8]], shares={1: 1, 2: 1, 4: 1, 8: 7}, dp=1, tp=3)
def test_bound_is_at_most_the_exact_optimum_of_hosted_and_shared_matrices(
    units: list[list[int]], shares: dict[int, int], dp: int, tp: int
) -> None:
    matrices, costs = _matrices(units)
    may = {
        matrix.index: SharedCost(fragment=(0.5, shares[matrix.cols] - 0.5))
        for matrix in matrices
        if matrix.cols in shares
    }
    least = least_makespan(units, dp, tp, shares)  # type: ignore[arg-type]
    bound = lower_bound(matrices, costs, 0, dp, tp, may)
    assert bound <= least * (1 + 1e-9)
    hosted = lower_bound(matrices, costs, 0, dp, tp)
    assert bound <= hosted * (1 + RESOLUTION), "sharing only adds possibilities"


def test_units_raise_the_bound_where_one_cell_is_an_owner() -> None:
    matrices, costs = _matrices([[5, 1, 1], [4]])
    assert lower_bound(matrices, costs, 0, 2, 1) == 7.0


@pytest.mark.parametrize("bucket", [None, 40_000_000])
@pytest.mark.parametrize(("size", "tp", "shards"), [("0.6b", 1, 8), ("8b", 1, 32), ("8b", 2, 64), ("32b", 8, 32)])
def test_layerwise_counts_what_megatron_lays_out(size: Size, tp: int, shards: int, bucket: int | None) -> None:
    shape = model(size)
    sizes = tuple(rows * cols // tp for rows, cols in layer_shapes(shape, "fused"))
    buckets, places = megatrons_layout(sizes * shape.num_layers, bucket, shards)
    loads = [0] * shards
    for start, end, bucket_id in places:
        first, last = buckets[bucket_id]
        loads[(start - first) * shards // (last - first)] += end - start

    held = layerwise_placement(((sizes, shape.num_layers),), shards, bucket)

    assert held.padded == buckets[-1][1]
    assert held.worst == max(loads)
