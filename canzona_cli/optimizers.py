"""The matrix optimizers (`canzona_cli.core.optimizers`) under their public path."""

from canzona_cli.core.optimizers.matrix_optimizer import Workspace
from canzona_cli.core.optimizers.muon import Muon, NorMuon
from canzona_cli.core.optimizers.shampoo import Shampoo
from canzona_cli.core.optimizers.soap import SOAP

__all__ = ["SOAP", "Muon", "NorMuon", "Shampoo", "Workspace"]
