"""Lines at a terminal: wrapping, sparklines, bars."""

import itertools
import math
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from canzona_cli.run.words import real

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=*%#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def wrapped(
    text: Text, console: Console, options: ConsoleOptions, *, first: str = "", rest: str = ""
) -> Iterable[Text]:
    """Lines of `text` that fit `options.max_width`, behind `first` and then `rest` (hanging indent).

    No trailing spaces, so that piped output stays clean; a word longer than the line is folded, never cut off.
    """
    width = max(8, options.max_width - max(len(first), len(rest)))
    for number, line in enumerate(text.wrap(console, width)):
        line.rstrip()
        yield Text.assemble(first if number == 0 else rest, line, no_wrap=True, end="\n")


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its slice, so that a long history keeps its shape."""
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Iterable[object], width: int, *, ascii_only: bool = False) -> str:
    """A line of at most `width` characters whose heights follow the finite values."""
    finite = [value for value in map(real, values) if value is not None]
    if not finite or width < 1:
        return ""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    points = resample(finite, width)
    low, high = min(points), max(points)
    if high <= low:
        return blocks[len(blocks) // 2] * len(points)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in points)


def bar(share: object, width: int, *, ascii_only: bool = False) -> str:
    """A horizontal bar, `share` (0 to 1) of `width` characters, in eighths of a character."""
    value = real(share)
    if value is None or width < 1:
        return ""
    eighths = round(min(1.0, max(0.0, value)) * width * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return ("█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else ""))[:width]
