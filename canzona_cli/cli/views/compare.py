"""The views of `canzona report --compare` and of a finished sweep: two runs in detail, or a row for each
run."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import phase_bar, step_bars
from canzona_cli.cli.views.curves import Curve, Curves, loss_curve, side_by_side
from canzona_cli.cli.views.document import Document, sections
from canzona_cli.cli.views.page import Page, Screen, paragraph, remarks, section_head
from canzona_cli.cli.views.tables import GroupedTable, Table, column
from canzona_cli.config.overrides import override_text
from canzona_cli.core.phases import LABELS
from canzona_cli.records.compare import Pair, RunComparison, RunPair, compare_two, ratio, run_figures
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import MISSING, finite_or_none, milliseconds, number, overhead, plural, size, step_time

_LONGEST_VALUE = 36
_Row = tuple[str, str, str, str]
"""A quantity, its value in run A, its value in run B, and the comparison of the two."""


@dataclass(frozen=True, kw_only=True)
class RunPairView(Page):
    """The comparison of two runs: tables of their settings, losses, phases and figures. B / A is above 1 if B
    has the larger value."""

    compared: RunPair

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        compared = self.compared
        for letter, run, plan in zip("AB", (compared.a, compared.b), compared.plans, strict=True):
            planned = "" if plan is None else f", plan {plan[:8]}"
            text = f"{run.run_dir}: {run.status}, step {run.step:,}{planned}"
            yield paragraph(text, first=f"  {letter}  ")
        yield Text()
        if compared.a.config is None or compared.b.config is None:
            reason = "one of the runs has no readable config.yaml"
            yield paragraph(f"settings: not compared, because {reason}", "yellow", first="  ")
        elif compared.settings:
            settings = ((key, setting_value(a), setting_value(b), "") for key, (a, b) in compared.settings.items())
            yield _table("setting", settings, last_head="")
        else:
            yield Text("  all settings are equal")
        yield Text()
        yield _table("loss", self._losses(), last_head="B vs. A")
        if compared.phases:
            yield Text()
            yield _table("phase, ms (mean)", self._phases())
            yield Text()
            yield _table("", self._figures())
        sides = (("A", compared.a), ("B", compared.b))
        yield from remarks(f"{letter}: {note}" for letter, run in sides for note in run.notes)

    def _losses(self) -> Iterator[_Row]:
        compared = self.compared
        for position, loss in (("first", compared.first), ("last", compared.last)):
            if loss is None:
                yield f"{position} common step", MISSING, MISSING, MISSING
            else:
                change = overhead(loss.change, digits=2)
                yield f"step {loss.step:,} ({position} in both)", f"{loss.a:.4f}", f"{loss.b:.4f}", change
        a, b = compared.best_validation
        change = overhead(b / a - 1 if a and b is not None else None, digits=2)
        yield "best validation", number(a, ".4f"), number(b, ".4f"), change

    def _phases(self) -> Iterator[_Row]:
        for name, pair in self.compared.phases.items():
            label = name if name == "step" else LABELS.get(name, name)
            yield _pair(label, pair, milliseconds)

    def _figures(self) -> Iterator[_Row]:
        figures = self.compared.figures
        for name, label, spec in (
            ("tokens_per_s", "tokens/s", ",.0f"),
            ("tokens_per_s_per_gpu", "tokens/s per rank", ",.0f"),
            ("mfu", "MFU", ".1%"),
            ("load_balance", "load balance", ".2f"),
        ):
            if any(value is not None for value in figures[name]):
                yield _pair(label, figures[name], partial(number, spec=spec))
        yield _pair("peak memory", figures["peak_memory_bytes"], size)


def _pair(label: str, pair: Pair, show: Callable[[object], str]) -> _Row:
    a, b = pair
    return label, show(a), show(b), number(ratio(pair), ".2f")


def _table(title: str, rows: Iterable[_Row], *, last_head: str = "B / A") -> Table:
    table = Table(title)
    for name in ("A", "B"):
        table.add_column(name, justify="right", overflow="fold")
    if last_head:
        table.add_numbers(last_head)
    for row in rows:
        table.add_row(*row[: len(table.columns)], style="dim" if row[0].startswith(" ") else "")
    return table


def setting_value(value: object) -> str:
    """Formats the value of a setting as a user types it. A long list is shown as the number of its entries;
    other long values are cut."""
    shown = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else override_text(value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{shown[: _LONGEST_VALUE - 3]}..."


_MOST_SETTINGS = 8
"""The most settings that get a column."""
COLUMNS: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "loss": ("loss", partial(number, spec=".4f")),
    "best_validation": ("validation", partial(number, spec=".4f")),
    "step_s": ("step time", step_time),
    "tokens_per_s": ("tokens/s", partial(number, spec=",.0f")),
    "mfu": ("MFU", partial(number, spec=".1%")),
    "peak_memory_bytes": ("memory", size),
}
"""The heading and the format of each figure of a run."""


@dataclass(frozen=True, kw_only=True)
class RunTableView(Page):
    """A table with a row for each run: the settings that differ, and the results. The best run is
    highlighted."""

    comparison: RunComparison

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        comparison = self.comparison
        runs, best = comparison.runs, comparison.best
        names = run_names(runs)
        shown = dict(list(comparison.settings.items())[:_MOST_SETTINGS])
        figures = [run_figures(run) for run in comparison.runs]
        table = {key: list(map(setting_value, values)) for key, values in shown.items()}
        table |= {"status": [run.status for run in runs], "steps": [f"{run.step:,}" for run in runs]}
        for name, (head, show) in COLUMNS.items():
            if any(run[name] is not None for run in figures):
                table[head] = [show(run[name]) for run in figures]
        styles = ["bold green" if run is best else "" if run.status == "done" else "yellow" for run in runs]
        groups = [column(head, cells) for head, cells in table.items()]
        yield GroupedTable(head="run", labels=names, groups=groups, styles=styles)
        if hidden := len(comparison.settings) - len(shown):
            differ = "differs" if hidden == 1 else "differ"
            yield paragraph(f"{plural(hidden, 'more setting')} {differ}: --json lists all of them", "dim", first="  ")
        if best is not None:
            yield Text()
            by = "validation loss" if best.best_validation is not None else "loss"
            value = best.best_validation if best.best_validation is not None else best.losses[-1][1]
            yield paragraph(f"lowest {by}: {number(value, '.4f')}, {best.run_dir}")
        for name, run in zip(names, runs, strict=True):
            for note in run.notes:
                yield paragraph(f"{name}: {note}", "yellow", first="  ! ")


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the directory of each run, relative to the nearest directory that contains all of them."""
    paths = [run.run_dir.absolute() for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def comparison_page(comparison: RunComparison) -> Document:
    """Returns the page of a comparison: figures, loss curves and step times; for two runs, also all
    differences."""
    return Document(
        kind="canzona report --compare",
        title=plural(len(comparison.runs), "run"),
        sections=sections(_page_parts(comparison)),
    )


def _page_parts(comparison: RunComparison) -> Iterator[RenderableType]:
    runs = dict(zip(run_names(comparison.runs), comparison.runs, strict=True))
    yield section_head("Runs", ", with the best one highlighted")
    yield RunTableView(comparison=comparison)
    training = [Curve(name=name, points=run.losses) for name, run in runs.items()]
    validation = [loss_curve(name, run.validations) for name, run in runs.items()]
    for title, curves in (("Training loss", training), ("Validation loss", validation)):
        yield section_head(title, ", nats per token")
        yield Curves(title=title.lower(), curves=curves, numbers=partial(number, spec=".4f"))
    yield section_head("Loss by setting", ", for each numeric setting that differs between the runs")
    settings = _numeric_settings(comparison)
    yield side_by_side(*(_losses_by(key, values, comparison) for key, values in settings.items()))
    breakdowns = {name: run.breakdown for name, run in runs.items() if run.breakdown is not None}
    steps = [phase_bar(name, breakdown.means, breakdown.step.mean_s) for name, breakdown in breakdowns.items()]
    if steps:
        yield section_head("Step", ", measured, mean over ranks, on one scale")
        yield step_bars(steps)
    if len(runs) == 2:
        yield section_head("Differences", ": A is the first run; B / A is above 1 if run B has the larger value")
        yield RunPairView(compared=compare_two(comparison))


def _numeric_settings(comparison: RunComparison) -> dict[str, list[float]]:
    """Returns the numeric settings that differ between the runs, with each run's value."""
    numbers = {key: list(map(finite_or_none, values)) for key, values in comparison.settings.items()}
    return {key: [v for v in values if v is not None] for key, values in numbers.items() if None not in values}


def _losses_by(key: str, values: list[float], comparison: RunComparison) -> Curves:
    """Draws the final losses of the runs over the values of a setting."""
    curves = []
    for name, figure in (("lowest validation loss", "best_validation"), ("last training loss", "loss")):
        losses = [run_figures(run)[figure] for run in comparison.runs]
        points = [(value, loss) for value, loss in zip(values, losses, strict=True) if loss is not None]
        curves.append(Curve(name=name, points=sorted(points), dots=True))
    wide_range = min(values) > 0 and max(values) / min(values) > 5
    return Curves(title=f"loss by {key}", curves=curves, axes="log x" if wide_range else "linear", x=key)
