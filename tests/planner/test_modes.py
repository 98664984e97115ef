"""Which matrices are shared: none is when that takes longer, and what a rank has memory for."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import Layout, Mode, RunConfig
from canzona_cli.costs.activations import stage_weights
from canzona_cli.costs.sharing import Share, shares
from canzona_cli.planner import groups as micro_groups
from canzona_cli.planner.groups import held_jobs
from canzona_cli.planner.make import attempt, plan_unbounded, planned_matrices
from canzona_cli.planner.measures import balance
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.pipeline import HostedPipeline, Job, Load, Loads, _Asked, planning
from canzona_cli.planner.plan import Plan, PlanSettings
from canzona_cli.planner.reduction import ReductionModel
from tests import sizes
from tests.planner.planning import least_makespan
from tests.sizes import layout


@cache
def _planned(
    size: sizes.Size, tp: int, dp: int, mode: Mode | str, factor: float = 1.0
) -> tuple[RunConfig, Layout, Plan]:
    config = sizes.run(size, tp * dp, strategy="canzona", tp=tp)
    cluster = replace(config.cluster, symmetric_factor=factor)
    config = replace(config, engine=replace(config.engine, mode=mode), cluster=cluster)  # type: ignore[arg-type]
    mesh = layout(tp=tp, dp=dp)
    return config, mesh, plan_unbounded(config, mesh)


def _seconds(planned: tuple[RunConfig, Layout, Plan]) -> float:
    """Of the slowest owner, by the planner's clock."""
    config, mesh, plan = planned
    pipeline, found = HostedPipeline.of(planning(config), mesh), 0.0
    jobs = {
        job.matrix.index: job for own in held_jobs(plan.matrices, plan.costs, plan.assignment).values() for job in own
    }
    for owner in range(mesh.dp):
        groups = [[jobs[index] for index in group.matrices] for group in plan.groups if group.owner == owner]
        found = max(found, pipeline.seconds(groups))
    return found


@pytest.mark.parametrize(
    ("size", "tp", "dp"),
    [("14b", 2, 256), ("32b", 8, 128), ("32b", 8, 16), ("8b", 2, 128), ("1.7b", 4, 256), ("0.6b", 2, 2)],
)
def test_auto_is_never_slower_than_one_mode_and_faster_where_ranks_were_idle(
    size: sizes.Size, tp: int, dp: int
) -> None:
    auto, hosted, shared = (_planned(size, tp, dp, mode) for mode in ("auto", "hosted", "shared"))
    config, mesh, _ = auto
    # AdamW's parameters are gathered under the updates: shorter ones than that gain nothing.
    gathered = ReductionModel(config, mesh).gather_evenly(stage_weights(config, mesh, 0).others)
    assert _seconds(auto) <= max(gathered, min(_seconds(hosted), _seconds(shared))) * 1.01
    assert balance(auto[2]).slowest_s >= auto[2].lower_bounds[0] * (1 - 1e-9)
    if (size, tp, dp) in (("14b", 2, 256), ("32b", 8, 128)):
        assert _seconds(auto) < 0.95 * _seconds(hosted)
        assert balance(auto[2]).grid < 0.9 * balance(hosted[2]).grid
    assert set(hosted[2].modes) == {"hosted"}


def test_more_ranks_shorten_fragments_alone() -> None:
    config, mesh, plan = _planned("32b", 8, 16, "shared")
    two = shares(config, layout(tp=2, dp=16), plan.matrices)
    eight = shares(config, mesh, plan.matrices)
    for index, share in eight.items():
        assert two[index].each > 2 * share.each
    assert {plan.matrices[index].kind for index in eight} == {"q", "proj", "gate", "up", "down"}


@given(
    costs=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    possible=st.dictionaries(st.integers(1, 12), st.integers(1, 11), max_size=4),
    tp=st.integers(2, 4),
)
@settings(max_examples=100, deadline=None)
def test_a_row_is_close_to_the_best_of_all_ways(costs: list[int], possible: dict[int, int], tp: int) -> None:
    may = {place: Share(fragment=(0.5, possible[cost] - 0.5)) for place, cost in enumerate(costs) if cost in possible}
    rows = HostPacker([float(cost) for cost in costs], tp, may).rows(range(len(costs)))
    best = least_makespan([[float(cost) for cost in costs]], 1, tp, possible)  # type: ignore[arg-type]
    for row in rows:
        busy = [0.0] * tp
        for cost, host, shared in zip(costs, row.hosts, row.shared, strict=True):
            busy[host] += 0 if shared else cost
        each = sum(may[place].each for place, shared in enumerate(row.shared) if shared)
        assert row.height == pytest.approx(max(busy) + each)
    assert rows[0].height == min(row.height for row in rows)
    assert rows[0].height >= best * (1 - 1e-9)
    hosted = HostPacker([float(cost) for cost in costs], tp).rows(range(len(costs)))[0]
    assert rows[0].height <= hosted.height * (1 + 1e-9)


def test_nothing_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing modes makes micro-groups, most owners are alike, and most ways to cut come to the same groups."""
    config = sizes.run("32b", 1024, strategy="canzona", tp=8)
    mesh = layout(tp=8, dp=128)
    searched: list[Hashable] = []
    timed: list[list[Hashable]] = []
    told: list[int] = []
    search, seconds, load = micro_groups._groups, HostedPipeline.seconds, HostedPipeline._told

    def groups_of(
        jobs: Sequence[Job], asked: PlanSettings, width: int, pipeline: HostedPipeline
    ) -> tuple[float, list[list[Job]]]:
        searched.append(tuple((job.host, job.seconds, job.matrix.shape, job.share) for job in jobs))
        timed.append([])
        return search(jobs, asked, width, pipeline)

    def noted(self: HostedPipeline, groups: Sequence[Sequence[Job]], known: Loads | None = None) -> float:
        timed[-1].append(tuple(tuple(job.matrix.index for job in group) for group in groups))
        return seconds(self, groups, known)

    def told_of(self: HostedPipeline, asked: _Asked) -> Load:
        told.append(1)
        return load(self, asked)

    monkeypatch.setattr(micro_groups, "_groups", groups_of)
    monkeypatch.setattr(HostedPipeline, "seconds", noted)
    monkeypatch.setattr(HostedPipeline, "_told", told_of)
    plan = attempt(config, mesh, None, planned_matrices(config, mesh, None), None)
    assert set(plan.modes) == {"hosted", "shared"}
    assert len(searched) == len(set(searched)) > 3
    assert all(len(ways) == len(set(ways)) for ways in timed)
    assert len(told) < 0.75 * sum(len(way) for ways in timed for way in ways if isinstance(way, tuple))
