"""Muon of a matrix in fragments (`shared`): in Gram form with squares cut by rows, else in standard form."""

from collections.abc import Mapping

import torch

from . import muon
from .matrix_optimizer import Workspace, products
from .muon_facts import count_down, distrust
from .newton_schulz import newton_schulz
from .shared_rows import Shape, Sum, Together, Turns, each_turn, gram_by_rows


class SharedMuon(muon.Muon):
    """Muon whose parameters may also be fragments, of matrices in Gram form.

    `step` updates whole matrices. Of a fragment the direction is known, but not the whole's norm and Gram
    matrix; they come from all of them, and the fragment then becomes what it would be of the whole.

    State of a fragment: its part of Muon's `momentum_buffer`; `distrusted`, the same for all of the matrix's.
    """

    def together(self, p: torch.Tensor, *, whole: Shape, ranks: Together) -> Turns[bool]:
        """Updates a fragment, unless the result is not to be trusted. Collective.

        CUDA leaves an untrusted update out, as it does of whole matrices, until `settle`.

        Args:
            p: The fragment's weights, with its gradient in `p.grad`, which is only read, in the first turn;
                both fp32.
            whole: The shape of the whole matrix; its shorter side is a multiple of `ranks.count`.

        Returns:
            False where `alone` is to be called, for all of the matrix's fragments alike.
        """
        return each_turn(self._together(p, whole, ranks), lambda: products("fp32"))

    def _together(self, p: torch.Tensor, whole: Shape, ranks: Together) -> Turns[bool]:
        workspace = ranks.workspace or self.workspace
        x, norm, square = self._fragment_direction(p, self.dtype, min(whole), workspace)
        yield (ranks.total(square),)
        _divide(x, norm, square)
        x, trusted = yield from gram_by_rows(x, self.steps, ranks, workspace, wide=_is_wide(p, whole))
        trusted |= square.view(()) == 0  # nothing becomes nothing, whatever is estimated of it
        if muon.by_blocks(p) and not bool(trusted):
            self._tell(p)
            return False
        self._take(p, x, trusted, whole)
        return True

    def _take(self, p: torch.Tensor, update: torch.Tensor, trusted: torch.Tensor, whole: Shape) -> None:
        group = self._settings(p)
        if not muon.by_blocks(p):
            self._judge([p], trusted)
            update.masked_fill_(trusted.logical_not(), 0)
            self._set_rates(p, group)
        self._move(p, update, group, whole)

    def _fragment_direction(
        self, p: torch.Tensor, dtype: torch.dtype, side: int, workspace: Workspace, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`_direction` of a fragment, in `workspace`; and what `_divide` needs: its norm, and the square of
        that, (1,), to be added up."""
        assert p.grad is not None
        x = workspace.get("muon_x", p.shape, dtype, p.device)
        norm_here = self._direction(p, p.grad, self._settings(p)["momentum"], x, side=side, again=again)
        norm = torch.as_tensor(norm_here, device=p.device)
        return x, norm, norm.double().square().view(1)

    def alone(self, p: torch.Tensor, *, whole: Shape, total: Sum) -> None:
        """Updates a fragment in the same step in standard form, slow and safe;
        also some of the next, as `excluded`.

        The sum of Gram matrices of every step goes to all fragments. `together`, where it was called, has
        updated the momentum.
        """
        group, excluded = self._settings(p), self.excluded(p)

        def summed(gram: torch.Tensor) -> None:
            exact = self.workspace.get("shared_sum", gram.shape, torch.float32, gram.device).copy_(gram)
            total(exact)
            gram.copy_(exact)

        with products("fp32"):
            x, norm, square = self._fragment_direction(
                p, self._standard, min(whole), self.workspace, again=not excluded
            )
            total(square)
            _divide(x, norm, square)
            x = newton_schulz(x, self.steps, self.workspace, wide=_is_wide(p, whole), total=summed)
            if not muon.by_blocks(p):
                self._set_rates(p, group)
            self._move(p, x, group, whole)
        (count_down if excluded else distrust)(self.state[p])

    def _settings(self, p: torch.Tensor) -> Mapping[str, float]:
        return next(group for group in self.param_groups if any(member is p for member in group["params"]))


def _divide(x: torch.Tensor, norm: torch.Tensor, square: torch.Tensor) -> None:
    """Divides a fragment, which was divided by its norm, by the whole's instead,
    of which this is the square."""
    x.mul_((norm / square.sqrt().clamp_min(1e-300)).view(1, 1))


def _is_wide(fragment: torch.Tensor, whole: Shape) -> bool:
    """Tells whether columns are cut, the whole's long side; of a square neither is longer."""
    return fragment.size(0) == whole[0]
