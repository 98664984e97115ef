"""Muon on shared matrices, whose fragments stay on their ranks. The Gram form divides the rows of every
square among the ranks; the standard form replaces it where it cannot be trusted."""

from collections.abc import Mapping

import torch

from . import muon
from .matrix_optimizer import Run, Workspace, matmul_precision
from .muon_facts import count_down, distrust
from .newton_schulz import newton_schulz
from .shared_rows import FragmentGroup, Shape, Sum, Turns, gram_by_rows, run_turns


class SharedMuon(muon.Muon):
    """A Muon whose parameters may also be fragments of matrices, which it updates in Gram form.

    `step` updates whole matrices; `update_together` and `update_alone` update a fragment. The direction of a
    fragment needs only the fragment, but the norm and the Gram matrix are sums over all fragments. With these
    sums the result is the corresponding part of the whole matrix's update, up to rounding.

    State of a fragment: its part of Muon's `momentum_buffer`; `distrusted`, the same for all fragments of a
    matrix.
    """

    def update_together(self, p: torch.Tensor, *, whole: Shape, ranks: FragmentGroup) -> Turns[bool]:
        """Updates a fragment in Gram form, together with the ranks that have the other fragments. Collective.

        On a CPU, an untrusted update is skipped. On CUDA, the weight only decays in that step, as for whole
        matrices, and `distrust_skipped` switches the next updates to standard form.

        Args:
            p: The fragment's weights, and in `p.grad` the gradient, both fp32. The gradient is read in the
                first turn only, and not changed.
            whole: The shape of the whole matrix; its shorter side is a multiple of `ranks.count`.
            ranks: The collectives among the ranks that have fragments.

        Yields:
            The collectives to wait for before the generator is resumed.

        Returns:
            False, on all ranks, if the update was skipped and `update_alone` must be called.
        """
        return run_turns(self._update_together(p, whole, ranks), lambda: matmul_precision("fp32"))

    def _update_together(self, p: torch.Tensor, whole: Shape, ranks: FragmentGroup) -> Turns[bool]:
        workspace = ranks.workspace or self.workspace
        x, fragment_norm, norm_square = self._fragment_direction(p, self.dtype, min(whole), workspace)
        yield (ranks.total(norm_square),)
        _rescale(x, fragment_norm, norm_square)
        x, trusted = yield from gram_by_rows(x, self.steps, ranks, workspace, wide=_is_wide(p, whole))
        # A direction of zeros gives an exact update of zeros, whatever the estimate.
        trusted |= norm_square.view(()) == 0
        if muon.runs_in_blocks(p) and not bool(trusted):
            self._report_fallback(p)
            return False
        group = self._settings(p)
        if not muon.runs_in_blocks(p):
            self._record_trust([p], trusted)
            x.masked_fill_(trusted.logical_not(), 0)
            self._set_rates(p, group)
        self._move(p, x, group, whole)
        return True

    def _fragment_direction(
        self, p: torch.Tensor, dtype: torch.dtype, side: int, workspace: Workspace, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the direction of a fragment, scaled by the fragment's own norm.

        Returns:
            The direction, in `workspace`; its norm before scaling, (); and the square of this norm, (1,),
            which the caller sums over all fragments before it calls `_rescale`.
        """
        x = workspace.get("muon_x", p.shape, dtype, p.device)
        norm_here = self._direction(Run.from_matrix(p), self._settings(p)["momentum"], x, side=side, again=again)
        norm = torch.as_tensor(norm_here, device=p.device)
        return x, norm, norm.double().square().view(1)

    def update_alone(self, p: torch.Tensor, *, whole: Shape, total: Sum) -> None:
        """Updates a fragment in standard form: in the same step if `update_together` returned False, and in
        later steps while `is_distrusted` is true. Collective.

        This is slow, because every iteration sums the Gram matrix over all fragments, but safe. If the matrix
        is not yet distrusted, `update_together` has already updated the momentum in this step.

        Args:
            p: The fragment's weights, and in `p.grad` the gradient, both fp32.
            whole: The shape of the whole matrix.
            total: A function that sums a tensor over all fragments, in place.
        """
        group, distrusted = self._settings(p), self.is_distrusted(p)

        def sum_gram(gram: torch.Tensor) -> None:
            if gram.dtype is torch.float32:
                total(gram)
                return
            # Half of the elements at a time, in a square that only the Gram form uses, so that no more memory is
            # needed. An odd number of elements leaves one for a third turn.
            scratch = self.workspace.like("ns_all", gram).view(-1)
            for part in torch.split(gram.view(-1), gram.numel() // 2):
                part_fp32 = scratch[: 2 * part.numel()].view(torch.float32).copy_(part)
                total(part_fp32)
                part.copy_(part_fp32)

        with matmul_precision("fp32"):
            x, fragment_norm, norm_square = self._fragment_direction(
                p, self._standard, min(whole), self.workspace, again=not distrusted
            )
            total(norm_square)
            _rescale(x, fragment_norm, norm_square)
            x = newton_schulz(x, self.steps, self.workspace, wide=_is_wide(p, whole), total=sum_gram)
            if not muon.runs_in_blocks(p):
                self._set_rates(p, group)
            self._move(p, x, group, whole)
        if distrusted:
            count_down(self.state[p])
        else:
            distrust(self.state[p])

    def _settings(self, p: torch.Tensor) -> Mapping[str, float]:
        """Returns the parameter group of `p`."""
        return next(group for group in self.param_groups if any(member is p for member in group["params"]))


def _rescale(x: torch.Tensor, fragment_norm: torch.Tensor, norm_square: torch.Tensor) -> None:
    """Rescales a fragment in place: `x` was divided by `fragment_norm`, and is now divided by the norm of the
    whole matrix instead, whose square is `norm_square`."""
    x.mul_((fragment_norm / norm_square.sqrt().clamp_min(1e-300)).view(1, 1))


def _is_wide(fragment: torch.Tensor, whole: Shape) -> bool:
    """Returns True if the fragments have all rows of the whole matrix, whose long side is then the
    columns."""
    return fragment.size(0) == whole[0]
