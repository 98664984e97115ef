"""The screens of `canzona bench --sweep` and `--simulate`: a setting at several values,
sizes over numbers of GPUs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.options import AFFECTED, SweepKind
from canzona_cli.bench.results import BenchResult, Measured, Predicted
from canzona_cli.bench.simulated import YARDSTICKS, SimulatedCell, Simulation
from canzona_cli.cluster.search import Tried
from canzona_cli.report.bench import (
    NOT_DISTINCT,
    OVERLAP,
    error_text,
    heading,
    mib,
    order,
    quartiles,
    ratio,
    times,
    with_error,
)
from canzona_cli.report.page import Page, Screen, headed, items, note, wrapped
from canzona_cli.report.tables import Cell, Columns, GroupedTable
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Quartiles, Speedup
from canzona_cli.run.words import MISSING, clean, layout_code, milliseconds, number, overhead
from canzona_cli.simulate.compare import Study

TITLES: Mapping[SweepKind, str] = {
    "alpha": "Balance communication (0) or compute (1) over data-parallel ranks",
    "c_max": "Largest fused exchange of one rank, MiB",
    "gpus": "The same job on more ranks",
    "optimizer": "Optimizers",
}
HEADS: Mapping[SweepKind, str] = {
    "alpha": "alpha",
    "c_max": "C_max",
    "gpus": "ranks",
    "optimizer": "optimizer",
}
_ALL = ("measured", "plan", "error")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a curve."""

    measured: Quartiles
    predicted: float


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One strategy at one value."""

    value: str
    strategy: str
    result: BenchResult

    @property
    def measured(self) -> Measured:
        return self.result.strategies[self.strategy].measured

    @property
    def predicted(self) -> Predicted:
        return self.result.strategies[self.strategy].predicted

    def phase(self, name: str) -> tuple[float | None, float | None]:
        """Measured and predicted, seconds."""
        return self.measured.means.get(name), self.predicted.phases.get(name)

    @property
    def optimizer(self) -> Point:
        """Optimizer step, ms."""
        return Point(measured=_ms(self.measured.optimizer_s), predicted=1e3 * self.predicted.optimizer_s)

    @property
    def iteration(self) -> Point:
        """Iteration, ms."""
        return Point(measured=_ms(self.measured.iteration_s), predicted=1e3 * self.predicted.iteration_s)

    @property
    def rate(self) -> float:
        """Sequences a second and rank, measured."""
        return self._sequences / median(self.measured.iteration_s)

    @property
    def predicted_rate(self) -> float:
        return self._sequences / self.predicted.iteration_s

    @property
    def _sequences(self) -> float:
        return self.result.layout.global_batch_size / self.result.layout.world_size


@dataclass(frozen=True)
class SweepView(Page):
    """A table of all values.

    `results` are in the order of the values; their keys are the values as they are shown.
    """

    kind: SweepKind
    results: Mapping[str, BenchResult]

    widest = 130

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        yield from heading(self._common, f"Sweep of {HEADS[self.kind]}", screen, without=self.kind)
        yield Text()
        yield wrapped(TITLES[self.kind], "bold")
        rows = list(sweep_rows(self.results))
        sections = [n for n, row in enumerate(rows) if n and row.value != rows[n - 1].value] if self._several else []
        groups = self._groups(rows)
        yield GroupedTable(
            head=f"{HEADS[self.kind]}, strategy" if self._several else HEADS[self.kind],
            labels=[self._label(n, rows) for n in range(len(rows))],
            groups=groups,
            sections=sections,
        )
        yield from map(note, self._remarks(groups))
        shared = set.intersection(*(set(result.notes) for result in self.results.values()))
        notes = dict.fromkeys(
            text if text in shared else f"{value}: {text}"
            for value, result in self.results.items()
            for text in result.notes
        )
        yield from items("Notes", map(clean, notes))

    @property
    def _common(self) -> BenchResult:
        """The first result with what all of them share."""
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
    def _several(self) -> bool:
        return any(len(result.strategies) > 1 for result in self.results.values())

    def _label(self, place: int, rows: list[SweepRow]) -> str:
        row = rows[place]
        if not self._several:
            return clean(row.value)
        width = max(len(clean(other.value)) for other in rows)
        value = clean(row.value) if place == 0 or rows[place - 1].value != row.value else ""
        return f"{value:<{width}} {clean(row.strategy)}"

    def _groups(self, rows: list[SweepRow]) -> list[Columns]:
        """The step's times, and before and after them the columns this setting is about."""

        def group(title: str, cells: Callable[[SweepRow], tuple[Cell, ...]], *heads: str) -> Columns:
            return Columns(title=title, heads=heads or ("measured", "plan"), rows=tuple(map(cells, rows)))

        def phase(title: str, name: str) -> Columns:
            return group(title, lambda row: (*map(milliseconds, row.phase(name)),))

        steps = [
            group("optimizer step, ms", lambda row: _times(row.measured.optimizer_s, row.predicted.optimizer_s), *_ALL),
            group("iteration, ms", lambda row: _times(row.measured.iteration_s, row.predicted.iteration_s), *_ALL),
        ]
        balance = group(
            "load balance", lambda row: (ratio(row.measured.load_balance), ratio(row.predicted.load_balance))
        )
        if self.kind == "alpha":
            reduced = phase("reduction in all, ms", "grad_reduce_total")
            return [balance, *steps, reduced, phase("gathering in all, ms", "param_gather_total")]
        if self.kind == "c_max":
            exchanged = (phase("exposed exchange, ms", "exchange"), phase("exchange in all, ms", "exchange_total"))
            return [*steps, *exchanged, group("fullest rank, MiB", _memory, *_ALL)]
        if self.kind == "gpus":
            layouts = group("layout", lambda row: (layout_code(row.result.layout),), "")
            efficiency = group("efficiency", lambda row: _shares(_efficiency(row, rows)))
            work = group("processor, s", lambda row: (number(median(row.measured.processor_s), ".3g"),), "measured")
            return [layouts, *steps, efficiency, work, balance]
        if not self._several:
            return steps
        return [
            *steps,
            group("optimizer, times", lambda row: _speedup(row, row.result.optimizer_speedup), "measured"),
            group("iteration, times", lambda row: _speedup(row, row.result.iteration_speedup), "measured"),
        ]

    def _remarks(self, groups: Sequence[Columns]) -> Iterator[str]:
        yield "median [quartiles] of the rounds; plan: predicted; error: predicted over measured"
        if any(group.shows(NOT_DISTINCT) for group in groups):
            yield OVERLAP
        if self.kind == "optimizer" and self._several:
            references = dict.fromkeys(clean(result.reference) for result in self.results.values())
            yield f"times: how many times the time of {', '.join(references)}, median [quartiles] of the rounds' ratios"
        if self.kind == "gpus":
            yield "efficiency: sequences per second and rank, against the fewest ranks"
            cores = next(iter(self.results.values())).machine.get("cores")
            most = max(result.layout.world_size for result in self.results.values())
            on_cpu = any(result.device == "cpu" for result in self.results.values())
            if on_cpu and isinstance(cores, int) and most > cores:
                yield (
                    f"up to {most} ranks share {cores} cores here: efficiency shows what sharing costs, not what that "
                    "many machines would reach; processor time is the work of all ranks"
                )


def _times(measured: Sequence[float], plan: float) -> tuple[Cell, ...]:
    return quartiles(measured), milliseconds(plan), error_text(median(measured), plan)


def _memory(row: SweepRow) -> tuple[Cell, ...]:
    return with_error(max(row.measured.tensor_bytes), row.predicted.tensor_bytes, mib)


def _shares(point: Point) -> tuple[Cell, ...]:
    return f"{point.measured.median:.0f}%", f"{point.predicted:.0f}%"


def _speedup(row: SweepRow, speedup: Callable[[str], Speedup]) -> tuple[Cell, ...]:
    return ("1" if row.strategy == row.result.reference else times(speedup(row.strategy)),)


def _efficiency(row: SweepRow, rows: Sequence[SweepRow]) -> Point:
    """Returns the efficiency over the same strategy on the fewest ranks, per cent."""
    base = next(other for other in rows if other.strategy == row.strategy)
    measured, plan = row.rate / base.rate, row.predicted_rate / base.predicted_rate
    return Point(measured=Quartiles.of([100 * measured]), predicted=100 * plan)


def sweep_rows(results: Mapping[str, BenchResult]) -> Iterator[SweepRow]:
    for value, result in results.items():
        for strategy in order(result):
            yield SweepRow(value=value, strategy=strategy, result=result)


def _ms(values: Sequence[float]) -> Quartiles:
    return Quartiles.of([1e3 * value for value in values])


def subject(kind: SweepKind, rows: Sequence[SweepRow]) -> tuple[str, Callable[[SweepRow], Point | None]]:
    """The quantity the setting is about, for the third panel: title and values."""

    def balance(row: SweepRow) -> Point:
        return Point(measured=Quartiles.of([row.measured.load_balance]), predicted=row.predicted.load_balance)

    def exchange(row: SweepRow) -> Point | None:
        measured, plan = row.phase("exchange")
        return None if measured is None else Point(measured=_ms([measured]), predicted=1e3 * (plan or 0.0))

    def speedup(row: SweepRow) -> Point | None:
        ratio_of = row.result.optimizer_speedup(row.strategy)
        base = row.result.strategies[row.result.reference].predicted.optimizer_s
        if row.strategy in (row.result.reference, "adamw") or not ratio_of.distinct or not base:
            return None
        return Point(measured=ratio_of.ratio, predicted=row.predicted.optimizer_s / base)

    if kind == "alpha":
        return "Load balance, max / mean of ranks", balance
    if kind == "c_max":
        return "Exposed exchange, ms", exchange
    if kind == "gpus":
        return "Efficiency: sequences per second and rank, %", lambda row: _efficiency(row, rows)
    return "Optimizer step, times the reference's", speedup


_MATRIX = tuple(name for name in STRATEGIES if name != "adamw")
_OTHERS = tuple(name for name in _MATRIX if name != "canzona")


@dataclass(frozen=True)
class SimulationView(Page):
    """A table for each size."""

    simulation: Simulation

    widest = 150

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        simulation = self.simulation
        unit = "GPUs" if simulation.device == "cuda" else "CPU ranks"
        trust = "(calibrated)" if simulation.calibrated else "(by hand, not calibrated)"
        yield headed(
            "Simulated",
            f", not measured: {clean(simulation.optimizer)} on {min(simulation.gpus):,} to {max(simulation.gpus):,} "
            f"{unit}, profile {clean(simulation.profile)} {trust}",
        )
        if simulation.overrides:
            yield wrapped(" ".join(map(clean, simulation.overrides)), "dim")
        for recipe in simulation.recipes:
            yield Text()
            yield from self._size(recipe)
        yield Text()
        for text in self._legend():
            yield wrapped(text, "dim")
        yield from items("Assumptions", simulation.assumptions, "dim")

    def _size(self, recipe: str) -> Iterator[RenderableType]:
        cells = self.simulation.of(recipe)
        yield Text(clean(recipe), style="bold")
        groups = [
            _layouts(cells),
            _group(cells, "iteration, ms", STRATEGIES, _iteration),
            _group(
                cells, "optimizer step, ms", STRATEGIES, lambda one, name: milliseconds(one.result(name).optimizer_s)
            ),
            _group(cells, "iteration over AdamW's", _MATRIX, lambda one, name: overhead(one.overhead(name))),
            _group(cells, "optimizer, times canzona's", _OTHERS, _times_canzona),
            _group(cells, "load balance", _MATRIX, lambda one, name: f"{one.result(name).update_balance:.2f}"),
        ]
        groups += [
            _yardsticks(cells, "fastest layout of its own", lambda best, _: layout_code(best.layout)),
            _yardsticks(cells, "iteration there, ms", lambda best, _: milliseconds(best.iteration_s)),
            _yardsticks(cells, "canzona's over that", lambda _, share: overhead(share)),
        ]
        yield GroupedTable(head="GPUs", labels=[f"{cell.gpus:,}" for cell in cells], groups=groups)
        for cell in cells:
            if cell.reason:
                yield wrapped(f"{cell.gpus:,}: no layout: {clean(cell.reason)}", "yellow", first="  ", rest="    ")

    def _legend(self) -> Iterator[str]:
        yield (
            "The layout is the one `canzona train` would choose for that many GPUs; all strategies use the same one. "
            "AdamW and layerwise are also compared, by sequence, each in its own fastest layout; -: does not fit. "
            "optimizer step: from reduced gradients to the next forward, without what hides under other work."
        )
        studies = [cell.study for cell in self.simulation.cells if cell.study is not None]
        if any(not strategy.fits for study in studies for strategy in study.strategies.values()):
            yield "! does not fit into memory with that layout: timed as if it did, and nothing is compared with it"
        if self.simulation.optimizer != "muon":
            yield (
                "layerwise: Megatron offers it for muon only; this is what the same method would take with "
                f"{clean(self.simulation.optimizer)}"
            )


@dataclass(frozen=True)
class SimulatedSweepView(Page):
    """A table for each size and number of GPUs, its rows the values of one setting."""

    kind: SweepKind
    simulations: Mapping[str, Simulation]
    """The simulation of each value, in the order of the values."""

    widest = 150

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        first = next(iter(self.simulations.values()))
        yield headed("Simulated", f", not measured: sweep of {HEADS[self.kind]}, profile {clean(first.profile)}")
        yield wrapped(TITLES[self.kind], "dim")
        for place, cell in enumerate(first.cells):
            cells = [simulation.cells[place] for simulation in self.simulations.values()]
            groups, layouts = self._groups(cells), _layouts(cells)
            if len(set(layouts.rows)) == 1:
                where = f": {layouts.rows[0][0]}"
            else:
                where, groups = "", [layouts, *groups]
            yield Text()
            yield Text(f"{clean(cell.recipe)} on {cell.gpus:,}{where}", style="bold")
            yield GroupedTable(
                head=HEADS[self.kind], labels=[clean(value) for value in self.simulations], groups=groups
            )
            for value, other in zip(self.simulations, cells, strict=True):
                if other.reason:
                    yield wrapped(f"{clean(value)}: {clean(other.reason)}", "yellow", first="  ", rest="    ")

    def _groups(self, cells: Sequence[SimulatedCell]) -> list[Columns]:
        names = AFFECTED.get(self.kind, _MATRIX)

        def phase(title: str, *phases: str) -> Columns:
            def shown(study: Study, name: str) -> str:
                return milliseconds(sum(study.result(name).phases.get(one, 0.0) for one in phases))

            return _group(cells, title, names, shown)

        steps = [
            _group(cells, "iteration, ms", names, _iteration),
            _group(cells, "optimizer step, ms", names, lambda one, name: milliseconds(one.result(name).optimizer_s)),
            _group(cells, "load balance", names, lambda one, name: f"{one.result(name).update_balance:.2f}"),
        ]
        if self.kind == "alpha":
            return [*steps, phase("DP traffic in all, ms", "grad_reduce_total", "param_gather_total")]
        if self.kind == "c_max":
            return [*steps, phase("exposed exchange, ms", "exchange")]
        return steps


def _layouts(cells: Sequence[SimulatedCell]) -> Columns:
    rows = tuple((MISSING if cell.study is None else layout_code(cell.study.layout),) for cell in cells)
    return Columns(title="layout", heads=("",), rows=rows)


def _group(
    cells: Sequence[SimulatedCell], title: str, names: Sequence[str], show: Callable[[Study, str], str]
) -> Columns:
    rows = (() if cell.study is None else tuple(show(cell.study, name) for name in names) for cell in cells)
    return Columns(title=title, heads=tuple(names), rows=tuple(rows))


def _yardsticks(cells: Sequence[SimulatedCell], title: str, show: Callable[[Tried, float | None], str]) -> Columns:
    """A column for each strategy that is simulated in its own fastest layout;
    `show` has it and canzona's overhead."""
    rows = (
        tuple(MISSING if best is None else show(best, cell.overhead(name)) for name, best in cell.yardsticks.items())
        for cell in cells
    )
    return Columns(title=title, heads=YARDSTICKS, rows=tuple(rows))


def _iteration(study: Study, name: str) -> str:
    return milliseconds(study.result(name).iteration_s) + (" " if study.strategies[name].fits else "!")


def _times_canzona(study: Study, name: str) -> str:
    ratio = study.optimizer_speedup(name)
    if ratio is None:
        return MISSING
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x"
