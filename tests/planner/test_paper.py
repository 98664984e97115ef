"""The paper's engine: owners in natural order and micro-groups with rollback by hand, and what its plans consist of."""

from collections import Counter
from dataclasses import replace

import pytest

from canzona_cli.cluster.fit import resolve
from canzona_cli.planner.make import plan_unbounded
from canzona_cli.planner.paper import balanced_cuts, even_start, paper_groups
from canzona_cli.planner.pipeline import Job
from tests.planner.planning import transformer
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


def test_greedy_rolls_back_what_overfills_a_host_and_fills_hosts_by_elements() -> None:
    base = transformer(1, 64, 64, 64)[0]
    jobs = [Job(matrix=replace(base, index=i, rows=rows, cols=1), host=0, seconds=1.0 / rows) for i, rows in ROWS]
    groups = paper_groups(jobs, 2, 10)
    assert [[job.matrix.index for job in group] for group in groups] == [[0, 1, 2], [3, 4]]
    assert [job.host for group in groups for job in group] == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("size", "gpus"), [("0.6b", 8), ("8b", 64)])
def test_a_plan_of_the_paper_has_nothing_of_canzonas_own(size: Size, gpus: int, alpha: float) -> None:
    base = run(size, gpus, strategy="paper", tp=2, pp=1)
    config, mesh = resolve(replace(base, engine=replace(base.engine, alpha=alpha)))
    plan = plan_unbounded(config, mesh)
    asked = plan.subject.settings
    assert (asked.strategy, asked.layout, asked.grouping, asked.mode) == ("paper", "contiguous", "greedy", "hosted")
    assert not plan.assignment.shared_costs
    assert {(bucket.reduction, bucket.gathering) for bucket in plan.buckets} == {("reduce", "broadcast")}
    largest = max(matrix.elements for matrix in plan.matrices)
    for bucket in plan.buckets:
        owners = [part.owner for part in bucket.ranges]
        assert owners == sorted(set(owners)), "owners in the order of ranks, each with one range"
        if alpha == 0:
            held = Counter({part.owner: part.end - part.start for part in bucket.ranges})
            assert max(held.values()) * mesh.tp <= bucket.elements * mesh.tp / mesh.owners + 2 * largest


def test_groups_of_a_plan_keep_the_capacity_and_the_order() -> None:
    base = run("0.6b", 8, strategy="paper", tp=2, pp=1)
    config, mesh = resolve(replace(base, engine=replace(base.engine, c_max_mib=64.0)))
    plan = plan_unbounded(config, mesh)
    several = Counter(group.owner for group in plan.groups)
    assert min(several.values()) > 1
    for group in plan.groups:
        hosted: Counter[int] = Counter()
        for index in group.matrices:
            hosted[plan.assignment.cells[index].host] += 4 * plan.matrices[index].elements
        assert max(hosted.values()) <= 64 << 20
    for owner in several:
        order = [index for group in plan.groups if group.owner == owner for index in group.matrices]
        assert order == sorted(order)
