"""The charts of pages as SVG: curves, bars of parts, lanes of time, and maps of the load of every rank.

Lines keep their width on any screen and text keeps its size; a pointed-at part says its value.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.report.charts import HEAT_LIMITS, MEMORY, heat_level
from canzona_cli.report.html.document import Html, folded, joined, percent, tag
from canzona_cli.report.html.views import table_html
from canzona_cli.report.tables import GroupedTable, column
from canzona_cli.run.phases import PHASES, Interval
from canzona_cli.run.words import milliseconds, number, step_time

_WIDE = 1000
"""Units of the drawing from left to right; it is stretched to the width there is."""
_MOST_POINTS = 600
"""The most points of a curve. More are drawn as the lowest and highest of each stretch,
so that no spike is lost."""
CURVE_COLOURS = 8
"""There are classes for as many curves; further ones repeat them, dashed."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Finite values in the order of their steps."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """True where there are so few points that each is marked."""
    dashed: bool = False
    """True for the prediction beside the curve before it, whose colour it has."""
    hollow: Collection[float] = ()
    """The steps whose dots are not filled."""


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    height: int = 220,
    axes: Literal["linear", "log x", "log"] = "linear",
    show: Callable[[float], str] = lambda value: number(value, ".4g"),
    x: str = "step",
) -> Html:
    """Curves over one axis of steps, with a legend where there are several.

    Args:
        height: pixels of the plot.
        axes: which of the two are logarithmic; every step of a logarithmic axis is written.
        show: a value as it is written.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return Html()
    every = axes != "linear"
    scale: Callable[[float], float] = math.log2 if every else float
    rise: Callable[[float], float] = math.log10 if axes == "log" else float
    steps = [step for curve in drawn for step, _ in curve.points]
    values = [value for curve in drawn for _, value in curve.points]
    left, right = scale(min(steps)), scale(max(steps))
    low, high, ticks = (_log_axis if axes == "log" else _axis)(min(values), max(values))

    def across(step: float) -> float:
        return (scale(step) - left) / (right - left) if right > left else 0.5

    def down(value: float) -> float:
        return height * (rise(high) - rise(value)) / (rise(high) - rise(low))

    lines: list[Html] = []
    for tick in ticks:
        y = f"{down(tick):.1f}"
        lines.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        lines.append(tag("text", show(tick), x="-8", y=y, class_="tick value"))
    for step in dict.fromkeys(_steps(sorted(set(steps)), every=every)):
        place = across(step)
        anchor = "begin" if place < 0.02 else "end" if place > 0.98 else None
        lines.append(
            tag("text", _step(step), x=percent(place), y=height + 18, class_=f"tick {anchor}" if anchor else "tick")
        )
    paths: list[Html] = []
    shown: list[dict[str, object]] = []
    looks = _looks(drawn)
    for curve, look in zip(drawn, looks, strict=True):
        few = _thinned(curve.points)
        spots = [(round(_WIDE * across(step), 1), round(down(value), 1)) for step, value in few]
        path = "M" + "L".join(f"{a},{b}" for a, b in spots)
        paths.append(tag("path", d=path, class_=f"curve {look}"))
        if curve.dots or len(few) == 1:
            for (a, b), (step, _) in zip(spots, few, strict=True):
                dot = f"dot {look}{' hollow' if step in curve.hollow else ''}"
                lines.append(tag("circle", cx=percent(a / _WIDE), cy=b, r=3, class_=dot))
        shown.append(
            {"name": curve.name, "points": [[a, s, show(v)] for (a, _), (s, v) in zip(spots, few, strict=True)]}
        )
    stretched = tag(
        "svg", *paths, viewBox=f"0 0 {_WIDE} {height}", preserveAspectRatio="none", width="100%", height=height
    )
    cursor = tag("line", y1="0", y2=height, x1="0", x2="0", class_="cursor")
    description = f"{title}: {_said(drawn, show)}"
    picture = tag(
        "svg", *lines, stretched, cursor, class_="plot", height=height + 26, role="img", aria_label=description
    )
    legend = (
        tag("span", tag("span", class_=f"key {look}"), curve.name) for curve, look in zip(drawn, looks, strict=True)
    )
    caption = tag("figcaption", tag("b", title), *(legend if len(drawn) > 1 else ()), tag("output", class_="readout"))
    return tag("figure", caption, picture, class_="chart", data_curves=json.dumps(shown), data_x=x)


def curve_table(curves: Sequence[Curve], *, show: Callable[[float], str], x: str = "step", most: int = 25) -> Html:
    """The numbers of a picture: steps down, curves across, at most `most` rows spread over all."""
    steps = sorted({step for curve in curves for step, _ in curve.points})
    some = [steps[round(place * (len(steps) - 1) / max(1, most - 1))] for place in range(most)] if steps else []
    values = [dict(curve.points) for curve in curves]
    shown = list(dict.fromkeys(steps if len(steps) <= most else some))
    groups = [
        column(curve.name, [show(points[step]) if step in points else "" for step in shown])
        for curve, points in zip(curves, values, strict=True)
    ]
    return table_html(GroupedTable(head=x, labels=list(map(_step, shown)), groups=groups))


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretches = _MOST_POINTS // 2
    points_kept: list[tuple[float, float]] = []
    for place in range(stretches):
        some = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        points_kept += sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})
    return [points[0], *(point for point in points_kept if points[0][0] < point[0] < points[-1][0]), points[-1]]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Round bounds around the values, and the round numbers to write between them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return first * step, last * step, [count * step for count in range(first, last + 1)]


def _log_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The powers of ten, their doubles and halves between which positive values lie, and those to write."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max((tick for tick in ticks if tick <= low), default=ticks[0])
    last = min((tick for tick in ticks if tick >= high and tick > first), default=10 * ticks[-3])
    between = [tick for tick in ticks if first <= tick <= last]
    return first, last, between if len(between) < 8 else [t for t in between if f"{t:e}"[0] == "1"]


def _looks(curves: Sequence[Curve]) -> list[str]:
    """Each curve's classes: a colour of its own, or for a prediction that of the curve before it."""
    looks: list[str] = []
    place = -1
    for curve in curves:
        place += not curve.dashed or not looks
        again = curve.dashed or place >= CURVE_COLOURS
        looks.append(f"c{place % CURVE_COLOURS}{' again' if again else ''}")
    return looks


def _step(step: float) -> str:
    return f"{step:,.0f}" if step == round(step) else f"{step:g}"


def _steps(steps: Sequence[float], *, every: bool) -> list[float]:
    """Those written below the axis: the first, the last, and round ones between them; or each."""
    if every or len(steps) < 3:
        return list(steps)
    first, last = steps[0], steps[-1]
    _, _, ticks = _axis(first, last)
    room = (last - first) / 8
    return [first, *(tick for tick in ticks if first + room < tick < last - room), last]


def _said(curves: Sequence[Curve], show: Callable[[float], str]) -> str:
    """Describes a picture in words, for readers who do not see it."""
    return "; ".join(
        f"{curve.name} from {show(curve.points[0][1])} at {_step(curve.points[0][0])} to "
        f"{show(curve.points[-1][1])} at {_step(curve.points[-1][0])}"
        for curve in curves
    )


def side_by_side(*figures: Html) -> Html:
    """Small pictures, as many in a row as there is room for."""
    shown = [figure for figure in figures if figure]
    return tag("div", joined(shown), class_="grid-of-charts") if shown else Html()


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
    """The full length of the bar; the rest is drawn empty up to there."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The words and the colour of a part."""

    name: str
    colour: str
    """A class of the page's style."""


PHASE_PARTS: Mapping[str, Part] = {name: Part(name=look.name, colour=f"p-{name}") for name, look in PHASES.items()}
MEMORY_PARTS: Mapping[str, Part] = {
    **{name: Part(name=name.replace("_", " "), colour=f"m-{name}") for name in MEMORY},
    "measured": Part(name="measured peak", colour="m-measured"),
}


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
            description = f"{looks[name].name}: {show(amount)}"
            here, width = percent(at / scale), percent(amount / scale)
            rects.append(
                tag(
                    "rect",
                    tag("title", description),
                    x=here,
                    y="0",
                    width=width,
                    height="100%",
                    class_=looks[name].colour,
                )
            )
            at += amount
    description = f"{row.label}: {row.value}"
    yield tag("span", row.label, class_="bar-label")
    yield tag("svg", *rects, class_="bar faint" if row.faint else "bar", role="img", aria_label=description)
    yield tag("span", row.value, class_="bar-value")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The events on one line, in seconds from the left end; names are phases or anything else."""

    label: str
    intervals: Sequence[Interval]
    begins: bool = False
    """True where another rank begins with it."""


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
    """Joins intervals to as many as a screen can show: equal neighbours are joined,
    the shortest are left out."""
    finest = end_s / _FINEST
    last: Interval | None = None
    for one in sorted(intervals, key=lambda interval: interval.start_s):
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


_MOST_WRITTEN = 16
"""Owners up to which each cell has its number."""


@dataclass(frozen=True, kw_only=True)
class LoadMap:
    """One map."""

    title: str
    loads: Sequence[float]
    """Seconds by cell, `owner * hosts + host`."""


def load_maps(maps: Sequence[LoadMap], *, hosts: int) -> Html:
    """Maps beside each other: columns are owners (DP), rows hosts (TP).

    Args:
        hosts: TP ranks.
    """
    numbers = folded("the numbers", *(_numbers(one, hosts) for one in maps))
    return joined([tag("div", *(_map(one, hosts) for one in maps), *_legend(), class_="grid-of-charts"), numbers])


def _numbers(one: LoadMap, hosts: int) -> Html:
    """A row for each owner."""
    owners = range(len(one.loads) // hosts)
    groups = [
        column(f"TP {host}", [milliseconds(one.loads[owner * hosts + host]) for owner in owners])
        for host in range(hosts)
    ]
    return table_html(GroupedTable(head=f"{one.title}, ms", labels=[f"DP {owner}" for owner in owners], groups=groups))


def _map(one: LoadMap, hosts: int) -> Html:
    loads, owners = one.loads, len(one.loads) // hosts
    mean, top = sum(loads) / len(loads), max(loads)
    cells: list[Html] = []
    for cell, load in enumerate(loads):
        owner, host = divmod(cell, hosts)
        description = f"DP {owner}, TP {host}: {step_time(load)}" + (
            f", {load / mean:.2f} of the mean" if mean > 0 else ""
        )
        x, width = owner / owners, 1 / owners
        y, height = host * 26, 24
        cells.append(
            tag("rect", tag("title", description), x=percent(x), y=y, width=percent(width), height=height,
                class_=f"cell h{heat_level(load, mean)}")
        )  # fmt: skip
        if owners <= _MOST_WRITTEN:
            cells.append(tag("text", milliseconds(load), x=percent(x + width / 2), y=y + 16, class_="cell-text"))
    balance = f"max / mean {top / mean:.3f}, slowest {step_time(top)}" if mean > 0 else "no updates"
    description = f"{one.title}: {owners} owners x {hosts} hosts, {balance}"
    picture = tag("svg", *cells, class_="map", height=26 * hosts, role="img", aria_label=description)
    caption = tag("figcaption", tag("b", one.title), tag("span", balance))
    axis = tag("p", f"columns DP 0 to {owners - 1}, rows TP 0 to {hosts - 1}, ms", class_="note")
    return tag("figure", caption, picture, axis)


def _legend() -> list[Html]:
    words = (*(f"up to {limit:g}" for limit in HEAT_LIMITS), "above that, of the mean")
    keys = (tag("span", tag("span", class_=f"key h{level}"), text) for level, text in enumerate(words))
    return [tag("p", *keys, class_="keys wide")]
