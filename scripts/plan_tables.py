#!/usr/bin/env python3
"""The planner's figures for every Qwen3 size and GPU count, as Markdown: load balance against its bound and against
other ways, padding, and simulated speed-ups.

    python scripts/plan_tables.py [balance] [speed]
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from canzona_cli.cluster import fit
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.buckets import buckets
from canzona_cli.planner.measures import balance
from canzona_cli.planner.planner import plan_unbounded, plannable
from canzona_cli.planner.subject import bucket_elements
from canzona_cli.simulate.baselines import imbalance, layerwise, padding_fraction, paper_contiguous
from canzona_cli.simulate.compare import study_run

SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One size on one number of GPUs."""

    config: RunConfig
    layout: Layout
    fits: bool

    @property
    def cells(self) -> list[str]:
        layout = self.layout
        spread = f"TP{layout.tp} DP{layout.dp}" + (f" PP{layout.pp}" if layout.pp > 1 else "")
        return [self.config.name.removeprefix("qwen3-"), str(self.config.gpus), spread + ("" if self.fits else " *")]


def jobs() -> Iterator[Job]:
    """Every size on every number of GPUs, on the layout `canzona plan` chooses; where none fits, on the smallest."""
    for size in SIZES:
        for gpus in GPUS:
            composed = compose_run([f"recipe={size}", f"gpus={gpus}"], training=False)
            config, _ = plannable(composed.config)
            candidates = fit.explain(config)
            best = candidates[0] if candidates[0].fits else min(candidates, key=lambda c: c.memory.total)
            yield Job(config=fit.fill(config, best.layout), layout=best.layout, fits=best.fits)


def balance_table() -> None:
    """max / mean of update cost over the ranks of the slowest stage."""
    columns = ("canzona", "lower bound", "above it", "asc", "layerwise", "paper", "padding", "layerwise's", "paper's")
    head(*columns)
    within = {1.03: 0, 1.10: 0}
    worse = cells = 0
    for job in jobs():
        config, layout = job.config, job.layout
        plan = plan_unbounded(config, layout)
        engine = replace(config.engine, strategy="asc")
        asc = plan_unbounded(replace(config, engine=engine), layout)
        limit = bucket_elements(config, layout)
        megatron = layerwise(plan.matrices, layout, limit)
        # Every TP rank of an owner repeats its updates: over owners, by its own even share of tp ranks.
        repeated = max(
            imbalance(megatron.loads(plan.matrices, plan.costs, stage, layout.dp * layout.cp))
            for stage in range(layout.pp)
        )
        paper = paper_contiguous(plan.matrices, plan.costs, layout, 1.0, limit)
        contiguous = replace(plan.subject.settings, layout="contiguous")
        papers = replace(plan, assignment=paper, buckets=buckets(plan.matrices, paper, layout, contiguous, limit))
        found = balance(plan)
        for margin in within:
            within[margin] += found.grid <= margin * found.lower_bound
        worse += found.grid > 1e-9 + min(repeated * layout.tp, balance(papers).grid)
        cells += 1
        row(
            *job.cells,
            f"**{found.grid:.3f}**",
            f"{found.lower_bound:.3f}",
            f"{100 * found.gap:.2f}%",
            f"{balance(asc).grid:.2f}",
            f"{repeated:.2f}" + (f" x {layout.tp}" if layout.tp > 1 else ""),
            f"{balance(papers).grid:.2f}",
            f"{100 * padding_fraction(plan.buckets):.2f}%",
            f"{100 * padding_fraction(megatron.buckets):.0f}%",
            f"{100 * padding_fraction(papers.buckets):.2f}%",
        )
    for margin, count in within.items():
        print(
            f"\nWithin {margin:.2f} x the lower bound: {count} of {cells} cells ({100 * count / cells:.0f}%).", end=""
        )
    print(f"\nWorse than layerwise or the paper's rule: {worse} cells.")
    print("layerwise repeats an owner's updates on each of its TP ranks, hence `x TP`. * does not fit in memory.")


def speed_table() -> None:
    """Simulated times."""
    columns = (
        "iteration",
        "optimizer",
        "over AdamW",
        "opt. vs layerwise",
        "vs asc",
        "vs sc",
        "iter. vs layerwise",
        "vs sc",
    )
    head(*columns)
    for job in jobs():
        if not job.fits:
            row(*job.cells, *["does not fit"], *[""] * (len(columns) - 1))
            continue
        study = study_run(*resolve(job.config))
        result = study.planned.result
        row(
            *job.cells,
            f"{result.iteration_s:.3f} s",
            f"{1e3 * result.optimizer_s:.1f} ms",
            f"{100 * study.overhead('canzona'):+.2f}%",
            f"**{study.optimizer_speedup('layerwise'):.2f}x**",
            f"{study.optimizer_speedup('asc'):.2f}x",
            f"{study.optimizer_speedup('sc'):.1f}x",
            f"**{study.iteration_speedup('layerwise'):.2f}x**",
            f"{study.iteration_speedup('sc'):.2f}x",
        )
    print("\nSimulated on h100-80g, batches of about 1M tokens; the assumptions are those `canzona plan` lists:")
    for line in study.assumptions:
        print(f"- {line}")


def head(*columns: str) -> None:
    row("model", "GPUs", "layout", *columns)
    row(*["---"] * (3 + len(columns)))


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["balance", "speed"]
    for name in wanted:
        {"balance": balance_table, "speed": speed_table}[name]()
        print()
