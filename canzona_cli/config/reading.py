"""Reads untrusted YAML and JSON files within limits, before any other code interprets their content.

Accepts only regular files, and limits their size, their depth and the number and magnitude of their values to
what canzona needs. Every YAML and JSON file is read here. This module is fast to import.
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
"""The largest file written by a program that is read, in bytes."""
LARGEST_YAML: Final = 1 << 20
"""The largest YAML file that is read, in bytes; a calibrated profile has 50 KiB."""
DEEPEST: Final = 32
"""The most levels of nested lists and mappings; a recipe has 4."""
MOST_VALUES: Final = 100_000
"""The most values in a YAML file, with aliases expanded."""
LARGEST_INTEGER: Final = 1 << 63


class Unreadable(ValueError):
    """A file cannot be read or exceeds a limit. The message is a predicate of the file: `is not a regular
    file`."""


class Absent(Unreadable, FileNotFoundError):
    """The file does not exist."""


def read_plain(path: Path, *, most: int | None = LARGEST, follow: bool = True) -> bytes:
    """Returns the content of a regular file. Pipes and terminals are refused, so that nothing blocks.

    Args:
        most: the largest size in bytes; None: no limit, for files that grow during a run.
        follow: True if the path may be a symbolic link.

    Raises:
        Unreadable: the file does not exist (`Absent`), is not a regular file, is too large, or cannot be
            read.
    """
    try:
        facts = path.stat(follow_symlinks=follow)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("is not a regular file")
        if most is not None and facts.st_size > most:
            raise Unreadable(f"is larger than the limit of {most >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        kind = Absent if isinstance(error, FileNotFoundError) else Unreadable
        raise kind(f"cannot be read: {error.strerror or error}") from None


def parse_json(text: bytes) -> object:
    """Parses a JSON text.

    Raises:
        Unreadable: the text is not JSON, is nested too deeply, or has a number that is not finite or too
            large.
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
    """Parses a YAML text by OmegaConf's rules: duplicate keys are errors, `1e3` is a number, a date is a
    text.

    Raises:
        Unreadable: the text is not valid, is nested too deeply, expands to too many values, or refers to
            itself.
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
    except (YAMLError, ValueError) as error:  # ValueError: an integer of more than 4,300 digits
        message = str(error)
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
            message = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
        raise Unreadable(f"is not valid YAML: {' '.join(message.split())}") from error
    _check(value, finite=False)
    return value


_EXPONENT: Final = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 reads as texts, because they have no decimal point or no sign in the exponent."""
_TOO_DEEP: Final = f"is nested more than {DEEPEST} levels deep"


def _no_number(name: str) -> object:
    raise Unreadable(f"has {name}, which is not a number in JSON")


def _check(value: object, *, finite: bool) -> None:
    """Raises Unreadable if a value is nested too deeply, or contains anything but texts, numbers, booleans
    and nulls.

    Args:
        finite: True to refuse infinities and NaN too. In YAML they are accepted here; the range of a setting
            decides.
    """
    level: Sequence[object] = [value]
    for _ in range(DEEPEST + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int):
                if abs(item) >= LARGEST_INTEGER:
                    raise Unreadable(f"has an integer of {len(str(item)):,} digits")
            elif isinstance(item, float):
                if finite and not math.isfinite(item):
                    raise Unreadable("has a number that is too large for a float")
            elif item is not None and not isinstance(item, str):
                raise Unreadable(f"has a value that is neither text nor a number: {type(item).__name__}")
        if not below:
            return
        level = below
    raise Unreadable(_TOO_DEEP)


def _check_expansion(text: str) -> None:
    """Raises Unreadable if aliases expand to too many values or to themselves, before any value is
    constructed."""
    import yaml

    expanded: dict[str | None, int] = {}
    """The number of values by anchor; anchors of unfinished values are missing."""
    open_values: list[tuple[str | None, int]] = []
    """The lists and mappings around the current event: the anchor, and the number of values before it."""
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
            raise Unreadable(f"expands to more than {MOST_VALUES:,} values")


@cache
def _loader() -> Any:
    """Returns PyYAML's safe loader with OmegaConf's rules, in C if PyYAML was built with it."""
    import yaml
    from yaml.constructor import ConstructorError

    fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(fastest):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key.value, str):
                    continue
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
    """Returns the pydantic adapter of a type, cached because creating it takes longer than using it.

    pydantic's plugins are disabled: searching for them reads the entry points of every installed package.
    """
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
