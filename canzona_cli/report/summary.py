"""What a run directory tells afterwards: how it ended, the first error, the loss, the breakdown."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, Problem
from canzona_cli.report.breakdown import BreakdownView
from canzona_cli.report.charts import line_chart
from canzona_cli.report.state import relative_change
from canzona_cli.report.text import wrapped
from canzona_cli.run.breakdown import Breakdown, load_breakdown
from canzona_cli.run.events import describe
from canzona_cli.run.files import RunFiles, read_json
from canzona_cli.run.prediction import load_prediction
from canzona_cli.run.words import clean, duration, guarded, number, plural, real

VERSION = 1
_MOST_WARNINGS = 5
_STYLES: Mapping[str, str] = {"done": "bold green", "failed": "bold red"}


@dataclass(frozen=True, kw_only=True)
class RankError:
    """One rank's own error."""

    rank: int
    type: str
    message: str
    time: float
    """Unix seconds when it was written; the earliest is most likely the cause of the others."""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything `canzona report` shows; see `as_json` for the stable machine-readable form."""

    run_dir: Path
    name: str | None
    steps_planned: int | None
    status: str
    """done, failed, interrupted, or unfinished when there is no result.json (still going, or killed)."""
    exit_code: int | None
    message: str
    losses: tuple[tuple[float, float], ...]
    """(step, loss) of every logged step with a finite loss."""
    step: int
    """The last step known."""
    validations: tuple[tuple[int, float | None], ...]
    """(step, loss); None where it was not finite."""
    skipped: int
    """Steps that changed nothing because their gradients were not finite."""
    fallbacks: int
    """Matrix updates that were replaced by what their optimizer does when it fails."""
    elapsed_s: float | None
    """From the first to the last record."""
    errors: tuple[RankError, ...]
    """In the order in which they happened."""
    breakdown: Breakdown | None
    config: RunConfig | None
    warnings: tuple[str, ...] = field(default=())
    """What was said aloud while it ran: slow ranks, spikes of the loss, saves that failed."""
    notes: tuple[str, ...] = field(default=())
    """What is missing or damaged, and why that is so."""

    def as_json(self) -> dict[str, object]:
        """The stable form of `canzona report --json`; additions keep `version`, anything else raises it."""
        loss = [{"step": int(step), "loss": loss} for step, loss in (self.losses[:1] + self.losses[-1:])]
        validation = [{"step": step, "loss": loss} for step, loss in (self.validations[:1] + self.validations[-1:])]
        return {
            "version": VERSION,
            "run_dir": str(self.run_dir),
            "name": self.name,
            "status": self.status,
            "exit_code": self.exit_code,
            "message": self.message,
            "step": self.step,
            "steps_planned": self.steps_planned,
            "elapsed_s": self.elapsed_s,
            "loss": {"first": loss[0], "last": loss[-1]} if loss else None,
            "skipped": self.skipped,
            "fallbacks": self.fallbacks,
            "validation": {"first": validation[0], "last": validation[-1]} if validation else None,
            "errors": [asdict(error) for error in self.errors],
            "breakdown": None if self.breakdown is None else self.breakdown.as_json(),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def load_summary(run_dir: Path) -> RunSummary:
    """Read whatever a run left, finished or not.

    Raises:
        ConfigError: there is no such directory, or nothing of a run lies in it; the problem's key is `RUN_DIR`.
    """
    files = RunFiles(run_dir)
    known = (files.config, files.result, files.metrics, files.events, files.breakdown, files.claim)
    if not run_dir.is_dir() or not any(path.exists() for path in known):
        reason = "there is no run in this directory" if run_dir.is_dir() else "there is no such directory"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=_suggest(run_dir)))
    notes: list[str] = []
    config = _config(files, notes)
    metrics = list(_lines(files.metrics, notes))
    validation = list(_lines(files.validation, notes))
    result = read_json(files.result) or {}
    if not result:
        notes.append("there is no result.json: the run is still going, or it was killed before it could write one")
    try:
        breakdown = load_breakdown(run_dir)
    except ConfigError as error:
        breakdown = None
        notes += [f"no breakdown: {problem.reason}" for problem in error.problems]
    try:
        load_prediction(run_dir)
    except ConfigError as error:
        notes += [f"no plan beside it: {problem.reason}" for problem in error.problems]
    events = list(_lines(files.events, []))
    times = [t for record in metrics + validation + events if (t := real(record.get("time")))]
    steps = [int(s) for m in [*metrics, result] if (s := real(m.get("step"))) is not None]
    code = result.get("exit_code")
    return RunSummary(
        run_dir=run_dir,
        name=None if config is None else config.name,
        steps_planned=None if config is None else config.train.steps,
        status=str(result.get("status", "unfinished")),
        exit_code=code if isinstance(code, int) else None,
        message=str(result.get("message") or ""),
        losses=tuple(_losses(metrics)),
        step=max(steps, default=0),
        validations=tuple((int(real(v.get("step")) or 0), real(v.get("loss"))) for v in validation),
        skipped=_most(metrics, "skipped"),
        fallbacks=_most(metrics, "fallbacks"),
        elapsed_s=max(times) - min(times) if times else None,
        errors=_errors(files),
        breakdown=breakdown,
        config=config,
        warnings=tuple(note.text for event in events if (note := describe(event)) is not None and note.warning),
        notes=tuple(notes),
    )


def _config(files: RunFiles, notes: list[str]) -> RunConfig | None:
    from canzona_cli.config.compose import load_resolved

    try:
        return load_resolved(files.config)
    except (CanzonaError, OSError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return None


def _losses(metrics: list[dict[str, object]]) -> Iterator[tuple[float, float]]:
    for record in metrics:
        step, loss = real(record.get("step")), real(record.get("loss"))
        if step is not None and loss is not None:
            yield step, loss


def _most(metrics: list[dict[str, object]], count: str) -> int:
    """The largest of a count that only grows."""
    return max((int(real(record.get(count)) or 0) for record in metrics), default=0)


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, object]]:
    """The objects of a .jsonl file; a line cut short (the run was killed in it) is left out and noted."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    damaged = 0
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        else:
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {plural(damaged, 'damaged line')} left out")


def _errors(files: RunFiles) -> tuple[RankError, ...]:
    found = []
    for path in sorted(files.ranks.glob("rank-*.json")):
        record = read_json(path) or {}
        error, rank = record.get("error"), real(record.get("rank"))
        if isinstance(error, dict) and rank is not None:
            found.append(
                RankError(
                    rank=int(rank),
                    type=str(error.get("type", "error")),
                    message=str(error.get("message", "")),
                    time=real(record.get("time")) or math.inf,
                    traceback=str(error.get("traceback", "")),
                )
            )
    return tuple(sorted(found, key=lambda error: (error.time, error.rank)))


def _suggest(run_dir: Path) -> str:
    """The newest run nearby, if there is one."""
    for root in (run_dir, run_dir.parent, Path("runs")):
        try:
            runs = [p for p in root.iterdir() if RunFiles(p).config.exists()]
        except OSError:
            continue
        if runs:
            return f"the newest run near there is {max(runs, key=lambda p: RunFiles(p).config.stat().st_mtime)}"
    return "give the directory that `canzona train` named as the run's"


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
        text = Text.assemble(
            (f"rank {first.rank}: {clean(first.type)}: ", "bold red"), clean(first.message, newlines=True)
        )
        yield from wrapped(text, console, options, rest="  ")
        where = RunFiles(self.summary.run_dir).rank(first.rank)
        more = f"; {plural(len(others), 'other rank')} failed after it" if others else ""
        what = "traceback" if first.traceback else "written"  # what a person can mend has none
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
