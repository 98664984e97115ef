"""Two plans that differ are told apart by the first fact they differ in, and equal ones by none."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from canzona_cli.cluster.fit import resolve
from canzona_cli.planner.make import make_plan
from canzona_cli.planner.plan import Assignment, Cell, Plan
from canzona_cli.planner.plan_file import first_difference
from tests import sizes


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*resolve(sizes.run("tiny", 8, strategy="canzona", tp=2)))


def test_equal_plans_have_no_difference(plan: Plan) -> None:
    assert first_difference(plan, Plan.from_content(plan.content())) is None


def test_what_plans_were_computed_from_comes_first(plan: Plan) -> None:
    other = make_plan(*resolve(sizes.run("tiny", 4, strategy="canzona", tp=1)))
    assert first_difference(plan, other) == ("layout.tp", 2, 1)
    assert first_difference(other, plan) == ("layout.tp", 1, 2)


def _moved(plan: Plan) -> Plan:
    cells = list(plan.assignment.cells)
    cells[4] = Cell(owner=cells[4].owner, host=1 - cells[4].host)
    return replace(plan, assignment=Assignment(cells=tuple(cells)))


def _wider(plan: Plan) -> Plan:
    first = plan.buckets[0]
    ranges = (first.ranges[0]._replace(end=first.ranges[0].end - 1), *first.ranges[1:])
    return replace(plan, buckets=(replace(first, ranges=ranges), *plan.buckets[1:]))


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "version": lambda plan: replace(plan, version=99),
    "matrices[layers.0.proj].seconds": lambda plan: replace(plan, costs=(1.0, *plan.costs[1:])),
    "matrices[layers.0.gate].host": _moved,
    "buckets[stage 0, index 0].reduction": lambda plan: replace(
        plan, buckets=(replace(plan.buckets[0], reduction="ring"), *plan.buckets[1:])
    ),
    "buckets[stage 0, index 0].ranges[0][1]": _wider,
    "micro_groups[stage 0, owner 0, index 0]": lambda plan: replace(plan, groups=plan.groups[1:]),
    "lower_bounds[0]": lambda plan: replace(plan, lower_bounds=(2.0,)),
}


@pytest.mark.parametrize("key", CHANGES)
def test_the_first_difference_is_named_with_both_values(plan: Plan, key: str) -> None:
    other = CHANGES[key](plan)
    found = first_difference(plan, other)
    assert found is not None
    assert found[0] == key
    assert found[1] != found[2]
    back = first_difference(other, plan)
    assert back == (key, found[2], found[1])
