"""Assignments are complete, balanced, within their caps, the same everywhere, and follow alpha."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from canzona_cli.config.resolve import resolve
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.model.matrices import Matrix, stage_matrices
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.bounds import lower_bound
from canzona_cli.core.planner.buckets import buckets
from canzona_cli.core.planner.measures import padding_fraction
from canzona_cli.core.planner.plan import Assignment, PlanSettings
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.predict import assign_layerwise
from tests.core.planner.planning import grid, grids, least_makespan, models, newton_schulz, transformer
from tests.sizes import Size, run

CANZONA = PlanSettings(strategy="canzona")
MODELS, GRIDS = models(1, 16, 64), grids(9)
PLANS = st.builds(
    PlanSettings,
    strategy=st.sampled_from(["canzona", "paper", "asc"]),
    alpha=st.sampled_from([0.0, 0.4, 1.0]),
)
BUCKET = st.sampled_from([None, 20_000, 100_000])


def _busiest(found: Assignment, matrices: tuple[Matrix, ...], costs: Sequence[float], dp: int, tp: int) -> float:
    return max(
        max(found.loads(stage_matrices(matrices, stage), costs, dp, tp))
        for stage in {matrix.stage for matrix in matrices}
    )


@given(matrices=MODELS, mesh=GRIDS, plan=PLANS, bucket=BUCKET)
@settings(max_examples=50, deadline=None)
def test_every_matrix_has_a_cell_and_every_unit_one_owner(
    matrices: tuple[Matrix, ...], mesh: Layout, plan: PlanSettings, bucket: int | None
) -> None:
    found = assign(matrices, newton_schulz(matrices), mesh, plan, bucket_elements=bucket)
    assert len(found.cells) == len(matrices)
    assert all(0 <= cell.owner < mesh.owners and 0 <= cell.host < mesh.tp for cell in found.cells)
    owners: dict[int, set[int]] = defaultdict(set)
    for matrix, cell in zip(matrices, found.cells, strict=True):
        owners[matrix.unit].add(cell.owner)
    assert all(len(those) == 1 for those in owners.values())


@given(
    units=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    dp=st.integers(1, 3),
    tp=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_small_grids_come_close_to_the_exact_optimum(units: list[int], dp: int, tp: int) -> None:
    model = transformer(1, 64, 192, 16)
    by_unit = [[matrix for matrix in model if matrix.unit == unit] for unit in units]
    matrices = tuple(
        replace(matrix, index=index, unit=unit, parameter=str(unit))
        for index, (unit, matrix) in enumerate((unit, m) for unit, members in enumerate(by_unit) for m in members)
    )
    costs = newton_schulz(matrices)
    per_unit = [[cost for m, cost in zip(matrices, costs, strict=True) if m.unit == unit] for unit in range(len(units))]
    found = _busiest(assign(matrices, costs, grid(tp, dp), CANZONA), matrices, costs, dp, tp)
    optimum = least_makespan(per_unit, dp, tp)
    assert optimum * (1 - 1e-9) <= found <= optimum * 4 / 3
    assert lower_bound(matrices, costs, 0, dp, tp) <= optimum * (1 + 1e-9)


@given(matrices=MODELS, mesh=GRIDS, spare=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=60, deadline=None)
def test_no_cell_holds_more_than_its_cap(matrices: tuple[Matrix, ...], mesh: Layout, spare: float) -> None:
    elements = [float(matrix.elements) for matrix in matrices]
    units: dict[int, float] = defaultdict(float)
    for matrix in matrices:
        units[matrix.unit] += matrix.elements
    cap = int(sum(elements) / (mesh.owners * mesh.tp) + spare * max(units.values()))
    try:
        found = assign(matrices, newton_schulz(matrices), mesh, CANZONA, cap)
    except DoesNotFit:
        if spare < 2:
            reject()
        # The emptiest cell is below the mean, so twice the largest unit on top always suffices.
        raise
    assert max(found.loads(stage_matrices(matrices, 0), elements, mesh.owners, mesh.tp)) <= cap


def test_a_cap_below_the_largest_matrix_does_not_fit() -> None:
    matrices = transformer(2, 64, 192, 16)
    with pytest.raises(DoesNotFit, match="one of them holds at least 12,288"):
        assign(matrices, newton_schulz(matrices), grid(8, 8), CANZONA, 12_287)
    seven = transformer(1, 64, 64, 64)
    with pytest.raises(
        DoesNotFit, match=r"memory for 15,000 .* no division of 28,672 elements among 2 ranks was found"
    ):
        assign(seven, newton_schulz(seven), grid(2, 1), CANZONA, 15_000)


def test_a_cap_moves_matrices_that_balance_alone_would_pile_up() -> None:
    # One matrix costs as much as all others together: alone they would be in one cell, however large.
    matrices = transformer(2, 64, 192, 16)
    costs = [float(len(matrices) - 1), *[1.0] * (len(matrices) - 1)]
    elements = [float(matrix.elements) for matrix in matrices]
    free = assign(matrices, costs, grid(1, 2), CANZONA)
    cap = int(sum(elements) * 0.6)
    assert max(free.loads(stage_matrices(matrices, 0), elements, 2, 1)) > cap
    assert (
        max(assign(matrices, costs, grid(1, 2), CANZONA, cap).loads(stage_matrices(matrices, 0), elements, 2, 1)) <= cap
    )


def test_asc_takes_the_even_share_a_unit_starts_in_and_hosts_in_turn() -> None:
    matrices = transformer(1, 64, 128, 64)
    # Backwards: down (8192), fc1 (8192 + 8192), qkv (12288), proj (4096): 40,960 elements, 10,240 for each owner.
    found = assign(matrices, newton_schulz(matrices), grid(1, 4), PlanSettings(strategy="asc"))
    assert {m.kind: cell.owner for m, cell in zip(matrices, found.cells, strict=True)} == {
        "down": 0, "gate": 0, "up": 1, "q": 2, "k": 2, "v": 2, "proj": 3,
    }  # fmt: skip
    hosts = [
        cell.host
        for cell in assign(matrices, newton_schulz(matrices), grid(2, 1), replace(CANZONA, strategy="asc")).cells
    ]
    assert hosts == [0, 1, 0, 1, 0, 1, 0]


def test_asc_shares_out_the_whole_buffer_not_each_bucket() -> None:
    """If each bucket were divided, the same few ranks would get all buckets with fewer matrices than ranks."""
    matrices, mesh, plan = transformer(8, 64, 128, 64), grid(1, 8), PlanSettings(strategy="asc")
    found = assign(matrices, newton_schulz(matrices), mesh, plan, bucket_elements=40_000)
    assert found == assign(matrices, newton_schulz(matrices), mesh, plan), "buckets make no difference"
    assert len(buckets(matrices, found, mesh, plan, 40_000)) > 1
    elements = [float(matrix.elements) for matrix in matrices]
    held = found.loads(stage_matrices(matrices, 0), elements, 8, 1)
    unit = max(sum(m.elements for m in matrices if m.unit == one.unit) for one in matrices)
    assert max(held) < sum(held) / 8 + unit


@pytest.mark.parametrize(
    "size", ["0.6b", *(pytest.param(size, marks=pytest.mark.sweep) for size in ("1.7b", "4b", "8b", "14b", "32b"))]
)
def test_grid_balance_of_every_size_is_within_a_few_percent_of_its_bound(size: Size) -> None:
    """The promise: 1.03 of the bound in four cells of five, 1.10 in all, and nowhere worse than what it replaces."""
    gaps = []
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        # Micro-batches and recomputation have no part in it: less to search.
        config, mesh = resolve(run(size, gpus, strategy="canzona", micro_batch_size=1, recompute="full"))
        matrices = matrices_of(config.model, mesh, "split")
        costs, bucket = newton_schulz(matrices), max(40_000_000, 1_000_000 * mesh.owners)
        found = assign(matrices, costs, mesh, CANZONA, bucket_elements=bucket)
        busiest = _busiest(found, matrices, costs, mesh.owners, mesh.tp)
        gaps.append(
            busiest / max(lower_bound(matrices, costs, stage, mesh.owners, mesh.tp) for stage in range(mesh.pp))
        )

        megatron, _ = assign_layerwise(matrices, mesh, bucket)
        for stage in range(mesh.pp):
            loads = found.loads(stage_matrices(matrices, stage), costs, mesh.owners, mesh.tp)
            owners = [sum(loads[start : start + mesh.tp]) for start in range(0, len(loads), mesh.tp)]
            theirs = megatron.loads(stage_matrices(matrices, stage), costs, mesh.owners, 1)
            assert max(loads) <= max(theirs) * (1 + 1e-9)
            assert max(owners) / sum(owners) <= max(theirs) / sum(theirs) * (1 + 1e-9)
        assert padding_fraction(buckets(matrices, found, mesh, CANZONA, bucket)) < 1e-4
    assert max(gaps) <= 1.10
    assert sum(gap <= 1.03 for gap in gaps) >= 0.8 * len(gaps)
