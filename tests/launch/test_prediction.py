"""The predicted step time is written before a run starts, for every strategy, in the breakdown's words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.core.phases import IN_STEP, LABELS
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import AdamWConfig, Execution, MuonConfig, OptimizerConfig, Strategy
from canzona_cli.launch.run_dir import predict_here
from canzona_cli.records.breakdown import load_prediction
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles
from tests.records.runs import CONFIG, LAYOUT

MUON, ADAMW = MuonConfig(name="muon", lr=3e-3), AdamWConfig(name="adamw", lr=3e-3)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("canzona", MUON), ("asc", MUON), ("layerwise", MUON), ("sc", MUON), ("canzona", ADAMW)],
    ids=["canzona", "asc", "layerwise", "sc", "adamw"],
)
def test_every_strategy_has_a_prediction_that_adds_up_and_is_read_as_written(
    tmp_path: Path, strategy: Strategy, optimizer: OptimizerConfig
) -> None:
    config = replace(CONFIG, optimizer=optimizer, engine=replace(CONFIG.engine, strategy=strategy))
    planned = predict_here(
        config, LAYOUT, make_plan(config.setup, LAYOUT) if config.execution is Execution.PLANNED else None
    )
    assert planned.strategy == ("adamw" if optimizer is ADAMW else strategy)
    assert sum(planned.phases.get(name, 0.0) for name in IN_STEP) == pytest.approx(planned.iteration_s)
    assert set(planned.phases) <= set(LABELS)
    assert 0 < planned.optimizer_s < planned.iteration_s
    assert planned.events
    assert planned.calibrated is False
    assert planned.cores
    save(RunFiles(tmp_path).predicted, planned)
    assert load_prediction(tmp_path) == planned
    json.dumps(planned.as_json())
