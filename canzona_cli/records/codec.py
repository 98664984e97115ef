"""Writes records of a run as JSON, and reads them back as frozen dataclasses.

If a record's class has a `VERSION`, its file starts with that number, and files with another number are
refused. Reading checks every type; unknown keys are ignored. A .jsonl file has a record per line; its last line
may be incomplete if the writer was killed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.reading import Absent, Damaged, Unreadable, other_version, parse, parse_json, read_plain
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.files import json_object, write_json_atomic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def record_dict(record: "DataclassInstance") -> dict[str, object]:
    """Converts a record to a dict for JSON, with its version first."""
    version = getattr(record, "VERSION", None)
    return {**({} if version is None else {"version": version}), **asdict(record)}


def save(path: Path, record: "DataclassInstance", *, indented: bool = True) -> None:
    """Writes a record to a JSON file, which replaces an existing file atomically.

    Args:
        indented: False for a file with thousands of entries that only programs read.

    Raises:
        OSError: the file cannot be written.
    """
    if indented:
        write_json_atomic(path, record_dict(record))
    else:
        write_text_atomic(path, json.dumps(record_dict(record)) + "\n")


def load[T](path: Path, kind: type[T], *, key: str, fix: str, value: object = None) -> T:
    """Reads and checks a record.

    Args:
        key, fix, value: fields of the problem that is raised for an unreadable file; `value` defaults to the
            path.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file cannot be read, is damaged, or has another version.
    """
    try:
        content = _check_version(parse_json(read_plain(path)), getattr(kind, "VERSION", None))
        return parse(kind, content)
    except Absent:
        raise
    except Unreadable as error:
        reason = f"{path.name} {error}"
    except Damaged as error:
        reason = f"{path.name} is damaged: {error}"
    except _OtherVersion as error:
        reason, fix = f"{path.name} {error}", "read it with the version of canzona that made it"
    raise ConfigError(Problem(key=key, value=path if value is None else value, reason=reason, fix=fix))


def load_if_valid[T](path: Path, kind: type[T]) -> T | None:
    """Reads an optional record; returns None if the file is missing, damaged or of another version."""
    try:
        return load(path, kind, key="", fix="")
    except (FileNotFoundError, ConfigError):
        return None


class JsonLines:
    """A reader of a growing file to which JSON objects are appended, one per line.

    Args:
        only_new: True skips the lines that the file already has, because an earlier launch wrote them.
    """

    def __init__(self, path: Path, *, only_new: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if only_new and path.exists() else 0
        self._partial = b""

    def read(self) -> list[dict[str, object]]:
        """Returns the objects whose lines were completed since the last call; none if the file does not exist
        yet. Lines that are not JSON objects are skipped."""
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
    """Reads all records of a .jsonl file; returns them and the number of damaged lines. Returns no records
    and 0 if the file cannot be read."""
    try:
        lines = read_plain(path, most=None).splitlines()
    except Unreadable:
        return [], 0
    records = [record for line in lines if (record := record_of(kind, json_object(line))) is not None]
    return records, len(lines) - len(records)


def record_of[T](kind: type[T], line: dict[str, object] | None) -> T | None:
    """Converts a parsed line to a record; returns None if the line is None or not a valid record."""
    try:
        return None if line is None else parse(kind, line)
    except Damaged:
        return None


class _OtherVersion(Exception):
    pass


def _check_version(content: object, version: int | None) -> Mapping[str, object]:
    """Returns the contents of a file, after checking that it is a JSON object of this version."""
    if not isinstance(content, Mapping):
        raise Damaged("expected a JSON object")
    stored = content.get("version")
    if version is not None and stored is None:
        raise Damaged("it has no version number")
    if version is not None and stored != version:
        raise _OtherVersion(other_version(stored, version))
    return content
