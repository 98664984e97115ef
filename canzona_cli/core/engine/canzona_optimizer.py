"""The optimizer of a run: a `MasterOptimizer` for the matrices, Megatron's AdamW for everything else."""

import math
from collections.abc import Callable, Collection, Mapping

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from canzona_cli.core.engine.agreement import agree_on_problem
from canzona_cli.core.engine.masters import MasterOptimizer, SavingRefusals, refuse_masters
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.engine.sharded_state import ShardedState, state_problem
from canzona_cli.core.engine.stored_state import SHARDING
from canzona_cli.core.errors import Diverged, Problem, Unsupported
from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.owner_bucket_group import adamw_groups, gathers_ahead, mark_gathered
from canzona_cli.core.megatron.parallel import Wrapped, gather
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.optimizers.matrix_optimizer import sum_of_squares
from canzona_cli.core.setup import NonFinite


class NonFiniteGradients(Diverged):
    """The error for gradients that are NaN or infinite. No weight and no state has changed in this step.

    Args:
        loss: the loss of the step in nats per token; None if this rank does not know it.
    """

    def __init__(self, *problems: Problem, loss: float | None = None) -> None:
        super().__init__(*problems)
        self.loss = loss


class CanzonaOptimizer(SavingRefusals, ChainedOptimizer):  # type: ignore[misc]
    """The optimizer of a run. A step computes the gradient norm and checks that it is finite, clips, runs
    AdamW, and updates the matrices.

    Gradients of the first micro-groups are sent to their hosts before the norm is known. If the norm is not
    finite, they are discarded. AdamW runs before the matrices, so that its parameters, which the next forward
    pass needs first, are gathered while matrices are updated. Apart from decompositions and the repair of
    failed updates, the host waits for the device only once in a step, to read the norm before any state
    changes. The number of failed updates of the previous step is read together with the norm.

    Args:
        adamw: Megatron's AdamW for all other parameters.
        matrices: the optimizer of the matrices, which follows a plan (`PlannedOptimizer`) or updates all
            matrices of a stage on every rank (`RedundantOptimizer`).
        stats_group: the ranks that together count every gradient element once: all ranks, or, if
            data-parallel ranks have equal gradients of all parameters, the ranks of one model replica.
        counts_adamw: False if this rank's gradients of AdamW's parameters are copies of gradients that other
            ranks of `stats_group` count.
        non_finite: "stop" to raise an error if the norm is not finite, "skip" to skip the step.
        clip: the parameters whose gradients are clipped.
        reads_weights: True to copy the model's weights into the masters before the first step, because
            weights may be loaded after the optimizer is built.
    """

    def __init__(
        self,
        adamw: MegatronOptimizer,
        matrices: MasterOptimizer,
        chunks: Wrapped,
        stats_group: torch.distributed.ProcessGroup,
        counts_adamw: bool,
        timer: PhaseTimer,
        non_finite: NonFinite,
        reads_weights: bool = False,
    ) -> None:
        super().__init__([adamw, matrices])
        self._adamw, self.matrices, self._chunks = adamw, matrices, chunks
        self._stats_group, self._timer, self._non_finite = stats_group, timer, non_finite
        self._counts_adamw, self._reads_weights = counts_adamw, reads_weights
        self._sharded: ShardedState | None = None
        self._schedule_group: dict[str, object] = {"params": [], "default_config": True}
        self.stored: Callable[[], Collection[str]] | None = None
        """A function that returns the keys of the checkpoint being loaded; None if the checkpoint has the
        keys that this optimizer saves."""
        self.skipped = 0
        """The number of steps skipped so far because gradients were not finite or their norm exceeded
        Megatron's `grad_norm_skip_threshold`; the same on every rank."""
        self.fallbacks = 0
        """The number of updates, over all ranks, that were not finite or needed a fallback in the step before
        the last."""
        self.captures = 0
        """The number of CUDA graphs that the ranks of `stats_group` together had captured before the last
        step."""

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The parameter groups, after one without parameters: its `lr` is the rate of matrices on every rank, also
        on ranks that update none, and the rate that Megatron-LM logs."""
        return [self._schedule_group, *super().param_groups]

    @torch.no_grad()
    def step(self) -> tuple[bool, float, int | None]:
        """Updates all parameters of this rank once. Collective.

        Returns:
            True if weights were updated, False if the step was skipped; the global gradient norm before
            clipping; and None in place of Megatron's count of zeros.

        Raises:
            NonFiniteGradients: on every rank together, with non_finite="stop".
        """
        if self._reads_weights:
            self.matrices.reload_model_params()
            self._reads_weights = False
        self.matrices.begin()
        self._adamw.prepare_grads()
        norm = self.get_grad_norm()
        finite = math.isfinite(norm)
        skips = not finite or norm > self.config.grad_norm_skip_threshold
        if skips:
            self.matrices.discard()
        if not finite and self._non_finite == "stop":
            raise NonFiniteGradients(self._gradient_problem())
        if self.fallbacks:
            self.matrices.repair()
        if skips:
            self.skipped += 1
            # No rank's parameters have changed, so the next forward pass must not wait for a gathering.
            mark_gathered(self._chunks)
            return False, norm, None
        max_norm = self.config.clip_grad
        scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0.0 else 1.0
        if scale < 1.0 and self._adamw.get_parameters():
            clip_grad_by_total_norm_fp32(self._adamw.get_parameters(), max_norm=max_norm, total_norm=norm)
        self.matrices.set_gradient_scale(scale)
        self.step_with_ready_grads()
        return True, norm, None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Runs AdamW, starts gathering AdamW's parameters of the first model chunk, and updates the matrices,
        which starts gathering the other parameters (`gathering_order`)."""
        with self._timer.phase("adamw_update"):
            self._adamw.step_with_ready_grads()
        if gathers_ahead(self._chunks[0].ddp_config):
            for group in reversed(adamw_groups(self._chunks[:1])):
                group.start_param_sync()
        return self.matrices.step_with_ready_grads()

    @torch.no_grad()
    def repair_failed_updates(self) -> int:
        """Counts and repairs the failed updates of the last step now rather than in the next step.
        Collective; the host waits for the device.

        Returns:
            The number of updates of the last step that were not finite or needed a fallback, on all ranks.
        """
        count = self.matrices.fallbacks()
        torch.distributed.all_reduce(count, group=self._stats_group)
        [total] = self._timer.read(count)
        if total:
            self.matrices.repair()
        return round(total)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Computes the global norm of the reduced gradients before clipping, and sets `fallbacks` and
        `captures`. Collective; the host waits for the device."""
        counted = self._adamw.get_grads_for_grad_norm() if self._counts_adamw else []
        square_sum = self._sum_of_squares([*counted, *self.matrices.gradients_for_norm()])
        # If several ranks have equal copies of a gradient, only one rank's copy enters the norm. The other
        # copies are added with factor 0, so that a copy that is not finite makes the norm not finite.
        counted_addresses = {gradient.data_ptr() for gradient in counted}
        gradients = [param.grad for param in self._adamw.get_parameters() if param.grad is not None]
        copies = [gradient for gradient in gradients if gradient.data_ptr() not in counted_addresses]
        square_sum += 0.0 * self._sum_of_squares(copies)
        captures = torch.full((1,), float(self.matrices.captures), device=square_sum.device)
        sums = torch.cat([square_sum.view(1), self.matrices.fallbacks(), captures])
        torch.distributed.all_reduce(sums, group=self._stats_group)
        square, fallbacks, captured = self._timer.read(sums)
        self.fallbacks, self.captures = round(fallbacks), round(captured)
        return math.sqrt(square) if square >= 0 else math.nan

    def reload_model_params(self, state_dict: object = None) -> None:
        """Copies the model's weights into all masters. Collective.

        Raises:
            Unsupported: `state_dict` is given, from which Megatron's optimizers read masters.
        """
        refuse_masters(state_dict)
        super().reload_model_params()

    def sharded_state_dict(  # type: ignore[override]  # `Refusals`, whose method never returns
        self,
        model_sharded_state_dict: Mapping[object, object],
        is_loading: bool = False,
        metadata: Mapping[str, object] | None = None,
        **_: object,
    ) -> dict[object, object]:
        """Returns the state as entries of one of Megatron's checkpoints (`ShardedState`). Collective.

        Args:
            is_loading: True if a checkpoint will be read into the result, which is then given to
                `load_state_dict`.
            metadata: Megatron's metadata of the checkpoint; `distrib_optim_sharding_type` must be
                fully_reshardable, or missing when loading.

        Raises:
            Unsupported: on all ranks together, if the state of any rank cannot be in such a checkpoint.
        """
        formats = (SHARDING, None) if is_loading else (SHARDING,)
        agree_on_problem(state_problem(self.matrices, metadata or {}, formats), Unsupported)
        assert isinstance(self.matrices, PlannedOptimizer)
        stored = self.stored() if is_loading and self.stored is not None else None
        self._sharded = ShardedState(self._adamw, self.matrices, self._chunks, stored)
        if is_loading:
            return self._sharded.to_load(model_sharded_state_dict)
        return self._sharded.to_save(model_sharded_state_dict, metadata or {})

    def load_state_dict(self, state_dict: Mapping[object, object]) -> None:  # type: ignore[override]
        """Loads the state that was read into the last result of `sharded_state_dict`.

        Raises:
            Unsupported: `state_dict` is something else, for example a full state dict.
        """
        if self._sharded is not None and self._sharded.adopt(state_dict):
            self._reads_weights, self._sharded = not self._sharded.has_masters, None
        else:
            super().load_state_dict(state_dict)  # raises Unsupported

    def get_grad_stats_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self._stats_group

    def _sum_of_squares(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            return torch.zeros((), device=self.get_loss_scale().device)
        return sum_of_squares(gradients)

    def _gradient_problem(self) -> Problem:
        """Returns a problem that names the first parameter with non-finite gradients, if there is one, and up
        to eight ranks that have such gradients. Every rank returns the same problem. Collective."""
        not_finite: list[str] = []
        for name, parameter in global_parameters(self._chunks):
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not bool(gradient.isfinite().all()):
                not_finite.append(name)
        members = torch.distributed.get_process_group_ranks(self._stats_group)
        not_finite_by_rank = gather(not_finite, list[str], group=self._stats_group)
        ranks = [rank for rank, names in zip(members, not_finite_by_rank, strict=True) if names]
        culprits = list(dict.fromkeys(name for names in not_finite_by_rank for name in names))
        reason = (
            f"NaN or infinite in {len(culprits)} parameters, the first is {culprits[0]}, on ranks {ranks[:8]}"
            if culprits
            else "their global norm overflows fp32"
        )
        return Problem(
            key="gradients",
            value="not finite",
            reason=f"{reason}; no weight has changed",
            fix="lower optimizer.lr, or check the data of this step; train.non_finite=skip skips such steps",
        )
