#!/usr/bin/env python3
"""Prints how much the ratios of several results of `canzona bench` differ between process groups.

    for i in 1 2 3; do canzona bench recipe=qwen3-mini gpus=4 parallel.tp=2 --rounds 1; done
    python scripts/group_spread.py bench/*/bench.json

All rounds of a bench run in one process group, so their quartiles do not show differences between process groups. Here
each bench counts once, with the median of its rounds.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench_results import show_results, title
from rich import box
from rich.console import Console
from rich.table import Table

from canzona_cli.bench.results import BenchResult
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The time of a strategy relative to the reference's, in several benches of one run."""

    bench: str
    """The recipe, optimizer and layout."""
    strategy: str
    optimizer: tuple[float, ...]
    """The ratio of the optimizer steps in each bench."""
    iteration: tuple[float, ...]


def spreads(results: Iterable[BenchResult]) -> list[Spread]:
    """Returns a row for each strategy of each run, except the reference."""
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        bench = title(result)
        for name in STRATEGIES:
            if name in result.strategies and name != result.reference:
                pair = result.optimizer_speedup(name), result.iteration_speedup(name)
                ratios[bench, name].append((pair[0].ratio.median, pair[1].ratio.median))
    return [
        Spread(
            bench=bench,
            strategy=name,
            optimizer=tuple(optimizer for optimizer, _ in pairs),
            iteration=tuple(iteration for _, iteration in pairs),
        )
        for (bench, name), pairs in ratios.items()
    ]


def table(rows: Iterable[Spread]) -> Table:
    heading = "Time over the reference's: median and quartiles over process groups"
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("bench", "strategy"):
        shown.add_column(head)
    for head in ("groups", "optimizer step", "iteration"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        counted = str(len(row.optimizer))
        shown.add_row(row.bench, clean(row.strategy), counted, _format(row.optimizer), _format(row.iteration))
    return shown


def _format(ratios: tuple[float, ...]) -> str:
    over = Quartiles.of(ratios)
    return f"{over.median:.2f}x [{over.low:.2f}, {over.high:.2f}]"


def show(results: list[BenchResult], console: Console) -> int:
    """Prints the table; returns the exit code."""
    console.print(table(spreads(results)))
    return 0


def main(paths: list[Path]) -> int:
    """Prints the table of the given results; returns the exit code."""
    return show_results(paths, __doc__, show)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
