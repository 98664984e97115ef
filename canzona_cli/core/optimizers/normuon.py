"""NorMuon: Muon with neuron-wise (row-wise) normalisation of the update (Li et al. 2025,
arXiv:2510.05491)."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from .muon import Muon, MuonSettings
from .runs import Run

EPS = 1e-10
"""The term added to the root mean square of a row, as in the authors' code. In a matrix of up to 10,000
columns whose rows are orthonormal, the root mean square is at least 1e-2."""


class NorMuon(Muon):
    """NorMuon: divides the rows of Muon's orthogonalised momentum by the root of their second moment.

        O = as in Muon, (rows, cols)                         singular values about 1, rows of any norm
        v = row_beta v + (1 - row_beta) mean(O * O, dim=1)   (rows,): second moment of each neuron's update
        N = O / (sqrt(v) + eps),  N = N |O| / |N|            rows of similar norm, total norm as in Muon
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) N

    Rows are output neurons. Both the mean of a row and |O| need the whole matrix, so NorMuon cannot update
    fragments as `shared_muon` does. The paper (Algorithm 1) scales N to a root mean square of 0.2. The
    authors' code, Microsoft's dion and emerging-optimizers keep |O| and leave the size to the scale, as this
    class does, so Muon's learning rates carry over. emerging-optimizers normalises columns where the matrix
    has more columns than rows.

    State of a matrix: Muon's, and `row_square`, v (rows,).
    """

    def __init__(self, params: ParamsT, lr: float, *, row_beta: float = 0.95, **settings: Unpack[MuonSettings]) -> None:
        """Args:
            params, lr, settings: As for Muon.
            row_beta: Decay of v.

        Raises:
            ValueError: `row_beta` is not in [0, 1), or a setting of Muon is not valid.
        """
        if not 0 <= row_beta < 1:
            raise ValueError(f"row_beta is {row_beta}; a moving average needs 0 <= decay < 1")
        super().__init__(params, lr, **settings)
        self.row_beta = row_beta

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {**super().state_shapes(p), "row_square": (p.size(0),)}

    def _apply(
        self, run: Run, x: torch.Tensor, group: Mapping[str, float], trusted: torch.Tensor | None = None
    ) -> None:
        rows, cols = run.weights.shape[-2:]
        # v and the tensors computed from it have the shape (rows,) or (count, rows).
        v = self._joined_state(run, "row_square", (rows,))
        row_norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        mean_squares = row_norms.square().div_(cols)
        if (flags := self._flags(run)) is not None:  # a skipped update does not change v
            mean_squares = torch.where(flags, mean_squares, v)
        v.lerp_(mean_squares, 1 - self.row_beta)
        factors = v.sqrt().add_(EPS).reciprocal_()
        # The norm of a matrix is the norm of its rows' norms. Both are 0 for a gradient of zeros.
        new_norm = torch.linalg.vector_norm(row_norms * factors, dim=-1, keepdim=True)
        new_norm.clamp_min_(torch.finfo(torch.float32).tiny)
        factors.mul_(torch.linalg.vector_norm(row_norms, dim=-1, keepdim=True) / new_norm)
        # The unscaled direction is no longer needed, so its buffer is reused.
        update = torch.mul(x, factors.unsqueeze(-1), out=self.workspace.like("muon_direction", run.weights))
        super()._apply(run, update, group, trusted)

    def _flags(self, run: Run) -> torch.Tensor | None:
        """Returns a flag for each matrix of a run, (1,) or (count, 1): true if its last update, in Gram form,
        can be trusted. Returns None if the updates were not in Gram form on CUDA."""
        flags = [self._trusted[p] for p in run.matrices if p in self._trusted]
        if len(flags) < len(run.matrices):
            return None
        return torch.stack(flags).view(*run.weights.shape[:-2], 1)
