"""Buckets hold every fragment once, aligned, by owner in as few ranges as there are owners."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.buckets import buckets, cut, stage_parameters
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.plan import Assignment, Cell, PlanSettings
from canzona_cli.core.planner.seats import renumber_owners
from canzona_cli.core.setup import Layout, Strategy
from tests.core.planner.planning import grid, grids, models, newton_schulz, transformer
from tests.sizes import H100, layout, model, run

LIMITS = st.sampled_from([None, 20_000, 100_000])


@given(matrices=models(4, 16, 64), mesh=grids(9), strategy=st.sampled_from(["canzona", "paper"]), bucket=LIMITS)
@settings(max_examples=80, deadline=None)
def test_ranges_cover_every_fragment_once(
    matrices: tuple[Matrix, ...], mesh: Layout, strategy: Strategy, bucket: int | None
) -> None:
    plan = PlanSettings(strategy=strategy)
    found = assign(matrices, newton_schulz(matrices), mesh, plan, bucket_elements=bucket)
    laid_out = buckets(matrices, found, mesh, plan, bucket)
    held = [index for one in laid_out for part in one.ranges for index in part.matrices]
    assert sorted(held) == list(range(len(matrices)))
    assert sorted(name for one in laid_out for name in one.parameters) == sorted({m.parameter for m in matrices})
    for one in laid_out:
        assert one.elements % mesh.dp == 0
        fragments = sum(matrices[i].fragment_elements(mesh.tp) for part in one.ranges for i in part.matrices)
        assert one.padding == one.elements - fragments
        end = 0
        for part in one.ranges:
            assert end <= part.start < part.end <= one.elements
            assert all(found.cells[index].owner == part.owner for index in part.matrices)
            end = part.end
        # Nothing but the starts of parameters, and the end of a bucket, is aligned.
        assert one.padding < 64 * len(one.parameters) + 64 * mesh.dp


@pytest.mark.parametrize("bucket", [None, 100_000, 500_000])
@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 8), (4, 3)])
def test_owners_have_one_range_in_a_bucket(tp: int, dp: int, bucket: int | None) -> None:
    matrices = transformer(12, 128, 384, 32)
    plan = PlanSettings(strategy="canzona")
    found = assign(matrices, newton_schulz(matrices), grid(tp, dp), plan, bucket_elements=bucket)
    for one in buckets(matrices, found, grid(tp, dp), plan, bucket):
        owners = [part.owner for part in one.ranges]
        assert len(owners) == len(set(owners))


def test_a_ring_of_shared_parameters_costs_one_more_range() -> None:
    matrices = transformer(2, 64, 128, 16)
    # fc1 of layer 0 lies from owner 0 to 1, that of layer 1 from 1 to 0: a line has no room for both borders.
    owner_of = {"layers.0.gate": 0, "layers.0.up": 1, "layers.1.gate": 1, "layers.1.up": 0}
    found = Assignment(cells=tuple(Cell(owner=owner_of.get(m.name, m.layer), host=0) for m in matrices))
    (one,) = buckets(matrices, found, grid(1, 2), PlanSettings(strategy="canzona"))
    assert len(one.ranges) == 3


@pytest.mark.parametrize("bucket", [None, 300_000])
@pytest.mark.parametrize(("tp", "dp", "strategy"), [(1, 4, "asc"), (2, 6, "paper")])
def test_natural_order_has_the_buckets_of_megatron(tp: int, dp: int, strategy: Strategy, bucket: int | None) -> None:
    matrices = transformer(8, 128, 352, 32)
    plan = PlanSettings(strategy=strategy)
    found = assign(matrices, newton_schulz(matrices), grid(tp, dp), plan, bucket_elements=bucket)
    laid_out = buckets(matrices, found, grid(tp, dp), plan, bucket)
    parameters = stage_parameters(matrices, 0, tp)
    tensors = {p.name: torch.nn.Parameter(torch.empty(p.elements, device="meta")) for p in parameters}
    theirs = DistributedOptimizer._compute_per_buffer_param_layout(
        list(tensors.values()), bucket, dp, DistributedDataParallelConfig()
    )
    contents: list[list[str]] = [[] for _ in theirs.bucket_indices]
    names = {id(tensor): name for name, tensor in tensors.items()}
    for tensor, (_, _, number) in theirs.param_index_map.items():
        contents[number].append(names[id(tensor)])
    assert [list(one.parameters) for one in laid_out] == contents


def test_model_chunks_have_buckets_of_their_own_the_last_one_first() -> None:
    mesh, plan = layout(pp=2, vpp=2, dp=2, count=2), PlanSettings(strategy="canzona")
    members = matrices_of(model("tiny"), mesh, "split")
    found = assign(members, newton_schulz(members), mesh, plan, bucket_elements=200_000)
    chunks = {
        stage: [
            {members[index].chunk for part in one.ranges for index in part.matrices}
            for one in buckets(members, found, mesh, plan, 200_000)
            if one.stage == stage
        ]
        for stage in (0, 1)
    }
    assert chunks == {0: [{1}] * 2 + [{0}] * 2, 1: [{1}, {0}]}


def test_later_stages_have_one_bucket() -> None:
    matrices = transformer(8, 64, 128, 16, stages=2)
    mesh, plan = grid(1, 2, pp=2), PlanSettings(strategy="canzona")
    found = assign(matrices, newton_schulz(matrices), mesh, plan, bucket_elements=50_000)
    laid_out = buckets(matrices, found, mesh, plan, 50_000)
    assert sum(one.stage == 0 for one in laid_out) > 1
    assert sum(one.stage == 1 for one in laid_out) == 1


PLAN = PlanSettings(strategy="canzona")


@given(
    layers=st.integers(1, 6),
    stages=st.integers(1, 2),
    mesh=st.builds(grid, tp=st.sampled_from([1, 2, 4]), dp=st.integers(2, 9)),
    limit=LIMITS,
)
@settings(max_examples=60, deadline=None)
def test_owners_are_numbered_in_the_order_in_which_buckets_are_reduced_to_them(
    layers: int, stages: int, mesh: Layout, limit: int | None
) -> None:
    matrices = transformer(layers * stages, 64, 192, 16, stages=stages)
    before = assign(matrices, newton_schulz(matrices), mesh, PLAN, bucket_elements=limit)
    after = renumber_owners(matrices, before, mesh, limit)
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
    assert renumber_owners(matrices, after, mesh, limit) == after


def test_a_plan_numbers_its_owners_in_that_order() -> None:
    """1.7B on 64 GPUs, whose plan is not the one in natural order."""
    mesh = layout(dp=64, count=4)
    config = run("1.7b", mesh.world_size, strategy="canzona", cluster=H100)
    plan = plan_unbounded(config.setup, mesh)
    limit = bucket_elements(config.setup, mesh)
    assert renumber_owners(plan.matrices, plan.assignment, mesh, limit) == plan.assignment
