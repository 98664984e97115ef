"""The files that the INPUT arguments name: files, globs, folders, standard input, the standard library.

The standard library is the default corpus: the sources of the running Python, about 11 MB of real text on
every machine. Its tests are left out: they are half of the bytes where they are installed, and distributions
often omit them. So are installed packages and the build's generated configuration, which differ between
machines.
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Literal

from canzona_cli.errors import CanzonaError, ConfigError, EnvironmentProblem, Problem, closest

InputFormat = Literal["auto", "text", "jsonl", "parquet"]

STDIN = "-"
STDLIB = "stdlib"
_JSONL = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_GENERATED = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing to read."""

    label: str
    """Its name in messages and in the sidecar."""
    path: Path | None
    """None: standard input."""
    format: InputFormat
    """auto only for standard input, decided by its first byte."""
    size: int | None
    """Bytes on disk; None when unknown beforehand."""
    from_folder: bool = False
    """It was met in a folder rather than named, so a binary file is passed over instead of refused."""


def find_sources(inputs: Sequence[str], format: InputFormat) -> tuple[list[Source], list[Problem]]:
    """Expand the INPUT arguments, in the order given; globs and folders are sorted,
    a file named twice is read once.

    Returns:
        What to read, and what is wrong with the arguments.
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
    return list(sources.values()), problems


def _expand(text: str, format: InputFormat) -> list[Source]:
    if text == STDLIB:
        return stdlib_sources()
    if text == STDIN:
        return [Source(label="standard input", path=None, format=format, size=None)]
    path = Path(text).expanduser()
    if path.is_dir():
        return _walk(path, format)
    paths = [path] if path.exists() else sorted(map(Path, glob(str(path), recursive=True)))
    if not paths:
        fix = "name files, folders, globs, - for standard input, or stdlib"
        if near := closest(path.name, os.listdir(path.parent) if path.parent.is_dir() else ()):
            fix = f"did you mean {path.parent / near}?"
        raise input_error(text, "no such file or folder", fix)
    return [_file_source(name, format) for name in paths if not name.is_dir()]


def _walk(folder: Path, format: InputFormat) -> list[Source]:
    """Lists the files of a folder by name, without hidden ones."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not visible:
        raise input_error(str(folder), "the folder contains no files", "name a folder with text or JSONL files")
    return [_file_source(folder / name, format, from_folder=True) for name in visible]


def _file_source(path: Path, format: InputFormat, *, from_folder: bool = False) -> Source:
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if format == "auto" and suffix == ".json" and not from_folder:
        reason = ".json may be a single value or one per line"
        raise input_error(str(path), reason, "use --format jsonl (one per line) or --format text")
    kind = format
    if format == "auto":
        kind = "jsonl" if suffix in _JSONL else "parquet" if suffix == ".parquet" else "text"
    size = path.stat().st_size if path.is_file() else None  # a named pipe has no size
    return Source(label=str(path), path=path, format=kind, size=size, from_folder=from_folder)


def stdlib_sources() -> list[Source]:
    """Every module's source file, in an order that looks random and is always the same.

    Validation is cut from the end of a corpus. Ordered by the hash of its name, a document's place says
    nothing about its content, while by name the held-out part would be all `xml*` to `zip*`.

    Raises:
        EnvironmentProblem: this Python comes without readable sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in root.walk():
        folders[:] = (name for name in folders if name not in _LEFT_OUT)  # packages beside it may be many
        modules = (name for name in files if name.endswith(".py") and not name.startswith(_GENERATED))
        names += [(folder / name).relative_to(root) for name in modules]
    names.sort(key=lambda name: (hashlib.sha256(name.as_posix().encode()).digest(), name.as_posix()))
    sources = [
        Source(label=f"stdlib:{name.as_posix()}", path=root / name, format="text", size=(root / name).stat().st_size)
        for name in names
    ]
    if not sources:
        reason = f"this Python has no standard library sources in {root}"
        fix = "install them (Debian: libpython3-stdlib), or prepare text of your own with canzona data prepare"
        raise EnvironmentProblem(Problem(key="INPUT", value="stdlib", reason=reason, fix=fix))
    return sources


def stdlib_digest(sources: list[Source]) -> str:
    """Hash of names, order and contents: what a cached corpus is valid for."""
    digest = hashlib.sha256()
    for source in sources:
        assert source.path is not None
        digest.update(f"{source.label}\0".encode() + hashlib.sha256(source.path.read_bytes()).digest())
    return digest.hexdigest()


def input_error(value: str, reason: str, fix: str) -> ConfigError:
    """An error about one input."""
    return ConfigError(Problem(key="INPUT", value=value, reason=reason, fix=fix))
