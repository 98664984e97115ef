"""The house as it is drawn in the design: which room may import which, read from the sources."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import canzona_cli

ROOT = Path(canzona_cli.__file__).parent
PACKAGE = ROOT.name
LAYERS = (
    ("__main__",),
    ("cli",),
    ("bench",),
    ("launch",),
    ("training", "library", "optimizers"),
    ("checkpoint",),
    ("data",),
    ("records",),
    ("config",),
    ("core.api",),
    ("core.engine",),
    ("core.megatron",),
    ("core.simulate",),
    ("core.planner",),
    ("core.costs",),
    ("core.model", "core.host", "core.phases"),
    ("core.setup",),
    ("core.optimizers",),
    ("core.reading", "core.writing"),
    ("core.errors", "core.fields"),
)
"""Top to bottom. An import goes down, or sideways without return."""
USES_TORCH = {
    *("bench", "training", "library", "optimizers", "checkpoint"),
    *("core.api", "core.engine", "core.megatron", "core.optimizers"),
}
"""Rooms that may import torch and Megatron; in all others planning, help and reports come at once."""
HEAVY = {"torch", "megatron"}


def module_name(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {module: ast.parse(path.read_bytes()) for module, path in SOURCES.items()}


def imported(module: str) -> Iterator[str]:
    """Yields the imports of a module, inside functions too: modules, and names of modules as `module.name`."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)


def our_module(name: str) -> str:
    return name if name in TREES else name.rpartition(".")[0]


def room(module: str) -> str:
    """The folder below the package, and below its core; or the module itself where it lies in none."""
    _, top, *below = [*module.split("."), ""]
    return f"core.{below[0]}" if top == "core" else top


DEPENDENCIES = {
    module: {our_module(name) for name in imported(module) if name.split(".")[0] == PACKAGE} - {module, PACKAGE}
    for module in TREES
    if module not in (PACKAGE, f"{PACKAGE}.core")
}
ARROWS = {
    (room(module), room(used)): (module, used)
    for module, targets in DEPENDENCIES.items()
    for used in targets
    if room(module) != room(used)
}
"""An example of each arrow between two rooms."""


def test_every_room_has_a_layer() -> None:
    layered = [name for layer in LAYERS for name in layer]
    assert len(layered) == len(set(layered))
    assert {room(module) for module in DEPENDENCIES} == set(layered)


def test_core_imports_nothing_of_the_launcher() -> None:
    """The engine, its plans and the simulator get a `Setup`; where a recipe, a record or a checkpoint lies is none of
    their business."""
    wrong = {
        (module, used)
        for module, targets in DEPENDENCIES.items()
        for used in targets
        if room(module).startswith("core.") and not room(used).startswith("core.")
    }
    assert wrong == set()
    assert len([module for module in DEPENDENCIES if room(module).startswith("core.")]) > 50


def test_imports_go_down_the_layers_or_sideways_without_return() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = {
        (source, target)
        for source, target in ARROWS
        if level[target] < level[source] or (level[target] == level[source] and (target, source) in ARROWS)
    }
    assert {arrow: ARROWS[arrow] for arrow in wrong} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter(DEPENDENCIES).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


def test_only_rooms_that_run_models_import_torch() -> None:
    wrong = {
        (module, name)
        for module in TREES
        if module in DEPENDENCIES and room(module) not in USES_TORCH
        for name in imported(module)
        if name.split(".")[0] in HEAVY
    }
    assert wrong == set()


def test_facts_of_optimizers_need_no_torch() -> None:
    """Rooms without torch ask for facts alone, and modules of facts ask nothing but facts."""
    facts = {module for module in TREES if room(module) == "core.optimizers" and module.endswith("facts")}
    askers = facts | {module for module in DEPENDENCIES if room(module) not in USES_TORCH}
    wrong = {
        (module, used) for module in askers for used in DEPENDENCIES[module] - facts if room(used) == "core.optimizers"
    }
    heavy = {(module, name) for module in facts for name in imported(module) if name.split(".")[0] in HEAVY}
    assert wrong | heavy == set()


def test_optimizers_import_nothing_of_ours_but_the_types_of_settings() -> None:
    outside = {
        (module, used)
        for module, targets in DEPENDENCIES.items()
        for used in targets
        if room(module) == "core.optimizers" != room(used) != "core.fields"
    }
    assert outside == set()


def test_home_directories_are_expanded_in_one_place() -> None:
    """`Path.expanduser` raises an error for a user who does not exist."""
    wrong = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "expanduser" and module != f"{PACKAGE}.core.reading"
    }
    assert wrong == set()


def test_private_names_of_megatron_are_used_in_one_room() -> None:
    """Names that are imported, and attributes of imported modules and classes."""
    found = set()
    for module, tree in TREES.items():
        if room(module) == "core.megatron":
            continue
        names = {name for name in imported(module) if name.split(".")[0] == "megatron"}
        found |= {(module, name) for name in names if any(part.startswith("_") for part in name.split("."))}
        bound = {name.rpartition(".")[2] for name in names}
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_"))
        for node in attributes:
            if isinstance(node.value, ast.Name) and node.value.id in bound:
                found.add((module, f"{node.value.id}.{node.attr}"))
    assert found == set()
