"""A terminal's page as sections of a document, word for word;
lines that it draws with characters are left out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import rich.table
from rich.console import RenderableType
from rich.text import Text

from canzona_cli.report.html.document import Html, Section, facts, joined, scrolling, tag
from canzona_cli.report.page import Page, Screen, Wrapped
from canzona_cli.report.tables import Cell, Columns, GroupedTable, Table

SCREEN = Screen(width=120, colour=True)
_CLASSES = ("bold", "dim", "yellow", "red", "green")
"""Styles of the terminal that have a meaning here."""


def sections(
    parts: Iterable[RenderableType], *, first: str = "Summary", pictures: Mapping[str, Html] | None = None
) -> list[Section]:
    """The parts of a view; a paragraph that begins with a bold title begins a section.

    Args:
        first: title of what comes before any other title.
        pictures: the pictures that replace the lines that the terminal draws, by the section's
            title.
    """
    drawn = {} if pictures is None else pictures
    closed: list[Section] = []
    title, lead, body = first, "", list[RenderableType]()

    def close() -> None:
        inner = joined([drawn.get(title, Html()), elements(body)])
        if inner:
            closed.append(Section(title=title, lead=lead, body=inner))

    for part in _flat(parts):
        text = _text(part)
        head = _title(text) if text is not None else ""
        if text is not None and head:
            close()
            title, lead, body = head, text.plain[len(head) :].strip().lstrip(",:").strip(), []
        elif not isinstance(part, Text) or title not in drawn:
            body.append(part)
    close()
    return closed


def elements(parts: Iterable[RenderableType]) -> Html:
    """Tables, labelled lines, remarks."""
    shown: list[Html] = []
    rows: list[tuple[str, str]] = []
    for part in _flat(parts):
        if isinstance(part, Wrapped) and (label := part.first.plain.strip()) and label not in "-!":
            rows.append((label, styled(part.text)))
            continue
        shown += [facts(rows)] * bool(rows)
        rows = []
        if isinstance(part, Wrapped):
            warning = part.first.plain.strip() == "!"
            dim = "dim" in str(part.text.style)
            shown.append(tag("p", styled(part.text), class_="warning" if warning else "note" if dim else None))
        elif isinstance(part, GroupedTable | rich.table.Table):
            shown.append(table_html(part))
        elif isinstance(part, Text) and part.plain.strip():
            shown.append(tag("p", styled(part)))
    return joined([*shown, facts(rows)])


def words_table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Html:
    """A table of text; a row's first cell names it."""
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    return table_html(table)


def table_html(table: GroupedTable | rich.table.Table) -> Html:
    """A table as it is described for the terminal."""
    return _grouped(table) if isinstance(table, GroupedTable) else _table(table)


def styled(cell: Cell) -> Html:
    """A text with what its styles mean."""
    if isinstance(cell, str):
        return joined([cell])
    edges = sorted({0, len(cell.plain), *(edge for span in cell.spans for edge in (span.start, span.end))})
    pieces = []
    for begin, end in pairwise(edges):
        styles = [str(cell.style), *(str(span.style) for span in cell.spans if span.start <= begin < span.end)]
        words = " ".join(styles).split()
        classes = " ".join(name for name in _CLASSES if name in words)
        piece = cell.plain[begin:end]
        pieces.append(tag("span", piece, class_=classes) if classes else joined([piece]))
    return joined(pieces)


def _flat(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for part in parts:
        if isinstance(part, Page):
            yield from _flat(part.parts(SCREEN))
        else:
            yield part


def _text(part: RenderableType) -> Text | None:
    if isinstance(part, Wrapped):
        return part.text if not part.first.plain.strip() else None
    return part if isinstance(part, Text) else None


def _title(text: Text) -> str:
    """The bold words it begins with, or all of a bold line; empty where there are none."""
    if str(text.style) == "bold":
        return text.plain.strip()
    begins = [span.end for span in text.spans if span.start == 0 and str(span.style) == "bold"]
    return text.plain[: begins[0]] if begins else ""


def _grouped(table: GroupedTable) -> Html:
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
        style = table.styles[number] if table.styles else ""
        bodies[-1].append(_row(label, cells, style))
    body = (tag("tbody", *rows) for rows in bodies)
    return scrolling(tag("table", tag("thead", *heads), *body, class_="numbers"))


def _cells(group: Columns, number: int) -> Iterator[Html]:
    row = group.rows[number]
    if len(row) == len(group.heads):
        yield from (tag("td", styled(cell), class_=_first(place, group)) for place, cell in enumerate(row))
    else:
        yield tag("td", *map(styled, row), colspan=len(group.heads), class_="first")


def _first(place: int, group: Columns) -> str | None:
    """Groups of several columns stand apart."""
    return "first" if place == 0 and len(group.heads) > 1 else None


def _table(table: rich.table.Table) -> Html:
    """Draws a table without columns that have no head: the terminal draws bars in them."""
    columns = [column for number, column in enumerate(table.columns) if number == 0 or str(column.header)]
    cells: list[Sequence[RenderableType]] = [list(column.cells) for column in columns]
    bodies: list[list[Html]] = [[]]
    for number, row in enumerate(table.rows):
        first, *rest = (column[number] for column in cells)
        cells_shown = (tag("td", styled(_cell(one))) for one in rest)
        bodies[-1].append(_row(_cell(first), cells_shown, str(row.style or "")))
        if row.end_section:
            bodies.append([])
    right = any(column.justify == "right" for column in columns)
    head = tag("tr", *(tag("th", styled(_cell(column.header)), scope="col") for column in columns))
    body = (tag("tbody", *rows) for rows in bodies if rows)
    return scrolling(tag("table", tag("thead", head), *body, class_="numbers" if right else None))


def _cell(cell: RenderableType) -> Cell:
    return cell if isinstance(cell, Text) else str(cell)


def _row(label: Cell, cells: Iterable[Html], style: str) -> Html:
    words = style.split()
    classes = [name for name in _CLASSES if name in words]
    text = label.plain if isinstance(label, Text) else label
    below = "below" if text.startswith(" ") else None
    return tag("tr", tag("th", styled(label), scope="row", class_=below), *cells, class_=" ".join(classes) or None)
