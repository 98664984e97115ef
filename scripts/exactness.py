#!/usr/bin/env python3
"""How far 20 real fp32 steps of the engine are from those of one rank, by layout and optimizer, as Markdown and JSON.

    make exactness                                            # every optimizer and mode, into exactness.json
    python scripts/exactness.py OUT.json [muon] [shampoo] [soap] [modes]

Each cell has two numbers. The first is the largest deviation of any weight from the run on one rank, in learning rates:
sums are taken in another order, and the optimizer amplifies their rounding. The first row shows what rounding alone
does to one rank that cuts its batch into other micro-batches. The second is what the engine adds: the matrices of that
very run against an ordinary optimizer that steps them whole, in one process, with the gradients that the run's ranks
had reduced. "bitwise" means that all 14 of them are equal to the last bit.

`modes` are those of `engine.mode`, of Muon in Gram form, wherever there are TP ranks. Shared matrices are added up over
ranks, so they are not bitwise: what is said of them is how many times as far they are from the exact update, worked out
in fp64, as those of the ordinary optimizer; of all together, and of the one of which it is most.

Exits 1 where a deviation is more than rounding explains (`tests.dist.trained.ROUNDING`), a matrix that is not shared is
not bitwise, or a shared one is farther from exact than two roundings for one explain (`tests.dist.synthetic.FARTHER`).
Takes about four minutes on two cores. It starts real ranks, so `tests` must be importable (a checkout, installed with
`make setup`).
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Layout, RunConfig
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
    return fit.resolve(compose_run([*FIXED, *overrides]).config)


def train(*runs: tuple[str, ...]) -> list[Trained]:
    """Runs of one layout."""
    return run_trainings([(*resolve(*run), STEPS) for run in runs])


def column(optimizer: str) -> dict[str, Cell]:
    """Every layout's cell."""
    settings, cells = OPTIMIZERS[optimizer], dict[str, Cell]()
    alone: dict[tuple[str, ...], Trained] = {}
    for where, overrides in LAYOUTS.items():
        single, there = (*settings, *one_rank(where)), (*settings, *overrides)
        if single not in alone:
            alone[single], other = train(single, (*single, OTHER))
            cells.setdefault(CONTROL, cell(alone[single], other, (*single, OTHER), optimizer))
        [found] = train(there)
        cells[where] = cell(alone[single], found, there, optimizer)
        print(f"{optimizer}, {where}: {words(cells[where])}", flush=True)
    return cells


def mode_columns() -> dict[str, dict[str, Cell]]:
    """Of every mode, every layout's cell."""
    single = (*GRAM, *one_rank("tp2"))
    alone, other = train(single, (*single, OTHER))
    columns = {mode: {CONTROL: cell(alone, other, (*single, OTHER), "muon")} for mode in MODES}
    for where, overrides in CUT.items():
        runs = {mode: (*settings, *overrides) for mode, settings in MODES.items()}
        for mode, found in zip(MODES, train(*runs.values()), strict=True):
            columns[mode][where] = cell(alone, found, runs[mode], "muon")
            print(f"{mode}, {where}: {words(columns[mode][where])}", flush=True)
    return columns


def cell(alone: Trained, found: Trained, run: tuple[str, ...], optimizer: str) -> Cell:
    config, _ = resolve(*run)
    whole = {name: weight for name, weight in replay(found, config).items() if name not in found.shared}
    together, most = inexactness(found, config) if found.shared else (0.0, 0.0)
    return {
        "deviation_lr": deviation(found.after, alone.after, LR),
        "deviation_bound_lr": ROUNDING[optimizer],
        "moved_lr": deviation(found.after, found.before, LR),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(found.losses, alone.losses, strict=True)),
        "matrices": len(found.gradients[0]),
        "matrices_not_bitwise": len(different(found.after, whole)),
        "matrices_shared": len(found.shared),
        "shared_times_as_inexact": together,
        "shared_times_as_inexact_at_most": most,
        "fallbacks": found.fallbacks,
    }


def words(found: Cell) -> str:
    engine = f"{found['matrices_not_bitwise']} differ" if found["matrices_not_bitwise"] else "bitwise"
    if found["matrices_shared"]:
        times = f"{found['shared_times_as_inexact']:.2f} (at most {found['shared_times_as_inexact_at_most']:.1f})"
        shared = f"{found['matrices_shared']} shared: {times}"
        engine = shared if found["matrices_shared"] == found["matrices"] else f"{shared}, else {engine}"
    return f"{found['deviation_lr']:.1e}, {engine}{' BEYOND' if beyond(found) else ''}"


def beyond(found: Cell) -> bool:
    return (
        not float(found["deviation_lr"]) <= float(found["deviation_bound_lr"])
        or bool(found["matrices_not_bitwise"])
        or not float(found["shared_times_as_inexact"]) <= FARTHER
        or not float(found["shared_times_as_inexact_at_most"]) <= FARTHEST
    )


def show(columns: dict[str, dict[str, Cell]], layouts: Iterable[str]) -> None:
    """As a table."""
    print(f"\n| layout | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for where in (CONTROL, *layouts):
        print(f"| {where} | {' | '.join(words(cells[where]) for cells in columns.values())} |")
    farthest = {name: max(float(one["moved_lr"]) for one in cells.values()) for name, cells in columns.items()}
    moved = ", ".join(f"{name} {most:.1f}" for name, most in farthest.items())
    print(f"\nWeights moved by up to (learning rates): {moved}.")


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("columns", nargs="*", choices=[[], *OPTIMIZERS, "modes"], default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = arguments.columns or [*OPTIMIZERS, "modes"]
    columns = {optimizer: column(optimizer) for optimizer in OPTIMIZERS if optimizer in chosen}
    modes = mode_columns() if "modes" in chosen else {}
    found = {"steps": STEPS, "lr": LR, "settings": FIXED, "optimizers": OPTIMIZERS, "modes": MODES}
    arguments.out.write_text(json.dumps({**found, "cells": columns, "cells_of_modes": modes}, indent=1) + "\n")
    if columns:
        show(columns, LAYOUTS)
    if modes:
        show(modes, CUT)
    return int(any(beyond(one) for cells in (*columns.values(), *modes.values()) for one in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
