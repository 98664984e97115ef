"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from collections.abc import Mapping
from functools import partial

import torch

from .decompositions import eigenbasis, orthonormal, with_fallback
from .kronecker import KroneckerOptimizer, Side


class SOAP(KroneckerOptimizer):
    """Adam in a basis that turns slowly: that of the eigenvectors of Shampoo's factors.

        L, R = averages of G G^T (rows, rows) and G^T G (cols, cols)                       decay shampoo_beta
        every precondition_frequency steps:  Q_L, Q_R = QR(L Q_L), QR(R Q_R)               towards their eigenvectors
        D = Q_L Adam(Q_L^T G Q_R) Q_R^T                                                    moments with betas and eps
        W = (1 - lr weight_decay) W - lr D

    The first Q_L and Q_R come from an eigendecomposition; a refresh is one power iteration and a QR, with columns in
    the order of estimated eigenvalues. Both of Adam's moments are kept in the eigenbasis: at a refresh the first is
    turned to the new one, and the second follows the order of columns, as in the paper. Refreshed at every step it is
    the same rule as emerging-optimizers' SOAP.

    Settings are KroneckerOptimizer's; `betas` and `eps` are Adam's. State besides its own: `exp_avg`, `exp_avg_sq`,
    `Q_L`, `Q_R`.
    """

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
        for side in self._sides(p):
            length = p.size(0 if side == "L" else 1)
            state[f"Q_{side}"] = torch.eye(length, dtype=p.dtype, device=p.device)

    def kept(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {**super().kept(p), **self._squares(p, "Q_"), **dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(p.shape))}

    def _refresh(self, p: torch.Tensor, side: Side) -> None:
        state = self.state[p]
        factor, basis = state[side], state[f"Q_{side}"]
        report = partial(self._report, p)
        if state["step"] == 1:  # both moments are still zero: nothing to carry over
            new = with_fallback(eigenbasis, factor, f"the eigendecomposition of {side}", report)
            if new is not None:
                basis.copy_(new)
            return
        powered = torch.mm(factor, basis, out=self.workspace.like("square", factor))
        order = torch.linalg.vecdot(basis, powered, dim=0).argsort(descending=True)
        new = with_fallback(orthonormal, powered[:, order], f"the QR of {side}", report)
        if new is None:
            return
        first, second, turned = state["exp_avg"], state["exp_avg_sq"], self.workspace.like("adam", p)
        if side == "L":
            torch.mm(new.mT, torch.mm(basis, first, out=turned), out=first)
            second.copy_(second[order])
        else:
            torch.mm(torch.mm(first, basis.mT, out=turned), new, out=first)
            second.copy_(second[:, order])
        basis.copy_(new)

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        grad = self._sandwich(p, "Q", grad, transpose="L")
        first = state["exp_avg"].lerp_(grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = torch.div(second, 1 - beta2**step, out=self.workspace.like("adam", p)).sqrt_().add_(self.eps)
        adam = torch.div(first, root, out=root).div_(1 - beta1**step)
        return self._sandwich(p, "Q", adam, transpose="R")
