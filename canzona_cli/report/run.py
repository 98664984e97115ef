"""`canzona report RUN`: how a run ended, the first error, the loss, the breakdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.charts import line_chart
from canzona_cli.report.page import Page, Screen, labelled, wrapped
from canzona_cli.report.run_breakdown import BreakdownView
from canzona_cli.report.train_state import relative_change
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import RankError
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import clean, duration, guarded, number, plural

_MOST_WARNINGS = 5
_STYLES: Mapping[str, str] = {"done": "bold green", "failed": "bold red"}


@dataclass(frozen=True, kw_only=True)
class RunView(Page):
    """The failing rank's error first, then figures, loss curve, breakdown."""

    summary: RunSummary

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        summary = self.summary
        if summary.errors:
            yield from self._error()
            yield Text()
        yield from labelled(self._rows(screen.arrow), 11)
        if len(summary.losses) > 1:
            yield Text()
            for row in line_chart(summary.losses, min(screen.width, 100) - 4, 9, ascii_only=screen.ascii_only):
                yield Text(f"  {row}", style="cyan", no_wrap=True)
        if summary.breakdown is not None:
            yield Text()
            device = None if summary.config is None else summary.config.cluster.device
            yield BreakdownView(breakdown=summary.breakdown, device=device)
        remarks = [*summary.warnings[-_MOST_WARNINGS:], *summary.notes]
        if len(summary.warnings) > _MOST_WARNINGS:
            earlier = plural(len(summary.warnings) - _MOST_WARNINGS, "earlier warning")
            remarks.insert(0, f"{earlier} in events.jsonl")
        if remarks:
            yield Text()
        for remark in remarks:
            yield wrapped(clean(remark), "yellow", first="  ! ")

    def _error(self) -> Iterator[RenderableType]:
        first, *others = self.summary.errors
        error = first.error or RankError()
        head = (f"rank {first.rank}: {clean(error.type)}: ", "bold red")
        yield wrapped(Text.assemble(head, clean(error.message, newlines=True)), rest="  ")
        where = RunFiles(self.summary.run_dir).rank(first.rank)
        more = f"; {plural(len(others), 'other rank')} failed after it" if others else ""
        what = "traceback" if error.traceback else "written"  # a user's mistake has no traceback
        yield wrapped(clean(f"{what} in {where}{more}"), "dim", first="  ")

    def _rows(self, arrow: str) -> Iterator[tuple[str, Text | str]]:
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
        for text in guarded(summary.skipped, summary.fallbacks):
            yield "guards", Text(text, style="yellow")
        for label, points in (("loss", summary.losses), ("validation", summary.validations)):
            if not points:
                continue
            (begin, first), (end, last) = points[0], points[-1]
            if len(points) == 1 or first is None or last is None:
                yield label, f"{number(last, '.4f') if last is not None else 'not finite'} at step {end:,.0f}"
                continue
            change = number(relative_change(first, last), "+.1f")
            losses = f"{number(first, '.4f')} {arrow} {number(last, '.4f')} ({change}%)"
            yield label, f"{losses}, steps {begin:,.0f} {arrow} {end:,.0f}"
