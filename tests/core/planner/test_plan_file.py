"""The plan a run executes: the file it names, else the newest that is for it, else a new one; the same in each case."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.cli.views.header import describe_plan, header_rows
from canzona_cli.config.resolve import resolve
from canzona_cli.core.errors import ConfigError, DoesNotFit
from canzona_cli.core.planner.make import make_plan, subject
from canzona_cli.core.planner.plan import Assignment, Cell, Plan
from canzona_cli.core.planner.plan_file import ObtainedPlan, default_path, first_difference, obtain_plan
from canzona_cli.core.setup import Execution, Layout, Setup, SoapConfig
from canzona_cli.core.simulate import fit
from tests import sizes
from tests.refusals import refused


def resolved(**engine: object) -> tuple[Setup, Layout]:
    config = sizes.run("tiny", 4, strategy="canzona", tp=2)
    return fit.resolve(replace(config.setup, engine=replace(config.engine, **engine)))  # type: ignore[arg-type]


def obtained(setup: Setup, layout: Layout, folder: Path) -> ObtainedPlan:
    found = obtain_plan(setup, layout, folder)
    assert found is not None
    return found


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of the run's plan, where `canzona plan --out` was told to put it."""
    path = tmp_path / "my plan.json"
    path.write_text(obtained(*resolved(), tmp_path / "plans").plan.to_json(), encoding="utf-8")
    return path


@pytest.mark.parametrize("strategy", ["sc", "layerwise", "adamw"])
def test_megatrons_own_ways_execute_no_plan_even_if_one_is_named(strategy: str, tmp_path: Path) -> None:
    config = sizes.run("tiny", 4, strategy=strategy, tp=2)  # type: ignore[arg-type]
    config, layout = resolve(replace(config, engine=replace(config.engine, plan="absent.json")))
    assert config.execution is not Execution.PLANNED
    assert obtain_plan(config.setup, layout, tmp_path) is None


@pytest.mark.parametrize("strategy", ["asc", "paper", "canzona"])
def test_without_any_file_a_plan_is_made_and_nothing_written(strategy: str, tmp_path: Path) -> None:
    config, layout = resolved(strategy=strategy)
    found = obtained(config, layout, tmp_path / "plans")
    assert found.path is None
    assert found.plan.subject == subject(config, layout)
    assert list(tmp_path.iterdir()) == []


def test_a_named_file_is_taken_and_naming_it_does_not_enter_the_hash(written: Path, tmp_path: Path) -> None:
    new = obtained(*resolved(), tmp_path / "plans")
    named = obtained(*resolved(plan=str(written)), tmp_path / "plans")
    assert named.path == written
    assert (named.plan, named.plan.hash) == (new.plan, new.plan.hash)


def test_a_file_for_another_run_is_refused_by_the_setting_with_every_difference(written: Path, tmp_path: Path) -> None:
    config, layout = resolved(plan=str(written), mode="hosted", exchange_dtype="bf16")
    config = replace(config, optimizer=SoapConfig(name="soap", lr=1e-3))
    (problem,) = refused(obtain_plan, config, layout, tmp_path)
    assert (problem.key, problem.value) == ("engine.plan", written)
    for difference in (
        "optimizer.name is muon in the plan, soap",
        "mode is auto in the plan, hosted",
        "exchange_dtype is fp32 in the plan",
    ):
        assert difference in problem.reason
    assert "leave engine.plan out" in problem.fix


def test_a_file_that_was_altered_or_is_not_there_is_refused_not_replaced(written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text(encoding="utf-8"))
    content["matrices"] = content["matrices"][:-1]
    written.write_text(json.dumps(content), encoding="utf-8")
    for path, why in ((written, "was altered"), (tmp_path / "absent.json", "cannot be read")):
        with pytest.raises(ConfigError, match=why) as caught:
            obtain_plan(*resolved(plan=str(path)), tmp_path)
        assert caught.value.problems[0].key == "engine.plan"


def test_the_newest_file_for_the_run_is_taken_from_plans_and_others_are_passed_over(tmp_path: Path) -> None:
    config, layout = resolved()
    plan = obtained(config, layout, tmp_path).plan
    path = tmp_path / default_path(config, plan).name
    path.write_text(plan.to_json(), encoding="utf-8")
    older = tmp_path / f"{config.name}-{config.gpus}gpus-older.json"
    older.write_text(plan.to_json(), encoding="utf-8")
    os.utime(older, (1, 1))
    (tmp_path / f"{config.name}-{config.gpus}gpus-zzz.json").write_text("no plan", encoding="utf-8")
    assert obtained(config, layout, tmp_path).path == path
    assert obtained(*resolved(mode="hosted"), tmp_path).path is None


def test_what_cannot_be_planned_is_told_as_the_planner_tells_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.c_max_mib"):
        obtain_plan(*resolved(c_max_mib=0.01), tmp_path)
    config, layout = resolved()
    small = replace(config, cluster=replace(config.cluster, memory_gib=0.51))
    with pytest.raises(DoesNotFit):
        obtain_plan(small, layout, tmp_path)


def test_the_header_names_the_plan_its_balance_and_its_file(written: Path, tmp_path: Path) -> None:
    config = sizes.run("tiny", 4, strategy="canzona", tp=2)
    config, layout = resolve(replace(config, engine=replace(config.engine, plan=str(written))))
    found = obtained(config.setup, layout, tmp_path)
    told = describe_plan(found, config)
    assert told.startswith(f"{found.plan.name}: load balance 1.")
    assert told.endswith(f"from {written}")
    assert "from" not in describe_plan(ObtainedPlan(plan=found.plan, path=None), config)
    labels = [label for label, _ in header_rows(config, layout, run_dir=tmp_path, plan=found)]
    assert "plan" in labels
    assert "plan" not in [label for label, _ in header_rows(config, layout, run_dir=tmp_path)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*fit.resolve(sizes.run("tiny", 8, strategy="canzona", tp=2).setup))


def test_equal_plans_have_no_difference(plan: Plan) -> None:
    assert first_difference(plan, Plan.from_content(plan.content())) is None


def test_what_plans_were_computed_from_comes_first(plan: Plan) -> None:
    other = make_plan(*fit.resolve(sizes.run("tiny", 4, strategy="canzona", tp=1).setup))
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
