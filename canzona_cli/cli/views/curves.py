"""Draws curves: with Braille dots in a terminal, and as SVG in an HTML page.

In a page, lines and text have the same size on every screen, and the page's script shows the values at the
pointer.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.text import Text

from canzona_cli.cli.views.charts import BLOCKS
from canzona_cli.cli.views.markup import NOTHING, Html, Picture, foldable, key, percent, table_html, tag
from canzona_cli.cli.views.page import Screen
from canzona_cli.cli.views.tables import GroupedTable, column
from canzona_cli.records.words import number

_BRAILLE: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits that set the 2 x 4 dots of a Unicode Braille character, by column and row."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns a line of at most `width` block characters whose heights follow the values."""
    if not values or width < 1:
        return ""
    blocks = BLOCKS[1:]
    points = _resample(values, width)
    low, high = min(points), max(points)
    if high <= low:
        return blocks[len(blocks) // 2] * len(points)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in points)


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


def line_chart(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draws (step, value) points as `height` rows of at most `width` characters: the curve with a labelled y
    axis, then the step axis.

    Args:
        points: finite values in step order; points in the same column of dots are averaged.
        width: the characters per row, including labels; below 20, nothing is drawn.
        height: the number of rows, including the step axis; below 3, nothing is drawn.
    """
    if not points or width < 20 or height < 3:
        return []
    low, high = min(v for _, v in points), max(v for _, v in points)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    rows = height - 1
    labels = [_axis_label(high - (high - low) * row / (rows - 1)) for row in range(rows)]
    gutter = max(map(len, labels)) + 2
    columns = width - gutter
    x_dots, y_dots = 2, 4
    heights = _dot_columns(points, columns * x_dots)
    grid = [[0] * columns for _ in range(rows)]
    scale = (rows * y_dots - 1) / (high - low)
    segments = list(itertools.pairwise(heights)) or [(heights[0], heights[0])]
    for (x0, v0), (x1, v1) in segments:
        y0, y1 = (round((high - v) * scale) for v in (v0, v1))
        for x, y in _segment(x0, y0, x1, y1):
            grid[y // y_dots][x // x_dots] |= _BRAILLE[x % x_dots][y % y_dots]
    lines = []
    for row, cells in enumerate(grid):
        # Every other row has a label, and so does the last.
        label = labels[row] if row % 2 == 0 or row == rows - 1 else ""
        drawn = "".join(chr(0x2800 + cell) if cell else " " for cell in cells)
        lines.append(f"{label:>{gutter - 2}} ┤{drawn}".rstrip())
    first_step, last_step = f"{points[0][0]:,.0f}", f"step {points[-1][0]:,.0f}"
    lines.append(f"{'':{gutter}}{first_step}{last_step:>{max(1, columns - len(first_step))}}"[:width])
    return lines


def _axis_label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _dot_columns(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[int, float]]:
    """Returns (column, mean value) pairs for the columns of dots that contain points. The axis is linear in
    steps."""
    first_step, last_step = points[0][0], points[-1][0]
    scale = (columns - 1) / (last_step - first_step) if last_step > first_step else 0.0
    bins: dict[int, list[float]] = {}
    for step, value in points:
        bins.setdefault(round((step - first_step) * scale), []).append(value)
    return [(column, math.fsum(values) / len(values)) for column, values in sorted(bins.items())]


def _segment(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    """Returns the dots of a straight line between two dots."""
    steps = max(abs(x1 - x0), abs(y1 - y0))
    if steps == 0:
        return [(x0, y0)]
    return [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)]


_DRAWING_WIDTH: Final = 1000
"""The width of the drawing in SVG units; browsers stretch the drawing to the width of the page."""
_MOST_POINTS: Final = 600
"""The most points of a curve. A longer curve is drawn with the lowest and highest point of each stretch, so
that spikes stay visible."""
_COLOURS: Final = 8
"""The number of colours; any further curves repeat them with dashed lines."""
_MOST_NUMBERS: Final = 25
"""The most rows of the table of numbers below a chart."""


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
    """Curves over one x axis; a terminal draws only the first."""

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
    rows: int = 9
    """The height in a terminal, in lines."""
    numbers: Callable[[float], str] | None = None
    """Formats a value in the table below the chart in an HTML page; None for no table."""

    def parts(self, screen: Screen) -> Iterator[Text]:
        points = self.curves[0].points
        for row in line_chart(points, min(screen.width, 100) - 4, self.rows) if len(points) > 1 else ():
            yield Text(f"  {row}", style="cyan", no_wrap=True)

    def html(self) -> Html:
        drawn = [curve for curve in self.curves if curve.points]
        if not drawn:
            return NOTHING
        chart = _Chart(self, drawn).html()
        if self.numbers is None:
            return chart
        return tag("div", chart, foldable("table of the numbers", self._table(drawn, self.numbers)))

    def _table(self, curves: Sequence[Curve], show: Callable[[float], str]) -> Html:
        """Returns a table of the curves' values: a column for each curve, a row for each of at most 25
        steps."""
        steps = sorted({step for curve in curves for step, _ in curve.points})
        if len(steps) > _MOST_NUMBERS:
            stride = (len(steps) - 1) / (_MOST_NUMBERS - 1)
            steps = [steps[round(index * stride)] for index in range(_MOST_NUMBERS)]
        groups = []
        for curve in curves:
            points = dict(curve.points)
            groups.append(column(curve.name, [show(points[step]) if step in points else "" for step in steps]))
        return table_html(GroupedTable(head=self.x, labels=list(map(_step, steps)), groups=groups))


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
