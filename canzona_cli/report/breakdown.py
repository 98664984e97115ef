"""The step-time breakdown: where the time of one training step went, over all ranks.

`breakdown.json` is written by the workers. Times are seconds; `min_s`, `mean_s`, `max_s` are over ranks, of each rank's
mean over the measured steps. Phases with `in_step` follow one another and add up to the step; the others (`*_total`)
count work that ran under them as well.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.config.schema import Device, Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.launch.files import RunFiles
from canzona_cli.report.header import batch_factors, describe_layout
from canzona_cli.report.text import MISSING, bar, clean, milliseconds, number, plural, real, size, step_time, wrapped

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


def load_breakdown(run_dir: Path) -> Breakdown:
    """Read and check a run's breakdown.json.

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
        return TypeAdapter(Breakdown).validate_python(data)
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top level'}: {e['msg'].lower()}" for e in error.errors()]
        shown = "; ".join(places[:5]) + (f"; and {len(places) - 5} more" if len(places) > 5 else "")
        raise _unreadable(run_dir, f"breakdown.json is damaged: {shown}", _FIX_DAMAGED) from None


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
        wide = options.max_width >= 110
        slowest = _slowest_ranks(self.breakdown) if wide else {}
        style = box.ASCII if options.ascii_only else box.SIMPLE_HEAD
        table = Table(box=style, padding=(0, 1) if options.max_width >= 66 else 0, show_edge=False)
        table.add_column("phase, ms", no_wrap=True)
        for name in ("min", "mean", "max"):
            table.add_column(name, justify="right", no_wrap=True)
        if slowest:
            table.add_column("slowest", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        # What the other columns take at most: a label of 28, three times and a share of 7, a rank of 9, with padding.
        width = min(40, options.max_width - 68 - (11 if slowest else 0))
        if width >= 4:
            table.add_column("", no_wrap=True, width=width)
        for name, label, phase in _rows(self.breakdown):
            share = MISSING if phase is None else f"{number(100 * phase.share, '.1f')}%"
            drawn = "" if phase is None else bar(phase.share, width, ascii_only=options.ascii_only)
            within = phase.in_step if phase is not None else not name.endswith("_total")
            cells = [label, *_times(phase), *([slowest.get(name, MISSING)] if slowest else [])]
            cells += [share if within else f"({share})", drawn if within else ""]
            table.add_row(*map(Text, cells[: len(table.columns)]), style="" if within and phase is not None else "dim")
        table.add_section()
        total = f"{number(100 * self.breakdown.in_step_share, '.1f')}%"
        last = ["step", *_times(self.breakdown.step), *([""] if slowest else []), total, ""]
        table.add_row(*map(Text, last[: len(table.columns)]), style="bold")
        return table

    def _foot(self, times: str) -> list[tuple[str, str]]:
        breakdown = self.breakdown
        unit = "GPU" if self.device == "cuda" else "rank"
        whole = number(100 * breakdown.in_step_share, ".0f")
        shares = f"of the mean step; the phases add up to {whole}%, those in parentheses ran (partly) under others"
        steps = f"{plural(breakdown.steps_measured, 'step')} measured, {breakdown.steps_skipped} of warm-up left out"
        rate, total = number(breakdown.tokens_per_s_per_gpu, ",.0f"), number(breakdown.tokens_per_s, ",.0f")
        rows = [
            ("shares", f"{shares} and are not added"),
            ("step", f"{step_time(breakdown.step.mean_s)}; {steps}"),
            ("throughput", f"{rate} tokens/s per {unit}, {total} in all"),
            ("model FLOPs", f"{number(breakdown.model_tflops_per_gpu, '.3g')} TFLOP/s per {unit}, MFU {self._mfu}"),
        ]
        balance = [
            f"{_name(name)} {number(value, '.2f')}"
            for name, value in (breakdown.load_balance or {}).items()
            if value is not None
        ]
        if balance:
            rows.append(("load balance", f"{', '.join(balance)} (max / mean over ranks; 1.00 is perfect)"))
        memory = breakdown.peak_memory_bytes
        if memory is not None:
            spread = "" if memory.min == memory.max else f" (least {size(memory.min)}, mean {size(memory.mean)})"
            whole_process = ", Python and torch included" if self.device == "cpu" else ""
            rows.append(("peak memory", f"{size(memory.max)} on the fullest {unit}{spread}{whole_process}"))
        rows.append(
            ("batch", f"{batch_factors(breakdown.layout, times=times)}, recompute {breakdown.layout.recompute}")
        )
        return rows

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
