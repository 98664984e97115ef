"""Checks, without running any code, that the file or module of a custom optimizer has the class."""

import ast
import symtable
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source, find_spec
from pathlib import Path

from canzona_cli.core.errors import closest

_DYNAMIC = {"globals", "exec", "setattr"}
"""The functions with which a module may define arbitrary names at run time."""


def source_problem(place: str, name: str) -> str | None:
    """Returns the reason why a file or module does not have a class, without importing it.

    Returns None if the class exists, or if only running the code would show whether it does.

    Args:
        place: the path of a .py file, or the name of an installed module.
        name: the name of the class.
    """
    if place.endswith(".py"):
        path = Path(place)
        return f"there is no file {place} in {Path.cwd()}" if not path.is_file() else _class_problem(path, name)
    module = _find_module(place)
    if isinstance(module, str):
        return module
    path = Path(module.origin or "")
    return _class_problem(path, name) if path.suffix == ".py" and path.is_file() else None


def _find_module(module: str) -> ModuleSpec | str:
    """Finds a module without importing its parent packages; returns its spec or, if a package or module is
    missing, a message."""
    package, *names = module.split(".")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return f"there is no package {package} here"
    dotted = package
    for part in names:
        parent, dotted = dotted, f"{dotted}.{part}"
        # An imported package may have added folders to its __path__; an import would search these too.
        path = getattr(sys.modules.get(parent), "__path__", spec.submodule_search_locations)
        spec = PathFinder.find_spec(dotted, path or [])
        if spec is None:
            return f"{parent} has no module {part}"
    return spec


def _class_problem(path: Path, name: str) -> str | None:
    try:
        text = decode_source(path.read_bytes())
        module = symtable.symtable(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"{path} is not valid Python: {getattr(error, 'msg', error)}" + (f", line {line}" if line else "")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}
    starred = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(ast.parse(text)))
    if starred or used & _DYNAMIC or bound & {name, "__getattr__"}:
        return None
    classes = [scope.get_name() for scope in module.get_children() if scope.get_type() == "class"]
    similar = closest(name, classes)
    listing = f"its classes are {', '.join(classes)}" if classes else "it has no classes"
    return f"{path} has no class {name}; " + (listing if similar is None else f"did you mean {similar}?")
