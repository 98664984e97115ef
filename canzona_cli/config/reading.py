"""Files that anybody may have written, read within bounds before anything looks at what they mean.

Plain files alone, no larger, no deeper and of no more values than anything that canzona needs; numbers that a
machine has. Every YAML and JSON file is read here. Nothing in it is slow to import.
"""

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LARGEST: Final = 256 << 20
"""Bytes of a file that a program writes."""
LARGEST_YAML: Final = 1 << 20
"""Bytes of a file that people write; a calibrated profile has 50 KiB."""
DEEPEST: Final = 32
"""Levels of lists and mappings; a recipe has 4."""
MOST_VALUES: Final = 100_000
"""The most values in a YAML file, an alias counted as all that it stands for."""
LARGEST_INTEGER: Final = 1 << 63


class Unreadable(ValueError):
    """An error for a file unlike any of its kind; the message completes a sentence:
    `is not a regular file`."""


class Absent(Unreadable, FileNotFoundError):
    """There is no such file."""


def read_plain(path: Path, *, most: int | None = LARGEST, follow: bool = True) -> bytes:
    """The content of a plain file; nobody's pipe or terminal is waited for.

    Args:
        most: bytes; None for a file that grows for as long as a run lasts.
        follow: True if it may be a link to one.

    Raises:
        Unreadable: there is none (`Absent`), it is something else, is too large, or cannot be read.
    """
    try:
        facts = path.stat(follow_symlinks=follow)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("is not a regular file")
        if most is not None and facts.st_size > most:
            raise Unreadable(f"is larger than {most >> 20} MiB, the most that is read")
        return path.read_bytes()
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
    """Reads a YAML text as OmegaConf does: no key twice, `1e3` a number, a date a text.

    Raises:
        Unreadable: it is not valid, is nested too deeply, stands for too many values, or refers to itself.
    """
    from yaml import MarkedYAMLError, YAMLError, load

    try:
        decoded = text.decode("utf-8")
        _check_expansion(decoded)
        value: object = load(decoded, Loader=_loader())
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8 text") from None
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except (YAMLError, ValueError) as error:  # Python reads no integer of more than 4,300 digits
        message = str(error)
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
            message = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
        raise Unreadable(f"is not valid YAML: {' '.join(message.split())}") from error
    _check(value, finite=False)
    return value


_EXPONENT: Final = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for texts, because they have no point or no sign in their exponent."""
_TOO_DEEP: Final = f"is nested more than {DEEPEST} levels deep"


def _no_number(name: str) -> object:
    raise Unreadable(f"has {name}, which is not a number in JSON")


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


def _check_expansion(text: str) -> None:
    """Refuses a text whose aliases stand for more than its file may hold, before anything is made of it."""
    import yaml

    expanded: dict[str | None, int] = {}
    """The number of values an anchor stands for; an anchor whose value is still open is not in it."""
    open_values: list[tuple[str | None, int]] = []
    """The lists and mappings around an event: anchor, and values so far."""
    total = 0
    for event in yaml.parse(text, Loader=_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append((event.anchor, total))
            if len(open_values) > DEEPEST:
                raise Unreadable(_TOO_DEEP)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in {anchor for anchor, _ in open_values}:
                raise Unreadable("refers to itself")
            total += expanded.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            expanded[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_values.pop()
            total += 1
            expanded[anchor] = total - before
        if total > MOST_VALUES:
            raise Unreadable(f"stands for more than {MOST_VALUES:,} values")


@cache
def _loader() -> Any:
    """Returns PyYAML's safe loader with OmegaConf's rules, and in C where it is built so."""
    import yaml
    from yaml.constructor import ConstructorError

    fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(fastest):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key.value, str)):
                if key.value in keys:
                    raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
                keys.add(key.value)
            mapping: dict[object, object] = super().construct_mapping(node, deep)
            return mapping

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))
    return Loader


_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def adapter[T](kind: type[T]) -> "TypeAdapter[T]":
    """Made once: that takes longer than all it then reads. And without pydantic's plugins, as Typer does: to
    look for them it reads the entry points of every package there is."""
    made: TypeAdapter[T] = _made(kind)  # type: ignore[arg-type]
    return made


@cache
def _made[T](kind: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    before = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        return TypeAdapter(kind)
    finally:
        if before is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = before
