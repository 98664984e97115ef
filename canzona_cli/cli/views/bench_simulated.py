"""The screen of `canzona bench --simulate`: model sizes on several numbers of GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.simulated import YARDSTICKS, SimulatedCell, Simulation
from canzona_cli.cli.views.curves import Curve, Curves, side_by_side
from canzona_cli.cli.views.header import rank_word
from canzona_cli.cli.views.markup import Html
from canzona_cli.cli.views.page import Page, Screen, items, paragraph, section_head
from canzona_cli.cli.views.tables import Columns, GroupedTable
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.simulate.compare import Study
from canzona_cli.core.simulate.search import LayoutResult
from canzona_cli.records.words import MISSING, layout_code, milliseconds, number, predicted_overhead

_MATRIX_STRATEGIES = tuple(name for name in STRATEGIES if name != "adamw")
_COMPARED = tuple(name for name in _MATRIX_STRATEGIES if name != "canzona")


@dataclass(frozen=True)
class SimulationView(Page):
    """The simulation of several model sizes: a table for each size, with a row for each number of GPUs."""

    simulation: Simulation

    widest = 150

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        simulation = self.simulation
        unit = f"{rank_word(simulation.device)}s"
        trust = "(calibrated)" if simulation.calibrated else "(hand-written, not calibrated)"
        low, high = min(simulation.gpus), max(simulation.gpus)
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        scope = f"{simulation.optimizer} on {span} {unit}, profile {simulation.profile} {trust}"
        yield section_head("Simulated", f", not measured: {scope}")
        if simulation.overrides:
            yield paragraph(" ".join(simulation.overrides), "dim")
        for recipe in simulation.recipes:
            yield Text()
            yield paragraph(recipe, "bold")
            if screen.page:
                yield _scaling_charts(self.simulation.cells_of(recipe))
            yield from self._size(recipe)
        yield Text()
        for text in self._legend():
            yield paragraph(text, "dim")
        if screen.page:
            yield from items("Assumptions", simulation.assumptions, "dim")
        else:
            assumptions = f"{len(simulation.assumptions)} assumptions"
            yield paragraph(f"The times are simulated under {assumptions}; --html and --json list them.", "dim")

    def _size(self, recipe: str) -> Iterator[RenderableType]:
        cells = self.simulation.cells_of(recipe)
        groups = [
            _layout_column(cells),
            *_step_columns(cells),
            _strategy_columns(
                cells,
                "overhead over AdamW",
                _MATRIX_STRATEGIES,
                lambda study, name: predicted_overhead(study.overhead(name)),
            ),
            _strategy_columns(cells, "optimizer / canzona's", _COMPARED, _ratio_to_canzona),
            _strategy_columns(
                cells,
                "load balance",
                _MATRIX_STRATEGIES,
                lambda study, name: f"{study.result(name).update_balance:.2f}",
            ),
            _yardstick_columns(cells, "fastest layout", lambda best, _: layout_code(best.layout)),
            _yardstick_columns(cells, "its iteration, ms", lambda best, _: milliseconds(best.iteration_s)),
            _yardstick_columns(cells, "canzona's overhead", lambda _, increase: predicted_overhead(increase)),
        ]
        yield GroupedTable(head="GPUs", labels=[f"{cell.gpus:,}" for cell in cells], groups=groups)
        for cell in cells:
            if cell.reason:
                yield paragraph(f"{cell.gpus:,}: no layout: {cell.reason}", "yellow", first="  ", rest="    ")

    def _legend(self) -> Iterator[str]:
        yield (
            "The layout is the one `canzona train` would choose for that many GPUs; all strategies use the same one. "
            "The last columns compare canzona, per sequence, with AdamW and layerwise in their own fastest layouts; "
            "-: does not fit. optimizer step: from reduced gradients to the next forward pass, excluding the part that "
            "overlaps other work."
        )
        studies = [cell.study for cell in self.simulation.cells if cell.study is not None]
        if any(not strategy.fits for study in studies for strategy in study.strategies.values()):
            yield "! does not fit in memory in that layout: simulated as if it did, and excluded from comparisons"
        if self.simulation.optimizer != "muon":
            method = f"the same method with {self.simulation.optimizer}"
            yield f"layerwise: Megatron supports it only for muon; the times are those of {method}"


def _layout_column(cells: Sequence[SimulatedCell]) -> Columns:
    rows = [(MISSING if cell.study is None else layout_code(cell.study.layout),) for cell in cells]
    return Columns("layout", ("",), rows)


def _strategy_columns(
    cells: Sequence[SimulatedCell], title: str, names: Sequence[str], show: Callable[[Study, str], str]
) -> Columns:
    rows = [() if cell.study is None else tuple(show(cell.study, name) for name in names) for cell in cells]
    return Columns(title, names, rows)


def _yardstick_columns(
    cells: Sequence[SimulatedCell], title: str, show: Callable[[LayoutResult, float | None], str]
) -> Columns:
    """Returns a column for each strategy that is also simulated in its own fastest layout.

    Args:
        show: formats a cell, given the fastest layout and canzona's overhead over it.
    """
    rows = [
        tuple(MISSING if best is None else show(best, cell.overhead(name)) for name, best in cell.yardsticks.items())
        for cell in cells
    ]
    return Columns(title, YARDSTICKS, rows)


def _step_columns(cells: Sequence[SimulatedCell]) -> Iterator[Columns]:
    """Yields the iteration times in ms, marked `!` if the strategy does not fit, and the optimizer step times
    in ms."""

    def iteration(study: Study, name: str) -> str:
        return milliseconds(study.result(name).iteration_s) + (" " if study.strategies[name].fits else "!")

    yield _strategy_columns(cells, "iteration, ms", STRATEGIES, iteration)
    yield _strategy_columns(
        cells, "optimizer step, ms", STRATEGIES, lambda study, name: milliseconds(study.result(name).optimizer_s)
    )


def _ratio_to_canzona(study: Study, name: str) -> str:
    ratio = study.optimizer_speedup(name)
    if ratio is None:
        return MISSING
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x"


def _scaling_charts(cells: Sequence[SimulatedCell]) -> Html:
    """Returns charts with the number of GPUs as the x axis and a curve for each strategy. Only HTML pages
    show them."""
    studies = {cell.gpus: cell.study for cell in cells if cell.study is not None}

    def chart(
        title: str, value: Callable[[Study, str], float | None], *names: str, axes: Literal["log x", "log"] = "log"
    ) -> Curves:
        curves = [
            Curve(
                name=name,
                points=[(gpus, y) for gpus, study in studies.items() if (y := value(study, name)) is not None],
                dots=True,
                hollow=[gpus for gpus, study in studies.items() if not study.strategies[name].fits],
            )
            for name in names
        ]
        return Curves(title=title, curves=curves, height=160, axes=axes, x="GPUs", show=_axis_number)

    return side_by_side(
        chart("iteration, s (hollow: does not fit)", lambda study, name: study.result(name).iteration_s, *STRATEGIES),
        chart("optimizer step, ms", lambda study, name: 1e3 * study.result(name).optimizer_s, *STRATEGIES),
        chart("iteration / AdamW's", _ratio_to_adamw, *_MATRIX_STRATEGIES, axes="log x"),
    )


def _axis_number(value: float) -> str:
    return number(value, ",.0f" if value >= 100 else ".3g")


def _ratio_to_adamw(study: Study, name: str) -> float | None:
    increase = study.overhead(name)
    return None if increase is None else 1 + increase
