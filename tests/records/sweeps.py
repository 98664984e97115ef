"""Runs of a sweep on disk, with the losses that a test gives them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import OPTIMIZERS, OptimizerConfig
from canzona_cli.records.codec import save
from canzona_cli.records.compare import load_runs
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.groups import Ranking, rank
from canzona_cli.records.records import RunResult, RunStatus, StepMetrics, ValidationLoss
from canzona_cli.records.statistics import OverRanks
from tests.records.runs import CONFIG

BREAKDOWN = Path(__file__).parents[1] / "cli" / "views" / "breakdown.json"
TOKENS = 4096
"""The tokens of a step."""


def configured(
    optimizer: str = "muon", *, lr: float = 1e-3, adamw_lr: float | None = None, seed: int = 1, **settings: object
) -> RunConfig:
    """Returns the settings of a run; `settings` are those of its optimizer."""
    settings_of = cast("Callable[..., OptimizerConfig]", OPTIMIZERS[optimizer])
    rule = settings_of(name=optimizer, lr=lr, adamw_lr=adamw_lr, **settings)
    return replace(CONFIG, optimizer=rule, train=replace(CONFIG.train, steps=120, seed=seed))


def add_run(
    root: Path,
    config: RunConfig,
    validations: Mapping[int, float],
    *,
    status: RunStatus | None = "done",
    training: Mapping[int, float] | None = None,
    step_s: float | None = None,
    tokens: Callable[[int], int] = lambda step: step * TOKENS,
    seconds: Callable[[int], float | None] = lambda _: None,
) -> Path:
    """Writes the files of a run.

    Args:
        validations: the validation losses by step.
        status: the status of a run that has ended; None for one that is still running.
        training: the training losses by step; None for losses that are 0.1 below those of validation.
        step_s: the seconds of a step in the run's breakdown; None for a run without a breakdown.
        tokens: the tokens trained on by step.
        seconds: the seconds of a step in the run's metrics.
    """
    files = RunFiles(root)
    root.mkdir(parents=True)
    files.config.write_text(dump_resolved(replace(config, run=replace(config.run, dir=str(root)))))
    losses = {step: loss - 0.1 for step, loss in validations.items() if step} if training is None else training
    for step, loss in losses.items():
        line = StepMetrics(step=step, loss=loss, tokens=tokens(step), step_s=seconds(step))
        append_json_line(files.metrics, asdict(line))
    for step, loss in validations.items():
        append_json_line(files.validation, asdict(ValidationLoss(step=step, loss=loss)))
    if step_s is not None:
        content = json.loads(BREAKDOWN.read_text()) | {"step": asdict(OverRanks.of([step_s]))}
        files.breakdown.write_text(json.dumps(content))
    if status is not None:
        save(files.result, RunResult(status=status, exit_code=0 if status == "done" else 70, step=max(losses)))
    return root


def ending_at(loss: float) -> dict[int, float]:
    """Returns validation losses that fall to `loss` at step 120."""
    return {0: loss + 4, 40: loss + 0.6, 80: loss + 0.2, 120: loss}


def add_sweep(root: Path, losses: Mapping[tuple[str, float], Mapping[int, float]]) -> Path:
    """Writes a sweep of optimizers, rates and seeds. Returns its directory.

    Args:
        losses: for each optimizer and rate, the last validation loss by seed.
    """
    for (optimizer, lr), by_seed in losses.items():
        for seed, loss in by_seed.items():
            name = f"optimizer={optimizer}_lr={lr:g}_seed={seed}"
            add_run(root / name, configured(optimizer, lr=lr, seed=seed), ending_at(loss))
    return root


def ranked(root: Path) -> Ranking:
    return rank(load_runs([root]))
