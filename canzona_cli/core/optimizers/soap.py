"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from collections.abc import Mapping
from functools import partial

import torch

from .decompositions import (
    LinAlgError,
    complete_basis,
    compute_with_fallback,
    eigenbasis,
    orthonormalise,
    orthonormalise_panel,
    rounding,
)
from .kronecker import KroneckerOptimizer, Side
from .shampoo_facts import panel

LONGEST = 2.0
"""The bound on the root mean square of the elements of an update, in learning rates. With current statistics it is 1 if
all gradients are equal, smaller for other gradients, and never above 1.2 with the usual decays."""
RESOLVED = torch.finfo(torch.float32).eps ** 0.5
"""The fraction of the largest singular value below which singular vectors cannot be resolved, because the
squares of these singular values are below fp32's rounding error."""


def _order(powered: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """Returns the order of columns (..., side) by estimated eigenvalue, the largest first; columns whose
    estimate is below the rounding error keep their order.

    Args:
        powered: The factors times their bases, (..., side, side).
        bases: The bases, of the same shape.
    """
    sizes = torch.linalg.vecdot(bases, powered, dim=-2)
    sizes = sizes.where(sizes > rounding(sizes.size(-1)) * sizes.amax(-1, keepdim=True), 0)
    order: torch.Tensor = sizes.argsort(descending=True, stable=True)
    return order


class SOAP(KroneckerOptimizer):
    """SOAP: runs Adam in the slowly changing basis of the eigenvectors of Shampoo's factors.

        L, R = averages of G G^T (rows, rows) and G^T G (cols, cols)                decay shampoo_beta
        every precondition_frequency steps:  Q_L, Q_R = QR(L Q_L), QR(R Q_R)        towards their eigenvectors
        D = Q_L Adam(Q_L^T G Q_R) Q_R^T                                             moments with betas and eps
        W = (1 - lr weight_decay) W - lr D

    The first Q_L and Q_R come from an eigendecomposition; a refresh is one power iteration and a QR, with
    columns in the order of estimated eigenvalues. Both of Adam's moments are kept in the eigenbasis: a
    refresh rotates the first moment to the new basis and reorders the second like the columns, as in the
    paper. With a refresh in every step the rule is that of emerging-optimizers' SOAP, except where rounding
    would decide the result: updates are bounded by `LONGEST`, the basis is not changed in directions without
    any gradient, and rounding errors are not divided by rounding errors. So two runs whose gradients differ
    by rounding stay closer together than they would without these rules.

    Settings are those of KroneckerOptimizer; `betas` and `eps` are Adam's. State besides that of
    KroneckerOptimizer: `Q_L` (rows, rows) and `Q_R` (cols, cols); if refreshes are spread, `next_Q_L` and
    `next_Q_R`, of the same shapes; `exp_avg` and `exp_avg_sq` (rows, cols), in the eigenbasis.
    """

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        for side, length in self._lengths(p):
            state[f"Q_{side}"] = torch.eye(length, dtype=p.dtype, device=p.device)
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        names = ("Q_", "next_Q_") if self.spread else ("Q_",)
        bases = {f"{name}{side}": (length, length) for side, length in self._lengths(p) for name in names}
        return {**super().state_shapes(p), **bases, **dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(p.shape))}

    def _refresh(self, p: torch.Tensor, side: Side, factor: torch.Tensor) -> None:
        basis, report = self.state[p][f"Q_{side}"], partial(self._report, p)
        if self.state[p]["step"] == 1:
            new_basis = compute_with_fallback(eigenbasis, factor, f"the eigendecomposition of {side}", report)
            if new_basis is not None:  # there is nothing to carry over from the identity
                basis.copy_(new_basis)
            return
        powered = factor @ basis
        order = _order(powered, basis)
        orthonormalised = partial(orthonormalise, previous=basis[:, order])
        new_basis = compute_with_fallback(orthonormalised, powered[:, order], f"the QR of {side}", report)
        if new_basis is not None:
            self._reorder(p, side, order, "exp_avg_sq")
            self._turn(p, side, new_basis)

    def _reorder(self, p: torch.Tensor, side: Side, order: torch.Tensor, moment: str) -> None:
        """Puts the rows (L) or columns (R) of a moment into the order of the columns of a new basis."""
        stored = self.state[p][moment]
        stored.copy_(stored[order] if side == "L" else stored[:, order])

    def _turn(self, p: torch.Tensor, side: Side, new_basis: torch.Tensor) -> None:
        """Rotates the first moment of `p` into a new basis of one side, and stores the basis."""
        state = self.state[p]
        basis, moment = state[f"Q_{side}"], state["exp_avg"]
        turned = self.workspace.like("adam", p)
        if side == "L":
            torch.mm(new_basis.mT, torch.mm(basis, moment, out=turned), out=moment)
        else:
            torch.mm(torch.mm(moment, basis.mT, out=turned), new_basis, out=moment)
        basis.copy_(new_basis)

    def _refresh_part(self, p: torch.Tensor, side: Side, part: int) -> bool:
        state = self.state[p]
        if part == 0:
            basis, next_basis = state[f"Q_{side}"], state[f"next_Q_{side}"]
            torch.mm(self._unpacked(p, side), basis, out=next_basis)
            order = _order(next_basis, basis)
            for moment in ("exp_avg", "exp_avg_sq"):
                self._reorder(p, side, order, moment)
            basis.copy_(basis[:, order])
            next_basis.copy_(next_basis[:, order])
        new_basis = self._orthonormalise_part(p, side, part)
        if new_basis is not None:
            self._turn(p, side, new_basis)
        return new_basis is not None

    def _orthonormalise_part(self, p: torch.Tensor, side: Side, part: int) -> torch.Tensor | None:
        """Orthonormalises the columns of `next_Q` that belong to a part of a refresh. Before the first part,
        `next_Q` is the factor times its eigenbasis.

        Returns:
            After the last part the new eigenbasis (length, length), or None if it is not finite; None after
            other parts.
        """
        basis, next_basis = self.state[p][f"Q_{side}"], self.state[p][f"next_Q_{side}"]
        name = f"the QR of {side}"
        report = partial(self._report, p)
        if part == 0:
            longest = torch.linalg.vector_norm(next_basis, dim=0).amax()
            next_basis.div_(longest.where(longest > 0, 1.0))
        start, end = panel(len(basis), part, self.precondition_frequency)
        if start < end:
            compute = partial(orthonormalise_panel, before=next_basis[:, :start])
            columns = compute_with_fallback(compute, next_basis[:, start:end], name, report)
            if columns is None:
                next_basis.copy_(basis)  # already orthonormal, so later parts do not change it
            else:
                next_basis[:, start:end] = columns
        if part < self.precondition_frequency - 1:
            return None
        try:
            return complete_basis(next_basis, basis)
        except LinAlgError as error:
            report(f"{name} failed: {error}; the previous one is kept")
            return None

    def _after_refresh(self, p: torch.Tensor) -> None:
        """Bounds the updates after a refresh; without this, they could exceed Adam's.

        The first moment is rotated into the new basis, the second is not. Where the second moment is close to
        zero in a new direction, updates would be thousands of learning rates long. If the root mean square of
        the update exceeds `LONGEST`, each element of the second moment is raised to the smallest value at
        which that element of the update is no larger than `LONGEST`.
        """
        state = self.state[p]
        steps_before: int = state["step"] - 1
        if not steps_before:
            return
        update_rms = self._adam(p, steps_before).square_().mean().sqrt()
        beta1, beta2 = self.betas
        least = torch.square(state["exp_avg"], out=self.workspace.like("adam", p))
        least.mul_((1 - beta2**steps_before) / ((1 - beta1**steps_before) * LONGEST) ** 2 * (update_rms > LONGEST))
        torch.maximum(state["exp_avg_sq"], least, out=state["exp_avg_sq"])
        self._report_bound(
            p, update_rms, LONGEST, "in its new bases its update would be {:.3g} learning rates long; it was bounded"
        )

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        grad = self._sandwich(p, "Q_", grad, transpose="L")
        if step == 1 and self._sides(p):
            # The first gradient is diagonal in its own singular vectors, so smaller elements are rounding
            # errors.
            grad.masked_fill_(grad.abs() <= RESOLVED * grad.abs().max(), 0.0)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return self._sandwich(p, "Q_", self._adam(p, step), transpose="R")

    def _adam(self, p: torch.Tensor, steps: int) -> torch.Tensor:
        """Returns Adam's update in the eigenbasis (rows, cols), in scratch, from moments of `steps`
        gradients."""
        state = self.state[p]
        beta1, beta2 = self.betas
        divisor = torch.div(state["exp_avg_sq"], 1 - beta2**steps, out=self.workspace.like("adam", p)).sqrt_()
        if self._sides(p):  # so that rounding errors from rotating the gradient do not act as gradients
            divisor.add_(torch.linalg.vector_norm(divisor).mul_(torch.finfo(divisor.dtype).eps))
        divisor.add_(self.eps)
        return torch.div(state["exp_avg"], divisor, out=divisor).div_(1 - beta1**steps)
