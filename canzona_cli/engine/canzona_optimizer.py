"""The optimizer of a run: a `MasterOptimizer` for the matrices, Megatron's AdamW for everything else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from canzona_cli.config.schema import Clip, NonFinite
from canzona_cli.engine.masters import MasterOptimizer
from canzona_cli.errors import Diverged, Problem
from canzona_cli.megatron.matrix_buffers import global_parameters
from canzona_cli.megatron.owner_bucket_group import adamw_groups, nothing_to_gather
from canzona_cli.megatron.parallel import gather
from canzona_cli.megatron.timers import PhaseTimer


class NonFiniteGradients(Diverged):
    """A gradient is NaN or infinite; no weight and no state has changed in this step.

    Args:
        loss: the loss of the step, where it is known; nats per token.
    """

    def __init__(self, *problems: Problem, loss: float | None = None) -> None:
        super().__init__(*problems)
        self.loss = loss


@dataclass(frozen=True, kw_only=True)
class _Culprits:
    """Parameters with non-finite gradients on one rank, as it tells the others."""

    names: tuple[str, ...]


class CanzonaOptimizer(ChainedOptimizer):  # type: ignore[misc]
    """One step: norm and finite check, clip, AdamW, its gathering under the matrix updates, the matrices.

    The first gradients set out to their hosts before all that, and are thrown away where it ends the step.
    AdamW goes first so that its parameters, which the next forward needs first, travel while matrices are
    updated. The norm is the step's one host synchronisation; it comes before any state changes. With it comes
    how many updates of the step before went wrong: until then nobody needs to know.

    Args:
        matrices: by the plan (`PlannedOptimizer`), or all of them on every rank (`RedundantOptimizer`).
        stats_group: ranks over which every gradient element is counted once: all of them, or, where
            data-parallel ranks have equal gradients, those of one model replica.
    """

    def __init__(
        self,
        adamw: MegatronOptimizer,
        matrices: MasterOptimizer,
        chunks: Sequence[DistributedDataParallel],
        stats_group: torch.distributed.ProcessGroup,
        timer: PhaseTimer,
        non_finite: NonFinite,
        clip: Clip,
    ) -> None:
        super().__init__([adamw, matrices])
        self._adamw, self.matrices, self._chunks = adamw, matrices, chunks
        self._stats_group, self._timer, self._non_finite, self._clip = stats_group, timer, non_finite, clip
        self.skipped = 0
        """Steps skipped so far for non-finite gradients, the same on every rank."""
        self.fallbacks = 0
        """Updates of the step before the last that were not finite or needed a fallback, on all ranks."""
        self.captures = 0
        """CUDA graphs that all ranks had captured before the last step."""

    @torch.no_grad()
    def step(self) -> tuple[bool, float, int | None]:
        """Update everything once.

        Returns:
            Whether weights were updated, the global gradient norm before clipping, and None (zeros are not
            counted).

        Raises:
            NonFiniteGradients: on every rank together, with non_finite="stop".
        """
        self.matrices.begin()
        self._adamw.prepare_grads()
        norm = self.get_grad_norm()
        finite = math.isfinite(norm)
        if not finite:
            self.matrices.discard()
        if not finite and self._non_finite == "stop":
            raise NonFiniteGradients(*self._culprits())
        if self.fallbacks:
            self.matrices.repair()
        if not finite:
            self.skipped += 1
            # Every rank has its parameters as they were.
            nothing_to_gather(self._chunks)
            return False, norm, None
        clip = self.config.clip_grad
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0.0 else 1.0
        if scale < 1.0 and self._adamw.get_parameters():
            clip_grad_by_total_norm_fp32(self._adamw.get_parameters(), max_norm=clip, total_norm=norm)
        self.matrices.set_gradient_scale(scale if self._clip == "all" else 1.0)
        self.step_with_ready_grads()
        return True, norm, None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """AdamW, the gathering of its first model chunk,
        the matrices with what follows (`gathering_order`)."""
        with self._timer.phase("adamw_update"):
            self._adamw.step_with_ready_grads()
        if self._chunks[0].ddp_config.overlap_param_gather:
            for group in reversed(adamw_groups(self._chunks[:1])):
                group.start_param_sync()
        return self.matrices.step_with_ready_grads()

    @torch.no_grad()
    def settle(self) -> int:
        """Count and repair what went wrong in the last update now, not with the next norm.
        Collective; the host waits.

        Returns:
            As `fallbacks`, but of the last step.
        """
        count = self.matrices.fallbacks()
        torch.distributed.all_reduce(count, group=self._stats_group)
        [total] = self._timer.read(count)
        if total:
            self.matrices.repair()
        return round(total)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Computes the global norm of the reduced gradients, before clipping; sets `fallbacks` and `captures`."""
        counted = self._adamw.get_grads_for_grad_norm()
        squares = self._squares([*counted, *self.matrices.gradients_for_norm()])
        # What tensor-parallel ranks have equal copies of counts on one of them; a copy that is broken has to
        # be seen.
        seen = {gradient.data_ptr() for gradient in counted}
        copies = [param.grad for param in self._adamw.get_parameters() if param.grad is not None]
        squares += 0.0 * self._squares([gradient for gradient in copies if gradient.data_ptr() not in seen])
        captures = torch.full((1,), float(self.matrices.captures), device=squares.device)
        facts = torch.cat([squares.view(1), self.matrices.fallbacks(), captures])
        torch.distributed.all_reduce(facts, group=self._stats_group)
        square, fallbacks, captured = self._timer.read(facts)
        self.fallbacks, self.captures = round(fallbacks), round(captured)
        return math.sqrt(square) if square >= 0 else math.nan

    def _squares(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            return torch.zeros((), device=self.get_loss_scale().device)
        return torch.stack(list(torch._foreach_norm(gradients, 2, torch.float32))).square().sum()

    def _culprits(self) -> list[Problem]:
        """Names the parameters with non-finite gradients on any rank,
        the same list on every rank. Collective."""
        gradients = (
            (name, getattr(parameter, "main_grad", None)) for name, parameter in global_parameters(self._chunks)
        )
        bad = [name for name, gradient in gradients if gradient is not None and not bool(gradient.isfinite().all())]
        members = torch.distributed.get_process_group_ranks(self._stats_group)
        everyone = [theirs.names for theirs in gather(_Culprits(names=tuple(bad)), group=self._stats_group)]
        ranks = [rank for rank, names in zip(members, everyone, strict=True) if names]
        culprits = list(dict.fromkeys(name for names in everyone for name in names))
        reason = (
            f"NaN or infinite in {len(culprits)} of the parameters, the first is {culprits[0]}, on ranks {ranks[:8]}"
            if culprits
            else "their global norm overflows fp32"
        )
        return [
            Problem(
                key="gradients",
                value="not finite",
                reason=f"{reason}; no weight has changed",
                fix="lower optimizer.lr, or look at the data of this step; train.non_finite=skip skips such steps",
            )
        ]
