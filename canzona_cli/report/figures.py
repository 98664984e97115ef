"""Figures as PNG files: one look for all of them, and the parts that several share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.errors import unwritable
from canzona_cli.run.phases import PHASES
from canzona_cli.run.statistics import Quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL = 8.5


def new_figure(title: str, width: float, height: float) -> "Figure":
    """An empty figure, inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=13)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise unwritable("--plot", path, error, fix="name another place with --plot FILE.png") from None


def describe(axes: "Axes", title: str, *, x: str = "", y: str = "") -> None:
    """Title, labels, and no frame at the top and right."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def small_legend(axes: "Axes", *, title: str | None = None, at: str = "best", columns: int = 1) -> None:
    """Without a frame, `at` a place in matplotlib's words."""
    axes.legend(fontsize=_SMALL, frameon=False, title=title, title_fontsize=_SMALL, loc=at, ncols=columns)


def rows(axes: "Axes", names: Sequence[str]) -> None:
    """Names of horizontal bars, the first at the top."""
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()


def phase_bar(
    axes: "Axes", place: float, phases: Mapping[str, float], *, height: float = 0.66, opacity: float = 1.0
) -> float:
    """A horizontal bar of a step's phases, in their order; returns where it ends."""
    end = 0.0
    for phase, look in PHASES.items():
        seconds = phases.get(phase, 0.0)
        if seconds > 0:
            axes.barh(place, seconds, left=end, color=look.colour, height=height, alpha=opacity)
            end += seconds
    return end


def phase_legend(axes: "Axes", shown: Iterable[Mapping[str, float]], *, below: float) -> None:
    """The colours of the phases in `shown` that take any time, `below` the axes."""
    bars = list(shown)
    seen = [look for phase, look in PHASES.items() if any(phases.get(phase, 0.0) > 0 for phases in bars)]
    handles = [axes.barh([0], [0], color=look.colour) for look in seen]
    axes.legend(
        handles,
        [look.name for look in seen],
        ncols=6,
        loc="upper center",
        bbox_to_anchor=(0.5, -below),
        fontsize=_SMALL,
        frameon=False,
    )


def whiskers(spreads: Sequence[Quartiles]) -> list[list[float]]:
    """From median to both quartiles, as error bars want them."""
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def side_by_side(count: int) -> tuple[float, Iterator[float]]:
    """Width of one bar where `count` share a place, and how far each is from the middle of it."""
    one = 0.8 / max(1, count)
    return one, (one * (number - (count - 1) / 2) for number in range(count))


def rank_ticks(axes: "Axes", ranks: int) -> None:
    """At most about 16 numbers of ranks."""
    every = max(1, ranks // 16)
    axes.set_xticks(range(0, ranks, every), [str(rank) for rank in range(0, ranks, every)])


def room_above(axes: "Axes", share: float) -> None:
    """From 0 to `share` more than what is drawn."""
    axes.set_ylim(0, (1 + share) * max(axes.get_ylim()[1], 1e-3))
