"""How right predictions were: errors of steps, and whether strategies come in the order that was measured. No torch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.bench.results import STRATEGIES, BenchResult
from canzona_cli.run.statistics import Spread

Time = Literal["optimizer", "iteration"]

WITHIN = 0.20
"""An error up to this much is a good prediction."""
APART = 0.10
"""Strategies whose measured medians differ by more must be predicted in that order."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy of one bench."""

    recipe: str
    optimizer: str
    ranks: int
    layout: str
    """`TP2 DP2`."""
    strategy: str
    measured: Spread
    """Seconds, over rounds."""
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured median, less 1."""
        return self.predicted_s / self.measured.median - 1

    @property
    def good(self) -> bool:
        return abs(self.error) <= WITHIN


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two strategies of one bench that measured apart."""

    bench: str
    """Recipe, optimizer, layout."""
    faster: str
    slower: str
    measured: float
    """How many times as long the slower took."""
    predicted: float
    """The same of the predictions; not above 1 where they have the wrong order."""

    @property
    def right(self) -> bool:
        return self.predicted > 1


def cells(results: Iterable[BenchResult], of: Time) -> tuple[Cell, ...]:
    """A cell for each strategy of each bench."""
    return tuple(
        Cell(
            recipe=result.recipe,
            optimizer=result.optimizer,
            ranks=result.layout.world_size,
            layout=layout_name(result),
            strategy=name,
            measured=Spread.of(_measured(result, name, of)),
            predicted_s=_predicted(result, name, of),
        )
        for result in results
        for name in _order(result)
    )


def share_good(found: Sequence[Cell]) -> float:
    """Of all cells, those within `WITHIN`, 0 to 1; 1 where there are none."""
    return sum(cell.good for cell in found) / len(found) if found else 1.0


def pairs(results: Iterable[BenchResult], of: Time) -> tuple[Pair, ...]:
    """All pairs of strategies of one bench whose measured medians differ by more than `APART`."""
    return tuple(pair for result in results for pair in _pairs(result, of))


def layout_name(result: BenchResult) -> str:
    """`TP2 DP2`; what has one rank is left out, but for DP."""
    mesh = result.layout
    sizes = (("TP", mesh.tp), ("PP", mesh.pp), ("CP", mesh.cp), ("DP", mesh.dp))
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "DP")


def _pairs(result: BenchResult, of: Time) -> Iterator[Pair]:
    # By way of the reference in each one's own sitting: the machine may have changed from one sitting to the next.
    measured = {
        name: Spread.of(_measured(result, name, of)).median / Spread.of(_reference(result, name, of)).median
        for name in _order(result)
    }
    for one, other in itertools.combinations(measured, 2):
        faster, slower = sorted((one, other), key=lambda name: measured[name])
        if measured[slower] / measured[faster] - 1 > APART:
            yield Pair(
                bench=f"{result.recipe} {result.optimizer} {layout_name(result)}",
                faster=faster,
                slower=slower,
                measured=measured[slower] / measured[faster],
                predicted=_predicted(result, slower, of) / _predicted(result, faster, of),
            )


def _order(result: BenchResult) -> list[str]:
    return [name for name in STRATEGIES if name in result.strategies]


def _measured(result: BenchResult, name: str, of: Time) -> Sequence[float]:
    found = result.strategies[name].measured
    return found.optimizer_s if of == "optimizer" else found.iteration_s


def _reference(result: BenchResult, name: str, of: Time) -> Sequence[float]:
    found = result.references[result.strategies[name].sitting]
    return found.optimizer_s if of == "optimizer" else found.iteration_s


def _predicted(result: BenchResult, name: str, of: Time) -> float:
    found = result.strategies[name].predicted
    return found.optimizer_s if of == "optimizer" else found.iteration_s
