"""Judges whether a run still learns: from its first step, across resumes, the same on every rank.

Two rules find a run that is lost. One adds up how far losses lie above what they may be, step by step, and forgets it
as fast when they lie below (a cumulative sum, Page 1954): a spike that passes never adds up to anything, and a loss
that stays away does, the sooner the further away it is. The other looks at validations. What they remember is
`LossMemory`, a part of every checkpoint. They see only the loss that all ranks have agreed on, so nothing more has to
be exchanged or waited for.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from canzona_cli.checkpoint.manifest import LossMemory
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import Diverged, Problem

Rule = Literal["far", "validation"]

SLACK: Final = 0.1
"""The share of the limit above which a loss adds up."""
ENOUGH: Final = 16.0
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
        memory: of the checkpoint that the run goes on from.
    """

    def __init__(self, config: RunConfig, memory: LossMemory) -> None:
        self.memory = memory
        self._uniform = math.log(max(2, config.model.vocab_size))
        """Nats per token of a guess that takes all tokens for equally likely."""
        self._told: set[Rule] = set()

    @property
    def since(self) -> int | None:
        """The first step of losses that are too high, if they are."""
        return self.memory.since if self.memory.excess > 0 else None

    def goes_on(self, found: Divergence) -> bool:
        """True if the divergence persists after the last step and validation."""
        return self.memory.excess >= ENOUGH if found.rule == "far" else self.memory.worse > 0

    def notice(self, step: int, loss: float | None) -> Divergence | None:
        """Returns what is to be reported after a step.

        Args:
            loss: over the global batch, finite, nats per token; None for a step that was skipped because its gradients
                were not finite, which counts as one of twice the limit.
        """
        memory = self.memory
        if memory.best is None or memory.smooth is None or memory.first is None:
            if loss is None:
                return None
            memory = replace(memory, first=loss, smooth=loss, best=loss)
        assert memory.best is not None
        assert memory.smooth is not None
        assert memory.first is not None
        worst = max(self._uniform, memory.first)
        limit = (worst + min(worst, memory.best)) / 2
        too_high = 2.0 if loss is None else loss / limit
        excess = max(0.0, memory.excess + min(too_high - 1 - SLACK, ENOUGH / LEAST_STEPS))
        since = step if memory.excess == 0 else memory.since
        smooth = memory.smooth if loss is None else memory.smooth + SMOOTHING * (loss - memory.smooth)
        self.memory = replace(
            memory, excess=min(excess, 2 * ENOUGH), since=since, smooth=smooth, best=min(memory.best, smooth)
        )
        if self._first_time("far", excess >= ENOUGH, over=excess == 0):
            shown = "steps change nothing, for their gradients are not finite" if loss is None else f"it is {loss:.4f}"
            words = (
                f"what was learnt is lost: since step {since} the loss is mostly above {limit:.2f}, half-way from its "
                f"best ({memory.best:.4f}) to {worst:.2f}, where {self._where(memory.first)}; now {shown}"
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

    def _first_time(self, rule: Rule, found: bool, *, over: bool) -> bool:
        """Returns True to report now: once, until it is over."""
        if over:
            self._told.discard(rule)
        if not found or rule in self._told:
            return False
        self._told.add(rule)
        return True

    def _where(self, first: float) -> str:
        return "it began" if first >= self._uniform else "all tokens would be equally likely"
