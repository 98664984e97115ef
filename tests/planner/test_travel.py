"""Owners change places so that buckets have few of them; nobody's updates take longer."""

from collections import Counter
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.assign import assign
from canzona_cli.planner.buckets import cut, few_owners, in_order_of_reductions, stage_parameters
from canzona_cli.planner.plan import Assignment, Cell, PlanSettings
from tests.planner.planning import grid, newton_schulz, transformer

PLAN = PlanSettings(strategy="canzona", layout="owner")


def _owners(matrices: tuple[Matrix, ...], found: Assignment, mesh: Layout, limit: int | None) -> list[int]:
    """Of each bucket of the first stage, how many it has."""
    buckets = cut(stage_parameters(matrices, 0, mesh.tp), limit, stage=0)
    return [len({found.cells[i].owner for parameter in bucket for i in parameter.matrices}) for bucket in buckets]


@given(
    layers=st.integers(1, 6),
    kv=st.sampled_from([16, 64]),
    stages=st.integers(1, 2),
    mesh=st.builds(grid, tp=st.sampled_from([1, 2, 4]), dp=st.integers(2, 9)),
    limit=st.sampled_from([None, 20_000, 100_000]),
)
@settings(max_examples=60, deadline=None)
def test_every_cell_keeps_as_many_of_each_kind(
    layers: int, kv: int, stages: int, mesh: Layout, limit: int | None
) -> None:
    matrices = transformer(layers * stages, 64, 192, kv, stages=stages)
    costs = newton_schulz(matrices)
    before = assign(matrices, costs, mesh, PLAN, bucket_elements=limit)
    after = few_owners(matrices, costs, before, mesh, limit)

    def held(found: Assignment) -> Counter[Hashable]:
        return Counter((m.stage, cell, m.shape, m.shard_dim) for m, cell in zip(matrices, found.cells, strict=True))

    assert held(after) == held(before)
    owners: dict[int, set[int]] = {}
    for matrix, cell in zip(matrices, after.cells, strict=True):
        owners.setdefault(matrix.unit, set()).add(cell.owner)
    assert all(len(of_unit) == 1 for of_unit in owners.values()), "k and v lie in one parameter with q"
    assert _owners(matrices, after, mesh, limit)[-1] <= _owners(matrices, before, mesh, limit)[-1]


@given(
    layers=st.integers(1, 6),
    stages=st.integers(1, 2),
    mesh=st.builds(grid, tp=st.sampled_from([1, 2, 4]), dp=st.integers(2, 9)),
    limit=st.sampled_from([None, 20_000, 100_000]),
)
@settings(max_examples=60, deadline=None)
def test_owners_are_numbered_in_the_order_in_which_buckets_are_reduced_to_them(
    layers: int, stages: int, mesh: Layout, limit: int | None
) -> None:
    matrices = transformer(layers * stages, 64, 192, 16, stages=stages)
    before = assign(matrices, newton_schulz(matrices), mesh, PLAN, bucket_elements=limit)
    after = in_order_of_reductions(matrices, before, mesh, limit)
    for stage in range(stages):
        places = [matrix.index for matrix in matrices if matrix.stage == stage]
        renamed = {(before.cells[index].owner, after.cells[index].owner) for index in places}
        assert len(renamed) == len(dict(renamed)) == len({owner for _, owner in renamed}), "rows stay together"
        assert all(before.cells[index].host == after.cells[index].host for index in places)
        highest = -1
        for bucket in cut(stage_parameters(matrices, stage, mesh.tp), limit, stage=stage):
            held = {after.cells[index].owner for parameter in bucket for index in parameter.matrices}
            assert {owner for owner in held if owner > highest} == set(range(highest + 1, max(held) + 1))
            highest = max(highest, *held)
    assert in_order_of_reductions(matrices, after, mesh, limit) == after


def test_layers_whose_parts_lie_crosswise_are_uncrossed() -> None:
    """Four layers, a bucket for each, whose parts have four owners: each owner can have one of the layers."""
    mesh, limit = grid(tp=1, dp=4), 47_000
    matrices = transformer(4, 64, 192, 16)
    apart = {"gate": 1, "up": 2, "down": 3}
    crossed = Assignment(cells=tuple(Cell(owner=(m.layer + apart.get(m.kind, 0)) % 4, host=0) for m in matrices))
    assert _owners(matrices, crossed, mesh, limit) == [4] * 4
    found = few_owners(matrices, newton_schulz(matrices), crossed, mesh, limit)
    assert _owners(matrices, found, mesh, limit) == [1] * 4
