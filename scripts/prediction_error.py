#!/usr/bin/env python3
"""How far predictions were from what `canzona bench` measured, over several results.

    python scripts/prediction_error.py bench/*/bench.json

Prints every cell's error, the share within 20%, and each pair of strategies that was predicted in the wrong order
although they measured more than 10% apart. Exits 1 where the share is below 80% or an order is wrong.
"""

import sys
from pathlib import Path

from rich.console import Console

from canzona_cli.bench.accuracy import cells, pairs, share_good
from canzona_cli.bench.results_file import load
from canzona_cli.errors import CanzonaError
from canzona_cli.report.bench_accuracy import AccuracyView
from canzona_cli.report.errors import render_error

ENOUGH = 0.80


def main(paths: list[Path]) -> int:
    """Exit code."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        results = [load(path) for path in paths]
    except CanzonaError as error:
        Console(stderr=True, highlight=False).print(render_error(error))
        return int(error.exit_code)
    Console(highlight=False).print(AccuracyView(results))
    good = share_good(cells(results, "optimizer")) >= ENOUGH
    return 0 if good and all(pair.right for pair in pairs(results, "optimizer")) else 1


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
