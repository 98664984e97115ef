"""The step-time breakdown: where the time of one training step went, over all ranks, beside what was planned.

`breakdown.json` is written by the workers. Times are seconds; `min_s`, `mean_s`, `max_s` are over ranks, of each rank's
mean over the measured steps. Phases with `in_step` follow one another and add up to the step; the others (`*_total`)
count work that ran under them as well. What was planned comes from `predicted.json`, which runs of
earlier versions lack.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.config.schema import Device, Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.launch.files import RunFiles
from canzona_cli.report.header import batch_factors, describe_layout
from canzona_cli.report.predicted import PlannedStep, load_planned
from canzona_cli.report.text import MISSING, bar, clean, milliseconds, number, plural, real, size, step_time, wrapped
from canzona_cli.report.why import Why, explain

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds over ranks."""

    min_s: float
    mean_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True)
class PhaseTime(Spread):
    """One phase of the step."""

    share: float
    """`mean_s` over the step's `mean_s`."""
    in_step: bool = True
    """Whether it is one of the phases that add up to the step."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's mean seconds per phase."""

    rank: int
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory over ranks, bytes."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The content of breakdown.json."""

    version: int
    strategy: str
    optimizer: str
    device: Device | None = None
    layout: Layout
    steps_measured: int
    steps_skipped: int
    """Warm-up steps at the start that were not measured."""
    steps_profiled: int = 0
    """Steps under torch's profiler, which slows them; not measured either."""
    step: Spread
    phases: Mapping[str, PhaseTime | None]
    """A phase that this strategy does not have is absent or null."""
    ranks: tuple[RankTimes, ...] = ()
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None = None
    """Model FLOP utilisation, 0 to 1: model FLOPs (no recomputation) over the profile's peak."""
    model_tflops_per_gpu: float | None = None
    peak_tflops_per_gpu: float | None = None
    """The cluster profile's bf16 peak, what `mfu` is a share of."""
    load_balance: Mapping[str, float | None] | None = None
    """Per phase, max over mean of the ranks' work; 1.0 is perfect."""
    peak_memory_bytes: PeakMemory | None = None
    planned: PlannedStep | None = None
    """Not in breakdown.json: what the run was predicted to take, where it left a prediction."""

    @property
    def why(self) -> Why | None:
        """The phase that differs most from the plan, and the likely cause; None without a plan."""
        if self.planned is None:
            return None
        return explain(
            {name: phase for name, phase in self.phases.items() if phase is not None},
            self.planned.phases,
            ranks=[times.phases for times in sorted(self.ranks, key=lambda times: times.rank)],
            calibrated=self.planned.calibrated and not self.planned.mismatches,
            cores=self.planned.cores,
            world_size=self.layout.world_size,
            load_balance=self.planned.load_balance,
        )

    def as_json(self) -> dict[str, object]:
        """The content of breakdown.json, what was planned beside it, and why they differ; additions keep `version`."""
        planned, why = self.planned, self.why
        return {
            **asdict(replace(self, planned=None)),
            "planned": None if planned is None else planned.as_json() | {"error": self._errors(planned)},
            "why": None if why is None else asdict(why),
        }

    def _errors(self, planned: PlannedStep) -> dict[str, float | None]:
        """Planned over measured mean, less 1, by phase and of the step."""
        errors = {
            name: relative_error(planned.phases.get(name), phase.mean_s)
            for name, phase in self.phases.items()
            if phase is not None
        }
        return {**errors, "step": relative_error(planned.iteration_s, self.step.mean_s)}

    @property
    def in_step_share(self) -> float:
        """What the phases of the step add up to, as a share of it; 1.0 but for rounding."""
        return math.fsum(phase.share for phase in self.phases.values() if phase is not None and phase.in_step)


# In the order of the step; a `_total` belongs to the phase before it.
LABELS: Mapping[str, str] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "pipeline": "pipeline wait",
    "grad_reduce": "gradient reduction, exposed",
    "grad_reduce_total": "  in all, with overlap",
    "norm_clip": "norm + clip",
    "exchange": "exchange, exposed",
    "exchange_total": "  in all, with overlap",
    "matrix_update": "matrix update",
    "adamw_update": "AdamW update",
    "param_gather": "parameter gathering, exposed",
    "param_gather_total": "  in all, with overlap",
    "other": "other",
}


def relative_error(planned: float | None, measured: float) -> float | None:
    """Planned over measured, less 1: 0.1 is a plan 10% too long. None where either took no time to speak of."""
    if planned is None or measured < NOTHING_S or planned < NOTHING_S:
        return None
    return planned / measured - 1


NOTHING_S = 1e-6


def load_breakdown(run_dir: Path) -> Breakdown:
    """Read and check a run's breakdown.json, and what was planned where that can be read.

    Raises:
        ConfigError: it is missing, damaged, or of another version; the problem's key is `RUN_DIR`.
    """
    from pydantic import TypeAdapter, ValidationError

    path = RunFiles(run_dir).breakdown
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unreadable(
            run_dir,
            "there is no breakdown.json in it",
            "it is written when training ends after the warm-up steps; give the directory of such a run",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _unreadable(run_dir, f"breakdown.json cannot be read: {error}", _FIX_DAMAGED) from None
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise _unreadable(run_dir, "breakdown.json is not a breakdown of canzona's", _FIX_DAMAGED)
    if version != VERSION:
        raise _unreadable(
            run_dir,
            f"breakdown.json has version {version}, this canzona reads version {VERSION}",
            "read it with the canzona that wrote it",
        )
    try:
        measured = TypeAdapter(Breakdown).validate_python(data | {"planned": None})
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top level'}: {e['msg'].lower()}" for e in error.errors()]
        shown = "; ".join(places[:5]) + (f"; and {len(places) - 5} more" if len(places) > 5 else "")
        raise _unreadable(run_dir, f"breakdown.json is damaged: {shown}", _FIX_DAMAGED) from None
    try:
        return replace(measured, planned=load_planned(run_dir))
    except ConfigError:  # `canzona report` notes it; what was measured is none the worse for it
        return measured


_FIX_DAMAGED = "the run's other files are still readable; train again for a new breakdown"


def _unreadable(run_dir: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix))


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
        source = f"simulated on profile {clean(planned.profile)}; error: planned over mean, less 1"
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


def _times(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return MISSING, MISSING, MISSING
    return milliseconds(spread.min_s), milliseconds(spread.mean_s), milliseconds(spread.max_s)


def _slowest_ranks(breakdown: Breakdown) -> dict[str, str]:
    """Per phase, the rank that spends most time in it."""
    worst: dict[str, tuple[float, int]] = {}
    for times in breakdown.ranks:
        for name, seconds in times.phases.items():
            if name not in worst or seconds > worst[name][0]:
                worst[name] = (seconds, times.rank)
    return {name: f"rank {rank}" for name, (_, rank) in worst.items()}
