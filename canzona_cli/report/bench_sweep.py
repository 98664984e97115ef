"""`canzona bench --sweep`: one setting through several values, measured beside predicted, as a table and a picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.bench.results import BenchResult, Measured, Predicted
from canzona_cli.report.bench import heading
from canzona_cli.report.bench_plot import plain
from canzona_cli.report.bench_words import (
    NOT_DISTINCT,
    OVERLAP,
    beside,
    error_text,
    measured_phase,
    median,
    mib,
    order,
    quartiles,
    ratio,
    times,
)
from canzona_cli.report.columns import Group, tables
from canzona_cli.report.png import save
from canzona_cli.report.text import wrapped
from canzona_cli.run.phases import STRATEGY_COLOURS
from canzona_cli.run.statistics import Quartiles, Speedup
from canzona_cli.run.words import clean, layout_code, milliseconds, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Sweep = Literal["alpha", "c_max", "gpus", "optimizer", "layers"]

TITLES: Mapping[Sweep, str] = {
    "alpha": "Balance communication (0) or compute (1) over data-parallel ranks",
    "c_max": "Largest fused exchange of one rank, MiB",
    "gpus": "The same job on more ranks",
    "optimizer": "Optimizers",
    "layers": "Layers",
}
_HEADS: Mapping[Sweep, str] = {
    "alpha": "alpha",
    "c_max": "C_max",
    "gpus": "ranks",
    "optimizer": "optimizer",
    "layers": "layers",
}


@dataclass(frozen=True, kw_only=True)
class _Row:
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
        return measured_phase(self.measured, name), self.predicted.phases.get(name)

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
class SweepView:
    """A rich renderable, from 60 columns on.

    `results` are in the order of the values; their keys are the values as they are shown.
    """

    kind: Sweep
    results: Mapping[str, BenchResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(max_width=min(options.max_width, 130))
        yield from heading(self._common, f"Sweep of {_HEADS[self.kind]}", console, options, without=self.kind)
        yield Text()
        yield from wrapped(Text(TITLES[self.kind], style="bold"), console, options)
        rows = list(_rows(self.results))
        sections = [n for n, row in enumerate(rows) if n and row.value != rows[n - 1].value] if self._several else []
        labels = [self._label(n, rows) for n in range(len(rows))]
        groups = [*self._extra(rows, first=True), *_step_times(rows), *self._extra(rows, first=False)]
        head = f"{_HEADS[self.kind]}, strategy" if self._several else _HEADS[self.kind]
        yield from tables(labels, groups, options, head=head, sections=sections)
        for note in self._notes(groups):
            yield from wrapped(Text(note, style="dim"), console, options, first="  ", rest="  ")
        shared = set.intersection(*(set(result.notes) for result in self.results.values()))
        said = dict.fromkeys(
            note if note in shared else f"{value}: {note}"
            for value, result in self.results.items()
            for note in result.notes
        )
        if said:
            yield Text()
            yield Text("Notes", style="bold")
        for note in said:
            yield from wrapped(Text(clean(note)), console, options, first="  - ", rest="    ")

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

    def _label(self, place: int, rows: list[_Row]) -> str:
        row = rows[place]
        if not self._several:
            return clean(row.value)
        width = max(len(clean(other.value)) for other in rows)
        value = clean(row.value) if place == 0 or rows[place - 1].value != row.value else ""
        return f"{value:<{width}} {clean(row.strategy)}"

    def _extra(self, rows: list[_Row], *, first: bool) -> Iterator[Group]:
        """What this setting is about, before and behind the step's times."""
        if self.kind == "alpha" and first:
            yield _balance(rows)
        elif self.kind == "alpha":
            yield _phase(rows, "reduction in all, ms", "grad_reduce_total")
            yield _phase(rows, "gathering in all, ms", "param_gather_total")
        elif self.kind == "c_max" and not first:
            yield _phase(rows, "exposed exchange, ms", "exchange")
            yield _phase(rows, "exchange in all, ms", "exchange_total")
            yield _memory(rows)
        elif self.kind == "gpus" and first:
            yield _layouts(rows)
        elif self.kind == "gpus":
            yield _efficiency(rows)
            cells = ((number(median(row.measured.processor_s), ".3g"),) for row in rows)
            yield Group(title="processor, s", heads=("measured",), rows=tuple(cells))
            yield _balance(rows)
        elif self.kind in ("optimizer", "layers") and not first and self._several:
            yield _speedups(rows, "optimizer, times", lambda row: row.result.optimizer_speedup(row.strategy))
            yield _speedups(rows, "iteration, times", lambda row: row.result.iteration_speedup(row.strategy))

    def _notes(self, groups: list[Group]) -> Iterator[str]:
        yield "median [quartiles] of the rounds; plan: predicted; error: predicted over measured"
        if any(str(cell) == NOT_DISTINCT for group in groups for row in group.rows for cell in row):
            yield OVERLAP
        if self.kind in ("optimizer", "layers") and self._several:
            references = dict.fromkeys(clean(result.reference) for result in self.results.values())
            yield f"times: how many times the time of {', '.join(references)}, median [quartiles] of the rounds' ratios"
        if self.kind == "gpus":
            yield "efficiency: sequences per second and rank, against the fewest ranks"
            cores = next(iter(self.results.values())).machine.get("cores")
            most = max(result.layout.world_size for result in self.results.values())
            on_cpu = any(result.device == "cpu" for result in self.results.values())
            if on_cpu and isinstance(cores, int) and most > cores:
                yield (
                    f"up to {most} ranks share {cores} cores here: efficiency tells what sharing costs, not what as "
                    "many machines would do; processor time is the work of all ranks"
                )


def _step_times(rows: Sequence[_Row]) -> Iterator[Group]:
    for title, values in (
        ("optimizer step, ms", [(row.measured.optimizer_s, row.predicted.optimizer_s) for row in rows]),
        ("iteration, ms", [(row.measured.iteration_s, row.predicted.iteration_s) for row in rows]),
    ):
        cells = [(quartiles(found), milliseconds(plan), error_text(median(found), plan)) for found, plan in values]
        yield Group(title=title, heads=("measured", "plan", "error"), rows=tuple(cells))


def _phase(rows: Sequence[_Row], title: str, name: str) -> Group:
    cells = [(milliseconds(measured), milliseconds(plan)) for measured, plan in (row.phase(name) for row in rows)]
    return Group(title=title, heads=("measured", "plan"), rows=tuple(cells))


def _balance(rows: Sequence[_Row]) -> Group:
    cells = [(ratio(row.measured.load_balance), ratio(row.predicted.load_balance)) for row in rows]
    return Group(title="load balance", heads=("measured", "plan"), rows=tuple(cells))


def _memory(rows: Sequence[_Row]) -> Group:
    held = [(max(row.measured.tensor_bytes, default=None), row.predicted.tensor_bytes) for row in rows]
    cells = [beside(measured, plan, mib) for measured, plan in held]
    return Group(title="fullest rank, MiB", heads=("measured", "plan", "error"), rows=tuple(cells))


def _layouts(rows: Sequence[_Row]) -> Group:
    cells = [(layout_code(row.result.layout),) for row in rows]
    return Group(title="layout", heads=("",), rows=tuple(cells))


def _efficiency(rows: Sequence[_Row]) -> Group:
    cells = []
    for row in rows:
        base = next(other for other in rows if other.strategy == row.strategy)
        measured, plan = row.rate / base.rate, row.predicted_rate / base.predicted_rate
        cells.append((f"{100 * measured:.0f}%", f"{100 * plan:.0f}%"))
    return Group(title="efficiency", heads=("measured", "plan"), rows=tuple(cells))


def _speedups(rows: Sequence[_Row], title: str, speedup: Callable[[_Row], Speedup]) -> Group:
    cells = ((("1" if row.strategy == row.result.reference else times(speedup(row))),) for row in rows)
    return Group(title=title, heads=("measured",), rows=tuple(cells))


def _rows(results: Mapping[str, BenchResult]) -> Iterator[_Row]:
    for value, result in results.items():
        for strategy in order(result):
            yield _Row(value=value, strategy=strategy, result=result)


@dataclass(frozen=True, kw_only=True)
class _Point:
    measured: Quartiles
    predicted: float


def draw_sweep(kind: Sweep, results: Mapping[str, BenchResult], path: Path) -> None:
    """Write the curves: optimizer step, iteration, and what the setting is about.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), dpi=110, layout="constrained")
    some = next(iter(results.values()))
    on = "" if kind == "gpus" else f", {some.layout.world_size} ranks"
    optimizer = "" if kind == "optimizer" else f", {clean(some.optimizer)}"
    figure.suptitle(f"{TITLES[kind]}: {clean(some.recipe)}{optimizer}{on}", fontsize=13)
    panels = figure.subplots(1, 3)
    title, subject = _subject(kind, list(_rows(results)))
    _curves(panels[0], "Optimizer step, ms", results, kind, _optimizer)
    _curves(panels[1], "Iteration, ms", results, kind, _iteration)
    _curves(panels[2], title, results, kind, subject)
    panels[0].legend(
        fontsize=8.5,
        frameon=False,
        title=f"{'bars' if kind == 'optimizer' else 'circles'} measured, crosses predicted",
        title_fontsize=8.5,
    )
    save(figure, path)


def _optimizer(row: _Row) -> _Point:
    return _Point(measured=_ms(row.measured.optimizer_s), predicted=1e3 * row.predicted.optimizer_s)


def _iteration(row: _Row) -> _Point:
    return _Point(measured=_ms(row.measured.iteration_s), predicted=1e3 * row.predicted.iteration_s)


def _ms(values: Sequence[float]) -> Quartiles:
    return Quartiles.of([1e3 * value for value in values])


def _subject(kind: Sweep, rows: Sequence[_Row]) -> tuple[str, Callable[[_Row], _Point | None]]:
    """What the setting is about: the third panel's title and values."""

    def balance(row: _Row) -> _Point:
        return _Point(measured=Quartiles.of([row.measured.load_balance]), predicted=row.predicted.load_balance)

    def exchange(row: _Row) -> _Point | None:
        measured, plan = row.phase("exchange")
        return None if measured is None else _Point(measured=_ms([measured]), predicted=1e3 * (plan or 0.0))

    def efficiency(row: _Row) -> _Point:
        base = next(other for other in rows if other.strategy == row.strategy)
        measured, plan = row.rate / base.rate, row.predicted_rate / base.predicted_rate
        return _Point(measured=Quartiles.of([100 * measured]), predicted=100 * plan)

    def speedup(row: _Row) -> _Point | None:
        found = row.result.optimizer_speedup(row.strategy)
        base = row.result.strategies[row.result.reference].predicted.optimizer_s
        if row.strategy in (row.result.reference, "adamw") or not found.distinct or not base:
            return None
        return _Point(measured=found.ratio, predicted=row.predicted.optimizer_s / base)

    if kind == "alpha":
        return "Load balance, max / mean of ranks", balance
    if kind == "c_max":
        return "Exposed exchange, ms", exchange
    if kind == "gpus":
        return "Efficiency: sequences per second and rank, %", efficiency
    return "Optimizer step, times the reference's", speedup


def _curves(
    axes: "Axes", title: str, results: Mapping[str, BenchResult], kind: Sweep, of: Callable[[_Row], "_Point | None"]
) -> None:
    """A curve for each strategy: measured with quartiles, predicted dashed."""
    places = {value: place for place, value in enumerate(results)}
    found: dict[str, list[tuple[int, _Point]]] = {}
    for row in _rows(results):
        point = of(row)
        if point is not None:
            found.setdefault(row.strategy, []).append((places[row.value], point))
    bars = kind == "optimizer"  # its values are no numbers: a line between them would say nothing
    width = 0.8 / max(1, len(found))
    for number_, (strategy, points) in enumerate(found.items()):
        colour, label = STRATEGY_COLOURS.get(strategy, "#999999"), clean(strategy)
        shift = width * (number_ - (len(found) - 1) / 2) if bars else 0.0
        x = [place + shift for place, _ in points]
        middle = [point.measured.median for _, point in points]
        spread = [
            [point.measured.median - point.measured.low for _, point in points],
            [point.measured.high - point.measured.median for _, point in points],
        ]
        planned = [point.predicted for _, point in points]
        if bars:
            axes.bar(x, middle, width=width, yerr=spread, color=colour, capsize=3, label=label)
            axes.plot(x, planned, color="black", marker="x", ms=6, ls="")
        else:
            axes.errorbar(x, middle, yerr=spread, color=colour, marker="o", ms=5, capsize=3, label=label)
            axes.plot(x, planned, color=colour, marker="x", ms=6, ls="--", alpha=0.75)
    axes.set_xticks(range(len(places)), [clean(value) for value in places])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(_HEADS[kind], fontsize=9)
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.25)
    plain(axes)
