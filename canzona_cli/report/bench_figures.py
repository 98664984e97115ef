"""`canzona bench --plot`: a comparison, a sweep, or simulated scaling as a picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.bench.options import SweepKind
from canzona_cli.bench.results import BenchResult
from canzona_cli.bench.simulated import Simulation
from canzona_cli.report.bench import MIB, order, times
from canzona_cli.report.bench_sweep import HEADS, TITLES, Point, SweepRow, subject, sweep_rows
from canzona_cli.report.figures import (
    describe,
    new_figure,
    phase_bar,
    phase_legend,
    rank_ticks,
    room_above,
    rows,
    save,
    side_by_side,
    small_legend,
    whiskers,
)
from canzona_cli.run.phases import STRATEGIES, STRATEGY_COLOURS
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean, layout_words, step_time
from canzona_cli.simulate.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture of a comparison: bars of phases, updates of every rank, memory of every rank.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    trust = "calibrated" if result.calibrated else "not calibrated"
    figure = new_figure(
        f"{clean(result.recipe)}, {clean(result.optimizer)}, {result.layout.world_size} ranks "
        f"({layout_words(result.layout)}), predicted by {clean(result.profile)} ({trust})",
        14,
        4.2 + 1.05 * len(result.strategies),
    )
    grid = figure.add_gridspec(2, 2, height_ratios=[1.3 * len(result.strategies), 4.5])
    _steps(figure.add_subplot(grid[0, :]), result)
    _updates(figure.add_subplot(grid[1, 0]), result)
    _memory(figure.add_subplot(grid[1, 1]), result)
    save(figure, path)


def _steps(axes: "Axes", result: BenchResult) -> None:
    """Two bars for each strategy: measured, and paler below it, predicted."""
    names = order(result)
    limit = 1.3 * max(
        max(Quartiles.of(s.measured.iteration_s).median, s.predicted.iteration_s) for s in result.strategies.values()
    )
    bars: list[Mapping[str, float]] = []
    for place, name in enumerate(names):
        found = result.strategies[name]
        bars += [found.measured.means, found.predicted.phases]
        step, optimizer = (Quartiles.of(values) for values in (found.measured.iteration_s, found.measured.optimizer_s))
        end = max(phase_bar(axes, place - 0.2, found.measured.means, height=0.36), step.high)
        text = f"{step_time(step.median)}; optimizer {step_time(optimizer.median)}{_faster(result, name)}"
        axes.text(end + 0.006 * limit, place - 0.2, text, va="center", fontsize=8.5)
        axes.errorbar(step.median, place - 0.2, xerr=whiskers([step]), color="black", capsize=2.5, lw=1)
        end = phase_bar(axes, place + 0.2, found.predicted.phases, height=0.36, opacity=0.5)
        text = (
            f"predicted {step_time(found.predicted.iteration_s)} ({100 * result.iteration_error(name):+.0f}%); "
            f"optimizer {step_time(found.predicted.optimizer_s)} ({100 * result.error(name):+.0f}%)"
        )
        axes.text(end + 0.006 * limit, place + 0.2, text, va="center", fontsize=8.5)
    rows(axes, [clean(name) for name in names])
    axes.set_xlim(0, limit)
    describe(
        axes,
        f"One step, mean over ranks: measured (whiskers: quartiles of {result.rounds} rounds), and paler: predicted",
        x="seconds",
    )
    phase_legend(axes, bars, below=0.13)


def _faster(result: BenchResult, name: str) -> str:
    if name == result.reference:
        return ""
    speedup = result.optimizer_speedup(name)
    return f", {times(speedup)}" if speedup.distinct else f" (no significant difference to {result.reference}'s)"


def _updates(axes: "Axes", result: BenchResult) -> None:
    """Update time by rank."""
    shown = {}
    for name in order(result):
        measured, predicted = result.strategies[name].measured, result.strategies[name].predicted
        if "matrix_update" in measured.phases:
            label = (
                f"{name}: max/mean {measured.load_balance:.2f}, predicted {predicted.load_balance:.2f}; "
                f"predicted mean {step_time(predicted.phases.get('matrix_update', 0.0))}"
            )
            shown[name] = (label, [1e3 * load for load in measured.update_s])
    _by_rank(axes, result, shown)
    describe(axes, "Matrix updates of each rank", x="rank", y="ms of matrix updates")


def _memory(axes: "Axes", result: BenchResult) -> None:
    """Tensors held by each rank, and what is predicted of the fullest."""
    shown = {}
    for name in order(result):
        planned = result.strategies[name].predicted.tensor_bytes
        label = name if planned is None else f"{name}: fullest predicted {planned / MIB:,.0f} MiB (dashed)"
        shown[name] = (label, [amount / MIB for amount in result.strategies[name].measured.tensor_bytes])
        if planned is not None:
            axes.axhline(planned / MIB, color=STRATEGY_COLOURS[name], ls="--", lw=1)
    _by_rank(axes, result, shown, columns=2)
    describe(axes, "Tensors of each rank, without activations", x="rank", y="MiB")


def _by_rank(
    axes: "Axes", result: BenchResult, shown: Mapping[str, tuple[str, Sequence[float]]], *, columns: int = 1
) -> None:
    """Bars by rank, for each strategy a label and a value of every rank."""
    width, shifts = side_by_side(len(shown))
    for (name, (label, values)), shift in zip(shown.items(), shifts, strict=True):
        places = [rank + shift for rank in range(len(values))]
        axes.bar(places, values, width=width, color=STRATEGY_COLOURS[name], label=label)
    rank_ticks(axes, result.layout.world_size)
    room_above(axes, 0.4)
    if shown:
        small_legend(axes, at="upper left", columns=columns)


def draw_sweep(kind: SweepKind, results: Mapping[str, BenchResult], path: Path) -> None:
    """Write the curves of a sweep: optimizer step, iteration, and what the setting is about.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    some = next(iter(results.values()))
    on = "" if kind == "gpus" else f", {some.layout.world_size} ranks"
    optimizer = "" if kind == "optimizer" else f", {clean(some.optimizer)}"
    figure = new_figure(f"{TITLES[kind]}: {clean(some.recipe)}{optimizer}{on}", 15, 5)
    found = list(sweep_rows(results))
    curves: list[tuple[str, Callable[[SweepRow], Point | None]]] = [
        ("Optimizer step, ms", lambda row: row.optimizer),
        ("Iteration, ms", lambda row: row.iteration),
        subject(kind, found),
    ]
    for axes, (title, of) in zip(figure.subplots(1, 3), curves, strict=True):
        _sweep_curves(axes, kind, list(results), [(row, of(row)) for row in found])
        describe(axes, title, x=HEADS[kind])
    small_legend(figure.axes[0], title=f"{'bars' if kind == 'optimizer' else 'circles'} measured, crosses predicted")
    save(figure, path)


def _sweep_curves(
    axes: "Axes", kind: SweepKind, values: Sequence[str], points: Sequence[tuple[SweepRow, Point | None]]
) -> None:
    """A curve for each strategy: measured with quartiles, predicted dashed."""
    found: dict[str, list[tuple[int, Point]]] = {}
    for row, point in points:
        if point is not None:
            found.setdefault(row.strategy, []).append((values.index(row.value), point))
    bars = kind == "optimizer"  # its values are not numbers: a line between them would say nothing
    width, shifts = side_by_side(len(found))
    for (strategy, curve), shift in zip(found.items(), shifts, strict=True):
        colour, label = STRATEGY_COLOURS[strategy], clean(strategy)
        x = [place + shift * bars for place, _ in curve]
        middle, spread = [point.measured.median for _, point in curve], whiskers([point.measured for _, point in curve])
        planned = [point.predicted for _, point in curve]
        if bars:
            axes.bar(x, middle, width=width, yerr=spread, color=colour, capsize=3, label=label)
            axes.plot(x, planned, color="black", marker="x", ms=6, ls="")
        else:
            axes.errorbar(x, middle, yerr=spread, color=colour, marker="o", ms=5, capsize=3, label=label)
            axes.plot(x, planned, color=colour, marker="x", ms=6, ls="--", alpha=0.75)
    axes.set_xticks(range(len(values)), [clean(value) for value in values])
    axes.set_xlim(-0.5, len(values) - 0.5)
    room_above(axes, 0.08)
    axes.grid(axis="y", alpha=0.25)


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Write the curves of simulated scaling: iteration, optimizer step, overhead over AdamW; panels for each size.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    trust = "calibrated" if simulation.calibrated else "by hand, not calibrated"
    figure = new_figure(
        f"Simulated, not measured: {clean(simulation.optimizer)} on {clean(simulation.profile)} ({trust})",
        15,
        1.2 + 3.4 * len(simulation.recipes),
    )
    panels = figure.subplots(len(simulation.recipes), 3, squeeze=False)
    last = simulation.recipes[-1]
    for row, recipe in zip(panels, simulation.recipes, strict=True):
        cells = simulation.of(recipe)
        hint = "GPUs (hollow: does not fit into memory)" if recipe == last else ""
        studies = {cell.gpus: cell.study for cell in cells if cell.study is not None}
        curves: list[tuple[str, Callable[[Study, str], float | None]]] = [
            (f"{clean(recipe)}: iteration, s", lambda study, name: study.result(name).iteration_s),
            ("optimizer step, ms", lambda study, name: 1e3 * study.result(name).optimizer_s),
            ("iteration, times AdamW's", _times_adamw),
        ]
        for number, (axes, (title, of)) in enumerate(zip(row, curves, strict=True)):
            names = [name for name in STRATEGIES if number < 2 or name != "adamw"]
            _scaling_curves(axes, studies, names, of)
            _gpu_ticks(axes, simulation.gpus, [cell.gpus for cell in cells if cell.study is None])
            describe(axes, title, x=hint if number == 0 else "")
    small_legend(panels[0][0])
    save(figure, path)


def _scaling_curves(
    axes: "Axes",
    studies: Mapping[int, Study],
    names: Sequence[str],
    value: Callable[[Study, str], float | None],
) -> None:
    """A curve for each strategy over the number of GPUs, by which `studies` are; what does not fit is hollow."""
    for name in names:
        values = [(math.log2(gpus), value(study, name), study) for gpus, study in studies.items()]
        points = [(x, y, study.strategies[name].fits) for x, y, study in values if y is not None]
        colour = STRATEGY_COLOURS[name]
        axes.plot([x for x, *_ in points], [y for _, y, _ in points], color=colour, lw=1.6, label=name)
        for fits, face in ((True, colour), (False, "white")):
            here = [(x, y) for x, y, fit in points if fit == fits]
            axes.plot([x for x, _ in here], [y for _, y in here], "o", color=colour, mfc=face, ms=4.5)
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.25)


def _times_adamw(study: Study, name: str) -> float | None:
    share = study.overhead(name)
    return None if share is None else 1 + share


def _gpu_ticks(axes: "Axes", gpus: Sequence[int], impossible: Sequence[int]) -> None:
    """Numbers of GPUs on a logarithmic axis, those without a layout marked."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xticks([math.log2(count) for count in gpus], [f"{count:,}" for count in gpus])
    axes.set_xlim(math.log2(min(gpus)) - 0.3, math.log2(max(gpus)) + 0.3)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for count in impossible:
        axes.annotate(
            "no layout",
            (math.log2(count), 0.03),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="center",
            fontsize=8,
            color="grey",
        )
