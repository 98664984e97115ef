"""The screen of `canzona report`: a run's status, first error, losses and step-time breakdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import Bars, phase_bar, sparkline, step_bars
from canzona_cli.cli.views.header import batch_factors, describe_layout, optimizer_words
from canzona_cli.cli.views.page import (
    Page,
    Paragraph,
    Screen,
    Table,
    joined,
    labelled_rows,
    paragraph,
    remarks,
    section_head,
)
from canzona_cli.cli.views.train_state import loss_change
from canzona_cli.core.phases import LABELS
from canzona_cli.records.breakdown import CALIBRATE, Breakdown, PhaseTime, relative_error
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import RankError
from canzona_cli.records.statistics import OverRanks
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import (
    MISSING,
    clean,
    duration,
    error_percent,
    experts_words,
    finite_or_none,
    guard_notes,
    milliseconds,
    number,
    plural,
    size,
    step_time,
)

_MOST_WARNINGS = 5
_MOST_LINES = 4
"""The most lines of the first error that are shown without `-v`."""
_BRIEF = ("why", "planned", "step", "throughput", "model FLOPs", "peak memory")
"""The figures that are also shown without `-v`, as at the end of a run."""
_STYLES: Mapping[str, str] = {"done": "bold green", "failed": "bold red", "diverged": "bold red"}


@dataclass(frozen=True, kw_only=True)
class RunView(Page):
    """The report of a run: the error of the first rank that failed, figures, loss curve, breakdown and
    warnings."""

    summary: RunSummary
    verbose: bool = False
    """True to show the time of every phase."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        summary = self.summary
        # A divergence is an error of all ranks together, and the status line shows its message.
        if summary.errors and summary.status != "diverged":
            yield from self._error()
            yield Text()
        yield from self.figures()
        if len(summary.losses) > 1:
            yield Text()
            losses = [loss for _, loss in summary.losses]
            yield Text(f"  {sparkline(losses, min(screen.width, 100) - 4)}", style="cyan", no_wrap=True)
        if summary.breakdown is not None:
            yield Text()
            yield BreakdownView(breakdown=summary.breakdown, brief=not self.verbose)
            if not self.verbose:
                yield paragraph("-v shows the time of each phase, and the load of the ranks", "dim", first="  ")
        left_out = len(summary.warnings) - _MOST_WARNINGS
        earlier = [f"{plural(left_out, 'earlier warning')} in events.jsonl"] if left_out > 0 else []
        yield from remarks([*earlier, *summary.warnings[-_MOST_WARNINGS:], *summary.notes])

    def _error(self) -> Iterator[RenderableType]:
        first, *others = self.summary.errors
        error = first.error or RankError()
        head = (f"rank {first.rank}: {clean(error.type)}: ", "bold red")
        lines = clean(error.message, newlines=True).splitlines() or [""]
        shown = lines if self.verbose else lines[:_MOST_LINES]
        yield paragraph(Text.assemble(head, "\n".join(shown), " ..." * (len(shown) < len(lines))), rest="  ")
        where = RunFiles(self.summary.run_dir).rank(first.rank)
        more = f"; {plural(len(others), 'other rank')} failed after it" if others else ""
        source = "traceback" if error.traceback else "recorded"  # a user's mistake has no traceback
        yield paragraph(f"{source} in {where}{more}", "dim", first="  ")

    def _time_rows(self) -> Iterator[tuple[str, str]]:
        """Yields the rows for restarts and goodput, if the run has them."""
        summary = self.summary
        if summary.restarts:
            yield "restarts", f"{summary.restarts} (automatic, in the last launch)"
        if (spent := summary.goodput) is not None:
            lost_s = {
                "in repeated steps": spent.redone_s,
                "between launches": spent.between_s,
                "in start, validation and saves": spent.other_s,
            }
            parts = [f"{spent.share:.1%} of {duration(spent.wall_s)} in useful steps"]
            parts += [f"{duration(seconds)} {use}" for use, seconds in lost_s.items() if seconds >= 1]
            yield "goodput", ", ".join(parts)

    def figures(self) -> Iterator[Paragraph]:
        """Yields the labelled figures and, if the run can be continued, the command that continues it."""
        yield from labelled_rows(self._rows(), 11)
        if self.summary.go_on is not None:
            label = Text(f"  {'continue':<11}", style="dim")
            yield Paragraph(joined(self.summary.go_on), label, " " * label.cell_len, unbroken=True)

    def _rows(self) -> Iterator[tuple[str, Text | str]]:
        summary = self.summary
        name = f"{summary.name}, " if summary.name else ""
        yield "run", f"{name}{summary.run_dir}"
        code = "" if summary.exit_code is None else f", exit code {summary.exit_code}"
        message = f": {summary.message}" if summary.message else ""
        style = _STYLES.get(summary.status, "bold yellow")
        yield "status", joined((f"{summary.status}{code}{message}", style))
        of_planned = "" if summary.steps_planned is None else f" of {summary.steps_planned:,}"
        duration_text = "" if summary.elapsed_s is None else f" in {duration(summary.elapsed_s)}"
        yield "steps", f"{summary.step:,}{of_planned}{duration_text}"
        yield from self._time_rows()
        if summary.supply is not None:
            yield "epochs", Text(summary.supply.words, style="yellow" if summary.supply.too_often else "")
        for text in guard_notes(summary.skipped, summary.fallbacks):
            yield "guards", Text(text, style="yellow")
        newest = summary.metrics[-1] if summary.metrics else None
        if newest is not None and newest.expert_load is not None:
            yield "experts", experts_words(newest.expert_load, newest.balancing_loss)
        curves = {"loss": summary.losses, "validation": summary.validations}
        sets = {f"  {name}": losses for name, losses in summary.set_validations.items()}
        for label, points in (curves | sets).items():
            if points:
                (begin, first), (end, last) = points[0], points[-1]
                text = f"{'not finite' if last is None else number(last, '.4f')} at step {end:,.0f}"
                if len(points) > 1 and first is not None and last is not None:
                    text = f"{loss_change(first, last)}, steps {begin:,.0f} → {end:,.0f}"
                yield label, text


@dataclass(frozen=True, kw_only=True)
class BreakdownView(Page):
    """The step-time breakdown of a run: bars, a table, and notes."""

    breakdown: Breakdown
    brief: bool = False
    """True to show only the bars and the main figures, as at the end of a run."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        breakdown = self.breakdown
        layout = describe_layout(breakdown.layout, breakdown.device)
        optimizer = optimizer_words(breakdown.optimizer, breakdown.strategy)
        yield section_head("Step-time breakdown", f": {optimizer}, {layout}")
        if not self.brief:
            yield Text()
        yield self._bars()
        if not self.brief:
            yield Text()
            yield self._table(screen.width)
            yield Text()
        shown = [(label, text) for label, text in self._figure_rows() if not self.brief or label in _BRIEF]
        yield from labelled_rows(shown)

    def _bars(self) -> Bars:
        """Draws a bar for the measured step, and another for the planned step if there is one."""
        breakdown, planned = self.breakdown, self.breakdown.shown_plan
        rows = [phase_bar("measured", breakdown.means, breakdown.step.mean_s)]
        if planned is not None:
            rows.append(phase_bar("planned", planned.phases, planned.iteration_s, faint=True))
        return step_bars(rows)

    def _table(self, width: int) -> Table:
        planned, is_wide = self.breakdown.shown_plan, width >= 110
        predicted = {} if planned is None else {**planned.phases, "step": planned.iteration_s}
        shown = {"planned": planned is not None, "error": self._comparable, "share": True}
        columns = ["min", "mean", "max", *(column for column, is_shown in shown.items() if is_shown)]
        table = Table()
        table.add_column("phase, ms", no_wrap=True)
        table.add_numbers(*columns)
        for name, label, phase in _rows(self.breakdown):
            share = MISSING if phase is None else f"{number(100 * phase.share, '.1f')}%"
            adds_up = phase is None or phase.in_step
            cells = self._cells(phase, predicted.get(name))
            cells["share"] = share if adds_up else f"({share})"
            # Without `, exposed`, the table with a plan fits in 80 columns.
            row_label = label if planned is None or is_wide else label.split(", exposed")[0]
            style = "" if adds_up and phase else "dim"
            table.add_row(row_label, *(cells[column] for column in columns), style=style)
        table.add_section()
        cells = self._cells(self.breakdown.step, predicted.get("step"))
        cells["share"] = f"{number(100 * self.breakdown.in_step_share, '.1f')}%"
        table.add_row("step", *(cells[column] for column in columns), style="bold")
        return table

    @property
    def _comparable(self) -> bool:
        """True if measured and planned times may be compared; False without a plan, or if its profile
        describes other hardware."""
        return self.breakdown.shown_plan is not None and not self.breakdown.shown_plan.mismatches

    def _cells(self, times: OverRanks | None, planned: float | None) -> dict[str, str]:
        """Returns the cells of a phase, or of the step, by column. A planned time of 0 is shown as
        missing."""
        return {
            **{name: milliseconds(getattr(times, f"{name}_s", None)) for name in ("min", "mean", "max")},
            "planned": milliseconds(planned or None),
            "error": MISSING if times is None else _error(planned, times.mean_s),
        }

    def _figure_rows(self) -> Iterator[tuple[str, str]]:
        breakdown = self.breakdown
        unit = "GPU" if breakdown.device == "cuda" else "rank"
        added = number(100 * breakdown.in_step_share, ".0f")
        shares = f"of the mean step; the phases add up to {added}%, not counting overlapped ones (in parentheses)"
        profiled = f" and {breakdown.steps_profiled} profiled" if breakdown.steps_profiled else ""
        excluded = f"excluding {breakdown.steps_skipped} for warm-up{profiled}"
        steps = f"{plural(breakdown.steps_measured, 'step')} measured, {excluded}"
        rate, total = number(breakdown.tokens_per_s_per_gpu, ",.0f"), number(breakdown.tokens_per_s, ",.0f")
        yield from self._plan_rows()
        yield "shares", shares
        yield "step", f"{step_time(breakdown.step.mean_s)}; {steps}"
        yield "throughput", f"{rate} tokens/s per {unit}, {total} in total"
        yield "model FLOPs", f"{number(breakdown.model_tflops_per_gpu, '.3g')} TFLOP/s per {unit}{self._mfu}"
        planned = self.breakdown.shown_plan
        balance = []
        for name, value in (breakdown.load_balance or {}).items():
            if value is not None:
                balance.append(f"{LABELS.get(name, name).split(',')[0].strip()} {number(value, '.2f')}")
                if planned is not None and name == "matrix_update":
                    balance[-1] += f" (planned {planned.load_balance:.2f})"
        if balance:
            yield "load balance", f"{', '.join(balance)}; max / mean over ranks, 1.00 is ideal"
        memory = breakdown.peak_memory_bytes
        if memory is not None:
            spread = "" if memory.min == memory.max else f" (least {size(memory.min)}, mean {size(memory.mean)})"
            included = ", Python and torch included" if self.breakdown.device == "cpu" else ""
            plan = "" if planned is None else f"; planned {size(planned.memory_bytes)}"
            plan += " without them" if plan and included else ""
            yield "peak memory", f"{size(memory.max)} on the fullest {unit}{spread}{included}{plan}"
        yield "batch", f"{batch_factors(breakdown.layout)}, recompute {breakdown.layout.recompute}"

    def _plan_rows(self) -> Iterator[tuple[str, str]]:
        planned, why = self.breakdown.shown_plan, self.breakdown.why
        if planned is None:
            if self.breakdown.planned is not None:
                yield "planned", CALIBRATE
            return
        source = f"simulated with profile {planned.profile}"
        if self._comparable:
            source += f"{', measured on this machine' if planned.calibrated else ''}; error: planned / mean - 1"
        if not planned.calibrated:
            source += ". The profile was not measured on this machine: `canzona calibrate` measures it"
        elif planned.mismatches:
            source += f"; no errors are shown: {'; '.join(planned.mismatches)}"
        if why is not None:
            yield "why", why.text
        yield "planned", source

    @property
    def _mfu(self) -> str:
        """The MFU as text after a comma; empty if the profile's peak rate does not describe this machine."""
        mfu = finite_or_none(self.breakdown.mfu)
        if mfu is not None:
            if self.breakdown.planned is not None and self.breakdown.shown_plan is None:
                return ""
            peak = number(self.breakdown.peak_tflops_per_gpu, ".4g")
            base = "" if peak == MISSING else f" of the cluster profile's {peak} TFLOP/s (bf16)"
            return f", MFU {100 * mfu:.1f}%{base}"
        return ", MFU n/a on CPU" if self.breakdown.device == "cpu" else ", MFU n/a (peak rate not known)"


def _rows(breakdown: Breakdown) -> list[tuple[str, str, PhaseTime | None]]:
    """Returns (name, label, phase) for each phase, in the order of a step. A phase that `LABELS` does not
    have is labelled with its name."""
    labelled = [name for name in LABELS if name != "other"]
    names = [*labelled, *(name for name in breakdown.phases if name not in LABELS), "other"]
    rows = []
    for name in names:
        phase = breakdown.phases.get(name)
        if phase is None and name.endswith("_total") and breakdown.phases.get(name.removesuffix("_total")) is None:
            continue
        rows.append((name, LABELS.get(name, name), phase))
    return rows


def _error(planned: float | None, measured: float) -> str:
    error = relative_error(planned, measured)
    return MISSING if error is None else error_percent(error)
