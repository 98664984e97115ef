"""The least seconds of updates with their exchanges: no assignment is below, and plans are close to them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from canzona_cli.costs.sharing import SharedCost
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.groups import GroupSearch
from canzona_cli.planner.least import least_seconds, updates
from canzona_cli.planner.pipeline import HostedPipeline, Job
from canzona_cli.planner.plan import PlanSettings
from tests import sizes
from tests.planner.planning import link, planned_in, transformer

TP = 2


def _owners_ways(
    matrices: Sequence[Matrix], costs: Sequence[float], shared_costs: dict[int, SharedCost], grouped: GroupSearch
) -> Iterator[float]:
    """The seconds of one owner in every mode and on every host of its matrices, in the planner's best groups."""
    for modes in product((0, 1, None), repeat=len(matrices)):  # a host, or shared
        if all(host is not None or matrix.index in shared_costs for matrix, host in zip(matrices, modes, strict=True)):
            yield grouped.find([
                Job(
                    matrix=matrix,
                    host=host or 0,
                    seconds=costs[matrix.index],
                    shared_cost=shared_costs[matrix.index] if host is None else None,
                )
                for matrix, host in zip(matrices, modes, strict=True)
            ])[0]  # fmt: skip


def _fastest(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    owners: int,
    shared_costs: dict[int, SharedCost],
    pipeline: HostedPipeline,
) -> float:
    """The slowest owner's seconds in the best of all assignments."""
    grouped = GroupSearch(matrices, costs, PlanSettings(strategy="canzona"), pipeline)
    units = sorted({matrix.unit for matrix in matrices})

    @cache
    def of(held: tuple[int, ...]) -> float:
        members = [matrix for matrix in matrices if matrix.unit in held]
        return min(_owners_ways(members, costs, shared_costs, grouped)) if members else 0.0

    return min(
        max(of(tuple(unit for unit, at in zip(units, cut, strict=True) if at == owner)) for owner in range(owners))
        for cut in product(range(owners), repeat=len(units))
    )


@pytest.mark.parametrize(
    ("owners", "bytes_per_s", "each"), [(2, 1e7, 0.4), (3, 1e9, 0.4), (3, 1e7, 0.55), (2, 1e9, 0.55), (2, 1e9, None)]
)
def test_no_assignment_takes_less(owners: int, bytes_per_s: float, each: float | None) -> None:
    """All assignments of five matrices are compared. On a fast link the bound is close to the best of them."""
    layer = [matrix for matrix in transformer(1, 64, 192, 16) if matrix.kind in ("q", "k", "gate", "up", "down")]
    matrices = [replace(matrix, index=index) for index, matrix in enumerate(layer)]
    costs = [1e-3 * matrix.elements / matrices[0].elements for matrix in matrices]
    shared_costs = {
        matrix.index: SharedCost(fragment=(each * costs[matrix.index] / 21,) * 21)
        for matrix in matrices
        if each is not None and matrix.elements >= matrices[0].elements
    }
    pipeline = replace(link(TP, bytes_per_s), steps=5)
    least = least_seconds(matrices, costs, 0, owners, shared_costs, pipeline)
    best = _fastest(matrices, costs, owners, shared_costs, pipeline)
    assert least <= best * (1 + 1e-9)
    assert bytes_per_s < 1e9 or least >= 0.8 * best


@pytest.mark.parametrize(
    ("size", "tp", "dp"),
    [
        *(("8b", 2, 128), ("32b", 4, 64)),
        *(pytest.param(size, 2, 128, marks=pytest.mark.sweep) for size in ("4b", "14b")),
    ],
)
def test_plans_with_a_busier_rank_than_necessary_are_close_to_the_least(size: sizes.Size, tp: int, dp: int) -> None:
    """They have nothing to gain from an even load: no plan of any mode is 5% faster than what is chosen."""
    auto, hosted, shared = (planned_in(mode, size, tp, dp) for mode in ("auto", "hosted", "shared"))
    least = updates(*auto).least
    for planned in (auto, hosted, shared):
        assert updates(*planned).seconds >= least * (1 - 1e-9)
    assert updates(*auto).gap <= 0.05


def test_without_exchanges_units_are_packed_into_owners() -> None:
    found = updates(*planned_in("auto", "0.6b", 1, 8))
    assert found.least <= found.seconds <= 1.01 * found.least
