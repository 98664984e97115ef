"""The annotations of settings: `lr: Annotated[Positive, "Peak learning rate.", CURVE]`.

The text is the setting's help. `Affects` says how changing the setting affects plans and resumed runs; a
setting without it has the `AFFECTS` of its class. These annotations are read by the range check, `canzona
recipes copy`, completion, the comparison of a resumed run with the saved one, and the planner's list of
settings that a plan depends on.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Flag, auto
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_type_hints

if TYPE_CHECKING:
    from annotated_types import BaseMetadata


class Affects(Flag):
    """The effects of changing a setting."""

    NOTHING = 0
    CURVE = auto()
    """The loss curve of a resumed run changes; the user gets a warning."""
    SPREAD = auto()
    """A resumed run distributes its work differently over ranks, with the same loss; the user gets a note."""
    LAYOUT = auto()
    """The same as `SPREAD`, but the note shows the change as part of the layout (TP 2 x DP 4)."""
    MODEL = auto()
    """The saved weights no longer fit the model: resuming is refused."""
    OPTIMIZER = auto()
    """The saved optimizer state no longer fits: resuming is refused."""
    PLAN = auto()
    """Plans depend on the value in the resolved layout, so runs with different values do not share plans."""


NOTHING = Affects.NOTHING
CURVE = Affects.CURVE
SPREAD = Affects.SPREAD
LAYOUT = Affects.LAYOUT
MODEL = Affects.MODEL
OPTIMIZER = Affects.OPTIMIZER
PLAN = Affects.PLAN


@cache
def affecting(effect: Affects, section: type) -> tuple[str, ...]:
    """Returns the names of a section's settings whose changes have this effect, in the order of the schema."""
    hints = get_type_hints(section, include_extras=True)
    effects = {field.name: affects_of(section, hints[field.name]) for field in fields(section)}
    return tuple(name for name, affects in effects.items() if affects is not None and effect in affects)


def affects_of(section: type, hint: object) -> Affects | None:
    """Returns the effects of changing the setting of a section that has this type hint; None if neither says so."""
    own = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Affects))
    return next(own, getattr(section, "AFFECTS", None))


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of numbers that a setting, an entry of a setting, or a field of a record accepts.

    pydantic checks the range wherever a type is annotated with it, like the grouped bounds of
    `annotated_types`.
    """

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
        """Describes the range for a message about a value outside of it: `at least 1 and at most 8`."""
        bounds = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        return " and ".join(bound_words(*item, value) for item in bounds.items() if math.isfinite(item[1]))


def bound_words(name: str, bound: float, value: float) -> str:
    """Describes a bound: `at most 1,000,000,000`.

    A tiny lower bound only excludes zero, so for a value of 0 or less the text is `above 0`.

    Args:
        name: `above`, `at least`, `below` or `at most`.
    """
    if name == "at least" and 0 < bound < 1e-5 and value <= 0:
        return "above 0"
    return f"{name} {bound:,.16g}"


@dataclass(frozen=True)
class Example:
    """An example value for error messages, if the default or an arbitrary value of the type would mislead."""

    value: str


# No quantity of a run or a machine exceeds these bounds, whatever its unit. Products and quotients of a few of
# them are still finite, except those of `Finite`.
Positive = Annotated[float, Range(at_least=1e-9, at_most=1e9)]
NotNegative = Annotated[float, Range(at_least=0, at_most=1e9)]
Share = Annotated[float, Range(at_least=0, below=1)]
Epsilon = Annotated[float, Range(at_least=1e-37, at_most=1)]
"""An epsilon that is added to an fp32 number. Positive fp32 numbers below 1.2e-38 are denormal."""
Factor = Annotated[float, Range(at_least=1e-6, at_most=1e6)]
"""The ratio of a measured time to the modelled time."""
Seconds = Annotated[float, Range(at_least=1e-12, at_most=1e9)]
Finite = Annotated[float, Range(at_least=-1e300, at_most=1e300)]
Count = Annotated[int, Range(at_least=1, at_most=10**12)]
CountOrZero = Annotated[int, Range(at_least=0, at_most=10**12)]
Bytes = Annotated[float, Range(at_least=0, at_most=1e15)]
"""The size of a message or a buffer."""
Side = Annotated[int, Range(at_least=1, at_most=1 << 24)]
"""The size of one dimension, such as the rows of a weight or the tokens of a sequence."""
Ranks = Annotated[int, Range(at_least=1, at_most=1 << 17)]
Precision = Literal["bf16", "fp32"]
Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""The ways in which Transformer Engine scales FP8 tensors, by Megatron's names."""
"""A data type that a setting can choose for weights and matmuls, for sums of gradients, or for messages."""


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
"""The bound that each pydantic error type reports: pydantic's name for it, and the words used in messages."""


def bound_text(error: str, context: Mapping[str, float], value: float) -> str:
    """Describes the bound that a number in a list or mapping violates; returns an empty text for other
    errors."""
    if error not in _BOUNDS:
        return ""
    key, name = _BOUNDS[error]
    return bound_words(name, context[key], value)
