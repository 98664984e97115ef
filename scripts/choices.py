#!/usr/bin/env python3
"""Which options plans choose: every Qwen3 size on 8 to 1,024 GPUs, and CPU ranks, as Markdown.

    python scripts/choices.py [--gpus 8,64,256,1024] [--sizes qwen3-0.6b,...] [--json FILE] [OVERRIDE ...]

Muon is planned on every GPU profile, SOAP and Shampoo on H100, and Muon on CPU ranks with the built-in profile and with
a calibrated one. Each run is planned as `canzona plan` plans it, with nothing asked for. The first table shows each
plan, with its number of buckets, matrices or owners that take an option. The second table counts the plans and the
buckets, matrices or owners of all plans, and the last line names the options that no plan takes.

Buffer layouts are never chosen by price. Plans are therefore made in each, and simulated: the last column names the one
with the shortest iteration, where that is shorter than the default's by more than 0.1%.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import get_args

from simulated_runs import mesh_label, resolved

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
"""Share of an iteration by which another buffer layout has to be faster to be named."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "gradients": get_args(Reduction),
    "weights": get_args(Gathering),
    "mode": get_args(Mode),
    "groups": ("one", "costliest first", "cheapest first", "mixed"),
    "form": get_args(Form),
    "updates": ("alone", "stacked"),
    "products": ("plain", "symmetric"),
    "roots": get_args(RootMethod),
    "launches": ("graph", "kernels"),
    "layout": get_args(BufferLayout),
}
"""What each choice is between. Of `groups`: the order in which an owner's matrices are cut into micro-groups."""
COLUMNS = ("profile", "optimizer", "run", "mesh", *OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan's choices, or none where the run does not fit."""

    profile: str
    optimizer: str
    run: str
    mesh: str
    chosen: Mapping[str, Mapping[str, int]]
    """By choice: how many of the plan's buckets, matrices or owners take each option."""

    def cells(self) -> Iterator[str]:
        """The row of the first table."""
        yield from (self.profile, self.optimizer, self.run, self.mesh)
        for choice in OPTIONS:
            yield ", ".join(f"{option} {count:,}" for option, count in self.chosen.get(choice, {}).items()) or "-"


def chosen(config: RunConfig, layout: Layout, plan: Plan) -> dict[str, Mapping[str, int]]:
    """What a plan takes of each choice."""
    moved, how = communication(config, layout, plan), plan.subject.optimizer
    shapes = kinds(config, plan)
    forms, updates, products = Counter[str](), Counter[str](), Counter[str]()
    for kind in shapes:
        updates["alone" if kind.together == 1 else "stacked"] += kind.matrices
        if kind.form is not None:
            forms[kind.form] += kind.matrices
            products[kind.products] += kind.matrices
    return {
        "gradients": dict[str, int](moved.reduced_by.items()),
        "weights": dict[str, int](moved.gathered_by.items()),
        "mode": dict(Counter(plan.modes)),
        "groups": dict(Counter(_orders(plan))),
        "form": dict(forms),
        "updates": dict(updates),
        "products": dict(products),
        "roots": {how.roots: len(plan.matrices)} if how.name == "shampoo" else {},
        "launches": {"graph" if how.graph else "kernels": 1},
        "layout": {_fastest_layout(config, layout, plan): 1},
    }


def _orders(plan: Plan) -> Iterator[str]:
    """By owner: the order in which its matrices were cut into micro-groups."""
    if plan.subject.layout.tp == 1:
        return
    for _, owned in groupby(plan.groups, key=lambda group: (group.stage, group.owner)):
        groups = [group.matrices for group in owned]
        if len(groups) == 1:
            yield "one"
        elif _monotonous(plan, groups, falling=True):
            yield "costliest first"
        elif _monotonous(plan, groups, falling=False):
            yield "cheapest first"
        else:
            yield "mixed"


def _monotonous(plan: Plan, groups: Sequence[Sequence[int]], *, falling: bool) -> bool:
    """Tells whether the matrices of every host cost less (or more) from group to group."""
    sign = 1 if falling else -1
    last: dict[int, float] = {}
    for group in groups:
        costs: dict[int, list[float]] = {}
        for index in group:
            costs.setdefault(plan.assignment.cells[index].host, []).append(sign * plan.costs[index])
        for host, values in costs.items():
            if host in last and max(values) > last[host]:
                return False
            last[host] = min(values)
    return True


def _fastest_layout(config: RunConfig, layout: Layout, plan: Plan) -> str:
    """The buffer layout with the shortest simulated iteration."""
    default = plan.subject.settings.layout
    best, least = str(default), simulate_plan(with_cores(config), layout, plan).iteration_s * (1 - CLEARLY)
    for other in get_args(BufferLayout):
        if other == default:
            continue
        changed = replace(config, engine=replace(config.engine, layout=other))
        try:
            planned = make_plan(changed, layout)
        except DoesNotFit:
            continue
        seconds = simulate_plan(with_cores(changed), layout, planned).iteration_s
        if seconds < least:
            best, least = other, seconds
    return best


def rows(gpus: Sequence[int], sizes: Sequence[str], overrides: Sequence[str]) -> Iterator[Row]:
    """All runs: GPU profiles with Muon, H100 with SOAP and Shampoo, CPU ranks."""
    runs = [(profile, "muon", recipe, count) for profile in GPU_PROFILES for recipe in sizes for count in gpus]
    runs += [("h100-80g", name, recipe, count) for name in ("soap", "shampoo") for recipe in sizes for count in gpus]
    runs += [
        (profile, "muon", recipe, count)
        for profile in ("cpu", str(CALIBRATED))
        for recipe in CPU_SIZES
        for count in CPU_RANKS
    ]
    for profile, optimizer, recipe, count in runs:
        found = resolved(recipe, count, [f"cluster={profile}", f"optimizer={optimizer}", *overrides])
        mesh, taken = "does not fit", dict[str, Mapping[str, int]]()
        if found is not None:
            config, layout = found
            mesh, taken = mesh_label(layout), chosen(config, layout, make_plan(config, layout))
        run = f"{recipe.removeprefix('qwen3-')} {count:,}"
        yield Row(profile=Path(profile).stem, optimizer=optimizer, run=run, mesh=mesh, chosen=taken)


def totals(found: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
    """(choice, option, plans, buckets or matrices or owners) of every option there is."""
    for choice, options in OPTIONS.items():
        for option in options:
            counts = [row.chosen[choice][option] for row in found if option in row.chosen.get(choice, {})]
            yield choice, option, len(counts), sum(counts)


def line(cells: Sequence[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=parse_gpus, default=parse_gpus("8,64,256,1024"))
    parser.add_argument("--sizes", type=lambda text: tuple(text.split(",")), default=SIZES)
    parser.add_argument("--json", type=Path, help="write all rows there, too")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    print(line(COLUMNS))
    print(line(["---"] * len(COLUMNS)))
    found: list[Row] = []
    for row in rows(given.gpus, given.sizes, given.overrides):
        found.append(row)
        print(line(list(row.cells())), flush=True)
    fitting = sum(bool(row.chosen) for row in found)
    print(f"\n{fitting} plans; {len(found) - fitting} runs do not fit.\n")
    print(line(["choice", "option", "plans", "buckets, matrices or owners"]))
    print(line(["---", "---", "---:", "---:"]))
    summary = list(totals(found))
    for choice, option, plans, parts in summary:
        print(line([choice, option, plans, f"{parts:,}"]))
    never = [f"{choice} {option}" for choice, option, plans, _ in summary if not plans]
    print(f"\nChosen in no row: {', '.join(never) or 'nothing'}")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
