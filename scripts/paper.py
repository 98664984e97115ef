#!/usr/bin/env python3
"""Prints the claims of the paper (arXiv 2602.06079) next to simulations, as Markdown.

    python scripts/paper.py [--recipe qwen3-32b] [--gpus 256] [--tp 8] [OVERRIDE ...]

The strategy `paper` is the paper's engine as implemented in `canzona_cli/core/planner/paper.py`. Updates are in the
standard form, as in Megatron-LM's Muon, except in rows that say otherwise. The points `train.sh` have the settings of
the script with which the authors' code is published. `canzona_cli/core/planner/README.md` says why the figures differ.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from published_rows import load_published

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.memory import GIB
from canzona_cli.core.model.matrices import matrix_shapes
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.measures import balance, communication
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.core.setup.execution import AnyStrategy, with_strategy
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.compare import Study, study_run
from canzona_cli.core.simulate.predict import simulate_plan

STANDARD = "optimizer.form=standard"
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS: tuple[tuple[str, AnyStrategy], ...] = (
    ("SC", "sc"), ("layer-wise", "layerwise"), ("unbalanced (`asc`)", "asc"), ("the paper's engine", "paper"),
    ("`canzona`", "canzona"),
)  # fmt: skip
HEADINGS = (
    *("optimizer step, ms", "iteration, s", "busiest rank / mean"),
    *(f"{what} over {of}" for of in ("layer-wise", "SC") for what in ("optimizer step", "iteration")),
)
BATCH = 128
"""The global batch of the authors' train.sh, in sequences."""
MICRO_BATCH = 8
"""The micro-batch of train.sh."""


def points_of(data_ranks: int) -> Mapping[str, tuple[str, ...]]:
    """Returns the overrides of every model point, by name."""
    batch = ("train.seq_length=2048", f"train.global_batch_size={BATCH}")
    train_sh = (
        *batch,
        f"train.micro_batch_size={micro_batch(data_ranks)}",
        "train.recompute=none",
        "parallel.bucket_elements=400000000",
        "engine.c_max_mib=1600",
    )
    return {
        "the recipe's batch": (),
        "sequence 2,048, batch 128": batch,
        "`train.sh`, gate and up split": train_sh,
        "`train.sh`, nothing split": (*train_sh, "engine.splitting=fused"),
    }


def micro_batch(data_ranks: int) -> int:
    """Returns the micro-batch of train.sh, or the largest that its batch allows on this many data-parallel ranks."""
    return min(MICRO_BATCH, BATCH // data_ranks)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run with one batch size, simulated in the standard form and in the recipe's form."""

    name: str
    standard: Study
    chosen: Study
    """The simulation with the recipe's `optimizer.form`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="qwen3-32b")
    parser.add_argument("--gpus", type=int, default=256)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    mesh = (f"parallel.tp={arguments.tp}", "parallel.pp=1", "parallel.vpp=1")
    run_words = (f"recipe={arguments.recipe}", *mesh, *arguments.overrides)
    words = (f"gpus={arguments.gpus}", *run_words)
    data_ranks = arguments.gpus // arguments.tp
    points = [
        Point(name=name, standard=studied(*words, *batch, STANDARD), chosen=studied(*words, *batch))
        for name, batch in points_of(data_ranks).items()
    ]
    other_optimizers = {name: studied(*words, f"optimizer={name}") for name in ("shampoo", "soap")}
    fewer_gpus = resolved(f"gpus={arguments.gpus // 4}", *run_words, STANDARD)
    print("\n".join(report(points, other_optimizers, fewer_gpus)))


def studied(*words: str) -> Study:
    """Simulates all strategies of a run, Megatron's in the only TP mode of the paper's release of Megatron."""
    study = study_run(*resolved(*words))
    strategies = study.strategies
    released = {name: strategies.get(f"{name}/duplicated", compared) for name, compared in strategies.items()}
    return replace(study, strategies=released)


def resolved(*words: str) -> tuple[Setup, Layout]:
    return fit.resolve(compose_run(words, training=False).config.setup)


def report(
    points: Sequence[Point], other_optimizers: Mapping[str, Study], fewer_gpus: tuple[Setup, Layout]
) -> Iterator[str]:
    """Yields the lines of all tables.

    Args:
        other_optimizers: the first point with other optimizers, by name.
        fewer_gpus: the first point on a quarter of the GPUs.
    """
    setup, layout = points[0].standard.setup, points[0].standard.layout
    mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in layout.axes)
    yield f"# The paper's claims and what is simulated: {setup.name} on {setup.gpus} GPUs, {mesh}"
    yield from claims(points, other_optimizers)
    for point in points:
        yield from strategies(point)
    yield from curves(setup, layout, "alpha")
    yield from curves(setup, layout, "C_max")
    yield from curves(*fewer_gpus, "C_max")


def claims(points: Sequence[Point], other_optimizers: Mapping[str, Study]) -> Iterator[str]:
    """Yields the table of the paper's figures and ours."""
    ours = [
        f"{engine}, {baseline}" for baseline in ("over layer-wise", "over SC") for engine in ("`paper`", "`canzona`")
    ]
    yield from ("", "## Claims", "")
    yield from heads("claim", "model point", "theirs", *ours)
    theirs = [claim for claim in load_published().claims if claim.source == "arXiv 2602.06079"]
    for claim, quantity in zip(theirs, ("iteration_s", "optimizer_s"), strict=True):
        for point in points:
            yield line(claim.name, point.name, claim.figure, *ratios(point.standard, quantity))
    for name, study in other_optimizers.items():
        _, _, *over_sc = ratios(study, "optimizer_s")
        yield line(f"Canzona: optimizer step with {name}", points[0].name, "over 30x", "-", "-", *over_sc)


def ratios(study: Study, quantity: str) -> list[str]:
    return [
        format_ratio(study, baseline, engine, quantity)
        for baseline in ("layerwise", "sc")
        for engine in ("paper", "canzona")
    ]


def format_ratio(study: Study, baseline: str, strategy: str, quantity: str) -> str:
    """Formats the time of `baseline`, a strategy, as a multiple of another strategy's time, with a `!` if `baseline`
    does not fit in memory."""
    longer, shorter = (getattr(study.strategies[name].result, quantity) for name in (baseline, strategy))
    return f"{longer / shorter:.2f}x{'' if study.strategies[baseline].fits else '!'}"


def strategies(point: Point) -> Iterator[str]:
    layout, train = point.standard.layout, point.standard.setup.train
    batch = f"{layout.global_batch_size} sequences of {train.seq_length:,} tokens a step"
    yield from ("", f"## {point.name[0].upper()}{point.name[1:]}: {batch}", "")
    yield from heads("strategy", *HEADINGS)
    for label, name in ROWS:
        yield strategy_row(label, point.standard, name)
    for label, name in ROWS[-2:]:
        yield strategy_row(f"{label}, form as chosen", point.chosen, name)


def strategy_row(label: str, study: Study, name: str) -> str:
    compared = study.strategies[name]
    result = compared.result
    times = (
        format_ratio(study, baseline, name, quantity) if baseline != name else "-"
        for baseline in ("layerwise", "sc")
        for quantity in ("optimizer_s", "iteration_s")
    )
    fits = "" if compared.fits else "!"
    figures = (f"{1e3 * result.optimizer_s:.1f}", f"{result.iteration_s:.3f}", f"{result.update_balance:.2f}")
    return line(label + fits, *figures, *times)


def curves(setup: Setup, layout: Layout, title: Literal["alpha", "C_max"]) -> Iterator[str]:
    """Yields a table of the paper's engine by alpha or C_max."""
    engine = replace(setup.engine, strategy="paper")
    if title == "alpha":
        runs = {f"{alpha:g}": replace(engine, alpha=alpha) for alpha in ALPHAS}
    else:
        matrix_mib = max(map(prod, matrix_shapes(setup))) * setup.exchange_bytes / 2**20
        sizes = [count * matrix_mib for count in (1, 2, 4, 8)]  # micro-groups of so many of the largest matrices
        runs = {f"{size:g} MiB": replace(engine, c_max_mib=size) for size in sizes}
        runs["null"] = engine
    yield from ("", f"## {title} on {setup.gpus} GPUs, with the recipe's batch; theirs: not at hand", "")
    yield from heads(title, *HEADINGS[:3], "busiest owner's bytes / even", "micro-groups", "fullest GPU, GiB")
    for value, tried in runs.items():
        yield line(value, *planned(with_strategy(replace(setup, engine=tried), "paper"), layout))


def planned(setup: Setup, layout: Layout) -> Iterator[str]:
    """Yields the figures of a row in `curves`."""
    plan = plan_unbounded(setup, layout)
    result = simulate_plan(setup, layout, plan)
    yield f"{1e3 * result.optimizer_s:.1f}"
    yield f"{result.iteration_s:.3f}"
    yield f"{balance(plan).grid:.3f}"
    yield f"{communication(setup, layout, plan).dp_byte_balance:.2f}"
    yield f"{len(plan.groups)}"
    yield f"{plan_memory(setup, layout, plan).total / GIB:.1f}"


def heads(*names: str) -> Iterator[str]:
    yield line(*names)
    yield "| --- " * len(names) + "|"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
