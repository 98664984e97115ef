"""Detects runs that have diverged (`train.divergence`)."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from canzona_cli.checkpoint.manifest import LossMemory
from canzona_cli.core.errors import Diverged, Problem

Rule = Literal["far", "validation"]
"""The rule by which a divergence was detected. far: the training loss is far above its best value.
validation: the validation loss is clearly worse than before training."""

SLACK: Final = 0.1
"""The fraction by which a loss must exceed the limit before excess accumulates."""
ENOUGH_EXCESS: Final = 16.0
"""The accumulated excess that is a divergence, in multiples of the limit. A loss of twice the limit reaches
it in 18 steps, a loss of 1.3 times the limit in 80."""
LEAST_STEPS: Final = 4
"""The minimum number of steps in which the excess can reach `ENOUGH_EXCESS`, however high the losses are."""
SMOOTHING: Final = 1 / 16
"""The weight of a new loss in the moving average of losses."""
EARLY: Final = 32
"""The step before which the limit on a validation loss is about twice as high, because the first steps are
unstable without a warm-up."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence, from which a run usually does not recover. It is reported once."""

    rule: Rule
    step: int
    """The step at which the divergence was detected."""
    since: int
    """The step at which the divergence began."""
    words: str
    """The description of the divergence, for messages."""

    def error(self, *, last_step: int | None = None) -> Diverged:
        """Returns the error to raise if the divergence is the reason why the run ends or fails.

        Args:
            last_step: The run's last step if the run trained to its end in spite of the divergence; None if it
                stops now.
        """
        reason, fix = self.words, "a lower optimizer.lr or a longer schedule.warmup_steps"
        if last_step is None:
            fix += "; train.divergence=warn continues training after a divergence"
        else:
            continued = f"the run continued to its last step, {last_step}, and did not recover"
            reason += f"; with train.divergence=warn {continued}"
        return Diverged(Problem(key=f"step {self.step}", reason=reason, fix=fix), since=self.since)


class DivergenceGuard:
    """A detector of divergence, which follows the training and validation losses of one run.

    Args:
        vocab_size: the number of tokens that a prediction chooses from.
        memory: the losses that were saved in the checkpoint; `LossMemory()` in a new run.
    """

    def __init__(self, vocab_size: int, memory: LossMemory) -> None:
        self.memory = memory
        self._uniform = math.log(max(2, vocab_size))
        """The loss of a uniform prediction, in nats per token."""
        self._reported: set[Rule] = set()

    @property
    def since(self) -> int | None:
        """The step since which the training loss has been too high; None if it is not too high."""
        return self.memory.since if self.memory.excess > 0 else None

    def persists(self, divergence: Divergence) -> bool:
        """Returns True if the last step, or for the rule `validation` the last validation, still shows the
        divergence."""
        return self.memory.excess >= ENOUGH_EXCESS if divergence.rule == "far" else self.memory.worse > 0

    def notice(self, step: int, loss: float | None) -> Divergence | None:
        """Updates the memory after a step. Returns a divergence if one must be reported now, otherwise None.

        Args:
            loss: The finite loss over the global batch, in nats per token. None for a step that was skipped
                because its gradients were not finite; such a step counts like a loss of twice the limit.
        """
        memory = self.memory
        first, smooth, best = memory.first, memory.smooth, memory.best
        if first is None or smooth is None or best is None:
            if loss is None:
                return None
            first = smooth = best = loss
        untrained = max(self._uniform, first)
        limit = (untrained + min(untrained, best)) / 2
        too_high = 2.0 if loss is None else loss / limit
        excess = max(0.0, memory.excess + min(too_high - 1 - SLACK, ENOUGH_EXCESS / LEAST_STEPS))
        since = step if memory.excess == 0 else memory.since
        if loss is not None:
            smooth += SMOOTHING * (loss - smooth)
        bounded = min(excess, 2 * ENOUGH_EXCESS)
        self.memory = replace(memory, first=first, smooth=smooth, best=min(best, smooth), excess=bounded, since=since)
        if excess == 0:
            self._reported.discard("far")
        if excess < ENOUGH_EXCESS or "far" in self._reported:
            return None
        self._reported.add("far")
        meaning = "the loss of the first step" if first >= self._uniform else "the loss of a uniform prediction"
        present = "steps are skipped: their gradients are not finite" if loss is None else f"it is {loss:.4f}"
        words = (
            f"the model has lost what it learned: since step {since} the loss is mostly above {limit:.2f}, "
            f"halfway from its best ({best:.4f}) to {untrained:.2f}, {meaning}; now {present}"
        )
        return Divergence(rule="far", step=step, since=since, words=words)

    def notice_validation(self, step: int, loss: float, *, final: bool) -> Divergence | None:
        """Updates the memory after a validation. Returns a divergence if one must be reported now, otherwise
        None.

        A divergence takes two bad validations in a row. A single bad validation is enough if its loss is not
        finite, or if it is the run's final validation.

        Args:
            step: the step after which the model was validated; 0 before the first step.
            loss: the validation loss in nats per token; may be NaN or infinite.
            final: True for the validation after the run's last step.
        """
        memory, before = self.memory, self.memory.first_validation
        if before is None and math.isfinite(loss):
            self.memory = replace(memory, first_validation=loss, sound=step)
            return None
        before = self._uniform if before is None else before
        limit = max(before, (before + self._uniform) / 2) * (1.05 if step >= EARLY else 2.0)
        if loss <= limit:
            self.memory = replace(memory, sound=step, worse=0)
            self._reported.discard("validation")
            return None
        self.memory = replace(memory, worse=memory.worse + 1)
        if math.isfinite(loss) and not final and self.memory.worse < 2:
            return None
        if memory.smooth is not None and math.isfinite(loss) and memory.smooth < loss / 2:
            return None  # the training loss is low: the model has overfitted, but not diverged
        if "validation" in self._reported:
            return None
        self._reported.add("validation")
        since = memory.since if memory.excess > 0 else memory.sound + 1
        words = f"validation loss {loss:.4f} at step {step} is worse than before training ({before:.4f})"
        return Divergence(rule="validation", step=step, since=since, words=words)
