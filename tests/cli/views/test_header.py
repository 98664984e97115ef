"""Rows that head the reports of a run."""

from dataclasses import replace

import pytest

from canzona_cli.cli.views.header import describe_plan, header_rows, outlook, outlook_rows
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan_file import ObtainedPlan


def test_a_run_on_gpus_names_its_hours() -> None:
    config, layout = resolve(compose_run(["recipe=qwen3-8b", "gpus=16", "train.steps=1000"]).config)
    training = dict(outlook_rows(config, outlook(config, layout, iteration_s=1620.0)))["training"]
    assert training.endswith(": 7,200 GPU hours")


@pytest.mark.parametrize(("measured_on", "known"), [({}, False), ({"cores": 2}, True)])
def test_an_unmeasured_cpu_profile_predicts_no_times(measured_on: dict[str, str | int | float], known: bool) -> None:
    config, layout = resolve(compose_run(["recipe=qwen3-tiny", "gpus=2"]).config)
    config = replace(config, cluster=replace(config.cluster, measured_on=measured_on))
    rows = dict(outlook_rows(config, outlook(config, layout, iteration_s=1.0)))
    assert ("speed" in rows, "canzona calibrate" in rows["training"]) == (known, not known)
    found = ObtainedPlan(plan=make_plan(config.setup, layout), path=None)
    assert ("predicted" in describe_plan(found, config)) == known


def test_parts_of_gpt2_are_named() -> None:
    parts = ("model.layernorm=true", "model.biases=true", "model.gated=false", "model.positions=256")
    for given in ((), parts[2:], parts):
        run = resolve(compose_run(["recipe=llama3-tiny", "gpus=1", *given]).config)
        words = {"gated": "GELU", "layernorm": "LayerNorm", "biases": "biases", "positions": "256 learned positions"}
        row = dict(header_rows(*run))["recipe"]
        assert [name for name, text in words.items() if text in row] == [*run[0].model.parts_of_gpt2]
