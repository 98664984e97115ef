"""The base class of SOAP and KL-Shampoo, which keep an eigenbasis of each Kronecker factor."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from .decompositions import (
    LinAlgError,
    complete_basis,
    compute_with_fallback,
    eigenbasis,
    orthonormalise,
    orthonormalise_panel,
)
from .kronecker import KroneckerOptimizer, Side, Stack, unpack
from .shampoo_facts import panel


class EigenbasisOptimizer(KroneckerOptimizer):
    """The base class of optimizers that work in the eigenbases of the factors. The first bases come from an
    eigendecomposition; a refresh is one power iteration and a QR.

    State besides that of KroneckerOptimizer: `Q_L` (rows, rows), `Q_R` (cols, cols); if refreshes are spread,
    `next_Q_L` and `next_Q_R`, of the same shapes.
    """

    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        for side, length in self._lengths(p):
            state[f"Q_{side}"] = torch.eye(length, dtype=p.dtype, device=p.device)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        names = ("Q_", "next_Q_") if self.spread else ("Q_",)
        bases = {f"{name}{side}": (length, length) for side, length in self._lengths(p) for name in names}
        return {**super().state_shapes(p), **bases}

    def _refresh(self, stack: Stack, factors: torch.Tensor) -> None:
        if self.state[stack[0][0]]["step"] > 1:
            bases = torch.stack([self.state[p][f"Q_{side}"] for p, side in stack])
            self._renew(stack, factors @ bases, bases)
            return
        for (p, side), factor in zip(stack, factors, strict=True):
            name, report = f"the eigendecomposition of {side}", partial(self._report, p)
            new_basis = compute_with_fallback(eigenbasis, factor, name, report)
            if new_basis is not None:  # there is nothing to carry over from the identity
                self.state[p][f"Q_{side}"].copy_(new_basis)

    def _renew(self, stack: Stack, powered: torch.Tensor, bases: torch.Tensor) -> None:
        """Makes the columns of `powered` orthonormal, and uses them as the new bases from now on.

        Args:
            powered: The factors times their bases (len(stack), length, length).
            bases: The bases in use, of the same shape.
        """
        for (p, side), new_basis in zip(stack, self._orthonormalise(stack, powered, bases), strict=True):
            if new_basis is not None:
                self._turn(p, side, new_basis)

    def _refresh_part(self, p: torch.Tensor, side: Side, part: int) -> bool:
        state = self.state[p]
        if part == 0:
            basis, next_basis = state[f"Q_{side}"], state[f"next_Q_{side}"]
            torch.mm(unpack(state[side], self._square(p, 1, len(basis))[0]), basis, out=next_basis)
            self._begin_refresh(p, side)
        new_basis = self._orthonormalise_part(p, side, part)
        if new_basis is not None:
            self._turn(p, side, new_basis)
        return new_basis is not None

    def _begin_refresh(self, p: torch.Tensor, side: Side) -> None:
        """Does nothing here. Called in a spread refresh when `next_Q` is the factor times its eigenbasis."""

    def _turn(self, p: torch.Tensor, side: Side, new_basis: torch.Tensor) -> None:
        """Replaces the basis of one side by a new one."""
        self.state[p][f"Q_{side}"].copy_(new_basis)

    def _orthonormalise(
        self, stack: Stack, powered: torch.Tensor, bases: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Returns each matrix of `powered` (a factor times its basis) with its columns made orthonormal; None
        for a matrix whose QR decomposition failed."""
        try:
            return orthonormalise(powered, bases).unbind()
        except LinAlgError:
            return [
                compute_with_fallback(
                    partial(orthonormalise, previous=basis), columns, f"the QR of {side}", partial(self._report, p)
                )
                for (p, side), basis, columns in zip(stack, bases, powered, strict=True)
            ]

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
