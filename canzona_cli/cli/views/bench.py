"""The screen of `canzona bench`: the measured and predicted step times of every strategy, compared."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.results import BenchResult, Machine, Predicted, StrategyBench, loss_references
from canzona_cli.cli.views.charts import LoadMaps
from canzona_cli.cli.views.header import describe_layout
from canzona_cli.cli.views.page import (
    Cell,
    Columns,
    GroupedTable,
    Page,
    Screen,
    items,
    joined,
    labelled_rows,
    note,
    paragraph,
    section_head,
)
from canzona_cli.core.phases import COMMUNICATION, LABELS, PHASES, STRATEGIES
from canzona_cli.records.breakdown import CALIBRATE, why
from canzona_cli.records.statistics import JUDGED_ROUNDS, NOT_SIGNIFICANT, Quartiles, Speedup, no_verdict
from canzona_cli.records.words import (
    MISSING,
    error_percent,
    finite_or_none,
    milliseconds,
    number,
    overhead,
    plural,
    predicted_overhead,
)

MIB = 1 << 20
TOLERANCE = 0.20
"""The relative error of a prediction above which the error is highlighted."""
NOT_DISTINCT = "not significant"
"""The text in place of a speed-up that is not significant."""
_LEFT_OUT = ("device", "machine", "ranks")
"""The machine facts that the heading omits: the title shows device and ranks, and `machine` is a digest."""
_UNITS = {"processor": "", "cores": " cores", "memory_gib": " GiB"}
"""The units of the machine facts that are shown without a label."""


@dataclass(frozen=True)
class BenchView(Page):
    """A comparison of the strategies that a bench measured."""

    result: BenchResult

    widest = 130

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        result = self.result
        yield from _heading(result)
        yield Text()
        yield self._phases()
        if result.planned:
            yield note("plan: predicted; error: predicted / measured - 1, for phases of at least 1% of the step")
        if len(result.strategies) > 1:
            yield Text()
            yield from self._comparison()
        if result.planned:
            yield Text()
            yield from self._differences()
        yield Text()
        yield Text("Losses", style="bold")
        for name in shown_strategies(result):
            yield paragraph(_losses_text(result, name), first=f"  {name:<10} ")
        yield from items("Notes", result.notes)
        if screen.page:
            yield from self._ranks()

    def _differences(self) -> Iterator[RenderableType]:
        """Yields the reasons why measured and predicted times differ, each with the strategies to which it
        applies."""
        yield Text("Why measured and predicted differ", style="bold")
        reasons: dict[str, list[str]] = {}
        for name, bench in shown_strategies(self.result).items():
            difference = why(bench.measured.phases, bench.predicted.phases)
            text = "no phase was measured" if difference is None else difference.text
            reasons.setdefault(text, []).append(name)
        for text, names in reasons.items():
            yield paragraph(f"{', '.join(names)}: {text}", first="  ", rest="    ")

    def _phases(self) -> GroupedTable:
        """Returns a table of phases, step times, load balance and memory, with a column group for each
        strategy."""
        strategies, planned = shown_strategies(self.result), self.result.planned
        phases = [phase for phase in LABELS if _occurs(phase, strategies.values(), planned=planned)]
        summaries = {name: list(_summary(bench, planned=planned)) for name, bench in strategies.items()}
        summary_rows = next(iter(summaries.values()))
        groups = []
        for name, bench in strategies.items():
            rows = [*(_phase_cells(bench, phase) for phase in phases), *(cells for *_, cells in summaries[name])]
            groups.append(Columns(name, ("ms", "plan", "error"), rows))
        names = (PHASES[phase].name if phase in PHASES else LABELS[phase] for phase in phases)
        phase_styles = ("dim" if phase.endswith("_total") else "" for phase in phases)
        return GroupedTable(
            head="phase",
            labels=[*names, *(label for label, _, _ in summary_rows)],
            groups=shown_groups(self.result, groups),
            sections=(len(phases), len(phases) + 5),
            styles=[*phase_styles, *(style for _, style, _ in summary_rows)],
        )

    def _ranks(self) -> Iterator[RenderableType]:
        """Draws the update time of every rank; only HTML pages show it."""
        layout = self.result.layout
        measured = {name: bench.measured for name, bench in shown_strategies(self.result).items()}
        cells = layout.tp * layout.owners
        loads = {name: bench.update_s for name, bench in measured.items() if len(bench.update_s) == cells}
        maps = {name: seconds for name, seconds in loads.items() if any(seconds)}
        if maps:
            lead = "measured matrix update time of every rank in one step; colour: time relative to the mean"
            yield section_head("Load map", f", {lead}")
            yield LoadMaps(maps=maps, hosts=layout.tp)

    def _comparison(self) -> Iterator[RenderableType]:
        """Yields every strategy's times relative to the reference's, and its overhead over AdamW."""
        result, reference, names = self.result, self.result.reference, list(shown_strategies(self.result))
        heads = ("measured", "plan")
        groups = [
            Columns(title, heads, [_ratio_cells(result, name, speedup, seconds) for name in names])
            for title, speedup, seconds in (
                ("optimizer step", result.optimizer_speedup, lambda predicted: predicted.optimizer_s),
                ("iteration", result.iteration_speedup, lambda predicted: predicted.iteration_s),
            )
        ]
        if "adamw" in result.strategies:
            groups.append(Columns("over AdamW", heads, [_overhead_cells(result, name) for name in names]))
        title = f": time divided by {reference}'s time, median [quartiles] of the ratio in each round"
        yield section_head("Compared", title)
        yield GroupedTable(head="strategy", labels=names, groups=shown_groups(result, groups))
        if len(groups) > 2:
            yield note("over AdamW: the increase of an iteration's time over AdamW's")
        if result.rounds < JUDGED_ROUNDS:
            yield note(no_verdict(result.rounds))
        elif any(group.shows(NOT_DISTINCT) for group in groups):
            yield note(f"{NOT_DISTINCT}: {NOT_SIGNIFICANT}")


def shown_groups(result: BenchResult, groups: Sequence[Columns]) -> list[Columns]:
    """Returns the groups, without the columns `plan` and `error` if the predictions do not describe this
    machine."""
    return [group if result.planned else group.drop("plan", "error") for group in groups]


def _heading(result: BenchResult) -> Iterator[RenderableType]:
    """Yields the heading: the run, the hardware and the number of rounds."""
    layout = describe_layout(result.layout, result.device)
    yield section_head("Bench", f": {result.recipe}, {result.optimizer}, {layout}")
    facts = [_fact(key, value) for key, value in result.machine.items() if key not in _LEFT_OUT]
    steps = plural(max(1, result.steps_per_turn - 1), "measured step")
    rounds = f"{plural(result.rounds, 'round')} of {steps}"
    rows: dict[str, Text | str] = {
        **_predictions(result),
        "measured": f"{rounds}, interleaved, after {plural(result.warm_up_rounds, 'warm-up round')}",
        "machine": ", ".join(facts),
        "ranks": _crowding(result.machine) if result.device == "cpu" else "",
        "arithmetic": result.arithmetic,
        "settings": " ".join(result.overrides),
    }
    yield from labelled_rows(((label, value) for label, value in rows.items() if value), 11)


def _crowding(machine: Machine) -> str:
    """Returns a warning if there are more ranks than cores, else an empty string."""
    ranks, cores = machine.get("ranks"), machine.get("cores")
    if not isinstance(ranks, int) or not isinstance(cores, int) or ranks <= cores:
        return ""
    return (
        f"{ranks} ranks share {plural(cores, 'core')}, so these times count the work of all ranks, also updates that "
        "several ranks repeat; they show little of balance and of overlapped communication"
    )


def _fact(key: str, value: str | int | float) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return f"{text}{_UNITS[key]}" if key in _UNITS else f"{key.replace('_', ' ')} {text}"


def _predictions(result: BenchResult) -> dict[str, Text | str]:
    """Returns a row that says where the predictions come from or, without predictions for this machine, how
    to get them."""
    if not result.planned:
        return {"planned": CALIBRATE}
    trust = ("measured by canzona calibrate", "")
    if not result.calibrated:
        trust = ("not calibrated: expect large errors", "yellow")
    return {"predicted": joined(f"by profile {result.profile}, ", trust)}


def _occurs(phase: str, benches: Iterable[StrategyBench], *, planned: bool) -> bool:
    """Returns True if a strategy has a measured or, if `planned`, a predicted time for the phase."""
    return any(phase in bench.measured.phases or (planned and bench.predicted.phases.get(phase)) for bench in benches)


def _phase_cells(bench: StrategyBench, phase: str) -> tuple[Cell, ...]:
    measured, predicted = bench.measured.means.get(phase), bench.predicted.phases.get(phase)
    if measured is None and not predicted:
        return (MISSING, MISSING, "")
    negligible_s = 0.01 * min(median(bench.measured.iteration_s), bench.predicted.iteration_s)
    cells = cells_with_error(measured, predicted)
    # The relative error of a phase that takes almost no time is only noise.
    return cells if max(measured or 0.0, predicted or 0.0) >= negligible_s else (*cells[:2], "")


def _summary(bench: StrategyBench, *, planned: bool) -> Iterator[tuple[str, str, tuple[Cell, ...]]]:
    """Yields the rows below the phases as (label, style, cells). If `planned`, they include the row that is
    only predicted."""
    measured, predicted = bench.measured, bench.predicted
    for label, values, expected in (
        ("iteration", measured.iteration_s, predicted.iteration_s),
        ("optimizer step", measured.optimizer_s, predicted.optimizer_s),
    ):
        yield label, "bold", cells_with_error(median(values), expected)
        yield "  quartiles", "dim", () if len(values) < 2 else ("[" + quartiles(values).partition("[")[2],)
    yield "exposed communication", "", cells_with_error(exposed_s(measured.means), exposed_s(predicted.phases))
    yield "load balance", "", cells_with_error(measured.load_balance, predicted.load_balance, ratio_text)
    yield "CPU time, all ranks", "", (milliseconds(median(measured.processor_s)), "", "")
    yield "memory, MiB", "", cells_with_error(max(measured.tensor_bytes), predicted.tensor_bytes, mib_text)
    if planned:
        yield "  with activations", "dim", ("", mib_text(predicted.memory_bytes), "")


def _ratio_cells(
    result: BenchResult, name: str, speedup: Callable[[str], Speedup], seconds: Callable[[Predicted], float]
) -> tuple[Cell, Cell]:
    """Returns the strategy's time divided by the reference's, as measured and as predicted."""
    if name == result.reference:
        return ("1", "1")
    names = (name, result.reference)
    strategy_s, reference_s = (seconds(result.strategies[strategy].predicted) for strategy in names)
    return speedup_text(speedup(name)), f"{ratio_text(strategy_s / reference_s if reference_s else None)}x"


def _overhead_cells(result: BenchResult, name: str) -> tuple[Cell, Cell]:
    measured = result.overhead(name)
    if measured is None:
        return (MISSING, MISSING)
    shown = NOT_DISTINCT if measured.distinct is False else overhead(measured.ratio.median - 1)
    return (shown, predicted_overhead(result.predicted_overhead(name)))


def _losses_text(result: BenchResult, name: str) -> Text:
    losses = result.strategies[name].measured.losses
    text = Text(f"{number(losses[0], '.4f')} to {number(losses[-1], '.4f')} in {plural(len(losses), 'step')}")
    references = loss_references(result)
    reference = references[name]
    if reference != name:
        reference_losses = result.strategies[reference].measured.losses
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference_losses, strict=True))
        text.append(f", at most {100 * difference:.2g}% from {reference}'s")
    elif name != result.reference and [*references.values()].count(name) == 1:
        text.append(", not compared: it computes different updates", style="dim")
    return text


def shown_strategies(result: BenchResult) -> dict[str, StrategyBench]:
    """Returns the strategies of a result in the order in which they are shown."""
    return {name: result.strategies[name] for name in STRATEGIES if name in result.strategies}


def error_text(measured: float | None, predicted: float | None) -> Text:
    """Formats a prediction's relative error, such as `+12%`; an error above `TOLERANCE` is highlighted."""
    actual, planned = finite_or_none(measured), finite_or_none(predicted)
    if not actual or not planned:  # a value that is missing or 0 has no relative error worth showing
        return Text("")
    error = planned / actual - 1
    return Text(error_percent(error), style="yellow" if abs(error) > TOLERANCE else "dim")


def ms_text(seconds: float | None) -> str:
    """Formats seconds as milliseconds; zero is `0`."""
    return "0" if seconds == 0 else milliseconds(seconds)


def cells_with_error(
    measured: float | None, predicted: float | None, show: Callable[[float | None], str] = ms_text
) -> tuple[Text, Text, Text]:
    """Returns three cells: the measured value, the predicted value, and the prediction's error."""
    return Text(show(measured)), Text(show(predicted)), error_text(measured, predicted)


def quartiles(values: Sequence[float]) -> str:
    """Formats times in seconds as their median and quartiles in ms, such as `41.2 [40.8, 43.0]`; a single
    value is shown alone."""
    spread = Quartiles.of(values)
    low, middle, high = map(milliseconds, (spread.low, spread.median, spread.high))
    return middle if len(values) < 2 else f"{middle} [{low}, {high}]"


def speedup_text(speedup: Speedup) -> str:
    """Formats a speed-up with its quartiles, such as `4.16x [2.92, 5.28]`; returns `NOT_DISTINCT` if it is
    not significant."""
    if speedup.distinct is False:
        return NOT_DISTINCT
    ratio = speedup.ratio
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def ratio_text(value: float | None) -> str:
    return number(value, ".2f")


def mib_text(amount: float | None) -> str:
    if amount is None:
        return MISSING
    return f"{amount / MIB:,.0f}" if amount >= 100 * MIB else f"{amount / MIB:.1f}"


def exposed_s(phases: Mapping[str, float]) -> float:
    """Returns the seconds that a step spends waiting for communication."""
    return sum(phases.get(name, 0.0) for name in COMMUNICATION)
