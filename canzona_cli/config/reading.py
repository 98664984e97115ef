"""Files that anybody may have written, read within bounds before anything looks at what they mean.

Plain files alone, no larger, no deeper and of no more values than anything that canzona needs; numbers that a machine
has. Every YAML and JSON file is read here. Nothing in it is slow to import.
"""

import json
import math
import os
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

LARGEST: Final = 256 << 20
"""Bytes of a file that a program writes."""
LARGEST_YAML: Final = 1 << 20
"""Bytes of a file that people write; a calibrated profile has 50 KiB."""
DEEPEST: Final = 32
"""Levels of lists and mappings; a recipe has 4."""
MOST_VALUES: Final = 100_000
"""In a YAML file, an alias counted as all that it stands for."""
LARGEST_INTEGER: Final = 1 << 63


class Unreadable(ValueError):
    """What no file of that kind looks like; the message says it to the user: `is no plain file`."""


class Absent(Unreadable, FileNotFoundError):
    """There is no such file."""


def read_plain(path: Path, *, most: int | None = LARGEST, follow: bool = True) -> bytes:
    """The content of a plain file; nobody's pipe or terminal is waited for.

    Args:
        most: bytes; None for a file that grows for as long as a run lasts.
        follow: whether it may be a link to one.

    Raises:
        Unreadable: there is none (`Absent`), it is something else, is too large, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Unreadable("is no plain file")
            if most is not None and found.st_size > most:
                raise Unreadable(f"is larger than {most >> 20} MiB, the most that is read")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        kind = Absent if isinstance(error, FileNotFoundError) else Unreadable
        raise kind(f"cannot be read: {error.strerror or error}") from None


def parse_json(text: bytes) -> object:
    """The value of a JSON text.

    Raises:
        Unreadable: it is none, is nested too deeply, or has a number that is none.
    """
    try:
        value: object = json.loads(text, parse_constant=_no_number)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:
        raise Unreadable(f"is not JSON: {error}") from None
    _check(value, finite=True)
    return value


def parse_yaml(text: bytes) -> object:
    """The value of a YAML text as OmegaConf reads it: no key twice, `1e3` a number, no dates.

    Raises:
        Unreadable: it is none, is nested too deeply, stands for too many values, or refers to itself.
    """
    from yaml import MarkedYAMLError, YAMLError, load

    try:
        value: object = load(text.decode("utf-8"), Loader=_loader())
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8 text") from None
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except (YAMLError, ValueError) as error:  # Python reads no integer of more than 4,300 digits
        said = str(error)
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
            said = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
        raise Unreadable(f"is not valid YAML: {' '.join(said.split())}") from error
    _check(value, finite=False)
    return value


_TOO_DEEP: Final = f"is nested more than {DEEPEST} levels deep"


def _no_number(name: str) -> object:
    raise Unreadable(f"has {name}, which is no number of JSON")


def _check(value: object, *, finite: bool) -> None:
    """Depth, and values: text, numbers, true, false and null.

    Args:
        finite: refuse infinities too; settings say themselves which of them is one.
    """
    level: Sequence[object] = [value]
    for _ in range(DEEPEST + 1):
        below: list[object] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one, *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, int):
                if abs(one) >= LARGEST_INTEGER:
                    raise Unreadable(f"has an integer of {len(str(one)):,} digits")
            elif isinstance(one, float):
                if finite and not math.isfinite(one):
                    raise Unreadable("has a number beyond what a computer takes for one")
            elif one is not None and not isinstance(one, str):
                raise Unreadable(f"has a value that is neither text nor a number: {type(one).__name__}")
        if not below:
            return
        level = below
    raise Unreadable(_TOO_DEEP)


@cache
def _loader() -> Any:
    """OmegaConf's, which counts what it composes."""
    from omegaconf._utils import get_yaml_loader
    from yaml import AliasEvent, Node

    class Bounded(get_yaml_loader()):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self._values = self._level = 0
            self._expanded: dict[int, int] = {}
            """By node: values it stands for, itself included; none yet where it is still open."""

        def compose_node(self, parent: Node | None, index: object) -> Node:
            self._level += 1
            if self._level > DEEPEST:
                raise Unreadable(_TOO_DEEP)
            before, alias = self._values, self.check_event(AliasEvent)
            node: Node = super().compose_node(parent, index)
            if not alias:
                self._values += 1
                self._expanded[id(node)] = self._values - before
            elif id(node) in self._expanded:
                self._values += self._expanded[id(node)]
            else:
                raise Unreadable("refers to itself")
            if self._values > MOST_VALUES:
                raise Unreadable(f"stands for more than {MOST_VALUES:,} values")
            self._level -= 1
            return node

    return Bounded
