"""Pages for a terminal: what every view is made of, from the width and the signs there are to wrapped lines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What a view is drawn on."""

    width: int
    """In characters."""
    ascii_only: bool
    colour: bool

    @property
    def times(self) -> str:
        return "x" if self.ascii_only else "×"

    @property
    def arrow(self) -> str:
        return "->" if self.ascii_only else "→"


class Page:
    """Base of the views: a rich renderable made of parts. Set `widest` where long lines would be hard to read."""

    widest: int | None = None
    """The most columns it uses."""

    def parts(self, screen: Screen) -> Iterable[RenderableType]:
        """What is shown, from top to bottom. A blank line is an empty text."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update_width(min(options.max_width, self.widest or options.max_width))
        colour = console.color_system is not None and not options.ascii_only
        screen = Screen(width=options.max_width, ascii_only=options.ascii_only, colour=colour)
        for part in self.parts(screen):
            yield from console.render(part, options)


@dataclass(frozen=True)
class Wrapped:
    """A paragraph behind `first`, its other lines behind `rest`.

    No trailing spaces, so that piped output stays clean; a word longer than the line is folded, never cut off.
    """

    text: Text
    first: Text
    rest: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(8, options.max_width - max(self.first.cell_len, len(self.rest)))
        for number, line in enumerate(self.text.wrap(console, width)):
            line.rstrip()
            yield Text.assemble(self.first if number == 0 else self.rest, line, no_wrap=True, end="\n")


def wrapped(text: Text | str, style: str = "", *, first: Text | str = "", rest: str | None = None) -> Wrapped:
    """A paragraph.

    Args:
        text: shown literally, never read as markup.
        style: of the text.
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


def items(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    """A titled list, behind a blank line; nothing where there are no lines."""
    for number, line in enumerate(lines):
        if number == 0:
            yield Text()
            yield Text(title, style="bold")
        yield wrapped(line, style, first="  - ")
