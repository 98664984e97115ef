"""The prediction of a run is of the matrices that its strategy updates."""

from dataclasses import replace

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.update import algorithm_of, seconds
from canzona_cli.core.model.matrices import matrix_shapes
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Splitting
from canzona_cli.core.simulate.predict import predict, simulate_run
from canzona_cli.core.simulate.prediction import Prediction


def _predicted(optimizer: str, splitting: Splitting) -> tuple[Prediction, float]:
    """And the seconds of all updates of the matrices, which every rank of sc does."""
    overrides = ("recipe=tiny", "gpus=2", "parallel.tp=1", "parallel.pp=1", "engine=sc", "cluster.cores=2")
    run = compose_run([*overrides, f"optimizer={optimizer}"]).config
    run = replace(run, engine=replace(run.engine, splitting=splitting))
    config, layout = resolve(run)
    how = algorithm_of(config.setup)
    every = sum(seconds(how, rows, cols, config.cluster) for rows, cols in matrix_shapes(config.setup))
    return predict(config.setup, layout, None), config.model.num_layers * every


@pytest.mark.parametrize("splitting", ["fused", "qkv", "split", "per_head"])
@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_sc_by_the_engine_updates_what_was_asked_for(optimizer: str, splitting: Splitting) -> None:
    found, every = _predicted(optimizer, splitting)
    assert found.strategy == "sc"
    assert found.load_balance == pytest.approx(1.0)
    assert found.phases["matrix_update"] == pytest.approx(every)


def test_megatrons_sc_splits_q_k_and_v_at_most() -> None:
    updates = [_predicted("muon", splitting)[0].phases["matrix_update"] for splitting in ("qkv", "split", "per_head")]
    assert updates == [updates[0]] * 3


def test_what_whole_steps_took_scales_predictions_and_changes_no_plan() -> None:
    overrides = ["recipe=tiny", "gpus=4", "parallel.tp=2", "parallel.pp=1", "cluster.cores=8"]
    config, layout = resolve(compose_run(overrides).config)
    measured = replace(config, cluster=replace(config.cluster, cores=2, step_factors={"matrix_update": 2.0}))
    plan = make_plan(config.setup, layout)
    assert make_plan(measured.setup, layout).hash == plan.hash
    slow = replace(
        config, cluster=replace(config.cluster, step_factors={"matrix_update": 2.0, "megatron/exchange": 9.0})
    )
    one, two = predict(config.setup, layout, plan), predict(slow.setup, layout, plan)
    assert two.phases["matrix_update"] == pytest.approx(2 * one.phases["matrix_update"])
    assert two.phases["adamw_update"] == one.phases["adamw_update"]
    crowded = predict(replace(config, cluster=replace(config.cluster, cores=2)).setup, layout, plan)
    assert one.iteration_s < crowded.iteration_s


def test_megatrons_own_strategies_have_factors_of_their_own() -> None:
    plain = resolve(compose_run(["recipe=tiny", "gpus=2", "parallel.tp=2", "engine=sc", "cluster.cores=2"]).config)
    config, layout = plain
    factors = {"matrix_update": 5.0, "megatron/exchange": 3.0}
    slow = replace(config, cluster=replace(config.cluster, step_factors=factors))
    one, two = predict(config.setup, layout, None), predict(slow.setup, layout, None)
    assert two.phases["exchange"] == pytest.approx(3 * one.phases["exchange"])
    # A factor that is not Megatron's stands in where there is none.
    assert two.phases["matrix_update"] == pytest.approx(5 * one.phases["matrix_update"])


def test_who_sums_a_tied_embeddings_gradient_waits_there_for_the_other_end() -> None:
    """Not with the norm. Measured, of qwen3-mini on PP 2: 249 ms of reduction, 36 of norm and clip, mean over both."""
    found = []
    for tied in ("true", "false"):
        typed = ("recipe=tiny", "gpus=2", "parallel.pp=2", "parallel.vpp=1", "cluster.cores=2")
        config, where = resolve(compose_run([*typed, f"model.tied_embeddings={tied}"]).config)
        found.append(predict(config.setup, where, make_plan(config.setup, where)).phases)
    both, apart = found
    assert both["norm_clip"] < 0.5 * apart["norm_clip"]
    assert both["grad_reduce_total"] >= both["grad_reduce"] > apart["grad_reduce"]


def test_gradients_that_travel_are_clipped_on_their_way() -> None:
    """The copies that assemble fp32 gradients multiply them; bf16 takes a separate pass: 4 bytes of each element are
    moved for the norm, and 8 for the clip."""
    found = []
    for dtype in ("fp32", "bf16"):
        typed = ["recipe=8b", "gpus=4", "parallel.tp=2", "parallel.pp=1", f"engine.exchange_dtype={dtype}"]
        config, where = resolve(compose_run([*typed, "train.recompute=full", "cluster.memory_gib=1000"]).config)
        found.append(simulate_run(config.setup, where, make_plan(config.setup, where)).phases["norm_clip"])
    assert 2.0 < found[1] / found[0] < 3.0
