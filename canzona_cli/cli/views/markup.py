"""Makes the markup of HTML pages: elements whose text is escaped, and tables that are converted from the
terminal's tables."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise

import rich.table
from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.page import Cell, Columns, GroupedTable, Page, Screen, column
from canzona_cli.records.words import clean

_CLASSES = ("bold", "dim", "yellow", "red", "green")
"""The terminal styles that have a CSS class in pages."""


class Html(str):
    """Markup that needs no escaping. Apart from the fixed texts in `page.*`, only this module creates it from
    text, so that a run's name cannot inject markup into a page."""

    __slots__ = ()

    def __html__(self) -> str:
        """Returns the markup itself, so that the page's template does not escape it again."""
        return self


NOTHING = Html()


class Picture(Page):
    """The base class of charts: an HTML page shows `html()`, a terminal shows `parts()`, which may be nothing."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        yield from ()

    @abstractmethod
    def html(self) -> Html:
        """Returns the chart's markup for an HTML page."""


def tag(name: str, *content: str, **attributes: object) -> Html:
    """Returns an HTML element. Text in it is escaped, and attributes that are None are omitted.

    Args:
        attributes: the attributes by name, with `_` instead of `-`; a trailing `_` is dropped (`class_`).
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{join_markup(content)}</{name}>")


def join_markup(parts: Iterable[str]) -> Html:
    """Joins pieces of markup and text; text is escaped."""
    shown = (part if isinstance(part, Html) else escape(clean(part, newlines=True)) for part in parts)
    return Html("".join(shown))


def fact_list(rows: Iterable[tuple[str, str]], class_: str | None = None) -> Html:
    """Returns a list of labels and values; nothing if there are no rows."""
    pairs = [tag("div", tag("dt", label), tag("dd", value)) for label, value in rows]
    return tag("dl", *pairs, class_=class_) if pairs else NOTHING


def foldable(summary: str, *content: str) -> Html:
    """Returns content that stays hidden until the reader opens its summary."""
    return tag("details", tag("summary", summary), *content)


def percent(share: float) -> str:
    """Returns a share as an SVG length, such as `12.5%`."""
    return f"{100 * share:.4g}%"


def key(css: str, name: str) -> Html:
    """Returns a legend entry: a patch in the colour of the class `css`, and its name."""
    return tag("span", tag("span", class_=f"key {css}"), name)


def styled_markup(cell: Cell) -> Html:
    """Returns the markup of a cell; terminal styles become CSS classes."""
    if isinstance(cell, str):
        return join_markup([cell])
    edges = sorted({0, len(cell.plain), *(edge for span in cell.spans for edge in (span.start, span.end))})
    pieces = []
    for begin, end in pairwise(edges):
        styles = [str(cell.style), *(str(span.style) for span in cell.spans if span.start <= begin < span.end)]
        classes = _classes(" ".join(styles))
        piece = cell.plain[begin:end]
        pieces.append(tag("span", piece, class_=classes) if classes else join_markup([piece]))
    return join_markup(pieces)


def _classes(style: str) -> str | None:
    words = style.split()
    return " ".join(name for name in _CLASSES if name in words) or None


def table_html(table: GroupedTable | rich.table.Table) -> Html:
    """Returns the markup of a terminal table; a table that is wider than the screen gets a scroll bar."""
    numbers = isinstance(table, GroupedTable) or any(shown_column.justify == "right" for shown_column in table.columns)
    if not isinstance(table, GroupedTable):
        table = _in_groups(table)
    head_rows = []
    if any(group.title for group in table.groups):
        attributes = {"scope": "colgroup", "class_": "first"}
        titles = (tag("th", group.title, colspan=len(group.heads), **attributes) for group in table.groups)
        head_rows.append(tag("tr", tag("td"), *titles))
    column_heads = [
        tag("th", name, scope="col", class_=_first(column_index, group))
        for group in table.groups
        for column_index, name in enumerate(group.heads)
    ]
    head_rows.append(tag("tr", tag("th", table.head, scope="col"), *column_heads))
    bodies: list[list[Html]] = [[]]
    for index, label in enumerate(table.labels):
        if index in table.sections:
            bodies.append([])
        cells = (cell for group in table.groups for cell in _cells(group, index))
        row_class = "below" if str(label).startswith(" ") else None
        name = tag("th", styled_markup(label), scope="row", class_=row_class)
        style = table.styles[index] if table.styles else ""
        bodies[-1].append(tag("tr", name, *cells, class_=_classes(style)))
    body = (tag("tbody", *rows) for rows in bodies)
    drawn = tag("table", tag("thead", *head_rows), *body, class_="numbers" if numbers else None)
    return tag("div", drawn, class_="scroll", tabindex="0", role="region", aria_label="table")


def _in_groups(table: rich.table.Table) -> GroupedTable:
    """Converts a plain table: its first column becomes the row labels, and each other column a group."""
    labels, *columns = (list(map(_cell, shown_column.cells)) for shown_column in table.columns)
    heads = [str(shown_column.header) for shown_column in table.columns]
    return GroupedTable(
        head=heads[0],
        labels=labels,
        groups=[column(head, cells) for head, cells in zip(heads[1:], columns, strict=True)],
        sections=[index for index, row in enumerate(table.rows, 1) if row.end_section],
        styles=[str(row.style or "") for row in table.rows],
    )


def _cell(cell: object) -> Cell:
    return cell if isinstance(cell, Text) else str(cell)


def _cells(group: Columns, row_index: int) -> Iterable[Html]:
    row = group.rows[row_index]
    if len(row) == len(group.heads):
        yield from (tag("td", styled_markup(cell), class_=_first(index, group)) for index, cell in enumerate(row))
    else:
        yield tag("td", *map(styled_markup, row), colspan=len(group.heads), class_="first")


def _first(column_index: int, group: Columns) -> str | None:
    """Returns the CSS class that adds space before a group of several columns; None for any other cell."""
    return "first" if column_index == 0 and len(group.heads) > 1 else None
