"""The state of a run that the live views show: stages, losses, rates, validations and time left."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import Layout
from canzona_cli.launch.view import EarlierSteps
from canzona_cli.records.records import StageEvent, StepMetrics, ValidationLoss
from canzona_cli.records.words import MISSING, experts_words, finite_or_none, guard_notes, number

Clock = Callable[[], float]

REPEATED_STAGES = frozenset({"train", "validate"})
"""The stages that alternate during a run; every other stage occurs once."""

_SMOOTHING = 0.1
_WINDOW = 16
_ETA_WINDOW = 100


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the run or of its start-up."""

    name: str
    detail: str
    started: float
    """The start of the stage, in seconds on the view's clock."""


@dataclass
class TrainState:
    """The state of a run, built from the records in its run directory, in which numbers may be missing or not
    finite."""

    config: RunConfig
    layout: Layout
    clock: Clock = time.monotonic
    losses: list[float] = field(default_factory=list)
    """The finite losses of the logged steps, in their order."""
    stages: list[Stage] = field(default_factory=list)
    last: StepMetrics | None = None
    """The newest logged step."""
    step: int = 0
    tokens_seen: int = 0
    smoothed: float | None = None
    """The exponentially smoothed loss, corrected for start-up bias."""
    non_finite: int = 0
    """The number of logged steps whose loss was missing or not finite."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    """The (step, loss) of each validation; the loss is NaN if it was not finite."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """The newest validation loss of each data set of a blend, by name."""
    started: float = 0.0
    updated: float | None = None
    """The time at which the newest step arrived, in seconds on `clock`; None before the first step."""
    _weight: float = 0.0
    """The total weight of the losses in `smoothed`, by which its bias is corrected."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _arrivals: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_ETA_WINDOW))

    def __post_init__(self) -> None:
        self.started = self.clock()

    def continue_from(self, earlier: EarlierSteps) -> None:
        """Takes over the loss curve, the validations and the step of the earlier launches of a resumed run,
        but not their speed."""
        for metrics in earlier.metrics:
            self.tokens_seen = metrics.tokens or self.tokens_seen
            if (loss := finite_or_none(metrics.loss)) is not None:
                self.losses.append(loss)
        for validation in earlier.validations:
            self.add_validation(validation)
        self.step = earlier.step

    def add_stage(self, event: StageEvent) -> Stage | None:
        """Starts a stage; returns the stage before it, or None if this is the first."""
        ended = self.stages[-1] if self.stages else None
        stage = Stage(name=event.stage, detail=event.detail, started=self.clock())
        self.stages.append(stage)
        return ended

    def add_step(self, metrics: StepMetrics) -> None:
        now = self.clock()
        self.last = metrics
        self.step = metrics.step
        self.tokens_seen = metrics.tokens or self.tokens_seen
        self.updated = now
        loss = finite_or_none(metrics.loss)
        if loss is None:
            self.non_finite += 1
        else:
            self.losses.append(loss)
            self._weight = (1 - _SMOOTHING) * self._weight + _SMOOTHING
            step_weight = _SMOOTHING / self._weight
            self.smoothed = loss if self.smoothed is None else self.smoothed + step_weight * (loss - self.smoothed)
        for measured, window in ((metrics.tokens_per_s, self._rates), (metrics.step_s, self._step_times)):
            value = finite_or_none(measured)
            if value is not None and value > 0:
                window.append(value)
        written = finite_or_none(metrics.time)
        self._arrivals.append((self.step, now if written is None else written))

    def add_validation(self, validation: ValidationLoss) -> None:
        loss = finite_or_none(validation.loss)
        self.validations.append((validation.step, math.nan if loss is None else loss))
        self.sets = validation.sets

    @property
    def loss(self) -> float | None:
        """The newest step's loss; NaN if it was not finite (null in the file), None before the first step."""
        if self.last is None:
            return None
        loss = finite_or_none(self.last.loss)
        return math.nan if loss is None else loss

    @property
    def guard_lines(self) -> list[str]:
        """The lines about skipped steps, and about updates that were not finite or needed a fallback; empty if
        there were none."""
        return [] if self.last is None else guard_notes(self.last.skipped, self.last.fallbacks)

    @property
    def experts(self) -> str:
        """The text about how evenly the newest step's tokens were spread over experts; empty for a dense
        model."""
        if self.last is None or (load := finite_or_none(self.last.expert_load)) is None:
            return ""
        return experts_words(load, finite_or_none(self.last.balancing_loss))

    @property
    def total(self) -> int:
        return self.config.train.steps

    @property
    def unit(self) -> str:
        """The word for a rank: `GPU`, or `rank` on CPUs."""
        return "GPU" if self.config.cluster.device == "cuda" else "rank"

    @property
    def fraction(self) -> float:
        return min(1.0, self.step / self.total) if self.total > 0 else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The median rate of the last logged steps, so that a single slow step has little effect."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def tokens_per_s_per_rank(self) -> float | None:
        rate = self.tokens_per_s
        return None if rate is None else rate / self.layout.world_size

    @property
    def step_s(self) -> float | None:
        return statistics.median(self._step_times) if self._step_times else None

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def idle(self) -> float:
        """The seconds since the newest step."""
        return 0.0 if self.updated is None else max(0.0, self.clock() - self.updated)

    @property
    def eta(self) -> float | None:
        """The seconds left, or None if unknown. From the second step on, the pace is measured by wall clock,
        so it includes validations. Between steps, the value counts down."""
        if self.updated is None:
            return None
        step_s = self.step_s
        if len(self._arrivals) > 1:
            (first_step, start_s), (last_step, end_s) = self._arrivals[0], self._arrivals[-1]
            if last_step > first_step and end_s > start_s:
                step_s = (end_s - start_s) / (last_step - first_step)
        return None if step_s is None else max(0.0, (self.total - self.step) * step_s - self.idle)

    @property
    def stalled(self) -> bool:
        """True if the run is not at its last step, and no step has arrived for 30 s or 10 times the step
        time, whichever is longer."""
        pace = self.step_s
        return pace is not None and self.step < self.total and self.idle > max(30.0, 10 * pace)

    def validation_change(self) -> str:
        """Returns the change from the first validation loss to the newest; the loss itself if there is only
        one, and `-` if there is none."""
        if not self.validations:
            return MISSING
        (_, first), (_, last) = self.validations[0], self.validations[-1]
        if len(self.validations) == 1:
            return number(first, ".4f")
        return loss_change(first, last)


def set_losses(sets: Mapping[str, float | None]) -> str:
    """Returns the losses of a blend's data sets, such as `code 1.2345, web 2.3456`; empty without a blend."""
    return ", ".join(f"{name} {number(math.nan if loss is None else loss, '.4f')}" for name, loss in sets.items())


def loss_change(first: float, last: float) -> str:
    """Returns a change in loss, such as `9.7213 → 4.3121 (-55.6%)`."""
    return f"{number(first, '.4f')} → {number(last, '.4f')} ({number(relative_change(first, last), '+.1f')}%)"


def relative_change(first: float, last: float) -> float:
    """Returns the change from `first` to `last` in per cent; NaN if `first` is 0 or not finite."""
    return 100 * (last - first) / first if first and math.isfinite(first) else math.nan
