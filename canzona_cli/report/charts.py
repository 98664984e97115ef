"""Drawn with characters, braille and blocks or ASCII: sparklines, bars, curves."""

import itertools
import math
from collections.abc import Iterable, Sequence

from canzona_cli.run.words import real

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=*%#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the 2 x 4 dots of a character."""


def sparkline(values: Iterable[object], width: int, *, ascii_only: bool = False) -> str:
    """A line of at most `width` characters whose heights follow the finite values."""
    finite = [value for value in map(real, values) if value is not None]
    if not finite or width < 1:
        return ""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS[1:]
    points = _resample(finite, width)
    low, high = min(points), max(points)
    if high <= low:
        return blocks[len(blocks) // 2] * len(points)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in points)


def _resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its slice, so that a long history keeps its shape."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def bar(share: object, width: int, *, ascii_only: bool = False) -> str:
    """A horizontal bar, `share` (0 to 1) of `width` characters, in eighths of a character."""
    value = real(share)
    if value is None or width < 1:
        return ""
    eighths = round(min(1.0, max(0.0, value)) * width * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return ("█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else ""))[:width]


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
    labels = [_axis_label(high - (high - low) * row / (rows - 1)) for row in range(rows)]
    gutter = max(map(len, labels)) + 2
    columns = width - gutter
    x_dots, y_dots = (1, 1) if ascii_only else (2, 4)
    heights = _dot_columns(points, columns * x_dots)
    grid = [[0] * columns for _ in range(rows)]
    scale = (rows * y_dots - 1) / (high - low)
    for (x0, v0), (x1, v1) in itertools.pairwise(heights) if len(heights) > 1 else [(heights[0], heights[0])]:
        y0, y1 = (round((high - v) * scale) for v in (v0, v1))
        for x, y in _segment(x0, y0, x1, y1):
            grid[y // y_dots][x // x_dots] |= _BRAILLE[x % x_dots][y % y_dots]
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


def _axis_label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _dot_columns(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[int, float]]:
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
