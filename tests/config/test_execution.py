"""The execution of a run, for every optimizer and strategy."""

from dataclasses import replace

import pytest

from canzona_cli.core.setup import (
    AdamWConfig,
    CustomConfig,
    Execution,
    MuonConfig,
    OptimizerConfig,
    ShampooConfig,
    Strategy,
)
from canzona_cli.core.setup.execution import AnyStrategy, strategy_of, with_strategy
from tests import sizes

MUON = MuonConfig(name="muon", lr=1e-3)
OTHERS = (ShampooConfig(name="shampoo", lr=1e-3), CustomConfig(name="custom", lr=1e-3, source="a.py:A"))


@pytest.mark.parametrize(
    ("optimizer", "strategy", "execution"),
    [
        (MUON, "canzona", Execution.PLANNED),
        (MUON, "paper", Execution.PLANNED),
        (MUON, "asc", Execution.PLANNED),
        (MUON, "layerwise", Execution.LAYERWISE),
        (MUON, "sc", Execution.MEGATRON_SC),
        *((other, "canzona", Execution.PLANNED) for other in OTHERS),
        *((other, "sc", Execution.REDUNDANT) for other in OTHERS),
        (AdamWConfig(name="adamw", lr=1e-3), "canzona", Execution.ADAMW),
        (AdamWConfig(name="adamw", lr=1e-3), "sc", Execution.ADAMW),
    ],
)
def test_optimizer_and_strategy_decide(optimizer: OptimizerConfig, strategy: Strategy, execution: Execution) -> None:
    config = replace(sizes.run("tiny", 4, strategy=strategy), optimizer=optimizer)
    assert config.execution is execution
    assert strategy_of(config.setup) == ("adamw" if execution is Execution.ADAMW else strategy)


@pytest.mark.parametrize("strategy", ["canzona", "paper", "asc", "layerwise", "sc", "adamw"])
def test_a_run_under_another_strategy_keeps_its_rates(strategy: AnyStrategy) -> None:
    run = sizes.run("tiny", 4, strategy="canzona")
    run = replace(run, engine=replace(run.engine, mode="hosted", reduction="ring", plan="a.json"))
    changed = with_strategy(run.setup, strategy)
    assert strategy_of(changed) == strategy
    assert (changed.optimizer.lr, changed.optimizer.beta2) == (run.optimizer.lr, run.optimizer.beta2)
    if strategy == "canzona":
        assert changed == run.setup
    elif strategy in ("paper", "asc"):
        assert (changed.engine.plan, changed.engine.reduction) == (None, "ring")
