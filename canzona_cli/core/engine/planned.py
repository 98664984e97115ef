"""The part of an optimizer step that updates matrices as planned: this rank's experts, a pipeline over
micro-groups, shared matrices, and the gathering of weights from their owners."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from canzona_cli.core.engine.hosted import HostedGroup, Hosting, gather_masters
from canzona_cli.core.engine.masters import Fallbacks, MasterOptimizer, UpdatedMatrix, distrust_skipped, skipped_updates
from canzona_cli.core.engine.shared import Sharing
from canzona_cli.core.megatron.owner_bucket_group import gathering_order, gathers_ahead, matrix_groups
from canzona_cli.core.megatron.parallel import Wrapped
from canzona_cli.core.model.geometry import Block
from canzona_cli.core.planner.order import entries_before_norm, order
from canzona_cli.core.planner.reduction import GATHERED_AHEAD


class PlannedOptimizer(MasterOptimizer):
    """The optimizer that executes one rank's part of a plan, in which hosts update whole matrices from
    gradients that were reduced to owners.

    A host keeps the fp32 masters and the optimizer state of the matrices that it hosts; no other rank has
    copies.

    Args:
        experts: the experts that this rank updates, if experts are divided among ranks. Nothing is sent for
            experts; the gradients of the first micro-groups arrive while experts are updated.
        hosting: the other hosted matrices of this rank's owner, in the order of its micro-groups.
        sharing: the shared matrices of this rank's owner; empty if the owner has none.
        fallbacks: the counter of the fallbacks of this rank's optimizers.
    """

    def __init__(
        self,
        config: MegatronOptimizerConfig,
        chunks: Wrapped,
        experts: Hosting,
        hosting: Hosting,
        sharing: tuple[Sharing, ...],
        fallbacks: Fallbacks,
    ) -> None:
        wiring = hosting.wiring
        super().__init__(config, chunks, wiring.masters, wiring.device)
        self._chunks, self._wiring, self._fallbacks = chunks, wiring, fallbacks
        self._tp = wiring.fragments.tp
        self._ddp_config = chunks[0].ddp_config
        self._experts, self._hosting = experts, hosting
        self.groups: Sequence[HostedGroup] = (*experts.groups, *hosting.groups)
        self.sharing: tuple[Sharing, ...] = sharing
        self._begun = 0
        """The number of entries of the pipeline's order (`planner.order.order`) that have run in this
        step."""
        self._slices = self._gradient_slices()

    # --- one step ---

    def gradients_for_norm(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank contributes to the global gradient norm: the ranges that it
        owns, so that exactly one rank contributes each element of the stage's matrices."""
        return self._slices

    @torch.no_grad()
    def begin(self) -> None:
        """Packs the first groups' gradients and starts sending them. They are not scaled yet, because the
        norm is not known; hosts scale the gradients that they receive."""
        self._run(entries_before_norm(len(self._hosting.groups)))

    @torch.no_grad()
    def discard(self) -> None:
        # The entries that have run are stage 0 of the first groups, one entry for each group.
        for group in self._hosting.groups[: self._begun]:
            group.discard()
        self._begun = 0
        self._wiring.side_stream.join()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates this rank's experts and all matrices of its owner, and starts gathering the parameters that
        the next forward pass needs first."""
        self._update()
        self._gather()
        return True

    def _update(self) -> None:
        """Updates the experts; then the micro-groups in the order of `planner.order.order`, so that messages
        of neighbouring groups are in flight while a group is updated; then the shared matrices. At the end,
        the current stream waits for the stream that packs messages and writes weights."""
        for index, stage in order(len(self._experts.groups)):
            self._experts.groups[index].run(stage, self._scale)
        self._run(None)
        self._begun = 0
        for sharing in self.sharing:
            sharing.update(self._scale)
            sharing.update_alone(self._scale)
        with self._wiring.timer.phase("exchange" if self._tp > 1 else "matrix_update"):
            self._wiring.side_stream.join()

    def _run(self, end: int | None) -> None:
        """Runs the entries of the pipeline's order that have not run yet, up to entry `end`, which is not
        included; all if `end` is None."""
        groups = self._hosting.groups
        for index, stage in islice(order(len(groups)), self._begun, end):
            groups[index].run(stage, self._scale)
        self._begun = max(self._begun, end or 0)

    def _gather(self) -> None:
        """Gathers the updated parameters of all buckets of matrices from their owners.

        With `overlap_param_gather`, it only starts the buckets that the forward pass needs first
        (`owner_bucket_group.install` chains the others); with `align_param_gather`, it starts no bucket.
        """
        if self._ddp_config.overlap_param_gather:
            buckets = gathering_order(self._chunks)[: GATHERED_AHEAD if gathers_ahead(self._ddp_config) else 0]
        else:
            buckets = matrix_groups(self._chunks)[::-1]
        for bucket in buckets:
            bucket.start_param_sync()

    # --- failed updates ---

    def fallbacks(self) -> torch.Tensor:
        """Returns the number of failed updates, as in the base class, of the matrices that this rank hosts:
        (1,), on the device. TP rank 0 also counts the owner's shared matrices whose update was skipped or not
        finite."""
        count = torch.full((1,), float(self._fallbacks.take()), device=self._wiring.device)
        for sharing in self.sharing:
            count += sharing.fallbacks()
        for hosting in (self._experts, self._hosting):
            count += torch.isfinite(hosting.finite).logical_not().sum()
        return count + skipped_updates(self.groups, self._device)

    @torch.no_grad()
    def repair(self) -> None:
        """Restores the previous weights of matrices whose last update was not finite, and resets their
        optimizer state. Switches matrices whose last update was skipped to the standard form.

        The masters are copied from the model's weights, which still have their previous values, because
        fragments of such an update are not written.
        """
        distrust_skipped((*self.groups, *self.sharing), self.masters)
        for sharing in self.sharing:
            sharing.repair()
        for hosting in (self._experts, self._hosting):
            self._restore(hosting)

    def _restore(self, hosting: Hosting) -> None:
        """Restores the hosted matrices whose last update was not finite.

        The TP ranks first agree on these matrices, because the flag of a matrix only reaches ranks that
        receive a fragment of it.
        """
        if not hosting.matrices:
            return
        wiring = hosting.wiring
        finite = torch.ones(len(hosting.matrices), device=wiring.device)
        finite[hosting.places] = torch.isfinite(hosting.finite).float()
        if wiring.tp_group is not None:
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN, group=wiring.tp_group)
        flags = wiring.timer.read(finite)
        broken = [matrix for matrix, is_finite in zip(hosting.matrices, flags, strict=True) if not is_finite]
        if not broken:
            return
        gather_masters(wiring, hosting.hosts, sorted(broken, key=lambda matrix: matrix.index))
        for updated in self._updated(hosting.groups):
            if updated.matrix in broken:
                updated.reset()
        hosting.finite.fill_(1.0)

    # --- whole matrices ---

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the rounded masters to the weights of this owner's TP ranks, without gathering them over the
        data-parallel ranks."""
        for group in self.groups:
            group.send_weights()
            group.receive_weights()
        for sharing in self.sharing:
            for matrix in sharing.matrices:
                matrix.publish()
        self._wiring.side_stream.join()

    def placements(self) -> Iterator[tuple[UpdatedMatrix, tuple[Block, ...]]]:
        """Yields each matrix or fragment that this rank updates, with the positions of the master's rows in
        the parameter as a single TP rank would store it."""
        for is_whole, matrices in ((True, self.whole), (False, self.fragments)):
            for updated in matrices:
                yield updated, tuple(self._wiring.fragments.blocks(updated.matrix, whole=is_whole))

    # --- set-up ---

    def _gradient_slices(self) -> list[torch.Tensor]:
        """Returns views of the gradients that this rank owns. If TP ranks have equal copies of a matrix, only
        TP rank 0 includes it."""
        fragments, rank = self._wiring.fragments, self._wiring.rank
        owned = [*self._hosting.matrices, *(matrix for sharing in self.sharing for matrix in sharing.hosted)]
        slices: list[torch.Tensor] = []
        has_copies = self._tp > 1 and any(matrix.replicated for matrix in owned)
        if has_copies:
            stored = [matrix for matrix in owned if rank in matrix.holders(self._tp)]
            slices += [fragments.gradient(matrix) for matrix in stored if not matrix.replicated or rank == 0]
        for group in matrix_groups(self._chunks):
            if not has_copies or group.planned.expert_rank is not None:
                gradients = group.buckets[0].grad_data
                slices += [gradients[part.start : part.end] for part in group.owned]
        return slices

    @property
    def scratch_bytes(self) -> int:
        shared = sum(sharing.scratch_bytes for sharing in self.sharing)
        return super().scratch_bytes + self._experts.bytes + self._hosting.bytes + shared

    @torch.no_grad()
    def reload_model_params(self, state_dict: object = None) -> None:
        """Copies the model's weights into the masters, as needed after loading a checkpoint without optimizer
        state. Collective over the TP ranks."""
        for hosting in (self._experts, self._hosting):
            gather_masters(hosting.wiring, hosting.hosts, hosting.matrices)
        for sharing in self.sharing:
            for matrix in sharing.matrices:
                matrix.reload()
