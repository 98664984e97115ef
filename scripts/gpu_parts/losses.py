"""Compares two bf16 runs of the same steps, and computes by how much they may differ.

A bf16 run differs from the same run in fp32 by its rounding errors. The CPU runs the steps in both precisions, which
gives the size of these errors. A GPU rounds as often as the CPU but in other places, so its run has about the same
distance from the fp32 run in another direction: the two bf16 runs differ by at most twice this distance. Because twenty
steps are a small sample, another factor of two is allowed. A relative difference below half a unit in the last place of
bf16 is always accepted, because logits are rounded to bf16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FACTOR: Final = 4.0
FP8_APART: Final = 0.03
"""The largest accepted relative distance of a loss with FP8 matmuls from that with bf16 ones, which a tensor scaled
wrongly exceeds. In published training both agree within a run's noise (Micikevicius et al. 2022, arXiv 2209.05433)."""
HALF_UNIT: Final = 2.0**-9
"""Half a unit in the last place, relative to the value: bf16 has eight bits of significand."""

Curve = Mapping[int, float]
"""The loss or the gradient norm, by step."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The largest distance between two curves, and the largest accepted distance."""

    distance: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.distance <= self.bound

    def __str__(self) -> str:
        return f"{self.distance:.2g} apart (limit {self.bound:.2g})"


def compare_curves(checked: Curve, expected: Curve, exact: Curve, *, steps: int | None = None) -> Distance:
    """Compares two bf16 curves over the steps that `checked` has.

    Args:
        checked: the curve of the device.
        expected: the curve of the CPU in bf16.
        exact: the curve of the CPU in fp32.
        steps: the number of steps to compare, from the first; None for all.
    """
    compared = sorted(checked)[:steps]
    rounding = max(abs(expected[step] - exact[step]) for step in compared)
    least = HALF_UNIT * max(abs(expected[step]) for step in compared)
    distances = [abs(checked[step] - expected[step]) for step in compared]
    finite = all(map(math.isfinite, distances))  # max() may skip a NaN
    return Distance(distance=max(distances) if finite else math.inf, bound=max(FACTOR * rounding, least))


def fp8_distance(checked: Curve, bf16: Curve) -> Distance:
    """Compares the losses of a run with FP8 matmuls with those of a bf16 run of the same steps."""
    relative = [abs(checked[step] / bf16[step] - 1) for step in sorted(checked)]
    return Distance(distance=max(relative) if all(map(math.isfinite, relative)) else math.inf, bound=FP8_APART)
