"""KL-Shampoo: Shampoo whose two factors are estimated jointly, by minimising a KL divergence (Lin et al.
2025, arXiv:2509.03378)."""

from collections.abc import Mapping

import torch

from .decompositions import rounding
from .eigenbasis import EigenbasisOptimizer
from .kronecker import LONGEST, Side
from .matrix_optimizer import matmul_precision
from .norms import matrix_norm

NO_FACTOR = 0.2
"""The root mean square of the update of a matrix without factors: about that of AdamW's updates
(arXiv:2502.16982)."""


class KLShampoo(EigenbasisOptimizer):
    """KL-Shampoo: each factor averages the gradient whitened by the other factor. Together they minimise the
    KL divergence between the normal distributions of covariance E[g g^T] and L (x) R (the Kronecker product).
    In Shampoo, each factor ignores the other.

        L = average of G R^-1 G^T / cols,  R = average of G^T L^-1 G / rows   decay shampoo_beta
        l = average of diag(Q_L^T G R^-1 G^T Q_L) / cols,  r likewise         eigenvalues in the basis
        every precondition_frequency steps:  Q_L, Q_R = QR(L Q_L), QR(R Q_R)  towards their eigenvectors
        D = Q_L ((Q_L^T M Q_R) / sqrt(l r^T)) Q_R^T,  M = average of G        decay beta1
        W = (1 - lr weight_decay) W - lr D

    with L^-1 = Q_L diag(1 / l) Q_L^T, likewise R^-1. Neither grafting nor a second moment is needed: a
    whitened gradient has a root mean square of 1, as Adam's update has, so Adam's learning rates fit. As in
    the paper's figure, both factors are averaged with the previous step's l and r, and D uses this step's.

    Differences from the authors' code: l and r start from the size of the first gradient rather than from
    0.1, M is bias-corrected, and no step is skipped, so updates do not depend on the gradients' scale.
    Eigenvalues are bounded below by the rounding error of the largest rather than by 1 / 4000^2. Updates are
    bounded by `LONGEST`, because for some steps after a refresh l and r still belong to the old basis.

    Settings are those of KroneckerOptimizer; `betas[1]` and `eps` are not used. State besides that of
    EigenbasisOptimizer: `exp_avg`, M (rows, cols); `eigenvalues_L`, l (rows,); `eigenvalues_R`, r (cols,).
    `L` and `R` are stored without the divisions by cols and rows, because only their eigenvectors are used.
    """

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        super()._start(p, state)
        state["exp_avg"] = torch.zeros_like(p)
        for side, length in self._lengths(p):
            state[f"eigenvalues_{side}"] = p.new_zeros(length)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        vectors = {f"eigenvalues_{side}": (length,) for side, length in self._lengths(p)}
        return {**super().state_shapes(p), **vectors, "exp_avg": tuple(p.shape)}

    @matmul_precision("fp32")
    def _factor_inputs(self, p: torch.Tensor, grad: torch.Tensor) -> Mapping[Side, torch.Tensor]:
        """Returns, for each side, the gradient whitened on the other side, and updates the eigenvalues with
        this gradient. Always in fp32."""
        state, sides = self.state[p], self._sides(p)
        gradient_rms = matrix_norm(grad) / grad.numel() ** 0.5
        # Eigenvalues are 0 at first, and start from the size of the first gradient that is not 0.
        for side in sides:
            values = state[f"eigenvalues_{side}"]
            torch.where(values.amax() > 0, values, gradient_rms ** (2 / len(sides)), out=values)
        roots = {side: self._inverse_root(p, side) for side in sides}
        if len(sides) < 2:
            self._average_eigenvalues(p, self._sandwich(p, "Q_", grad, transpose="L"), roots)
            return super()._factor_inputs(p, grad)
        left_basis, right_basis = state["Q_L"], state["Q_R"]
        left = torch.mm(left_basis.mT, grad, out=self.workspace.like("sandwich_L", p))
        right = torch.mm(grad, right_basis, out=self.workspace.like("sandwich_R", p))
        both = self.workspace.like("turned", p)
        if p.size(0) <= p.size(1):
            torch.mm(left_basis.mT, right, out=both)
        else:
            torch.mm(left, right_basis, out=both)
        self._average_eigenvalues(p, both, roots)
        return {"L": right.mul_(roots["R"]), "R": left.mul_(roots["L"].unsqueeze(1)).mT}

    def _average_eigenvalues(self, p: torch.Tensor, turned: torch.Tensor, roots: Mapping[Side, torch.Tensor]) -> None:
        """Updates the eigenvalues of each side with the mean squares of the gradient, whitened on the other
        side. Does nothing at the first step, when there is no basis yet.

        Args:
            turned: The gradient in the current basis (rows, cols).
            roots: The inverse roots of the previous eigenvalues, by side.
        """
        if self.state[p]["step"] == 1:
            return
        square = torch.square(turned, out=self.workspace.like("turned", p))
        for side in roots:
            across, other_root = (square, roots.get("R")) if side == "L" else (square.mT, roots.get("L"))
            estimate = across.mean(1) if other_root is None else (across @ other_root.square()).div_(across.size(1))
            self.state[p][f"eigenvalues_{side}"].lerp_(estimate, 1 - self.shampoo_beta)

    def _inverse_root(self, p: torch.Tensor, side: Side) -> torch.Tensor:
        """Returns the inverse square roots of a side's eigenvalues (length,), which are first raised to at
        least the rounding error of the largest."""
        values: torch.Tensor = self.state[p][f"eigenvalues_{side}"]
        least = (rounding(len(values)) * values.amax()).clamp_min_(torch.finfo(values.dtype).tiny)
        return torch.maximum(values, least).rsqrt_()

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state, beta1 = self.state[p], self.betas[0]
        out = self.workspace.like("turned", p)
        direction = self._sandwich(p, "Q_", state["exp_avg"].lerp_(grad, 1 - beta1), transpose="L")
        for side in self._sides(p):
            direction = torch.mul(direction, self._inverse_root(p, side).unsqueeze(1 if side == "L" else 0), out=out)
        direction_rms = (matrix_norm(direction) / p.numel() ** 0.5).clamp_min_(torch.finfo(p.dtype).tiny)
        if not self._sides(p):
            return torch.mul(direction, NO_FACTOR / direction_rms, out=out)
        step: int = state["step"]
        direction.mul_((LONGEST / direction_rms).clamp_max_(1 / (1 - beta1**step)))
        return self._sandwich(p, "Q_", direction, transpose="R")
