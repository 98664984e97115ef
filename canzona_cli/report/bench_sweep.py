"""The screen of `canzona bench --sweep`: measured and predicted results for several values of a setting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.options import SweepKind
from canzona_cli.bench.results import BenchResult, Measured, Predicted
from canzona_cli.config.schema import Layout
from canzona_cli.report.bench import (
    cells_with_error,
    error_text,
    heading,
    mib_text,
    quartiles,
    ratio_text,
    shown_groups,
    shown_strategies,
    speedup_text,
    steps,
    verdict_remarks,
)
from canzona_cli.report.curves import Curve, Curves, side_by_side
from canzona_cli.report.page import Page, Screen, items, note, paragraph
from canzona_cli.report.tables import Cell, Columns, GroupedTable
from canzona_cli.run.statistics import Speedup
from canzona_cli.run.words import layout_code, milliseconds, number

TITLES: Mapping[SweepKind, str] = {
    "alpha": "Balance communication (0) or compute (1) across data-parallel ranks",
    "c_max": "Largest fused exchange of a rank, MiB",
    "gpus": "The same job on more ranks",
    "optimizer": "Optimizers",
}
HEADS: Mapping[SweepKind, str] = {"alpha": "alpha", "c_max": "C_max", "gpus": "ranks", "optimizer": "optimizer"}
_ALL = ("measured", "plan", "error")
_Pair = tuple[float | None, float | None]
"""A measured value and its prediction."""


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One strategy at one value of the setting."""

    value: str
    strategy: str
    result: BenchResult
    fewest: BenchResult
    """The result with the fewest ranks among those with this strategy."""
    begins: bool
    """True for the first row of a value."""

    @property
    def measured(self) -> Measured:
        return self.result.strategies[self.strategy].measured

    @property
    def predicted(self) -> Predicted:
        return self.result.strategies[self.strategy].predicted


def sweep_rows(results: Mapping[str, BenchResult]) -> list[SweepRow]:
    """Returns a row for each value and strategy."""
    ascending = sorted(results.values(), key=lambda result: result.layout.world_size)
    rows = []
    for value, result in results.items():
        for index, strategy in enumerate(shown_strategies(result)):
            fewest = next(other for other in ascending if strategy in other.strategies)
            rows.append(SweepRow(value=value, strategy=strategy, result=result, fewest=fewest, begins=index == 0))
    return rows


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    """A quantity that is both measured and predicted: two columns of the table, and two curves of the HTML
    page."""

    title: str
    pair: Callable[[SweepRow], _Pair]
    show: Callable[[float | None], str] = milliseconds
    unit: float = 1e-3
    """The value of `pair` that the curves show as 1; with 1e-3, they show seconds as milliseconds."""

    def columns(self, rows: Sequence[SweepRow]) -> Columns:
        """Returns the two columns of the quantity: measured and predicted."""
        return Columns(self.title, ("measured", "plan"), [tuple(map(self.show, self.pair(row))) for row in rows])

    def chart(self, rows: Sequence[SweepRow], kind: SweepKind) -> Curves:
        """Draws a measured and a predicted curve for each strategy."""
        curves = []
        for name in dict.fromkeys(row.strategy for row in rows):
            triples = [(float(row.value), *self.pair(row)) for row in rows if row.strategy == name]
            shown = [(value, measured, plan or 0.0) for value, measured, plan in triples if measured is not None]
            measured_points = [(value, measured / self.unit) for value, measured, _ in shown]
            predicted_points = [(value, predicted / self.unit) for value, _, predicted in shown]
            curves.append(Curve(name=name, points=measured_points, dots=True))
            if rows[0].result.planned:
                curves.append(Curve(name=f"{name}, predicted", points=predicted_points, dots=True, dashed=True))
        axes: Literal["linear", "log x"] = "log x" if kind in ("c_max", "gpus") else "linear"
        return Curves(title=self.title, curves=curves, height=160, axes=axes, x=HEADS[kind])


def _phase(title: str, name: str) -> _Quantity:
    """Returns a quantity that shows the seconds of a phase."""
    return _Quantity(title=title, pair=lambda row: (row.measured.means.get(name), row.predicted.phases.get(name)))


def _optimizer(row: SweepRow) -> _Pair:
    return median(row.measured.optimizer_s), row.predicted.optimizer_s


def _iteration(row: SweepRow) -> _Pair:
    return median(row.measured.iteration_s), row.predicted.iteration_s


def _balance(row: SweepRow) -> _Pair:
    return row.measured.load_balance, row.predicted.load_balance


def _efficiency(row: SweepRow) -> _Pair:
    """Returns the throughput per rank, relative to the same strategy on the fewest ranks."""
    fewest = replace(row, result=row.fewest)
    work = _sequences(row.result.layout) / _sequences(row.fewest.layout)
    measured = median(fewest.measured.iteration_s) / median(row.measured.iteration_s)
    return work * measured, work * fewest.predicted.iteration_s / row.predicted.iteration_s


def _sequences(layout: Layout) -> float:
    """Returns the sequences per rank in an iteration."""
    return layout.global_batch_size / layout.world_size


_STEP = _Quantity(title="optimizer step, ms", pair=_optimizer)
_ITERATION = _Quantity(title="iteration, ms", pair=_iteration)
_BALANCE = _Quantity(title="load balance", pair=_balance, show=ratio_text, unit=1.0)
_EXCHANGE = _phase("exposed exchange, ms", "exchange")
_EFFICIENCY = _Quantity(title="efficiency, %", pair=_efficiency, show=partial(number, spec=".0%"), unit=0.01)
_SUBJECTS: Mapping[SweepKind, _Quantity] = {"alpha": _BALANCE, "c_max": _EXCHANGE, "gpus": _EFFICIENCY}
"""The quantity that each numeric setting is meant to change."""


@dataclass(frozen=True)
class SweepView(Page):
    """The results of a sweep: a table with a row for each value or, with several strategies, for each value
    and strategy."""

    kind: SweepKind
    results: Mapping[str, BenchResult]
    """The result for each value, by the text of the value, in the order of the values."""

    widest = 130

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        yield from heading(self._common_result, f"Sweep of {HEADS[self.kind]}", without=self.kind)
        yield Text()
        yield paragraph(TITLES[self.kind], "bold")
        rows, several = sweep_rows(self.results), self._has_several_strategies
        if screen.page:
            yield self._picture(rows)
        groups = shown_groups(rows[0].result, self._groups(rows))
        width = max(len(row.value) for row in rows)
        labels = [f"{row.value * row.begins:<{width}} {row.strategy}" if several else row.value for row in rows]
        yield GroupedTable(
            head=HEADS[self.kind] + ", strategy" * several,
            labels=labels,
            groups=groups,
            sections=[index for index, row in enumerate(rows) if several and index and row.begins],
        )
        yield from map(note, self._remarks(groups))
        shared = set.intersection(*(set(result.notes) for result in self.results.values()))
        notes = dict.fromkeys(
            text if text in shared else f"{value}: {text}"
            for value, result in self.results.items()
            for text in result.notes
        )
        yield from items("Notes", notes)

    def _picture(self, rows: Sequence[SweepRow]) -> RenderableType:
        """Draws curves if the values are numbers; otherwise draws a bar for each value and strategy."""
        numeric_rows = [row for row in rows if row.value.replace(".", "", 1).isdecimal()]  # not `auto`
        if not numeric_rows:
            labelled_benches = ((f"{row.value} {row.strategy}", row.result.strategies[row.strategy]) for row in rows)
            return steps(labelled_benches, planned=rows[0].result.planned)
        quantities = (_STEP, _ITERATION, _SUBJECTS[self.kind])
        return side_by_side(*(quantity.chart(numeric_rows, self.kind) for quantity in quantities))

    @property
    def _common_result(self) -> BenchResult:
        """The first result, with only the overrides and machine facts that all results share."""
        first, *others = self.results.values()
        return replace(
            first,
            overrides=tuple(text for text in first.overrides if all(text in other.overrides for other in others)),
            machine={
                key: value
                for key, value in first.machine.items()
                if all(other.machine.get(key) == value for other in others)
            },
        )

    @property
    def _has_several_strategies(self) -> bool:
        return any(len(result.strategies) > 1 for result in self.results.values())

    def _groups(self, rows: list[SweepRow]) -> list[Columns]:
        """Returns the columns for step times and for the quantities that this setting affects."""

        def group(title: str, cells: Callable[[SweepRow], tuple[Cell, ...]], *heads: str) -> Columns:
            return Columns(title, heads, list(map(cells, rows)))

        steps = [_time_cells(row.measured.optimizer_s, row.predicted.optimizer_s) for row in rows]
        iterations = [_time_cells(row.measured.iteration_s, row.predicted.iteration_s) for row in rows]
        times = [Columns(_STEP.title, _ALL, steps), Columns(_ITERATION.title, _ALL, iterations)]
        balance = _BALANCE.columns(rows)
        if self.kind == "alpha":
            reduced = _phase("total reduction, ms", "grad_reduce_total").columns(rows)
            return [balance, *times, reduced, _phase("total gathering, ms", "param_gather_total").columns(rows)]
        if self.kind == "c_max":
            amounts = [(max(row.measured.tensor_bytes), row.predicted.tensor_bytes) for row in rows]
            memory = Columns("fullest rank, MiB", _ALL, [cells_with_error(*pair, mib_text) for pair in amounts])
            exchanged = (_EXCHANGE.columns(rows), _phase("total exchange, ms", "exchange_total").columns(rows))
            return [*times, *exchanged, memory]
        if self.kind == "gpus":
            layouts = group("layout", lambda row: (layout_code(row.result.layout),), "")
            work = group("CPU time, s", lambda row: (number(median(row.measured.processor_s), ".3g"),), "measured")
            return [layouts, *times, _EFFICIENCY.columns(rows), work, balance]
        if not self._has_several_strategies:
            return times
        return [
            *times,
            group("optimizer ratio", lambda row: _speedup_cells(row, row.result.optimizer_speedup), "measured"),
            group("iteration ratio", lambda row: _speedup_cells(row, row.result.iteration_speedup), "measured"),
        ]

    def _remarks(self, groups: Sequence[Columns]) -> Iterator[str]:
        first_result = next(iter(self.results.values()))
        plan = "; plan: predicted; error: predicted / measured - 1" if first_result.planned else ""
        yield f"measured: median [quartiles] of the rounds{plan}"
        if self.kind == "optimizer" and self._has_several_strategies:
            yield from verdict_remarks(groups, first_result.rounds)
            references = ", ".join(dict.fromkeys(result.reference for result in self.results.values()))
            yield f"ratio: time divided by {references}'s time, median [quartiles] of the ratio in each round"
        if self.kind == "gpus":
            yield "efficiency: sequences per second per rank, relative to the run on the fewest ranks"
            cores = first_result.machine.get("cores")
            ranks = max(result.layout.world_size for result in self.results.values())
            on_cpu = any(result.device == "cpu" for result in self.results.values())
            if on_cpu and isinstance(cores, int) and ranks > cores:
                yield (
                    f"up to {ranks} ranks share {cores} cores here, so efficiency shows the cost of sharing, not how "
                    "the job scales to more hardware; CPU time is summed over all ranks"
                )


def _time_cells(measured: Sequence[float], plan: float) -> tuple[Cell, ...]:
    return quartiles(measured), milliseconds(plan), error_text(median(measured), plan)


def _speedup_cells(row: SweepRow, speedup: Callable[[str], Speedup]) -> tuple[Cell, ...]:
    return ("1" if row.strategy == row.result.reference else speedup_text(speedup(row.strategy)),)
