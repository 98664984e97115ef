"""SOAP-Muon: SOAP whose update is orthogonalised as in Muon (Vyas et al. 2025, "Improving SOAP using
iterative whitening and Muon", https://nikhilvyas.github.io/SOAP_Muon.pdf)."""

from typing import Literal, Unpack

import torch
from torch.optim.optimizer import ParamsT

from . import newton_schulz as iteration
from .kronecker import KroneckerSettings
from .muon import scale
from .muon_facts import CoefficientSet, ScaleMode
from .newton_schulz import newton_schulz
from .norms import matrix_norm
from .soap import SOAP

_SMALLEST = 2.0**-149
"""The smallest positive fp32 number. Dividing by at least this number keeps an update of zeros zero."""


class SOAPMuon(SOAP):
    """SOAP-Muon: orthogonalises SOAP's update. SOAP whitens with averages over past gradients; Muon's
    Newton-Schulz iteration then makes the result orthogonal.

        A = Q_L Adam(Q_L^T G Q_R) Q_R^T                          SOAP's update, (rows, cols)
        O = newton_schulz(A / |A|)                               every singular value becomes about 1
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) O

    Newton-Schulz commutes with the rotations Q_L and Q_R, so it can run before or after the rotation out of
    SOAP's basis. The scale is Muon's, as in the authors' code for nanoGPT, so Muon's learning rates carry
    over. That code runs 5 steps, then two of a cubic polynomial, and does not use the newest factors; here
    the iteration is Muon's, with Muon's settings.

    State: that of SOAP.
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
            params, lr, settings: As for SOAP.
            ns_steps, coefficients, scale_mode, scale_factor: As for Muon.
            iterated_in: The precision of the iteration's matmuls; `precision` is that of SOAP's matmuls.

        Raises:
            ValueError: `ns_steps` is below 1, or a setting of SOAP is not valid.
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
        # Divided by the largest element first: squares of elements below 1e-19 would be zero in fp32.
        adam.div_(torch.linalg.vector_norm(adam, torch.inf).clamp_min_(_SMALLEST))
        torch.div(adam, matrix_norm(adam).clamp_min_(1.0), out=x)
        x = newton_schulz(x, self.steps, self.workspace)
        factor = self.scale_factor * scale(p.size(0), p.size(1), self.scale_mode)
        return self.workspace.like("adam", p).copy_(x).mul_(factor)
