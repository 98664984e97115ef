"""`canzona plan --plot`: the timeline of every strategy and the load of every rank as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.report.png import save
from canzona_cli.run.phases import PHASES, STRATEGY_COLOURS, STREAMS
from canzona_cli.run.prediction import SimulatedEvent
from canzona_cli.run.words import layout_words, step_time
from canzona_cli.simulate.study import STRATEGIES, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOADS = ("canzona", "asc", "layerwise")
_CUT = 1.6


def draw(study: Study, path: Path) -> None:
    """Write the picture: iterations by strategy, the planned one's end by stream, and the loads of all ranks.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 10), dpi=110, layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=[5, 3.2, 4.2])
    figure.suptitle(
        f"{study.config.name} on {study.config.gpus} x {study.config.cluster.name}, {study.config.optimizer.name}: "
        f"{layout_words(study.layout)} (plan {study.plan.name})",
        fontsize=14,
    )
    _iterations(figure.add_subplot(grid[0]), study)
    _end(figure.add_subplot(grid[1]), study)
    _loads(figure.add_subplot(grid[2]), study)
    save(figure, path)


def _iterations(axes: "Axes", study: Study) -> None:
    """A stacked bar of exposed phases for each strategy."""
    results = {name: study.strategies[name].result for name in STRATEGIES}
    limit = _CUT * max(result.iteration_s for name, result in results.items() if name != "sc")
    limit = min(limit, 1.15 * max(result.iteration_s for result in results.values()))
    seen: dict[str, None] = {}
    for place, (name, result) in enumerate(results.items()):
        left = 0.0
        for phase, look in PHASES.items():
            seconds = result.phases.get(phase, 0.0)
            if seconds > 0:
                seen[phase] = None
                axes.barh(place, seconds, left=left, color=look.colour, height=0.66)
                left += seconds
        over = "" if name == "adamw" else f", {100 * study.overhead(name):+.1f}% over AdamW"
        text = f"{step_time(result.iteration_s)}{over}; optimizer {step_time(result.optimizer_s)}"
        cut = left > limit
        axes.text(
            limit * 0.99 if cut else left + limit * 0.008,
            place,
            f"{text} >>" if cut else text,
            va="center",
            ha="right" if cut else "left",
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2.0} if cut else None,
        )
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("seconds")
    axes.set_title("One iteration: exposed time of each phase on the slowest rank (simulated)", loc="left", fontsize=11)
    handles = [axes.barh([0], [0], color=PHASES[phase].colour) for phase in PHASES if phase in seen]
    labels = [PHASES[phase].name for phase in PHASES if phase in seen]
    axes.legend(handles, labels, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9, frameon=False)
    _plain(axes)


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
                _lane(axes, len(labels), events, begin)
                labels.append(f"rank {rank}: {name}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * (max(event.end_s for event in result.events) - begin) * 1.01)
    axes.set_xlabel("milliseconds after the last gradient is reduced")
    others = " and on the one with least to update" if len(ranks) > 1 else ""
    axes.set_title(
        f"{study.strategy}: the end of the iteration, on the slowest rank{others}",
        loc="left",
        fontsize=11,
    )
    _plain(axes)


def _lane(axes: "Axes", place: int, events: Sequence[SimulatedEvent], begin: float) -> None:
    spans = [(1e3 * (max(e.start_s, begin) - begin), 1e3 * (e.end_s - max(e.start_s, begin))) for e in events]
    axes.broken_barh(spans, (place - 0.38, 0.76), facecolors=[PHASES[e.phase].colour for e in events])


def _loads(axes: "Axes", study: Study) -> None:
    """Update time of every rank of the stage, sorted: a flat line is a perfect balance."""
    stage = study.balance.slowest.stage
    for name in _LOADS:
        loads = study.strategies[name].loads
        if loads is None:
            continue
        mean = sum(loads) / len(loads)
        label = f"{name}: slowest {step_time(max(loads))}, max/mean {max(loads) / mean:.2f}"
        ranks = [100 * rank / len(loads) for rank in range(len(loads) + 1)]
        ordered = sorted(loads, reverse=True)
        axes.plot(
            ranks,
            [1e3 * load for load in (*ordered, ordered[-1])],
            drawstyle="steps-post",
            color=STRATEGY_COLOURS[name],
            lw=2,
            label=label,
        )
    bound = 1e3 * study.plan.lower_bounds[stage]
    axes.axhline(bound, color="black", ls=":", lw=1.2, label=f"no plan is below {step_time(bound / 1e3)}")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks of a stage, busiest first, %")
    axes.set_ylabel("milliseconds of updates")
    axes.set_title("Update time of every rank", loc="left", fontsize=11)
    axes.legend(fontsize=9, frameon=False)
    _plain(axes)


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
