"""The screens of `canzona calibrate`: its progress, then each measured number with its spread, compared with
the base profile's number."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from canzona_cli.calibrate.calibrate import Calibration
from canzona_cli.calibrate.profile import Measurement, Quantity, measured_runs
from canzona_cli.config.recipes import display_path
from canzona_cli.config.schema import ClusterConfig, RunConfig
from canzona_cli.costs.links import Group, Links
from canzona_cli.costs.update import Implementation, adamw_seconds, algorithm_of, label, matmul_rate, seconds
from canzona_cli.launch.view import TrainView
from canzona_cli.report.page import Page, Screen, paragraph
from canzona_cli.report.tables import Table
from canzona_cli.run.records import StageEvent
from canzona_cli.run.words import MISSING, clean, milliseconds, plural, size

_NAME, _BEFORE = 31, 9
"""The widths in characters of the first column of every table, and of the longest heading of a last
column."""
_SINGLE: Mapping[Quantity, tuple[str, str]] = {
    "fp32_tflops": ("fp32 matmuls", "TFLOP/s"),
    "tf32_tflops": ("TF32 matmuls", "TFLOP/s"),
    "qr_tflops": ("QR", "TFLOP/s"),
    "eigh_tflops": ("eigendecomposition", "TFLOP/s"),
    "launch_us": ("operation launch", "us"),
    "memory_gb_per_s": ("memory bandwidth", "GB/s"),
    "adamw_ns": ("AdamW per element", "ns"),
}


class Progress(TrainView):
    """A view that prints a line when a measurement starts. `CalibrationView` shows the results."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()

    def stage(self, event: StageEvent) -> None:
        stage = clean(event.stage)
        text = stage if stage == "start workers" else f"measure {stage}"
        self._console.print(Text(f"{time.monotonic() - self._started:5.0f} s  {text}", style="dim"))


@dataclass(frozen=True, kw_only=True)
class CalibrationView(Page):
    """The result of a calibration: tables that compare the measured numbers with those of the base profile,
    and warnings."""

    calibration: Calibration
    config: RunConfig
    """The run that the calibration was made for; its cluster is the base profile."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        calibration = self.calibration
        if calibration.record.measurements:
            for table in (self._rates(), self._updates(), self._collectives(), self._steps()):
                if table.row_count:
                    yield table
                    yield Text()
        yield Text(f"took {calibration.seconds:.0f} s, load average {calibration.load:.1f} at the start")
        for skipped in calibration.record.skipped:
            yield paragraph(clean(skipped), first="not measured, left to the cost model: ", rest="  ")
        for warning in calibration.warnings:
            yield paragraph(clean(warning), "yellow", first="warning: ", rest="  ")

    def _rates(self) -> Table:
        base, table = self.calibration.base, self._empty_table("")
        for measurement in self.calibration.record.measurements:
            if measurement.quantity == "matmul_tflops":
                base_value = matmul_rate(base, int(measurement.key[0]), "bf16") / 1e12
                _add(
                    table,
                    f"bf16 matmuls of {measurement.key[0]}, TFLOP/s",
                    f"{measurement.spread.median:.3g}",
                    measurement,
                    f"{base_value:.3g}",
                )
            elif measurement.quantity in _SINGLE:
                name, unit = _SINGLE[measurement.quantity]
                _add(
                    table,
                    f"{name}, {unit}",
                    f"{measurement.spread.median:.3g}",
                    measurement,
                    _base_value(measurement.quantity, base),
                )
        for measurement in self.calibration.record.measurements:
            if measurement.quantity in ("forward", "backward"):
                label = f"{measurement.quantity} of {plural(int(measurement.key[0]), 'sequence')}, ms"
                _add(table, label, milliseconds(measurement.spread.median), measurement, MISSING)
        return table

    def _updates(self) -> Table:
        table = self._empty_table("update of a matrix, ms")
        algorithms = {label(update): update for update in map(algorithm_of, measured_runs(self.config))}
        for measurement in self._measurements_of("updates"):
            name, rows, columns = str(measurement.key[0]), int(measurement.key[1]), int(measurement.key[2])
            update = algorithms.get(name.removeprefix("megatron/"))
            code: Implementation = "megatron" if name.startswith("megatron/") else "canzona"
            base_value = None if update is None else seconds(update, rows, columns, self.config.cluster, code)
            _add(
                table,
                f"{name} {rows}x{columns}",
                milliseconds(measurement.spread.median),
                measurement,
                milliseconds(base_value),
            )
        return table

    def _collectives(self) -> Table:
        rows, table = self._measurements_of("collectives"), self._empty_table("collective, ms")
        links = Links(cluster=replace(self.calibration.base, collectives=()))
        for measurement in rows:
            kind, ranks, bytes_ = str(measurement.key[0]), int(measurement.key[1]), int(measurement.key[2])
            largest = max(int(other.key[2]) for other in rows if other.key[:2] == measurement.key[:2])
            if bytes_ not in (8, 1 << 20, largest):
                continue  # the table shows three sizes of each collective; the profile has all
            base_value = milliseconds(_link_seconds(links, kind, ranks, bytes_))
            _add(
                table,
                f"{kind} among {ranks}, {size(bytes_)}",
                milliseconds(measurement.spread.median),
                measurement,
                base_value,
            )
        return table

    def _steps(self) -> Table:
        profile = self.calibration.profile
        table = Table()
        table.add_column("phase, from full steps", min_width=_NAME)
        table.add_numbers("factor")
        for name, factor in profile.step_factors.items():
            table.add_row(name, f"{factor:.3g}")
        return table

    def _empty_table(self, title: str) -> Table:
        """Returns an empty table with columns for the measurement, its spread and the base profile's
        number."""
        table = Table()
        table.add_column(title, min_width=_NAME, overflow="fold")
        base = self.calibration.base.name
        table.add_numbers("measured", "spread", base if len(base) < _BEFORE else f"{base[: _BEFORE - 3]}..")
        return table

    def _measurements_of(self, quantity: Quantity) -> list[Measurement]:
        rows = [measurement for measurement in self.calibration.record.measurements if measurement.quantity == quantity]
        return sorted(rows, key=lambda measurement: (str(measurement.key[0]), measurement.key[1:]))


def closing_lines(calibration: Calibration, config: RunConfig, written: Path | None) -> Iterator[Text]:
    """Yields lines about the end of the calibration: its outcome, the path of the profile, and a command that
    uses it.

    The lines are meant to be printed unwrapped, so that they can be copied.
    """
    if calibration.outcome.status == "interrupted":
        outcome = "the numbers measured so far are kept" if written is not None else "nothing was measured yet"
        yield Text(f"interrupted: {outcome}", style="bold yellow")
    elif calibration.outcome.failed:
        yield Text(f"failed: {clean(calibration.outcome.message)}", style="bold red")
        if calibration.outcome.log is not None:
            yield Text(f"full output: {calibration.outcome.log}")
    if written is not None:
        where = display_path(written)
        yield Text(f"written: {where}", style="bold")
        yield Text(f"use it: canzona plan recipe={config.name} gpus={config.gpus} cluster={where}")


def _base_value(quantity: Quantity, base: ClusterConfig) -> str:
    if quantity == "adamw_ns":
        return f"{1e9 * adamw_seconds(1e6, base) / 1e6:.3g}"
    value = getattr(base, quantity)
    return MISSING if value is None else f"{value:.3g}"


def _link_seconds(links: Links, kind: str, ranks: int, bytes_: int) -> float | None:
    """Returns the seconds that a collective should take according to the latency and the bandwidth of the
    links."""
    group = Group(size=ranks, per_machine=ranks)
    if kind == "all_reduce":
        return links.all_reduce(bytes_, group).seconds
    if kind in ("all_gather", "reduce_scatter"):
        return links.all_gather(bytes_, group).seconds
    if kind == "all_to_all":
        return links.all_to_all([bytes_] * ranks, [bytes_] * ranks, group).seconds
    if kind == "send":
        return links.point_to_point(bytes_, crosses=False).seconds
    return links.ring_pass(bytes_, group).seconds


def _add(table: Table, name: str, value: str, measurement: Measurement, base_value: str) -> None:
    table.add_row(clean(name), value, f"{measurement.spread.relative:.0%}", base_value)
