"""SOAP-Muon: SOAP's update, orthogonalised (Vyas et al. 2025, "Improving SOAP using iterative whitening and
Muon", https://nikhilvyas.github.io/SOAP_Muon.pdf)."""

from typing import Literal, Unpack

import torch
from torch.optim.optimizer import ParamsT

from . import newton_schulz as iteration
from .kronecker import KroneckerSettings
from .muon import scale
from .muon_facts import CoefficientSet, ScaleMode
from .newton_schulz import newton_schulz
from .soap import SOAP


class SOAPMuon(SOAP):
    """SOAP whitens with what it has seen of gradients; Muon's iteration then finishes what the averages left.

        A = Q_L Adam(Q_L^T G Q_R) Q_R^T                          SOAP's update, (rows, cols)
        O = newton_schulz(A / |A|)                               every singular value becomes about 1
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) O

    Newton-Schulz commutes with turning by Q_L and Q_R, so it is the same in SOAP's basis and out of it. The
    size is Muon's, as in the authors' code for nanoGPT, so Muon's learning rates carry over. That code
    iterates 5 steps and two of a cubic polynomial, from moments without the newest factors; here the
    iteration is Muon's, with its settings.

    State: SOAP's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        ns_steps: int = 5,
        coefficients: CoefficientSet = "quintic",
        scale_mode: ScaleMode = "spectral",
        scale_factor: float = 0.2,
        iterated_in: Literal["bf16", "fp32"] = "bf16",
        **settings: Unpack[KroneckerSettings],
    ) -> None:
        """Args:
        params, lr, settings: SOAP's.
        ns_steps, coefficients, scale_mode, scale_factor: Muon's.
        iterated_in: Precision of the iteration's products; `precision` is that of SOAP's.
        """
        if ns_steps < 1:
            raise ValueError(f"ns_steps is {ns_steps}; at least one is needed")
        super().__init__(params, lr, **settings)
        self.steps = iteration.coefficients(coefficients, ns_steps)
        self.scale_mode = scale_mode
        self.scale_factor = scale_factor
        self.dtype = torch.bfloat16 if iterated_in == "bf16" else torch.float32

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        adam = super()._direction(p, grad)
        x = self.workspace.get("muon_x", p.shape, self.dtype, p.device)
        torch.div(adam, torch.linalg.vector_norm(adam).clamp_min_(torch.finfo(p.dtype).tiny), out=x)
        x = newton_schulz(x, self.steps, self.workspace)
        size = self.scale_factor * scale(p.size(0), p.size(1), self.scale_mode)
        return self.workspace.like("adam", p).copy_(x).mul_(size)
