"""What Shampoo and SOAP share: moving averages of G G^T and G^T G, and when what is made of them is renewed."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from .matrix_optimizer import MatrixOptimizer, OnFallback, ProductPrecision, products
from .packed import average_gram, pack, packed_elements, unpack
from .workspace import Workspace

Side = Literal["L", "R"]
"""L: rows, from G G^T. R: columns, from G^T G."""
SIDES: tuple[Side, Side] = ("L", "R")
LONGEST = 2.0
"""What an update may be, in learning rates: root mean square of Adam's, singular values of Shampoo's. Of gradients that
are all alike they are 1, of others less, and with the usual decays never above 1.2."""


class KroneckerSettings(TypedDict, total=False):
    """What `KroneckerOptimizer` takes by name, for subclasses that pass it on."""

    weight_decay: float
    betas: tuple[float, float]
    eps: float
    shampoo_beta: float
    precondition_frequency: int
    max_preconditioner_dim: int
    refresh_offsets: Sequence[int] | None
    on_fallback: OnFallback | None
    precision: ProductPrecision
    workspace: Workspace | None


class KroneckerOptimizer(MatrixOptimizer):
    """Keeps the factors; a subclass makes a square of each and a direction of the gradient.

    State of a matrix: `step`, updates so far; `L` and `R`, the factors, packed, moving averages that start at their
    first gradient's (corrected for starting at zero); what the subclass adds. A side longer than
    `max_preconditioner_dim` has none. Whatever `precision` says, all that a refresh computes is in fp32.
    """

    symmetric: tuple[str, ...] = ("",)
    """What there is a packed square of for each side: the names before L and R."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 8192,
        refresh_offsets: Sequence[int] | None = None,
        on_fallback: OnFallback | None = None,
        precision: ProductPrecision = "fp32",
        workspace: Workspace | None = None,
    ) -> None:
        """Args:
            params: Matrices, or parameter groups of them.
            lr: Learning rate.
            weight_decay: p *= 1 - lr weight_decay, before the update.
            betas: Decay of the moments.
            eps: Of Adam.
            shampoo_beta: Decay of the factors.
            precondition_frequency: Steps between two refreshes of a matrix.
            max_preconditioner_dim: A side longer than this is left as it is.
            refresh_offsets: Per parameter: a matrix refreshes at its first step, and, once it has made a period of
                them, when (steps it has made + offset) is a multiple of the period. No sooner: after one step SOAP's
                second moment has nothing off the diagonal, and a new basis would turn the first moment onto that.
            on_fallback: Called when a decomposition failed, or an update would have been too long.
            precision: Of products; decompositions are fp32 always.
            workspace: Scratch to share with other optimizers.

        Raises:
            ValueError: A setting is out of range, or there are not as many offsets as parameters.
        """
        for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("shampoo_beta", shampoo_beta)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} is {beta}; a moving average needs 0 <= decay < 1")
        if precondition_frequency < 1:
            raise ValueError(f"precondition_frequency is {precondition_frequency}; it has to be at least 1")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        matrices = list(self._matrices())
        offsets = [0] * len(matrices) if refresh_offsets is None else refresh_offsets
        if len(offsets) != len(matrices):
            raise ValueError(f"refresh_offsets has {len(offsets)} entries for {len(matrices)} parameters")
        self.betas = betas
        self.eps = eps
        self.shampoo_beta = shampoo_beta
        self.precondition_frequency = precondition_frequency
        self.max_preconditioner_dim = max_preconditioner_dim
        self.on_fallback = on_fallback
        self.precision = precision
        self.workspace = workspace or Workspace()
        self._offsets = dict(zip(matrices, offsets, strict=True))

    @abstractmethod
    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        """Add the subclass's own state to a matrix's."""

    @abstractmethod
    def _refresh(self, p: torch.Tensor, side: Side, factor: torch.Tensor) -> None:
        """Renew what is made of a factor (side, side), which is scratch; if that fails, leave it as it was."""

    def _refreshed(self, p: torch.Tensor) -> None:
        """Behind the refresh of all sides."""

    @abstractmethod
    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What `p` moves along; may be scratch."""

    def kept(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        packed = {
            f"{name}{side}": (packed_elements(length),) for name in self.symmetric for side, length in self._lengths(p)
        }
        return {"step": None, **packed}

    def converted(self, p: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Older versions kept whole squares of what is packed now."""
        kept, found = self.kept(p), dict(state)
        for name in self.symmetric:
            for side, length in self._lengths(p):
                key = f"{name}{side}"
                if key in found and found[key].shape == (length, length):
                    found[key] = pack(found[key], found[key].new_empty(kept[key] or ()))
        return found

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            for side, length in self._lengths(p):
                state[side] = p.new_zeros(packed_elements(length))
            self._start(p, state)
        done: int = state["step"]
        state["step"] = done + 1
        with products(self.precision):
            # With this weight the average is corrected for its start by itself (as in emerging-optimizers' SOAP).
            weight = (1 - self.shampoo_beta) / (1 - self.shampoo_beta ** (done + 1))
            for side, length in self._lengths(p):
                across = grad if side == "L" else grad.mT
                average_gram(state[side], across, weight, self._square(p, length))
        period = self.precondition_frequency
        if done == 0 or (done >= period and (done + self._offsets[p]) % period == 0):
            with products("fp32"):
                for side, length in self._lengths(p):
                    self._refresh(p, side, unpack(state[side], self._square(p, length)))
                self._refreshed(p)
        with products(self.precision):
            direction = self._direction(p, grad)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

    def _sides(self, p: torch.Tensor) -> tuple[Side, ...]:
        """Sides that have a factor."""
        return tuple(side for side, _ in self._lengths(p))

    def _lengths(self, p: torch.Tensor) -> list[tuple[Side, int]]:
        """Sides that have a factor, and how long they are."""
        return [at for at in zip(SIDES, p.shape, strict=True) if at[1] <= self.max_preconditioner_dim]

    def _square(self, p: torch.Tensor, length: int) -> torch.Tensor:
        """Scratch (length, length)."""
        return self.workspace.get("square", (length, length), p.dtype, p.device)

    def _sandwich(self, p: torch.Tensor, name: str, x: torch.Tensor, *, transpose: Side | None = None) -> torch.Tensor:
        """left x right of the squares that `p`'s state has under `name` and the side, one of them transposed.

        Returns:
            Scratch, overwritten by the next call; `x` itself if no side has a square.
        """
        state = self.state[p]
        for side, length in self._lengths(p):
            square = state[f"{name}{side}"]
            if name in self.symmetric:
                square = unpack(square, self._square(p, length))
            square = square.mT if side == transpose else square
            out = self.workspace.like(f"sandwich_{side}", p)
            x = torch.mm(square, x, out=out) if side == "L" else torch.mm(x, square, out=out)
        return x

    def _report(self, p: torch.Tensor, reason: str) -> None:
        if self.on_fallback is not None:
            self.on_fallback(p, reason)
