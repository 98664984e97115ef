"""Plans of experts that are divided among ranks: who may update an expert, in which bucket it is, and how good the
joint balance is."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.sharing import shared_costs
from canzona_cli.core.costs.update import UpdateTime, algorithm_of, summed
from canzona_cli.core.model.matrices import Matrix, stage_matrices
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner import groups, make, memory
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.bounds import stage_bound
from canzona_cli.core.planner.buckets import LikeStage, Pool, alike_stages, typical_pools
from canzona_cli.core.planner.make import make_plan, plan_unbounded
from canzona_cli.core.planner.measures import balance
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.planner.pipeline import HostedPipeline
from canzona_cli.core.planner.plan import Assignment, Cell, Plan, PlanSettings
from canzona_cli.core.setup import Layout, Splitting
from canzona_cli.core.simulate import update_phase
from canzona_cli.core.simulate.compare import study_run
from canzona_cli.core.simulate.update import Workload
from tests.core.planner.planning import newton_schulz
from tests.sizes import layout, run

CANZONA = PlanSettings(strategy="canzona")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draws a layout in which expert parallelism divides 8 experts and the cells of a stage."""
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 4, 6]))
    possible = [ep for ep in (2, 4, 8) if tp * dp % ep == 0]
    if not possible:
        dp, possible = 2 * dp, [2]
    return replace(layout(tp=tp, pp=pp, dp=dp), ep=draw(st.sampled_from(possible)))


def experts(mesh: Layout, layers: int = 4, **engine: object) -> RunConfig:
    """A run of a small model with eight experts in a layout."""
    config = run("tiny", mesh.world_size, strategy="canzona", global_batch_size=mesh.dp)
    model = replace(
        config.model,
        name="experts",
        num_layers=layers,
        num_experts=8,
        experts_per_token=2,
        ffn_hidden_size=192,
        tied_embeddings=False,
    )
    config = replace(config, model=model, engine=replace(config.engine, **engine))  # type: ignore[arg-type]
    return fill(config, mesh)


def members(mesh: Layout, splitting: Splitting = "split", layers: int = 4) -> tuple[Matrix, ...]:
    return matrices_of(experts(mesh, layers).model, mesh, splitting)


def _planned(config: RunConfig, mesh: Layout) -> tuple[tuple[Matrix, ...], tuple[float, ...]]:
    plan = make_plan(config.setup, mesh)
    return plan.matrices, plan.costs


def number(cell: Cell, mesh: Layout) -> int:
    return cell.owner * mesh.tp + cell.host


@pytest.mark.parametrize("splitting", get_args(Splitting))
def test_experts_are_whole_on_the_ranks_that_hold_them(splitting: Splitting) -> None:
    mesh = replace(layout(tp=2, dp=4), ep=4)
    together = {m.name: m for m in members(replace(mesh, ep=1), splitting)}
    for matrix in members(mesh, splitting):
        if matrix.expert_rank is None:
            assert matrix == together[matrix.name]
            continue
        expert = int(matrix.name.split(".")[3])
        assert matrix.expert_rank == expert // 2
        assert matrix.shape == together[matrix.name].shape
        assert matrix.fragment_elements(2) == matrix.held_elements(2) == matrix.elements
        assert not matrix.replicated, "no TP rank can take another rank's expert"


@given(
    mesh=layouts(),
    strategy=st.sampled_from(["canzona", "paper", "asc"]),
    alpha=st.sampled_from([0.5, 1.0]),
    splitting=st.sampled_from(["split", "fused"]),
)
@settings(max_examples=25, deadline=None)
def test_plans_are_complete_and_only_holders_update_an_expert(
    mesh: Layout, strategy: str, alpha: float, splitting: Splitting
) -> None:
    config = experts(mesh, strategy=strategy, alpha=alpha, splitting=splitting)
    plan = make_plan(config.setup, mesh)
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        assert 0 <= cell.owner < mesh.owners
        assert 0 <= cell.host < mesh.tp
        assert matrix.expert_rank in (None, mesh.expert_rank(number(cell, mesh)))
    ranged = [index for bucket in plan.buckets for part in bucket.ranges for index in part.matrices]
    assert sorted(ranged) == list(range(len(plan.matrices)))
    for bucket in plan.buckets:
        for part in bucket.ranges:
            for index in part.matrices:
                cell = plan.assignment.cells[index]
                assert plan.matrices[index].expert_rank == bucket.expert_rank
                dense, expert = cell.owner, number(cell, mesh) // mesh.ep
                assert part.owner == (dense if bucket.expert_rank is None else expert)
    grouped = sorted(index for group in plan.groups for index in group.matrices)
    assert grouped == [matrix.index for matrix in plan.matrices if matrix.expert_rank is None]
    numbers = [(bucket.stage, bucket.index) for bucket in plan.buckets]
    assert len(set(numbers)) == len(numbers)
    for stage in range(mesh.pp):
        shapes = [
            [(len(b.parameters), b.elements) for b in plan.buckets if (b.stage, b.expert_rank) == (stage, rank)]
            for rank in range(mesh.ep)
        ]
        assert all(shape == shapes[0] for shape in shapes), "the ranks' buckets differ"
    again = Plan.from_content(json.loads(plan.to_json()))
    assert again == plan
    assert again.hash == plan.hash


@given(mesh=layouts(), layers=st.sampled_from([2, 4]))
@settings(max_examples=25, deadline=None)
def test_no_rank_is_faster_than_the_bound_and_loads_add_up(mesh: Layout, layers: int) -> None:
    matrices = members(mesh, layers=layers)
    costs = newton_schulz(matrices)
    found = assign(matrices, costs, mesh, CANZONA)
    for stage in range(mesh.pp):
        loads = found.loads(stage_matrices(matrices, stage), costs, mesh.owners, mesh.tp)
        assert sum(loads) == pytest.approx(sum(c for m, c in zip(matrices, costs, strict=True) if m.stage == stage))
        bound = stage_bound(matrices, costs, stage, mesh)
        alone = sum(c for m, c in zip(matrices, costs, strict=True) if (m.stage, m.expert_rank) == (stage, 0))
        assert alone / mesh.expert_owners <= bound * (1 + 1e-9) <= max(loads) * (1 + 2e-9)


def best_by_trying(stage: Sequence[Matrix], costs: Sequence[float], mesh: Layout) -> float:
    """The busiest cell of the best assignment, by trying all placements of dense units on owners and hosts, each
    filled up with equal experts one by one."""
    units: dict[int, list[int]] = {}
    for matrix in stage:
        if matrix.expert_rank is None:
            units.setdefault(matrix.unit, []).append(matrix.index)
    cost = {m.index: c for m, c in zip(stage, costs, strict=True)}
    each = Counter(m.expert_rank for m in stage if m.expert_rank is not None)
    of_expert = next(cost[m.index] for m in stage if m.expert_rank is not None)
    best = float("inf")

    def filled(loads: Sequence[float]) -> float:
        loads = list(loads)
        for rank, count in each.items():
            cells = range(rank or 0, mesh.cells, mesh.ep)
            for _ in range(count):
                loads[min(cells, key=loads.__getitem__)] += of_expert
        return max(loads)

    def place(number: int, loads: list[float]) -> None:
        nonlocal best
        if number == len(units):
            best = min(best, filled(loads))
            return
        unit = [*units.values()][number]
        for owner in range(mesh.owners):
            for hosts in range(mesh.tp ** len(unit)):
                placed = list(loads)
                for position, index in enumerate(unit):
                    placed[owner * mesh.tp + hosts // mesh.tp**position % mesh.tp] += cost[index]
                place(number + 1, placed)

    place(0, [0.0] * mesh.cells)
    return best


@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 4, 2), (1, 4, 4), (2, 2, 2), (2, 2, 4)])
def test_small_stages_are_balanced_to_within_one_expert_of_the_best(tp: int, dp: int, ep: int) -> None:
    mesh = replace(layout(tp=tp, dp=dp), ep=ep)
    matrices = members(mesh, layers=1)
    costs = newton_schulz(matrices)
    found = assign(matrices, costs, mesh, CANZONA)
    best = best_by_trying(matrices, costs, mesh)
    assert stage_bound(matrices, costs, 0, mesh) <= best * (1 + 1e-9)
    one = max(cost for matrix, cost in zip(matrices, costs, strict=True) if matrix.expert_rank is not None)
    assert max(found.loads(stage_matrices(matrices, 0), costs, mesh.owners, mesh.tp)) <= best + one


def test_experts_make_up_for_unequal_dense_matrices() -> None:
    """Dense matrices alone leave ranks idle; experts fill them, to within one expert of the mean."""
    mesh = replace(layout(dp=16), ep=4)
    plan = make_plan(experts(mesh).setup, mesh)
    loads = plan.loads(0)
    one = max(c for m, c in zip(plan.matrices, plan.costs, strict=True) if m.expert_rank is not None)
    assert max(loads) <= sum(loads) / len(loads) + one
    assert balance(plan).grid == pytest.approx(max(loads) / (sum(loads) / len(loads)))


def test_buckets_of_experts_end_where_owners_can_have_equal_shares() -> None:
    mesh = replace(layout(dp=8), ep=2)
    config = experts(mesh, layers=6)
    size = 192 * 256
    config = replace(config, parallel=replace(config.parallel, bucket_elements=5 * size))
    plan = make_plan(config.setup, mesh)
    of_first = [bucket for bucket in plan.buckets if bucket.expert_rank == 0]
    assert [bucket.elements // size for bucket in of_first[:-1]] == [8] * (len(of_first) - 1)
    assert sum(bucket.elements for bucket in of_first) == 6 * 4 * 3 * size
    assert all(bucket.padding == 0 for bucket in of_first)


def test_later_stages_and_the_experts_of_later_ranks_are_alike() -> None:
    mesh = replace(layout(pp=4, dp=4), ep=2)
    assert typical_pools(members(mesh, layers=8)) == [Pool(0), Pool(0, 0), Pool(1), Pool(1, 0)]
    # The last stage has one layer, the others two.
    assert typical_pools(members(mesh, layers=7)) == [Pool(0), Pool(0, 0), Pool(1), Pool(1, 0), Pool(3), Pool(3, 0)]


def test_a_rank_stores_a_share_of_the_experts_whole() -> None:
    mesh = replace(layout(tp=2, pp=2, dp=4), ep=4)
    config = experts(mesh)
    alone, divided = stage_weights(config.setup, replace(mesh, ep=1), 0), stage_weights(config.setup, mesh, 0)
    every = 2 * 8 * 3 * 192 * 256
    assert alone.experts == 0
    assert divided.experts == every // 4
    assert alone.matrices - every // 2 == divided.matrices - divided.experts, "dense matrices are cut as before"
    assert divided.others == alone.others
    assert divided.share(mesh, matrices=True) == -(-(divided.matrices - divided.experts + divided.others) // 4) + (
        divided.experts // 2
    )


def test_a_plan_with_an_expert_elsewhere_is_refused() -> None:
    mesh = replace(layout(dp=4), ep=2)
    plan = make_plan(experts(mesh).setup, mesh)
    index = next(matrix.index for matrix in plan.matrices if matrix.expert_rank == 0)
    cells = list(plan.assignment.cells)
    cells[index] = Cell(owner=cells[index].owner ^ 1, host=0)
    wrong = replace(plan, assignment=replace(plan.assignment, cells=tuple(cells)))
    with pytest.raises(ValueError, match="which does not store it"):
        Plan.from_content(json.loads(wrong.to_json()))


def test_balance_is_over_the_ranks_of_all_stages() -> None:
    mesh = replace(layout(pp=2, dp=4), ep=2)
    plan = make_plan(experts(mesh, layers=3).setup, mesh)
    found, loads = balance(plan), [*plan.loads(0), *plan.loads(1)]
    mean = sum(loads) / 8
    assert found.ranks == pytest.approx(max(loads) / mean)
    assert found.ranks > 1.2 > found.grid, "one stage has two of the three layers"
    assert found.ranks_bound == pytest.approx(max(plan.lower_bounds) / mean)
    assert found.ranks_bound <= found.ranks


def test_memory_has_the_experts_of_a_rank_whole_and_their_state_once() -> None:
    mesh = replace(layout(tp=2, dp=4), ep=4)
    config = experts(mesh)
    plan = make_plan(config.setup, mesh)
    memory = plan_memory(config.setup, mesh, plan)
    cell = memory.worst.owner * 2 + memory.worst.host
    weights = stage_weights(config.setup, mesh, 0)
    held = [m.elements for m in plan.matrices if m.expert_rank == cell % 4]
    dense = [m.elements // 2 for m in plan.matrices if m.expert_rank is None]
    assert memory.parts["weights"] == 2 * (sum(held) + sum(dense) + weights.others)
    assert memory.parts["gradients"] == 4 * (sum(held) + sum(dense) + weights.others)
    mine = [m.elements for m, c in zip(plan.matrices, plan.assignment.cells, strict=True) if number(c, mesh) == cell]
    assert memory.parts["matrix_state"] == 4 * sum(mine)
    assert sum(held) * 4 == sum(m.elements for m in plan.matrices if m.expert_rank is not None)


@pytest.mark.parametrize("layers", [10, 16])
def test_a_plan_has_the_bound_of_each_stage_although_it_computes_those_of_alike_stages_once(layers: int) -> None:
    mesh = replace(layout(tp=2, pp=4, dp=4), ep=4)
    setup = experts(mesh, layers).setup
    plan = plan_unbounded(setup, mesh)
    possible = shared_costs(setup, algorithm_of(setup), mesh, plan.matrices)
    bounds = [stage_bound(plan.matrices, plan.costs, stage, mesh, possible) for stage in range(mesh.pp)]
    assert [*plan.lower_bounds] == bounds
    assert len({*bounds}) == (1 if layers % mesh.pp == 0 else 2)


MESH = replace(layout(tp=2, pp=4, dp=2), ep=2)


def test_stages_are_alike_only_with_the_same_costs_and_cells() -> None:
    plan = plan_unbounded(experts(MESH, layers=14).setup, MESH)
    stages = alike_stages(plan.matrices, plan.costs, plan.assignment)
    assert [stages[stage].first for stage in range(4)] == [0, 1, 1, 3], "14 layers are 3, 4, 4 and 3"
    for stage in stages.values():
        first = stages[stage.first]
        for index, same_place in zip(stage.indices, first.indices, strict=True):
            matrix, other = plan.matrices[index], plan.matrices[same_place]
            assert (matrix.kind, matrix.shape, matrix.expert_rank) == (other.kind, other.shape, other.expert_rank)
            assert plan.costs[index] == plan.costs[same_place]
            assert plan.assignment.cells[index] == plan.assignment.cells[same_place]
    last = stages[2].indices[-1]
    costs = tuple(cost * (1 + (index == last)) for index, cost in enumerate(plan.costs))
    cells = tuple(
        replace(cell, owner=1 - cell.owner) if index == last else cell
        for index, cell in enumerate(plan.assignment.cells)
    )
    moved = replace(plan.assignment, cells=cells)
    assert [s.first for s in alike_stages(plan.matrices, costs, plan.assignment).values()] == [0, 1, 2, 3]
    assert [s.first for s in alike_stages(plan.matrices, plan.costs, moved).values()] == [0, 1, 2, 3]


def test_alike_stages_get_what_each_would_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages with the same matrices still differ in AdamW's parameters, and in the ranks of their events."""
    setup = experts(MESH, layers=14).setup
    plan = plan_unbounded(setup, MESH)
    pipeline = HostedPipeline.of(setup, MESH)
    seconds = groups.expert_seconds(plan.matrices, plan.costs, plan.assignment, pipeline)
    for stage in range(MESH.pp):
        held = [(m, cell, plan.costs[m.index]) for m, cell in plan.placed[stage] if m.expert_rank is not None]
        for owner, host in product(range(MESH.owners), range(MESH.tp)):
            own_s = [
                pipeline.each_alone(cost, m.elements) for m, cell, cost in held if cell == Cell(owner=owner, host=host)
            ]
            assert seconds[stage, owner][host] == pytest.approx(sum(own_s) + (pipeline.begin_s if own_s else 0.0))
    needed, study = plan_memory(setup, MESH, plan), study_run(setup, MESH)

    def alone(members: Sequence[Matrix], costs: Sequence[float], assignment: Assignment) -> dict[int, LikeStage]:
        found = alike_stages(members, costs, assignment)
        return {stage: LikeStage(stage, alike.indices) for stage, alike in found.items()}

    for module in (groups, memory, update_phase):
        monkeypatch.setattr(module, "alike_stages", alone)
    again = replace(plan)  # no cache has it
    assert groups.expert_seconds(again.matrices, again.costs, again.assignment, pipeline) == seconds
    assert plan_memory(setup, MESH, again) == needed
    make._unbounded.cache_clear()
    make._make_plan.cache_clear()
    others = study_run(setup, MESH).strategies
    for name, simulated in study.strategies.items():
        assert others[name].result == simulated.result
        assert others[name].result.events == simulated.result.events


def test_costs_of_alike_stages_add_up_to_what_each_host_takes() -> None:
    """Launches of some matrices are hidden while others are updated."""
    plan = plan_unbounded(experts(MESH, layers=14).setup, MESH)
    times = [UpdateTime(*(3e-3, 5e-3)[:: 1 if matrix.kind == "up" else -1]) for matrix in plan.matrices]
    workload = Workload(strategy="canzona", matrices=plan.matrices, costs=[time.alone_s for time in times], times=times)
    paced = update_phase.at_pace(workload, plan.assignment)
    of_hosts: dict[tuple[int, Cell], list[int]] = {}
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        of_hosts.setdefault((matrix.stage, cell), []).append(matrix.index)
    for members in of_hosts.values():
        together = summed([times[index] for index in members]).alone_s
        assert sum(paced.costs[index] for index in members) == pytest.approx(together, rel=1e-12)
    assert sum(paced.costs) < sum(workload.costs)
