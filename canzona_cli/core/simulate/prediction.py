"""The prediction of a step that a run is compared with."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from canzona_cli.core.phases import Stream


@dataclass(frozen=True, kw_only=True)
class SimulatedEvent:
    """An interval of simulated time on one stream of a rank."""

    rank: int
    stream: Stream
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of a step, by phase, for one strategy and one cluster profile. Times are in
    seconds."""

    VERSION: ClassVar[int] = 1

    strategy: str
    profile: str
    """The name of the cluster profile."""
    calibrated: bool
    """True for a profile that `canzona calibrate` wrote."""
    mismatches: tuple[str, ...] = ()
    """The reasons why a calibrated profile may not match this machine."""
    cores: int | None = None
    """The CPU cores that the ranks of one machine share; None if each rank has its own device."""
    iteration_s: float
    optimizer_s: float
    """The time of the optimizer step, `StrategyResult.optimizer_s`."""
    phases: Mapping[str, float]
    """The mean seconds over ranks by phase. The phases of the step add up to `iteration_s`; the `*_total`s
    overlap with them."""
    load_balance: float
    """The maximum over the mean of the ranks' matrix update times. 1.0 is perfect, and is also the value
    without matrix updates."""
    memory_bytes: int
    """The memory in bytes of the rank that needs the most."""
    events: tuple[SimulatedEvent, ...] = ()
    """The timelines of the slowest rank and of the rank whose updates end first."""

    def as_json(self) -> dict[str, object]:
        """Returns all fields except the events, which only the timelines of pages need."""
        values = {"version": self.VERSION, **asdict(self)}
        return {name: value for name, value in values.items() if name != "events"}
