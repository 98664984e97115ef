"""Simulated time as bars: whole iterations of every strategy, and the planned one's streams, whole and enlarged."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.report.stacked import legend, stacked
from canzona_cli.run.phases import PHASES, STREAMS
from canzona_cli.run.prediction import SimulatedEvent
from canzona_cli.run.words import step_time
from canzona_cli.simulate.study import STRATEGIES, Study

_CUT = 1.6
"""sc can take several times as long as the others: its bar is cut at so many times the longest of theirs."""
_GUTTER = 23


def iterations(study: Study, console: Console, options: ConsoleOptions) -> tuple[Text, RenderResult]:
    """One bar per strategy on one scale: what the slowest rank's iteration is spent on."""
    colour = console.color_system is not None
    times = {name: study.strategies[name].result.iteration_s for name in STRATEGIES}
    scale = min(max(times.values()), _CUT * max(time for name, time in times.items() if name != "sc"))
    title = Text.assemble(("Iteration", "bold"), f", exposed time of each phase; the whole width is {step_time(scale)}")

    def lines() -> Iterator[Text]:
        for name in STRATEGIES:
            phases = study.strategies[name].result.phases
            parts = [(phase, phases[phase]) for phase in PHASES if phases.get(phase)]
            drawn = stacked(parts, scale, options.max_width - _GUTTER - 2, PHASES, colour=colour)
            if times[name] > scale * 1.001:
                drawn.append(" >" if options.ascii_only else " ▶", style="bold")
            yield Text.assemble("  ", f"{name:<10} {step_time(times[name]):>9} ", drawn)

    return title, lines()


def streams(study: Study, console: Console, options: ConsoleOptions) -> tuple[Text, RenderResult]:
    """What the planned strategy's slowest rank does on each stream: the whole iteration, then its end enlarged."""
    result = study.planned.result
    events = [event for event in result.events if event.rank == result.slowest_rank]
    colour = console.color_system is not None
    width = options.max_width - _GUTTER
    begin = min((event.start_s for event in events if event.phase == "norm_clip"), default=0.0)
    end = max(event.end_s for event in events)
    title = Text.assemble(("Timeline", "bold"), f" of {study.strategy} on its slowest rank, {result.slowest_rank}")

    def lines() -> Iterator[Text]:
        for label, start in (("iteration", 0.0), ("its end", begin)):
            seen = [event for event in events if event.end_s > start]
            for stream, name in STREAMS.items():
                lane = [event for event in seen if event.stream == stream]
                if not lane or (stream == "exchange" and start == 0):
                    continue
                head = f"{label:<10}" if stream == "compute" else " " * 10
                drawn = _lane(lane, start, end, width, colour=colour, ascii_only=options.ascii_only)
                yield Text.assemble("  ", (head, "bold"), f"{name[:10]:<10} ", drawn)
            yield _axis(start, end, width)
        results = [compared.result for compared in study.strategies.values()]
        phases = {phase for result in results for phase, seconds in result.phases.items() if seconds}
        labels = [(phase, PHASES[phase].name) for phase in PHASES if phase in phases]
        yield from legend(labels, PHASES, options.max_width, colour=colour)

    return title, lines()


def _lane(
    events: Sequence[SimulatedEvent], start: float, end: float, width: int, *, colour: bool, ascii_only: bool
) -> Text:
    """A character for each `width`-th of the time: the phase that fills most of it, faint if less than half."""
    drawn = Text(no_wrap=True)
    step = (end - start) / width
    first = 0
    ordered = sorted(events, key=lambda event: event.start_s)
    for column in range(width):
        left, right = start + column * step, start + (column + 1) * step
        while first < len(ordered) and ordered[first].end_s <= left:
            first += 1
        share: dict[str, float] = {}
        for event in ordered[first:]:
            if event.start_s >= right:
                break
            covered = min(event.end_s, right) - max(event.start_s, left)
            share[event.phase] = share.get(event.phase, 0.0) + covered
        phase = max(share, key=lambda name: share[name], default=None)
        if phase is None:
            drawn.append("." if ascii_only else "·", style="dim")
            continue
        ink, faint = PHASES[phase], sum(share.values()) < step / 2
        if colour:
            drawn.append("▒" if faint else "█", style=ink.style)
        else:
            drawn.append(ink.letter.lower() if faint else ink.letter)
    return drawn


def _axis(start: float, end: float, width: int) -> Text:
    left, right = step_time(start) if start else "0", step_time(end)
    middle = f"{step_time(end - start)} shown"
    line = f"{left}{middle:^{max(0, width - len(left) - len(right))}}{right}"
    return Text(" " * _GUTTER + line[:width], style="dim")
