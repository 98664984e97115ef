"""The load of every rank of a grid as a map: a row for each host (TP rank), a column for each owner (DP rank)."""

import itertools
from collections.abc import Iterator, Sequence

from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_DIGITS = ".123456789"
_MOST_ROWS = 16
_WIDEST_CELL = 4


def heat_map(loads: Sequence[float], hosts: int, width: int, *, ascii_only: bool = False) -> Iterator[Text]:
    """Rows of at most `width` characters.

    Height (or digit) is the load over the largest, so an even map is full everywhere; the colour is the load over the
    mean: green about it, yellow and red above, blue below. Where there are more owners or hosts than fit, a place
    shows the largest load of several.

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
            row.append(_mark(load / top if top > 0 else 0.0, ascii_only) * wide, style=_style(load, mean))
        yield row


def owners_a_column(owners: int, width: int) -> int:
    """The most owners that one column of a map of `width` characters stands for."""
    return max(end - begin for begin, end in _bins(owners, width))


def _bins(count: int, most: int) -> list[tuple[int, int]]:
    """At most `most` ranges of nearly equal size over `count`."""
    bins = max(1, min(count, most))
    edges = [index * count // bins for index in range(bins + 1)]
    return list(itertools.pairwise(edges))


def _mark(share: float, ascii_only: bool) -> str:
    marks = _DIGITS if ascii_only else _BLOCKS
    if share <= 0:
        return "." if ascii_only else "·"
    return marks[max(1, min(len(marks) - 1, round(share * (len(marks) - 1))))]


def _style(load: float, mean: float) -> str:
    over = load / mean if mean > 0 else 1.0
    for limit, style in ((0.5, "dodger_blue2"), (0.9, "sky_blue2"), (1.1, "green3"), (1.5, "gold3")):
        if over <= limit:
            return style
    return "red3"
