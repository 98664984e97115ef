"""Draws bars, timelines and load maps: with characters in a terminal, and as SVG in an HTML page.

In a terminal without colour, each part is drawn with its letter. In a page, text has the same size on every
screen, and a part shows its value while the pointer is over it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.markup import Html, Picture, foldable, join_markup, key, percent, table_html, tag
from canzona_cli.cli.views.page import Screen, note
from canzona_cli.cli.views.tables import GroupedTable, column
from canzona_cli.core.phases import PHASES, STREAMS, Ink, Interval
from canzona_cli.core.simulate.prediction import SimulatedEvent
from canzona_cli.records.breakdown import streams_of
from canzona_cli.records.statistics import load_balance
from canzona_cli.records.words import clean, milliseconds, step_time

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
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
    """The amount that the full width represents; longer bars are cut off."""
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
            if self._is_cut_off(row):
                drawn.append(" ▶", style="bold")
            yield Text.assemble("  ", f"{clean(row.label):<10} {row.value:>9} ", drawn)
        yield from legend_lines(self._legend(), self.inks, screen.width, colour=screen.colour)
        if any(map(self._is_cut_off, self.rows)):
            yield Text("  ▶ continues beyond the full width", style="dim", no_wrap=True)

    def html(self) -> Html:
        shown = [tag("div", *self._row_html(row), class_="bar-row") for row in self.rows]
        keys = (key(self.inks[name].css, words) for name, words in self._legend())
        return tag("figure", *shown, tag("figcaption", *keys, class_="keys"), class_="bars")

    def _is_cut_off(self, row: Bar) -> bool:
        return sum(amount for _, amount in row.parts) > 1.001 * self.scale

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
        yield tag("span", row.value + " (cut off)" * self._is_cut_off(row), class_="bar-value")


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
    rank: str = ""
    """The rank, which an HTML page writes in front of the label; empty to write only the label."""
    begins: bool = False
    """True if this is the first lane of a rank."""

    @property
    def words(self) -> str:
        return f"{self.rank}: {self.label}" if self.rank else self.label


@dataclass(frozen=True, kw_only=True)
class Lanes(Picture):
    """Lanes on one time axis."""

    title: str
    rows: Sequence[Lane]
    start_s: float = 0.0
    end_s: float

    def parts(self, screen: Screen) -> Iterator[Text]:
        width = screen.width - _GUTTER
        for index, row in enumerate(self.rows):
            drawn = draw_lane(row.intervals, self.start_s, self.end_s, width, colour=screen.colour)
            head = "" if index else self.title
            yield Text.assemble("  ", (f"{head:<10}", "bold"), f"{row.label[:10]:<10} ", drawn)
        left = step_time(self.start_s) if self.start_s else "0"
        right = step_time(self.end_s)
        middle = f"{step_time(self.end_s - self.start_s)} shown"
        line = f"{left}{middle:^{max(0, width - len(left) - len(right))}}{right}"
        yield Text(" " * _GUTTER + line[:width], style="dim")

    def html(self) -> Html:
        shown = []
        for row in self.rows:
            rects = map(self._interval_html, _visible(row.intervals, self.start_s, self.end_s))
            drawn = tag("svg", *rects, class_="lane", role="img", aria_label=row.words)
            look = "lane-row new" if row.begins else "lane-row"
            shown.append(tag("div", tag("span", row.words, class_="bar-label"), drawn, class_=look))
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
        Lane(label=STREAMS[stream], intervals=intervals, rank=f"rank {rank}", begins=stream == "compute")
        for rank, stream, intervals in streams_of(events)
    ]


def draw_lane(intervals: Iterable[Interval], start_s: float, end_s: float, width: int, *, colour: bool) -> Text:
    """Draws a lane of `width` characters. Each character shows the phase that takes most of its time slice,
    faint if phases fill less than half of the slice."""
    drawn = Text(no_wrap=True)
    slice_s = (end_s - start_s) / width
    unfinished = 0
    ordered = sorted(intervals, key=lambda part: part.start_s)
    for column_index in range(width):
        left, right = start_s + column_index * slice_s, start_s + (column_index + 1) * slice_s
        while unfinished < len(ordered) and ordered[unfinished].end_s <= left:
            unfinished += 1
        covered_s: dict[str, float] = {}
        for interval in ordered[unfinished:]:
            if interval.start_s >= right:
                break
            overlap_s = min(interval.end_s, right) - max(interval.start_s, left)
            covered_s[interval.name] = covered_s.get(interval.name, 0.0) + overlap_s
        phase = max(covered_s, key=lambda name: covered_s[name], default=None)
        if phase is None:
            drawn.append("·", style="dim")
            continue
        look = PHASES[phase]
        faint = sum(covered_s.values()) < slice_s / 2
        if colour:
            drawn.append("▒" if faint else "█", style=look.style)
        else:
            drawn.append(look.letter.lower() if faint else look.letter)
    return drawn


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
_HEAT_STYLES: Final = ("dodger_blue2", "sky_blue2", "green3", "gold3", "red3")
_MOST_ROWS: Final = 16
_WIDEST_CELL: Final = 4
_MOST_LABELLED_OWNERS: Final = 16
"""The largest number of owners with which an HTML page writes the times into the cells of a map."""
_MAP_GAP: Final = 2
"""The number of characters between two maps."""


@dataclass(frozen=True, kw_only=True)
class LoadMaps(Picture):
    """Maps of the measured or planned load of every rank, next to each other: columns are owners (DP), rows
    are hosts (TP)."""

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

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        width = (screen.width - 2 - _MAP_GAP * (len(self.maps) - 1)) // len(self.maps)
        width = min(width, max(4 * self.owners, 24))
        blocks = [
            [
                Text(f"{title} {load_balance(loads):.2f}", style="bold"),
                Text(f"slowest {step_time(max(loads))}", style="dim"),
                *heat_map(loads, self.hosts, width),
            ]
            for title, loads in self.maps.items()
        ]
        for row in zip(*blocks, strict=True):
            line = Text("  ", no_wrap=True)
            for cell in row:
                cell.truncate(width, pad=True)
                line.append_text(cell).append(" " * _MAP_GAP)
            line.rstrip()
            yield line
        per_column = owners_per_column(self.owners, width)
        grouping = f"; up to {per_column} owners per column" if per_column > 1 else ""
        yield note(f"{self._axes}; a full block is the slowest rank{grouping}")

    def html(self) -> Html:
        words = (*(f"up to {limit:g}" for limit in HEAT_LIMITS), "above that, times the mean")
        keys = (key(f"h{level}", text) for level, text in enumerate(words))
        legend = tag("p", *keys, class_="keys wide")
        drawn = (self._map_html(title, loads) for title, loads in self.maps.items())
        pictures = tag("div", *drawn, legend, class_="grid-of-charts")
        tables = (self._numbers_table(title, loads) for title, loads in self.maps.items())
        return join_markup([pictures, foldable("table of the numbers", *tables)])

    def _numbers_table(self, title: str, loads: Sequence[float]) -> Html:
        """Returns a table with a row for each owner and a column for each host."""
        times = list(map(milliseconds, loads))
        groups = [column(f"TP {host}", times[host :: self.hosts]) for host in range(self.hosts)]
        labels = [f"DP {owner}" for owner in range(self.owners)]
        return table_html(GroupedTable(head=f"{title}, ms", labels=labels, groups=groups))

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


def heat_map(loads: Sequence[float], hosts: int, width: int) -> Iterator[Text]:
    """Draws a load map in rows of at most `width` characters.

    The height of a block shows the load relative to the largest load, so a balanced map has full blocks
    everywhere. The colour shows the load relative to the mean: green around the mean, yellow and red above,
    blue below. If not all owners or hosts fit, a character shows the largest load of several.

    Args:
        loads: the seconds of each cell; the cell of an owner and a host has the index `owner * hosts + host`.
        hosts: the number of TP ranks.
    """
    owners = len(loads) // hosts
    mean, largest = sum(loads) / len(loads), max(loads)
    cell_width = max(1, min(_WIDEST_CELL, width // owners))
    columns = _bins(owners, width // cell_width)
    for first_host, end_host in _bins(hosts, _MOST_ROWS):
        row = Text(no_wrap=True)
        for first_owner, end_owner in columns:
            load = max(loads[o * hosts + h] for o in range(first_owner, end_owner) for h in range(first_host, end_host))
            mark = _heat_mark(load / largest if largest > 0 else 0.0)
            row.append(mark * cell_width, style=_HEAT_STYLES[heat_level(load, mean)])
        yield row


def owners_per_column(owners: int, width: int) -> int:
    """Returns the largest number of owners in one column of a map with `width` columns."""
    return max(end - begin for begin, end in _bins(owners, width))


def _bins(count: int, most_bins: int) -> list[tuple[int, int]]:
    """Divides `count` into at most `most_bins` ranges of nearly equal size."""
    bins = max(1, min(count, most_bins))
    edges = [index * count // bins for index in range(bins + 1)]
    return list(itertools.pairwise(edges))


def _heat_mark(relative_load: float) -> str:
    if relative_load <= 0:
        return "·"
    return BLOCKS[max(1, min(len(BLOCKS) - 1, round(relative_load * (len(BLOCKS) - 1))))]


def heat_level(load: float, mean: float) -> int:
    """Returns a level from 0, far below the mean, to `len(HEAT_LIMITS)`, far above it."""
    ratio = load / mean if mean > 0 else 1.0
    return sum(ratio > limit for limit in HEAT_LIMITS)
