"""`canzona report --compare` of many runs, and the end of a sweep: a row for each run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.page import Page, Screen, wrapped
from canzona_cli.report.run import setting_value
from canzona_cli.report.tables import GroupedTable, columns
from canzona_cli.run.compare import Several, run_figures
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import clean, number, plural, size, step_time

_MOST_SETTINGS = 8
"""Settings with a column of their own."""
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
