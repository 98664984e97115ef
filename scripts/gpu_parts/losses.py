"""How far two bf16 runs of the same steps may be apart.

A run in bf16 is off the same run in fp32 by what it rounded. How much that is, the CPU tells: it computes the very
steps in both. A GPU rounds as often as the CPU and at other places, so its run lies as far off the fp32 run, in another
direction: the two bf16 runs are at most twice that apart. Twenty steps are a small sample of a random size, which is
worth another factor of two. Below half a unit in the last place of bf16, relative to the value, no two of them have to
agree at all, because logits are rounded to that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FACTOR: Final = 4.0
HALF_UNIT: Final = 2.0**-9
"""bf16 keeps eight bits of the significand."""

Curve = Mapping[int, float]
"""A number by step: the loss, or the norm of the gradients."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The largest distance of two curves over some steps, and the largest that is allowed."""

    distance: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.distance <= self.bound

    def __str__(self) -> str:
        return f"{self.distance:.2g} of {self.bound:.2g} apart"


def apart(checked: Curve, expected: Curve, exact: Curve, *, steps: int | None = None) -> Apart:
    """Compares two bf16 curves, over the steps that `checked` has.

    Args:
        checked: the curve of the device.
        expected: the curve of the CPU.
        exact: the curve of the CPU in fp32.
        steps: only the first so many.
    """
    compared = sorted(checked)[:steps]
    rounding = max(abs(expected[step] - exact[step]) for step in compared)
    least = HALF_UNIT * max(abs(expected[step]) for step in compared)
    distances = [abs(checked[step] - expected[step]) for step in compared]
    finite = all(map(math.isfinite, distances))  # max() may well pass over what is no number
    return Apart(distance=max(distances) if finite else math.inf, bound=max(FACTOR * rounding, least))
