"""Which kernels multiply to symmetric results in a run: kernels.json."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

PLAIN: Final = "plain"
"""As any product: cuBLAS, or oneDNN on CPUs."""
STRIPS: Final = "strips"
"""On CPUs: the lower triangle by strips of rows, and its mirror image."""


@dataclass(frozen=True, kw_only=True)
class KernelTrial:
    """One kernel, tried out on one shape of products when the run started."""

    kernel: str
    seconds: float | None = None
    """Of a product, on the slowest rank; None where it could not be used."""
    refused: str = ""
    """Why it was not chosen; empty for the one that was."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What (side, long) by (long, side) is multiplied by."""

    side: int
    long: int
    dtype: Literal["bf16", "fp16"] = "bf16"
    kernel: str
    trials: tuple[KernelTrial, ...] = ()
    """Of GPUs alone: elsewhere it is known beforehand."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """kernels.json: of every shape that the run's updates multiply, smallest first."""

    VERSION: ClassVar[int] = 1

    choices: tuple[KernelChoice, ...] = ()
