"""The phases of a training step: the words that plans, measurements and breakdowns share."""

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal[
    "data",
    "forward",
    "backward",
    "pipeline",
    "grad_reduce",
    "norm_clip",
    "exchange",
    "matrix_update",
    "adamw_update",
    "param_gather",
    "other",
]
"""Every moment of a step belongs to one of these; of communication, what the step waits for."""
TotalPhase = Literal["grad_reduce_total", "exchange_total", "param_gather_total"]
"""Communication in flight, hidden under other work or not."""

IN_STEP: tuple[Phase, ...] = get_args(Phase)
"""In the order of the breakdown; they add up to the step."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of a step: a phase, or a transfer in flight. Seconds of this machine's monotonic clock."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step of this rank, moment by moment."""

    number: int
    """From 1."""
    start_s: float
    end_s: float
    phases: tuple[Interval, ...]
    """One after another without gaps, from `start_s` to `end_s`."""
    transfers: tuple[Interval, ...]
    """By start; they may overlap one another, and the next step."""
