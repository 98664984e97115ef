"""Tables of numbers in groups of columns: as many groups side by side as the terminal is wide, the rest below."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.console import ConsoleOptions
from rich.text import Text

Cell = str | Text
_GAP = 2


@dataclass(frozen=True, kw_only=True)
class Group:
    """Columns that stay together under one title."""

    title: str
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


def tables(
    labels: Sequence[Cell],
    groups: Sequence[Group],
    options: ConsoleOptions,
    *,
    head: str = "",
    sections: Collection[int] = (),
    styles: Sequence[str] = (),
) -> Iterator[Text]:
    """Lines of one table, or of several with the same labels in front, none wider than the terminal if possible.

    Args:
        labels: of the rows; each group has as many rows.
        head: over the labels.
        sections: rows before which a rule is drawn.
        styles: of the rows.
    """
    gutter = max(len(head), *(_text(label).cell_len for label in labels))
    left = list(groups)
    while left:
        taken, width = 1, gutter + _GAP + left[0].width
        while taken < len(left) and width + _GAP + left[taken].width <= options.max_width:
            width += _GAP + left[taken].width
            taken += 1
        if len(left) < len(groups):
            yield Text()
        yield from _table(labels, left[:taken], head, sections, styles, gutter, ascii_only=options.ascii_only)
        left = left[taken:]


def _table(
    labels: Sequence[Cell],
    groups: Sequence[Group],
    head: str,
    sections: Collection[int],
    styles: Sequence[str],
    gutter: int,
    *,
    ascii_only: bool,
) -> Iterator[Text]:
    space = " " * _GAP
    dash = "-" if ascii_only else "─"
    rule = Text(space.join([dash * gutter, *(dash * group.width for group in groups)]), style="dim", no_wrap=True)
    titles = Text(space.join([" " * gutter, *(f"{group.title:^{group.width}}" for group in groups)]), style="bold")
    yield _bare(titles)
    if any(any(group.heads) for group in groups):
        heads = Text(f"{head:<{gutter}}", style="dim")
        for group in groups:
            heads.append(space).append_text(_joined(group.heads, group))
        yield _bare(heads)
    yield rule
    for number, label in enumerate(labels):
        if number in sections:
            yield rule
        line = _text(label).copy()
        line.append(" " * (gutter - line.cell_len))
        for group in groups:
            line.append(space).append_text(_joined(group.rows[number], group))
        if styles:
            line.stylize_before(styles[number])
        yield _bare(line)


def _joined(cells: Sequence[Cell], group: Group) -> Text:
    """One line as wide as the group, every cell at the right end of its column."""
    line = Text()
    widths = group.widths if len(cells) > 1 else (0,)
    for place, (cell, width) in enumerate(zip(map(_text, cells), widths, strict=False)):
        line.append(" " * (width - cell.cell_len + (place > 0))).append_text(cell)
    return Text(" " * (group.width - line.cell_len)).append_text(line)


def _bare(line: Text) -> Text:
    """Without spaces at its end, so that piped output stays clean."""
    line.rstrip()
    line.no_wrap = True
    return line


def _text(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
