"""The undocumented properties of Megatron-core that canzona relies on, as data that can be checked.

Each entry of contract.yaml has an importable name, the property that canzona relies on, and a check of that
name in the installed package. `verify` only inspects signatures, attributes and source code; it does not run
any of it. Properties that inspection cannot show are tested on real ranks in `tests/dist`.
"""

import functools
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import yaml

from canzona_cli.core.errors import Problem

Check = Callable[..., str | None]
"""A check of the object that a name refers to. Its first argument is the object, the others are from
contract.yaml. It returns a description of how the object differs from canzona's expectation; None if it does
not differ."""

_WRITTEN_FOR = {"megatron": "megatron-core 0.19.2", "torch": "torch 2.11 to 2.15"}
"""The releases that canzona was written for, by package."""


def exists(target: object) -> str | None:
    """Accepts any object. Used where canzona relies only on the existence of the name."""
    return None


def accepts(target: object, *parameters: str) -> str | None:
    """Checks that a function, or a class's constructor, takes these parameters by name."""
    if not callable(target):
        return "it cannot be called"
    existing = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in existing.values()):
        return None
    return _lacks("parameter", parameters, existing)


def keeps(target: object, *attributes: str) -> str | None:
    """Checks that a class's constructor assigns these attributes to the instance."""
    if not isinstance(target, type):
        return "it is not a class"
    words = _tokens(target.__init__)  # type: ignore[misc]
    assigned = {
        name
        for owner, dot, name, following in zip(words, words[1:], words[2:], words[3:], strict=False)
        if (owner, dot) == ("self", ".") and following in ("=", ":")
    }
    return _lacks("attribute", attributes, assigned)


def has(target: object, *members: str) -> str | None:
    """Checks that a class or module has these members, or a dataclass these fields."""
    existing = {item.name for item in fields(target)} if is_dataclass(target) else set(dir(target))
    return _lacks("field" if is_dataclass(target) else "method", members, existing)


def says(target: Hashable, *texts: str) -> str | None:
    """Checks that these tokens occur in an object's source code; quotes of strings are ignored."""
    return _lacks("mention of", texts, {word.strip("'\"") for word in _tokens(target)})


def reads(target: Hashable, digest: str) -> str | None:
    """Checks that an object's source code has this digest. Used for code that canzona replaces by a version
    that must behave in the same way."""
    actual = source_digest(target)
    return None if actual == digest else f"its source has changed (digest {actual})"


def source_digest(code: Hashable) -> str:
    """Returns a digest of an object's source code without comments and line breaks."""
    return hashlib.sha256("\n".join(_tokens(code)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A property of another package that canzona relies on, and its check."""

    name: str
    """The importable name, such as megatron.core.module.Class.method."""
    relied_on: str
    """The property, as one sentence without a final full stop."""
    check: Check = exists
    arguments: tuple[str, ...] = ()
    """The arguments of the check that follow the object."""


def verify() -> list[Problem]:
    """Returns a problem for each property of `PINNED` that the installed packages lack; none with the
    releases that canzona was written for."""
    return [problem for pin in PINNED for problem in _broken(pin)]


def verify_loop() -> list[Problem]:
    """Returns a problem for each property of `LOOP` that Megatron-LM's training lacks. Imports
    `megatron.training`, which takes seconds."""
    return [problem for pin in LOOP for problem in _broken(pin)]


def _broken(pin: Pinned) -> Iterator[Problem]:
    """Yields a problem if the installed packages lack the property."""
    try:
        difference = pin.check(_resolve(pin.name), *pin.arguments)
    except (ImportError, AttributeError) as error:
        difference = f"it is missing ({error})"
    except (OSError, TypeError, ValueError, tokenize.TokenError) as error:
        difference = f"it cannot be inspected ({error})"
    if difference is not None:
        package = pin.name.partition(".")[0]
        yield Problem(key=pin.name, reason=f"{pin.relied_on}, but {difference}", fix=f"install {_WRITTEN_FOR[package]}")


def _resolve(name: str) -> object:
    """Returns the object that a dotted name refers to. The longest prefix that is a module is imported; the
    other parts are attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            target: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Only a prefix that is too long is skipped, not a missing module that `module` itself imports.
            if error.name is None or not module.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            target = getattr(target, part)
        return target
    raise ImportError(f"no module named {parts[0]}")


def _lacks(kind: str, needed: tuple[str, ...], existing: object) -> str | None:
    """Describes which of the needed names are missing; None if none is."""
    missing = [name for name in needed if name not in existing]  # type: ignore[operator]
    return f"it has no {kind} {', '.join(missing)}" if missing else None


@functools.cache
def _tokens(code: Hashable) -> tuple[str, ...]:
    """Splits the source of `code` into tokens, without comments and line breaks. The beginning and end of a
    block become INDENT and DEDENT."""
    unwrapped = inspect.unwrap(code) if callable(code) else code
    source = io.StringIO(textwrap.dedent(inspect.getsource(unwrapped)))  # type: ignore[arg-type]
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    blocks = (tokenize.INDENT, tokenize.DEDENT)
    return tuple(
        tokenize.tok_name[token.type] if token.type in blocks else token.string
        for token in tokenize.generate_tokens(source.readline)
        if token.type not in ignored
    )


def _pinned(file: str) -> Iterator[Pinned]:
    """Reads the properties from a YAML file next to this module."""
    all_checks: tuple[Check, ...] = (exists, accepts, keeps, has, says, reads)
    checks = {check.__name__: check for check in all_checks}
    for section in yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8")).values():
        for entry in section:
            name, relied_on = entry.pop("name"), entry.pop("relied_on")
            # The key that remains, if any, is the name of the check; its value is the list of arguments.
            [(check, arguments)] = entry.items() or [("exists", ())]
            yield Pinned(name=name, relied_on=relied_on, check=checks[check], arguments=tuple(arguments))


PINNED = tuple(_pinned("contract.yaml"))
"""The properties of megatron-core and torch."""
LOOP = tuple(_pinned("loop_contract.yaml"))
"""The properties of Megatron-LM's own training (`megatron.training`), which only `seams` relies on."""
PROBLEMS = verify()
"""The problems with the installed packages, as checked once at import, before an agent forks its ranks."""
