"""The fault table: what each fault did to a real run, as the tests found it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tests import table


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


def table_lines(rows: Sequence[FaultRow]) -> list[str]:
    """The rows under their titles."""
    cells = [(row.fault, row.happened, table.exit_words(row.exit_code), row.lost) for row in rows]
    return table.table_lines(("fault", "what happened", "exit code", "what was lost"), cells)
