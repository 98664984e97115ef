"""`canzona bench --plot`: each strategy's step, measured beside predicted, and the load of each rank, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.bench.results import BenchResult
from canzona_cli.report.bench_words import MIB, NOT_DISTINCT, measured_phase, order, phase_name, times
from canzona_cli.report.png import save
from canzona_cli.run.phases import IN_STEP, PHASES, STRATEGY_COLOURS
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean, layout_words, step_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture: bars of phases, updates of every rank, memory of every rank.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2 + 1.05 * len(result.strategies)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.3 * len(result.strategies), 4.5])
    mesh = result.layout
    trust = "calibrated" if result.calibrated else "not calibrated"
    figure.suptitle(
        f"{clean(result.recipe)}, {clean(result.optimizer)}, {mesh.world_size} ranks ({layout_words(mesh)}), "
        f"predicted by {clean(result.profile)} ({trust})",
        fontsize=13,
    )
    _steps(figure.add_subplot(grid[0, :]), result)
    _updates(figure.add_subplot(grid[1, 0]), result)
    _memory(figure.add_subplot(grid[1, 1]), result)
    save(figure, path)


def plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _steps(axes: "Axes", result: BenchResult) -> None:
    """Two stacked bars for each strategy: measured, and paler below it, predicted."""
    names = order(result)
    ends = [
        max(Quartiles.of(s.measured.iteration_s).median, s.predicted.iteration_s) for s in result.strategies.values()
    ]
    limit = 1.3 * max(ends)
    seen: dict[str, None] = {}
    for place, name in enumerate(names):
        found = result.strategies[name]
        measured = {phase: measured_phase(found.measured, phase) or 0.0 for phase in IN_STEP}
        predicted = {phase: found.predicted.phases.get(phase, 0.0) for phase in IN_STEP}
        iteration, optimizer = (
            Quartiles.of(values) for values in (found.measured.iteration_s, found.measured.optimizer_s)
        )
        faster = ""
        if name != result.reference:
            speedup = times(result.optimizer_speedup(name))
            faster = f", {NOT_DISTINCT} from {result.reference}'s" if speedup == NOT_DISTINCT else f", {speedup}"
        for parts, offset, opacity, text in (
            (measured, -0.2, 1.0, f"{step_time(iteration.median)}; optimizer {step_time(optimizer.median)}{faster}"),
            (
                predicted,
                0.2,
                0.5,
                f"predicted {step_time(found.predicted.iteration_s)} ({100 * result.iteration_error(name):+.0f}%); "
                f"optimizer {step_time(found.predicted.optimizer_s)} ({100 * result.error(name):+.0f}%)",
            ),
        ):
            left = 0.0
            for phase, seconds in parts.items():
                if seconds > 0:
                    seen[phase] = None
                    axes.barh(
                        place + offset, seconds, left=left, height=0.36, color=PHASES[phase].colour, alpha=opacity
                    )
                    left += seconds
            end = max(left, iteration.high) if opacity == 1 else left
            axes.text(end + 0.006 * limit, place + offset, text, va="center", fontsize=8.5)
        axes.errorbar(
            iteration.median,
            place - 0.2,
            xerr=[[iteration.median - iteration.low], [iteration.high - iteration.median]],
            color="black",
            capsize=2.5,
            lw=1,
        )
    axes.set_yticks(range(len(names)), [clean(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("seconds", fontsize=9)
    title = f"One step, mean over ranks: measured (whiskers: quartiles of {result.rounds} rounds), and paler: predicted"
    axes.set_title(title, loc="left", fontsize=10.5)
    shown = [phase for phase in PHASES if phase in seen]
    handles = [axes.barh([0], [0], color=PHASES[phase].colour) for phase in shown]
    axes.legend(
        handles,
        [phase_name(phase) for phase in shown],
        ncols=6,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        fontsize=8.5,
        frameon=False,
    )
    plain(axes)


def _updates(axes: "Axes", result: BenchResult) -> None:
    """Update time by rank; where ranks were not recorded, least to most."""
    names = [name for name in order(result) if "matrix_update" in result.strategies[name].measured.phases]
    width = 0.8 / max(1, len(names))
    by_rank = all(result.strategies[name].measured.update_s for name in names)
    for number, name in enumerate(names):
        found = result.strategies[name]
        colour = STRATEGY_COLOURS.get(name, "#999999")
        phase = found.measured.phases["matrix_update"]
        label = (
            f"{name}: max/mean {found.measured.load_balance:.2f}, predicted {found.predicted.load_balance:.2f}; "
            f"predicted mean {step_time(found.predicted.phases.get('matrix_update', 0.0))}"
        )
        if by_rank:
            loads = found.measured.update_s
            places = [rank + (number - (len(names) - 1) / 2) * width for rank in range(len(loads))]
            axes.bar(places, [1e3 * load for load in loads], width=width, color=colour, label=label)
        else:
            axes.bar(number, 1e3 * phase.mean_s, width=0.7, color=colour, label=label)
            spread = [[1e3 * (phase.mean_s - phase.min_s)], [1e3 * (phase.max_s - phase.mean_s)]]
            axes.errorbar(number, 1e3 * phase.mean_s, yerr=spread, color="black", capsize=4, lw=1.2)
    if by_rank:
        _rank_ticks(axes, result.layout.world_size)
    else:
        axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.4 * max(axes.get_ylim()[1], 1e-3))
    axes.set_ylabel("ms of matrix updates", fontsize=9)
    axes.set_title(
        f"Matrix updates of {'each rank' if by_rank else 'ranks: mean, least and most'}", loc="left", fontsize=10.5
    )
    if names:
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    plain(axes)


def _memory(axes: "Axes", result: BenchResult) -> None:
    """Tensors held by each rank, and what the plan says of the fullest."""
    names = order(result)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = result.strategies[name]
        colour = STRATEGY_COLOURS.get(name, "#999999")
        held = [amount / MIB for amount in found.measured.tensor_bytes]
        places = [rank + (number - (len(names) - 1) / 2) * width for rank in range(len(held))]
        planned = found.predicted.tensor_bytes
        label = name if planned is None else f"{name}: fullest predicted {planned / MIB:,.0f} MiB (dashed)"
        axes.bar(places, held, width=width, color=colour, label=label)
        if planned is not None:
            axes.axhline(planned / MIB, color=colour, ls="--", lw=1)
    _rank_ticks(axes, result.layout.world_size)
    axes.set_ylim(0, 1.4 * max(axes.get_ylim()[1], 1e-3))
    axes.set_ylabel("MiB", fontsize=9)
    axes.set_title("Tensors of each rank, without activations", loc="left", fontsize=10.5)
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    plain(axes)


def _rank_ticks(axes: "Axes", ranks: int) -> None:
    every = max(1, ranks // 16)
    axes.set_xticks(range(0, ranks, every), [str(rank) for rank in range(0, ranks, every)])
    axes.set_xlabel("rank", fontsize=9)
