"""The paper's engine: owners in natural order and micro-groups by hand, and what its plans consist of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.paper import balanced_cuts, even_start, paper_groups
from canzona_cli.core.planner.pipeline import Job
from canzona_cli.core.setup import Strategy
from canzona_cli.core.simulate.predict import simulate_plan
from tests.core.planner.planning import transformer
from tests.sizes import Size, run

ROWS = ((0, 8), (1, 6), (2, 4), (3, 5), (4, 7))


def test_a_piece_belongs_to_the_share_it_starts_in() -> None:
    assert even_start([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert even_start([3, 1, 1, 1], 3) == [0, 1, 2, 2]


def test_cuts_are_at_the_boundary_nearest_to_an_even_share() -> None:
    """Shares end at 4 and 8, pieces at 1, 4.5, 7.5 and 11: one above its share's end, one below."""
    assert balanced_cuts([[1, 3.5, 3, 3.5, 1]], 3, alpha=0.0) == [[0, 0, 1, 2, 2]]


def test_with_alpha_one_a_bucket_makes_up_for_another() -> None:
    """The larger bucket gives its first owner 6 of 10; of the smaller one, 6, that owner needs 2 for an even total."""
    assert balanced_cuts([[2, 1, 1, 2], [6, 4]], 2, alpha=1.0) == [[0, 1, 1, 1], [0, 1]]
    assert balanced_cuts([[2, 1, 1, 2], [6, 4]], 2, alpha=0.0) == [[0, 0, 1, 1], [0, 1]]
    even = [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3]]
    assert balanced_cuts([[1] * 8, [1] * 4], 4, alpha=1.0) == even, "where cuts are no better"


def test_cuts_that_are_only_as_even_as_the_even_start_are_not_taken() -> None:
    """The middle piece is nearer to the second share, but starts in the first: 3 and 6 either way."""
    assert balanced_cuts([[3, 3, 3]], 2, alpha=0.0) == [even_start([3, 3, 3], 2)] == [[0, 0, 1]]


def test_greedy_takes_the_largest_first_and_opens_a_group_for_what_would_overfill_a_host() -> None:
    base = transformer(1, 64, 64, 64)[0]
    jobs = [Job(matrix=replace(base, index=i, rows=rows, cols=1), host=0, seconds=1.0 / rows) for i, rows in ROWS]
    groups = paper_groups(jobs, 2, 14)
    assert [[job.matrix.rows for job in group] for group in groups] == [[8, 7, 6, 5], [4]]
    assert [job.host for group in groups for job in group] == [0, 1, 1, 0, 0]
    assert [[job.matrix.rows for job in group] for group in paper_groups(jobs, 2, 10)] == [[8, 7], [6, 5, 4]]


def _placed_anew(rows: Sequence[int], tp: int, capacity: int) -> list[list[int]]:
    """The rule in the words of the authors' code: every job joins the open group, which is placed from the beginning on
    the hosts with the least; if a host then has too much, the job is taken back. Returns the loads of each group."""
    groups: list[list[int]] = [[]]
    for size in sorted(rows, reverse=True):
        groups[-1].append(size)
        if max(_loads(groups[-1], tp)) > capacity:
            groups[-1].pop()
            groups.append([size])
    return [_loads(group, tp) for group in groups]


def _loads(rows: Sequence[int], tp: int) -> list[int]:
    loads = [0] * tp
    for size in sorted(rows, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=24), tp=st.sampled_from([1, 2, 4]), over=st.integers(0, 40)
)
def test_groups_are_those_of_placing_the_whole_group_anew_for_every_job(rows: list[int], tp: int, over: int) -> None:
    base = transformer(1, 64, 64, 64)[0]
    jobs = [Job(matrix=replace(base, index=i, rows=size, cols=1), host=0, seconds=1.0) for i, size in enumerate(rows)]
    groups = paper_groups(jobs, tp, max(rows) + over)
    loads = [[sum(job.matrix.rows for job in group if job.host == host) for host in range(tp)] for group in groups]
    assert loads == _placed_anew(rows, tp, max(rows) + over)
    order = [(job.matrix.rows, job.matrix.index) for group in groups for job in group]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("size", "gpus"), [("0.6b", 8), ("8b", 64)])
def test_a_plan_of_the_paper_has_its_own_owners_and_groups(size: Size, gpus: int, alpha: float) -> None:
    base = run(size, gpus, strategy="paper", tp=2, pp=1)
    config, mesh = resolve(replace(base, engine=replace(base.engine, alpha=alpha)))
    plan = plan_unbounded(config.setup, mesh)
    asked = plan.subject.settings
    assert (asked.strategy, asked.mode) == ("paper", "hosted")
    assert not plan.assignment.shared_costs
    largest = max(matrix.elements for matrix in plan.matrices)
    for bucket in plan.buckets:
        owners = [part.owner for part in bucket.ranges]
        assert owners == sorted(set(owners)), "owners in the order of ranks, each with one range"
        if alpha == 0:
            held = Counter({part.owner: part.end - part.start for part in bucket.ranges})
            assert max(held.values()) * mesh.tp <= bucket.elements * mesh.tp / mesh.owners + 2 * largest


@pytest.mark.parametrize("strategy", ["paper", "asc"])
def test_baselines_have_every_collective_and_every_size_of_bucket(strategy: Strategy) -> None:
    """Checks a run with many owners, for which rings and buckets of another size than Megatron's are faster."""
    config, mesh = resolve(run("14b", 256, strategy=strategy, tp=2, pp=1, micro_batch_size=1))
    default = bucket_elements(config.setup, mesh)
    engine, parallel = replace(config.engine, reduction="reduce"), replace(config.parallel, bucket_elements=default)
    chosen, fixed = (
        plan_unbounded(config.setup, mesh),
        plan_unbounded(replace(config, engine=engine, parallel=parallel).setup, mesh),
    )
    assert "ring" in {bucket.reduction for bucket in chosen.buckets}
    assert {(bucket.reduction, bucket.gathering) for bucket in fixed.buckets} == {("reduce", "broadcast")}
    assert len(chosen.buckets) != len(fixed.buckets)
    free_s, fixed_s = (simulate_plan(config.setup, mesh, plan).iteration_s for plan in (chosen, fixed))
    assert free_s < 0.95 * fixed_s


def test_groups_of_a_plan_keep_the_capacity_and_the_order() -> None:
    base = run("0.6b", 8, strategy="paper", tp=2, pp=1)
    config, mesh = resolve(replace(base, engine=replace(base.engine, c_max_mib=64.0)))
    plan = plan_unbounded(config.setup, mesh)
    several = Counter(group.owner for group in plan.groups)
    assert min(several.values()) > 1
    for group in plan.groups:
        hosted: Counter[int] = Counter()
        for index in group.matrices:
            hosted[plan.assignment.cells[index].host] += 4 * plan.matrices[index].elements
        assert max(hosted.values()) <= 64 << 20
    for owner in several:
        order = [index for group in plan.groups if group.owner == owner for index in group.matrices]
        sizes = [plan.matrices[index].elements for index in order]
        assert sizes == sorted(sizes, reverse=True)
