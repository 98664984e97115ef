"""Whether a class that `optimizer.source` names is there, found by reading and never by running anything of it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from canzona_cli.errors import closest


def source_problem(place: str, name: str) -> str | None:
    """Why a file or module has no such class; None where it has one, or where only running it would tell.

    Args:
        place: the path of a .py file, or the name of an installed module.
    """
    if place.endswith(".py"):
        path = Path(place)
        return f"there is no file {place} in {Path.cwd()}" if not path.is_file() else _missing(path, name)
    found = _located(place)
    if isinstance(found, str):
        return found
    path = Path(found.origin or "")
    return _missing(path, name) if path.suffix == ".py" and path.is_file() else None


def _located(module: str) -> ModuleSpec | str:
    """Where a module is, without importing the packages above it; else what is missing."""
    first, *rest = module.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return f"there is no package {first} here"
    whole = first
    for part in rest:
        above, whole = whole, f"{whole}.{part}"
        # An imported package may have added folders to its path, where an import looks too.
        path = getattr(sys.modules.get(above), "__path__", spec.submodule_search_locations)
        spec = PathFinder.find_spec(whole, path or [])
        if spec is None:
            return f"{above} has no module {part}"
    return spec


def _missing(path: Path, name: str) -> str | None:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"{path} is no Python: {getattr(error, 'msg', error)}" + (f", line {line}" if line else "")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    statements = list(_at_module_level(tree.body))
    names = {bound for statement in statements for bound in _bound(statement)}
    if name in names or names & {"*", "__getattr__"}:
        return None
    classes = [statement.name for statement in statements if isinstance(statement, ast.ClassDef)]
    near = closest(name, classes)
    others = f"its classes are {', '.join(classes)}" if classes else "it has no class"
    return f"{path} has no {name}; " + (others if near is None else f"did you mean {near}?")


def _at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those under if, try, with and loops."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _at_module_level(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _at_module_level(handler.body)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives something to; `*` where it may be any."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        inside = [node for target in targets for node in ast.walk(target)]
        yield from (node.id for node in inside if isinstance(node, ast.Name))
        yield from ("*" for node in inside if isinstance(node, ast.Name) and node.id in _DYNAMIC)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from ("*" for found in ast.walk(statement) if isinstance(found, ast.Name) and found.id in _DYNAMIC)


_DYNAMIC = ("globals", "exec", "setattr")
"""What may give something to any name."""
