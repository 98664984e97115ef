"""The base class of all views, and the wrapped paragraphs that they consist of.

Here and in `tables`, a string is shown without control characters and never parsed as markup. A rich `Text`
is shown as it is.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
