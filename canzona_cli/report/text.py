"""Wrapped lines, for callers that have no page of their own."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions
from rich.text import Text


def wrapped(
    text: Text, console: Console, options: ConsoleOptions, *, first: str = "", rest: str = ""
) -> Iterable[Text]:
    """Lines of `text` that fit `options.max_width`, behind `first` and then `rest` (hanging indent).

    No trailing spaces, so that piped output stays clean; a word longer than the line is folded, never cut off.
    """
    width = max(8, options.max_width - max(len(first), len(rest)))
    for number, line in enumerate(text.wrap(console, width)):
        line.rstrip()
        yield Text.assemble(first if number == 0 else rest, line, no_wrap=True, end="\n")
