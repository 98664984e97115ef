"""What a run's step was predicted to take: predicted.json, written by the launcher, shown beside what was measured."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.planner.plan import Plan
from canzona_cli.run.files import RunFiles

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PlannedEvent:
    """A stretch of one rank's planned time on one of its streams."""

    rank: int
    stream: str
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The content of predicted.json; see `canzona_cli.simulate.predict.Prediction`."""

    version: int
    strategy: str
    profile: str
    calibrated: bool
    mismatches: tuple[str, ...] = ()
    """Why a calibrated profile may not hold on this machine."""
    cores: int | None = None
    """Processor cores that the ranks of one machine share; None where each rank has a device of its own."""
    iteration_s: float
    optimizer_s: float
    phases: Mapping[str, float]
    load_balance: float
    memory_bytes: int
    events: tuple[PlannedEvent, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Everything but the events, which only a trace needs."""
        return {name: value for name, value in asdict(self).items() if name != "events"}


def planned_step(config: RunConfig, layout: Layout, plan: Plan | None) -> PlannedStep:
    """Simulate the step of a resolved run, on this machine's cores where its profile does not say how many there are.

    Args:
        plan: what canzona and asc execute; None for the others.
    """
    from canzona_cli.cluster.machine import profile_mismatches
    from canzona_cli.simulate.cores import with_cores
    from canzona_cli.simulate.predict import predict

    found = predict(config, layout, plan)
    return PlannedStep(
        version=VERSION,
        strategy=found.strategy,
        profile=found.profile,
        calibrated=found.calibrated,
        mismatches=profile_mismatches(config.cluster) if found.calibrated else (),
        cores=with_cores(config).cluster.cores if config.cluster.device == "cpu" else None,
        iteration_s=found.iteration_s,
        optimizer_s=found.optimizer_s,
        phases=dict(found.phases),
        load_balance=found.load_balance,
        memory_bytes=found.memory_bytes,
        events=tuple(PlannedEvent(**vars(event)) for event in found.events),
    )


def load_planned(run_dir: Path) -> PlannedStep | None:
    """A run's prediction; None where it has none, as runs of earlier versions.

    Raises:
        ConfigError: it is damaged or of another version; the problem's key is `RUN_DIR`.
    """
    from pydantic import TypeAdapter, ValidationError

    path = RunFiles(run_dir).predicted
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(run_dir, f"predicted.json cannot be read: {error}") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise _unreadable(run_dir, f"predicted.json has version {version}, this canzona reads version {VERSION}")
    try:
        return TypeAdapter(PlannedStep).validate_python(data)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors()[:5])
        raise _unreadable(run_dir, f"predicted.json is damaged: {places}") from None


def _unreadable(run_dir: Path, reason: str) -> ConfigError:
    fix = "what was measured is shown without the plan; `canzona plan` predicts again"
    return ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix))
