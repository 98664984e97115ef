"""How much time a calibration gives each number. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Budgets in seconds; a number is measured again and again until its budget is spent."""

    item_s: float = 0.4
    """One product, one decomposition, one collective of one size, one update of one shape."""
    largest_item_s: float = 40.0
    """An update expected to take longer than this to measure is left to the cost model."""
    end_s: float = 140.0
    """Since the start; of what is then left only what is quick is measured."""
    sizes: tuple[int, ...] = (8, 64 << 10, 1 << 20, 8 << 20)
    """Bytes of collectives."""
    large: int | None = 32 << 20
    """A further size, where it is quick enough."""


FULL = Effort()
QUICK = Effort(item_s=0.08, largest_item_s=1.5, end_s=30.0, sizes=(8, 64 << 10, 1 << 20), large=None)


def effort(*, quick: bool) -> Effort:
    return QUICK if quick else FULL
