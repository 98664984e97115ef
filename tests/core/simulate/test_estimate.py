"""The plain estimate is near the simulated step, so that it can say which layouts are worth a simulation."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import fill
from canzona_cli.core.planner import make
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Execution
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.simulate.estimate import estimated_step_seconds, flex_speedup, outlined_step_seconds
from canzona_cli.core.simulate.predict import simulate_run
from canzona_cli.core.simulate.search import candidates
from tests.sizes import run


@pytest.mark.parametrize("strategy", ["canzona", "asc", "layerwise", "sc", "adamw"])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_it_is_within_a_tenth_of_the_step(tp: int, strategy: AnyStrategy) -> None:
    config = run("8b", 64, strategy=strategy, tp=tp, pp=1, micro_batch_size=1, recompute="full")
    layout = next(candidate.layout for candidate in candidates(config.setup) if candidate.layout.cp == 1)
    resolved = fill(config, layout)
    plan = make_plan(resolved.setup, layout) if resolved.execution is Execution.PLANNED else None
    simulated_s = simulate_run(resolved.setup, layout, plan).iteration_s
    assert estimated_step_seconds(config.setup, layout) == pytest.approx(simulated_s, rel=0.1)


def test_the_outline_of_a_layout_is_part_of_its_plan() -> None:
    """What a search computes about a layout is not computed again when the layout, filled in, is planned."""
    config = run("8b", 64, strategy="canzona")
    layout = next(candidate.layout for candidate in candidates(config.setup) if candidate.layout.cp == 1)
    outlined_step_seconds(config.setup, layout)
    priced = make._prices.cache_info().misses
    make.plan_unbounded(fill(config, layout).setup, layout)
    assert make._prices.cache_info().misses == priced


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("parallel.tp=1", "parallel.pp=1", "parallel.ep=8"), marks=pytest.mark.sweep),
        pytest.param(("parallel.tp=2", "parallel.pp=2", "parallel.vpp=8", "parallel.ep=8"), marks=pytest.mark.sweep),
        # Tokens travel over the network, under gradients and weights.
        ("parallel.tp=2", "parallel.pp=1", "parallel.ep=32"),
        # The first model chunk has one layer and the others two.
        ("parallel.tp=2", "parallel.pp=2", "parallel.vpp=12", "parallel.ep=8", "model.num_layers=46"),
    ],
)
def test_it_knows_what_experts_traffic_adds_to_a_step(mesh: tuple[str, ...]) -> None:
    """The traffic takes longer on 256 GPUs than the passes it overlaps with."""
    given = ("recipe=qwen3-30b-a3b", "gpus=256", "cluster=h100-80g", "parallel.cp=1", "train.recompute=none", *mesh)
    config = compose_run([*given, "train.micro_batch_size=1"]).config
    (candidate,) = candidates(config.setup)
    resolved = fill(config, candidate.layout)
    simulated_s = simulate_run(
        resolved.setup, candidate.layout, make_plan(resolved.setup, candidate.layout)
    ).iteration_s
    assert 0.94 * simulated_s <= estimated_step_seconds(config.setup, candidate.layout) <= 1.01 * simulated_s


def test_the_gain_of_flex_is_about_that_of_the_simulated_step() -> None:
    given = ("recipe=qwen3-30b-a3b", "gpus=64", "optimizer=adamw", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1")
    steps = []
    for dispatcher in ("alltoall", "flex"):
        layout = ("parallel.ep=8", "train.micro_batch_size=1", "train.recompute=none")
        config = compose_run([*given, *layout, f"parallel.dispatcher={dispatcher}"], training=False).config
        (candidate,) = candidates(config.setup)
        steps.append(simulate_run(fill(config, candidate.layout).setup, candidate.layout, None).iteration_s)
        assert flex_speedup(config.setup, candidate.layout) is None, "the user has chosen"
    open_config = compose_run([*given, *layout], training=False).config
    speedup = flex_speedup(open_config.setup, candidate.layout)
    assert speedup is not None
    assert speedup == pytest.approx(steps[0] / steps[1], rel=0.02)
    assert speedup > 1.05
