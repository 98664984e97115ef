"""The step-time breakdown: where the time of one training step went, over all ranks, next to its prediction.

`breakdown.json` is written by the workers. Times are seconds; `min_s`, `mean_s`, `max_s` are over ranks, of
each rank's mean over the measured steps. Phases with `in_step` follow one another and add up to the step; the
others (`*_total`) count work that ran under them as well. `predicted.json` has the prediction; runs of
earlier versions lack it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from canzona_cli.config.schema import Device, Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.codec import load, plain
from canzona_cli.run.files import RunFiles
from canzona_cli.run.phases import COMMUNICATION, IN_STEP, PHASES, STREAMS, Interval, Stream
from canzona_cli.run.statistics import OverRanks
from canzona_cli.run.words import milliseconds


@dataclass(frozen=True, kw_only=True)
class SimulatedEvent:
    """A stretch of one rank's time on one of its streams."""

    rank: int
    stream: Stream
    phase: str
    start_s: float
    end_s: float


def streams_of(events: Sequence[SimulatedEvent]) -> Iterator[tuple[int, Stream, list[Interval]]]:
    """The events of each rank on each of its streams, where there are any."""
    for rank in dict.fromkeys(event.rank for event in events):
        for stream in STREAMS:
            mine = [event for event in events if (event.rank, event.stream) == (rank, stream)]
            if mine:
                yield rank, stream, [Interval(name=one.phase, start_s=one.start_s, end_s=one.end_s) for one in mine]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy's step on a cluster profile, in the words of the breakdown. Seconds and bytes."""

    VERSION: ClassVar[int] = 1

    strategy: str
    profile: str
    """Name of the cluster profile."""
    calibrated: bool
    """True for a profile that `canzona calibrate` measured."""
    mismatches: tuple[str, ...] = ()
    """Reasons why a calibrated profile may not hold on this machine."""
    cores: int | None = None
    """Processor cores that the ranks of one machine share; None where each rank has a device of its own."""
    iteration_s: float
    optimizer_s: float
    """`StrategyResult.optimizer_s`."""
    phases: Mapping[str, float]
    """Mean over ranks; the phases of a step add up to `iteration_s`, totals are listed with them."""
    load_balance: float
    """The ranks' matrix updates, max over mean; 1.0 is perfect, and the value where there are none."""
    memory_bytes: int
    """Bytes on the fullest rank."""
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


NEGLIGIBLE = 0.05
"""Share of the step: where no phase differs by more, the step is as planned."""
_APART = 1.25
"""A rank is named when its time is so many times the mean."""
_WAITS = (*COMMUNICATION, "norm_clip", "pipeline")
"""Phases in which ranks wait for the one that comes last, which itself waits least."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """The phase with the largest difference between measured and planned."""

    phase: str
    measured_s: float
    predicted_s: float
    text: str


def why(
    measured: Mapping[str, OverRanks], predicted: Mapping[str, float], ranks: Sequence[Mapping[str, float]] = ()
) -> Why | None:
    """Name the phase that differs most from its prediction; None without a measured step.

    Args:
        measured: by phase; `_total`s may be among them.
        predicted: seconds by phase, mean over ranks; a phase that is missing takes no time.
        ranks: each rank's seconds by phase; without them no rank is named.
    """
    took = {name: measured[name].mean_s if name in measured else 0.0 for name in IN_STEP}
    planned = {name: predicted.get(name, 0.0) for name in IN_STEP}
    step = sum(took.values())
    if step <= 0:
        return None
    worst = max(IN_STEP, key=lambda name: abs(took[name] - planned[name]))
    if abs(took[worst] - planned[worst]) <= NEGLIGIBLE * step:
        text = f"as planned: no phase differs by more than {100 * NEGLIGIBLE:.0f}% of the step"
    else:
        factor = f" ({took[worst] / planned[worst]:.2g} times)" if planned[worst] > 0 else ""
        text = f"{PHASES[worst].subject} took {milliseconds(took[worst])} ms, planned {milliseconds(planned[worst])} ms"
        text += factor + _rank(worst, [rank.get(worst, 0.0) for rank in ranks])
    return Why(phase=worst, measured_s=took[worst], predicted_s=planned[worst], text=text)


def _rank(phase: str, seconds: Sequence[float]) -> str:
    """The rank that stands apart in a phase; empty where none does."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    if mean <= 0:
        return ""
    if phase in _WAITS:
        least = min(range(len(seconds)), key=lambda rank: seconds[rank])
        return f"; rank {least} comes last, the others wait for it" if seconds[least] * _APART < mean else ""
    most = max(range(len(seconds)), key=lambda rank: seconds[rank])
    over = seconds[most] / mean
    return f"; rank {most} took {over:.2g} times the mean" if over > _APART else ""


NOTHING_S = 1e-6
"""Times below it have no relative error: nothing was done in them."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime(OverRanks):
    """One phase of the step."""

    share: float
    """`mean_s` over the step's `mean_s`."""
    in_step: bool = True
    """True for the phases that add up to the step."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's mean seconds per phase."""

    rank: int
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory over ranks, bytes."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class MeasuredBreakdown:
    """The content of breakdown.json."""

    VERSION: ClassVar[int] = 1

    strategy: str
    optimizer: str
    device: Device | None = None
    layout: Layout
    steps_measured: int
    steps_skipped: int
    """Warm-up steps at the start that were not measured."""
    steps_profiled: int = 0
    """Steps under torch's profiler, which slows them; not measured either."""
    step: OverRanks
    phases: Mapping[str, PhaseTime | None]
    """A phase that this strategy does not have is absent or null."""
    ranks: tuple[RankTimes, ...] = ()
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None = None
    """Model FLOP utilisation, 0 to 1: model FLOPs (no recomputation) over the profile's peak."""
    model_tflops_per_gpu: float | None = None
    peak_tflops_per_gpu: float | None = None
    """The cluster profile's bf16 peak, what `mfu` is a share of."""
    load_balance: Mapping[str, float | None] | None = None
    """The max over mean of the ranks' work, by phase; 1.0 is perfect."""
    peak_memory_bytes: PeakMemory | None = None

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds over ranks of the phases that there are."""
        return {name: phase.mean_s for name, phase in self.phases.items() if phase is not None}

    @property
    def in_step_share(self) -> float:
        """The sum of the step's phases as a share of it; 1.0 but for rounding."""
        return math.fsum(phase.share for phase in self.phases.values() if phase is not None and phase.in_step)


@dataclass(frozen=True, kw_only=True)
class Breakdown(MeasuredBreakdown):
    """A measured step next to its prediction."""

    planned: Prediction | None = None
    """The prediction; None where the run left none that can be read."""

    @property
    def why(self) -> Why | None:
        """The phase that differs most from the plan; None without a plan."""
        if self.planned is None:
            return None
        measured = {name: phase for name, phase in self.phases.items() if phase is not None}
        ranks = [times.phases for times in sorted(self.ranks, key=lambda times: times.rank)]
        return why(measured, self.planned.phases, ranks)

    def as_json(self) -> dict[str, object]:
        """The content of breakdown.json, the prediction, and why they differ; additions keep `version`."""
        planned, why = self.planned, self.why
        return {
            **plain(replace(self, planned=None)),
            "planned": None if planned is None else planned.as_json() | {"error": self._errors(planned)},
            "why": None if why is None else asdict(why),
        }

    def _errors(self, planned: Prediction) -> dict[str, float | None]:
        """Planned over measured mean, less 1, by phase and of the step."""
        errors = {
            name: relative_error(planned.phases.get(name), phase.mean_s)
            for name, phase in self.phases.items()
            if phase is not None
        }
        return {**errors, "step": relative_error(planned.iteration_s, self.step.mean_s)}


def relative_error(planned: float | None, measured: float) -> float | None:
    """Planned over measured, less 1: 0.1 is a plan 10% too long.
    None where either took no time to speak of."""
    if planned is None or measured < NOTHING_S or planned < NOTHING_S:
        return None
    return planned / measured - 1


def load_breakdown(run_dir: Path) -> Breakdown:
    """Read and check a run's breakdown.json, with its prediction where that can be read.

    Raises:
        ConfigError: it is missing, damaged, or of another version; the problem's key is `RUN_DIR`.
    """
    files = RunFiles(run_dir)
    fix = "the run's other files can still be read; train again for a new breakdown"
    try:
        measured = load(files.breakdown, MeasuredBreakdown, key="RUN_DIR", value=run_dir, fix=fix)
    except FileNotFoundError:
        reason = "there is no breakdown.json in it"
        fix = "it is written when training ends after the warm-up steps; give the directory of such a run"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix)) from None
    try:
        planned = load_prediction(run_dir)
    except ConfigError:  # `canzona report` notes it; the measurement stands without it
        planned = None
    return Breakdown(**vars(measured), planned=planned)
