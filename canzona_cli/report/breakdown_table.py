"""The breakdown at a terminal: a table of phases, planned beside measured, and a foot that says what it means."""

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.config.schema import Device
from canzona_cli.report.charts import bar
from canzona_cli.report.header import batch_factors, describe_layout
from canzona_cli.report.text import wrapped
from canzona_cli.run.breakdown import Breakdown, PhaseTime, relative_error
from canzona_cli.run.phases import LABELS
from canzona_cli.run.statistics import OverRanks
from canzona_cli.run.words import MISSING, clean, milliseconds, number, plural, real, size, step_time


def render(breakdown: Breakdown, *, device: Device | None = None) -> RenderableType:
    """The breakdown as a table and a foot, for any console width from 60 columns on.

    `device` names ranks properly (GPU or CPU rank) and explains a missing MFU; the file's own unless given.
    """
    return _BreakdownView(breakdown=breakdown, device=device or breakdown.device)


@dataclass(frozen=True, kw_only=True)
class _BreakdownView:
    breakdown: Breakdown
    device: Device | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        breakdown = self.breakdown
        times = "x" if options.ascii_only else "×"
        layout = describe_layout(breakdown.layout, self._unit, times=times)
        title = Text.assemble(
            ("Step-time breakdown", "bold"), f": {clean(breakdown.optimizer)}{self._strategy}, {layout}"
        )
        yield from wrapped(title, console, options)
        yield Text()
        yield self._table(options)
        yield Text()
        for label, value in self._foot(times):
            first = f"  {label:<14}"
            for line in wrapped(Text(value), console, options, first=first, rest=" " * len(first)):
                line.stylize("dim", 0, len(first))
                yield line

    @property
    def _unit(self) -> str:
        return {"cuda": "GPU", "cpu": "CPU rank", None: "rank"}[self.device]

    @property
    def _strategy(self) -> str:
        return "" if self.breakdown.optimizer == "adamw" else f" ({clean(self.breakdown.strategy)})"

    def _table(self, options: ConsoleOptions) -> Table:
        columns = self._columns(options)
        style = box.ASCII if options.ascii_only else box.SIMPLE_HEAD
        table = Table(box=style, padding=(0, 1) if options.max_width >= 66 else 0, show_edge=False)
        for column in columns:
            left = column in ("phase", "bar")
            table.add_column(
                {"phase": "phase, ms", "bar": ""}.get(column, column),
                justify="left" if left else "right",
                no_wrap=True,
                width=self._bar_width(options, columns) if column == "bar" else None,
            )
        for name, label, phase in _rows(self.breakdown):
            cells = self._cells(name, label, phase, options, columns)
            within = phase.in_step if phase is not None else not name.endswith("_total")
            table.add_row(*(Text(cells[column]) for column in columns), style="" if within and phase else "dim")
        table.add_section()
        last = dict.fromkeys(columns, "") | self._step_cells()
        table.add_row(*(Text(last[column]) for column in columns), style="bold")
        return table

    def _columns(self, options: ConsoleOptions) -> list[str]:
        """As many as fit, in this order."""
        planned = self.breakdown.planned is not None
        found = ["phase", "min", "mean", "max"]
        if planned and options.max_width < 80:
            found = ["phase", "mean"]
        if planned:
            found += ["planned", "error"]
        if options.max_width >= 110 and self.breakdown.ranks:
            found.append("slowest")
        found.append("share")
        return [*found, "bar"] if self._bar_width(options, found) >= 4 else found

    def _bar_width(self, options: ConsoleOptions, columns: list[str]) -> int:
        """What the other columns leave, which take at most so much with their padding: times six digits, and so on."""
        widths = {"phase": 24 if self._short_labels(options) else 30, "slowest": 12, "share": 10, "bar": 0}
        return min(40, options.max_width - 3 - sum(widths.get(column, 9) for column in columns))

    def _short_labels(self, options: ConsoleOptions) -> bool:
        """Without the word `exposed` the plan fits beside the times on a terminal of 80 columns."""
        return self.breakdown.planned is not None and options.max_width < 110

    def _cells(
        self, name: str, label: str, phase: PhaseTime | None, options: ConsoleOptions, columns: list[str]
    ) -> dict[str, str]:
        share = MISSING if phase is None else f"{number(100 * phase.share, '.1f')}%"
        within = phase.in_step if phase is not None else not name.endswith("_total")
        planned = None if self.breakdown.planned is None else self.breakdown.planned.phases.get(name)
        drawn = "" if phase is None or not within else phase.share
        return {
            "phase": label.split(", exposed")[0] if self._short_labels(options) else label,
            **dict(zip(("min", "mean", "max"), _times(phase), strict=True)),
            "planned": milliseconds(planned or None),  # a plan says nothing about a phase that it gives no time
            "error": MISSING if phase is None else _percent(relative_error(planned, phase.mean_s)),
            "slowest": _slowest_ranks(self.breakdown).get(name, MISSING),
            "share": share if within else f"({share})",
            "bar": bar(drawn, self._bar_width(options, columns), ascii_only=options.ascii_only),
        }

    def _step_cells(self) -> dict[str, str]:
        breakdown = self.breakdown
        planned = None if breakdown.planned is None else breakdown.planned.iteration_s
        return {
            "phase": "step",
            **dict(zip(("min", "mean", "max"), _times(breakdown.step), strict=True)),
            "planned": milliseconds(planned),
            "error": _percent(relative_error(planned, breakdown.step.mean_s)),
            "share": f"{number(100 * breakdown.in_step_share, '.1f')}%",
        }

    def _foot(self, times: str) -> list[tuple[str, str]]:
        breakdown = self.breakdown
        unit = "GPU" if self.device == "cuda" else "rank"
        whole = number(100 * breakdown.in_step_share, ".0f")
        shares = f"of the mean step; the phases add up to {whole}%, those in parentheses ran (partly) under others"
        profiled = f", {breakdown.steps_profiled} profiled" if breakdown.steps_profiled else ""
        left_out = f"{breakdown.steps_skipped} of warm-up{profiled} left out"
        steps = f"{plural(breakdown.steps_measured, 'step')} measured, {left_out}"
        rate, total = number(breakdown.tokens_per_s_per_gpu, ",.0f"), number(breakdown.tokens_per_s, ",.0f")
        rows = [
            *self._plan_rows(),
            ("shares", f"{shares} and are not added"),
            ("step", f"{step_time(breakdown.step.mean_s)}; {steps}"),
            ("throughput", f"{rate} tokens/s per {unit}, {total} in all"),
            ("model FLOPs", f"{number(breakdown.model_tflops_per_gpu, '.3g')} TFLOP/s per {unit}, MFU {self._mfu}"),
        ]
        planned = breakdown.planned
        balance = [
            f"{_name(name)} {number(value, '.2f')}"
            + (f" (planned {planned.load_balance:.2f})" if planned is not None and name == "matrix_update" else "")
            for name, value in (breakdown.load_balance or {}).items()
            if value is not None
        ]
        if balance:
            rows.append(("load balance", f"{', '.join(balance)}; max / mean over ranks, 1.00 is perfect"))
        memory = breakdown.peak_memory_bytes
        if memory is not None:
            spread = "" if memory.min == memory.max else f" (least {size(memory.min)}, mean {size(memory.mean)})"
            whole_process = ", Python and torch included" if self.device == "cpu" else ""
            plan = "" if planned is None else f"; planned {size(planned.memory_bytes)}"
            rows.append(("peak memory", f"{size(memory.max)} on the fullest {unit}{spread}{whole_process}{plan}"))
        rows.append(
            ("batch", f"{batch_factors(breakdown.layout, times=times)}, recompute {breakdown.layout.recompute}")
        )
        return rows

    def _plan_rows(self) -> list[tuple[str, str]]:
        planned, why = self.breakdown.planned, self.breakdown.why
        if planned is None:
            return []
        here = ", measured on this machine" if planned.calibrated and not planned.mismatches else ""
        source = f"simulated on profile {clean(planned.profile)}{here}; error: planned over mean, less 1"
        if not planned.calibrated:
            source += f". Profile {clean(planned.profile)} is not measured on this machine: `canzona calibrate` does it"
        elif planned.mismatches:
            source += f". But {clean('; '.join(planned.mismatches))}"
        return [*([("why", clean(why.text))] if why is not None else []), ("planned", source)]

    @property
    def _mfu(self) -> str:
        mfu = real(self.breakdown.mfu)
        if mfu is not None:
            peak = number(self.breakdown.peak_tflops_per_gpu, ".4g")
            base = "" if peak == MISSING else f" of the cluster profile's {peak} TFLOP/s (bf16)"
            return f"{100 * mfu:.1f}%{base}"
        return "n/a on CPU" if self.device == "cpu" else "n/a (no peak rate known)"


def _rows(breakdown: Breakdown) -> list[tuple[str, str, PhaseTime | None]]:
    """(name, label, phase) in the order of the step; phases this version does not know keep their name."""
    known = [name for name in LABELS if name != "other"]
    names = [*known, *(name for name in breakdown.phases if name not in LABELS), "other"]
    rows = []
    for name in names:
        phase = breakdown.phases.get(name)
        if phase is None and name.endswith("_total") and breakdown.phases.get(name.removesuffix("_total")) is None:
            continue
        rows.append((name, LABELS.get(name, clean(name)), phase))
    return rows


def _name(phase: str) -> str:
    return LABELS.get(phase, clean(phase)).split(",")[0].strip()


def _percent(error: float | None) -> str:
    """A relative error with its sign; what is a hundred times off is only told to be."""
    if error is None:
        return MISSING
    return f"{100 * error:+.0f}%" if error < 9.995 else ">+999%"


def _times(times: OverRanks | None) -> tuple[str, str, str]:
    if times is None:
        return MISSING, MISSING, MISSING
    return milliseconds(times.min_s), milliseconds(times.mean_s), milliseconds(times.max_s)


def _slowest_ranks(breakdown: Breakdown) -> dict[str, str]:
    """Per phase, the rank that spends most time in it."""
    worst: dict[str, tuple[float, int]] = {}
    for times in breakdown.ranks:
        for name, seconds in times.phases.items():
            if name not in worst or seconds > worst[name][0]:
                worst[name] = (seconds, times.rank)
    return {name: f"rank {rank}" for name, (_, rank) in worst.items()}
