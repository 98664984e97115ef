"""What `canzona plan` draws in text: the load of every rank, memory, whole iterations, and the timeline of the plan."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from canzona_cli.planner.memory import GIB
from canzona_cli.report.charts import heat_map, legend, owners_a_column, stacked
from canzona_cli.report.header import rank_word
from canzona_cli.report.page import Screen, Wrapped, headed
from canzona_cli.run.phases import PHASES, STREAMS, Ink
from canzona_cli.run.prediction import SimulatedEvent
from canzona_cli.run.words import size, step_time
from canzona_cli.simulate.study import STRATEGIES, Study

MEMORY = {
    name: Ink(letter=letter, style=style, colour=colour)
    for name, letter, style, colour in (
        ("weights", "W", "dodger_blue2", "#4c72b0"),
        ("gradients", "G", "sky_blue2", "#8fb4e3"),
        ("padding", "P", "red3", "#c44e52"),
        ("masters", "M", "green3", "#3a9d5d"),
        ("matrix_state", "S", "pale_green1", "#86c58e"),
        ("adamw_state", "A", "gold3", "#e6b422"),
        ("optimizer", "O", "green3", "#3a9d5d"),
        ("activations", "C", "medium_purple2", "#8b7bc8"),
        ("logits", "L", "plum2", "#c7a3dd"),
        ("workspace", "K", "grey62", "#8c8c8c"),
        ("exchange", "X", "indian_red1", "#dd7d6b"),
    )
}
"""The parts of a rank's memory, in the order in which they are drawn. Without a plan the optimizer's are one."""
CUT = 1.6
"""sc can take several times as long as the others: its bar is cut at this many times the longest of theirs."""
_GUTTER = 23
_GAP = 2


def load_map(study: Study, screen: Screen) -> Iterator[Wrapped | Text]:
    """Update time by rank: a row for each host, a column for each owner, the strategies side by side."""
    mesh = study.plan.subject.layout
    shown = [(name, study.strategies[name].loads) for name in study.mapped]
    maps = [(name, loads) for name, loads in shown if loads is not None]
    width = (screen.width - 2 - _GAP * (len(maps) - 1)) // len(maps)
    width = min(width, max(4 * mesh.owners, 24))
    together = owners_a_column(mesh.owners, width)
    several = f" (of up to {together} owners a column)" if together > 1 else ""
    stage = f"; pipeline stage {study.balance.slowest.stage}" if mesh.pp > 1 else ""
    yield headed(
        "Update time of every rank",
        f": columns are owners (DP 0 to {mesh.owners - 1}), rows hosts (TP 0 to {mesh.tp - 1}), "
        f"a full block is the slowest{several}{stage}",
    )
    blocks = [
        [
            Text(f"{name} {max(loads) * len(loads) / sum(loads):.2f}", style="bold"),
            Text(f"slowest {step_time(max(loads))}", style="dim"),
            *heat_map(loads, mesh.tp, width),
        ]
        for name, loads in maps
    ]
    for row in zip(*blocks, strict=True):
        line = Text("  ", no_wrap=True)
        for cell in row:
            cell.truncate(width, pad=True)
            line.append_text(cell).append(" " * _GAP)
        line.rstrip()
        yield line


def memory(study: Study, screen: Screen) -> Iterator[Wrapped | Text]:
    """One bar: what fills the memory of the rank that needs most, and what stays free."""
    found, mesh = study.memory, study.plan.subject.layout
    unit = rank_word(study.config.cluster.device)
    free = max(found.capacity - found.total, 0)
    yield headed(
        "Memory",
        f" of the fullest {unit}, {found.worst.describe(mesh)}: {found.total / GIB:.1f} of "
        f"{found.capacity / GIB:.1f} GiB, {free / GIB:.1f} free",
    )
    parts = [(name, float(found.parts[name])) for name in MEMORY if found.parts.get(name)]
    width = screen.width - 4
    drawn = stacked(parts, max(found.capacity, found.total), width, MEMORY, colour=screen.colour)
    drawn.append("·" * (width - drawn.cell_len), style="dim")
    yield Text.assemble("  ", drawn)
    labels = [(name, f"{name.replace('_', ' ')} {_gib(amount)}") for name, amount in parts]
    yield from legend(labels, MEMORY, screen.width, colour=screen.colour)


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 20 else size(amount)


def iterations(study: Study, screen: Screen) -> Iterator[Wrapped | Text]:
    """One bar per strategy on one scale: what the slowest rank's iteration is spent on."""
    times = {name: study.strategies[name].result.iteration_s for name in STRATEGIES}
    scale = min(max(times.values()), CUT * max(time for name, time in times.items() if name != "sc"))
    yield headed("Iteration", f", exposed time of each phase; the full width is {step_time(scale)}")
    for name in STRATEGIES:
        phases = study.strategies[name].result.phases
        parts = [(phase, phases[phase]) for phase in PHASES if phases.get(phase)]
        drawn = stacked(parts, scale, screen.width - _GUTTER - 2, PHASES, colour=screen.colour)
        if times[name] > scale * 1.001:
            drawn.append(" ▶", style="bold")
        yield Text.assemble("  ", f"{name:<10} {step_time(times[name]):>9} ", drawn)


def streams(study: Study, screen: Screen) -> Iterator[Wrapped | Text]:
    """What the planned strategy's slowest rank does on each stream: the whole iteration, then its end enlarged."""
    result = study.planned.result
    events = [event for event in result.events if event.rank == result.slowest_rank]
    width = screen.width - _GUTTER
    begin = min((event.start_s for event in events if event.phase == "norm_clip"), default=0.0)
    end = max(event.end_s for event in events)
    yield headed("Timeline", f" of {study.strategy} on its slowest rank, {result.slowest_rank}")
    for label, start in (("iteration", 0.0), ("its end", begin)):
        seen = [event for event in events if event.end_s > start]
        for stream, name in STREAMS.items():
            lane = [event for event in seen if event.stream == stream]
            if not lane or (stream == "exchange" and start == 0):
                continue
            head = f"{label:<10}" if stream == "compute" else " " * 10
            yield Text.assemble("  ", (head, "bold"), f"{name[:10]:<10} ", _lane(lane, start, end, width, screen))
        yield _axis(start, end, width)
    results = [compared.result for compared in study.strategies.values()]
    phases = {phase for result in results for phase, seconds in result.phases.items() if seconds}
    labels = [(phase, look.name) for phase, look in PHASES.items() if phase in phases]
    yield from legend(labels, PHASES, screen.width, colour=screen.colour)


def _lane(events: Sequence[SimulatedEvent], start: float, end: float, width: int, screen: Screen) -> Text:
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
            drawn.append("·", style="dim")
            continue
        look, faint = PHASES[phase], sum(share.values()) < step / 2
        if screen.colour:
            drawn.append("▒" if faint else "█", style=look.style)
        else:
            drawn.append(look.letter.lower() if faint else look.letter)
    return drawn


def _axis(start: float, end: float, width: int) -> Text:
    left, right = step_time(start) if start else "0", step_time(end)
    middle = f"{step_time(end - start)} shown"
    line = f"{left}{middle:^{max(0, width - len(left) - len(right))}}{right}"
    return Text(" " * _GUTTER + line[:width], style="dim")
