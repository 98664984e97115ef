#!/usr/bin/env python3
"""Prints the gain from sharing matrices over TP groups, for every Qwen3 size on 8 to 1,024 GPUs and the models of
scripts/shapes, as Markdown.

    python scripts/modes.py [--gpus 8..1024] [OVERRIDE ...]

Each run has the layout that is chosen with hosted matrices (TP 8 for scripts/shapes), and four plans: hosted matrices
in standard form, hosted matrices, shared matrices, and `engine.mode=auto`. Two more plans, hosted and auto, have the
fastest possible kernels for symmetric products (`cluster.symmetric_factor=0.5`). Times are simulated, on the slowest
rank. Exits 1 if `auto` is slower than hosted in any row.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from simulated_runs import VERIFIED, mesh_label, resolved

from canzona_cli.bench.simulated import SIZES, parse_gpus
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import FastPath, Form, Layout, Mode, MomentumConfig, RunConfig
from canzona_cli.model.shapes import ModelShapes, load_shapes
from canzona_cli.planner.make import plan_unbounded
from canzona_cli.planner.measures import Balance, balance
from canzona_cli.run.words import predicted_overhead
from canzona_cli.simulate.compare import with_shapes
from canzona_cli.simulate.predict import simulate_plan, simulate_strategy

SHAPES = Path(__file__).parent / "shapes"
GOALS = (1.6, 3.0)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The figures of a plan."""

    balance: Balance
    update_ms: float
    """The milliseconds of updates and exchanges."""
    optimizer_ms: float
    iteration_s: float
    shared: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A resolved run. If its model is not a recipe's, `shapes` has the model's shapes."""

    name: str
    config: RunConfig
    layout: Layout
    shapes: ModelShapes | None

    def plan(
        self, mode: Literal["auto"] | Mode, form: Literal["auto"] | Form = "auto", symmetric: float = 1.0
    ) -> Planned:
        """Plans and simulates the run in a mode and form. `symmetric` is the time of a symmetric product relative to a
        full one."""
        assert isinstance(self.config.optimizer, MomentumConfig)
        config = replace(
            self.config,
            engine=replace(self.config.engine, mode=mode),
            optimizer=replace(self.config.optimizer, form=form),
            cluster=replace(self.config.cluster, symmetric_factor=symmetric, verified=get_args(FastPath)),
        )
        plan = plan_unbounded(config, self.layout, self.shapes)
        result = simulate_plan(config, self.layout, plan)
        return Planned(
            balance=balance(plan),
            update_ms=1e3 * (result.phases["matrix_update"] + result.phases["exchange"]),
            optimizer_ms=1e3 * result.optimizer_s,
            iteration_s=result.iteration_s,
            shared=len(plan.assignment.shared_costs),
        )


def cells(gpus: tuple[int, ...], overrides: list[str]) -> Iterator[Cell]:
    """Yields the runs to plan, in layouts that are chosen with hosted matrices."""
    hosted = ["cluster=h100-80g", VERIFIED, "engine.mode=hosted", *overrides]
    for recipe in SIZES:
        for count in gpus:
            fitting = resolved(recipe, count, hosted)
            if fitting is not None:
                yield Cell(name=recipe.removeprefix("qwen3-"), config=fitting[0], layout=fitting[1], shapes=None)
    for path in sorted(SHAPES.glob("*.yaml")):
        shapes = load_shapes(path)
        for count in (256, 1024):
            run = compose_run(["recipe=qwen3-32b", f"gpus={count}", "parallel.tp=8", *hosted]).config
            config, layout = resolve(with_shapes(run, shapes))
            yield Cell(name=path.stem, config=config, layout=layout, shapes=shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=parse_gpus, default=parse_gpus("8..1024"))
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    print("Balance / lower bound; ms of updates and exchanges; ms of the optimizer step; overhead over AdamW's step.\n")
    print("| run | layout | hosted, standard | hosted | shared | auto | shared matrices | symmetric: hosted | auto |")
    print("|---|---|---|---|---|---|---|---|---|")
    before: list[float] = []
    after: list[float] = []
    slower = 0
    for cell in cells(given.gpus, given.overrides):
        mesh = cell.layout
        adamw_s = simulate_strategy(cell.config, mesh, "adamw", ()).iteration_s

        def shown(plan: Planned, adamw_s: float = adamw_s) -> str:
            over = predicted_overhead(plan.iteration_s / adamw_s - 1)
            figures = f"{plan.update_ms:.1f} ms, {plan.optimizer_ms:.1f} ms, {over}"
            return f"{plan.balance.grid:.2f} / {plan.balance.lower_bound:.2f}; {figures}"

        standard, hosted = cell.plan("hosted", "standard"), cell.plan("hosted")
        shared, auto = cell.plan("shared"), cell.plan("auto")
        symmetric = [cell.plan(mode, symmetric=0.5) for mode in ("hosted", "auto")]
        columns = [shown(plan) for plan in (standard, hosted, shared, auto)]
        name = f"{cell.name} {cell.config.gpus:,}"
        layout = mesh_label(mesh)
        print(f"| {name} | {layout} | {' | '.join([*columns, str(auto.shared), *map(shown, symmetric)])} |", flush=True)
        before.append(hosted.balance.grid)
        after.append(auto.balance.grid)
        slower += auto.iteration_s > hosted.iteration_s * (1 + 1e-9)
    for goal in GOALS:
        counts = [sum(value <= goal for value in values) for values in (before, after)]
        print(f"\nRuns with a balance of at most {goal}: {counts[0]} hosted, {counts[1]} auto, of {len(after)}")
    worse_balanced = sum(new > old * 1.001 for old, new in zip(before, after, strict=True))
    print(f"\nRuns in which auto is worse balanced than hosted: {worse_balanced}; in which it is slower: {slower}")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
