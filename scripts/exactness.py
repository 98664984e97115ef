#!/usr/bin/env python3
"""How far 20 real fp32 steps of the engine are from those of one rank, by layout and optimizer, as Markdown and JSON.

    make exactness                                            # every optimizer, into exactness.json
    python scripts/exactness.py OUT.json [muon] [shampoo] [soap]

Each cell has two numbers. The first is the largest deviation of any weight from the run on one rank, in learning rates:
sums are taken in another order, and the optimizer amplifies their rounding. The first row shows what rounding alone
does to one rank that cuts its batch into other micro-batches. The second is what the engine adds: the matrices of that
very run against an ordinary optimizer that steps them whole, in one process, with the gradients that the run's ranks
had reduced. "bitwise" means that all 14 of them are equal to the last bit. Takes about two minutes on two cores. It
starts real ranks, so `tests` must be importable (a checkout, installed with `make setup`).
"""

import argparse
import json
import logging
import warnings
from pathlib import Path

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from tests.dist.trained import (
    FIXED,
    LAYOUTS,
    LR,
    OPTIMIZERS,
    STEPS,
    Trained,
    deviation,
    different,
    one_rank,
    replay,
    run_training,
)

CONTROL = "1 rank, other micro-batches"
Cell = dict[str, float | int | str]


def train(*overrides: str) -> tuple[Trained, list[str]]:
    """A run, and the matrices for which an ordinary optimizer gives another result."""
    config, layout = fit.resolve(compose_run([*FIXED, *overrides]).config)
    found = run_training(config, layout, STEPS)
    return found, different(found.after, replay(found, config))


def column(optimizer: str) -> dict[str, Cell]:
    """Every layout's cell."""
    settings, cells = OPTIMIZERS[optimizer], dict[str, Cell]()
    alone: dict[tuple[str, ...], Trained] = {}
    for where, overrides in LAYOUTS.items():
        single = one_rank(where)
        if single not in alone:
            alone[single], _ = train(*settings, *single)
        if not cells:
            cells[CONTROL] = cell(alone[single], *train(*settings, *single, "train.micro_batch_size=1"))
        cells[where] = cell(alone[single], *train(*settings, *overrides))
        print(f"{optimizer}, {where}: {words(cells[where])}", flush=True)
    return cells


def cell(alone: Trained, found: Trained, wrong: list[str]) -> Cell:
    return {
        "deviation_lr": deviation(found.after, alone.after, LR),
        "moved_lr": deviation(found.after, found.before, LR),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(found.losses, alone.losses, strict=True)),
        "matrices": len(found.gradients[0]),
        "matrices_not_bitwise": len(wrong),
    }


def words(found: Cell) -> str:
    engine = f"{found['matrices_not_bitwise']} differ" if found["matrices_not_bitwise"] else "bitwise"
    return f"{found['deviation_lr']:.1e}, {engine}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("optimizers", nargs="*", choices=[[], *OPTIMIZERS], default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    columns = {optimizer: column(optimizer) for optimizer in arguments.optimizers or OPTIMIZERS}
    arguments.out.write_text(
        json.dumps({"steps": STEPS, "lr": LR, "settings": FIXED, "optimizers": OPTIMIZERS, "cells": columns}, indent=1)
        + "\n"
    )
    print(f"\n| layout | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for where in (CONTROL, *LAYOUTS):
        print(f"| {where} | {' | '.join(words(cells[where]) for cells in columns.values())} |")
    farthest = {name: max(float(one["moved_lr"]) for one in cells.values()) for name, cells in columns.items()}
    moved = ", ".join(f"{name} {most:.1f}" for name, most in farthest.items())
    print(f"\nWeights moved by up to (learning rates): {moved}.")


if __name__ == "__main__":
    main()
