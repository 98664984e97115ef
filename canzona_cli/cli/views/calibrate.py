"""The screens of `canzona calibrate`: its progress, then the measured numbers with their spreads."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from canzona_cli.bench.calibrate.calibrate import Calibration
from canzona_cli.bench.calibrate.profile import Measurement, Quantity
from canzona_cli.cli.views.page import Page, Screen, Table, paragraph
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.reading import display_path
from canzona_cli.launch.view import TrainView
from canzona_cli.records.records import StageEvent
from canzona_cli.records.words import clean, milliseconds, plural, size

_FIRST_COLUMN = 31
"""The minimum width of the first column of every table, in characters."""
_SINGLE: Mapping[Quantity, str] = {
    "fp32_tflops": "fp32 matmuls, TFLOP/s",
    "tf32_tflops": "TF32 matmuls, TFLOP/s",
    "qr_tflops": "QR, TFLOP/s",
    "eigh_tflops": "eigendecomposition, TFLOP/s",
    "launch_us": "operation launch, us",
    "memory_gb_per_s": "memory bandwidth, GB/s",
    "adamw_ns": "AdamW per element, ns",
}
_IN_SECONDS: tuple[Quantity, ...] = ("updates", "collectives", "forward", "backward")
_Row = tuple[str, Measurement]
"""The name and unit of a quantity, and its measurement."""


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
    """The result of a calibration: tables of the measured numbers, and warnings."""

    calibration: Calibration
    config: RunConfig
    """The run that the calibration was made for."""
    written: Path | None
    """The file of the profile; None if nothing was measured."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        calibration = self.calibration
        if calibration.record.measurements:
            tables = [
                self._table("", self._rates()),
                self._table("update of a matrix, ms", self._updates()),
                self._table("collective, ms", self._collectives()),
                self._steps(),
            ]
            for table in tables:
                if table.row_count:
                    yield table
                    yield Text()
        if (rate := calibration.profile.checkpoint_gb_per_s) is not None:
            yield Text(f"checkpoints in {calibration.profile.measured_on['checkpoints_in']}: {rate:.2g} GB/s")
        yield Text(f"took {calibration.seconds:.0f} s, load average {calibration.load:.1f} at the start")
        for skipped in calibration.record.skipped:
            yield paragraph(skipped, first="not measured, left to the cost model: ", rest="  ")
        for warning in calibration.warnings:
            yield paragraph(warning, "yellow", first="warning: ", rest="  ")
        outcome = calibration.outcome
        if outcome.status == "interrupted":
            numbers = "nothing was measured yet" if self.written is None else "the numbers measured so far are kept"
            yield paragraph(f"interrupted: {numbers}", "bold yellow")
        elif outcome.failed:
            yield paragraph(f"failed: {outcome.message}", "bold red")
            if outcome.log is not None:
                yield paragraph(f"full output: {outcome.log}")
        if self.written is not None:
            shown_path = display_path(self.written)
            command = f"use it: canzona plan recipe={self.config.name} gpus={self.config.gpus} cluster={shown_path}"
            yield paragraph(f"written: {shown_path}", "bold")
            yield replace(paragraph(command), unbroken=True)

    def _table(self, title: str, rows: Iterable[_Row]) -> Table:
        """Returns a table of measurements and their spreads."""
        table = Table()
        table.add_column(title, min_width=_FIRST_COLUMN, overflow="fold")
        table.add_numbers("measured", "spread")
        for name, measurement in rows:
            median = measurement.spread.median
            measured = milliseconds(median) if measurement.quantity in _IN_SECONDS else f"{median:.3g}"
            table.add_row(name, measured, f"{measurement.spread.relative:.0%}")
        return table

    def _rates(self) -> Iterator[_Row]:
        measurements = self.calibration.record.measurements
        for measurement in measurements:
            if measurement.quantity == "matmul_tflops":
                yield f"bf16 matmuls of {int(measurement.key[0])}, TFLOP/s", measurement
            elif measurement.quantity in _SINGLE:
                yield _SINGLE[measurement.quantity], measurement
        for measurement in measurements:
            if measurement.quantity in ("forward", "backward"):
                yield f"{measurement.quantity} of {plural(int(measurement.key[0]), 'sequence')}, ms", measurement

    def _updates(self) -> Iterator[_Row]:
        for measurement in self._measurements_of("updates"):
            name, rows, columns = measurement.key
            yield f"{name} {rows}x{columns}", measurement

    def _collectives(self) -> Iterator[_Row]:
        measurements = self._measurements_of("collectives")
        for measurement in measurements:
            kind, ranks, bytes_ = str(measurement.key[0]), int(measurement.key[1]), int(measurement.key[2])
            largest = max(int(other.key[2]) for other in measurements if other.key[:2] == measurement.key[:2])
            if bytes_ in (8, 1 << 20, largest):  # three sizes of each collective; the profile has all
                yield f"{kind} among {ranks}, {size(bytes_)}", measurement

    def _steps(self) -> Table:
        table = Table()
        table.add_column("phase, from full steps", min_width=_FIRST_COLUMN)
        table.add_numbers("factor")
        for name, factor in self.calibration.profile.step_factors.items():
            table.add_row(name, f"{factor:.3g}")
        return table

    def _measurements_of(self, quantity: Quantity) -> list[Measurement]:
        chosen = (each for each in self.calibration.record.measurements if each.quantity == quantity)
        return sorted(chosen, key=lambda measurement: (str(measurement.key[0]), measurement.key[1:]))
