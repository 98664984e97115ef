"""NorMuon: Muon whose rows move alike (Li et al. 2025, arXiv:2510.05491)."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from .muon import Muon, MuonSettings

EPS = 1e-10
"""Added to the root of a row's mean square, as by the authors;
it is 1e-2 and more where rows are orthogonal."""


class NorMuon(Muon):
    """Muon, with the rows of the orthogonalised momentum brought to one size by their second moment.

        O = as Muon's, (rows, cols)                              singular values about 1, rows of any size
        v = row_beta v + (1 - row_beta) mean(O * O, dim=1)       (rows,): what each neuron was moved by, squared
        N = O / (sqrt(v) + eps),  N = N |O| / |N|                rows alike, and the update as long as Muon's
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) N

    Rows are output neurons: the mean is over whole ones, which is plain here, as hosts have whole matrices.
    Ranks with fragments would not know |O|: there is no such form of it as `shared_muon`. The paper
    (algorithm 1) gives N the root mean square 0.2; the authors' code, Microsoft's dion and
    emerging-optimizers keep |O| and leave the size to the scale, as here, so Muon's learning rates carry
    over. emerging-optimizers takes columns where the matrix is wider than high.

    State of a matrix: Muon's, and `row_square`, v.
    """

    def __init__(self, params: ParamsT, lr: float, *, row_beta: float = 0.95, **settings: Unpack[MuonSettings]) -> None:
        """Args:
        params, lr, settings: Muon's.
        row_beta: Decay of v.

        Raises:
            ValueError: `row_beta` is no decay.
        """
        if not 0 <= row_beta < 1:
            raise ValueError(f"row_beta is {row_beta}; a moving average needs 0 <= decay < 1")
        super().__init__(params, lr, **settings)
        self.row_beta = row_beta

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {**super().state_shapes(p), "row_square": (p.size(0),)}

    def _apply(self, p: torch.Tensor, x: torch.Tensor, group: Mapping[str, float]) -> None:
        state = self.state[p]
        if "row_square" not in state:
            state["row_square"] = p.new_zeros(p.size(0))
        sizes = torch.linalg.vector_norm(x, dim=1, dtype=p.dtype)
        mean, square = sizes.square().div_(p.size(1)), state["row_square"]
        if (trusted := self._trusted.get(p)) is not None:  # an update that is left out was none of theirs
            mean = torch.where(trusted, mean, square)
        square.lerp_(mean, 1 - self.row_beta)
        factors = square.sqrt().add_(EPS).reciprocal_()
        # Norms of the matrix are those of its rows' norms. A gradient of zeros has neither.
        new = torch.linalg.vector_norm(sizes * factors).clamp_min_(torch.finfo(p.dtype).tiny)
        factors.mul_(torch.linalg.vector_norm(sizes) / new)
        # What was orthogonalised is needed no more.
        update = torch.mul(x, factors.unsqueeze(1), out=self.workspace.like("muon_direction", p))
        super()._apply(p, update, group)
