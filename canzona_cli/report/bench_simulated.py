"""What `canzona bench --simulate` shows: step times of every size over numbers of GPUs, computed, not measured."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.bench.simulated import SimulatedCell, SimulatedStrategy, Simulation
from canzona_cli.report.bench_plot import plain
from canzona_cli.report.columns import Group, tables
from canzona_cli.report.png import save
from canzona_cli.report.text import wrapped
from canzona_cli.run.phases import STRATEGIES, STRATEGY_COLOURS
from canzona_cli.run.words import MISSING, clean, layout_code, milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDEST = 150
_MATRIX = tuple(name for name in STRATEGIES if name != "adamw")
_OTHERS = tuple(name for name in _MATRIX if name != "canzona")


@dataclass(frozen=True)
class SimulationView:
    """A rich renderable, from 60 columns on."""

    simulation: Simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(max_width=min(options.max_width, _WIDEST))
        simulation = self.simulation
        unit = "GPUs" if simulation.device == "cuda" else "CPU ranks"
        title = Text.assemble(
            ("Simulated", "bold"),
            f", not measured: {clean(simulation.optimizer)} on {min(simulation.gpus):,} to {max(simulation.gpus):,} "
            f"{unit}, profile {clean(simulation.profile)} ",
            "(calibrated)" if simulation.calibrated else "(by hand, not calibrated)",
        )
        yield from wrapped(title, console, options)
        if simulation.overrides:
            yield from wrapped(Text(" ".join(map(clean, simulation.overrides)), style="dim"), console, options)
        for recipe in simulation.recipes:
            yield Text()
            yield from self._size(recipe, console, options)
        yield Text()
        yield from self._legend(console, options)
        yield Text()
        yield Text("Assumptions", style="bold")
        for line in simulation.assumptions:
            yield from wrapped(Text(line, style="dim"), console, options, first="  - ", rest="    ")

    def _size(self, recipe: str, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        cells = self.simulation.of(recipe)
        yield Text(clean(recipe), style="bold")
        groups = [
            Group(title="layout", heads=("",), rows=tuple((_layout(cell),) for cell in cells)),
            _group(cells, "iteration, ms", STRATEGIES, _iteration),
            _group(cells, "optimizer step, ms", STRATEGIES, lambda found: milliseconds(found.optimizer_s)),
            _group(cells, "exposed, ms", ("canzona", "asc"), lambda found: milliseconds(found.optimizer_exposed_s)),
            _group(cells, "iteration above AdamW's", _MATRIX, lambda f: f"{100 * f.overhead_over_adamw:+.1f}%"),
            Group(
                title="optimizer, times canzona's",
                heads=_OTHERS,
                rows=tuple(tuple(_times(cell.ratio(name)) for name in _OTHERS if cell.strategies) for cell in cells),
            ),
            _group(cells, "load balance", _MATRIX, lambda found: f"{found.load_balance:.2f}"),
        ]
        yield from tables([f"{cell.gpus:,}" for cell in cells], groups, options, head="GPUs")
        for cell in cells:
            if cell.reason:
                said = Text(f"{cell.gpus:,}: no layout: {clean(cell.reason)}", style="yellow")
                yield from wrapped(said, console, options, first="  ", rest="    ")

    def _legend(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        notes = [
            "The layout is the one `canzona train` would choose for that many GPUs; all strategies have the same. "
            "optimizer step: from reduced gradients to the next forward, the exchange as if hidden under nothing; "
            "exposed: what the iteration waits for of it (nothing of the others' step is hidden).",
        ]
        if any(not found.fits for cell in self.simulation.cells for found in cell.strategies.values()):
            notes.append("! does not fit into memory on that layout, timed as if it did")
        if self.simulation.optimizer != "muon":
            notes.append(
                f"layerwise: Megatron has it for muon alone; this is what its way of working would take with "
                f"{clean(self.simulation.optimizer)}"
            )
        for note in notes:
            yield from wrapped(Text(note, style="dim"), console, options)


def _group(
    cells: Sequence[SimulatedCell], title: str, names: Sequence[str], show: Callable[[SimulatedStrategy], str]
) -> Group:
    rows = (tuple(show(cell.strategies[name]) for name in names if cell.strategies) for cell in cells)
    return Group(title=title, heads=tuple(names), rows=tuple(rows))


def _iteration(found: SimulatedStrategy) -> str:
    return milliseconds(found.iteration_s) + (" " if found.fits else "!")


def _times(ratio: float | None) -> str:
    if ratio is None:
        return MISSING
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x"


def _layout(cell: SimulatedCell) -> str:
    return MISSING if cell.layout is None else layout_code(cell.layout)


def draw(simulation: Simulation, path: Path) -> None:
    """Write the curves: iteration, optimizer step and overhead over AdamW, a row of panels for each size.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    from matplotlib.figure import Figure

    recipes = simulation.recipes
    figure = Figure(figsize=(15, 1.2 + 3.4 * len(recipes)), dpi=100, layout="constrained")
    trust = "calibrated" if simulation.calibrated else "by hand, not calibrated"
    figure.suptitle(
        f"Simulated, not measured: {clean(simulation.optimizer)} on {clean(simulation.profile)} ({trust})", fontsize=14
    )
    panels = figure.subplots(len(recipes), 3, squeeze=False)
    for row, recipe in zip(panels, recipes, strict=True):
        cells = [cell for cell in simulation.of(recipe) if cell.strategies]
        _curves(row[0], cells, STRATEGIES, f"{clean(recipe)}: iteration, s", lambda found: found.iteration_s)
        _curves(row[1], cells, STRATEGIES, "optimizer step, ms", lambda found: 1e3 * found.optimizer_s)
        _curves(row[2], cells, _MATRIX, "overhead over AdamW, %", lambda found: 100 * found.overhead_over_adamw)
        for axes in row:
            _gpus(axes, simulation.gpus)
            for cell in simulation.of(recipe):
                if not cell.strategies:
                    place = (math.log2(cell.gpus), 0.03)
                    axes.annotate(
                        "no layout",
                        place,
                        xycoords=("data", "axes fraction"),
                        rotation=90,
                        ha="center",
                        fontsize=8,
                        color="grey",
                    )
    panels[0][0].legend(fontsize=8.5, frameon=False)
    panels[-1][0].set_xlabel("GPUs (hollow: does not fit into memory)", fontsize=9)
    save(figure, path)


def _curves(
    axes: "Axes",
    cells: Sequence[SimulatedCell],
    names: Sequence[str],
    title: str,
    value: Callable[[SimulatedStrategy], float],
) -> None:
    for name in names:
        x = [math.log2(cell.gpus) for cell in cells]
        y = [value(cell.strategies[name]) for cell in cells]
        colour = STRATEGY_COLOURS[name]
        axes.plot(x, y, color=colour, lw=1.6, label=name)
        for fits in (True, False):
            here = [n for n, cell in enumerate(cells) if cell.strategies[name].fits == fits]
            face = colour if fits else "white"
            axes.plot([x[n] for n in here], [y[n] for n in here], "o", color=colour, mfc=face, ms=4.5)
    # A strategy may cost nothing over AdamW, or less.
    least = min((value(cell.strategies[name]) for cell in cells for name in names), default=1.0)
    axes.set_yscale("log" if least > 0 else "symlog")
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis="y", alpha=0.25)


def _gpus(axes: "Axes", gpus: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xticks([math.log2(count) for count in gpus], [f"{count:,}" for count in gpus])
    axes.set_xlim(math.log2(min(gpus)) - 0.3, math.log2(max(gpus)) + 0.3)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    plain(axes)
