"""The fault table: what each fault did to a real run, as the tests found it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Protocol

from canzona_cli.errors import ExitCode


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """One fault and what came of it."""

    fault: str
    happened: str
    exit_code: int | None
    """None where the run went on."""
    lost: str


class RecordFault(Protocol):
    """Adds a row. Call it after the test's assertions, so that the table holds only what was checked."""

    def __call__(self, *, fault: str, happened: str, exit_code: int | None, lost: str) -> None: ...


TITLES = ("fault", "what happened", "exit code", "what was lost")
WIDEST = 46


def table_lines(rows: Sequence[FaultRow]) -> list[str]:
    """The rows under their titles, columns aligned, long cells on several lines."""
    table = [TITLES, *((row.fault, row.happened, _code(row.exit_code), row.lost) for row in rows)]
    cells = [[wrap(cell, WIDEST) or [""] for cell in row] for row in table]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(TITLES))]
    lines = [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for row in cells
        for parts in zip_longest(*row, fillvalue="")
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _code(code: int | None) -> str:
    if code is None:
        return "goes on"
    known = next((one.name.lower() for one in ExitCode if one == code), None)
    return f"{code} {known}" if known else str(code)
