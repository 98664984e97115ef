"""Micro-groups hold every matrix once, keep C_max, and auto is never slower than what it chose among."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.links import Groups, Links
from canzona_cli.core.costs.sharing import SharedCost, shared_costs
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.groups import Grouping, check_capacity, held_jobs
from canzona_cli.core.planner.measures import balance
from canzona_cli.core.planner.packing import HostPacker
from canzona_cli.core.planner.pipeline import HostedPipeline, Job, planning_config
from canzona_cli.core.planner.plan import Assignment, MicroGroup, Plan, PlanSettings
from canzona_cli.core.setup import Layout, Strategy
from tests import sizes
from tests.core.planner.planning import (
    grid,
    grids,
    least_makespan,
    link,
    models,
    newton_schulz,
    planned_in,
    transformer,
)
from tests.refusals import refused
from tests.sizes import layout

MODELS, GRIDS = models(4, 16, 64), grids(4)


def _plan(
    matrices: tuple[Matrix, ...], mesh: Layout, strategy: Strategy, capacity: int | None, width: int = 4
) -> tuple[Assignment, tuple[MicroGroup, ...]]:
    plan = PlanSettings(strategy=strategy, c_max_bytes=capacity)
    costs = newton_schulz(matrices)
    # As in a plan of the paper, whose hosts are chosen by the size of an element in an exchange.
    found = assign(matrices, costs, mesh, plan, bytes_per_element=width)
    return found, Grouping(matrices, costs, plan, link(mesh.tp, width=width)).micro_groups(found)


@given(
    matrices=MODELS,
    mesh=GRIDS,
    strategy=st.sampled_from(["canzona", "paper", "asc"]),
    room=st.sampled_from([None, 1.0, 2.5]),
    width=st.sampled_from([2, 4]),
)
@settings(max_examples=80, deadline=None)
def test_groups_hold_an_owners_matrices_once_within_capacity(
    matrices: tuple[Matrix, ...], mesh: Layout, strategy: Strategy, room: float | None, width: int
) -> None:
    largest = max(matrix.elements for matrix in matrices) * width
    capacity = None if room is None else int(largest * room)
    found, groups = _plan(matrices, mesh, strategy, capacity, width)
    assert sorted(index for group in groups for index in group.matrices) == list(range(len(matrices)))
    numbers = defaultdict(list)
    for group in groups:
        assert group.matrices
        assert all(found.cells[index].owner == group.owner for index in group.matrices)
        numbers[group.stage, group.owner].append(group.index)
        if capacity is not None and mesh.tp > 1:
            received: Counter[int] = Counter()
            for index in group.matrices:
                received[found.cells[index].host] += matrices[index].elements * width
            assert max(received.values()) <= capacity
    assert all(order == list(range(len(order))) for order in numbers.values())


@given(matrices=MODELS, mesh=GRIDS)
@settings(max_examples=40, deadline=None)
def test_the_first_group_has_the_costliest_matrix_of_every_host(matrices: tuple[Matrix, ...], mesh: Layout) -> None:
    costs = newton_schulz(matrices)
    assignment, groups = _plan(matrices, mesh, "canzona", None)
    for owner in range(mesh.dp):
        by_host: dict[int, list[float]] = defaultdict(list)
        owned = [index for group in groups if group.owner == owner for index in group.matrices]
        for index in owned:
            by_host[assignment.cells[index].host].append(costs[index])
        if mesh.tp > 1 and owned:
            first = next(group.matrices for group in groups if group.owner == owner)
            assert sorted(costs[index] for index in first) == sorted(map(max, by_host.values()))


def test_pipeline_of_two_groups_by_hand() -> None:
    # 1000 bytes over 2 ranks: a fragment of 500 takes 1 + 0.5 s at 1000 bytes/s. in 0-1.5, in 1.5-3, compute 1.5-11.5
    # on host 0, out 11.5-13; compute 3-7 on host 1, long done; out 13-14.5.
    of_1000_bytes = replace(transformer(1, 64, 64, 64)[0], rows=50, cols=10)
    first = [Job(matrix=of_1000_bytes, host=0, seconds=10.0)]
    second = [Job(matrix=replace(of_1000_bytes, index=1), host=1, seconds=4.0)]
    slow = link(2, 1000.0, 1.0, 2)
    assert slow.seconds([first, second]) == pytest.approx(14.5, abs=0.01)  # and a flag for each matrix
    # Together: one exchange each way, each host in and out 500 bytes at once.
    assert slow.seconds([[*first, *second]]) == pytest.approx(1.5 + 10 + 1.5, abs=0.01)


def test_without_links_to_wait_for_the_pipeline_is_the_busiest_host() -> None:
    matrices = transformer(1, 64, 64, 64)
    jobs = [Job(matrix=matrices[i], host=i % 2, seconds=float(i)) for i in range(6)]
    groups = [jobs[:2], jobs[2:4], jobs[4:]]
    assert link(2, 1e30, 0.0).seconds(groups) == pytest.approx(1 + 3 + 5)


def test_too_small_a_capacity_names_the_least_that_works() -> None:
    matrices = transformer(2, 640, 1920, 64)
    (problem,) = refused(_plan, matrices, grid(2, 1), "canzona", 4 << 20)
    assert problem.key == "engine.c_max_mib"
    assert "layers.0.gate" in problem.reason
    assert "=4.6875 or more" in problem.fix  # MiB that 640 x 1920 x 4 bytes are
    _plan(matrices, grid(2, 1), "canzona", int(4.6875 * (1 << 20)))


@given(rows=st.integers(1, 300_000), cols=st.integers(1, 30_000), width=st.sampled_from([2, 4]))
@example(rows=256_001, cols=10_240, width=4)  # six digits of it are too few
def test_the_capacity_that_is_advised_is_enough_when_it_is_typed(rows: int, cols: int, width: int) -> None:
    matrix = replace(transformer(1, 8, 16, 4)[0], rows=rows, cols=cols)
    settings = PlanSettings(strategy="canzona", c_max_bytes=0)
    (problem,) = refused(check_capacity, [matrix], 2, settings, width)
    advised = float(problem.fix.split()[1].partition("=")[2])
    typed = replace(settings, c_max_bytes=int(advised * (1 << 20)))  # as the planner reads it
    check_capacity([matrix], 2, typed, width)


def _seconds(planned: tuple[RunConfig, Layout, Plan]) -> float:
    """Returns the seconds of the slowest owner, by the planner's clock."""
    config, mesh, plan = planned
    pipeline, found = HostedPipeline.of(planning_config(config.setup), mesh), 0.0
    jobs = {
        job.matrix.index: job for own in held_jobs(plan.matrices, plan.costs, plan.assignment).values() for job in own
    }
    for owner in range(mesh.dp):
        groups = [[jobs[index] for index in group.matrices] for group in plan.groups if group.owner == owner]
        found = max(found, pipeline.seconds(groups))
    return found


@pytest.mark.parametrize(
    ("size", "tp", "dp"),
    [
        *(("14b", 2, 256), ("32b", 8, 128), ("8b", 2, 128), ("0.6b", 2, 2)),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("32b", 8, 16), ("1.7b", 4, 256))),
    ],
)
def test_auto_is_never_slower_than_one_mode_and_faster_with_idle_ranks(size: sizes.Size, tp: int, dp: int) -> None:
    auto, hosted, shared = (planned_in(mode, size, tp, dp) for mode in ("auto", "hosted", "shared"))
    config, mesh, _ = auto
    # AdamW's parameters are gathered under the updates: shorter ones than that gain nothing.
    adamw_bytes = config.train.weight_bytes * stage_weights(config.setup, mesh, 0).others
    gathered = Links(cluster=config.cluster).all_gather(adamw_bytes, Groups.of(mesh, config.cluster).data).seconds
    assert _seconds(auto) <= max(gathered, min(_seconds(hosted), _seconds(shared))) * 1.01
    assert balance(auto[2]).slowest_s >= auto[2].lower_bounds[0] * (1 - 1e-9)
    if (size, tp, dp) in (("14b", 2, 256), ("32b", 8, 128)):
        assert _seconds(auto) < 0.95 * _seconds(hosted)
        assert balance(auto[2]).grid < 0.9 * balance(hosted[2]).grid
    assert set(hosted[2].modes) == {"hosted"}


def test_more_ranks_shorten_fragments_alone() -> None:
    config, mesh, plan = planned_in("shared", "32b", 8, 16)
    two = shared_costs(config.setup, plan.subject.optimizer, layout(tp=2, dp=16), plan.matrices)
    eight = shared_costs(config.setup, plan.subject.optimizer, mesh, plan.matrices)
    for index, share in eight.items():
        assert two[index].each > 2 * share.each
    assert {plan.matrices[index].kind for index in eight} == {"q", "proj", "gate", "up", "down"}


@given(
    costs=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    shared=st.sets(st.integers(0, 4)),
    tp=st.integers(2, 4),
)
@settings(max_examples=100, deadline=None)
def test_hosts_are_as_close_to_the_best_as_largest_first_promises(costs: list[int], shared: set[int], tp: int) -> None:
    """4/3 of the best division, a bound of Graham (1969)."""
    each = {index: SharedCost(fragment=(0.5, 0.5)) for index in shared}
    hosts = HostPacker([float(cost) for cost in costs], tp, each).hosts(range(len(costs)))
    busy = [0.0] * tp
    for index, host in enumerate(hosts):
        busy[host] += 0 if index in shared else costs[index]
    hosted = [float(cost) for index, cost in enumerate(costs) if index not in shared]
    best = least_makespan([hosted], 1, tp, {}) if hosted else 0.0
    assert best * (1 - 1e-9) <= max(busy) <= best * 4 / 3 * (1 + 1e-9)
