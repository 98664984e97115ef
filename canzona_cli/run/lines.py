"""Reading .jsonl files, which a killed writer may leave with half a line at their end."""

import json
from pathlib import Path

from canzona_cli.run.codec import Damaged, parse


class JsonLines:
    """The JSON objects added to a growing file since the last look. A line counts once it has its newline.

    Args:
        only_new: leave out the present content, which an earlier attempt wrote.
    """

    def __init__(self, path: Path, *, only_new: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if only_new and path.exists() else 0
        self._partial = b""

    def read(self) -> list[dict[str, object]]:
        """New objects in their order; none while the file does not exist. Other lines are skipped."""
        try:
            if self._path.stat().st_size == self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._partial = (self._partial + new).split(b"\n")
        return [value for line in lines if (value := json_object(line)) is not None]


def read_lines[T](path: Path, kind: type[T]) -> tuple[list[T], int]:
    """The records of a whole file, and how many of its lines are damaged; nothing where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    found = [record for line in lines if (record := record_of(kind, json_object(line))) is not None]
    return found, len(lines) - len(found)


def record_of[T](kind: type[T], line: dict[str, object] | None) -> T | None:
    """A line as a record; None where it is none."""
    try:
        return None if line is None else parse(kind, line)
    except Damaged:
        return None


def json_object(line: str | bytes) -> dict[str, object] | None:
    """The JSON object in a line; None where it is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
