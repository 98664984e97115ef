"""Bars made of parts on one scale, and what happened when on several lanes; pointed at, each part says its value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.report.html.elements import Html, percent, tag
from canzona_cli.report.plan_charts import MEMORY
from canzona_cli.run.phases import PHASES, Interval
from canzona_cli.run.words import step_time

_FINEST = 1500
"""Stretches that a lane is divided into; what is shorter joins its neighbour."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar."""

    label: str
    parts: Sequence[tuple[str, float]]
    """(name, amount) from left to right."""
    value: str
    """Written behind it."""
    faint: bool = False
    """Not measured, beside a measured one."""
    limit: float | None = None
    """What all of it would be; the rest of the bar is drawn empty up to there."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """How a part is written and drawn."""

    name: str
    colour: str
    """A class of the page's style."""


PHASE_PARTS: Mapping[str, Part] = {name: Part(name=look.name, colour=f"p-{name}") for name, look in PHASES.items()}
MEMORY_PARTS: Mapping[str, Part] = {
    **{name: Part(name=name.replace("_", " "), colour=f"m-{name}") for name in MEMORY},
    "measured": Part(name="measured peak", colour="m-measured"),
}
COLOURS: Mapping[str, str] = {
    **{PHASE_PARTS[name].colour: look.colour for name, look in PHASES.items()},
    **{MEMORY_PARTS[name].colour: ink.colour for name, ink in MEMORY.items()},
}
"""By class; the style sheet has a few more for the dark, and for greys."""


def bars(
    rows: Iterable[Bar], looks: Mapping[str, Part], *, scale: float, show: Callable[[float], str] = step_time
) -> Html:
    """Bars below one another; the full width is `scale`, and `show` writes an amount."""
    drawn = list(rows)
    seen = [name for name in looks if any(part == name and amount > 0 for row in drawn for part, amount in row.parts)]
    shown = [tag("div", *_row(row, looks, scale, show), class_="bar-row") for row in drawn]
    keys = (tag("span", tag("span", class_=f"key {looks[name].colour}"), looks[name].name) for name in seen)
    return tag("figure", *shown, tag("figcaption", *keys, class_="keys"), class_="bars")


def _row(row: Bar, looks: Mapping[str, Part], scale: float, show: Callable[[float], str]) -> Iterable[Html]:
    rects: list[Html] = []
    if row.limit is not None:
        rects.append(tag("rect", x="0", y="0", width=percent(row.limit / scale), height="100%", class_="empty"))
    at = 0.0
    for name, amount in row.parts:
        if amount > 0:
            said = f"{looks[name].name}: {show(amount)}"
            here, width = percent(at / scale), percent(amount / scale)
            rects.append(
                tag("rect", tag("title", said), x=here, y="0", width=width, height="100%", class_=looks[name].colour)
            )
            at += amount
    said = f"{row.label}: {row.value}"
    yield tag("span", row.label, class_="bar-label")
    yield tag("svg", *rects, class_="bar faint" if row.faint else "bar", role="img", aria_label=said)
    yield tag("span", row.value, class_="bar-value")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What happened on one line, seconds from the left end; names are phases or anything else."""

    label: str
    intervals: Sequence[Interval]
    begins: bool = False
    """Whether another rank begins with it."""


def lanes_chart(rows: Iterable[Lane], *, end_s: float) -> Html:
    """Lanes on one axis of time from 0 to `end_s`."""
    drawn = list(rows)
    shown = []
    for row in drawn:
        rects = [
            tag(
                "rect",
                tag("title", f"{_name(one.name)}: {step_time(one.end_s - one.start_s)} from {step_time(one.start_s)}"),
                x=percent(one.start_s / end_s),
                y="0",
                width=percent((one.end_s - one.start_s) / end_s),
                height="100%",
                class_=f"p-{one.name}" if one.name in PHASES else "p-other",
            )
            for one in _joined(row.intervals, end_s)
        ]
        lane = tag("svg", *rects, class_="lane", role="img", aria_label=row.label)
        shown.append(
            tag("div", tag("span", row.label, class_="bar-label"), lane, class_=f"lane-row{' new' * row.begins}")
        )
    seen = {one.name for row in drawn for one in row.intervals}
    keys = (tag("span", tag("span", class_=f"key p-{name}"), PHASES[name].name) for name in PHASES if name in seen)
    axis = tag("div", tag("span"), tag("span", tag("span", "0"), tag("span", step_time(end_s))), class_="lane-row axis")
    return tag("figure", *shown, axis, tag("figcaption", *keys, class_="keys"), class_="bars")


def _name(name: str) -> str:
    return PHASES[name].name if name in PHASES else name


def _joined(intervals: Iterable[Interval], end_s: float) -> Iterable[Interval]:
    """At most as many as a screen can show: what follows its like is one with it, and what is too short is left out."""
    finest = end_s / _FINEST
    last: Interval | None = None
    for one in sorted(intervals, key=lambda own: own.start_s):
        begin, end = max(0.0, one.start_s), min(end_s, one.end_s)
        if end <= begin:
            continue
        if last is not None and last.name == one.name and begin - last.end_s <= finest:
            last = Interval(name=last.name, start_s=last.start_s, end_s=max(end, last.end_s))
            continue
        if last is not None:
            if end - begin < finest and begin - last.end_s < finest:
                continue
            yield last
        last = Interval(name=one.name, start_s=begin, end_s=end)
    if last is not None:
        yield last
