"""Sudden rises of the loss (`train.loss_spike`): noticed, told, and where it is asked for the end of the run."""

import math
from collections import deque
from dataclasses import dataclass, replace

from canzona_cli.checkpoint.manifest import LossMemory
from canzona_cli.config.schema import TrainConfig
from canzona_cli.errors import Diverged, Problem

WINDOW = 64
"""Recent losses that the next one is compared with."""
ENOUGH = 24
"""Losses before which nothing is called a spike: the first steps rise and fall as they like."""
LEAST_RISE = 0.05
"""The least rise over the mean. With large batches the loss hardly scatters, and many deviations mean nothing."""
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

    What is part of a spike does not enter the statistics: a long spike does not hide itself, and a high loss that stays
    is told once and becomes the new level after 32 steps. A falling loss raises the mean and widens the deviation, so
    the normal descent sets off nothing. The window is saved with every checkpoint. The loss is the same on every rank,
    and so is what the guard says.
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
        """The spike that begins with this step, if one does.

        Args:
            loss: of this step over the global batch, nats per token. The guard is not shown steps that were skipped.
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
        """Mean of the recent losses, and the loss above which there is a spike: infinite while too little is known."""
        count = len(self._recent)
        if count < ENOUGH:
            return math.nan, math.inf
        mean = math.fsum(self._recent) / count
        deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in self._recent) / (count - 1))
        return mean, mean + max(self._sigmas * deviation, LEAST_RISE * abs(mean))
