#!/usr/bin/env python3
"""Prints the options that plans choose, for every Qwen3 size on 8 to 1,024 GPUs and on CPU ranks, as Markdown.

    python scripts/choices.py [--gpus 8,64,256,1024] [--sizes qwen3-0.6b,...] [--json FILE] [OVERRIDE ...]

Muon is planned on every GPU profile, SOAP and Shampoo on H100, and Muon on CPU ranks with the built-in profile and with
a calibrated one. Each run is planned as by `canzona plan` with default settings, on GPUs with all fast paths verified,
so that they are chosen by their prices (as shipped, they are off). The first table shows, for each plan, how many of
its buckets, matrices or owners use each option. The second table has the sums over all plans. The last line lists the
options that no plan uses.

A plan does not choose the buffer layout by cost. The last column of the first table therefore compares plans with each
layout: it shows the default, or the layout with the shortest iteration if that is more than 0.1% shorter.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from simulated_runs import VERIFIED, mesh_label, resolved

from canzona_cli.bench.simulated import SIZES, parse_gpus
from canzona_cli.config.schema import BufferLayout, Form, Gathering, Layout, Mode, Reduction, RootMethod, RunConfig
from canzona_cli.errors import DoesNotFit
from canzona_cli.planner.make import make_plan
from canzona_cli.planner.measures import communication, kinds
from canzona_cli.planner.plan import Plan
from canzona_cli.simulate.predict import simulate_plan, with_cores

GPU_PROFILES = ("a100-80g", "h100-80g", "h200", "b200")
CALIBRATED = Path(__file__).parent / "profiles" / "cpu-calibrated.yaml"
CPU_SIZES = ("qwen3-tiny", "qwen3-mini")
CPU_RANKS = (2, 4, 8)
CLEARLY = 1e-3
"""The share of an iteration by which another buffer layout must be faster than the default to be shown."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "gradients": get_args(Reduction),
    "weights": get_args(Gathering),
    "mode": get_args(Mode),
    "groups": ("one", "several"),
    "form": get_args(Form),
    "updates": ("alone", "stacked"),
    "products": ("plain", "symmetric"),
    "roots": get_args(RootMethod),
    "launches": ("graph", "kernels"),
    "layout": get_args(BufferLayout),
}
"""The options of each choice. For `groups`, they are the number of micro-groups of an owner."""
COLUMNS = ("profile", "optimizer", "run", "mesh", *OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The choices of a run's plan."""

    profile: str
    optimizer: str
    run: str
    mesh: str
    chosen: Mapping[str, Mapping[str, int]]
    """The number of the plan's buckets, matrices or owners by choice and option; empty if the run does not fit."""

    def cells(self) -> Iterator[str]:
        """Yields the cells of the first table."""
        yield from (self.profile, self.optimizer, self.run, self.mesh)
        for choice in OPTIONS:
            yield ", ".join(f"{option} {count:,}" for option, count in self.chosen.get(choice, {}).items()) or "-"


def chosen(config: RunConfig, layout: Layout, plan: Plan) -> dict[str, Mapping[str, int]]:
    """Returns the number of buckets, matrices or owners of a plan that use each option, by choice."""
    communicated, algorithm = communication(config, layout, plan), plan.subject.optimizer
    forms, updates, products = Counter[str](), Counter[str](), Counter[str]()
    for kind in kinds(config, plan):
        updates["alone" if kind.together == 1 else "stacked"] += kind.matrices
        if kind.form is not None:
            forms[kind.form] += kind.matrices
            products[kind.products] += kind.matrices
    return {
        "gradients": dict[str, int](communicated.reduced_by.items()),
        "weights": dict[str, int](communicated.gathered_by.items()),
        "mode": dict(Counter(plan.modes)),
        "groups": dict(Counter(_describe_groups(plan))),
        "form": dict(forms),
        "updates": dict(updates),
        "products": dict(products),
        "roots": {algorithm.roots: len(plan.matrices)} if algorithm.name == "shampoo" else {},
        "launches": {"graph" if algorithm.graph else "kernels": 1},
        "layout": {_fastest_layout(config, layout, plan): 1},
    }


def _describe_groups(plan: Plan) -> Iterator[str]:
    """Yields "one" or "several" for each owner, by its number of micro-groups; yields nothing if tp is 1."""
    if plan.subject.layout.tp > 1:
        groups = Counter((group.stage, group.owner) for group in plan.groups)
        yield from ("one" if count == 1 else "several" for count in groups.values())


def _fastest_layout(config: RunConfig, layout: Layout, plan: Plan) -> str:
    """Returns the buffer layout with the shortest simulated iteration, but the default unless another is clearly
    faster."""
    default = plan.subject.settings.layout
    best, shortest_s = str(default), simulate_plan(with_cores(config), layout, plan).iteration_s * (1 - CLEARLY)
    for other in get_args(BufferLayout):
        if other == default:
            continue
        changed = replace(config, engine=replace(config.engine, layout=other))
        try:
            planned = make_plan(changed, layout)
        except DoesNotFit:
            continue
        iteration_s = simulate_plan(with_cores(changed), layout, planned).iteration_s
        if iteration_s < shortest_s:
            best, shortest_s = other, iteration_s
    return best


def rows(gpus: Sequence[int], sizes: Sequence[str], overrides: Sequence[str]) -> Iterator[Row]:
    """Plans all runs and yields their rows: Muon on each GPU profile, SOAP and Shampoo on H100, and Muon on CPU
    ranks."""
    runs = [(profile, "muon", recipe, count) for profile in GPU_PROFILES for recipe in sizes for count in gpus]
    runs += [("h100-80g", name, recipe, count) for name in ("soap", "shampoo") for recipe in sizes for count in gpus]
    runs += [
        (profile, "muon", recipe, count)
        for profile in ("cpu", str(CALIBRATED))
        for recipe in CPU_SIZES
        for count in CPU_RANKS
    ]
    for profile, optimizer, recipe, count in runs:
        verified = [VERIFIED] if profile in GPU_PROFILES else []
        fitting = resolved(recipe, count, [f"cluster={profile}", f"optimizer={optimizer}", *verified, *overrides])
        mesh, used = "does not fit", dict[str, Mapping[str, int]]()
        if fitting is not None:
            config, layout = fitting
            mesh, used = mesh_label(layout), chosen(config, layout, make_plan(config, layout))
        run = f"{recipe.removeprefix('qwen3-')} {count:,}"
        yield Row(profile=Path(profile).stem, optimizer=optimizer, run=run, mesh=mesh, chosen=used)


def totals(planned: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
    """Yields (choice, option, plans, buckets or matrices or owners) for every option."""
    for choice, options in OPTIONS.items():
        for option in options:
            counts = [row.chosen[choice][option] for row in planned if option in row.chosen.get(choice, {})]
            yield choice, option, len(counts), sum(counts)


def line(cells: Sequence[object]) -> str:
    """Formats a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=parse_gpus, default=parse_gpus("8,64,256,1024"))
    parser.add_argument("--sizes", type=lambda text: tuple(text.split(",")), default=SIZES)
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    print(line(COLUMNS))
    print(line(["---"] * len(COLUMNS)))
    planned: list[Row] = []
    for row in rows(given.gpus, given.sizes, given.overrides):
        planned.append(row)
        print(line(list(row.cells())), flush=True)
    fitting = sum(bool(row.chosen) for row in planned)
    print(f"\n{fitting} plans; {len(planned) - fitting} runs do not fit.\n")
    print(line(["choice", "option", "plans", "buckets, matrices or owners"]))
    print(line(["---", "---", "---:", "---:"]))
    summary = list(totals(planned))
    for choice, option, plans, parts in summary:
        print(line([choice, option, plans, f"{parts:,}"]))
    never = [f"{choice} {option}" for choice, option, plans, _ in summary if not plans]
    print(f"\nChosen in no row: {', '.join(never) or 'nothing'}")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in planned], indent=1) + "\n")


if __name__ == "__main__":
    main()
