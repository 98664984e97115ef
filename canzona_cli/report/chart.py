"""A curve drawn in text: braille dots (2 x 4 a character) with axis labels, or asterisks where there is only ASCII."""

import itertools
import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def line_chart(
    points: Sequence[tuple[float, float]], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Draw (step, value) points as `height` rows of `width` characters: a labelled y axis, the curve, the step axis.

    Args:
        points: finite and in step order; those that fall into one column of dots are averaged.
        width: characters of a row, labels included; nothing is drawn below 20.
        height: rows, the step axis included; nothing is drawn below 3.
    """
    if not points or width < 20 or height < 3:
        return []
    low, high = min(v for _, v in points), max(v for _, v in points)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    rows = height - 1
    labels = [_label(high - (high - low) * row / (rows - 1)) for row in range(rows)]
    gutter = max(map(len, labels)) + 2
    columns = width - gutter
    x_dots, y_dots = (1, 1) if ascii_only else (2, 4)
    heights = _columns(points, columns * x_dots)
    grid = [[0] * columns for _ in range(rows)]
    scale = (rows * y_dots - 1) / (high - low)
    for (x0, v0), (x1, v1) in itertools.pairwise(heights) if len(heights) > 1 else [(heights[0], heights[0])]:
        y0, y1 = (round((high - v) * scale) for v in (v0, v1))
        for x, y in _segment(x0, y0, x1, y1):
            grid[y // y_dots][x // x_dots] |= _DOTS[x % x_dots][y % y_dots]
    axis = "|" if ascii_only else "┤"
    lines = []
    for row, cells in enumerate(grid):
        # A label on every other row is enough to read a value, and quieter.
        label = labels[row] if row % 2 == 0 or row == rows - 1 else ""
        drawn = "".join(
            (("*" if cell else " ") if ascii_only else chr(0x2800 + cell) if cell else " ") for cell in cells
        )
        lines.append(f"{label:>{gutter - 2}} {axis}{drawn}".rstrip())
    first, last = f"{points[0][0]:,.0f}", f"step {points[-1][0]:,.0f}"
    lines.append(f"{'':{gutter}}{first}{last:>{max(1, columns - len(first))}}"[:width])
    return lines


def _label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _columns(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[int, float]]:
    """(column, mean value) of the points in each column of dots; the axis runs linearly over steps."""
    first, last = points[0][0], points[-1][0]
    scale = (columns - 1) / (last - first) if last > first else 0.0
    bins: dict[int, list[float]] = {}
    for step, value in points:
        bins.setdefault(round((step - first) * scale), []).append(value)
    return [(column, math.fsum(values) / len(values)) for column, values in sorted(bins.items())]


def _segment(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    steps = max(abs(x1 - x0), abs(y1 - y0))
    if steps == 0:
        return [(x0, y0)]
    return [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)]
