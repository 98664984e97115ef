"""Loads a user's own optimizer class, and tests it before a run uses it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

import torch

_PROBE_SHAPES = ((4, 6), (6, 4))
_HOST = torch.device("cpu")


class UnusableOptimizer(ValueError):
    """The error for a user's own optimizer that cannot be loaded, or cannot update whole matrices with
    `step()` alone."""


def load_class(source: str, allow: Sequence[str]) -> type[torch.optim.Optimizer]:
    """Loads the class that `source` names. This runs the code of the file or package.

    Args:
        source: `path/to/file.py:Class`, where a relative path starts from the working directory; or
            `module:Class` of an installed package.
        allow: The packages that `module` may belong to. Files do not need an entry.

    Raises:
        UnusableOptimizer: `source` has neither form; the file, module or class does not exist; `allow` does
            not name the package; the code fails when it is loaded; or the class is not a torch optimizer.
    """
    location, colon, name = source.rpartition(":")
    if not colon or not location or not name.isidentifier():
        raise UnusableOptimizer(f"{source!r} is neither path/to/file.py:Class nor module:Class")
    module = _from_file(Path(location)) if location.endswith(".py") else _from_package(location, allow)
    attribute = getattr(module, name, None)
    if attribute is None:
        classes = [key for key, value in vars(module).items() if _is_optimizer(value)]
        raise UnusableOptimizer(f"{location} has no {name}; {_suggest(name, classes, 'it has no optimizer class')}")
    if not _is_optimizer(attribute):
        raise UnusableOptimizer(f"{source} is not a subclass of torch.optim.Optimizer but {_describe(attribute)}")
    optimizer_class: type[torch.optim.Optimizer] = attribute
    return optimizer_class


def probe(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], device: torch.device = _HOST) -> None:
    """Tests an optimizer with two steps on two tiny matrices, without autograd and without a closure.

    Args:
        make: Creates the optimizer as the run will, for the given parameters and with a learning rate above
            0.
        device: The run's device for matrix updates; an optimizer written for GPUs may not work on a CPU.

    Raises:
        UnusableOptimizer: The optimizer cannot be constructed, is not a torch optimizer, needs more than
            `step()`, changes a parameter's shape or dtype, produces values that are not finite, or leaves a
            weight unchanged.
    """
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in _PROBE_SHAPES]
    initial = [p.detach().clone() for p in params]
    try:
        optimizer = make(params)
    except Exception as error:
        raise UnusableOptimizer(f"it cannot be constructed with 2-D parameters: {_error_text(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnusableOptimizer(f"it is not a torch optimizer but {_describe(optimizer)}")
    needed = _required_arguments(optimizer)
    if needed:
        raise UnusableOptimizer(f"its step() needs {', '.join(needed)}; canzona calls step() without arguments")
    for step in (1, 2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        try:
            with torch.no_grad():
                optimizer.step()
        except Exception as error:
            raise UnusableOptimizer(
                f"step {step} failed on 2-D parameters without closure or autograd: {_error_text(error)}"
            ) from error
        for p, old in zip(params, initial, strict=True):
            _check_step(p, old, step)
    for p, old in zip(params, initial, strict=True):
        if torch.equal(p, old):
            raise UnusableOptimizer(f"two steps left a {tuple(p.shape)} parameter unchanged")


def _check_step(p: torch.Tensor, old: torch.Tensor, step: int) -> None:
    shape = tuple(old.shape)
    if p.shape != old.shape or p.dtype != old.dtype:
        raise UnusableOptimizer(
            f"step {step} turned a {shape} parameter of {old.dtype} into {tuple(p.shape)} of {p.dtype}"
        )
    if not bool(p.isfinite().all()):
        raise UnusableOptimizer(f"step {step} produced values that are not finite in a {shape} parameter")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UnusableOptimizer(
            f"there is no file {path.absolute()}; {_suggest(path.name, siblings, 'its folder has no .py file')}"
        )
    name = f"canzona_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module by name
    if (folder := str(path.parent.resolve())) not in sys.path:
        # For modules in the same folder; appended, so that they do not shadow installed ones.
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UnusableOptimizer(f"{path} fails when it is loaded: {_error_text(error)}") from error
    return module


def _from_package(module: str, allow: Sequence[str]) -> ModuleType:
    package = module.partition(".")[0]
    if package not in allow:
        listed = f"optimizer.allow lists {', '.join(allow)}" if allow else "optimizer.allow is empty"
        raise UnusableOptimizer(f"{module} belongs to package {package}, which may not be loaded ({listed})")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UnusableOptimizer(f"{module} cannot be imported: {_error_text(error)}") from error


def _is_optimizer(candidate: object) -> bool:
    return (
        inspect.isclass(candidate)
        and issubclass(candidate, torch.optim.Optimizer)
        and candidate is not torch.optim.Optimizer
    )


def _required_arguments(optimizer: torch.optim.Optimizer) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, argument in inspect.signature(optimizer.step).parameters.items()
        if argument.default is inspect.Parameter.empty and argument.kind not in kinds
    ]


def _suggest(name: str, names: Sequence[str], if_empty: str) -> str:
    if close := get_close_matches(name, names, n=1):
        return f"did you mean {close[0]}?"
    return f"available: {', '.join(sorted(names))}" if names else if_empty


def _describe(candidate: object) -> str:
    return (
        f"the class {candidate.__qualname__}"
        if inspect.isclass(candidate)
        else f"an object of type {type(candidate).__name__}"
    )


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
