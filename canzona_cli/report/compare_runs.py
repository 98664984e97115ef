"""Two runs side by side: which settings differ, the loss at the same steps, where the time of a step went."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.report.text import wrapped
from canzona_cli.run.compare import Compared, ratio
from canzona_cli.run.phases import LABELS
from canzona_cli.run.words import MISSING, clean, milliseconds, number, size

_LONGEST_VALUE = 36


def render_compared(compared: Compared) -> RenderableType:
    """For a person: settings, losses, phases, figures; B / A is above 1 where run B takes more."""
    return _ComparedView(compared=compared)


@dataclass(frozen=True, kw_only=True)
class _ComparedView:
    compared: Compared

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        compared = self.compared
        for letter, run, plan in zip("AB", (compared.a, compared.b), compared.plans, strict=True):
            planned = "" if plan is None else f", plan {plan[:8]}"
            said = f"{clean(run.run_dir)}: {clean(run.status)}, step {run.step:,}{planned}"
            yield from wrapped(Text(said), console, options, first=f"  {letter}  ", rest="     ")
        yield Text()
        if compared.a.config is None or compared.b.config is None:
            yield Text("  settings: not compared, one of the runs has no readable config.yaml", style="yellow")
        elif compared.settings:
            rows = [(clean(key), *map(_value, values), "") for key, values in compared.settings.items()]
            yield _table("setting", rows, options)
        else:
            yield Text("  all settings are equal")
        yield Text()
        yield _table("loss", list(self._losses()), options)
        yield Text()
        if compared.phases:
            rows = [
                (_label(name), *map(milliseconds, pair), number(ratio(pair), ".2f"))
                for name, pair in compared.phases.items()
            ]
            yield _table("phase, ms (mean)", rows, options)
            yield Text()
            yield _table("", list(self._figures()), options)
        notes = [(letter, note) for letter, run in (("A", compared.a), ("B", compared.b)) for note in run.notes]
        for letter, note in notes:
            text = Text(clean(f"{letter}: {note}"), style="yellow")
            yield from wrapped(text, console, options, first="  ! ", rest="    ")

    def _losses(self) -> Iterator[tuple[str, str, str, str]]:
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

    def _figures(self) -> Iterator[tuple[str, str, str, str]]:
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


def _table(title: str, rows: Sequence[Sequence[str]], options: ConsoleOptions) -> Table:
    table = Table(box=box.ASCII if options.ascii_only else box.SIMPLE_HEAD, show_edge=False)
    table.add_column(title, overflow="fold")
    for name in ("A", "B"):
        table.add_column(name, justify="right", overflow="fold")
    last = {"setting": "", "loss": "B to A"}.get(title, "B / A")
    if last:
        table.add_column(last, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row[: len(table.columns)]), style="dim" if row[0].startswith(" ") else "")
    return table


def _label(name: str) -> str:
    return name if name == "step" else LABELS.get(name, clean(name))


def _value(value: object) -> str:
    """As it is typed; a long table by its length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = clean(f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{shown[: _LONGEST_VALUE - 3]}..."
