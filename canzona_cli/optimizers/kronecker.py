"""The base of Shampoo and SOAP: moving averages of G G^T and G^T G,
and when what is made of them is renewed."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from .decompositions import LinAlgError, eigenbasis, orthonormal, with_fallback
from .matrix_optimizer import MatrixOptimizer, OnFallback, ProductPrecision, Workspace, products
from .shampoo_facts import STACKED_SQUARES, packed_elements

Side = Literal["L", "R"]
"""L: rows, from G G^T. R: columns, from G^T G."""
SIDES: tuple[Side, Side] = ("L", "R")
LONGEST = 2.0
"""The largest update, in learning rates: root mean square of Adam's, singular values of Shampoo's. Of
gradients that are all alike they are 1, of others less, and with the usual decays never above 1.2."""
TOGETHER = {"cuda": STACKED_SQUARES}
"""Elements of the squares that one call of a refresh takes, by device."""


class KroneckerSettings(TypedDict, total=False):
    """The arguments that `KroneckerOptimizer` takes by name, for subclasses that pass it on."""

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

    State of a matrix: `step`, updates so far; `L` and `R`, the factors, packed, moving averages that start at
    their first gradient's (corrected for starting at zero); what the subclass adds. A side longer than
    `max_preconditioner_dim` has none. Whatever `precision` says, all that a refresh computes is in fp32.
    """

    symmetric: tuple[str, ...] = ("",)
    """The names, before L and R, of the packed squares of each side."""

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
            eps: The epsilon of Adam.
            shampoo_beta: Decay of the factors.
            precondition_frequency: Steps between two refreshes of a matrix.
            max_preconditioner_dim: A side longer than this is left as it is.
            refresh_offsets: Per parameter: a matrix refreshes at its first step, and, once it has made a
                period of them, when (steps it has made + offset) is a multiple of the period. No sooner:
                after one step SOAP's second moment has nothing off the diagonal, and a new basis would turn
                the first moment onto that.
            on_fallback: Called when a decomposition failed, or an update would have been too long.
            precision: The precision of products; decompositions are fp32 always.
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
        self._unsaid: list[tuple[torch.Tensor, torch.Tensor, float, str]] = []

    @abstractmethod
    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        """Add the subclass's own state to a matrix's."""

    def _seen(self, p: torch.Tensor, grad: torch.Tensor) -> Mapping[Side, torch.Tensor]:
        """X (side, other side) of which each factor averages X X^T; may be scratch."""
        return {"L": grad, "R": grad.mT}

    @abstractmethod
    def _refresh(self, stack: Sequence[tuple[torch.Tensor, Side]], factors: torch.Tensor) -> None:
        """Renew what is made of factors of one length, of matrices with equally many sides;
        what fails stays as it was.

        Args:
            stack: At their first step all together, or none.
            factors: (len(stack), length, length), scratch.
        """

    def _refreshed(self, p: torch.Tensor) -> None:
        """Called after the refresh of all sides."""

    @abstractmethod
    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Computes the direction that `p` moves along; it may be scratch."""

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        packed = {
            f"{name}{side}": (packed_elements(length),) for name in self.symmetric for side, length in self._lengths(p)
        }
        return {"step": None, **packed}

    def converted(self, p: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Older versions kept whole squares of what is packed now."""
        shapes, tensors = self.state_shapes(p), dict(state)
        for name in self.symmetric:
            for side, length in self._lengths(p):
                key = f"{name}{side}"
                if key in tensors and tensors[key].shape == (length, length):
                    tensors[key] = pack(tensors[key], tensors[key].new_empty(shapes[key] or ()))
        return tensors

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        self._say()
        with products(self.precision):
            due = [p for p in matrices if self._learn(p)]
        with products("fp32"):
            for stack in self._stacks(due):
                length = stack[0][0].size(SIDES.index(stack[0][1]))
                factors = self._square(stack[0][0], len(stack), length)
                for (p, side), factor in zip(stack, factors, strict=True):
                    unpack(self.state[p][side], factor)
                self._refresh(stack, factors)
            for p in due:
                self._refreshed(p)
        with products(self.precision):
            for p in matrices:
                self._update(p, self._gradient(p), group)

    def _learn(self, p: torch.Tensor) -> bool:
        """Average a gradient into the factors; whether it is the matrix's turn to be refreshed."""
        state = self.state[p]
        if not state:
            state["step"] = 0
            for side, length in self._lengths(p):
                state[side] = p.new_zeros(packed_elements(length))
            self._start(p, state)
        done: int = state["step"]
        state["step"] = done + 1
        # With this weight the average is corrected for its start by itself (as in emerging-optimizers' SOAP).
        weight = (1 - self.shampoo_beta) / (1 - self.shampoo_beta ** (done + 1))
        seen = self._seen(p, self._gradient(p))
        for side, length in self._lengths(p):
            average_gram(state[side], seen[side], weight, self._square(p, 1, length)[0])
        period = self.precondition_frequency
        return done == 0 or (done >= period and (done + self._offsets[p]) % period == 0)

    def _stacks(self, due: Sequence[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, Side]]]:
        """Yields all sides, those that `_refresh` can take together as far as that is worth it; of a matrix L
        first, for SOAP turns its moments in that order, whatever other matrices there are."""
        for side in SIDES:
            alike: dict[tuple[int, int, bool], list[tuple[torch.Tensor, Side]]] = {}
            for p in due:
                sides = self._sides(p)
                if side in sides:
                    key = p.size(SIDES.index(side)), len(sides), self.state[p]["step"] == 1
                    alike.setdefault(key, []).append((p, side))
            for (length, *_), members in alike.items():
                count = max(1, TOGETHER.get(members[0][0].device.type, 0) // length**2)
                yield from (members[first : first + count] for first in range(0, len(members), count))

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        direction = self._direction(p, grad)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

    def _sides(self, p: torch.Tensor) -> tuple[Side, ...]:
        """Sides that have a factor."""
        return tuple(side for side, _ in self._lengths(p))

    def _lengths(self, p: torch.Tensor) -> list[tuple[Side, int]]:
        """Sides that have a factor, and how long they are."""
        return [at for at in zip(SIDES, p.shape, strict=True) if at[1] <= self.max_preconditioner_dim]

    def _square(self, p: torch.Tensor, count: int, length: int) -> torch.Tensor:
        """Scratch (count, length, length)."""
        return self.workspace.get("square", (count, length, length), p.dtype, p.device)

    def _sandwich(self, p: torch.Tensor, name: str, x: torch.Tensor, *, transpose: Side | None = None) -> torch.Tensor:
        """left x right of the squares that `p`'s state has under `name` and the side, one of them transposed.

        Returns:
            Scratch, overwritten by the next call; `x` itself if no side has a square.
        """
        state = self.state[p]
        for side, length in self._lengths(p):
            square = state[f"{name}{side}"]
            if name in self.symmetric:
                square = unpack(square, self._square(p, 1, length)[0])
            square = square.mT if side == transpose else square
            out = self.workspace.like(f"sandwich_{side}", p)
            x = torch.mm(square, x, out=out) if side == "L" else torch.mm(x, square, out=out)
        return x

    def _eigenbases(
        self, stack: Sequence[tuple[torch.Tensor, Side]], factors: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Eigenvectors of each factor; None where they cannot be had."""
        return [
            with_fallback(eigenbasis, factor, f"the eigendecomposition of {side}", partial(self._report, p))
            for (p, side), factor in zip(stack, factors, strict=True)
        ]

    def _orthonormal(
        self, stack: Sequence[tuple[torch.Tensor, Side]], powered: torch.Tensor, bases: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """`powered`, factors times `bases`, made orthonormal; None where that fails."""
        try:
            return orthonormal(powered, bases).unbind()
        except LinAlgError:
            return [
                with_fallback(partial(orthonormal, previous=basis), new, f"the QR of {side}", partial(self._report, p))
                for (p, side), basis, new in zip(stack, bases, powered, strict=True)
            ]

    def _keep(
        self, stack: Sequence[tuple[torch.Tensor, Side]], name: str, bases: Sequence[torch.Tensor | None]
    ) -> None:
        for (p, side), new in zip(stack, bases, strict=True):
            if new is not None:
                self.state[p][f"{name}{side}"].copy_(new)

    def _bounded(self, p: torch.Tensor, size: torch.Tensor, limit: float, words: str) -> None:
        """Report `words`, which name the size, if it is above the limit. On a GPU before the next update: by
        then the host has waited for the device, here it does not."""
        self._unsaid.append((p, size.to("cpu", non_blocking=True), limit, words))
        if size.device.type == "cpu":
            self._say()

    def _say(self) -> None:
        for p, size, limit, words in self._unsaid:
            if (worst := float(size)) > limit:
                self._report(p, words.format(worst))
        self._unsaid.clear()

    def _report(self, p: torch.Tensor, reason: str) -> None:
        if self.on_fallback is not None:
            self.on_fallback(p, reason)


_STRIP = 64
"""Rows at least of a strip of a product on a CPU."""


def pack(square: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Packs the upper triangle of a contiguous symmetric matrix (side, side), which is overwritten, into
    `out` (packed_elements(side),), which is returned."""
    return out.copy_(_folded(square))


def unpack(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Unpacks what `pack` made into `out` (side, side), contiguous, which is returned."""
    side = len(out)
    half = (side + 1) // 2
    rest = side - half
    out.view(-1)[: len(packed)].copy_(packed)
    lower, corner, room = _lower(half, out.device), out[:half, :half], out[1 : rest + 1, :rest]
    torch.where(lower[:rest, :rest], room, room.mT, out=out[half:, half:])
    corner.copy_(torch.where(lower, corner.mT, corner))
    out[half:, :half].copy_(out[:half, half:].mT)
    return out


def average_gram(packed: torch.Tensor, x: torch.Tensor, weight: float, scratch: torch.Tensor) -> None:
    """packed += weight (X X^T - packed), of `x` (side, long).

    On a CPU by strips of rows, from the diagonal on, so that about half the products are made; a strip is too
    little for a GPU.

    Args:
        scratch: (side, side), contiguous, overwritten.
    """
    side = len(x)
    height = side if x.device.type != "cpu" else max(_STRIP, -(-side // 16))
    for top in range(0, side, height):
        end = min(side, top + height)
        torch.mm(x[top:end], x[top:].mT, out=scratch[top:end, top:])
    packed.lerp_(_folded(scratch), weight)


def _folded(square: torch.Tensor) -> torch.Tensor:
    """Folds a square's upper triangle into its packed form, in the square's memory."""
    side = len(square)
    half = (side + 1) // 2
    rest = side - half
    room = square[1 : rest + 1, :rest]
    torch.where(_lower(rest, square.device), square[half:, half:].mT, room, out=room)
    return square.view(-1)[: packed_elements(side)]


def _lower(side: int, device: torch.device) -> torch.Tensor:
    """Marks the elements that are on the diagonal or below it."""
    return torch.ones(side, side, dtype=torch.bool, device=device).tril_()
