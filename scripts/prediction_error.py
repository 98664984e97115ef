#!/usr/bin/env python3
"""Prints the errors of the predictions in several results of `canzona bench`.

    python scripts/prediction_error.py bench/*/bench.json

Prints the error of every strategy, the share of errors within 20%, and each pair of strategies whose measured times
differ by more than 10% but were predicted in the wrong order. Exits 1 if, for optimizer steps, the share is below 80%
or an order is wrong.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench_results import show_results, title
from rich import box
from rich.console import Console
from rich.table import Table

from canzona_cli.bench.results import BenchResult, Measured
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean, milliseconds, plural

Time = Literal["optimizer", "iteration"]
TIMES: dict[Time, str] = {"optimizer": "Optimizer step", "iteration": "Iteration"}
WITHIN = 0.20
"""The largest error of a good prediction."""
APART = 0.10
"""The relative difference of two measured medians above which their order must be predicted correctly."""
ENOUGH = 0.80
"""The required share of good predictions."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The measured and predicted time of a strategy in a bench."""

    bench: str
    """The recipe, optimizer and layout."""
    strategy: str
    measured_s: float
    """The median over rounds."""
    predicted_s: float

    @property
    def error(self) -> float:
        """The relative error of the prediction; 0.1 means 10% too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def good(self) -> bool:
        return abs(self.error) <= WITHIN


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two strategies of a bench whose measured times differ by more than `APART`."""

    bench: str
    faster: str
    slower: str
    measured: float
    """The ratio of the slower strategy's measured time to the faster one's."""
    predicted: float
    """The ratio of the predicted times of these strategies; at most 1 if the predictions have the wrong order."""

    @property
    def right(self) -> bool:
        return self.predicted > 1


def cells(results: Iterable[BenchResult], kind: Time) -> list[Cell]:
    """Returns a cell for each strategy of each bench."""
    return [
        Cell(
            bench=title(result),
            strategy=name,
            measured_s=median(result.strategies[name].measured, kind),
            predicted_s=predicted(result, name, kind),
        )
        for result in results
        for name in STRATEGIES
        if name in result.strategies
    ]


def share_good(cells: Sequence[Cell]) -> float:
    """Returns the share of cells whose error is within `WITHIN`; 1 if there are no cells."""
    return sum(cell.good for cell in cells) / len(cells) if cells else 1.0


def pairs(results: Iterable[BenchResult], kind: Time) -> Iterator[Pair]:
    """Yields all pairs of strategies of a bench whose measured medians differ by more than `APART`."""
    for result in results:
        # Times are relative to the reference in the same measurement group, because the machine's speed may change
        # between groups.
        relative = {
            name: median(strategy.measured, kind) / median(result.references[strategy.sitting], kind)
            for name, strategy in result.strategies.items()
        }
        for names in itertools.combinations((name for name in STRATEGIES if name in relative), 2):
            faster, slower = sorted(names, key=relative.__getitem__)
            if relative[slower] / relative[faster] - 1 > APART:
                yield Pair(
                    bench=title(result),
                    faster=faster,
                    slower=slower,
                    measured=relative[slower] / relative[faster],
                    predicted=predicted(result, slower, kind) / predicted(result, faster, kind),
                )


def median(measured: Measured, kind: Time) -> float:
    return Quartiles.of(measured.optimizer_s if kind == "optimizer" else measured.iteration_s).median


def predicted(result: BenchResult, name: str, kind: Time) -> float:
    prediction = result.strategies[name].predicted
    return prediction.optimizer_s if kind == "optimizer" else prediction.iteration_s


def table(results: Sequence[BenchResult], kind: Time) -> Table:
    shown = Table(title=f"{TIMES[kind]}, ms", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("bench", "strategy"):
        shown.add_column(head)
    for head in ("measured", "predicted", "error"):
        shown.add_column(head, justify="right")
    for bench, rows in itertools.groupby(cells(results, kind), key=lambda cell: cell.bench):
        for index, cell in enumerate(rows):
            shown.add_row(
                bench if index == 0 else "",
                clean(cell.strategy),
                milliseconds(cell.measured_s),
                milliseconds(cell.predicted_s),
                f"{cell.error:+.0%}",
                style="" if cell.good else "yellow",
            )
        shown.add_section()
    return shown


def verdict(results: Sequence[BenchResult], kind: Time) -> Iterator[str]:
    """Yields sentences: the share of good predictions, the number of pairs in the right order, and each pair in the
    wrong order."""
    all_cells, ranked = cells(results, kind), list(pairs(results, kind))
    by_strategy = {name: [cell.good for cell in all_cells if cell.strategy == name] for name in STRATEGIES}
    by_name = ", ".join(f"{name} {sum(good)}/{len(good)}" for name, good in by_strategy.items() if good)
    good, share = sum(cell.good for cell in all_cells), share_good(all_cells)
    yield f"{TIMES[kind]}: {good} of {plural(len(all_cells), 'result')} ({share:.0%}) within {WITHIN:.0%} ({by_name})"
    right = sum(pair.right for pair in ranked)
    yield f"  {plural(len(ranked), 'pair')} measured more than {APART:.0%} apart, {right} predicted in the right order"
    for pair in ranked:
        if not pair.right:
            yield (
                f"  wrong order: {pair.bench}: {clean(pair.slower)} took {pair.measured:.2f} times as long as "
                f"{clean(pair.faster)}, but {pair.predicted:.2f} times was predicted"
            )


def show(results: list[BenchResult], console: Console) -> int:
    """Prints the tables and verdicts; returns the exit code."""
    for kind in TIMES:
        console.print(table(results, kind))
        for line in verdict(results, kind):
            console.print(line, markup=False)
        console.print()
    enough = share_good(cells(results, "optimizer")) >= ENOUGH
    return 0 if enough and all(pair.right for pair in pairs(results, "optimizer")) else 1


def main(paths: list[Path]) -> int:
    """Prints the tables for the given results; returns the exit code."""
    return show_results(paths, __doc__, show)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
