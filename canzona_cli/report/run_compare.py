"""`canzona report RUN --compare OTHER`: which settings differ, the loss at the same steps, where a step's time went."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.page import Page, Screen, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.compare import Compared, ratio
from canzona_cli.run.phases import LABELS
from canzona_cli.run.words import MISSING, clean, milliseconds, number, size

_LONGEST_VALUE = 36

_Row = tuple[str, str, str, str]
"""What, of run A, of run B, how they compare."""


@dataclass(frozen=True, kw_only=True)
class ComparedView(Page):
    """Settings, losses, phases, figures of two runs; B / A is above 1 where run B takes more."""

    compared: Compared

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        compared = self.compared
        for letter, run, plan in zip("AB", (compared.a, compared.b), compared.plans, strict=True):
            planned = "" if plan is None else f", plan {plan[:8]}"
            text = f"{clean(run.run_dir)}: {clean(run.status)}, step {run.step:,}{planned}"
            yield wrapped(text, first=f"  {letter}  ")
        yield Text()
        if compared.a.config is None or compared.b.config is None:
            yield wrapped("settings: not compared, one of the runs has no readable config.yaml", "yellow", first="  ")
        elif compared.settings:
            settings = ((clean(key), *map(_value, values)) for key, values in compared.settings.items())
            yield _table("setting", ((key, a, b, "") for key, a, b in settings), last="")
        else:
            yield Text("  all settings are equal")
        yield Text()
        yield _table("loss", self._losses(), last="B to A")
        if compared.phases:
            yield Text()
            yield _table("phase, ms (mean)", self._phases())
            yield Text()
            yield _table("", self._figures())
        notes = [f"{letter}: {note}" for letter, run in (("A", compared.a), ("B", compared.b)) for note in run.notes]
        if notes:
            yield Text()
        for note in notes:
            yield wrapped(clean(note), "yellow", first="  ! ")

    def _losses(self) -> Iterator[_Row]:
        compared = self.compared
        for what, loss in (("first", compared.first), ("last", compared.last)):
            if loss is None:
                yield f"{what} common step", MISSING, MISSING, MISSING
            else:
                change = MISSING if loss.change is None else f"{100 * loss.change:+.2f}%"
                yield f"step {loss.step:,} ({what} of both)", f"{loss.a:.4f}", f"{loss.b:.4f}", change
        a, b = compared.best_validation
        change = f"{100 * (b / a - 1):+.2f}%" if a and b is not None else MISSING
        yield "best validation", number(a, ".4f"), number(b, ".4f"), change

    def _phases(self) -> Iterator[_Row]:
        for name, (a, b) in self.compared.phases.items():
            label = name if name == "step" else LABELS.get(name, clean(name))
            yield label, milliseconds(a), milliseconds(b), number(ratio((a, b)), ".2f")

    def _figures(self) -> Iterator[_Row]:
        figures = self.compared.figures
        for name, label, spec in (
            ("tokens_per_s", "tokens/s", ",.0f"),
            ("tokens_per_s_per_gpu", "tokens/s per rank", ",.0f"),
            ("mfu", "MFU", ".1%"),
            ("load_balance", "load balance", ".2f"),
        ):
            a, b = figures[name]
            yield label, number(a, spec), number(b, spec), number(ratio((a, b)), ".2f")
        a, b = figures["peak_memory_bytes"]
        yield "peak memory", size(a), size(b), number(ratio((a, b)), ".2f")


def _table(title: str, rows: Iterable[_Row], *, last: str = "B / A") -> Table:
    table = Table(title)
    for name in ("A", "B"):
        table.add_column(name, justify="right", overflow="fold")
    if last:
        table.add_numbers(last)
    for row in rows:
        table.add_row(*row[: len(table.columns)], style="dim" if row[0].startswith(" ") else "")
    return table


def _value(value: object) -> str:
    """As it is typed; a long table by its length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = clean(f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{shown[: _LONGEST_VALUE - 3]}..."
