"""The breakdown of a step's time by phase, over all ranks, next to its prediction.

The workers write `breakdown.json`. Times are in seconds. Each rank contributes its mean over the measured
steps; `min_s`, `mean_s` and `max_s` are the minimum, mean and maximum over ranks. Phases with `in_step`
follow one another and add up to the step. The other phases (`*_total`) are the full time of a kind of
communication, including the part that was overlapped. `predicted.json` has the prediction; runs of earlier
versions of canzona do not have this file.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.phases import COMMUNICATION, IN_STEP, PHASES, STREAMS, Interval, Stream
from canzona_cli.core.setup import Device, Layout
from canzona_cli.core.simulate.prediction import Prediction, SimulatedEvent
from canzona_cli.records.codec import load, load_if_valid, record_dict
from canzona_cli.records.files import RunFiles
from canzona_cli.records.statistics import OverRanks
from canzona_cli.records.words import milliseconds


def streams_of(events: Sequence[SimulatedEvent]) -> Iterator[tuple[int, Stream, list[Interval]]]:
    """Groups events: yields a rank, one of its streams, and the events of that stream as intervals."""
    for rank in dict.fromkeys(event.rank for event in events):
        for stream in STREAMS:
            intervals = [
                Interval(name=event.phase, start_s=event.start_s, end_s=event.end_s)
                for event in events
                if (event.rank, event.stream) == (rank, stream)
            ]
            if intervals:
                yield rank, stream, intervals


CALIBRATE = "run `canzona calibrate` on this machine to compare the step with its plan"
"""The sentence shown instead of predictions that do not describe the machine."""


def describes_machine(device: Device | None, *, calibrated: bool) -> bool:
    """Returns True if a cluster profile's predicted times can be compared with times measured on a device.

    An uncalibrated CPU profile describes no real machine, so reports do not show its times beside measured
    ones.
    """
    return calibrated or device == "cuda"


def load_prediction(run_dir: Path) -> Prediction | None:
    """Loads the prediction of a run; returns None if the run has none.

    Raises:
        ConfigError: the file is damaged or of another version; the problem's key is `RUN_DIR`.
    """
    fix = "the measurement is shown without the prediction; `canzona plan` predicts again"
    try:
        return load(RunFiles(run_dir).predicted, Prediction, key="RUN_DIR", value=run_dir, fix=fix)
    except FileNotFoundError:
        return None


NEGLIGIBLE = 0.05
"""The largest difference between a phase and its prediction, as a share of the step, that is still reported
as planned."""
_OUTLIER_FACTOR = 1.25
"""The factor between a rank's time and the mean above which a report names the rank."""
_WAITS = (*COMMUNICATION, "norm_clip", "pipeline", "dispatch")
"""The phases in which ranks wait for the last rank to arrive. That rank spends the least time in them."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """The phase with the largest difference between measured and predicted time, and a sentence that explains
    it."""

    phase: str
    measured_s: float
    predicted_s: float
    text: str


def why(
    measured: Mapping[str, OverRanks], predicted: Mapping[str, float], ranks: Sequence[Mapping[str, float]] = ()
) -> Why | None:
    """Returns the phase that differs most from its prediction; None if no time was measured.

    Args:
        measured: times by phase; `*_total`s are ignored.
        predicted: mean seconds over ranks by phase; a missing phase is treated as 0.
        ranks: each rank's seconds by phase, in rank order; if empty, no rank is named.
    """
    means = {name: measured[name].mean_s if name in measured else 0.0 for name in IN_STEP}
    planned = {name: predicted.get(name, 0.0) for name in IN_STEP}
    step_s = sum(means.values())
    if step_s <= 0:
        return None
    worst = max(IN_STEP, key=lambda name: abs(means[name] - planned[name]))
    measured_s, predicted_s = means[worst], planned[worst]
    if abs(measured_s - predicted_s) <= NEGLIGIBLE * step_s:
        text = f"as planned: no phase differs by more than {100 * NEGLIGIBLE:.0f}% of the step"
    else:
        factor = f" ({measured_s / predicted_s:.2g} times)" if predicted_s > 0 else ""
        text = f"{PHASES[worst].subject} took {milliseconds(measured_s)} ms, planned {milliseconds(predicted_s)} ms"
        text += factor + _outlier(worst, [rank.get(worst, 0.0) for rank in ranks])
    return Why(phase=worst, measured_s=measured_s, predicted_s=predicted_s, text=text)


def _outlier(phase: str, seconds: Sequence[float]) -> str:
    """Describes the rank whose seconds in a phase stand out; returns an empty text if none do."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    if mean <= 0:
        return ""
    if phase in _WAITS:
        last_rank = min(range(len(seconds)), key=lambda rank: seconds[rank])
        is_outlier = seconds[last_rank] * _OUTLIER_FACTOR < mean
        return f"; rank {last_rank} arrives last, and the others wait for it" if is_outlier else ""
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    factor = seconds[slowest] / mean
    return f"; rank {slowest} took {factor:.2g} times the mean" if factor > _OUTLIER_FACTOR else ""


NOTHING_S = 1e-6
"""The number of seconds below which a time is treated as zero and gets no relative error."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime(OverRanks):
    """The time of one phase of the step."""

    share: float
    """The phase's `mean_s` over the step's `mean_s`."""
    in_step: bool = True
    """True for phases that add up to the step; False for `*_total`s."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """The mean seconds of one rank by phase."""

    rank: int
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peak memory in bytes, over ranks."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class MeasuredBreakdown:
    """The contents of breakdown.json."""

    VERSION: ClassVar[int] = 1

    strategy: str
    optimizer: str
    device: Device | None = None
    layout: Layout
    steps_measured: int
    steps_skipped: int
    """The number of steps at the start that were not measured: those of the warm-up, and of a batch ramp-up."""
    steps_profiled: int = 0
    """The number of steps under torch's profiler. They were not measured either, because it slows them down."""
    step: OverRanks
    phases: Mapping[str, PhaseTime | None]
    """The time of each phase; a phase that this strategy does not have is absent or null."""
    ranks: tuple[RankTimes, ...] = ()
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None = None
    """The model FLOP utilisation, 0 to 1: model FLOPs (without recomputation) over the profile's peak."""
    model_tflops_per_gpu: float | None = None
    peak_tflops_per_gpu: float | None = None
    """The bf16 peak of the cluster profile, the denominator of `mfu`."""
    load_balance: Mapping[str, float | None] | None = None
    """The maximum over the mean of the ranks' work, by phase; 1.0 is perfect."""
    peak_memory_bytes: PeakMemory | None = None

    @property
    def means(self) -> dict[str, float]:
        """The mean seconds over ranks of each phase that the strategy has."""
        return {name: phase.mean_s for name, phase in self.phases.items() if phase is not None}

    @property
    def in_step_share(self) -> float:
        """The sum of the in-step phases as a share of the step; 1.0 apart from rounding."""
        return math.fsum(phase.share for phase in self.phases.values() if phase is not None and phase.in_step)


@dataclass(frozen=True, kw_only=True)
class Breakdown(MeasuredBreakdown):
    """The breakdown of a measured step, and its prediction."""

    planned: Prediction | None = None
    """The prediction; None if the run has no readable prediction."""

    @property
    def shown_plan(self) -> Prediction | None:
        """The prediction; None if there is none, or if its times do not describe this machine."""
        if self.planned is None or not describes_machine(self.device, calibrated=self.planned.calibrated):
            return None
        return self.planned

    @property
    def why(self) -> Why | None:
        """The phase that differs most from the prediction; None without a prediction."""
        if self.planned is None:
            return None
        measured = {name: phase for name, phase in self.phases.items() if phase is not None}
        ranks = [times.phases for times in sorted(self.ranks, key=lambda times: times.rank)]
        return why(measured, self.planned.phases, ranks)

    def as_json(self) -> dict[str, object]:
        """Returns the contents of breakdown.json, the prediction, and an explanation of their difference. New
        keys do not raise `version`."""
        planned, why = self.planned, self.why
        return {
            **record_dict(replace(self, planned=None)),
            "planned": None if planned is None else planned.as_json() | {"error": self._errors(planned)},
            "why": None if why is None else asdict(why),
        }

    def _errors(self, planned: Prediction) -> dict[str, float | None]:
        """Returns the prediction's relative error for each measured phase and, under `step`, for the whole
        step."""
        errors = {
            name: relative_error(planned.phases.get(name), phase.mean_s)
            for name, phase in self.phases.items()
            if phase is not None
        }
        return {**errors, "step": relative_error(planned.iteration_s, self.step.mean_s)}


def relative_error(planned: float | None, measured: float) -> float | None:
    """Returns planned / measured - 1: 0.1 if the planned time is 10% too long. None if either time is
    negligible or nothing was planned."""
    if planned is None or measured < NOTHING_S or planned < NOTHING_S:
        return None
    return planned / measured - 1


def load_breakdown(run_dir: Path) -> Breakdown:
    """Reads and checks a run's breakdown.json, and its prediction if that can be read.

    Raises:
        ConfigError: breakdown.json is missing, damaged, or of another version; the problem's key is
            `RUN_DIR`.
    """
    files = RunFiles(run_dir)
    fix = "the run's other files can still be read; train again for a new breakdown"
    try:
        measured = load(files.breakdown, MeasuredBreakdown, key="RUN_DIR", value=run_dir, fix=fix)
    except FileNotFoundError:
        reason = "it has no breakdown.json, which is written when training ends"
        fix = "give the directory of a run that ended after its warm-up steps"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix)) from None
    # Without a prediction that can be read, the measurement is shown alone; `canzona report` notes the error.
    return Breakdown(**vars(measured), planned=load_if_valid(files.predicted, Prediction))
