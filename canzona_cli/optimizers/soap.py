"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from collections.abc import Mapping, Sequence

import torch

from .decompositions import rounding
from .kronecker import LONGEST, KroneckerOptimizer, Side

RESOLVED = torch.finfo(torch.float32).eps ** 0.5
"""Singular values below this share of the largest have no eigenvectors of their own:
their squares are rounding."""


class SOAP(KroneckerOptimizer):
    """Adam in a basis that turns slowly: that of the eigenvectors of Shampoo's factors.

        L, R = averages of G G^T (rows, rows) and G^T G (cols, cols)                       decay shampoo_beta
        every precondition_frequency steps:  Q_L, Q_R = QR(L Q_L), QR(R Q_R)               towards their eigenvectors
        D = Q_L Adam(Q_L^T G Q_R) Q_R^T                                                    moments with betas and eps
        W = (1 - lr weight_decay) W - lr D

    The first Q_L and Q_R come from an eigendecomposition; a refresh is one power iteration and a QR, with
    columns in the order of estimated eigenvalues. Both of Adam's moments are kept in the eigenbasis: at a
    refresh the first is turned to the new one, and the second follows the order of columns, as in the paper.
    Refreshed at every step it is the same rule as emerging-optimizers' SOAP, but for what rounding decides
    there: no update is longer than `LONGEST`, directions that no gradient has are left alone, and what is
    rounding is not divided by rounding. So two runs whose gradients differ by rounding stay close, where they
    drift apart by most of their way.

    Settings are KroneckerOptimizer's; `betas` and `eps` are Adam's. State besides its own: `exp_avg`,
    `exp_avg_sq`, `Q_L`, `Q_R`.
    """

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
        for side, length in self._lengths(p):
            state[f"Q_{side}"] = torch.eye(length, dtype=p.dtype, device=p.device)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        bases = {f"Q_{side}": (length, length) for side, length in self._lengths(p)}
        return {**super().state_shapes(p), **bases, **dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(p.shape))}

    def _refresh(self, stack: Sequence[tuple[torch.Tensor, Side]], factors: torch.Tensor) -> None:
        if self.state[stack[0][0]]["step"] == 1:  # both moments are still zero: nothing to carry over
            self._keep(stack, "Q_", self._eigenbases(stack, factors))
            return
        bases = torch.stack([self.state[p][f"Q_{side}"] for p, side in stack])
        powered = factors @ bases
        sizes = torch.linalg.vecdot(bases, powered, dim=-2)
        # Columns whose size is rounding stay in the order they have.
        sizes = sizes.where(sizes > rounding(sizes.size(-1)) * sizes.amax(-1, keepdim=True), 0)
        order = sizes.argsort(descending=True, stable=True)
        powered = powered.take_along_dim(order[:, None], -1)
        bases = bases.take_along_dim(order[:, None], -1)
        turned = self._orthonormal(stack, powered, bases)
        for (p, side), new, places in zip(stack, turned, order, strict=True):
            if new is not None:
                self._turn(p, side, new, places)

    def _turn(self, p: torch.Tensor, side: Side, new: torch.Tensor, order: torch.Tensor) -> None:
        """Both moments to a new basis, the second by the order of its columns alone."""
        state = self.state[p]
        basis, first, second = state[f"Q_{side}"], state["exp_avg"], state["exp_avg_sq"]
        turned = self.workspace.like("adam", p)
        if side == "L":
            torch.mm(new.mT, torch.mm(basis, first, out=turned), out=first)
            second.copy_(second[order])
        else:
            torch.mm(torch.mm(first, basis.mT, out=turned), new, out=first)
            second.copy_(second[:, order])
        basis.copy_(new)

    def _refreshed(self, p: torch.Tensor) -> None:
        """Let no update after the refresh be longer than Adam's.

        The first moment is turned into the new basis, and the second is not: where that one has seen next to
        nothing along a new direction, updates would be thousands of learning rates long. It is raised there
        to the least that gradients of that average can have, and from there on Adam's own bound holds.
        """
        state = self.state[p]
        done: int = state["step"] - 1
        if not done:
            return
        size = self._adam(p, done).square_().mean().sqrt()
        beta1, beta2 = self.betas
        least = torch.square(state["exp_avg"], out=self.workspace.like("adam", p))
        least.mul_((1 - beta2**done) / ((1 - beta1**done) * LONGEST) ** 2 * (size > LONGEST))
        torch.maximum(state["exp_avg_sq"], least, out=state["exp_avg_sq"])
        self._bounded(p, size, LONGEST, "new bases would have made its update {:.3g} learning rates long; bounded")

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        grad = self._sandwich(p, "Q_", grad, transpose="L")
        if step == 1 and self._sides(p):
            # In its own eigenvectors a gradient is diagonal, as far as squares in fp32 can tell them apart.
            grad.masked_fill_(grad.abs() <= RESOLVED * grad.abs().max(), 0.0)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return self._sandwich(p, "Q_", self._adam(p, step), transpose="R")

    def _adam(self, p: torch.Tensor, steps: int) -> torch.Tensor:
        """Adam's update in the eigenbasis from moments of `steps` gradients; scratch."""
        state = self.state[p]
        beta1, beta2 = self.betas
        root = torch.div(state["exp_avg_sq"], 1 - beta2**steps, out=self.workspace.like("adam", p)).sqrt_()
        if self._sides(p):  # what turning a gradient rounds off is no gradient
            root.add_(torch.linalg.vector_norm(root).mul_(torch.finfo(root.dtype).eps))
        root.add_(self.eps)
        return torch.div(state["exp_avg"], root, out=root).div_(1 - beta1**steps)
