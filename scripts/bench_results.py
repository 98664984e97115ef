"""Loads results of `canzona bench`, for scripts that compare them."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from canzona_cli.bench.results import BenchResult, load
from canzona_cli.errors import CanzonaError
from canzona_cli.report.errors import ErrorView
from canzona_cli.run.words import clean, layout_code


def show_results(paths: Sequence[Path], usage: str | None, show: Callable[[list[BenchResult], Console], int]) -> int:
    """Passes the results in `paths` to `show` and returns its exit code; without paths, prints `usage`."""
    if not paths:
        print(usage, file=sys.stderr)
        return 2
    try:
        results = [load(path) for path in paths]
    except CanzonaError as error:
        Console(stderr=True, highlight=False).print(ErrorView(error=error))
        return int(error.exit_code)
    return show(results, Console(highlight=False))


def title(result: BenchResult) -> str:
    """Returns the recipe, optimizer and layout of a bench."""
    return clean(f"{result.recipe} {result.optimizer} {layout_code(result.layout)}")
