"""Tables at the end of the tests' output: what was done to real runs, and what came of it."""

from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap

from canzona_cli.errors import ExitCode

WIDEST = 46


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows under their titles, columns aligned, long cells on several lines."""
    cells = [[wrap(cell, WIDEST) or [""] for cell in row] for row in (titles, *rows)]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(titles))]
    lines = [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for row in cells
        for parts in zip_longest(*row, fillvalue="")
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def exit_words(code: int | None) -> str:
    """An exit code with its name; None where the run went on."""
    if code is None:
        return "goes on"
    known = next((one.name.lower() for one in ExitCode if one == code), None)
    return f"{code} {known}" if known else str(code)
