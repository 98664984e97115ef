"""The bound on a grid holds against the exact optimum, with units that must share an owner."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from canzona_cli.costs.sharing import Share
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.packing import RESOLUTION, lower_bound
from tests.planner.planning import least_makespan

UNITS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=5)


def _matrices(units: list[list[int]]) -> tuple[tuple[Matrix, ...], list[float]]:
    owned = [(unit, cost) for unit, costs in enumerate(units) for cost in costs]
    return tuple(
        Matrix(
            index=index,
            name=str(index),
            kind="other",
            layer=0,
            stage=0,
            rows=1,
            cols=cost,
            shard_dim=None,
            parameter=str(unit),
            unit=unit,
        )
        for index, (unit, cost) in enumerate(owned)
    ), [float(cost) for _, cost in owned]


@given(units=UNITS, dp=st.integers(1, 3), tp=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_bound_is_at_most_the_exact_optimum(units: list[list[int]], dp: int, tp: int) -> None:
    matrices, costs = _matrices(units)
    assert lower_bound(matrices, costs, 0, dp, tp) <= least_makespan(units, dp, tp) * (1 + 1e-9)


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
        matrix.index: Share(fragment=(0.5, shares[matrix.cols] - 0.5)) for matrix in matrices if matrix.cols in shares
    }
    least = least_makespan(units, dp, tp, shares)  # type: ignore[arg-type]
    bound = lower_bound(matrices, costs, 0, dp, tp, may)
    assert bound <= least * (1 + 1e-9)
    hosted = lower_bound(matrices, costs, 0, dp, tp)
    assert bound <= hosted * (1 + RESOLUTION), "sharing only adds possibilities"


def test_units_raise_the_bound_where_one_cell_is_an_owner() -> None:
    matrices, costs = _matrices([[5, 1, 1], [4]])
    assert lower_bound(matrices, costs, 0, 2, 1) == 7.0


def test_a_stage_without_matrices_needs_no_time() -> None:
    matrices, costs = _matrices([[5]])
    assert lower_bound(matrices, costs, 1, 2, 2) == 0.0
