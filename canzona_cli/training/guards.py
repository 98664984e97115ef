"""Sudden rises of the loss (`train.loss_spike`): noticed, told,
and where it is asked for the end of the run."""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

from canzona_cli.checkpoint.manifest import LossMemory
from canzona_cli.config.schema import RunConfig, TrainConfig
from canzona_cli.errors import Diverged, Problem

WINDOW = 64
"""Recent losses that the next one is compared with."""
ENOUGH = 24
"""Losses before which nothing is called a spike: the first steps rise and fall as they like."""
LEAST_RISE = 0.05
"""The least rise over the mean. With large batches the loss hardly scatters,
and many deviations mean nothing."""
NEW_LEVEL = 32
"""Steps after which a loss that stays high is what the run's loss is now."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The first step of a rise. All but the step in nats per token."""

    step: int
    loss: float
    mean: float
    """The mean of the recent steps."""
    limit: float
    """The least loss that would have been one."""

    @property
    def words(self) -> str:
        return (
            f"the loss jumped to {self.loss:.4f} at step {self.step}: the recent mean is {self.mean:.4f}, "
            f"and a loss above {self.limit:.4f} counts as a spike"
        )


class LossSpike(Diverged):
    """The loss has jumped, and `train.loss_spike` is stop."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(
            Problem(
                key="train.loss_spike",
                value="stop",
                reason=f"{spike.words}; its weights were not saved",
                fix="a lower optimizer.lr; train.loss_spike=warn continues after any spike",
            ),
            since=spike.step,
        )


class SpikeGuard:
    """Compares each loss with mean and standard deviation of those before it.

    What is part of a spike does not enter the statistics: a long spike does not hide itself, and a high loss
    that stays is told once and becomes the new level after 32 steps. A falling loss raises the mean and
    widens the deviation, so the normal descent sets off nothing. The window is saved with every checkpoint.
    The loss is the same on every rank, and so is what the guard says.
    """

    def __init__(self, settings: TrainConfig, memory: LossMemory = LossMemory()) -> None:
        self._watches, self._sigmas = settings.loss_spike != "ignore", settings.loss_spike_sigmas
        self._recent: deque[float] = deque(memory.usual, maxlen=WINDOW)
        self._high = list(memory.high)
        """Losses of the spike that goes on."""

    def remembered(self, memory: LossMemory) -> LossMemory:
        """Returns the memory with the window as it is now."""
        return replace(memory, usual=tuple(self._recent), high=tuple(self._high))

    def notice(self, step: int, loss: float) -> Spike | None:
        """Returns the spike that begins with this step, if one does.

        Args:
            loss: the loss of this step over the global batch, nats per token. The guard is not shown steps
                that were skipped.
        """
        if not self._watches or not math.isfinite(loss):
            return None
        mean, limit = self._statistics()
        if loss <= limit:
            self._recent.append(loss)
            self._high.clear()
            return None
        self._high.append(loss)
        if len(self._high) == NEW_LEVEL:
            self._recent = deque(self._high, maxlen=WINDOW)
            self._high.clear()
        return Spike(step=step, loss=loss, mean=mean, limit=limit) if len(self._high) == 1 else None

    def _statistics(self) -> tuple[float, float]:
        """Returns the mean of the recent losses, and the loss above which there is a spike:
        infinite while too little is known."""
        count = len(self._recent)
        if count < ENOUGH:
            return math.nan, math.inf
        mean = math.fsum(self._recent) / count
        deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in self._recent) / (count - 1))
        return mean, mean + max(self._sigmas * deviation, LEAST_RISE * abs(mean))


Rule = Literal["far", "validation"]

SLACK: Final = 0.1
"""The share of the limit above which a loss adds up."""
ENOUGH_EXCESS: Final = 16.0
"""Limits. A loss of twice the limit takes 18 steps to add up to it, of 1.3 times 80."""
LEAST_STEPS: Final = 4
"""Even of a loss a thousand times too high."""
SMOOTHING: Final = 1 / 16
EARLY: Final = 32
"""Steps before which only a validation twice too high counts: without a warm-up the first steps go astray."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The reason why nothing can be expected of continuing, reported once."""

    rule: Rule
    step: int
    since: int
    """The first step of it."""
    words: str

    def error(self, *, last: int | None = None) -> Diverged:
        """Returns the error of a run that is to stop.

        Args:
            last: the step to which it trained on all the same.
        """
        reason, fix = self.words, "a lower optimizer.lr or a longer schedule.warmup_steps"
        if last is None:
            fix += "; train.divergence=warn trains on whatever happens"
        else:
            reason += f"; with train.divergence=warn it trained on to step {last}, its last, and did not recover"
        return Diverged(Problem(key=f"step {self.step}", reason=reason, fix=fix), since=self.since)


class DivergenceGuard:
    """Watches the losses of one run.

    Args:
        memory: the memory of the checkpoint that the run goes on from.
    """

    def __init__(self, config: RunConfig, memory: LossMemory) -> None:
        self.memory = memory
        self._uniform = math.log(max(2, config.model.vocab_size))
        """Nats per token of a guess that takes all tokens for equally likely."""
        self._told: set[Rule] = set()

    @property
    def since(self) -> int | None:
        """Returns the first step of losses that are too high, if they are."""
        return self.memory.since if self.memory.excess > 0 else None

    def goes_on(self, divergence: Divergence) -> bool:
        """Returns True if the divergence persists after the last step and validation."""
        return self.memory.excess >= ENOUGH_EXCESS if divergence.rule == "far" else self.memory.worse > 0

    def notice(self, step: int, loss: float | None) -> Divergence | None:
        """Returns what is to be reported after a step.

        Args:
            loss: over the global batch, finite, nats per token; None for a step that was skipped because its
                gradients were not finite, which counts as one of twice the limit.
        """
        memory, first, smooth, best = self.memory, self.memory.first, self.memory.smooth, self.memory.best
        if first is None or smooth is None or best is None:
            if loss is None:
                return None
            first = smooth = best = loss
        worst = max(self._uniform, first)
        limit = (worst + min(worst, best)) / 2
        too_high = 2.0 if loss is None else loss / limit
        excess = max(0.0, memory.excess + min(too_high - 1 - SLACK, ENOUGH_EXCESS / LEAST_STEPS))
        since = step if memory.excess == 0 else memory.since
        now = smooth if loss is None else smooth + SMOOTHING * (loss - smooth)
        bounded = min(excess, 2 * ENOUGH_EXCESS)
        self.memory = replace(memory, first=first, smooth=now, best=min(best, now), excess=bounded, since=since)
        if self._first_time("far", excess >= ENOUGH_EXCESS, over=excess == 0):
            began = "it began" if first >= self._uniform else "all tokens would be equally likely"
            shown = "steps change nothing, for their gradients are not finite" if loss is None else f"it is {loss:.4f}"
            words = (
                f"what was learnt is lost: since step {since} the loss is mostly above {limit:.2f}, half-way from its "
                f"best ({best:.4f}) to {worst:.2f}, where {began}; now {shown}"
            )
            return Divergence(rule="far", step=step, since=since, words=words)
        return None

    def validated(self, step: int, loss: float, *, final: bool) -> Divergence | None:
        """Returns what is to be reported after a validation; two in a row must be bad, or the last one.

        Args:
            step: after which it was; 0 before the first.
            loss: nats per token, finite or not.
        """
        memory, before = self.memory, self.memory.first_validation
        if before is None and math.isfinite(loss):
            self.memory = replace(memory, first_validation=loss, sound=step)
            return None
        before = self._uniform if before is None else before
        limit = max(before, (before + self._uniform) / 2) * (1.05 if step >= EARLY else 2.0)
        if loss <= limit:
            self.memory = replace(memory, sound=step, worse=0)
            self._told.discard("validation")
            return None
        self.memory = replace(memory, worse=memory.worse + 1)
        if math.isfinite(loss) and not final and self.memory.worse < 2:
            return None
        if memory.smooth is not None and math.isfinite(loss) and memory.smooth < loss / 2:
            return None  # the training data is learnt by heart: overfitted, but not lost
        if not self._first_time("validation", True, over=False):
            return None
        since = memory.since if memory.excess > 0 else memory.sound + 1
        words = f"validation loss {loss:.4f} at step {step} is worse than before training ({before:.4f})"
        return Divergence(rule="validation", step=step, since=since, words=words)

    def _first_time(self, rule: Rule, is_true: bool, *, over: bool) -> bool:
        """Returns True to report now: once, until it is over."""
        if over:
            self._told.discard(rule)
        if not is_true or rule in self._told:
            return False
        self._told.add(rule)
        return True
