"""The view of `canzona report --compare` for two runs: all differences. `ranking` has the view of more runs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.page import Page, Screen, Table, paragraph, remarks
from canzona_cli.config.settings import override_text
from canzona_cli.core.phases import LABELS
from canzona_cli.records.compare import Pair, RunPair, ratio
from canzona_cli.records.words import MISSING, milliseconds, number, overhead, size

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
    shown = override_text(value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{shown[: _LONGEST_VALUE - 3]}..."
