#!/usr/bin/env python3
"""Simulates plans of many models, GPUs and optimizers, and compares them with those of another commit.

    python scripts/grid.py run FILE
    python scripts/grid.py compare BEFORE AFTER

Runs are planned in the layouts that canzona chooses. Those on H100 may use every fast path; those on A100 are as
shipped.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from simulated_runs import VERIFIED, mesh_label, resolved

from canzona_cli.bench.simulated import SIZES
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.measures import balance
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.simulate.predict import simulate_plan, with_cores

Row = Mapping[str, float | str]


def cells() -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yields each run as its recipe, number of ranks and overrides."""
    fast = ("cluster=h100-80g", VERIFIED)
    yield from ((size, gpus, fast) for size in SIZES for gpus in (8, 64, 256, 1024))
    yield from (("qwen3-30b-a3b", gpus, fast) for gpus in (8, 64, 256))
    yield "qwen3-235b-a22b", 256, fast
    small = ("qwen3-1.7b", "qwen3-8b")
    yield from ((size, 64, (*fast, f"optimizer={name}")) for name in ("soap", "shampoo") for size in small)
    yield from ((size, gpus, ("cluster=a100-80g",)) for size in SIZES for gpus in (64, 256))
    yield from (("qwen3-30b-a3b", gpus, ("cluster=a100-80g",)) for gpus in (8, 64))
    for mesh in ((2, 1), (2, 2), (4, 1), (4, 2)):
        yield from ((name, mesh[0], ("cluster=cpu", f"parallel.tp={mesh[1]}")) for name in ("qwen3-tiny", "qwen3-mini"))
    yield from (("qwen3-moe-tiny", 4, ("cluster=cpu", f"parallel.tp={tp}")) for tp in (1, 2))


def simulated(recipe: str, gpus: int, overrides: Sequence[str]) -> Row | None:
    """Returns the figures of a run's plan; None if the run does not fit."""
    if (fitting := resolved(recipe, gpus, overrides)) is None:
        return None
    config, layout = fitting
    plan = make_plan(config.setup, layout)
    result = simulate_plan(with_cores(config.setup), layout, plan)
    times = {"iteration": result.iteration_s, "optimizer": result.optimizer_s, "balance": balance(plan).grid}
    memory = plan_memory(config.setup, layout, plan).total / (1 << 30)
    return {"layout": f"{mesh_label(layout)} b{layout.micro_batch_size}", **times, "memory": memory}


def compare(before: Mapping[str, Row], after: Mapping[str, Row]) -> None:
    """Prints the worst and the mean change of each figure: relative, but GiB for memory, and points for balance."""
    for figure in ("iteration", "optimizer", "balance", "memory"):
        changes = {}
        for name in before.keys() & after.keys():
            old, new = float(before[name][figure]), float(after[name][figure])
            changes[name] = new - old if figure in ("memory", "balance") else 100 * (new / old - 1)
        ordered = sorted(changes, key=lambda name: (changes[name], name))
        ends = ", ".join(f"{name}: {changes[name]:+.3f}" for name in [*ordered[:2], *ordered[-4:]])
        print(f"{figure} ({len(changes)} cells): mean {fmean(changes.values()):+.4f}; {ends}")
    moved = [name for name in before.keys() & after.keys() if before[name]["layout"] != after[name]["layout"]]
    print("other layouts:", *(f"{name}: {before[name]['layout']} -> {after[name]['layout']}" for name in sorted(moved)))
    print("only in one:", *sorted(before.keys() ^ after.keys()))


def main() -> None:
    if sys.argv[1] == "compare":
        compare(*(json.loads(Path(name).read_text()) for name in sys.argv[2:4]))
        return
    names = {
        f"{recipe} {gpus} {' '.join(o for o in given if o != VERIFIED)}": (recipe, gpus, given)
        for recipe, gpus, given in cells()
    }
    rows = {name: row for name, cell in names.items() if (row := simulated(*cell)) is not None}
    Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
