#!/usr/bin/env python3
"""Prints every simulated table of the README and the manuals as Markdown, and updates the documents.

    python scripts/figures.py [--only TABLE] [--write | --check]

In a document, a table is between `<!-- figures: NAME -->` and `<!-- /figures -->`. `--write` replaces the tables,
`--check` exits 1 if a table is out of date. A dash means that a strategy does not fit in memory.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import get_args

from canzona_cli.cli.views.layouts import SIZES
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import FastPath, Layout, MuonTpMode
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.simulate.compare import Study, study_run
from canzona_cli.core.simulate.predict import simulate_plan
from canzona_cli.core.simulate.search import LayoutResult, fastest_with, search
from canzona_cli.core.simulate.step import StrategyResult
from canzona_cli.records.words import MISSING, layout_words, milliseconds, predicted_overhead, step_time

ROOT = Path(__file__).parents[1]
README, MANUAL = ROOT / "README.md", ROOT / "canzona_cli" / "bench" / "README.md"
WAYS = ROOT / "canzona_cli" / "MUON.md"
MODEL = "qwen3-32b"
PLAIN = ("parallel.pp=1", "optimizer.form=standard")
"""The overrides for no pipeline stages and for Megatron's form of Muon in all strategies."""
BATCHES: Mapping[str, tuple[str, ...]] = {
    "1 M": (),
    "4 M": ("train.batch_tokens=4194304",),
    "16 M": ("train.batch_tokens=16777216",),
}
"""The overrides for the number of tokens in a step, by that number. Built-in recipes of these sizes have 1 M."""
BALANCED = ("qwen3-8b", "qwen3-14b", MODEL, "qwen3-30b-a3b")
"""The recipes of the table `balance`."""
WAYS_OF = (("qwen3-8b", 64), (MODEL, 256), (MODEL, 1024), ("qwen3-30b-a3b", 64))
"""The recipes and the numbers of GPUs of the table `ways`."""
PAPERS_LAYOUT = ("parallel.tp=8", "parallel.pp=1")
PAPERS_GPUS = 256
PESSIMISTIC = (
    "cluster.matmul_tflops=[[1024,250],[2048,440],[4096,600],[8192,660]]",
    "cluster.sustained_tflops=660",
    "cluster.memory_gb_per_s=2700",
    "cluster.launch_us=10.0",
)
"""The overrides for a pessimistic H100, with products and memory 10% to 20% slower than in the profile."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with its caption and, below, an optional summary."""

    caption: str
    """A sentence that says how the table was computed."""
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
    try:
        return resolve(compose_run([f"recipe={recipe}", f"gpus={gpus}", "cluster=h100-80g", *overrides]).config)
    except DoesNotFit:
        return None


@cache
def study(recipe: str, gpus: int, *overrides: str) -> Study | None:
    """Simulates all strategies in the layout that canzona chooses; returns None if no layout fits in memory."""
    fitting = run(recipe, gpus, overrides)
    return None if fitting is None else study_run(fitting[0].setup, fitting[1])


@cache
def best(recipe: str, gpus: int, strategy: AnyStrategy, *overrides: str) -> LayoutResult | None:
    """Simulates a strategy in the layout in which it is fastest; returns None if it or canzona fits in memory in no
    layout."""
    studied = study(recipe, gpus, *overrides)
    if studied is None:
        return None
    config = compose_run([f"recipe={recipe}", f"gpus={gpus}", "cluster=h100-80g", *overrides]).config
    return fastest_with(config.setup, strategy, studied.layout)


def words(layout: Layout) -> str:
    """Formats a layout for the documents."""
    return layout_words(layout, times="×")


def relative_overhead(result: Study | LayoutResult | None, yardstick: LayoutResult | None) -> float | None:
    """Returns how much longer a result's time per sequence is than the yardstick's (0.01 is 1%); None if one of the two
    does not fit in memory."""
    if result is None or yardstick is None:
        return None
    iteration_s = result.iteration_s if isinstance(result, LayoutResult) else result.planned.result.iteration_s
    return iteration_s / result.layout.global_batch_size / yardstick.per_sequence_s - 1


def plain_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of 32B without pipeline stages, with all strategies in the same layout."""
    rows = []
    for count in gpus:
        studied = study(MODEL, count, *PLAIN)
        if studied is None:
            rows.append([f"{count:,}", "does not fit", *[MISSING] * 5])
            continue
        names = ("canzona", "asc", "layerwise", "sc")
        steps = [
            step_time(studied.result(name).optimizer_s) if studied.strategies[name].fits else MISSING for name in names
        ]
        overheads = ", ".join(predicted_overhead(studied.overhead(name)) for name in ("canzona", "layerwise", "sc"))
        rows.append([f"{count:,}", words(studied.layout), *steps, overheads])
    return Table(
        caption=f"Computed by `canzona plan -v recipe={MODEL} {' '.join(PLAIN)} gpus=GPUS`, "
        "with 1 M tokens a step. canzona and `asc` choose the size of their buckets; `layerwise`, `sc` and AdamW have "
        "Megatron's default. `layerwise` and `sc` are in the faster of the TP modes that Megatron-core 0.19 has "
        "(`engine.muon_tp_mode`):",
        columns=(
            "GPUs", "layout", "optimizer step: canzona", "`asc`", "`layerwise`", "`sc`",
            "iteration over AdamW's: canzona, `layerwise`, `sc`",
        ),
        rows=rows,
    )  # fmt: skip


def best_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of 32B by batch, with every strategy in the layout that is fastest for it."""
    rows = []
    for count in gpus:
        for batch, overrides in BATCHES.items():
            studied, adamw = study(MODEL, count, *overrides), best(MODEL, count, "adamw", *overrides)
            layerwise = best(MODEL, count, "layerwise", *overrides)
            rows.append([
                f"{count:,}",
                batch,
                MISSING if studied is None else _described(studied.planned.result),
                MISSING if adamw is None else step_time(adamw.iteration_s),
                MISSING if layerwise is None else _described(layerwise),
                predicted_overhead(relative_overhead(studied, adamw)),
                predicted_overhead(relative_overhead(layerwise, adamw)),
            ])  # fmt: skip
    return Table(
        caption="The iteration and, in brackets, its optimizer step, each in its own fastest layout: that of `canzona "
        f"train --dry-run recipe={MODEL} gpus=GPUS train.batch_tokens=TOKENS`, with `optimizer=adamw` for AdamW and "
        "`engine.strategy=layerwise` for `layerwise`. Each has the size of buckets (`parallel.bucket_elements`) with "
        "which it is fastest, and `layerwise` is in its faster TP mode. Updates take as long with any batch, so they "
        "cost less of a step with a larger one:",
        columns=(
            "GPUs", "tokens a step", "canzona", "AdamW", "`layerwise`", "canzona over AdamW", "`layerwise` over AdamW",
        ),
        rows=rows,
    )  # fmt: skip


def _described(result: StrategyResult | LayoutResult) -> str:
    return f"{step_time(result.iteration_s)} ({step_time(result.optimizer_s)})"


def balance_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of canzona, the paper's engine and unbalanced owners in the same layout."""
    rows = []
    for recipe in BALANCED:
        for count in gpus:
            studied = study(recipe, count)
            if studied is None:
                continue
            results = [studied.result(name) for name in ("canzona", "paper", "asc")]
            ratios = [result.iteration_s / results[0].iteration_s - 1 for result in results[1:]]
            name = recipe.removeprefix("qwen3-")
            times = [f"{milliseconds(result.iteration_s)} ({milliseconds(result.optimizer_s)})" for result in results]
            rows.append(
                [name, f"{count:,}", words(studied.layout), *times, *(f"{100 * ratio:+.1f}%" for ratio in ratios)]
            )
    return Table(
        caption="Computed with `recipe=MODEL gpus=GPUS`, with 1 M tokens a step, in canzona's layout: the iteration "
        "and, in brackets, its optimizer step, in ms. `paper` and `asc` choose collectives and bucket sizes as canzona "
        "does, so the last columns have what canzona's owners, hosts, shared matrices and micro-groups gain, and "
        "nothing else:",
        columns=(
            "model",
            "GPUs",
            "layout",
            "canzona",
            "`paper`",
            "`asc`",
            "`paper` over canzona",
            "`asc` over canzona",
        ),
        rows=rows,
    )


def sizes_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of all sizes: canzona compared with AdamW in canzona's layout and in AdamW's fastest, at the
    profile's and at the pessimistic rates."""
    rows = []
    overheads: dict[str, list[float]] = {"these": [], "pessimistic": []}
    for recipe in sizes:
        for count in gpus:
            name = [recipe.removeprefix("qwen3-"), f"{count:,}"]
            studied = study(recipe, count)
            if studied is None:
                rows.append([*name, "does not fit", *[MISSING] * 8])
                continue
            result = studied.planned.result
            pessimistic = study(recipe, count, *PESSIMISTIC)
            ratios = {
                "these": relative_overhead(studied, best(recipe, count, "adamw")),
                "pessimistic": relative_overhead(pessimistic, best(recipe, count, "adamw", *PESSIMISTIC)),
            }
            for rates, ratio in ratios.items():
                overheads[rates].extend([] if ratio is None else [ratio])
            rows.append([
                *name,
                words(studied.layout),
                step_time(result.iteration_s),
                milliseconds(result.optimizer_s),
                f"{studied.balance.grid:.2f} ({studied.balance.lower_bound:.2f})",
                milliseconds(result.phases["exchange"]),
                predicted_overhead(studied.overhead("canzona")),
                predicted_overhead(ratios["these"]),
                predicted_overhead(None if pessimistic is None else pessimistic.overhead("canzona")),
                predicted_overhead(ratios["pessimistic"]),
            ])  # fmt: skip
    rates = ", ".join(f"`{text}`" for text in PESSIMISTIC)
    summaries = [
        "{} in the median, from {} to {}".format(*(predicted_overhead(pick(values)) for pick in (median, min, max)))
        for values in overheads.values()
        if values
    ]
    return Table(
        caption="Computed with `recipe=MODEL gpus=GPUS`, with 1 M tokens a step, in the layout that canzona chooses. "
        "Balance is the slowest rank's updates over the mean (in brackets: the lowest possible value). Exchange is the "
        "part that updates do not hide. AdamW has buckets of Megatron's default size in this layout, and at its "
        f"best buckets of the size with which it is fastest. The pessimistic rates are {rates}:",
        columns=(
            "model", "GPUs", "layout", "iteration", "optimizer step, ms", "balance", "exchange, ms",
            "over AdamW in this layout", "over AdamW at its best",
            "pessimistic: in this layout", "at its best",
        ),
        rows=rows,
        summary=f"Over AdamW at its best: {'; at pessimistic rates '.join(summaries)}." if summaries else "",
    )  # fmt: skip


def arithmetics_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of 32B in the default layout as shipped, and with all fast paths verified."""
    rows = []
    for count in gpus:
        fitting = run(MODEL, count, ())
        if fitting is None:
            continue
        config, layout = fitting
        verified = replace(config.cluster, verified=get_args(FastPath))
        variants = (config, replace(config, cluster=verified))
        cells = []
        for variant in variants:
            result = simulate_plan(variant.setup, layout, make_plan(variant.setup, layout))
            cells.append(step_time(result.optimizer_s))
        rows.append([f"{count:,}", words(layout), *cells])
    return Table(
        caption=f"The optimizer step, computed with `recipe={MODEL} gpus=GPUS`, in the default's layout:",
        columns=("GPUs", "layout", "as shipped", "once verified"),
        rows=rows,
    )


def optimizers_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of 32B in the paper's layout with Muon, SOAP and Shampoo."""
    rows = []
    for optimizer in ("muon", "soap", "shampoo"):
        studied = study(MODEL, PAPERS_GPUS, f"optimizer={optimizer}", *PAPERS_LAYOUT)
        if studied is None:
            rows.append([f"`{optimizer}`", *[MISSING] * 5])
            continue
        ratios = [studied.optimizer_speedup(name) for name in ("asc", "layerwise", "sc")]
        times = [MISSING if ratio is None else f"{ratio:.1f}x" for ratio in ratios]
        step = f"{milliseconds(studied.planned.result.optimizer_s)} ms"
        rows.append([f"`{optimizer}`", step, *times, predicted_overhead(studied.overhead("canzona"))])
    return Table(
        caption=f"Computed with `recipe={MODEL} gpus={PAPERS_GPUS} {' '.join(PAPERS_LAYOUT)} optimizer=NAME`, with "
        "1 M tokens a step. The optimizer steps of the other strategies are multiples of canzona's. Megatron's Muon is "
        "in its faster TP mode:",
        columns=("optimizer", "canzona's step", "`asc`", "`layerwise`", "`sc`", "iteration over AdamW's"),
        rows=rows,
    )


def ways_table(gpus: Sequence[int], sizes: Sequence[str]) -> Table:
    """Makes the table of the ways to run Muon in Megatron-LM, each in the layout that is fastest for it."""
    rows: list[list[str]] = []
    for recipe, count in WAYS_OF:
        studied, adamw = study(recipe, count), best(recipe, count, "adamw")
        if count not in gpus or studied is None:
            continue
        setup = compose_run([f"recipe={recipe}", f"gpus={count}", "cluster=h100-80g"]).config.setup
        ways: dict[str, LayoutResult | None] = {"AdamW": adamw}
        for mode in get_args(MuonTpMode):
            layerwise = fastest_with(setup, "layerwise", studied.layout, tp_modes=(mode,))
            without_tp = layerwise is not None and layerwise.layout.tp == 1
            ways["layer-wise, any mode" if without_tp else f"layer-wise, `{mode}`"] = layerwise
        for strategy in ("paper", "canzona"):
            planned = replace(setup, engine=replace(setup.engine, strategy=strategy))
            ways[f"`{strategy}`"] = next(iter(search(planned).best), None)
        rows.extend([
            f"{recipe.removeprefix('qwen3-')}, {count:,}",
            way,
            MISSING if result is None else words(result.layout),
            MISSING if result is None else _described(result),
            MISSING if result is None else f"{result.memory_bytes / 2**30:.1f} GiB",
            MISSING if result is adamw else predicted_overhead(relative_overhead(result, adamw)),
        ] for way, result in ways.items())  # fmt: skip
    return Table(
        caption="Computed with `recipe=MODEL gpus=GPUS`, with 1 M tokens a step: the iteration and, in brackets, its "
        "optimizer step, and the memory of the fullest GPU. Each way has the layout and the size of buckets with which "
        "it is fastest:",
        columns=("model, GPUs", "way", "layout", "iteration", "memory", "over AdamW"),
        rows=rows,
    )


LARGE = (64, 256, 1024)
TABLES: Mapping[str, tuple[Path, tuple[int, ...], Callable[[Sequence[int], Sequence[str]], Table]]] = {
    "best": (README, LARGE, best_table),
    "plain": (MANUAL, LARGE, plain_table),
    "balance": (MANUAL, LARGE, balance_table),
    "sizes": (MANUAL, (8, *LARGE), sizes_table),
    "arithmetics": (MANUAL, LARGE, arithmetics_table),
    "optimizers": (MANUAL, (PAPERS_GPUS,), optimizers_table),
    "ways": (WAYS, LARGE, ways_table),
}
"""The document, the numbers of GPUs and the function of each table, by the table's name."""


def marker_pattern(name: str) -> re.Pattern[str]:
    """Returns the pattern of a table in a document. Its groups 1 and 2 are the markers."""
    return re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- /figures -->)", re.DOTALL)


def replace_table(text: str, name: str, table: str) -> str:
    """Returns a document's text with a table replaced.

    Raises:
        SystemExit: the markers of the table are missing or occur more than once.
    """
    changed, places = marker_pattern(name).subn(lambda markers: f"{markers[1]}{table}\n\n{markers[2]}", text)
    if places != 1:
        raise SystemExit(f"the markers of {name} occur {places} times; they must occur once")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, help="make only this table")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="update the documents")
    action.add_argument("--check", action="store_true", help="exit 1 if a document is out of date")
    given = parser.parse_args()
    stale = []
    for name in [given.only] if given.only else TABLES:
        path, counts, make = TABLES[name]
        table = make(counts, SIZES).markdown()
        print(f"## {name}\n\n{table}\n", flush=True)
        if given.write or given.check:
            before = path.read_text(encoding="utf-8")
            after = replace_table(before, name, table)
            if after != before:
                stale.append(f"{name} in {path.relative_to(ROOT)}")
                if given.write:
                    path.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'Updated' if given.write else 'Out of date (run make figures)'}: {', '.join(stale)}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
