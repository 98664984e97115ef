"""The attack table: what was done to canzona from outside, and how it answered, as the tests found it."""

from dataclasses import dataclass
from typing import Protocol

from tests import table


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """One attack and the answer to it."""

    attack: str
    answer: str
    exit_code: int | None
    """None where the run went on."""


class RecordAttack(Protocol):
    """Adds a row. Call it after the test's assertions, so that the table holds only what was checked."""

    def __call__(self, *, attack: str, answer: str, exit_code: int | None) -> None: ...


def table_lines(rows: list[AttackRow]) -> list[str]:
    """The rows under their titles."""
    cells = [(row.attack, row.answer, table.exit_words(row.exit_code)) for row in rows]
    return table.table_lines(("attack", "what happened", "exit code"), cells)
