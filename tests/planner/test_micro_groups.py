"""Micro-groups hold every matrix once, keep C_max, and auto is never slower than what it chose among."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import Grouping, Layout
from canzona_cli.errors import ConfigError
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.assign import assign
from canzona_cli.planner.micro_groups import ExchangeCost, Job, check_capacity, micro_groups, pipeline_seconds
from canzona_cli.planner.plan import Assignment, MicroGroup, PlanSettings
from tests.planner.planning import grid, newton_schulz, transformer

MODELS = st.builds(
    transformer,
    layers=st.integers(1, 8),
    hidden=st.sampled_from([64, 128, 192]),
    ffn=st.sampled_from([64, 192, 384]),
    kv=st.sampled_from([4, 16, 64]),
    fused_fc1=st.booleans(),
)
GRIDS = st.builds(grid, tp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 4))
LINK = ExchangeCost(bytes_per_s=1e9, latency_s=1e-6)


def _plan(
    matrices: tuple[Matrix, ...], mesh: Layout, grouping: Grouping, capacity: int | None, width: int = 4
) -> tuple[Assignment, tuple[MicroGroup, ...]]:
    plan = PlanSettings(strategy="canzona", grouping=grouping, c_max_bytes=capacity)
    costs = newton_schulz(matrices)
    found = assign(matrices, costs, mesh, plan)
    return found, micro_groups(matrices, costs, found, mesh, plan, width, LINK)


@given(
    matrices=MODELS,
    mesh=GRIDS,
    grouping=st.sampled_from(get_args(Grouping)),
    room=st.sampled_from([None, 1.0, 2.5]),
    width=st.sampled_from([2, 4]),
)
@settings(max_examples=80, deadline=None)
def test_groups_hold_an_owners_matrices_once_within_capacity(
    matrices: tuple[Matrix, ...], mesh: Layout, grouping: Grouping, room: float | None, width: int
) -> None:
    largest = max(matrix.elements for matrix in matrices) * width
    capacity = None if room is None else int(largest * room)
    found, groups = _plan(matrices, mesh, grouping, capacity, width)
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
def test_auto_is_no_slower_than_registration_or_balanced_order(matrices: tuple[Matrix, ...], mesh: Layout) -> None:
    costs = newton_schulz(matrices)
    spans = {}
    for grouping in ("auto", "registration", "balanced"):
        found, groups = _plan(matrices, mesh, grouping, None)
        by_owner = defaultdict(list)
        for group in groups:
            by_owner[group.owner].append(
                [Job(matrix=matrices[i], host=found.cells[i].host, seconds=costs[i], width=4) for i in group.matrices]
            )
        spans[grouping] = {owner: pipeline_seconds(jobs, mesh.tp, LINK) for owner, jobs in by_owner.items()}
    for owner, span in spans["auto"].items():
        assert span <= min(spans["registration"][owner], spans["balanced"][owner]) * (1 + 1e-9)


def test_pipeline_of_two_groups_by_hand() -> None:
    # 1000 bytes over 2 ranks: a fragment of 500 takes 1 + 0.5 s at 1000 bytes/s. in 0-1.5, in 1.5-3, compute 1.5-11.5
    # on host 0, out 11.5-13; compute 3-7 on host 1, long done; out 13-14.5.
    of_1000_bytes = replace(transformer(1, 64, 64, 64)[0], rows=50, cols=10)
    first = [Job(matrix=of_1000_bytes, host=0, seconds=10.0, width=2)]
    second = [Job(matrix=replace(of_1000_bytes, index=1), host=1, seconds=4.0, width=2)]
    link = ExchangeCost(bytes_per_s=1000.0, latency_s=1.0)
    assert pipeline_seconds([first, second], 2, link) == pytest.approx(14.5)
    # Together: one exchange each way, each host in and out 500 bytes at once.
    assert pipeline_seconds([[*first, *second]], 2, link) == pytest.approx(1.5 + 10 + 1.5)


def test_without_links_to_wait_for_the_pipeline_is_the_busiest_host() -> None:
    matrices = transformer(1, 64, 64, 64)
    jobs = [Job(matrix=matrices[i], host=i % 2, seconds=float(i), width=2) for i in range(6)]
    groups = [jobs[:2], jobs[2:4], jobs[4:]]
    assert pipeline_seconds(groups, 2, ExchangeCost(bytes_per_s=1e30, latency_s=0.0)) == pytest.approx(1 + 3 + 5)


def test_too_small_a_capacity_names_the_least_that_works() -> None:
    matrices = transformer(2, 640, 1920, 64)
    with pytest.raises(ConfigError) as caught:
        _plan(matrices, grid(2, 1), "auto", 4 << 20)
    (problem,) = caught.value.problems
    assert problem.key == "engine.c_max_mib"
    assert "layers.0.gate" in problem.reason
    assert "=4.6875 or more" in problem.fix  # MiB that 640 x 1920 x 4 bytes are
    _plan(matrices, grid(2, 1), "auto", int(4.6875 * (1 << 20)))


def test_greedy_rolls_back_what_overfills_a_host() -> None:
    matrices = transformer(1, 64, 64, 64)  # seven alike
    found, groups = _plan(matrices, grid(2, 1), "greedy", 2 * 64 * 64 * 4)
    assert [group.matrices for group in groups] == [(0, 1, 2, 3), (4, 5, 6)]
    assert [found.cells[index].host for index in range(7)] == [0, 1, 0, 1, 0, 1, 0]


@given(rows=st.integers(1, 300_000), cols=st.integers(1, 30_000), width=st.sampled_from([2, 4]))
@example(rows=256_001, cols=10_240, width=4)  # six digits of it are too few
def test_the_capacity_that_is_advised_is_enough_when_it_is_typed(rows: int, cols: int, width: int) -> None:
    matrix = replace(transformer(1, 8, 16, 4)[0], rows=rows, cols=cols)
    settings = PlanSettings(strategy="canzona", c_max_bytes=0)
    with pytest.raises(ConfigError) as caught:
        check_capacity([matrix], grid(2, 1), settings, width)
    (problem,) = caught.value.problems
    advised = float(problem.fix.split()[1].partition("=")[2])
    typed = replace(settings, c_max_bytes=int(advised * (1 << 20)))  # as the planner reads it
    check_capacity([matrix], grid(2, 1), typed, width)
