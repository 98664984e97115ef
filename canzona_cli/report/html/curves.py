"""Curves over steps: lines that keep their width on any screen, text that keeps its size, values under the pointer."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.report.html.elements import Html, joined, percent, tag
from canzona_cli.run.words import number

_WIDE = 1000
"""Units of the drawing from left to right; it is stretched to the width there is."""
_MOST_POINTS = 600
"""Of a curve. More of them are drawn as the lowest and the highest of each stretch, so that no spike is lost."""
COLOURS = 8
"""There are classes for as many curves; further ones repeat them, dashed."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Finite values in the order of their steps."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """Whether there are so few that each is marked."""
    dashed: bool = False
    """Whether it is the prediction beside the curve before it, whose colour it has."""
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
    said = f"{title}: {_said(drawn, show)}"
    picture = tag("svg", *lines, stretched, cursor, class_="plot", height=height + 26, role="img", aria_label=said)
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
    rows = [
        tag(
            "tr",
            tag("th", _step(step), scope="row"),
            *(tag("td", show(own[step]) if step in own else "") for own in values),
        )
        for step in dict.fromkeys(steps if len(steps) <= most else some)
    ]
    head = tag("tr", tag("th", x, scope="col"), *(tag("th", curve.name, scope="col") for curve in curves))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretches = _MOST_POINTS // 2
    found: list[tuple[float, float]] = []
    for place in range(stretches):
        some = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        found += sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})
    return [points[0], *(point for point in found if points[0][0] < point[0] < points[-1][0]), points[-1]]


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
        again = curve.dashed or place >= COLOURS
        looks.append(f"c{place % COLOURS}{' again' if again else ''}")
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
    """What a picture shows, for who does not see it."""
    return "; ".join(
        f"{curve.name} from {show(curve.points[0][1])} at {_step(curve.points[0][0])} to "
        f"{show(curve.points[-1][1])} at {_step(curve.points[-1][0])}"
        for curve in curves
    )


def side_by_side(*figures: Html) -> Html:
    """Small pictures, as many in a row as there is room for."""
    shown = [figure for figure in figures if figure]
    return tag("div", joined(shown), class_="grid-of-charts") if shown else Html()
