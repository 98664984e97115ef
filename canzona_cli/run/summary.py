"""What a run directory tells afterwards: how it ended, the first error, the loss, the breakdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, Problem
from canzona_cli.run.breakdown import Breakdown, load_breakdown
from canzona_cli.run.codec import load_if_sound, read_lines
from canzona_cli.run.corpus import PreparedCorpus, Supply, supply
from canzona_cli.run.files import RunFiles, sweep_root
from canzona_cli.run.goodput import (
    Goodput,
    earlier_events,
    events_of,
    goodput_of,
    time_in_launches,
)
from canzona_cli.run.prediction import load_prediction
from canzona_cli.run.records import (
    Event,
    RankError,
    RankResult,
    RunResult,
    StepMetrics,
    ValidationLoss,
    describe,
)
from canzona_cli.run.words import plural

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything `canzona report` shows; see `as_json` for the stable machine-readable form."""

    run_dir: Path
    status: str
    """done, failed, diverged, interrupted, or unfinished when there is no result.json (still going, or killed)."""
    exit_code: int | None
    message: str
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of every logged step with a finite loss."""
    metrics: tuple[StepMetrics, ...] = ()
    """Every logged step."""
    events: tuple[Event, ...] = ()
    """Of all launches."""
    step: int
    """The last step known."""
    validations: tuple[tuple[int, float | None], ...]
    """(step, loss); None where it was not finite."""
    set_validations: Mapping[str, tuple[tuple[int, float | None], ...]]
    """Of a blend, the same of each set by its name."""
    skipped: int
    """Steps that changed nothing because their gradients were not finite."""
    fallbacks: int
    """Matrix updates that were replaced by what their optimizer does when it fails."""
    elapsed_s: float | None
    """From the first to the last record of every launch; what lies between launches is no training."""
    errors: tuple[RankResult, ...]
    """In the order in which they happened."""
    breakdown: Breakdown | None
    config: RunConfig | None
    go_on: str | None = None
    """What to type to go on with it."""
    restarts: int = 0
    """How often its last launch had started it again."""
    goodput: Goodput | None = None
    """Over all launches in the directory; None before the first step."""
    supply: Supply | None = None
    """The tokens that the whole run wants, and those that there are; None where that is not known."""
    warnings: tuple[str, ...] = field(default=())
    """The warnings it gave while it ran: slow ranks, spikes of the loss, saves that failed."""
    notes: tuple[str, ...] = field(default=())
    """What is missing or damaged, and why that is so."""

    @property
    def name(self) -> str | None:
        return None if self.config is None else self.config.name

    @property
    def steps_planned(self) -> int | None:
        return None if self.config is None else self.config.train.steps

    @property
    def best_validation(self) -> float | None:
        """The lowest; None where there is none."""
        return min((loss for _, loss in self.validations if loss is not None), default=None)

    def as_json(self) -> dict[str, object]:
        """The stable form of `canzona report --json`; additions keep `version`, anything else raises it."""
        alike = ("name", "status", "exit_code", "message", "step", "steps_planned", "elapsed_s", "skipped", "fallbacks")
        return {
            "version": VERSION,
            "run_dir": str(self.run_dir),
            **{field: getattr(self, field) for field in alike},
            "restarts": self.restarts,
            "go_on": self.go_on,
            "goodput": None if self.goodput is None else self.goodput.as_json(),
            "epochs": None if self.supply is None else self.supply.epochs,
            "epochs_by_set": {name: each.epochs for name, each in (self.supply.sets if self.supply else {}).items()},
            "loss": _ends(self.losses),
            "validation": _ends(self.validations),
            "validation_by_set": {name: _ends(losses) for name, losses in self.set_validations.items()},
            "errors": [_error_json(result) for result in self.errors],
            "breakdown": None if self.breakdown is None else self.breakdown.as_json(),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def load_summary(run_dir: Path) -> RunSummary:
    """Read whatever a run left, finished or not.

    Raises:
        ConfigError: there is no such directory, or nothing of a run lies in it; the problem's key is `RUN_DIR`.
    """
    files = RunFiles(run_dir)
    known = (files.config, files.result, files.metrics, files.events, files.breakdown, files.claim)
    if not run_dir.is_dir() or not any(path.exists() for path in known):
        reason = "there is no run in this directory" if run_dir.is_dir() else "there is no such directory"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=_suggest(run_dir)))
    notes: list[str] = []
    config = _config(files, notes)
    metrics = _lines(files.metrics, StepMetrics, notes)
    validation = _lines(files.validation, ValidationLoss, notes)
    result = load_if_sound(files.result, RunResult)
    if result is None:
        notes.append("there is no result.json: the run is still going, or it was killed before it could write one")
    try:
        breakdown = load_breakdown(run_dir)
    except ConfigError as error:
        breakdown = None
        notes += [f"no breakdown: {problem.reason}" for problem in error.problems]
    try:
        load_prediction(run_dir)
    except ConfigError as error:
        notes += [f"no plan beside it: {problem.reason}" for problem in error.problems]
    events = events_of(files)
    everything = [*earlier_events(files), *events]
    return RunSummary(
        run_dir=run_dir,
        status="unfinished" if result is None else result.status,
        exit_code=None if result is None else result.exit_code,
        message="" if result is None else result.message,
        metrics=tuple(metrics),
        events=tuple(everything),
        losses=tuple((line.step, line.loss) for line in metrics if line.loss is not None),
        step=max([0 if result is None else result.step, *(line.step for line in metrics)]),
        validations=tuple((line.step, line.loss) for line in validation),
        set_validations={
            name: tuple((line.step, line.sets[name]) for line in validation if name in line.sets)
            for name in dict.fromkeys(name for line in validation for name in line.sets)
        },
        skipped=max((line.skipped for line in metrics), default=0),
        fallbacks=max((line.fallbacks for line in metrics), default=0),
        elapsed_s=time_in_launches((*metrics, *validation, *events)),
        errors=_errors(files),
        breakdown=breakdown,
        config=config,
        go_on=None if result is None else result.go_on,
        restarts=0 if result is None else result.restarts,
        goodput=goodput_of(files, everything),
        supply=_supply(files, config),
        warnings=tuple(note.text for event in events if (note := describe(event)) is not None and note.warning),
        notes=tuple(notes),
    )


def _supply(files: RunFiles, config: RunConfig | None) -> Supply | None:
    corpus, layout = load_if_sound(files.corpus, PreparedCorpus), load_if_sound(files.layout, Layout)
    return None if config is None or corpus is None or layout is None else supply(config, layout, corpus)


def _config(files: RunFiles, notes: list[str]) -> RunConfig | None:
    from canzona_cli.config.compose import load_resolved

    try:
        return load_resolved(files.config)
    except (CanzonaError, OSError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return None


def _lines[T](path: Path, kind: type[T], notes: list[str]) -> list[T]:
    """The records of a .jsonl file; a line cut short (the run was killed in it) is left out and noted."""
    found, damaged = read_lines(path, kind)
    if damaged:
        notes.append(f"{path.name}: {plural(damaged, 'damaged line')} left out")
    return found


def _errors(files: RunFiles) -> tuple[RankResult, ...]:
    """Ranks that failed, in the order in which they did: the first is most likely the cause of the others."""
    results = [load_if_sound(path, RankResult) for path in sorted(files.ranks.glob("rank-*.json"))]
    failed = [result for result in results if result is not None and result.error is not None]
    return tuple(sorted(failed, key=lambda result: (result.time or math.inf, result.rank)))


def newest_run(root: Path) -> Path | None:
    """The run directory below `root` that was started last, runs of sweeps among them; None without one."""
    try:
        below = [*root.iterdir(), *root.glob(f"{sweep_root('', '*')}/*")]
        runs = [path for path in below if RunFiles(path).config.exists()]
    except OSError:
        return None
    return max(runs, key=lambda path: RunFiles(path).config.stat().st_mtime, default=None)


def _error_json(result: RankResult) -> dict[str, object]:
    error = result.error or RankError()
    words = {field: getattr(error, field) for field in ("type", "message", "traceback")}
    return {"rank": result.rank, "time": result.time, **words}


def _ends(losses: Sequence[tuple[int, float | None]]) -> dict[str, object] | None:
    """The first and the last; None where there are none."""
    ends = {"first": losses[:1], "last": losses[-1:]}
    return {name: {"step": step, "loss": loss} for name, [(step, loss)] in ends.items()} if losses else None


def _suggest(run_dir: Path) -> str:
    """The newest run nearby, if there is one."""
    for root in (run_dir, run_dir.parent, Path("runs")):
        if (found := newest_run(root)) is not None:
            return f"the newest run near there is {found}"
    return "give the directory that `canzona train` named as the run's"
