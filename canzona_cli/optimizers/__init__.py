"""Update rules on whole matrices: ordinary torch optimizers that know nothing of ranks or of the rest of canzona."""

from .muon import Muon
from .normuon import NorMuon
from .shampoo import Shampoo
from .soap import SOAP
from .stagger import stagger
from .workspace import Workspace

__all__ = ["SOAP", "Muon", "NorMuon", "Shampoo", "Workspace", "stagger"]
