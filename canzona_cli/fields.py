"""The marks that a setting has at its field: `lr: Annotated[Positive, "Peak learning rate.", CURVE]`.

The text is its help. `Affects` says what a change of it does, to a run that goes on from a checkpoint and to
plans. Everything else reads it from there: the range check, `canzona recipes copy`, completion, the
comparison of a resumed run with the one that was saved, and the planner's choice of what a plan depends on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

if TYPE_CHECKING:
    from annotated_types import BaseMetadata


class Affects(Flag):
    """The effects of a changed value."""

    NOTHING = 0
    CURVE = auto()
    """The loss of a resumed run goes on differently: a warning."""
    SPREAD = auto()
    """The work of a resumed run is shared out differently and the loss stays the same: a note."""
    LAYOUT = auto()
    """Likewise, noted as part of the layout (TP 2 x DP 4)."""
    MODEL = auto()
    """Other weights than those that were saved: a resumed run is refused."""
    OPTIMIZER = auto()
    """Other optimizer state than what was saved: a resumed run is refused."""
    PLAN = auto()
    """A plan is computed from it, once the layout is resolved: runs that differ in it do not share plans."""


NOTHING = Affects.NOTHING
CURVE = Affects.CURVE
SPREAD = Affects.SPREAD
LAYOUT = Affects.LAYOUT
MODEL = Affects.MODEL
OPTIMIZER = Affects.OPTIMIZER
PLAN = Affects.PLAN


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a setting, an entry of it, or a field of a record admits. pydantic checks it wherever
    a type is annotated with it, as it does the grouped bounds of `annotated_types`."""

    __is_annotated_types_grouped_metadata__: ClassVar = True

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf

    def __iter__(self) -> Iterator["BaseMetadata"]:
        from annotated_types import Ge, Gt, Le, Lt

        for kind, bound in ((Gt, self.above), (Ge, self.at_least), (Lt, self.below), (Le, self.at_most)):
            if math.isfinite(bound):
                yield kind(int(bound) if float(bound).is_integer() else bound)

    def __contains__(self, value: float) -> bool:
        return self.above < value < self.below and self.at_least <= value <= self.at_most

    def words(self, value: float) -> str:
        """Says what a number that is not in it must be."""
        bounds = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        return " and ".join(bound_words(*item, value) for item in bounds.items() if math.isfinite(item[1]))


def bound_words(name: str, bound: float, value: float) -> str:
    """`at most 1,000,000,000`: a bound that a number must keep. The tiny ones only keep zero out: one that is
    not even above zero is told just that.

    Args:
        name: `above`, `at least`, `below` or `at most`.
    """
    if name == "at least" and 0 < bound < 1e-5 and value <= 0:
        return "above 0"
    return f"{name} {bound:,.16g}"


@dataclass(frozen=True)
class Unit:
    """The unit that a number counts, where its name and help leave it open."""

    name: str


@dataclass(frozen=True)
class Example:
    """An example for error messages, where the default or an arbitrary value of the type would be a bad example."""

    value: str


# No quantity of a run or a machine is beyond these, whatever its unit, and what is computed from a few of
# them is still a number.
Positive = Annotated[float, Range(at_least=1e-9, at_most=1e9)]
NotNegative = Annotated[float, Range(at_least=0, at_most=1e9)]
Share = Annotated[float, Range(at_least=0, below=1)]
Epsilon = Annotated[float, Range(at_least=1e-37, at_most=1)]
"""An addend beside a number of fp32, which has none below it but denormal ones."""
Factor = Annotated[float, Range(at_least=1e-6, at_most=1e6)]
"""A measurement over what it should have been."""
Seconds = Annotated[float, Range(at_least=1e-12, at_most=1e9)]
Finite = Annotated[float, Range(at_least=-1e300, at_most=1e300)]
Count = Annotated[int, Range(at_least=1, at_most=10**12)]
CountOrZero = Annotated[int, Range(at_least=0, at_most=10**12)]
Bytes = Annotated[float, Range(at_least=0, at_most=1e15)]
"""The size of a message or a buffer."""
Side = Annotated[int, Range(at_least=1, at_most=1 << 24)]
"""Rows or columns of a weight."""
Ranks = Annotated[int, Range(at_least=1, at_most=1 << 17)]
Precision = Literal["bf16", "fp32"]
"""The type of weights and of products in forward, backward and update."""
