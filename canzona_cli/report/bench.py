"""What `canzona bench` prints: every strategy's step, measured beside predicted, and what may be concluded from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.bench.results import BenchResult, StrategyBench
from canzona_cli.report.bench_words import (
    NOT_DISTINCT,
    OVERLAP,
    beside,
    exposed,
    measured_phase,
    median,
    mib,
    order,
    percent,
    phase_name,
    quartiles,
    ratio,
    times,
)
from canzona_cli.report.columns import Cell, Group, tables
from canzona_cli.report.header import describe_layout
from canzona_cli.report.stacked import legend, stacked
from canzona_cli.report.text import wrapped
from canzona_cli.run.phases import IN_STEP, LABELS, PHASES
from canzona_cli.run.why import explain
from canzona_cli.run.words import MISSING, clean, milliseconds, number, plural, step_time

_WIDEST = 130
_SAID = ("device", "machine", "ranks")
"""Of the machine's facts, what the title says, and a digest to tell machines apart."""


@dataclass(frozen=True)
class BenchView:
    """A rich renderable, from 60 columns on."""

    result: BenchResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(max_width=min(options.max_width, _WIDEST))
        yield from heading(self.result, "Bench", console, options)
        yield Text()
        yield from self._steps(options)
        yield from _note(
            "plan: predicted; error: predicted over measured, where either is 1% of the step", console, options
        )
        yield Text()
        yield from self._bars(console, options)
        if len(self.result.strategies) > 1:
            yield Text()
            yield from self._comparison(console, options)
        yield Text()
        yield from wrapped(Text("Why measured and predicted differ", style="bold"), console, options)
        said: dict[str, list[str]] = {}
        for name in order(self.result):
            said.setdefault(_why(self.result, name), []).append(name)
        for text, alike in said.items():
            yield from wrapped(
                Text(f"{', '.join(map(clean, alike))}: {text}"), console, options, first="  ", rest="    "
            )
        yield Text()
        yield from wrapped(Text("Losses", style="bold"), console, options)
        yield from self._losses(console, options)
        if self.result.notes:
            yield Text()
            yield Text("Notes", style="bold")
            for note in self.result.notes:
                yield from wrapped(Text(clean(note)), console, options, first="  - ", rest="    ")

    def _steps(self, options: ConsoleOptions) -> Iterator[Text]:
        """Phases, step times, balance and memory of every strategy."""
        result = self.result
        names = order(result)
        phases = [
            phase
            for phase in LABELS
            if any(
                s.measured.phases.get(phase) is not None or s.predicted.phases.get(phase)
                for s in result.strategies.values()
            )
        ]
        labels: list[Cell] = [phase_name(phase) for phase in phases]
        labels += ["iteration", "  quartiles", "optimizer step", "  quartiles", "exposed communication"]
        labels += ["load balance", "processor time", "memory, MiB", "  with activations"]
        styles = ["dim" if phase.endswith("_total") else "" for phase in phases]
        styles += ["bold", "dim", "bold", "dim", "", "", "", "", "dim"]
        groups = [
            Group(
                title=clean(name) + (" *" if result.strategies[name].alone else ""),
                heads=("ms", "plan", "error"),
                rows=(
                    *(_phase_cells(result.strategies[name], phase) for phase in phases),
                    *_summary_cells(result.strategies[name]),
                ),
            )
            for name in names
        ]
        yield from tables(labels, groups, options, sections=(len(phases), len(phases) + 5), styles=styles, head="phase")

    def _bars(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Two bars for each strategy on one scale: the step as measured, and as predicted."""
        colour = console.color_system is not None and not options.ascii_only
        strategies = self.result.strategies
        scale = max(max(median(s.measured.iteration_s), s.predicted.iteration_s) for s in strategies.values())
        title = Text.assemble(
            ("Step", "bold"), f", mean over ranks, measured above predicted; the whole width is {step_time(scale)}"
        )
        yield from wrapped(title, console, options)
        seen: dict[str, None] = {}
        for name in order(self.result):
            found = strategies[name]
            measured = {phase: measured_phase(found.measured, phase) or 0.0 for phase in IN_STEP}
            predicted = {phase: found.predicted.phases.get(phase, 0.0) for phase in IN_STEP}
            for head, parts, total in (
                (clean(name), measured, median(found.measured.iteration_s)),
                ("", predicted, found.predicted.iteration_s),
            ):
                shown: list[tuple[str, float]] = [(phase, seconds) for phase, seconds in parts.items() if seconds > 0]
                seen |= dict.fromkeys(phase for phase, _ in shown)
                drawn = stacked(shown, scale, options.max_width - 24, PHASES, colour=colour)
                yield Text.assemble("  ", (f"{head:<10} ", "" if head else "dim"), f"{step_time(total):>9} ", drawn)
        entries = [(phase, phase_name(phase)) for phase in PHASES if phase in seen]
        yield from legend(entries, PHASES, options.max_width, colour=colour)

    def _comparison(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Speed-ups of the reference, and what every strategy costs beside AdamW."""
        result, reference = self.result, clean(self.result.reference)
        names = order(result)
        heads = ("measured", "plan")
        steps = {
            "optimizer step": _speedups(result, names, of="optimizer"),
            "iteration": _speedups(result, names, of="iteration"),
        }
        groups = [Group(title=title, heads=heads, rows=rows) for title, rows in steps.items()]
        if "adamw" in result.strategies:
            rows = tuple(_overhead_cells(result, name) for name in names)
            groups.append(Group(title="above AdamW", heads=heads, rows=rows))
        title = Text.assemble(
            ("Compared", "bold"),
            f": how many times {reference}'s time, median [quartiles] of the ratios round by round",
        )
        yield from wrapped(title, console, options)
        yield from tables([clean(name) for name in names], groups, options, head="strategy")
        if len(groups) > 2:
            yield from _note("above AdamW: how much longer the iteration is than AdamW's", console, options)
        shown = [cell for group in groups for row in group.rows for cell in row]
        if any(str(cell) == NOT_DISTINCT for cell in shown):
            yield from _note(OVERLAP, console, options)
        alone = [clean(name) for name in names if result.strategies[name].alone]
        if alone:
            yield from _note(
                f"* {', '.join(alone)}: measured alone, for want of memory; not in turns with {reference}",
                console,
                options,
            )

    def _losses(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        result = self.result
        for name in order(result):
            found = result.strategies[name]
            losses = found.measured.losses
            if not losses:
                yield from _item(name, Text("not recorded"), console, options)
                continue
            said = Text(f"{number(losses[0], '.4f')} to {number(losses[-1], '.4f')} in {plural(len(losses), 'step')}")
            kin = _kin(result, name)
            if kin is not None:
                theirs = result.strategies[kin].measured.losses
                apart = max(abs(a - b) / abs(b) for a, b in zip(losses, theirs, strict=True))
                said.append(f", at most {100 * apart:.2g}% from {clean(kin)}'s")
            elif name != result.reference:
                said.append(", computes other updates: not compared", style="dim")
            yield from _item(name, said, console, options)


def heading(
    result: BenchResult, what: str, console: Console, options: ConsoleOptions, *, without: str = ""
) -> Iterator[Text]:
    """What was run, on what, how often.

    Args:
        without: what varies, `optimizer` or `gpus`, and so cannot be said once for all.
    """
    unit = "GPU" if result.device == "cuda" else "CPU rank"
    layout = describe_layout(result.layout, unit, times="x" if options.ascii_only else "×")
    parts = {"": result.recipe, "optimizer": result.optimizer, "gpus": layout}
    title = Text.assemble(
        (what, "bold"), f": {', '.join(clean(parts[key]) for key in parts if not key or key != without)}"
    )
    yield from wrapped(title, console, options)
    trust = "measured by canzona calibrate" if result.calibrated else "not calibrated: expect large errors"
    rows = [
        (
            "predicted",
            Text.assemble(f"by profile {clean(result.profile)}, ", (trust, "" if result.calibrated else "yellow")),
        ),
        ("measured", Text(f"{_rounds(result)} in turns, {result.warm_up_rounds} before them to warm up")),
    ]
    machine = ", ".join(
        f"{clean(key).replace('_', ' ')} {_value(value)}" for key, value in result.machine.items() if key not in _SAID
    )
    if machine:
        rows.append(("machine", Text(machine)))
    if result.overrides:
        rows.append(("settings", Text(" ".join(clean(override) for override in result.overrides))))
    for label, value in rows:
        yield from _item(label, value, console, options, dim=True)


def _rounds(result: BenchResult) -> str:
    return f"{plural(result.rounds, 'round')} of {plural(max(1, result.steps_per_turn - 1), 'measured step')}"


def _value(value: str | int | float) -> str:
    return number(value) if isinstance(value, float) else clean(value)


def _phase_cells(found: StrategyBench, phase: str) -> tuple[Cell, ...]:
    measured, predicted = measured_phase(found.measured, phase), found.predicted.phases.get(phase)
    if measured is None and not predicted:
        return (MISSING, MISSING, "")
    least = 0.01 * min(median(found.measured.iteration_s), found.predicted.iteration_s)
    cells = beside(measured, predicted)
    # Relative errors of what takes no time are noise that looks like news.
    return cells if max(measured or 0.0, predicted or 0.0) >= least else (*cells[:2], "")


def _summary_cells(found: StrategyBench) -> Iterator[tuple[Cell, ...]]:
    measured, predicted = found.measured, found.predicted
    for values, planned in (
        (measured.iteration_s, predicted.iteration_s),
        (measured.optimizer_s, predicted.optimizer_s),
    ):
        yield beside(median(values), planned)
        yield () if len(values) < 2 else ("[" + quartiles(values).partition("[")[2],)
    yield beside(
        exposed([(name, phase.mean_s) for name, phase in measured.phases.items()]),
        exposed(list(predicted.phases.items())),
    )
    yield beside(measured.load_balance, predicted.load_balance, ratio)
    yield (milliseconds(median(measured.processor_s)) if measured.processor_s else MISSING, "", "")
    held = max(measured.tensor_bytes, default=None)
    yield beside(held, predicted.tensor_bytes, mib)
    yield ("", mib(predicted.memory_bytes), "")


def _speedups(result: BenchResult, names: Sequence[str], *, of: str) -> tuple[tuple[Cell, ...], ...]:
    rows: list[tuple[Cell, ...]] = []
    base = result.strategies[result.reference].predicted
    for name in names:
        predicted = result.strategies[name].predicted
        if name == result.reference:
            rows.append(("1", "1"))
        elif of == "optimizer":
            planned = predicted.optimizer_s / base.optimizer_s if base.optimizer_s else None
            rows.append((times(result.optimizer_speedup(name)), f"{number(planned, '.2f')}x"))
        else:
            planned = predicted.iteration_s / base.iteration_s
            rows.append((times(result.iteration_speedup(name)), f"{number(planned, '.2f')}x"))
    return tuple(rows)


def _overhead_cells(result: BenchResult, name: str) -> tuple[Cell, ...]:
    found = result.overhead(name)
    if found is None:
        return (MISSING, MISSING)
    shown = percent(found.ratio.median - 1) if found.distinct else NOT_DISTINCT
    return (shown, percent(result.predicted_overhead(name)))


def _why(result: BenchResult, name: str) -> str:
    found = result.strategies[name]
    cores = result.machine.get("cores") if result.device == "cpu" else None
    why = explain(
        found.measured.phases,
        found.predicted.phases,
        calibrated=result.calibrated,
        cores=cores if isinstance(cores, int) else None,
        world_size=result.layout.world_size,
        load_balance=found.predicted.load_balance,
    )
    return "no phase was measured" if why is None else why.text


def _kin(result: BenchResult, name: str) -> str | None:
    """The strategy whose losses these must agree with: the first that computes the same updates."""
    same = [
        other
        for other in (result.reference, *order(result))
        if other != name and result.strategies[other].arithmetic == result.strategies[name].arithmetic
    ]
    return None if name == result.reference or name == "adamw" or not same else same[0]


def _item(label: str, value: Text, console: Console, options: ConsoleOptions, *, dim: bool = False) -> Iterator[Text]:
    first = f"  {clean(label):<10} "
    for line in wrapped(value, console, options, first=first, rest=" " * len(first)):
        if dim:
            line.stylize("dim", 0, len(first))
        yield line


def _note(text: str, console: Console, options: ConsoleOptions) -> Iterator[Text]:
    yield from wrapped(Text(text, style="dim"), console, options, first="  ", rest="  ")
