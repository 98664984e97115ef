"""The base class of all views, and what they consist of: wrapped paragraphs, tables, and tables of column groups.

A string is shown without control characters and never parsed as markup. A rich `Text` is shown as it is.

Tables build on rich's. Unlike in those, lines have no trailing spaces, and groups of columns that do not fit next to
the others go below them, so that no number is cut off.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

import rich.table
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import StyleType
from rich.text import Text

from canzona_cli.records.words import clean


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The terminal or the HTML page on which a view is drawn."""

    width: int
    """The width in characters."""
    colour: bool
    page: bool = False
    """True for an HTML page, which has room for more charts."""


class Page(ABC):
    """The base class of views: a rich renderable that consists of parts."""

    widest: int | None = None
    """The most characters per line, even if the terminal is wider; None for no limit."""

    @abstractmethod
    def parts(self, screen: Screen) -> Iterable[RenderableType]:
        """Yields the parts of the view from top to bottom; an empty text is a blank line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update_width(min(options.max_width, self.widest or options.max_width))
        colour = console.color_system is not None and not options.ascii_only
        screen = Screen(width=options.max_width, colour=colour)
        # With `soft_wrap`, only paragraphs may be wider than the screen, so that long paths in them stay whole.
        folding = options.update(no_wrap=False, overflow="fold") if options.no_wrap else options
        for part in self.parts(screen):
            yield from console.render(part, options if isinstance(part, Page | Paragraph) else folding)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph with `first` in front of its first line and `rest` in front of the other lines.

    Lines have no trailing spaces. A word longer than a line, such as a path, stays whole when printed with
    `soft_wrap`, so that it can be copied; otherwise it continues on the next line.
    """

    text: Text
    first: Text
    rest: str
    unbroken: bool = False
    """True for a command to paste: it stays on one line when printed with `soft_wrap`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(8, options.max_width - max(self.first.cell_len, len(self.rest)))
        lines: Iterable[Text] = [self.text]
        if not options.no_wrap:
            lines = self.text.wrap(console, width)
        elif not self.unbroken:
            lines = _at_spaces(self.text, width)
        for index, line in enumerate(lines):
            line.rstrip()
            head = self.first if index == 0 else self.rest
            yield Text.assemble(head, line, no_wrap=True, overflow="ignore" if options.no_wrap else None, end="\n")


def _at_spaces(text: Text, width: int) -> Iterator[Text]:
    """Yields lines of at most `width` columns. A longer word gets a line to itself, because rich would break
    it."""
    for paragraph in text.split("\n", allow_blank=True):
        breaks, line_width = [], 0
        for word in re.finditer(r"\S+\s*", paragraph.plain):
            if line_width and line_width + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                line_width = 0
            line_width += cell_len(word[0])
        yield from paragraph.divide(breaks)


def paragraph(text: Text | str, style: str = "", *, first: Text | str = "", rest: str | None = None) -> Paragraph:
    """Returns a paragraph.

    Args:
        style: the style of the text, if `text` is a string.
        first: the text in front of the first line.
        rest: the text in front of the other lines; by default as many spaces as `first` is wide.
    """
    body = Text(clean(text), style=style) if isinstance(text, str) else text
    head = Text(first) if isinstance(first, str) else first
    return Paragraph(body, head, " " * head.cell_len if rest is None else rest)


def joined(*parts: str | tuple[str, str]) -> Text:
    """Joins strings, and pairs of a string and a style, into a text without control characters."""
    styled = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((clean(text), style) for text, style in styled))


def section_head(title: str, text: str) -> Paragraph:
    """Returns a paragraph that starts with its title in bold; in a page, it starts a section."""
    return paragraph(joined((title, "bold"), text))


def labelled_rows(rows: Iterable[tuple[str, Text | str]], width: int = 14, *, indent: int = 2) -> Iterator[Paragraph]:
    """Yields a row for each label and value: the faint label, `width` characters wide, and the value, wrapped
    next to it."""
    for label, value in rows:
        yield paragraph(value, first=Text(f"{'':<{indent}}{clean(label):<{width}}", style="dim"))


def note(text: str) -> Paragraph:
    """Returns a faint, indented remark, such as the explanation below a table."""
    return paragraph(text, "dim", first="  ")


def remarks(lines: Iterable[str]) -> Iterator[RenderableType]:
    """Yields a blank line and the lines, marked as warnings; nothing if there are no lines."""
    for index, line in enumerate(lines):
        if index == 0:
            yield Text()
        yield paragraph(line, "yellow", first="  ! ")


def items(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    """Yields a blank line, a title and a list of the lines; nothing if there are no lines."""
    for index, line in enumerate(lines):
        if index == 0:
            yield Text()
            yield Text(title, style="bold")
        yield paragraph(line, style, first="  - ")


Cell = str | Text
_GAP = 2


_RULED = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
_INTERRUPTED = Box("    \n    \n ─  \n    \n ─  \n    \n    \n    \n")
"""The rules below the heads and between sections; the second box leaves gaps between columns."""


class Table(rich.table.Table):
    """A rich table with two spaces between columns and no trailing spaces."""

    def __init__(self, *names: str) -> None:
        super().__init__(box=_RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        self.header_style, self.border_style = "bold", "dim"
        self.add_words(*names)

    def add_words(self, *names: str) -> None:
        """Adds columns of text, which folds onto several lines if there is no room."""
        for name in names:
            self.add_column(_text(name), overflow="fold")

    def add_numbers(self, *names: str) -> None:
        """Adds columns of numbers, right-aligned and on one line."""
        for name in names:
            self.add_column(_text(name), justify="right", no_wrap=True)

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Adds a row as rich does, but shows text literally instead of parsing it as markup."""
        super().add_row(*map(_text, cells), style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = super().__rich_console__(console, options)
        for line in Segment.split_lines(piece for piece in drawn if isinstance(piece, Segment)):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


@dataclass(frozen=True)
class Columns:
    """A group of columns that stay next to one another."""

    title: str
    """The line above the heads; empty for none."""
    heads: Sequence[str]
    rows: Sequence[tuple[Cell, ...]]
    """The rows, each with one cell per head. A single cell spans the group; an empty tuple is an empty
    row."""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(
            max(1, len(head), *(_text(row[index]).cell_len for row in self.rows if len(row) == len(self.heads)))
            for index, head in enumerate(self.heads)
        )

    @property
    def width(self) -> int:
        spanning_widths = (_text(row[0]).cell_len for row in self.rows if len(row) == 1)
        return max(sum(self.widths) + len(self.widths) - 1, len(self.title), *spanning_widths)

    def shows(self, text: str) -> bool:
        """Returns True if the text of any cell is `text`."""
        return any(str(cell) == text for row in self.rows for cell in row)

    def drop(self, *heads: str) -> "Columns":
        """Returns a copy of the group without the columns that have these heads."""
        shown = [index for index, head in enumerate(self.heads) if head not in heads]
        rows = [row if len(row) < len(self.heads) else tuple(row[index] for index in shown) for row in self.rows]
        return replace(self, heads=[self.heads[index] for index in shown], rows=rows)

    def join_cells(self, cells: Sequence[Cell]) -> Text:
        """Joins the cells of a row to a text as wide as the group. Each cell is right-aligned in its column.

        The padding is not left to rich, which strips the spaces of an empty last cell.
        """
        line = Text()
        widths = self.widths if len(cells) > 1 else (0,)
        for index, (cell, width) in enumerate(zip(map(_text, cells), widths, strict=False)):
            line.append(" " * (width - cell.cell_len + (index > 0))).append_text(cell)
        return Text.assemble(" " * (self.width - line.cell_len), line, no_wrap=True)


def column(head: str, cells: Sequence[Cell]) -> Columns:
    """Returns a group of one column without a title."""
    return Columns("", (head,), [(cell,) for cell in cells])


@dataclass(frozen=True, kw_only=True)
class GroupedTable:
    """A table of column groups. If it is wider than the terminal, it is split into several tables with the
    same row labels, or drops its last groups (`needed`)."""

    labels: Sequence[Cell]
    """The labels of the rows; every group has the same number of rows."""
    groups: Sequence[Columns]
    head: str = ""
    """The head of the label column."""
    sections: Collection[int] = ()
    """The indices of the rows above which a rule is drawn."""
    styles: Sequence[str] = ()
    """The styles of the rows; empty for no styles."""
    needed: int | None = None
    """The number of groups that are always shown; later groups are shown only if they fit beside the others.
    None to show all groups."""

    @property
    def _gutter(self) -> int:
        return max(len(self.head), *(_text(label).cell_len for label in self.labels))

    def fits(self, width: int) -> bool:
        """Returns True if all groups stand beside one another in this many characters."""
        return self._gutter + sum(_GAP + group.width for group in self.groups) <= width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, groups in enumerate(self._side_by_side(options.max_width - self._gutter)):
            if index:
                yield Text()
            yield self._table(groups)

    def _side_by_side(self, width: int) -> Iterator[Sequence[Columns]]:
        """Yields the groups in order, in lists of as many groups as fit into `width`, but at least one."""
        side_by_side: list[Columns] = []
        for index, group in enumerate(self.groups):
            if side_by_side and sum(_GAP + shown.width for shown in (*side_by_side, group)) > width:
                if self.needed is not None and index >= self.needed:
                    break
                yield side_by_side
                side_by_side = []
            side_by_side.append(group)
        yield side_by_side

    def _table(self, groups: Sequence[Columns]) -> Table:
        has_titles, has_heads = any(group.title for group in groups), any(any(group.heads) for group in groups)
        table = Table()
        table.box = _INTERRUPTED if has_titles else _RULED
        table.add_column(Text("\n" * (has_titles and has_heads) + self.head, style="not bold dim"), no_wrap=True)
        for group in groups:
            titles = [Text(clean(group.title), style="bold", justify="center", no_wrap=True)] * has_titles
            heads = [Text.assemble(group.join_cells(group.heads), style="not bold dim")] * has_heads
            table.add_column(Group(*titles, *heads), no_wrap=True, width=group.width)
        for row_index, label in enumerate(self.labels):
            if row_index in self.sections:
                table.add_section()
            cells = (group.join_cells(group.rows[row_index]) for group in groups)
            table.add_row(_text(label), *cells, style=self.styles[row_index] if self.styles else "")
        return table


def rows_table(
    heads: Sequence[str],
    rows: Iterable[tuple[Cell, Sequence[Cell]]],
    *,
    head: str = "",
    bold: int | None = None,
    needed: int | None = None,
) -> GroupedTable:
    """Returns a table without groups.

    Args:
        rows: the label of each row, and a cell for each head.
        head: the head of the label column.
        bold: the index of the row shown in bold.
        needed: the number of columns that are always shown; None for all. Later columns are shown if they
            fit.
    """
    labels, cells = zip(*rows, strict=True)
    styles = ["bold" if index == bold else "" for index in range(len(labels))]
    groups = [column(*pair) for pair in zip(heads, zip(*cells, strict=True), strict=True)]
    return GroupedTable(head=head, labels=labels, groups=groups, styles=styles, needed=needed)


def _text[Shown](cell: str | Shown) -> Text | Shown:
    return Text(clean(cell)) if isinstance(cell, str) else cell


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
