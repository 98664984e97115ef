"""Pages for a terminal: what every view is made of, from the width and the signs there are to wrapped lines."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from canzona_cli.run.words import clean


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The terminal that a view is drawn on."""

    width: int
    """The width in characters."""
    colour: bool
    page: bool = False
    """True for a page in a browser, which has room for more pictures."""


class Page(ABC):
    """Base of the views: a rich renderable made of parts.
    Set `widest` where long lines would be hard to read."""

    widest: int | None = None
    """The most columns it uses."""

    @abstractmethod
    def parts(self, screen: Screen) -> Iterable[RenderableType]:
        """Yields what is shown, from top to bottom. A blank line is an empty text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update_width(min(options.max_width, self.widest or options.max_width))
        colour = console.color_system is not None and not options.ascii_only
        screen = Screen(width=options.max_width, colour=colour)
        # Printed with `soft_wrap`, only paragraphs may be wider than the screen, for the sake of a long path
        # in one.
        inside = options.update(no_wrap=False, overflow="fold") if options.no_wrap else options
        for part in self.parts(screen):
            yield from console.render(part, options if isinstance(part, Page | Wrapped) else inside)


@dataclass(frozen=True)
class Wrapped:
    """A paragraph behind `first`, its other lines behind `rest`.

    No trailing spaces, so that piped output stays clean. A word longer than the line, such as a path, stays
    whole where it is printed with `soft_wrap`, so that it can be copied; else it is folded, never cut off.
    """

    text: Text
    first: Text
    rest: str
    whole: bool = False
    """A command to paste: printed with `soft_wrap`, it is one line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(8, options.max_width - max(self.first.cell_len, len(self.rest)))
        lines: Iterable[Text] = [self.text] if self.whole else _at_spaces(self.text, width)
        lines = lines if options.no_wrap else self.text.wrap(console, width)
        for number, line in enumerate(lines):
            line.rstrip()
            head = self.first if number == 0 else self.rest
            yield Text.assemble(head, line, no_wrap=True, overflow="ignore" if options.no_wrap else None, end="\n")


def _at_spaces(text: Text, width: int) -> Iterator[Text]:
    """Lines of at most `width` columns, but for longer words, which rich would fold."""
    for paragraph in text.split("\n", allow_blank=True):
        breaks, used = [], 0
        for word in re.finditer(r"\S+\s*", paragraph.plain):
            if used and used + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                used = 0
            used += cell_len(word[0])
        yield from paragraph.divide(breaks)


def wrapped(text: Text | str, style: str = "", *, first: Text | str = "", rest: str | None = None) -> Wrapped:
    """A paragraph.

    Args:
        text: shown literally, never read as markup.
        style: the style of the text.
        first: in front of the first line.
        rest: in front of the others; as many spaces as `first` is wide unless given.
    """
    body = Text(text, style=style) if isinstance(text, str) else text
    head = Text(first) if isinstance(first, str) else first
    return Wrapped(body, head, " " * head.cell_len if rest is None else rest)


def headed(title: str, text: str) -> Wrapped:
    """A paragraph that begins with its title."""
    return wrapped(Text.assemble((title, "bold"), text))


def labelled(rows: Iterable[tuple[str, Text | str]], width: int = 14, *, indent: int = 2) -> Iterator[Wrapped]:
    """Rows of a faint label, `width` characters wide, and a value that is wrapped next to it."""
    for label, value in rows:
        yield wrapped(value, first=Text(f"{'':<{indent}}{label:<{width}}", style="dim"))


def note(text: str) -> Wrapped:
    """A faint remark below a table."""
    return wrapped(text, "dim", first="  ")


def remarks(lines: Iterable[str]) -> Iterator[RenderableType]:
    """Yields remarks that somebody should look at, after a blank line; nothing where there are no lines."""
    for number, line in enumerate(lines):
        if number == 0:
            yield Text()
        yield wrapped(clean(line), "yellow", first="  ! ")


def items(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    """A titled list, behind a blank line; nothing where there are no lines."""
    for number, line in enumerate(lines):
        if number == 0:
            yield Text()
            yield Text(title, style="bold")
        yield wrapped(line, style, first="  - ")
