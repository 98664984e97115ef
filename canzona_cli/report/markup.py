"""Markup of pages: elements in which every text is escaped, and tables as they are described for the terminal."""

from abc import abstractmethod
from collections.abc import Iterable
from html import escape
from itertools import pairwise

import rich.table
from rich.text import Text

from canzona_cli.report.page import Page
from canzona_cli.report.tables import Cell, Columns, GroupedTable, column
from canzona_cli.run.words import clean

_CLASSES = ("bold", "dim", "yellow", "red", "green")
"""Styles of the terminal that have a meaning in pages."""


class Html(str):
    """Markup. Only this module makes it of text, so that a run's name cannot become part of a page's code."""

    __slots__ = ()

    def __html__(self) -> str:
        """Tells the page's template not to escape it again."""
        return self


NOTHING = Html()


class Picture(Page):
    """Base of the charts: a page shows markup instead of the parts that a terminal shows."""

    @abstractmethod
    def html(self) -> Html:
        """The chart as a page has it."""


def tag(name: str, *content: str, **attributes: object) -> Html:
    """An element. Text in it is escaped; an attribute that is None is left out.

    Args:
        attributes: by their names, `_` for `-`; a trailing one keeps a name from being Python's (`class_`).
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts one after another, those that are text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(clean(part, newlines=True)) for part in parts))


def facts(rows: Iterable[tuple[str, str]], class_: str | None = None) -> Html:
    """Labels and what they say."""
    pairs = [tag("div", tag("dt", label), tag("dd", value)) for label, value in rows]
    return tag("dl", *pairs, class_=class_) if pairs else NOTHING


def folded(summary: str, *content: str) -> Html:
    """Wraps content that is shown on request."""
    return tag("details", tag("summary", summary), *content)


def percent(share: float) -> str:
    """A length of SVG: `12.5%`."""
    return f"{100 * share:.4g}%"


def key(css: str, name: str) -> Html:
    """An entry of a legend: a patch of the colour, and what it stands for."""
    return tag("span", tag("span", class_=f"key {css}"), name)


def styled(cell: Cell) -> Html:
    """A text with what its styles mean."""
    if isinstance(cell, str):
        return joined([cell])
    edges = sorted({0, len(cell.plain), *(edge for span in cell.spans for edge in (span.start, span.end))})
    pieces = []
    for begin, end in pairwise(edges):
        styles = [str(cell.style), *(str(span.style) for span in cell.spans if span.start <= begin < span.end)]
        classes = _classes(" ".join(styles))
        piece = cell.plain[begin:end]
        pieces.append(tag("span", piece, class_=classes) if classes else joined([piece]))
    return joined(pieces)


def _classes(style: str) -> str | None:
    words = style.split()
    return " ".join(name for name in _CLASSES if name in words) or None


def table_html(table: GroupedTable | rich.table.Table) -> Html:
    """A table as it is described for the terminal; wider than the screen, it scrolls by itself."""
    numbers = isinstance(table, GroupedTable) or any(one.justify == "right" for one in table.columns)
    if not isinstance(table, GroupedTable):
        table = _in_groups(table)
    heads = []
    if any(group.title for group in table.groups):
        titles = (
            tag("th", group.title, colspan=len(group.heads), scope="colgroup", class_="first") for group in table.groups
        )
        heads.append(tag("tr", tag("td"), *titles))
    names = (
        tag("th", name, scope="col", class_=_first(place, group))
        for group in table.groups
        for place, name in enumerate(group.heads)
    )
    heads.append(tag("tr", tag("th", table.head, scope="col"), *names))
    bodies: list[list[Html]] = [[]]
    for number, label in enumerate(table.labels):
        if number in table.sections:
            bodies.append([])
        cells = (cell for group in table.groups for cell in _cells(group, number))
        below = "below" if str(label).startswith(" ") else None
        name = tag("th", styled(label), scope="row", class_=below)
        bodies[-1].append(tag("tr", name, *cells, class_=_classes(table.styles[number] if table.styles else "")))
    body = (tag("tbody", *rows) for rows in bodies)
    drawn = tag("table", tag("thead", *heads), *body, class_="numbers" if numbers else None)
    return tag("div", drawn, class_="scroll", tabindex="0", role="region", aria_label="table")


def _in_groups(table: rich.table.Table) -> GroupedTable:
    """Describes a table of columns by its first one, which names the rows, and the others."""
    first, *others = (list(map(_cell, one.cells)) for one in table.columns)
    heads = [str(one.header) for one in table.columns]
    return GroupedTable(
        head=heads[0],
        labels=first,
        groups=[column(head, cells) for head, cells in zip(heads[1:], others, strict=True)],
        sections=[number for number, row in enumerate(table.rows, 1) if row.end_section],
        styles=[str(row.style or "") for row in table.rows],
    )


def _cell(cell: object) -> Cell:
    return cell if isinstance(cell, Text) else str(cell)


def _cells(group: Columns, number: int) -> Iterable[Html]:
    row = group.rows[number]
    if len(row) == len(group.heads):
        yield from (tag("td", styled(cell), class_=_first(place, group)) for place, cell in enumerate(row))
    else:
        yield tag("td", *map(styled, row), colspan=len(group.heads), class_="first")


def _first(place: int, group: Columns) -> str | None:
    """Groups of several columns stand apart."""
    return "first" if place == 0 and len(group.heads) > 1 else None
