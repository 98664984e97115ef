"""A run afterwards, for a person: how it ended, the first error, the loss, the breakdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from canzona_cli.report.run_breakdown import BreakdownView
from canzona_cli.report.charts import line_chart
from canzona_cli.report.state import relative_change
from canzona_cli.report.text import wrapped
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import RankError
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import clean, duration, guarded, number, plural

_MOST_WARNINGS = 5
_STYLES: Mapping[str, str] = {"done": "bold green", "failed": "bold red"}


def render_summary(summary: RunSummary) -> RenderableType:
    """The summary for a person: the failing rank's error first, then figures, loss curve, breakdown."""
    return _SummaryView(summary=summary)


@dataclass(frozen=True, kw_only=True)
class _SummaryView:
    summary: RunSummary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self.summary
        if summary.errors:
            yield from self._error(console, options)
            yield Text()
        for label, value, style in self._rows("->" if options.ascii_only else "→"):
            first = f"  {label:<11}"
            for line in wrapped(Text(value, style=style), console, options, first=first, rest=" " * len(first)):
                line.stylize("dim", 0, len(first))
                yield line
        if len(summary.losses) > 1:
            yield Text()
            width = min(options.max_width, 100) - 4
            for row in line_chart(summary.losses, width, 9, ascii_only=options.ascii_only):
                yield Text(f"  {row}", style="cyan", no_wrap=True)
        if summary.breakdown is not None:
            yield Text()
            yield BreakdownView(
                breakdown=summary.breakdown, device=None if summary.config is None else summary.config.cluster.device
            )
        said = [*summary.warnings[-_MOST_WARNINGS:], *summary.notes]
        if len(summary.warnings) > _MOST_WARNINGS:
            said.insert(0, f"{plural(len(summary.warnings) - _MOST_WARNINGS, 'earlier warning')} in events.jsonl")
        if said:
            yield Text()
        for note in said:
            yield from wrapped(Text(clean(note), style="yellow"), console, options, first="  ! ", rest="    ")

    def _error(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *others = self.summary.errors
        error = first.error or RankError()
        text = Text.assemble(
            (f"rank {first.rank}: {clean(error.type)}: ", "bold red"), clean(error.message, newlines=True)
        )
        yield from wrapped(text, console, options, rest="  ")
        where = RunFiles(self.summary.run_dir).rank(first.rank)
        more = f"; {plural(len(others), 'other rank')} failed after it" if others else ""
        what = "traceback" if error.traceback else "written"  # what a person can mend has none
        place = Text(clean(f"{what} in {where}{more}"), style="dim")
        yield from wrapped(place, console, options, first="  ", rest="  ")

    def _rows(self, arrow: str) -> Iterator[tuple[str, str, str]]:
        summary = self.summary
        name = f"{clean(summary.name)}, " if summary.name else ""
        yield "run", f"{name}{clean(summary.run_dir)}", ""
        code = "" if summary.exit_code is None else f", exit code {summary.exit_code}"
        said = f": {clean(summary.message)}" if summary.message else ""
        yield "status", f"{clean(summary.status)}{code}{said}", _STYLES.get(summary.status, "bold yellow")
        planned = "" if summary.steps_planned is None else f" of {summary.steps_planned:,}"
        took = "" if summary.elapsed_s is None else f" in {duration(summary.elapsed_s)}"
        yield "steps", f"{summary.step:,}{planned}{took}", ""
        for said in guarded(summary.skipped, summary.fallbacks):
            yield "guards", said, "yellow"
        for label, points in (("loss", summary.losses), ("validation", summary.validations)):
            if not points:
                continue
            (begin, first), (end, last) = points[0], points[-1]
            if len(points) == 1 or first is None or last is None:
                yield label, f"{number(last, '.4f') if last is not None else 'not finite'} at step {end:,.0f}", ""
                continue
            change = f"{number(first, '.4f')} {arrow} {number(last, '.4f')}"
            change += f" ({number(relative_change(first, last), '+.1f')}%)"
            yield label, f"{change}, steps {begin:,.0f} {arrow} {end:,.0f}", ""
