"""Shampoo: multiplies each side of the momentum by an inverse root of the gradients' second moment on that
side (Gupta et al. 2018, arXiv:1802.09568), with moving averages and grafting as in Shi et al. 2023
(arXiv:2309.06497)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Unpack

import torch
from torch.optim.optimizer import ParamsT

from .decompositions import LinAlgError, Order, by_eigenvalues, by_newton, with_fallback
from .facts import RootMethod
from .kronecker import LONGEST, KroneckerOptimizer, KroneckerSettings, Side, pack
from .shampoo_facts import packed_elements

Grafting = Literal["none", "sgd", "adam"]


class Shampoo(KroneckerOptimizer):
    """Shampoo: whitens the momentum of each matrix on both sides and gives it the norm of another method's
    update (grafting).

        L, R = averages of G G^T (rows, rows) and G^T G (cols, cols); M = average of G     decays shampoo_beta, beta1
        every precondition_frequency steps:  A = L^-1/4, B = R^-1/4
        D = A M B,  D = D |Adam(G)| / |D|                                                  with grafting=adam
        W = (1 - lr weight_decay) W - lr D

    Averages are corrected for their start at 0. If one side is longer than `max_preconditioner_dim`, the
    other side uses the power -1/2; if both are, the update is that of the grafted method. As in Shi et al.,
    the momentum averages gradients rather than updates, so the grafted Adam shares its buffer, and new roots
    apply to all of it.

    State besides that of KroneckerOptimizer: `exp_avg`, M (rows, cols); `root_L` and `root_R`, A and B,
    packed; with grafting="adam", `exp_avg_sq` (rows, cols).
    """

    symmetric = ("", "root_")

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        shampoo_eps: float = 1e-12,
        grafting: Grafting = "adam",
        roots: RootMethod = "eigh",
        **settings: Unpack[KroneckerSettings],
    ) -> None:
        """Args:
        params, lr, settings: As for KroneckerOptimizer. `betas`: the decay of M and of the grafted Adam's
            second moment; `eps`: the epsilon of the grafted Adam.
        shampoo_eps: Term added to a factor's eigenvalues, relative to the largest.
        grafting: The method whose update's Frobenius norm the update gets. none: its own norm; sgd: that of
            M; adam: that of M / (sqrt(V) + eps), for which an AdamW learning rate fits. adam keeps one more
            buffer of the size of the weight.
        roots: How inverse roots are computed. eigh: from eigenvalues. newton: by matrix products alone, which
            is faster on GPUs; a root that does not converge is computed from eigenvalues.
        """
        super().__init__(params, lr, **settings)
        self.shampoo_eps = shampoo_eps
        self.grafting = grafting
        self.roots = roots

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        state["exp_avg"] = torch.zeros_like(p)
        if self.grafting == "adam":
            state["exp_avg_sq"] = torch.zeros_like(p)
        for side, length in self._lengths(p):
            identity = torch.eye(length, dtype=p.dtype, device=p.device)
            state[f"root_{side}"] = pack(identity, p.new_empty(packed_elements(length)))

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        moments = ("exp_avg", "exp_avg_sq") if self.grafting == "adam" else ("exp_avg",)
        return {**super().state_shapes(p), **dict.fromkeys(moments, tuple(p.shape))}

    def _refresh(self, stack: Sequence[tuple[torch.Tensor, Side]], factors: torch.Tensor) -> None:
        order: Order = 4 if len(self._sides(stack[0][0])) == 2 else 2
        roots, good = self._roots(factors, order)
        for number, (p, side) in enumerate(stack):
            root: torch.Tensor | None = roots[number]
            if not good[number]:
                report = partial(self._report, p)
                if self.roots == "newton":
                    report(f"the Newton iteration of {side} did not converge; its eigendecomposition is used")
                compute = partial(by_eigenvalues, order=order, eps=self.shampoo_eps)
                root = with_fallback(compute, factors[number], f"the eigendecomposition of {side}", report)
            if root is not None:
                pack(root.contiguous(), self.state[p][f"root_{side}"])

    def _roots(self, factors: torch.Tensor, order: Order) -> tuple[torch.Tensor, Sequence[bool]]:
        """Returns the inverse roots of a stack of factors (count, length, length), and for each root whether
        it can be used."""
        if self.roots == "newton":
            roots, good = by_newton(factors, order, self.shampoo_eps)
            return roots, good.tolist()
        try:
            return by_eigenvalues(factors, order, self.shampoo_eps), [True] * len(factors)
        except LinAlgError:
            return factors, [False] * len(factors)

    def _bound(self, p: torch.Tensor, direction: torch.Tensor) -> None:
        """Scales the update down if it is longer than `LONGEST` sqrt(min(rows, cols)), and reports that.

        If the roots include all gradients that the momentum averages, no singular value of the update exceeds
        the bound of Adam's update (Cauchy-Schwarz). With older roots, it can be a thousand times as large in
        directions that the roots have not seen.
        """
        excess = torch.linalg.vector_norm(direction) / (LONGEST * min(p.shape) ** 0.5)
        direction.div_(excess.clamp_min(1))
        self._bounded(
            p, excess, 1.0, "with outdated roots its update would be {:.3g} times the longest allowed; bounded"
        )

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        average = state["exp_avg"].lerp_(grad, 1 - beta1)
        mean = torch.div(average, 1 - beta1**step, out=self.workspace.like("mean", p))
        grafted = mean
        if self.grafting == "adam":
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            # `_sandwich` overwrites this scratch, but by then only the norm of the grafted update is needed.
            root = torch.div(square, 1 - beta2**step, out=self.workspace.like("sandwich_L", p)).sqrt_().add_(self.eps)
            grafted = torch.div(mean, root, out=root)
        if not self._sides(p):
            return grafted
        norm = torch.linalg.vector_norm(grafted)
        direction = self._sandwich(p, "root_", mean)
        if self.grafting == "none":
            self._bound(p, direction)
        else:
            direction.mul_(norm / torch.linalg.vector_norm(direction).clamp_min_(torch.finfo(p.dtype).tiny))
        return direction
