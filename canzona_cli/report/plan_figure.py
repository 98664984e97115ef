"""`canzona plan --plot`: the timeline of every strategy and the load of every rank as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.report.figures import describe, new_figure, phase_bar, phase_legend, rows, save, small_legend
from canzona_cli.report.plan_charts import CUT
from canzona_cli.run.phases import PHASES, STRATEGY_COLOURS, STREAMS
from canzona_cli.run.words import layout_words, overhead, step_time
from canzona_cli.simulate.study import STRATEGIES, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(study: Study, path: Path) -> None:
    """Write the picture: iterations by strategy, the planned one's end by stream, and the loads of all ranks.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    config = study.config
    figure = new_figure(
        f"{config.name} on {config.gpus} x {config.cluster.name}, {config.optimizer.name}: "
        f"{layout_words(study.layout)} (plan {study.plan.name})",
        14,
        10,
    )
    grid = figure.add_gridspec(3, 1, height_ratios=[5, 3.2, 4.2])
    _iterations(figure.add_subplot(grid[0]), study)
    _end(figure.add_subplot(grid[1]), study)
    _loads(figure.add_subplot(grid[2]), study)
    save(figure, path)


def _iterations(axes: "Axes", study: Study) -> None:
    """A bar of exposed phases for each strategy."""
    results = {name: study.strategies[name].result for name in STRATEGIES}
    limit = CUT * max(result.iteration_s for name, result in results.items() if name != "sc")
    limit = min(limit, 1.15 * max(result.iteration_s for result in results.values()))
    for place, (name, result) in enumerate(results.items()):
        end = phase_bar(axes, place, result.phases)
        share = None if name == "adamw" else study.overhead(name)
        over = "" if share is None else f", {overhead(share)} over AdamW"
        text = f"{step_time(result.iteration_s)}{over}; optimizer {step_time(result.optimizer_s)}"
        cut = end > limit
        axes.text(
            limit * 0.99 if cut else end + limit * 0.008,
            place,
            f"{text} >>" if cut else text,
            va="center",
            ha="right" if cut else "left",
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2.0} if cut else None,
        )
    rows(axes, list(results))
    axes.set_xlim(0, limit)
    describe(axes, "One iteration: exposed time of each phase on the slowest rank (simulated)", x="seconds")
    phase_legend(axes, [result.phases for result in results.values()], below=0.16)


def _end(axes: "Axes", study: Study) -> None:
    """The optimizer step of the planned strategy, stream by stream, on the slowest rank and the one with least."""
    result = study.planned.result
    begin = min(event.start_s for event in result.events if event.phase == "norm_clip")
    ranks = list(dict.fromkeys(event.rank for event in result.events))
    labels: list[str] = []
    for rank in ranks:
        for stream, name in STREAMS.items():
            events = [e for e in result.events if e.rank == rank and e.stream == stream and e.end_s > begin]
            if events:
                spans = [
                    (1e3 * (max(e.start_s, begin) - begin), 1e3 * (e.end_s - max(e.start_s, begin))) for e in events
                ]
                colours = [PHASES[e.phase].colour for e in events]
                axes.broken_barh(spans, (len(labels) - 0.38, 0.76), facecolors=colours)
                labels.append(f"rank {rank}: {name}")
    rows(axes, labels)
    axes.set_xlim(0, 1e3 * (max(event.end_s for event in result.events) - begin) * 1.01)
    others = " and on the one with least to update" if len(ranks) > 1 else ""
    describe(
        axes,
        f"{study.strategy}: the end of the iteration, on the slowest rank{others}",
        x="milliseconds after the last gradient is reduced",
    )


def _loads(axes: "Axes", study: Study) -> None:
    """Update time of every rank of the stage, sorted: a flat line is a perfect balance."""
    for name in study.mapped:
        loads = study.strategies[name].loads
        if loads is None:
            continue
        ordered = sorted(loads, reverse=True)
        axes.plot(
            [100 * rank / len(loads) for rank in range(len(loads) + 1)],
            [1e3 * load for load in (*ordered, ordered[-1])],
            drawstyle="steps-post",
            color=STRATEGY_COLOURS[name],
            lw=2,
            label=f"{name}: slowest {step_time(ordered[0])}, max/mean {ordered[0] * len(loads) / sum(loads):.2f}",
        )
    bound = study.plan.lower_bounds[study.balance.slowest.stage]
    axes.axhline(1e3 * bound, color="black", ls=":", lw=1.2, label=f"lower bound {step_time(bound)}")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    describe(axes, "Update time of every rank", x="ranks of a stage, busiest first, %", y="milliseconds of updates")
    small_legend(axes)
