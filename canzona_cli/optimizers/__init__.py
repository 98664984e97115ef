"""Update rules on whole matrices: ordinary torch optimizers that know nothing of ranks or of the rest of canzona."""

from .kl_shampoo import KLShampoo
from .muon import Muon
from .normuon import NorMuon
from .shampoo import Shampoo
from .soap import SOAP
from .soap_muon import SOAPMuon
from .stagger import stagger
from .workspace import Workspace

__all__ = ["SOAP", "KLShampoo", "Muon", "NorMuon", "SOAPMuon", "Shampoo", "Workspace", "stagger"]
