"""Writing and reading a run's records: frozen dataclasses on both sides, JSON between them,
one word for damage.

A class with a number `VERSION` has it in its file, first of all, and is read only from files of that version.
Reading checks every type; what a record does not know is ignored, so that newer versions may add to it. A
.jsonl file has a record per line, and half a line at its end where its writer was killed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from canzona_cli.config.reading import Absent, Unreadable, adapter, parse_json, read_plain
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.files import json_object, read_json, write_json_atomic, write_text_atomic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MOST_PLACES: Final = 5


class Damaged(ValueError):
    """The content is not what the type says; the message lists where and why."""


def plain(record: "DataclassInstance") -> dict[str, object]:
    """The record as JSON has it, its version first."""
    version = getattr(record, "VERSION", None)
    return {**({} if version is None else {"version": version}), **asdict(record)}


def parse[T](kind: type[T], content: object, *, strict: bool = False) -> T:
    """A record from plain values, or from JSON as bytes.

    Args:
        strict: no number may be written as text, nor the other way round; needs bytes.

    Raises:
        Damaged: a value is missing or has another type.
    """
    from pydantic import ValidationError

    checked = adapter(kind)
    try:
        if isinstance(content, bytes):
            return checked.validate_json(content, strict=strict)
        return checked.validate_python(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'top level'}: {one['msg'].lower()}"
            for one in error.errors(include_url=False)
        ]
        more = f"; and {len(problems) - _MOST_PLACES} more" if len(problems) > _MOST_PLACES else ""
        raise Damaged("; ".join(problems[:_MOST_PLACES]) + more) from None


def save(path: Path, record: "DataclassInstance", *, indented: bool = True) -> None:
    """Replace the file in one step.

    Args:
        indented: False for what has thousands of entries and no reader but programs.

    Raises:
        OSError: it cannot be written.
    """
    if indented:
        write_json_atomic(path, plain(record))
    else:
        write_text_atomic(path, json.dumps(plain(record)) + "\n")


def load[T](path: Path, kind: type[T], *, key: str, fix: str, value: object = None, inside: str | None = None) -> T:
    """Read and check a record.

    Args:
        key, fix, value: those of the problem that an unreadable file causes; the value is the path unless
            given.
        inside: the record is the value of this key in the file, not the whole of it.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be read, is damaged, or has another version.
    """
    try:
        content = _versioned(parse_json(read_plain(path)), getattr(kind, "VERSION", None))
        return parse(kind, content if inside is None else content[inside])
    except Absent:
        raise
    except Unreadable as error:
        reason = f"{path.name} {error}"
    except Damaged as error:
        reason = f"{path.name} is damaged: {error}"
    except KeyError as error:
        reason = f"{path.name} is damaged: it has no {error}"
    except _OtherVersion as error:
        reason, fix = f"{path.name} {error}", "read it with the canzona that wrote it"
    raise ConfigError(Problem(key=key, value=path if value is None else value, reason=reason, fix=fix))


def load_if_sound[T](path: Path, kind: type[T]) -> T | None:
    """A record that nobody depends on; None where there is none, or none that can be read."""
    return record_of(kind, read_json(path))


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
        lines = read_plain(path, most=None).splitlines()
    except Unreadable:
        return [], 0
    records = [record for line in lines if (record := record_of(kind, json_object(line))) is not None]
    return records, len(lines) - len(records)


def record_of[T](kind: type[T], line: dict[str, object] | None) -> T | None:
    """A line as a record; None where it is none."""
    try:
        return None if line is None else parse(kind, line)
    except Damaged:
        return None


class _OtherVersion(Exception):
    pass


def _versioned(content: object, version: int | None) -> Mapping[str, object]:
    """The content of a file, if it is an object of this version."""
    if not isinstance(content, Mapping):
        raise Damaged("expected a JSON object")
    stored = content.get("version")
    if version is not None and stored is None:
        raise Damaged("it has no version number")
    if version is not None and stored != version:
        raise _OtherVersion(f"has version {stored}, this canzona reads version {version}")
    return content
