"""How long a run's step was predicted to take: predicted.json, shown next to the measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from canzona_cli.run.codec import load, plain
from canzona_cli.run.files import RunFiles
from canzona_cli.run.phases import Stream


@dataclass(frozen=True, kw_only=True)
class SimulatedEvent:
    """A stretch of one rank's time on one of its streams."""

    rank: int
    stream: Stream
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy's step on a cluster profile, in the words of the breakdown. Seconds and bytes."""

    VERSION: ClassVar[int] = 1

    strategy: str
    profile: str
    """Name of the cluster profile."""
    calibrated: bool
    """Whether that profile was measured by `canzona calibrate`."""
    mismatches: tuple[str, ...] = ()
    """Why a calibrated profile may not hold on this machine."""
    cores: int | None = None
    """Processor cores that the ranks of one machine share; None where each rank has a device of its own."""
    iteration_s: float
    optimizer_s: float
    """`StrategyResult.optimizer_s`."""
    phases: Mapping[str, float]
    """Mean over ranks; the phases of a step add up to `iteration_s`, totals are listed with them."""
    load_balance: float
    """Of matrix updates, max over mean of the ranks; 1.0 is perfect, and the value where there are none."""
    memory_bytes: int
    """Of the fullest rank."""
    events: tuple[SimulatedEvent, ...] = ()
    """Timelines of the slowest rank and of the one that has least to update."""

    def as_json(self) -> dict[str, object]:
        """Everything but the events, which only a trace needs."""
        return {name: value for name, value in plain(self).items() if name != "events"}


def load_prediction(run_dir: Path) -> Prediction | None:
    """A run's prediction; None where it has none, as runs of earlier versions.

    Raises:
        ConfigError: it is damaged or of another version; the problem's key is `RUN_DIR`.
    """
    fix = "the measurement is shown without the plan; `canzona plan` predicts again"
    try:
        return load(RunFiles(run_dir).predicted, Prediction, key="RUN_DIR", value=run_dir, fix=fix)
    except FileNotFoundError:
        return None
