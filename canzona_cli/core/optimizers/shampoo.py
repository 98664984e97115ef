"""Shampoo: multiplies the momentum from each side by an inverse root of the gradients' second moment on that
side (Gupta et al. 2018, arXiv:1802.09568), with moving averages and grafting as in Shi et al. 2023
(arXiv:2309.06497)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from .decompositions import (
    Order,
    compute_with_fallback,
    newton_converged,
    newton_start,
    newton_step,
    newton_steps,
    roots_by_eigenvalues,
    roots_by_newton,
)
from .facts import MOMENTS, RootMethod
from .kronecker import SIDES, KroneckerOptimizer, KroneckerSettings, Side, pack
from .matrix_optimizer import matrix_norm
from .shampoo_facts import newton_part, packed_elements


class Shampoo(KroneckerOptimizer):
    """Shampoo: whitens the momentum of each matrix on both sides and gives it the norm of Adam's update (grafting),
    which suits AdamW's learning rates.

        L, R = averages of G G^T (rows, rows), G^T G (cols, cols); M = average of G  decays shampoo_beta, beta1
        every precondition_frequency steps:  A = L^-1/4, B = R^-1/4
        D = A M B,  D = D |Adam(G)| / |D|
        W = (1 - lr weight_decay) W - lr D

    Averages are bias-corrected. If one side is longer than `max_preconditioner_dim`, the other side uses the
    power -1/2; if both sides are longer, the update is Adam's. As in Shi et al., the momentum
    averages gradients instead of updates, so it shares its buffer with the grafted Adam, and new roots apply
    to the whole momentum.

    State besides that of KroneckerOptimizer: `exp_avg`, M, and `exp_avg_sq` (rows, cols); `root_L` and `root_R`, A and
    B, packed; if refreshes are spread, X and M of Newton's iteration, `next_root_L`, `next_root_R` and `residual_L`,
    `residual_R`, packed.
    """

    squares = "root_"

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        shampoo_eps: float = 1e-12,
        roots: RootMethod = "eigh",
        **settings: Unpack[KroneckerSettings],
    ) -> None:
        """Args:
            params, lr, settings: As for KroneckerOptimizer. `betas`: the decays of M and of the grafted
                Adam's second moment; `eps`: the epsilon of the grafted Adam.
            shampoo_eps: The term added to a factor's eigenvalues, relative to the largest.
            roots: How inverse roots are computed. eigh: from eigenvalues. newton: using only matmuls, which
                is faster on GPUs; a root that does not converge is computed from eigenvalues.

        Raises:
            ValueError: A setting of KroneckerOptimizer is not valid.
        """
        super().__init__(params, lr, **settings)
        self.symmetric = ("", "root_", "next_root_", "residual_") if self.spread else ("", "root_")
        self.shampoo_eps = shampoo_eps
        self.roots = roots

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
        for side, length in self._lengths(p):
            state[f"root_{side}"] = _identity(p, length)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {**super().state_shapes(p), **dict.fromkeys(MOMENTS, tuple(p.shape))}

    def _refresh(self, p: torch.Tensor, side: Side, factor: torch.Tensor) -> None:
        root: torch.Tensor | None = None
        if self.roots == "newton":
            roots, converged = roots_by_newton(factor[None], self._order(p), self.shampoo_eps)
            if bool(converged):
                root = roots[0]
            else:
                self._report_divergence(p, side)
        if root is None:
            root = self._root_by_eigenvalues(p, side, factor)
        if root is not None:
            pack(root.contiguous(), self.state[p][f"root_{side}"])

    def _refresh_part(self, p: torch.Tensor, side: Side, part: int) -> bool:
        """Runs the steps of Newton's iteration that belong to this part. With `roots="eigh"`, the first part
        computes the whole root. The part with the last step replaces the root in use."""
        root, next_root, residual = (self.state[p][f"{name}_{side}"] for name in ("root", "next_root", "residual"))
        steps = newton_steps(self._order(p))
        parts = [newton_part(step, steps, self.precondition_frequency) for step in range(steps)]
        if self.roots == "newton":
            self._iterate(p, side, [step for step in range(steps) if parts[step] == part])
        elif part == 0:
            new = self._root_by_eigenvalues(p, side, self._unpacked(p, side))
            next_root.copy_(root) if new is None else pack(new.contiguous(), next_root)
            residual.copy_(_identity(p, p.size(SIDES.index(side))))
        if part != parts[-1]:
            return False
        if bool(newton_converged(self._unpacked(p, side, "residual_")[None])):
            root.copy_(next_root)
            return True
        self._report_divergence(p, side)
        new = self._root_by_eigenvalues(p, side, self._unpacked(p, side))
        if new is not None:
            pack(new.contiguous(), root)
        return True

    def _iterate(self, p: torch.Tensor, side: Side, steps: Sequence[int]) -> None:
        """Runs the given steps of Newton's iteration, starting from the X and M in the state and storing the
        new ones there, packed. They are symmetric up to rounding errors."""
        if not steps:
            return
        x: torch.Tensor | None
        if steps[0] == 0:
            m, size = newton_start(self._unpacked(p, side)[None], self.shampoo_eps)
            x, scale = None, size.pow(-1 / self._order(p))
        else:
            m = self._unpacked(p, side, "residual_").clone()[None]
            x, scale = self._unpacked(p, side, "next_root_")[None], None
        for step in steps:
            x, m = newton_step(step, self._order(p), x, m)
        assert x is not None
        pack((x if scale is None else x * scale)[0], self.state[p][f"next_root_{side}"])
        pack(m[0], self.state[p][f"residual_{side}"])

    def _initial_refresh_state(
        self, p: torch.Tensor, state: Mapping[str, torch.Tensor | int]
    ) -> dict[str, torch.Tensor]:
        """Returns X (`next_root`) and M (`residual`) of a Newton iteration that has converged: copies of the
        roots in use, and identities."""
        roots = super()._initial_refresh_state(p, state)
        sides = [(side, length) for side, length in self._lengths(p) if f"next_root_{side}" in roots]
        return {**roots, **{f"residual_{side}": _identity(p, length) for side, length in sides}}

    def _order(self, p: torch.Tensor) -> Order:
        """Returns the order of the roots of `p`."""
        return 4 if len(self._sides(p)) == 2 else 2

    def _root_by_eigenvalues(self, p: torch.Tensor, side: Side, factor: torch.Tensor) -> torch.Tensor | None:
        """Returns the inverse root of a factor, computed from eigenvalues; None if that fails."""
        compute = partial(roots_by_eigenvalues, order=self._order(p), eps=self.shampoo_eps)
        return compute_with_fallback(compute, factor, f"the eigendecomposition of {side}", partial(self._report, p))

    def _report_divergence(self, p: torch.Tensor, side: Side) -> None:
        self._report(p, f"the Newton iteration of {side} did not converge; its eigendecomposition is used")

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        average = state["exp_avg"].lerp_(grad, 1 - beta1)
        mean = torch.div(average, 1 - beta1**step, out=self.workspace.like("mean", p))
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        # `_sandwich` overwrites this scratch, but by then only the norm of Adam's update is needed.
        divisor = torch.div(square, 1 - beta2**step, out=self.workspace.like("sandwich_L", p))
        divisor.sqrt_().add_(self.eps)
        adam = torch.div(mean, divisor, out=divisor)
        if not self._sides(p):
            return adam
        norm = matrix_norm(adam)
        direction = self._sandwich(p, "root_", mean)
        return direction.mul_(norm / matrix_norm(direction).clamp_min_(torch.finfo(p.dtype).tiny))


def _identity(p: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the identity (length, length), packed."""
    identity = torch.eye(length, dtype=p.dtype, device=p.device)
    return pack(identity, p.new_empty(packed_elements(length)))
