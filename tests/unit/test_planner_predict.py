"""The prediction of a run is of the matrices that its strategy updates."""

import pytest

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Splitting
from canzona_cli.planner.cost import algorithm, seconds
from canzona_cli.planner.memory import matrix_shapes
from canzona_cli.planner.predict import Prediction, predict


def _predicted(optimizer: str, splitting: Splitting) -> tuple[Prediction, float]:
    """And the seconds of all updates of the matrices, which every rank of sc does."""
    overrides = ("recipe=tiny", "gpus=2", "parallel.tp=1", "parallel.pp=1", "engine=sc", "cluster.cores=2")
    run = compose_run([*overrides, f"optimizer={optimizer}", f"engine.splitting={splitting}"]).config
    config, layout = resolve(run)
    how = algorithm(config)
    every = sum(seconds(how, rows, cols, config.cluster) for rows, cols in matrix_shapes(config))
    return predict(config, layout, None), config.model.num_layers * every


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
