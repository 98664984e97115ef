"""`canzona report`: how a run ended, the first error, the loss, the breakdown; or two runs side by side."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.charts import line_chart
from canzona_cli.report.page import Page, Screen, Wrapped, labelled, remarks, wrapped
from canzona_cli.report.run_breakdown import BreakdownView
from canzona_cli.report.tables import Table
from canzona_cli.report.train_state import loss_change
from canzona_cli.run.compare import Compared, Pair, ratio
from canzona_cli.run.files import RunFiles
from canzona_cli.run.phases import LABELS
from canzona_cli.run.records import RankError
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import MISSING, clean, duration, guarded, milliseconds, number, plural, size

_LONGEST_VALUE = 36
_MOST_WARNINGS = 5
_STYLES: Mapping[str, str] = {"done": "bold green", "failed": "bold red", "diverged": "bold red"}

_Row = tuple[str, str, str, str]
"""What, of run A, of run B, how they compare."""


@dataclass(frozen=True, kw_only=True)
class RunView(Page):
    """The failing rank's error first, then figures, loss curve, breakdown."""

    summary: RunSummary

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        summary = self.summary
        if summary.errors and summary.status != "diverged":  # of all ranks together; the status says it
            yield from self._error()
            yield Text()
        yield from labelled(self.rows(), 11)
        if summary.go_on is not None:
            label = Text(f"  {'go on':<11}", style="dim")
            yield Wrapped(Text(clean(summary.go_on)), label, " " * label.cell_len, whole=True)
        if len(summary.losses) > 1:
            yield Text()
            for row in line_chart(summary.losses, min(screen.width, 100) - 4, 9):
                yield Text(f"  {row}", style="cyan", no_wrap=True)
        if summary.breakdown is not None:
            yield Text()
            yield BreakdownView(breakdown=summary.breakdown)
        left_out = len(summary.warnings) - _MOST_WARNINGS
        earlier = [f"{plural(left_out, 'earlier warning')} in events.jsonl"] if left_out > 0 else []
        yield from remarks([*earlier, *summary.warnings[-_MOST_WARNINGS:], *summary.notes])

    def _error(self) -> Iterator[RenderableType]:
        first, *others = self.summary.errors
        error = first.error or RankError()
        head = (f"rank {first.rank}: {clean(error.type)}: ", "bold red")
        yield wrapped(Text.assemble(head, clean(error.message, newlines=True)), rest="  ")
        where = RunFiles(self.summary.run_dir).rank(first.rank)
        more = f"; {plural(len(others), 'other rank')} failed after it" if others else ""
        what = "traceback" if error.traceback else "written"  # a user's mistake has no traceback
        yield wrapped(clean(f"{what} in {where}{more}"), "dim", first="  ")

    def _time_rows(self) -> Iterator[tuple[str, str]]:
        """What of the time counts, and how to lose less of it."""
        summary = self.summary
        if summary.restarts:
            yield "restarts", f"{summary.restarts} by the launch itself"
        if (spent := summary.goodput) is not None:
            costs = {
                "in steps done again": spent.redone_s,
                "between launches": spent.between_s,
                "starting, validating and saving": spent.other_s,
            }
            parts = [f"{spent.share:.1%} of {duration(spent.wall_s)} in steps that count"]
            yield "goodput", ", ".join([*parts, *(f"{duration(s)} {what}" for what, s in costs.items() if s >= 1)])

    def rows(self) -> Iterator[tuple[str, Text | str]]:
        """(label, value) of the figures."""
        summary = self.summary
        name = f"{clean(summary.name)}, " if summary.name else ""
        yield "run", f"{name}{clean(summary.run_dir)}"
        code = "" if summary.exit_code is None else f", exit code {summary.exit_code}"
        message = f": {clean(summary.message)}" if summary.message else ""
        style = _STYLES.get(summary.status, "bold yellow")
        yield "status", Text(f"{clean(summary.status)}{code}{message}", style=style)
        planned = "" if summary.steps_planned is None else f" of {summary.steps_planned:,}"
        took = "" if summary.elapsed_s is None else f" in {duration(summary.elapsed_s)}"
        yield "steps", f"{summary.step:,}{planned}{took}"
        yield from self._time_rows()
        if summary.supply is not None:
            yield "epochs", Text(summary.supply.words, style="yellow" if summary.supply.too_often else "")
        for text in guarded(summary.skipped, summary.fallbacks):
            yield "guards", Text(text, style="yellow")
        curves = {"loss": summary.losses, "validation": summary.validations}
        for label, points in {**curves, **{f"  {clean(n)}": own for n, own in summary.set_validations.items()}}.items():
            if not points:
                continue
            (begin, first), (end, last) = points[0], points[-1]
            if len(points) == 1 or first is None or last is None:
                yield label, f"{number(last, '.4f') if last is not None else 'not finite'} at step {end:,.0f}"
                continue
            yield label, f"{loss_change(first, last)}, steps {begin:,.0f} → {end:,.0f}"


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
            settings = ((clean(key), *map(setting_value, values)) for key, values in compared.settings.items())
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
        sides = (("A", compared.a), ("B", compared.b))
        yield from remarks(f"{letter}: {note}" for letter, run in sides for note in run.notes)

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
        for name, pair in self.compared.phases.items():
            label = name if name == "step" else LABELS.get(name, clean(name))
            yield _pair(label, pair, milliseconds)

    def _figures(self) -> Iterator[_Row]:
        figures = self.compared.figures
        for name, label, spec in (
            ("tokens_per_s", "tokens/s", ",.0f"),
            ("tokens_per_s_per_gpu", "tokens/s per rank", ",.0f"),
            ("mfu", "MFU", ".1%"),
            ("load_balance", "load balance", ".2f"),
        ):
            yield _pair(label, figures[name], partial(number, spec=spec))
        yield _pair("peak memory", figures["peak_memory_bytes"], size)


def _pair(label: str, pair: Pair, show: Callable[[object], str]) -> _Row:
    a, b = pair
    return label, show(a), show(b), number(ratio(pair), ".2f")


def _table(title: str, rows: Iterable[_Row], *, last: str = "B / A") -> Table:
    table = Table(title)
    for name in ("A", "B"):
        table.add_column(name, justify="right", overflow="fold")
    if last:
        table.add_numbers(last)
    for row in rows:
        table.add_row(*row[: len(table.columns)], style="dim" if row[0].startswith(" ") else "")
    return table


def setting_value(value: object) -> str:
    """As it is typed; a long table by its length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = clean(f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{shown[: _LONGEST_VALUE - 3]}..."
