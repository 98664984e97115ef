"""The tally of inputs that were read: counts, and what was left out, by place and reason."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

_BAD_KEPT: Final = 100


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """The record of what was read from one source: evidence of what a corpus was made from."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line of JSONL, or row of Parquet, without the text that it should have."""

    path: str
    line: int
    """Counted from 1."""
    kind: str
    """The reason as it is counted: `not JSON`."""
    detail: str
    """The words after the reason: `: Expecting value at column 5`."""


@dataclass(kw_only=True)
class Tally:
    """The counts of a whole input or a part of it; parts are added up in their order."""

    documents: int = 0
    text_bytes: int = 0
    """The bytes of the documents, decompressed."""
    empty: int = 0
    """Documents without text, left out."""
    replaced: int = 0
    """Characters that were none, replaced by U+FFFD or `?`."""
    max_token_id: int = 0
    bad: int = 0
    """Lines left out."""
    bad_kinds: dict[str, int] = field(default_factory=dict)
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first hundred."""
    skipped: list[str] = field(default_factory=list)
    """Binary files found in folders, left out."""
    records: list[InputRecord] = field(default_factory=list)
    lines: int = 0
    """The number of lines in a cut of a file of lines; else 0."""

    @property
    def dropped(self) -> dict[str, int]:
        """Counts what was left out, by reason: documents, lines, files."""
        reasons = {"empty": self.empty, **self.bad_kinds, "binary file": len(self.skipped)}
        return {reason: number for reason, number in reasons.items() if number}

    def add_bad(self, line: BadLine) -> None:
        self.bad += 1
        self.bad_kinds[line.kind] = self.bad_kinds.get(line.kind, 0) + 1
        if len(self.bad_lines) < _BAD_KEPT:
            self.bad_lines.append(line)

    def add(self, later: "Tally", *, lines_before: int = 0) -> None:
        """Add what the next part found.

        Args:
            lines_before: of its file, before a cut; its own bad lines are counted from the cut's first.
        """
        for name in ("documents", "text_bytes", "empty", "replaced", "bad"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.max_token_id = max(self.max_token_id, later.max_token_id)
        self.bad_kinds = dict(Counter(self.bad_kinds) + Counter(later.bad_kinds))
        placed = (replace(line, line=line.line + lines_before) for line in later.bad_lines)
        self.bad_lines = [*self.bad_lines, *placed][:_BAD_KEPT]
        self.skipped += later.skipped
        self.records += later.records
