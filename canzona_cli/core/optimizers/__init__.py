"""Optimizers that update whole matrices. They are ordinary `torch.optim.Optimizer`s. Only `SharedMuon` knows
about ranks: it can also update a fragment, using collectives that are passed to it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .matrix_optimizer import Workspace
    from .muon import Muon, NorMuon
    from .shampoo import Shampoo
    from .soap import SOAP

__all__ = ["SOAP", "Muon", "NorMuon", "Shampoo", "Workspace"]

_MODULES = {
    "Muon": "muon",
    "NorMuon": "muon",
    "SOAP": "soap",
    "Shampoo": "shampoo",
    "Workspace": "matrix_optimizer",
}


def __getattr__(name: str) -> object:
    """Imports a class on first access, so that the `*_facts` modules can be used without importing torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
