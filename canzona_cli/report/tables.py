"""Tables at a terminal: plain ones, and groups of columns of which as many stand side by side as it has room for.

Both are rich's, with what pipes and narrow terminals need: no trailing spaces, and columns that do not fit go
below the others instead of numbers cut off.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import rich.table
from rich.box import Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import StyleType
from rich.text import Text

Cell = str | Text
_GAP = 2


_RULED = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
_INTERRUPTED = Box("    \n    \n ─  \n    \n ─  \n    \n    \n    \n")
"""A rule below the heads and between sections; the second has gaps between columns."""


class Table(rich.table.Table):
    """Ours: two spaces between columns, and no spaces at the ends of lines."""

    def __init__(self, *names: str) -> None:
        super().__init__(box=_RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        self.header_style, self.border_style = "bold", "dim"
        self.add_words(*names)

    def add_words(self, *names: str) -> None:
        """Columns of text, on several lines where there is no room."""
        for name in names:
            self.add_column(Text(name), overflow="fold")

    def add_numbers(self, *names: str) -> None:
        """Columns of numbers: at the right, on one line."""
        for name in names:
            self.add_column(Text(name), justify="right", no_wrap=True)

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Adds a row as rich does, but shows text literally, never as markup."""
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


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns that stay together."""

    title: str = ""
    """The line above the heads."""
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """A cell for each head; a single cell has the whole width; an empty tuple is an empty row."""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(
            max(1, len(head), *(_text(row[place]).cell_len for row in self.rows if len(row) == len(self.heads)))
            for place, head in enumerate(self.heads)
        )

    @property
    def width(self) -> int:
        alone = (_text(row[0]).cell_len for row in self.rows if len(row) == 1)
        return max(sum(self.widths) + len(self.widths) - 1, len(self.title), *alone)

    def shows(self, text: str) -> bool:
        """Returns True if one of the cells is `text`."""
        return any(str(cell) == text for row in self.rows for cell in row)

    def joined(self, cells: Sequence[Cell]) -> Text:
        """One row as wide as the group, every cell at the right end of its column.

        Padded here: to rich, which would put it at the right, spaces in place of a last cell are none.
        """
        line = Text()
        widths = self.widths if len(cells) > 1 else (0,)
        for place, (cell, width) in enumerate(zip(map(_text, cells), widths, strict=False)):
            line.append(" " * (width - cell.cell_len + (place > 0))).append_text(cell)
        return Text.assemble(" " * (self.width - line.cell_len), line, no_wrap=True)


def column(head: str, cells: Sequence[Cell]) -> Columns:
    """One column without a title."""
    return Columns(heads=(head,), rows=tuple((cell,) for cell in cells))


def columns(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[Columns]:
    """Columns of one each, from rows with a cell for each head."""
    return [column(head, cells) for head, cells in zip(heads, zip(*rows, strict=True), strict=True)]


@dataclass(frozen=True, kw_only=True)
class GroupedTable:
    """One table, or several with the same labels in front, none wider than the terminal if possible."""

    labels: Sequence[Cell]
    """The labels of the rows; each group has as many rows."""
    groups: Sequence[Columns]
    head: str = ""
    """The head of the labels."""
    sections: Collection[int] = ()
    """Rows before which a rule is drawn."""
    styles: Sequence[str] = ()
    """The styles of the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gutter = max(len(self.head), *(_text(label).cell_len for label in self.labels))
        for number, groups in enumerate(self._side_by_side(options.max_width - gutter)):
            if number:
                yield Text()
            yield self._table(groups)

    def _side_by_side(self, width: int) -> Iterator[Sequence[Columns]]:
        """The groups in their order, as many at a time as fit."""
        taken: list[Columns] = []
        for group in self.groups:
            if taken and sum(_GAP + other.width for other in (*taken, group)) > width:
                yield taken
                taken = []
            taken.append(group)
        yield taken

    def _table(self, groups: Sequence[Columns]) -> Table:
        titled, headed = any(group.title for group in groups), any(any(group.heads) for group in groups)
        table = Table()
        table.box = _INTERRUPTED if titled else _RULED
        table.add_column(Text("\n" * (titled and headed) + self.head, style="not bold dim"), no_wrap=True)
        for group in groups:
            titles = [Text(group.title, style="bold", justify="center", no_wrap=True)] * titled
            heads = [Text.assemble(group.joined(group.heads), style="not bold dim")] * headed
            table.add_column(Group(*titles, *heads), no_wrap=True, width=group.width)
        for number, label in enumerate(self.labels):
            if number in self.sections:
                table.add_section()
            cells = (group.joined(group.rows[number]) for group in groups)
            table.add_row(_text(label), *cells, style=self.styles[number] if self.styles else "")
        return table


def rows_table(
    heads: Sequence[str], rows: Iterable[tuple[Cell, Sequence[Cell]]], *, head: str = "", bold: int | None = None
) -> GroupedTable:
    """A table without groups.

    Args:
        rows: the label of each, and a cell for each head.
        head: the head of the labels.
        bold: the number of the row that stands out.
    """
    labels, cells = zip(*rows, strict=True)
    styles = ["bold" if number == bold else "" for number in range(len(labels))]
    return GroupedTable(head=head, labels=labels, groups=columns(heads, cells), styles=styles)


def _text[Shown](cell: str | Shown) -> Text | Shown:
    return Text(cell) if isinstance(cell, str) else cell
