"""Names the phases of a training step and the strategies, with the labels, colours and order in which they
are shown.

This module imports only the standard library, because ranks import it before anything slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from canzona_cli.core.setup import Strategy

Phase = Literal[
    "data",
    "forward",
    "backward",
    "pipeline",
    "dispatch",
    "grad_reduce",
    "norm_clip",
    "exchange",
    "matrix_update",
    "adamw_update",
    "param_gather",
    "other",
]
"""The phases of a step: every moment belongs to exactly one. A communication phase is only the time during
which the step waits for communication."""
TotalPhase = Literal["grad_reduce_total", "exchange_total", "param_gather_total"]
"""The total time of each kind of communication, whether it is overlapped with other phases or not."""

IN_STEP: tuple[Phase, ...] = get_args(Phase)
"""The phases that add up to the step, in the order of the breakdown."""
COMMUNICATION: tuple[Phase, ...] = ("grad_reduce", "exchange", "param_gather")
"""The phases that are the exposed parts of overlapped communication. Each has a `_total` in `TotalPhase`."""


@dataclass(frozen=True, kw_only=True)
class Ink:
    """The look of one kind of segment in bars and legends."""

    letter: str
    """The character in a terminal without colour."""
    style: str
    """The colour in a terminal, as a style of rich."""
    colour: str
    """The colour in HTML pages."""
    css: str
    """The CSS class for `colour`."""
    name: str
    """The name in tables and legends."""


@dataclass(frozen=True, kw_only=True)
class PhaseLook(Ink):
    """The labels and the look of a phase."""

    subject: str
    """The phase as the subject of a sentence: `the matrix update` took 3 ms."""


PHASES: Final[Mapping[str, PhaseLook]] = MappingProxyType(
    {
        name: PhaseLook(name=text, subject=subject, colour=colour, css=f"p-{name}", letter=letter, style=style)
        for name, text, subject, colour, letter, style in (
            ("data", "data", "reading batches", "#1a7f86", "D", "turquoise4"),
            ("forward", "forward", "forward", "#4c72b0", "F", "dodger_blue2"),
            ("backward", "backward", "backward", "#8fb4e3", "B", "sky_blue2"),
            ("pipeline", "pipeline wait", "the wait for other pipeline stages", "#c9a27a", "P", "tan"),
            ("dispatch", "dispatch", "the dispatch of tokens to experts", "#64b5cd", "T", "cyan3"),
            ("grad_reduce", "gradient reduction", "exposed gradient reduction", "#e6b422", "R", "gold3"),
            ("norm_clip", "norm + clip", "norm + clip", "#5b5b5b", "N", "grey85"),
            ("exchange", "exchange", "the exposed exchange", "#b07aa1", "X", "medium_purple2"),
            ("matrix_update", "matrix update", "the matrix update", "#3a9d5d", "U", "green3"),
            ("adamw_update", "AdamW update", "the AdamW update", "#a3d39c", "A", "pale_green1"),
            ("param_gather", "parameter gathering", "exposed parameter gathering", "#d1605e", "G", "indian_red1"),
            ("other", "other", "other work", "#c3c8ce", "O", "grey50"),
        )
    }
)
"""All phases, in the order of the step."""


def _labels() -> dict[str, str]:
    labels: dict[str, str] = {}
    for name, look in PHASES.items():
        if name in COMMUNICATION:
            labels |= {name: f"{look.name}, exposed", f"{name}_total": "  total incl. hidden"}
        else:
            labels[name] = look.name
    return labels


LABELS: Final[Mapping[str, str]] = MappingProxyType(_labels())
"""The labels of a breakdown's rows, in the order of the step; each `_total` follows its phase."""

Stream = Literal["compute", "data", "exchange"]
STREAMS: Final[Mapping[Stream, str]] = MappingProxyType(
    {"compute": "compute", "data": "DP traffic", "exchange": "exchange"}
)
"""The concurrent streams of a rank in simulated timelines, with their labels."""

STRATEGIES: Final[tuple["Strategy | Literal['adamw']", ...]] = (
    "canzona", "paper", "asc", "layerwise", "sc", "adamw",
)  # fmt: skip
"""The strategies in the order in which they run and are shown: canzona, the strategies that it is compared
with, and AdamW."""


class Interval(NamedTuple):
    """An interval of a step: a phase, or a transfer in flight. Times are seconds of the machine's monotonic
    clock, or seconds of a simulation.

    A NamedTuple, because files have thousands of them and store each as a JSON array.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The timeline of one step of a rank."""

    number: int
    """The step, counted from 1."""
    start_s: float
    end_s: float
    phases: tuple[Interval, ...]
    """The phases, one after another without gaps, from `start_s` to `end_s`."""
    transfers: tuple[Interval, ...]
    """The transfers, sorted by start. They may overlap each other and the next step."""
