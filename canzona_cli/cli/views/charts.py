"""Draws bars and sparklines with characters in a terminal; and bars, curves, timelines and load maps as SVG in an HTML
page.

In a terminal without colour, each part is drawn with its letter. In a page, lines and text have the same size on every
screen; a part shows its value while the pointer is over it, and the page's script shows a curve's values there.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from rich.text import Text

from canzona_cli.cli.views.page import NOTHING, Html, Picture, Screen, key, percent, tag
from canzona_cli.core.phases import PHASES, STREAMS, Ink, Interval
from canzona_cli.core.simulate.prediction import SimulatedEvent
from canzona_cli.records.breakdown import streams_of
from canzona_cli.records.statistics import load_balance
from canzona_cli.records.words import clean, milliseconds, number, step_time

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_GUTTER: Final = 23
"""The number of characters in front of a bar or a lane."""
MEMORY: Final[Mapping[str, Ink]] = MappingProxyType(
    {
        name: Ink(letter=letter, style=style, colour=colour, css=f"m-{name}", name=name.replace("_", " "))
        for name, letter, style, colour in (
            ("weights", "W", "dodger_blue2", "#4c72b0"),
            ("gradients", "G", "sky_blue2", "#8fb4e3"),
            ("padding", "P", "red3", "#c44e52"),
            ("masters", "M", "green3", "#3a9d5d"),
            ("matrix_state", "S", "pale_green1", "#86c58e"),
            ("adamw_state", "A", "gold3", "#e6b422"),
            ("average", "E", "yellow3", "#b8a13a"),
            ("optimizer", "O", "green3", "#3a9d5d"),
            ("activations", "C", "medium_purple2", "#8b7bc8"),
            ("logits", "L", "plum2", "#c7a3dd"),
            ("workspace", "K", "grey62", "#8c8c8c"),
            ("exchange", "X", "indian_red1", "#dd7d6b"),
            ("measured_peak", "T", "grey35", "#48606e"),
        )
    }
)
"""The parts of a rank's memory in drawing order. Without a plan, `optimizer` is all memory of the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar."""

    label: str
    parts: Sequence[tuple[str, float]]
    """The parts as (name, amount), from left to right."""
    value: str
    """The total amount, as text."""
    faint: bool = False
    """True for a prediction, drawn fainter than the measurement next to it (in pages only)."""
    limit: float | None = None
    """The amount up to which the bar is extended with empty space; None for no empty space."""


@dataclass(frozen=True, kw_only=True)
class Bars(Picture):
    """A column of bars on one scale, with a legend."""

    rows: Sequence[Bar]
    scale: float
    """The amount that the full width represents."""
    inks: Mapping[str, Ink] = PHASES
    show: Callable[[float], str] = step_time
    """Formats an amount."""
    amounts: bool = False
    """True if the legend also shows the amount of each part of the first bar."""

    def parts(self, screen: Screen) -> Iterator[Text]:
        width = screen.width - _GUTTER - 2
        for row in self.rows:
            drawn = stacked_bar(row.parts, self.scale, width, self.inks, colour=screen.colour)
            if row.limit is not None:
                drawn.append("·" * (round(width * row.limit / self.scale) - drawn.cell_len), style="dim")
            yield Text.assemble("  ", f"{clean(row.label):<10} {row.value:>9} ", drawn)
        yield from legend_lines(self._legend(), self.inks, screen.width, colour=screen.colour)

    def html(self) -> Html:
        shown = [tag("div", *self._row_html(row), class_="bar-row") for row in self.rows]
        keys = (key(self.inks[name].css, words) for name, words in self._legend())
        return tag("figure", *shown, tag("figcaption", *keys, class_="keys"), class_="bars")

    def _legend(self) -> list[tuple[str, str]]:
        """Returns the name and the legend text of each part that is drawn."""
        drawn_parts = {name for row in self.rows for name, amount in row.parts if amount > 0}
        first_amounts = dict(self.rows[0].parts)
        legend = []
        for name, ink in self.inks.items():
            if name in drawn_parts:
                amount = f" {self.show(first_amounts[name])}" if self.amounts and name in first_amounts else ""
                legend.append((name, ink.name + amount))
        return legend

    def _row_html(self, row: Bar) -> Iterator[Html]:
        rects: list[Html] = []
        if row.limit is not None:
            rects.append(_bar_part(0, row.limit / self.scale, "empty"))
        position = 0.0
        for name, amount in row.parts:
            if amount > 0:
                words = f"{self.inks[name].name}: {self.show(amount)}"
                start, length = position / self.scale, amount / self.scale
                rects.append(_bar_part(start, length, self.inks[name].css, words))
                position += amount
        yield tag("span", row.label, class_="bar-label")
        look = "bar faint" if row.faint else "bar"
        yield tag("svg", *rects, class_=look, role="img", aria_label=f"{row.label}: {row.value}")
        yield tag("span", row.value, class_="bar-value")


def phase_bar(label: str, phases: Mapping[str, float], seconds: float, *, faint: bool = False) -> Bar:
    """Returns a bar of a step's phases, labelled with the step's `seconds`."""
    parts = [(name, phases.get(name, 0.0)) for name in PHASES]
    return Bar(label=label, parts=parts, value=step_time(seconds), faint=faint)


def step_bars(rows: Sequence[Bar]) -> Bars:
    """Returns the bars on one scale; the longest bar has the full width."""
    return Bars(rows=rows, scale=max(sum(seconds for _, seconds in row.parts) for row in rows))


def stacked_bar(
    parts: Sequence[tuple[str, float]], total: float, width: int, inks: Mapping[str, Ink], *, colour: bool
) -> Text:
    """Draws a bar in which `width` characters represent `total`. Parts smaller than half a character may be
    invisible.

    Args:
        parts: (name, amount) from left to right.
        inks: the look of each part, by name.
    """
    drawn = Text(no_wrap=True)
    done, drawn_width = 0.0, 0
    for name, amount in parts:
        done += amount
        end = min(width, round(done / total * width)) if total > 0 else 0
        if end > drawn_width:
            mark, style = ("█", inks[name].style) if colour else (inks[name].letter, "")
            drawn.append(mark * (end - drawn_width), style=style)
            drawn_width = end
    return drawn


def legend_lines(
    parts: Sequence[tuple[str, str]], inks: Mapping[str, Ink], width: int, *, colour: bool
) -> Iterator[Text]:
    """Yields the lines of a legend, such as `█ weights 7.6 █ gradients 15.2`, or with letters instead of
    colours. Lines break only between parts.

    Args:
        parts: (name, text) pairs; the text follows the mark of the part.
        width: the most characters per line.
    """
    line = Text()
    for name, label in parts:
        ink = inks[name]
        mark = ("█", ink.style) if colour else (ink.letter, "bold")
        entry = Text.assemble("  ", mark, f" {label}", no_wrap=True)
        if line and line.cell_len + entry.cell_len > width:
            yield line
            line = Text()
        line.append_text(entry)
    yield line


def _bar_part(start: float, length: float, css: str, words: str | None = None) -> Html:
    """Returns a rectangle of a bar or a lane; a browser shows `words` when the pointer is over it."""
    title = () if words is None else (tag("title", words),)
    return tag("rect", *title, x=percent(start), y="0", width=percent(length), height="100%", class_=css)


_TIME_SLICES: Final = 1500
"""The number of time slices that a page's lane can show; shorter gaps within a phase are closed."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One line of a timeline; the names of its intervals are usually phases."""

    label: str
    intervals: Sequence[Interval]
    begins: bool = False
    """True if this is the first lane of a rank."""


@dataclass(frozen=True, kw_only=True)
class Lanes(Picture):
    """Lanes on one time axis, in HTML pages."""

    rows: Sequence[Lane]
    start_s: float = 0.0
    end_s: float

    def html(self) -> Html:
        shown = []
        for row in self.rows:
            rects = map(self._interval_html, _visible(row.intervals, self.start_s, self.end_s))
            drawn = tag("svg", *rects, class_="lane", role="img", aria_label=row.label)
            look = "lane-row new" if row.begins else "lane-row"
            shown.append(tag("div", tag("span", row.label, class_="bar-label"), drawn, class_=look))
        drawn_names = {part.name for row in self.rows for part in row.intervals if part.end_s > self.start_s}
        keys = (key(ink.css, ink.name) for name, ink in PHASES.items() if name in drawn_names)
        ends = tag("span", tag("span", "0"), tag("span", step_time(self.end_s - self.start_s)))
        axis = tag("div", tag("span"), ends, class_="lane-row axis")
        return tag("figure", *shown, axis, tag("figcaption", *keys, class_="keys"), class_="bars")

    def _interval_html(self, interval: Interval) -> Html:
        ink, shown_s = PHASES.get(interval.name), self.end_s - self.start_s
        start, length = interval.start_s - self.start_s, interval.end_s - interval.start_s
        words = f"{interval.name if ink is None else ink.name}: {step_time(length)} from {step_time(start)}"
        return _bar_part(start / shown_s, length / shown_s, "p-other" if ink is None else ink.css, words)


def planned_lanes(events: Sequence[SimulatedEvent]) -> list[Lane]:
    """Returns a lane for each stream of each simulated rank."""
    return [
        Lane(label=f"rank {rank}: {STREAMS[stream]}", intervals=intervals, begins=stream == "compute")
        for rank, stream, intervals in streams_of(events)
    ]


def _visible(intervals: Iterable[Interval], start_s: float, end_s: float) -> Iterator[Interval]:
    """Yields the visible intervals from start to end: joins close neighbours of the same name, and drops an
    interval that is too short to see if it closely follows another."""
    finest_s = (end_s - start_s) / _TIME_SLICES
    joined: Interval | None = None
    for interval in sorted(intervals, key=lambda part: part.start_s):
        begin, end = max(start_s, interval.start_s), min(end_s, interval.end_s)
        if end <= begin:
            continue
        if joined is not None and joined.name == interval.name and begin - joined.end_s <= finest_s:
            joined = Interval(name=joined.name, start_s=joined.start_s, end_s=max(end, joined.end_s))
            continue
        if joined is not None:
            if max(end - begin, begin - joined.end_s) < finest_s:
                continue
            yield joined
        joined = Interval(name=interval.name, start_s=begin, end_s=end)
    if joined is not None:
        yield joined


HEAT_LIMITS: Final = (0.5, 0.9, 1.1, 1.5)
"""The limits between the colours of a load map, as multiples of the mean load."""
_MOST_LABELLED_OWNERS: Final = 16
"""The largest number of owners with which an HTML page writes the times into the cells of a map."""


@dataclass(frozen=True, kw_only=True)
class LoadMaps(Picture):
    """Maps of the measured or planned load of every rank, next to each other, in HTML pages: columns are
    owners (DP), rows are hosts (TP)."""

    maps: Mapping[str, Sequence[float]]
    """The seconds of each cell, by a title such as the name of a strategy. The cell of an owner and a host has
    the index `owner * hosts + host`."""
    hosts: int
    """The number of TP ranks."""

    @property
    def owners(self) -> int:
        return len(next(iter(self.maps.values()))) // self.hosts

    @property
    def _axes(self) -> str:
        return f"columns: owners (DP 0 to {self.owners - 1}), rows: hosts (TP 0 to {self.hosts - 1})"

    def html(self) -> Html:
        words = (*(f"up to {limit:g}" for limit in HEAT_LIMITS), "above that, times the mean")
        keys = (key(f"h{level}", text) for level, text in enumerate(words))
        legend = tag("p", *keys, class_="keys wide")
        drawn = (self._map_html(title, loads) for title, loads in self.maps.items())
        return tag("div", *drawn, legend, class_="grid-of-charts")

    def _map_html(self, title: str, loads: Sequence[float]) -> Html:
        cells: list[Html] = []
        mean = sum(loads) / len(loads)
        width = 1 / self.owners
        for cell, load in enumerate(loads):
            owner, host = divmod(cell, self.hosts)
            ratio = f", {load / mean:.2f} of the mean" if mean > 0 else ""
            words = tag("title", f"DP {owner}, TP {host}: {step_time(load)}{ratio}")
            look = f"cell h{heat_level(load, mean)}"
            position = {"x": percent(owner * width), "y": host * 26, "width": percent(width), "height": 24}
            cells.append(tag("rect", words, **position, class_=look))
            if self.owners <= _MOST_LABELLED_OWNERS:
                middle = {"x": percent((owner + 0.5) * width), "y": host * 26 + 16}
                cells.append(tag("text", milliseconds(load), **middle, class_="cell-text"))
        balance = "no updates"
        if any(loads):
            balance = f"max / mean {load_balance(loads):.3f}, slowest {step_time(max(loads))}"
        description = f"{title}: {self.owners} owners x {self.hosts} hosts, {balance}"
        picture = tag("svg", *cells, class_="map", height=26 * self.hosts, role="img", aria_label=description)
        caption = tag("figcaption", tag("b", title), tag("span", balance))
        return tag("figure", caption, picture, tag("p", f"{self._axes}, ms", class_="note"))


def heat_level(load: float, mean: float) -> int:
    """Returns a level from 0, far below the mean, to `len(HEAT_LIMITS)`, far above it."""
    ratio = load / mean if mean > 0 else 1.0
    return sum(ratio > limit for limit in HEAT_LIMITS)


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns a line of at most `width` block characters whose heights follow the values."""
    if not values or width < 1:
        return ""
    points = _resample(values, width)
    low, high = min(points), max(points)
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2] * len(points)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in points)


def _resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values, each the mean of its slice of `values`."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def progress_bar(fraction: float, width: int) -> Text:
    """Returns a bar of `width` characters that is filled up to the fraction, from 0 to 1."""
    done = round(width * fraction)
    filled = "━" * done if done in (0, width) else "━" * (done - 1) + "╸"
    return Text.assemble((filled, "green"), ("─" * (width - done), "bright_black"))


_DRAWING_WIDTH: Final = 1000
"""The width of the drawing in SVG units; browsers stretch the drawing to the width of the page."""
_MOST_POINTS: Final = 600
"""The most points of a curve. A longer curve is drawn with the lowest and highest point of each stretch, so
that spikes stay visible."""
_COLOURS: Final = 8
"""The number of colours; any further curves repeat them with dashed lines."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of finite values, in the order of their steps."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """True if each point is marked with a dot."""
    group: str = ""
    """The name that stands for several curves, which have one colour and one entry in the legend; empty for the curve's
    own name."""


def loss_curve(name: str, points: Sequence[tuple[int, float | None]]) -> Curve:
    """Returns a curve of the finite validation losses, with dots if there are fewer than 100."""
    finite = [(step, loss) for step, loss in points if loss is not None]
    return Curve(name=name, points=finite, dots=len(finite) < 100)


@dataclass(frozen=True, kw_only=True)
class Curves(Picture):
    """Curves over one x axis, in HTML pages."""

    title: str
    curves: Sequence[Curve]
    height: int = 220
    """The height of the plot in an HTML page, in pixels."""
    axes: Literal["linear", "log x"] = "linear"
    """`log x` for a logarithmic x axis, which has a label at every step."""
    show: Callable[[float], str] = lambda value: number(value, ".4g")
    """Formats a value."""
    x: str = "step"
    """The name of the x axis."""

    def html(self) -> Html:
        drawn = [curve for curve in self.curves if curve.points]
        return _Chart(self, drawn).html() if drawn else NOTHING


def side_by_side(*pictures: Picture) -> Html:
    """Returns small charts that fill rows of an HTML page."""
    shown = [drawn for picture in pictures if (drawn := picture.html())]
    return tag("div", *shown, class_="grid-of-charts") if shown else NOTHING


class _Chart:
    """The SVG of curves that have at least one point each."""

    def __init__(self, picture: Curves, curves: Sequence[Curve]) -> None:
        self._picture, self._curves = picture, curves
        self._labels_every_step = picture.axes != "linear"
        self._step_scale: Callable[[float], float] = math.log2 if self._labels_every_step else float
        self._steps = sorted({step for curve in curves for step, _ in curve.points})
        values = [value for curve in curves for _, value in curve.points]
        self._left, self._right = self._step_scale(self._steps[0]), self._step_scale(self._steps[-1])
        self._low, self._high, self._ticks = _axis(min(values), max(values))

    def html(self) -> Html:
        picture, looks, height = self._picture, self._looks(), self._picture.height
        curve_data: list[dict[str, object]] = []
        paths: list[Html] = []
        dots: list[Html] = []
        for curve, look in zip(self._curves, looks, strict=True):
            points = _thin_out(curve.points)
            positions = [(round(_DRAWING_WIDTH * self._x(step), 1), round(self._y(value), 1)) for step, value in points]
            paths.append(tag("path", d="M" + "L".join(f"{a},{b}" for a, b in positions), class_=f"curve {look}"))
            if curve.dots or len(points) == 1:
                for a, b in positions:
                    dots.append(tag("circle", cx=percent(a / _DRAWING_WIDTH), cy=b, r=3, class_=f"dot {look}"))
            texts = [[a, step, picture.show(value)] for (a, _), (step, value) in zip(positions, points, strict=True)]
            curve_data.append({"name": curve.name, "group": curve.group or curve.name, "points": texts})
        size = {"width": "100%", "height": height}
        stretched = tag("svg", *paths, viewBox=f"0 0 {_DRAWING_WIDTH} {height}", preserveAspectRatio="none", **size)
        cursor = tag("line", y1="0", y2=height, x1="0", x2="0", class_="cursor")
        accessibility = {"role": "img", "aria_label": f"{picture.title}: {self._description()}"}
        inside = (*self._axes(), *dots, stretched, cursor)
        drawing = tag("svg", *inside, class_="plot", height=height + 26, **accessibility)
        named = dict.fromkeys(
            key(look, curve.group or curve.name) for curve, look in zip(self._curves, looks, strict=True)
        )
        caption = (tag("b", picture.title), *(named if len(named) > 1 else ()))
        # Below the drawing, which must not move under the pointer when the text gets longer.
        parts = (tag("figcaption", *caption), drawing, tag("output", class_="readout"))
        return tag("figure", *parts, class_="chart", data_curves=json.dumps(curve_data), data_x=picture.x)

    def _x(self, step: float) -> float:
        """Returns the horizontal position of a step, from 0 (left) to 1 (right)."""
        left, right = self._left, self._right
        return (self._step_scale(step) - left) / (right - left) if right > left else 0.5

    def _y(self, value: float) -> float:
        """Returns the vertical position of a value, in pixels from the top."""
        return self._picture.height * (self._high - value) / (self._high - self._low)

    def _axes(self) -> Iterator[Html]:
        for tick in self._ticks:
            y = f"{self._y(tick):.1f}"
            yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
            text = self._picture.show(tick)
            text = text.rstrip("0").rstrip(".") if "." in text else text
            yield tag("text", text, x="-8", y=y, class_="tick value")
        for step in dict.fromkeys(self._written_steps()):
            x = self._x(step)
            css = "tick begin" if x < 0.02 else "tick end" if x > 0.98 else "tick"
            yield tag("text", _step(step), x=percent(x), y=self._picture.height + 18, class_=css)

    def _written_steps(self) -> list[float]:
        """Returns the steps that label the x axis: all of them on a logarithmic axis, otherwise the first,
        the last and round numbers between them."""
        if self._labels_every_step or len(self._steps) < 3:
            return self._steps
        first, last = self._steps[0], self._steps[-1]
        _, _, ticks = _axis(first, last)
        least_gap = (last - first) / 8
        return [first, *(tick for tick in ticks if first + least_gap < tick < last - least_gap), last]

    def _looks(self) -> list[str]:
        """Returns the CSS classes of each curve: one colour for each group."""
        groups = list(dict.fromkeys(curve.group or curve.name for curve in self._curves))
        places = (groups.index(curve.group or curve.name) for curve in self._curves)
        return [f"c{place % _COLOURS}{' again' if place >= _COLOURS else ''}" for place in places]

    def _description(self) -> str:
        """Returns a description of the chart for screen readers."""
        show = self._picture.show
        return "; ".join(
            f"{curve.name} from {show(curve.points[0][1])} at {_step(curve.points[0][0])} to "
            f"{show(curve.points[-1][1])} at {_step(curve.points[-1][0])}"
            for curve in self._curves
        )


def _thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns about `_MOST_POINTS` points or fewer: the lowest and the highest point of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretches = _MOST_POINTS // 2
    extremes: list[tuple[float, float]] = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        extremes += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [points[0], *(point for point in extremes if points[0][0] < point[0] < points[-1][0]), points[-1]]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Returns round bounds (low, high) around the values, and the round numbers that label an axis."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) / 2 or 1.0
        low, high = low - pad, high + pad
    least_step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least_step)
    first_tick, last_tick = math.floor(low / step), math.ceil(high / step)
    return first_tick * step, last_tick * step, [count * step for count in range(first_tick, last_tick + 1)]


def _step(step: float) -> str:
    return f"{step:,.0f}" if step == round(step) else f"{step:g}"
