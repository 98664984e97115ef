"""Shampoo: each side of the gradient times an inverse root of its second moment (Gupta et al. 2018,
arXiv:1802.09568), with moving averages and grafting as in Shi et al. 2023 (arXiv:2309.06497)."""

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
    """Each matrix's momentum is whitened on both sides,
    and given the norm of another method's update (grafting).

        L, R = averages of G G^T (rows, rows) and G^T G (cols, cols); M = average of G     decays shampoo_beta, beta1
        every precondition_frequency steps:  A = L^-1/4, B = R^-1/4
        D = A M B,  D = D |Adam(G)| / |D|                                                  with grafting=adam
        W = (1 - lr weight_decay) W - lr D

    Averages are corrected for starting at 0. If one side is longer than `max_preconditioner_dim`, the other
    takes the root -1/2; if both are, the update is the grafted method's own. The momentum is of gradients and
    not of updates, as in Shi et al.: one buffer serves the grafted Adam too, and new roots act on all of it.

    State besides KroneckerOptimizer's: `exp_avg`, `root_L` and `root_R`, packed, and `exp_avg_sq` of a
    grafted Adam.
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
        params, lr, settings: KroneckerOptimizer's. `betas`: decay of M, and of the grafted Adam's second
        moment; `eps`:
            of the grafted Adam.
        shampoo_eps: Added to a factor's eigenvalues, relative to the largest. grafting: Whose update's
        Frobenius norm an update is given. none: its own. sgd: that of M. adam: that of
            M / (sqrt(V) + eps), which makes an AdamW learning rate fit.
        roots: How inverse roots are computed. eigh: from eigenvalues. newton: by products alone, which GPUs
        are better
            at; where that does not converge, from eigenvalues.
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
        """Computes the roots of a stack, and which of them can be used."""
        if self.roots == "newton":
            roots, good = by_newton(factors, order, self.shampoo_eps)
            return roots, good.tolist()
        try:
            return by_eigenvalues(factors, order, self.shampoo_eps), [True] * len(factors)
        except LinAlgError:
            return factors, [False] * len(factors)

    def _bound(self, p: torch.Tensor, direction: torch.Tensor) -> None:
        """Bounds the update: with roots of all gradients that the momentum is of, no singular value is above
        what Adam's update can be (Cauchy-Schwarz); with old ones, along what they have not seen, a thousand
        times that."""
        excess = torch.linalg.vector_norm(direction) / (LONGEST * min(p.shape) ** 0.5)
        direction.div_(excess.clamp_min(1))
        self._bounded(p, excess, 1.0, "its roots would have made the update {:.3g} times the longest; bounded")

    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        beta1, beta2 = self.betas
        step: int = state["step"]
        average = state["exp_avg"].lerp_(grad, 1 - beta1)
        mean = torch.div(average, 1 - beta1**step, out=self.workspace.like("mean", p))
        grafted = mean
        if self.grafting == "adam":
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            # The scratch that _sandwich writes: of the grafted update its norm is all that is needed by then.
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
