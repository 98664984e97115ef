"""Reads untrusted YAML and JSON files within limits, before any other code interprets their contents.

Only regular files are accepted. Their size, their depth, their integers and, in YAML, the number of their
values are limited to what canzona needs. This module is fast to import.
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

from canzona_cli.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LARGEST: Final = 256 << 20
"""The maximum size in bytes of a file that canzona or another program wrote."""
LARGEST_YAML: Final = 1 << 20
"""The maximum size in bytes of a YAML file; a calibrated profile has 50 KiB."""
DEEPEST: Final = 32
"""The maximum number of nested lists and mappings; a recipe has 4 levels."""
MOST_VALUES: Final = 100_000
"""The maximum number of values in a YAML file, with aliases expanded."""
LARGEST_INTEGER: Final = 1 << 63


class Unreadable(ValueError):
    """An error for a file that cannot be read, is not valid, or exceeds a limit. The message is a sentence
    without its subject, the file: `is not a regular file`."""


class Absent(Unreadable, FileNotFoundError):
    """An error for a file that does not exist."""


def read_plain(
    path: Path, *, most: int | None = LARGEST, follow: bool = True, part: tuple[int, int] | None = None
) -> bytes:
    """Returns the contents of a regular file. Pipes and terminals are refused, so that nothing blocks.

    Args:
        most: the maximum size in bytes; None for no limit, as for files that grow during a run.
        follow: True if the path may be a symbolic link.
        part: the offset and the length of the bytes to return, fewer if the file ends before; None for all.

    Raises:
        Absent: the file does not exist.
        Unreadable: the file is not a regular file, is too large, or cannot be read.
    """
    try:
        status = path.stat(follow_symlinks=follow)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("is not a regular file")
        if most is not None and status.st_size > most:
            raise Unreadable(f"is larger than the limit of {most >> 20} MiB")
        if part is None:
            return path.read_bytes()
        offset, length = part
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(min(length, max(0, status.st_size - offset)))
    except OSError as error:
        kind = Absent if isinstance(error, FileNotFoundError) else Unreadable
        raise kind(f"cannot be read: {error.strerror or error}") from None


def parse_json(text: bytes) -> object:
    """Parses a JSON text.

    Raises:
        Unreadable: the text is not JSON, is nested too deeply, or has a number that is too large or not
            finite.
    """
    try:
        value: object = json.loads(text, parse_constant=_no_number)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:
        raise Unreadable(f"is not JSON: {error}") from None
    _check_values(value, finite=True)
    return value


def parse_yaml(text: bytes) -> object:
    """Parses a YAML text by OmegaConf's rules: duplicate keys are errors, `1e3` is a number, and a date is
    text.

    Raises:
        Unreadable: the text is not valid, is nested too deeply, expands to too many values, refers to itself,
            or has an integer that is too large or a value that is neither text nor a number.
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
    _check_values(value, finite=False)
    return value


_EXPONENT: Final = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
"""The numbers that YAML 1.1 reads as text because they have no decimal point or no sign in the exponent."""
_TOO_DEEP: Final = f"is nested more than {DEEPEST} levels deep"


def read_yaml(path: Path) -> dict[str, object]:
    """Reads a YAML file of settings.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML, is not a mapping, is empty, or has a `hydra`
            section.
    """
    try:
        content = parse_yaml(read_plain(path, most=LARGEST_YAML))
    except Unreadable as error:
        raise ConfigError(Problem(display_path(path), f"{error}")) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(Problem(display_path(path), "contains no settings", "write `key: value` lines"))
    if "hydra" in content:
        reason = f"would configure Hydra itself, but a recipe may only have settings of a run (in {display_path(path)})"
        raise ConfigError(Problem("hydra", reason, "remove it"))
    return {str(key): value for key, value in content.items()}


def expanded(path: str | Path) -> Path:
    """Returns a path in which the home directory stands for `~` or `~USER`. Without such a user, the path stays as
    it is, and does not exist."""
    return Path(os.path.expanduser(path))


def display_path(path: Path) -> str:
    """Returns a path for messages: relative to the working directory if it is inside that directory,
    otherwise unchanged."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd())}"
    except (ValueError, RuntimeError):  # RuntimeError: a symbolic link to itself
        return str(path)


def _no_number(name: str) -> object:
    raise Unreadable(f"has {name}, which is not a number in JSON")


def _check_values(value: object, *, finite: bool) -> None:
    """Checks that a value is not nested too deeply, and contains only text, numbers, booleans and nulls, with
    integers below `LARGEST_INTEGER`.

    Args:
        finite: True to refuse infinities and NaN too. YAML may contain them; the ranges of settings then
            refuse them.

    Raises:
        Unreadable: the value fails a check.
    """
    level: Sequence[object] = [value]
    for _ in range(DEEPEST + 1):
        next_level: list[object] = []
        for item in level:
            if isinstance(item, dict):
                next_level += [*item, *item.values()]
            elif isinstance(item, list):
                next_level += item
            elif isinstance(item, int):
                if abs(item) >= LARGEST_INTEGER:
                    raise Unreadable(f"has an integer of {len(str(item)):,} digits")
            elif isinstance(item, float):
                if finite and not math.isfinite(item):
                    raise Unreadable("has a number that is too large for a float")
            elif item is not None and not isinstance(item, str):
                raise Unreadable(f"has a value that is neither text nor a number: {type(item).__name__}")
        if not next_level:
            return
        level = next_level
    raise Unreadable(_TOO_DEEP)


def _check_expansion(text: str) -> None:
    """Checks, before any value is constructed, that values are not nested too deeply, and that aliases
    neither refer to themselves nor expand to too many values.

    Raises:
        Unreadable: an alias refers to itself, values are nested too deeply, or there are too many.
    """
    import yaml

    expanded: dict[str | None, int] = {}
    """The number of values by anchor, excluding anchors whose value is not complete yet."""
    open_values: list[tuple[str | None, int]] = []
    """The lists and mappings that contain the current event: the anchor of each, and the number of values
    before it."""
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
            anchor, count_before = open_values.pop()
            total += 1
            expanded[anchor] = total - count_before
        if total > MOST_VALUES:
            raise Unreadable(f"expands to more than {MOST_VALUES:,} values")


@cache
def _loader() -> Any:
    """Returns PyYAML's safe loader with OmegaConf's rules, based on the C loader if PyYAML was built with
    it."""
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
        first_character: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first_character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))
    return Loader


_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def adapter[T](kind: type[T]) -> "TypeAdapter[T]":
    """Returns the pydantic adapter of a type. It is cached, because creating it takes longer than using it.

    pydantic's plugins are disabled, because the search for them reads the entry points of all installed
    packages.
    """
    cached: TypeAdapter[T] = _create_adapter(kind)  # type: ignore[arg-type]
    return cached


@cache
def _create_adapter[T](kind: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    previous = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        return TypeAdapter(kind)
    finally:
        if previous is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = previous


_MOST_PROBLEMS: Final = 5


class Damaged(ValueError):
    """The error for content that does not have the expected type. The message says where and why."""


def parse[T](kind: type[T], content: object, *, strict: bool = False) -> T:
    """Parses a record from JSON (bytes), or from parsed JSON (dicts, lists and numbers).

    Args:
        strict: True refuses conversions between numbers and text; only for bytes.

    Raises:
        Damaged: the bytes are not JSON, or a value is missing or has the wrong type.
    """
    from pydantic import ValidationError

    checked = adapter(kind)
    try:
        if isinstance(content, bytes):
            return checked.validate_json(content, strict=strict)
        return checked.validate_python(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, detail['loc'])) or 'top level'}: {detail['msg'].lower()}"
            for detail in error.errors(include_url=False)
        ]
        more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise Damaged("; ".join(problems[:_MOST_PROBLEMS]) + more) from None


def other_version(stored: object, readable: int) -> str:
    """Returns the reason why a file of another format version is refused, to follow the file's name."""
    return f"was made by another version of canzona: it has format {stored!r}, this version reads format {readable}"
