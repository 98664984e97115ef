#!/usr/bin/env python3
"""Makes every simulated table of the README and the bench manual anew, as Markdown.

    python scripts/figures.py [--only TABLE] [--gpus 8,64] [--sizes qwen3-0.6b,...] [--write | --check]

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`. `--write` replaces what is there, `--check`
exits 1 where it is not what would be written. A yardstick that does not fit into memory has a dash.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from textwrap import fill

from simulated_runs import resolved

from canzona_cli.bench.simulated import SIZES, parse_gpus
from canzona_cli.cluster.search import Tried, fastest_with
from canzona_cli.config.compose import compose_run
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Layout, MomentumConfig, RunConfig
from canzona_cli.planner.make import make_plan
from canzona_cli.run.words import MISSING, layout_words, milliseconds, overhead, step_time
from canzona_cli.simulate.compare import Study, study_run
from canzona_cli.simulate.predict import simulate_plan, simulate_strategy
from canzona_cli.simulate.step import StrategyResult

ROOT = Path(__file__).parents[1]
README, MANUAL = ROOT / "README.md", ROOT / "canzona_cli" / "bench" / "README.md"
MODEL = "qwen3-32b"
PLAIN = ("parallel.pp=1", "optimizer.form=standard")
"""Without pipeline stages, and with the arithmetic of Megatron's Muon in all strategies."""
PAPERS_LAYOUT = ("parallel.tp=8", "parallel.pp=1")
PAPERS_GPUS = 256
PESSIMISTIC = (
    "cluster.matmul_tflops=[[1024,250],[2048,440],[4096,600],[8192,660]]",
    "cluster.sustained_tflops=660",
    "cluster.memory_gb_per_s=2700",
    "cluster.graph_launch_us=2.5",
)
"""An H100 that falls short of what others measured: products and memory a tenth to a fifth slower than its profile."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table, or what is asked for of it."""

    caption: str
    """How it is made."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        caption = fill(self.caption, 120, break_long_words=False, break_on_hyphens=False)
        return "\n\n".join(part for part in (caption, table, self.summary) if part)


@cache
def run(recipe: str, gpus: int, overrides: tuple[str, ...]) -> tuple[RunConfig, Layout] | None:
    return resolved(recipe, gpus, ["cluster=h100-80g", *overrides])


@cache
def study(recipe: str, gpus: int, *overrides: str) -> Study | None:
    """All strategies in the layout that canzona chooses."""
    fitting = run(recipe, gpus, overrides)
    return None if fitting is None else study_run(*fitting)


@cache
def best(recipe: str, gpus: int, strategy: AnyStrategy, *overrides: str) -> Tried | None:
    """AdamW or layerwise in the layout that is fastest for itself; None where one or canzona fits in none."""
    found = study(recipe, gpus, *overrides)
    if found is None:
        return None
    config = compose_run([f"recipe={recipe}", f"gpus={gpus}", "cluster=h100-80g", *overrides]).config
    return fastest_with(config, strategy, found.layout)


def words(layout: Layout) -> str:
    """A layout as the documents write it."""
    return layout_words(layout, times="×")


def over(this: Study | Tried | None, yardstick: Tried | None) -> float | None:
    """How much longer an iteration is than the yardstick's, per sequence; None where one of them does not fit."""
    if this is None or yardstick is None:
        return None
    iteration_s = this.iteration_s if isinstance(this, Tried) else this.planned.result.iteration_s
    return iteration_s / this.layout.global_batch_size / yardstick.per_sequence_s - 1


def plain_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """32B without pipeline stages: all strategies in one layout."""
    rows = []
    for count in gpus:
        found = study(MODEL, count, *PLAIN)
        if found is None:
            rows.append([f"{count:,}", "does not fit", *[MISSING] * 5])
            continue
        names = ("canzona", "asc", "layerwise", "sc")
        steps = [
            step_time(found.result(name).optimizer_s) if found.strategies[name].fits else MISSING for name in names
        ]
        shares = ", ".join(overhead(found.overhead(name)) for name in ("canzona", "layerwise", "sc"))
        rows.append([f"{count:,}", words(found.layout), *steps, shares])
    listed = ",".join(map(str, gpus))
    return Table(
        caption=f"By `canzona bench --simulate --gpus {listed} recipe={MODEL} {' '.join(PLAIN)}`:",
        columns=(
            "GPUs", "layout", "optimizer step: canzona", "`asc`", "`layerwise`", "`sc`",
            "iteration over AdamW's: canzona, `layerwise`, `sc`",
        ),
        rows=rows,
    )  # fmt: skip


def best_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """32B with every strategy in the layout that is fastest for itself."""
    rows = []
    for count in gpus:
        found, adamw = study(MODEL, count), best(MODEL, count, "adamw")
        layerwise = best(MODEL, count, "layerwise")
        rows.append([
            f"{count:,}",
            MISSING if found is None else _described(found.layout, found.planned.result),
            MISSING if adamw is None else f"{words(adamw.layout)}: {step_time(adamw.iteration_s)}",
            MISSING if layerwise is None else _described(layerwise.layout, layerwise),
            overhead(None if found is None else found.overhead("canzona")),
            overhead(over(found, adamw)),
            overhead(over(layerwise, adamw)),
        ])  # fmt: skip
    return Table(
        caption=f"Iteration, and in brackets its optimizer step, in the layouts that `canzona train --dry-run "
        f"recipe={MODEL} gpus=GPUS` chooses, for AdamW with `optimizer=adamw` and for "
        "`layerwise` with `engine.strategy=layerwise`:",
        columns=(
            "GPUs", "canzona", "AdamW", "`layerwise`", "canzona over AdamW in canzona's layout",
            "over AdamW at its best", "`layerwise` over AdamW at its best",
        ),
        rows=rows,
    )  # fmt: skip


def _described(layout: Layout, result: StrategyResult | Tried) -> str:
    return f"{words(layout)}: {step_time(result.iteration_s)} ({step_time(result.optimizer_s)})"


def sizes_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Every size: canzona in its layout, AdamW in that one and in its own best, at both rates."""
    rows = []
    overheads: dict[str, list[float]] = {"these": [], "pessimistic": []}
    for recipe in sizes:
        for count in gpus:
            name = [recipe.removeprefix("qwen3-"), f"{count:,}"]
            found = study(recipe, count)
            if found is None:
                rows.append([*name, "does not fit", *[MISSING] * 8])
                continue
            result = found.planned.result
            pessimistic = study(recipe, count, *PESSIMISTIC)
            ratios = {
                "these": over(found, best(recipe, count, "adamw")),
                "pessimistic": over(pessimistic, best(recipe, count, "adamw", *PESSIMISTIC)),
            }
            for rates, ratio in ratios.items():
                overheads[rates].extend([] if ratio is None else [ratio])
            rows.append([
                *name,
                words(found.layout),
                step_time(result.iteration_s),
                milliseconds(result.optimizer_s),
                f"{found.balance.grid:.2f} ({found.balance.lower_bound:.2f})",
                milliseconds(result.phases["exchange"]),
                overhead(found.overhead("canzona")),
                overhead(ratios["these"]),
                overhead(None if pessimistic is None else pessimistic.overhead("canzona")),
                overhead(ratios["pessimistic"]),
            ])  # fmt: skip
    rates = ", ".join(f"`{text}`" for text in PESSIMISTIC)
    said = [
        f"{overhead(median(values))} in the median, from {overhead(min(values))} to {overhead(max(values))}"
        for values in overheads.values()
        if values
    ]
    return Table(
        caption="With `recipe=MODEL gpus=GPUS` and nothing else, which chooses the layout; load balance (the least any "
        f"plan can reach), and of the exchange what no update hides. The pessimistic rates are {rates}:",
        columns=(
            "model", "GPUs", "layout", "iteration", "optimizer step, ms", "balance", "exchange, ms",
            "over AdamW in this layout", "over AdamW at its best", "pessimistic: in this layout", "at its best",
        ),
        rows=rows,
        summary=f"Over AdamW at its best: {'; at pessimistic rates '.join(said)}." if said else "",
    )  # fmt: skip


def arithmetics_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """32B in the layout of the default, with Megatron's arithmetic, canzona's, and perfect symmetric products."""
    rows = []
    for count in gpus:
        fitting = run(MODEL, count, ())
        if fitting is None:
            continue
        config, layout = fitting
        assert isinstance(config.optimizer, MomentumConfig)
        adamw = simulate_strategy(config, layout, "adamw", ())
        variants = (
            replace(config, optimizer=replace(config.optimizer, form="standard")),
            config,
            replace(config, cluster=replace(config.cluster, symmetric_factor=0.5)),
        )
        cells = []
        for variant in variants:
            result = simulate_plan(variant, layout, make_plan(variant, layout))
            share = overhead(result.iteration_s / adamw.iteration_s - 1, digits=2)
            cells.append(f"{milliseconds(result.optimizer_s)} ms, {share}")
        rows.append([f"{count:,}", words(layout), *cells])
    return Table(
        caption=f"With `recipe={MODEL} gpus=GPUS`, in the layout that the default has: optimizer step, and the "
        "iteration over AdamW's in that layout:",
        columns=("GPUs", "layout", "`optimizer.form=standard`", "default", "`cluster.symmetric_factor=0.5`"),
        rows=rows,
    )


def optimizers_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """32B in the paper's layout with Muon, SOAP and Shampoo."""
    rows = []
    for optimizer in ("muon", "soap", "shampoo"):
        found = study(MODEL, PAPERS_GPUS, f"optimizer={optimizer}", *PAPERS_LAYOUT)
        if found is None:
            rows.append([f"`{optimizer}`", *[MISSING] * 5])
            continue
        ratios = [found.optimizer_speedup(name) for name in ("asc", "layerwise", "sc")]
        times = [MISSING if ratio is None else f"{ratio:.1f}x" for ratio in ratios]
        step = f"{milliseconds(found.planned.result.optimizer_s)} ms"
        rows.append([f"`{optimizer}`", step, *times, overhead(found.overhead("canzona"))])
    return Table(
        caption=f"With `recipe={MODEL} gpus={PAPERS_GPUS} {' '.join(PAPERS_LAYOUT)} optimizer=NAME`, the other "
        "strategies' optimizer step as multiples of canzona's:",
        columns=("optimizer", "canzona's step", "`asc`", "`layerwise`", "`sc`", "iteration over AdamW's"),
        rows=rows,
    )


LARGE = (64, 256, 1024)
TABLES: Mapping[str, tuple[Path, tuple[int, ...], Callable[[Sequence[int], Sequence[str]], Table]]] = {
    "best": (README, LARGE, best_table),
    "plain": (MANUAL, LARGE, plain_table),
    "sizes": (MANUAL, (8, *LARGE), sizes_table),
    "arithmetics": (MANUAL, LARGE, arithmetics_table),
    "optimizers": (MANUAL, (PAPERS_GPUS,), optimizers_table),
}
"""By name: where a table stands, on how many GPUs, and what makes it."""


def marked(name: str) -> re.Pattern[str]:
    """Finds a table with its markers, which are its two groups."""
    return re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- /figures -->)", re.DOTALL)


def refreshed(text: str, name: str, table: str) -> str:
    """A document with a table made anew.

    Raises:
        SystemExit: the document has no such markers, or has them twice.
    """
    changed, places = marked(name).subn(lambda found: f"{found[1]}{table}\n\n{found[2]}", text)
    if places != 1:
        raise SystemExit(f"the markers of {name} stand at {places} places, not at one")
    return changed


def made(names: Sequence[str], gpus: Sequence[int] | None, sizes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each table's name and Markdown."""
    for name in names:
        _, counts, make = TABLES[name]
        yield name, make(counts if gpus is None else gpus, sizes).markdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, help="one table")
    parser.add_argument("--gpus", type=parse_gpus, help="on other numbers of GPUs than the documents have")
    parser.add_argument("--sizes", type=lambda text: tuple(text.split(",")), help="of the table of sizes")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="refresh the documents")
    action.add_argument("--check", action="store_true", help="exit 1 where a document differs")
    given = parser.parse_args()
    if (given.write or given.check) and (given.gpus or given.sizes):
        parser.error("--write and --check make whole tables: leave --gpus and --sizes out")
    stale = []
    for name, table in made([given.only] if given.only else list(TABLES), given.gpus, given.sizes or SIZES):
        print(f"## {name}\n\n{table}\n", flush=True)
        path = TABLES[name][0]
        if given.write or given.check:
            before = path.read_text(encoding="utf-8")
            after = refreshed(before, name, table)
            if after != before:
                stale.append(f"{name} in {path.relative_to(ROOT)}")
                if given.write:
                    path.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'Refreshed' if given.write else 'Not as made now (make figures)'}: {', '.join(stale)}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
