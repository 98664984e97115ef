"""How a measured step differs from its prediction: the phase that differs most, by what factor, and at which rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.run.phases import COMMUNICATION, IN_STEP, PHASES
from canzona_cli.run.statistics import OverRanks
from canzona_cli.run.words import milliseconds

NEGLIGIBLE = 0.05
"""Share of the step: where no phase differs by more, the step is as planned."""
_APART = 1.25
"""How many times the mean a rank's time must be before the rank is named."""
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
