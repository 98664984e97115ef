#!/usr/bin/env python3
"""Measures how far 20 real fp32 steps of the engine deviate from the same steps on one rank, by layout and optimizer.

    make exactness                                            # every optimizer and mode, into exactness.json
    python scripts/exactness.py OUT.json [muon] [shampoo] [soap] [modes]

Prints a Markdown table and writes JSON. Each cell has two numbers. The first is the largest deviation of any weight
from the run on one rank, in units of the learning rate. It is caused by a different order of sums, whose rounding
errors the optimizer amplifies; the first row shows the same deviation for one rank with other micro-batches. The second
number is the error of the engine alone: the run's matrices are compared with the matrices of an ordinary optimizer,
which updates whole matrices in one process with the reduced gradients of the run. "bitwise" means that all 14
matrices are equal to the last bit.

`modes` measures the modes of `engine.mode` for Muon in Gram form, in layouts with TP ranks. Shared matrices are summed
over ranks, so they are not bitwise equal. Their number is the error against an exact update (in fp64) as a multiple of
the ordinary optimizer's error: over all shared matrices, and the largest for a single matrix.

Exits 1 if a deviation is larger than rounding explains (`tests.dist.trained.ROUNDING`), a matrix that is not shared is
not bitwise equal, or shared matrices are less exact than `tests.dist.synthetic.FARTHER` and `FARTHEST` allow. Takes
about four minutes on two cores. The script starts ranks that import `tests`, so run it in a checkout that was installed
with `make setup`.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve as resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import Layout
from tests.dist.synthetic import FARTHER, FARTHEST
from tests.dist.trained import (
    CUT,
    FIXED,
    GRAM,
    LAYOUTS,
    LR,
    MODES,
    OPTIMIZERS,
    ROUNDING,
    STEPS,
    Trained,
    deviation,
    different,
    inexactness,
    one_rank,
    replay,
    run_trainings,
)

CONTROL = "1 rank, other micro-batches"
OTHER = "train.micro_batch_size=1"
Cell = dict[str, float | int | str]


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return resolved(compose_run([*FIXED, *overrides]).config)


def train(*runs: tuple[str, ...]) -> list[Trained]:
    """Trains runs that have the same layout."""
    return run_trainings([(*resolve(*run), STEPS) for run in runs])


def column(optimizer: str) -> dict[str, Cell]:
    """Trains with an optimizer in every layout; returns the cells by layout."""
    settings, cells = OPTIMIZERS[optimizer], dict[str, Cell]()
    alone: dict[tuple[str, ...], Trained] = {}
    for name, overrides in LAYOUTS.items():
        single, several = (*settings, *one_rank(name)), (*settings, *overrides)
        if single not in alone:
            alone[single], other = train(single, (*single, OTHER))
            cells.setdefault(CONTROL, cell(alone[single], other, (*single, OTHER), optimizer))
        [trained] = train(several)
        cells[name] = cell(alone[single], trained, several, optimizer)
        print(f"{optimizer}, {name}: {format_cell(cells[name])}", flush=True)
    return cells


def mode_columns() -> dict[str, dict[str, Cell]]:
    """Trains in every mode and layout; returns the cells by mode and then by layout."""
    single = (*GRAM, *one_rank("tp2"))
    alone, other = train(single, (*single, OTHER))
    columns = {mode: {CONTROL: cell(alone, other, (*single, OTHER), "muon")} for mode in MODES}
    for layout, overrides in CUT.items():
        runs = {mode: (*settings, *overrides) for mode, settings in MODES.items()}
        for mode, trained in zip(MODES, train(*runs.values()), strict=True):
            columns[mode][layout] = cell(alone, trained, runs[mode], "muon")
            print(f"{mode}, {layout}: {format_cell(columns[mode][layout])}", flush=True)
    return columns


def cell(alone: Trained, trained: Trained, run: tuple[str, ...], optimizer: str) -> Cell:
    """Compares a run with the run `alone` on one rank, and its matrices with an ordinary optimizer's."""
    config, _ = resolve(*run)
    replayed = {name: weight for name, weight in replay(trained, config).items() if name not in trained.shared}
    overall, worst = inexactness(trained, config) if trained.shared else (0.0, 0.0)
    return {
        "deviation_lr": deviation(trained.after, alone.after, LR),
        "deviation_bound_lr": ROUNDING[optimizer],
        "moved_lr": deviation(trained.after, trained.before, LR),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(trained.losses, alone.losses, strict=True)),
        "matrices": len(trained.gradients[0]),
        "matrices_not_bitwise": len(different(trained.after, replayed)),
        "matrices_shared": len(trained.shared),
        "shared_times_as_inexact": overall,
        "shared_times_as_inexact_at_most": worst,
        "fallbacks": trained.fallbacks,
    }


def format_cell(cell: Cell) -> str:
    """Formats a cell for the table."""
    engine = f"{cell['matrices_not_bitwise']} differ" if cell["matrices_not_bitwise"] else "bitwise"
    if cell["matrices_shared"]:
        times = f"{cell['shared_times_as_inexact']:.2f} (at most {cell['shared_times_as_inexact_at_most']:.1f})"
        shared = f"{cell['matrices_shared']} shared: {times}"
        engine = shared if cell["matrices_shared"] == cell["matrices"] else f"{shared}, others {engine}"
    return f"{cell['deviation_lr']:.1e}, {engine}{' OVER THE LIMIT' if exceeds_limit(cell) else ''}"


def exceeds_limit(cell: Cell) -> bool:
    """Returns True if a cell exceeds a limit."""
    return (
        not float(cell["deviation_lr"]) <= float(cell["deviation_bound_lr"])
        or bool(cell["matrices_not_bitwise"])
        or not float(cell["shared_times_as_inexact"]) <= FARTHER
        or not float(cell["shared_times_as_inexact_at_most"]) <= FARTHEST
    )


def show(columns: dict[str, dict[str, Cell]], layouts: Iterable[str]) -> None:
    """Prints the cells as a Markdown table."""
    print(f"\n| layout | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for layout in (CONTROL, *layouts):
        print(f"| {layout} | {' | '.join(format_cell(cells[layout]) for cells in columns.values())} |")
    farthest = {name: max(float(cell["moved_lr"]) for cell in cells.values()) for name, cells in columns.items()}
    moved = ", ".join(f"{name} {most:.1f}" for name, most in farthest.items())
    print(f"\nLargest change of a weight in training, in learning rates: {moved}.")


def main() -> int:
    """Measures, prints and writes the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("columns", nargs="*", choices=[[], *OPTIMIZERS, "modes"], default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = arguments.columns or [*OPTIMIZERS, "modes"]
    columns = {optimizer: column(optimizer) for optimizer in OPTIMIZERS if optimizer in chosen}
    modes = mode_columns() if "modes" in chosen else {}
    about = {"steps": STEPS, "lr": LR, "settings": FIXED, "optimizers": OPTIMIZERS, "modes": MODES}
    arguments.out.write_text(json.dumps({**about, "cells": columns, "cells_of_modes": modes}, indent=1) + "\n")
    if columns:
        show(columns, LAYOUTS)
    if modes:
        show(modes, CUT)
    return int(any(exceeds_limit(cell) for cells in (*columns.values(), *modes.values()) for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
