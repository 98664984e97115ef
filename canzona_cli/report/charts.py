"""Drawn with characters: sparklines, bars, curves, bars made of parts, and the map of every rank's load.

Bars made of parts have a form without colours.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from canzona_cli.run.phases import Ink
from canzona_cli.run.words import real

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the 2 x 4 dots of a character."""
HEAT_LIMITS = (0.5, 0.9, 1.1, 1.5)
"""Loads over the mean up to which a map has one colour."""
_HEAT_STYLES = ("dodger_blue2", "sky_blue2", "green3", "gold3", "red3")
_MOST_ROWS = 16
_WIDEST_CELL = 4


def sparkline(values: Iterable[object], width: int) -> str:
    """A line of at most `width` characters whose heights follow the finite values."""
    finite = [value for value in map(real, values) if value is not None]
    if not finite or width < 1:
        return ""
    blocks = _BLOCKS[1:]
    points = _resample(finite, width)
    low, high = min(points), max(points)
    if high <= low:
        return blocks[len(blocks) // 2] * len(points)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in points)


def _resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values, each the mean of its slice, so that a long history keeps its shape."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def bar(share: object, width: int) -> str:
    """A horizontal bar, `share` (0 to 1) of `width` characters, in eighths of a character."""
    value = real(share)
    if value is None or width < 1:
        return ""
    eighths = round(min(1.0, max(0.0, value)) * width * 8)
    return ("█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else ""))[:width]


def line_chart(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draw (step, value) points as `height` rows of `width` characters: a labelled y axis,
    the curve, the step axis.

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
    x_dots, y_dots = 2, 4
    heights = _dot_columns(points, columns * x_dots)
    grid = [[0] * columns for _ in range(rows)]
    scale = (rows * y_dots - 1) / (high - low)
    for (x0, v0), (x1, v1) in itertools.pairwise(heights) if len(heights) > 1 else [(heights[0], heights[0])]:
        y0, y1 = (round((high - v) * scale) for v in (v0, v1))
        for x, y in _segment(x0, y0, x1, y1):
            grid[y // y_dots][x // x_dots] |= _BRAILLE[x % x_dots][y % y_dots]
    lines = []
    for row, cells in enumerate(grid):
        # A label on every other row is enough to read a value, and quieter.
        label = labels[row] if row % 2 == 0 or row == rows - 1 else ""
        drawn = "".join(chr(0x2800 + cell) if cell else " " for cell in cells)
        lines.append(f"{label:>{gutter - 2}} ┤{drawn}".rstrip())
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
"""The parts of a rank's memory, in the order in which they are drawn.
Without a plan the optimizer's are one."""
Inks = Mapping[str, Ink]
"""The ink of each part, by its name."""


def stacked(parts: Sequence[tuple[str, float]], total: float, width: int, inks: Inks, *, colour: bool) -> Text:
    """A bar in which `width` characters stand for `total`.
    A part above 0 that rounds to nothing is not drawn.

    Args:
        parts: (name, amount) from left to right.
        inks: by name.
    """
    drawn = Text(no_wrap=True)
    done, at = 0.0, 0
    for name, amount in parts:
        done += amount
        end = min(width, round(done / total * width)) if total > 0 else 0
        if end > at:
            ink = inks[name]
            drawn.append(("█" if colour else ink.letter) * (end - at), style=ink.style if colour else "")
            at = end
    return drawn


def legend(parts: Sequence[tuple[str, str]], inks: Inks, width: int, *, colour: bool) -> Iterator[Text]:
    """Indented lines like `█ weights 7.6  █ gradients 15.2`, or with letters; broken between parts only.

    Args:
        parts: (name, what is written behind its mark).
        width: the width of a line.
    """
    line = Text()
    for name, label in parts:
        ink = inks[name]
        entry = Text.assemble(
            "  ", ("█" if colour else ink.letter, ink.style if colour else "bold"), f" {label}", no_wrap=True
        )
        if line and line.cell_len + entry.cell_len > width:
            yield line
            line = Text()
        line.append_text(entry)
    yield line


def heat_map(loads: Sequence[float], hosts: int, width: int) -> Iterator[Text]:
    """Rows of at most `width` characters.

    Height is the load over the largest, so an even map is full everywhere; the colour is the load over the
    mean: green around it, yellow and red above, blue below. Where there are more owners or hosts than fit, a
    character shows the largest load of several.

    Args:
        loads: seconds by cell, `owner * hosts + host`.
        hosts: TP ranks.
    """
    owners = len(loads) // hosts
    mean, top = sum(loads) / len(loads), max(loads)
    wide = max(1, min(_WIDEST_CELL, width // owners))
    columns = _bins(owners, width // wide)
    for first, last in _bins(hosts, _MOST_ROWS):
        row = Text(no_wrap=True)
        for begin, end in columns:
            load = max(loads[o * hosts + h] for o in range(begin, end) for h in range(first, last))
            row.append(
                _heat_mark(load / top if top > 0 else 0.0) * wide,
                style=_HEAT_STYLES[heat_level(load, mean)],
            )
        yield row


def owners_a_column(owners: int, width: int) -> int:
    """The most owners that one column of a map of `width` characters stands for."""
    return max(end - begin for begin, end in _bins(owners, width))


def _bins(count: int, most: int) -> list[tuple[int, int]]:
    """Divides `count` into at most `most` ranges of nearly equal size."""
    bins = max(1, min(count, most))
    edges = [index * count // bins for index in range(bins + 1)]
    return list(itertools.pairwise(edges))


def _heat_mark(share: float) -> str:
    if share <= 0:
        return "·"
    return _BLOCKS[max(1, min(len(_BLOCKS) - 1, round(share * (len(_BLOCKS) - 1))))]


def heat_level(load: float, mean: float) -> int:
    """Returns a level from 0, far below the mean, to `len(HEAT_LIMITS)`, far above it."""
    over = load / mean if mean > 0 else 1.0
    return sum(over > limit for limit in HEAT_LIMITS)
