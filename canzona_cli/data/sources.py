"""Finds the inputs that the INPUT arguments name: files, globs, folders, standard input, the standard
library.

The standard library is the default corpus: the source code of the running Python, about 11 MB of real text on
every machine. Its tests are excluded, because they are half of the bytes and many distributions omit them.
Installed packages and generated configuration are excluded, because they differ between machines.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

from canzona_cli.core.errors import CanzonaError, ConfigError, EnvironmentProblem, Problem
from canzona_cli.core.reading import expanded

InputFormat = Literal["auto", "text", "jsonl", "parquet"]

STDIN = "-"
STDLIB = "stdlib"
_JSONL = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_GENERATED = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input to read."""

    label: str
    """The name of the input in messages and in the sidecar."""
    path: Path | None
    """The file; None for standard input."""
    format: InputFormat
    """The format. Only standard input can be auto: it is JSONL if its first non-blank character is `{`,
    otherwise text."""
    size: int | None
    """The size in bytes on disk; None if it is not known in advance."""
    from_folder: bool = False
    """True if the file was found in a folder. Such a file is skipped, not refused, if it is binary."""


def find_sources(inputs: Sequence[str], format: InputFormat) -> tuple[list[Source], list[Problem]]:
    """Expands the INPUT arguments in the given order.

    The files of globs and folders are sorted. A file that is named twice is read once.

    Returns:
        The inputs to read, and the problems with the arguments.
    """
    sources: dict[str, Source] = {}
    problems: list[Problem] = []
    for text in inputs:
        try:
            for source in _expand(text, format):
                key = STDIN if source.path is None else str(source.path.resolve())
                sources.setdefault(key, source)
        except CanzonaError as error:
            problems.extend(error.problems)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            problems.append(Problem("INPUT", reason, "check its permissions", value=text))
    return list(sources.values()), problems


def _expand(text: str, format: InputFormat) -> list[Source]:
    if text == STDLIB:
        return stdlib_sources()
    if text == STDIN:
        if sys.stdin.isatty():
            raise input_error(text, "standard input is a terminal", "pipe text into it: zstdcat x.zst | canzona ...")
        return [Source(label="standard input", path=None, format=format, size=None)]
    path = expanded(text)
    if path.is_dir():
        return _folder_sources(path, format)
    if path.exists():
        return [_file_source(path, format)]
    if has_magic(text):
        paths = [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not paths:
            fix = "check the pattern with ls; quote it, or let the shell expand it"
            raise input_error(text, "no file matches this pattern", fix)
        return [_file_source(name, format) for name in paths]
    raise input_error(text, "no such file or folder", _suggestion(path))


def _folder_sources(folder: Path, format: InputFormat) -> list[Source]:
    relative = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [name for name in relative if not any(part.startswith(".") for part in name.parts)]
    if not visible:
        raise input_error(str(folder), "the folder contains no files", "name a folder with text or JSONL files")
    return [_file_source(folder / name, format, from_folder=True) for name in visible]


def _file_source(path: Path, format: InputFormat, *, from_folder: bool = False) -> Source:
    suffixes = path.suffixes[:-1] if path.suffix in _COMPRESSED else path.suffixes
    suffix = suffixes[-1] if suffixes else ""
    if format == "auto" and suffix in _TABLES and not from_folder:
        delimiter = ", delimiter='\\t'" if suffix == ".tsv" else ""
        rows = f"csv.DictReader(open({str(path)!r}, newline='', encoding='utf-8'){delimiter})"
        convert = f'python -c "import csv, json; [print(json.dumps(row)) for row in {rows}]" > {path.stem}.jsonl'
        raise input_error(
            str(path),
            f"{suffix} may be a table, or text of which each line is one",
            f"use --format text to train on the lines as they are, or convert the table: {convert}",
        )
    if format == "auto" and suffix == ".json" and not from_folder:
        raise input_error(
            str(path),
            ".json may be one array, or one object per line",
            "use --format jsonl for objects, after jq -c '.[]' FILE > FILE.jsonl for an array; or --format text",
        )
    kind: InputFormat = format
    if format == "auto":
        by_suffix: dict[str, InputFormat] = {".parquet": "parquet", **dict.fromkeys(_JSONL, "jsonl")}
        kind = by_suffix.get(suffix, "text")
    if not os.access(path, os.R_OK):
        raise input_error(str(path), "cannot be read: Permission denied", "check its permissions")
    size = path.stat().st_size if path.is_file() else None  # a named pipe has no size
    return Source(label=str(path), path=path, format=kind, size=size, from_folder=from_folder)


def json_array_error(label: str) -> ConfigError:
    """Returns the error for a file that is one JSON array."""
    return input_error(label, "is a JSON array, not one object per line", "jq -c '.[]' FILE > FILE.jsonl")


def _suggestion(path: Path) -> str:
    names = [neighbour.name for neighbour in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=2)
    if near:
        return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return "name files, folders, globs, - for standard input, or stdlib"


def stdlib_sources() -> list[Source]:
    """Returns the source file of every module of the standard library, ordered by the hashes of the names.

    Validation data are held out from the end of the built-in corpus. If files were ordered by name, these data would
    be only `xml*` to `zip*`. Ordered by hash they are a fair sample, and the order is always the same.

    Raises:
        EnvironmentProblem: this Python has no readable sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in root.walk():
        folders[:] = (name for name in folders if name not in _EXCLUDED)  # site-packages may be very large
        modules = (name for name in files if name.endswith(".py") and not name.startswith(_GENERATED))
        names += [(folder / name).relative_to(root) for name in modules]
    names.sort(key=lambda name: (hashlib.sha256(name.as_posix().encode()).digest(), name.as_posix()))
    sources = [
        Source(label=f"stdlib:{name.as_posix()}", path=root / name, format="text", size=(root / name).stat().st_size)
        for name in names
        if _is_utf8(root / name)
    ]
    if not sources:
        reason = f"this Python has no standard library sources in {root}"
        fix = "install them (Debian: libpython3-stdlib), or prepare other text with canzona data prepare"
        raise EnvironmentProblem(Problem("INPUT", reason, fix, value="stdlib"))
    return sources


def stdlib_digest(sources: list[Source]) -> str:
    """Returns a hash of the sources' names, order and contents, which is a part of a cached corpus's key."""
    digest = hashlib.sha256()
    for source in sources:
        assert source.path is not None
        digest.update(f"{source.label}\0".encode() + hashlib.sha256(source.path.read_bytes()).digest())
    return digest.hexdigest()


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def input_error(value: str, reason: str, fix: str) -> ConfigError:
    """Returns the error for an input that cannot be used."""
    return ConfigError(Problem("INPUT", reason, fix, value=value))
