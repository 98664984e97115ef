"""`canzona report --compare` of many runs, and the end of a sweep: a row for each run; all their losses drawn."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.figures import describe, new_figure, save, small_legend
from canzona_cli.report.page import Page, Screen, wrapped
from canzona_cli.report.run import setting_value
from canzona_cli.report.tables import GroupedTable, columns
from canzona_cli.run.compare import Several, run_figures
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import clean, number, plural, real, size, step_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SETTINGS = 8
"""Settings with a column of their own."""
_MOST_NAMED = 20
"""Curves that a legend names."""
COLUMNS: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "loss": ("loss", partial(number, spec=".4f")),
    "best_validation": ("validation", partial(number, spec=".4f")),
    "step_s": ("step time", step_time),
    "tokens_per_s": ("tokens/s", partial(number, spec=",.0f")),
    "mfu": ("MFU", partial(number, spec=".1%")),
    "peak_memory_bytes": ("memory", size),
}
"""How figures of a run are headed and written."""


@dataclass(frozen=True, kw_only=True)
class SeveralView(Page):
    """A row for each run: the settings in which they differ, and what it came to; the best one stands out."""

    several: Several

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        several = self.several
        names, best = run_names(several.runs), several.best
        shown = dict(list(several.settings.items())[:_MOST_SETTINGS])
        figures = [run_figures(run) for run in several.runs]
        heads = [*shown, "status", "steps", *(head for head, _ in COLUMNS.values())]
        rows = [
            [
                *(setting_value(values[place]) for values in shown.values()),
                clean(run.status),
                f"{run.step:,}",
                *(show(figures[place][name]) for name, (_, show) in COLUMNS.items()),
            ]
            for place, run in enumerate(several.runs)
        ]
        styles = ["bold green" if run is best else "" if run.status == "done" else "yellow" for run in several.runs]
        yield GroupedTable(head="run", labels=names, groups=columns(heads, rows), styles=styles)
        if len(several.settings) > len(shown):
            rest = plural(len(several.settings) - len(shown), "more setting")
            yield wrapped(f"{rest} differ: --json has them", "dim", first="  ")
        if best is not None:
            yield Text()
            by = "validation loss" if best.best_validation is not None else "loss"
            value = best.best_validation if best.best_validation is not None else best.losses[-1][1]
            yield wrapped(f"lowest {by}: {number(value, '.4f')}, {clean(best.run_dir)}")
        notes = [f"{name}: {note}" for name, run in zip(names, several.runs, strict=True) for note in run.notes]
        for note in notes:
            yield wrapped(clean(note), "yellow", first="  ! ")


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Their directories, without what all have in common in front."""
    paths = [run.run_dir.absolute() for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    return [clean(path.relative_to(common)) for path in paths]


def draw(several: Several, path: Path) -> None:
    """Write the picture: training and validation losses of all runs by step, and, where one number is all in which the
    runs differ, what each value of it came to.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    names = run_names(several.runs)
    swept = _swept(several)
    panels = 2 if swept is None else 3
    figure = new_figure(f"{plural(len(names), 'run')} in {several.runs[0].run_dir.absolute().parent}", 6.2 * panels, 5)
    training, validation, *by_value = figure.subplots(1, panels)
    for curves, axes in ((0, training), (1, validation)):
        for name, run, colour in zip(names, several.runs, cycle(f"C{n}" for n in range(10)), strict=False):
            points = (run.losses, run.validations)[curves]
            steps, losses = [step for step, _ in points], [loss for _, loss in points]
            style = {"lw": 2.2 if run is several.best else 1.2, "marker": "." if curves else None}
            axes.plot(steps, losses, color=colour, label=name, **style)
        describe(axes, ("training loss", "validation loss")[curves], x="step")
        axes.grid(axis="y", alpha=0.25)
    if len(names) <= _MOST_NAMED:
        small_legend(training)
    if swept is not None:
        _by_value(by_value[0], several, *swept)
    save(figure, path)


def _swept(several: Several) -> tuple[str, list[float]] | None:
    """The only setting in which the runs differ, and its value in each, where these are numbers. What follows from it
    (a learning rate's own minimum) does not count."""
    numeric = {
        key: [number for value in values if (number := real(value)) is not None]
        for key, values in several.settings.items()
        if key != "optimizer.min_lr" or len(several.settings) == 1
    }
    found = next(iter(numeric.items()), None)
    return found if found is not None and len(numeric) == 1 and len(found[1]) == len(several.runs) else None


def _by_value(axes: "Axes", several: Several, key: str, values: list[float]) -> None:
    for what, marker in (("best_validation", "o"), ("loss", "x")):
        points = sorted(
            (value, loss)
            for value, run in zip(values, several.runs, strict=True)
            if (loss := run_figures(run)[what]) is not None
        )
        label = "lowest validation loss" if what == "best_validation" else "last training loss"
        axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, lw=1.2, label=label)
    if min(values) > 0 and max(values) / min(values) > 5:
        axes.set_xscale("log")
    describe(axes, f"loss by {key}", x=key)
    axes.grid(alpha=0.25)
    small_legend(axes)
