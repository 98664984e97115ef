"""Rebuilds the parser of Megatron-LM's command line from the installed sources, without importing Megatron.

To import `megatron.training.arguments` takes eight seconds and loads torch. Its sources are parsed instead: the
calls of `add_argument`, and the dataclasses whose fields become options (`ArgumentGroupFactory`). A test
compares the result with Megatron's own parser, option by option.
"""

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

from canzona_cli.core.reading import Unreadable

_ARGUMENTS: Final = "megatron.training.arguments"
_TYPES: Final[Mapping[str, type]] = {"int": int, "float": float, "bool": bool}
"""The types that the parser checks; the values of other options stay text."""
_KEYWORDS: Final = frozenset({"dest", "default", "nargs", "action", "type"})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Unreadable(f"is not a command line of Megatron-LM: {message}")


@cache
def parser() -> argparse.ArgumentParser:
    """Returns a parser with the options and defaults of the installed Megatron-LM. It raises Unreadable for a
    command line that Megatron-LM would not accept."""
    rebuilt = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for flags, keywords in _options():
        rebuilt.add_argument(*flags, **keywords)
    return rebuilt


@cache
def defaults() -> Mapping[str, object]:
    """Returns the default of each argument of the installed Megatron-LM, by name."""
    return {action.dest: action.default for action in parser()._actions}


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """Returns the flags in a command line, by the names of the arguments that they set."""
    names = {flag: action.dest for action in parser()._actions for flag in action.option_strings}
    flags = (word.partition("=")[0] for word in words)
    return {names[flag]: flag for flag in flags if flag in names}


def _options() -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the flags and the keywords of all options."""
    tree = _tree(_ARGUMENTS)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        lists = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            match call.func:
                case ast.Attribute(attr="add_argument"):
                    yield _option([str(_value(flag)) for flag in call.args], given)
                case ast.Name(id="ArgumentGroupFactory"):
                    excluded = given.get("exclude")
                    excluded = lists[excluded.id] if isinstance(excluded, ast.Name) else excluded
                    names = _value(excluded) if excluded is not None else ()
                    assert isinstance(names, list | tuple)
                    assert isinstance(call.args[0], ast.Name)
                    yield from _options_of_class(_ARGUMENTS, call.args[0].id, frozenset(names))


def _option(flags: list[str], given: Mapping[str, ast.expr]) -> tuple[list[str], dict[str, Any]]:
    keywords: dict[str, Any] = {name: _value(node) for name, node in given.items() if name in _KEYWORDS}
    kind = keywords.pop("type", None)
    if kind in _TYPES:
        keywords["type"] = _TYPES[str(kind)]
    if keywords.get("action") == "BooleanOptionalAction":
        keywords["action"] = argparse.BooleanOptionalAction
        keywords.pop("type", None)
    return flags, keywords


def _options_of_class(module: str, name: str, excluded: frozenset[str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the options that Megatron-LM makes of a dataclass' fields."""
    for field, (annotation, value) in _fields(module, name).items():
        call = value if isinstance(value, ast.Call) else None
        given = {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
        if field in excluded or (call and _value(given.get("init")) is False):
            continue
        default = _value(given.get("default")) if call else _value(value)
        if isinstance(factory := given.get("default_factory"), ast.Name | ast.Lambda):
            default = [] if isinstance(factory, ast.Name) else _value(factory.body)
        kind, nargs = _kind(annotation)
        keywords: dict[str, Any] = {"dest": field, "default": default}
        flags = [f"--{field.replace('_', '-')}"]
        if kind == "bool":
            keywords["action"] = "store_true" if not default and default is not None else "store_false"
            if keywords["action"] == "store_false":
                flags = [flag.replace("--", prefix, 1) for flag in flags for prefix in ("--no-", "--disable-")]
        elif kind in _TYPES:
            keywords["type"] = _TYPES[kind]
        if nargs:
            keywords["nargs"] = nargs
        for meta in _entries(given.get("metadata")).values():
            own = _entries(meta)
            names = _value(own["arg_names"]) if "arg_names" in own else flags
            assert isinstance(names, list)
            flags, overridden = _option([str(flag) for flag in names], own)
            keywords |= overridden
            if isinstance(keywords.get("action"), str):
                keywords.pop("type", None)
        yield flags, keywords


def _fields(module: str, name: str) -> dict[str, tuple[ast.expr, ast.expr | None]]:
    """Returns the annotation and the default of each field of a dataclass and its bases."""
    home, found = _class(module, name)
    fields: dict[str, tuple[ast.expr, ast.expr | None]] = {}
    for base in reversed(found.bases):
        if isinstance(base, ast.Name):
            fields |= _fields(home, base.id)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = node.annotation, node.value
    return fields


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Returns a class that a module defines or imports, and the module that defines it."""
    tree = _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            package = _package(module, node.level) if node.level else ""
            return _class(".".join(filter(None, (package, node.module))), name)
    raise Unreadable(f"needs {name} of {module}, which the installed Megatron-LM does not have")


def _kind(annotation: ast.expr) -> tuple[str, str | None]:
    """Returns the name of an option's type, and `+` if it takes several values."""
    match annotation:
        case ast.Name(id=name):
            return name, None
        case ast.BinOp(op=ast.BitOr(), left=left):
            return _kind(left)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inside):
            return _kind(inside)
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inside):
            return _kind(inside)[0], "+"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            first = choices.elts[0] if isinstance(choices, ast.Tuple) else choices
            return type(_value(first)).__name__, None
    return "str", None


def _value(node: ast.expr | None) -> object:
    """Returns the value of a literal, or the last name of another expression, such as `auto` for
    `AttnBackend.auto`."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
    return None


def _entries(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {str(_value(key)): value for key, value in zip(node.keys, node.values, strict=True)}


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise Unreadable(f"needs the sources of {module}, which cannot be read: {error}") from None


def _path(module: str) -> Path:
    top, *rest = module.split(".")
    spec = find_spec(top)  # of a submodule, it would import the packages that contain it
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        path = Path(folder, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise Unreadable(f"needs {module}, which is not installed")


def _package(module: str, level: int) -> str:
    parts = module.split(".")
    return ".".join(parts[: len(parts) - level + (_path(module).name == "__init__.py")])
