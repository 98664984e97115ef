#!/usr/bin/env python3
"""How accurate the predictions of `canzona bench` were, over several results.

    python scripts/prediction_error.py bench/*/bench.json

Prints the error of every strategy, the share of strategies within 20%, and each pair of strategies that measured more
than 10% apart but was predicted in the wrong order. Exits 1 where that share is below 80% or an order is wrong.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from canzona_cli.bench.results import BenchResult, Measured, load
from canzona_cli.errors import CanzonaError
from canzona_cli.report.errors import ErrorView
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean, milliseconds, plural

Time = Literal["optimizer", "iteration"]
TIMES: dict[Time, str] = {"optimizer": "Optimizer step", "iteration": "Iteration"}
WITHIN = 0.20
"""An error up to this much is a good prediction."""
APART = 0.10
"""Strategies whose measured medians differ by more must be predicted in that order."""
ENOUGH = 0.80


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy of one bench."""

    bench: str
    """Recipe, optimizer, layout."""
    strategy: str
    measured_s: float
    """Median over rounds."""
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def good(self) -> bool:
        return abs(self.error) <= WITHIN


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two strategies of one bench that measured apart."""

    bench: str
    faster: str
    slower: str
    measured: float
    """How many times as long the slower took."""
    predicted: float
    """The same ratio of the predictions; not above 1 where they have the wrong order."""

    @property
    def right(self) -> bool:
        return self.predicted > 1


def cells(results: Iterable[BenchResult], of: Time) -> list[Cell]:
    """A cell for each strategy of each bench."""
    return [
        Cell(
            bench=title(result),
            strategy=name,
            measured_s=median(result.strategies[name].measured, of),
            predicted_s=predicted(result, name, of),
        )
        for result in results
        for name in STRATEGIES
        if name in result.strategies
    ]


def share_good(found: Sequence[Cell]) -> float:
    """Of all cells, those within `WITHIN`, 0 to 1; 1 where there are none."""
    return sum(cell.good for cell in found) / len(found) if found else 1.0


def pairs(results: Iterable[BenchResult], of: Time) -> Iterator[Pair]:
    """All pairs of strategies of one bench whose measured medians differ by more than `APART`."""
    for result in results:
        # Relative to the reference in each one's own sitting: the machine may have changed between sittings.
        relative = {
            name: median(found.measured, of) / median(result.references[found.sitting], of)
            for name, found in result.strategies.items()
        }
        for one, other in itertools.combinations((name for name in STRATEGIES if name in relative), 2):
            faster, slower = sorted((one, other), key=relative.__getitem__)
            if relative[slower] / relative[faster] - 1 > APART:
                yield Pair(
                    bench=title(result),
                    faster=faster,
                    slower=slower,
                    measured=relative[slower] / relative[faster],
                    predicted=predicted(result, slower, of) / predicted(result, faster, of),
                )


def median(measured: Measured, of: Time) -> float:
    return Quartiles.of(measured.optimizer_s if of == "optimizer" else measured.iteration_s).median


def predicted(result: BenchResult, name: str, of: Time) -> float:
    found = result.strategies[name].predicted
    return found.optimizer_s if of == "optimizer" else found.iteration_s


def title(result: BenchResult) -> str:
    mesh = result.layout
    sizes = (("TP", mesh.tp), ("PP", mesh.pp), ("CP", mesh.cp), ("DP", mesh.dp))
    layout = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "DP")
    return clean(f"{result.recipe} {result.optimizer} {layout}")


def table(results: Sequence[BenchResult], of: Time) -> Table:
    found = Table(title=f"{TIMES[of]}, ms", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("bench", "strategy"):
        found.add_column(head)
    for head in ("measured", "predicted", "error"):
        found.add_column(head, justify="right")
    for bench, rows in itertools.groupby(cells(results, of), key=lambda cell: cell.bench):
        for number, cell in enumerate(rows):
            found.add_row(
                bench if number == 0 else "",
                clean(cell.strategy),
                milliseconds(cell.measured_s),
                milliseconds(cell.predicted_s),
                f"{cell.error:+.0%}",
                style="" if cell.good else "yellow",
            )
        found.add_section()
    return found


def verdict(results: Sequence[BenchResult], of: Time) -> Iterator[str]:
    """The share of good predictions, the number of pairs in the right order, and each pair in the wrong one."""
    found, ranked = cells(results, of), list(pairs(results, of))
    own = {name: [cell.good for cell in found if cell.strategy == name] for name in STRATEGIES}
    each = ", ".join(f"{name} {sum(good)}/{len(good)}" for name, good in own.items() if good)
    good = sum(cell.good for cell in found)
    yield f"{TIMES[of]}: {good} of {plural(len(found), 'cell')} ({share_good(found):.0%}) within {WITHIN:.0%} ({each})"
    right = sum(pair.right for pair in ranked)
    yield f"  {plural(len(ranked), 'pair')} measured more than {APART:.0%} apart, {right} predicted in that order"
    for pair in ranked:
        if not pair.right:
            yield (
                f"  wrong: {pair.bench}: {clean(pair.slower)} took {pair.measured:.2f} times as long as "
                f"{clean(pair.faster)}, predicted {pair.predicted:.2f} times"
            )


def main(paths: list[Path]) -> int:
    """Exit code."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        results = [load(path) for path in paths]
    except CanzonaError as error:
        Console(stderr=True, highlight=False).print(ErrorView(error=error))
        return int(error.exit_code)
    console = Console(highlight=False)
    for of in TIMES:
        console.print(table(results, of))
        for line in verdict(results, of):
            console.print(line, markup=False)
        console.print()
    enough = share_good(cells(results, "optimizer")) >= ENOUGH
    return 0 if enough and all(pair.right for pair in pairs(results, "optimizer")) else 1


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
