"""Rows that head the reports of a run."""

from dataclasses import replace

import pytest

from canzona_cli.cli.outlook import outlook
from canzona_cli.cli.views.header import describe_plan, outlook_rows
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan_file import ObtainedPlan


@pytest.mark.parametrize(
    ("price", "end"), [(None, ": 7,200 GPU hours"), (2.5, ": 7,200 GPU hours, which cost 18,000 at 2.5 each")]
)
def test_a_run_on_gpus_names_its_hours_and_with_a_price_its_cost(price: float | None, end: str) -> None:
    config, layout = resolve(compose_run(["recipe=qwen3-8b", "gpus=16", "train.steps=1000"]).config)
    config = replace(config, cluster=replace(config.cluster, gpu_hour_price=price))
    training = dict(outlook_rows(config, outlook(config, layout, iteration_s=1620.0)))["training"]
    assert training.endswith(end)


@pytest.mark.parametrize(("measured_on", "known"), [({}, False), ({"cores": 2}, True)])
def test_an_unmeasured_cpu_profile_predicts_no_times(measured_on: dict[str, str | int | float], known: bool) -> None:
    config, layout = resolve(compose_run(["recipe=qwen3-tiny", "gpus=2"]).config)
    config = replace(config, cluster=replace(config.cluster, measured_on=measured_on))
    rows = dict(outlook_rows(config, outlook(config, layout, iteration_s=1.0)))
    assert ("speed" in rows, "canzona calibrate" in rows["training"]) == (known, not known)
    found = ObtainedPlan(plan=make_plan(config.setup, layout), path=None)
    assert ("predicted" in describe_plan(found, config)) == known
