"""Draws bars with characters in a terminal, and bars, timelines and load maps as SVG in an HTML page.

In a terminal without colour, each part is drawn with its letter. In a page, text has the same size on every
screen, and a part shows its value while the pointer is over it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rich.text import Text

from canzona_cli.cli.views.markup import Html, Picture, foldable, join_markup, key, percent, table_html, tag
from canzona_cli.cli.views.page import Screen
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
    rank: str = ""
    """The rank, which an HTML page writes in front of the label; empty to write only the label."""
    begins: bool = False
    """True if this is the first lane of a rank."""

    @property
    def words(self) -> str:
        return f"{self.rank}: {self.label}" if self.rank else self.label


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


def heat_level(load: float, mean: float) -> int:
    """Returns a level from 0, far below the mean, to `len(HEAT_LIMITS)`, far above it."""
    ratio = load / mean if mean > 0 else 1.0
    return sum(ratio > limit for limit in HEAT_LIMITS)
