"""The baseline, strategy sc, with the engine's optimizers: every rank updates all matrices of its stage as a
whole.

Megatron itself supports this for Muon only (`muon_tp_mode=duplicated`); this module does the same for every
other optimizer. Gradients are all-reduced over the data-parallel ranks. Then, one matrix after another, the
tensor-parallel ranks gather its fragments, each of them updates the whole matrix, and each keeps its own
fragment of the new weight. Nothing overlaps, and every rank has the masters and state of all matrices of its
stage. The result is equal to that of strategy canzona, and preconditioners are refreshed in the same steps.
"""

from collections.abc import Sequence

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from canzona_cli.core.engine.hosted import lies_whole
from canzona_cli.core.engine.masters import Fallbacks, MasterOptimizer, distrust_skipped, skipped_updates
from canzona_cli.core.engine.wire import Wiring
from canzona_cli.core.megatron.parallel import World, Wrapped
from canzona_cli.core.model.matrices import Matrix


class FragmentGather:
    """A tool that gathers whole matrices on every TP rank from their fragments, one matrix at a time and
    without overlap.

    Args:
        matrices: all matrices that will be gathered; the largest determines the size of the messages.
    """

    def __init__(self, wiring: Wiring, matrices: Sequence[Matrix]) -> None:
        self.wiring, self._tp = wiring, wiring.fragments.tp
        largest = max((m.elements for m in matrices if self.travels(m) and m.home is None), default=0)
        self._send = torch.empty(largest // self._tp, dtype=torch.float32, device=wiring.device)
        self._receive = torch.empty(largest, dtype=torch.float32, device=wiring.device)

    @property
    def bytes(self) -> int:
        """The size of the message buffers in bytes."""
        return self._send.nbytes + self._receive.nbytes

    def travels(self, matrix: Matrix) -> bool:
        """Returns True if the matrix must be communicated, because TP ranks store only fragments of it, or
        only one of them stores it."""
        return self._tp > 1 and not matrix.replicated

    def needs_no_copy(self, matrix: Matrix) -> bool:
        """Returns True if an optimizer can use the reduced gradient in Megatron's buffer without a copy."""
        return not self.travels(matrix) and lies_whole(self.wiring, matrix)

    def gather(self, matrix: Matrix, fragment: torch.Tensor, whole: torch.Tensor) -> None:
        """Gathers the fragments of all TP ranks into `whole`. Collective over the TP ranks.

        Args:
            fragment: this rank's fragment, shaped like its view by `Fragments`; not read if only another
                rank stores the matrix.
            whole: fp32 (rows, columns), overwritten.
        """
        view_in_whole, rank, group = self.wiring.fragments.view_in_whole, self.wiring.rank, self.wiring.tp_group
        has_fragment = matrix.home is None or matrix.home == rank
        if matrix.home is not None or not self.travels(matrix):  # the fragment is the whole matrix
            if has_fragment:
                view_in_whole(matrix, whole, rank).copy_(fragment)
            if self.travels(matrix):
                torch.distributed.broadcast(whole, group=group, group_src=matrix.home)
            return
        size = matrix.elements // self._tp
        send, receive = self._send[:size], self._receive[: matrix.elements]
        send.view(fragment.shape).copy_(fragment)
        torch.distributed.all_gather_into_tensor(receive, send, group=group)
        for peer, part in enumerate(receive.chunk(self._tp)):
            view = view_in_whole(matrix, whole, peer)
            view.copy_(part.view(view.shape))


class RedundantUpdate:
    """The update of one matrix on one rank. Creating it copies the model's weight to the master, which is
    collective over the TP ranks.

    Args:
        scratch: flat fp32 scratch, as long as the largest matrix that needs it, for the gradient during the
            update.
    """

    def __init__(self, matrix: Matrix, gathering: FragmentGather, scratch: torch.Tensor) -> None:
        self._wiring = wiring = gathering.wiring
        self._matrix, self._gathering = matrix, gathering
        self._master = wiring.masters[matrix.index]
        self.stored = wiring.rank in matrix.holders(wiring.fragments.tp)
        """True if this TP rank stores a part of the weight."""
        self.travels = gathering.travels(matrix)
        self.fragment = wiring.fragments.gradient(matrix) if self.stored else scratch[:0]
        """This rank's fragment of the reduced gradient; empty if the rank does not store a part."""
        self._in_place = gathering.needs_no_copy(matrix)
        whole = self.fragment if self._in_place else scratch[: matrix.elements]
        self._gradient = whole.view(matrix.rows, matrix.cols)
        self.reload()  # first, because a user's own optimizer may read the weights when it is created
        self.hosted, self.optimizer = (matrix,), wiring.make_optimizer((matrix,), [self._master])

    def run(self, scale: float) -> None:
        """Gathers the gradient, multiplies it by `scale` (clipping), updates the master, and writes this
        rank's fragment of the new weight."""
        # If nothing is gathered, the time for copies is attributed to the update.
        with self._wiring.timer.phase("exchange" if self.travels else "matrix_update"):
            if not self._in_place:
                self._gathering.gather(self._matrix, self.fragment, self._gradient)
        with self._wiring.timer.phase("matrix_update"):
            if scale != 1.0:
                self._gradient.mul_(scale)
            self._master.grad = self._gradient
            self.optimizer.step()
            self._master.grad = None
            self.publish()

    def publish(self) -> None:
        """Writes this rank's fragment of the master into the model's weight."""
        matrix, fragments = self._matrix, self._wiring.fragments
        if self.stored:
            fragments.weight(matrix).copy_(fragments.view_in_whole(matrix, self._master.detach(), self._wiring.rank))

    @torch.no_grad()
    def reload(self) -> None:
        """Copies the model's weight into the master. Collective over the TP ranks."""
        weight = self._wiring.fragments.weight(self._matrix) if self.stored else self.fragment
        self._gathering.gather(self._matrix, weight, self._master.detach())


class RedundantOptimizer(MasterOptimizer):
    """The optimizer that updates all matrices of this rank's stage, one after another.

    Unlike `PlannedOptimizer`, it does not restore a weight whose update was not finite; the loss of the next
    step reveals such a failure.

    Args:
        matrices: the matrices of this rank's stage, without experts that it does not store, in the same order
            on every rank, because gathering a matrix is collective.
        wiring: the wiring of this rank, with the masters of all these matrices.
        fallbacks: the counter of the fallbacks of this rank's optimizers.
    """

    def __init__(
        self,
        config: MegatronOptimizerConfig,
        chunks: Wrapped,
        world: World,
        matrices: Sequence[Matrix],
        wiring: Wiring,
        fallbacks: Fallbacks,
    ) -> None:
        super().__init__(config, chunks, wiring.masters, wiring.device)
        self._world, self._fallbacks = world, fallbacks
        dense = [matrix for matrix in matrices if matrix.expert_rank is None]
        experts = [matrix for matrix in matrices if matrix.expert_rank is not None]
        self._dense_gather = FragmentGather(wiring, dense)
        self._expert_gather = FragmentGather(wiring.as_single_rank(), experts)
        gathered = [(m, self._dense_gather if m.expert_rank is None else self._expert_gather) for m in matrices]
        copied_elements = [matrix.elements for matrix, gathering in gathered if not gathering.needs_no_copy(matrix)]
        self._scratch = torch.empty(max(copied_elements, default=0), dtype=torch.float32, device=wiring.device)
        self.groups: list[RedundantUpdate] = [
            RedundantUpdate(matrix, gathering, self._scratch) for matrix, gathering in gathered
        ]

    def gradients_for_norm(self) -> list[torch.Tensor]:
        """Returns the gradient fragments that this rank contributes to the norm. Only one rank of the stats
        group contributes each element."""
        return [group.fragment for group in self.groups if group.stored and self._counts_fragment(group)]

    def _counts_fragment(self, group: RedundantUpdate) -> bool:
        # If a matrix travels, each TP rank has different elements.
        return counts_dense(self._world) if group.travels else counts_update(group.hosted[0], self._world)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates all matrices of the stage. Collective over the TP ranks."""
        for group in self.groups:
            group.run(self._scale)
        return True

    @torch.no_grad()
    def publish(self) -> None:
        for group in self.groups:
            group.publish()

    def fallbacks(self) -> torch.Tensor:
        groups = [group for group in self.groups if counts_update(group.hosted[0], self._world)]
        return skipped_updates(groups, self._device) + self._fallbacks.take()

    def repair(self) -> None:
        """Switches matrices to the standard form if their update was skipped. Weights are not restored."""
        distrust_skipped(self.groups, self.masters)

    def reload_model_params(self, state_dict: object = None) -> None:
        """Copies the model's weights into the masters. Collective over the TP ranks."""
        for group in self.groups:
            group.reload()

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self._dense_gather.bytes + self._expert_gather.bytes + self._scratch.nbytes


def counts_dense(world: World) -> bool:
    """Returns True if this rank adds its copies of dense tensors to sums over the stats group.

    All data-parallel ranks have equal copies. The stats group is usually one model replica, in which every
    rank adds its copies. If experts are divided among ranks, the stats group contains all ranks, because a
    replica does not have all experts; then only the ranks of one replica add their copies.
    """
    return world.layout.ep == 1 or world.owner == 0


def counts_update(matrix: Matrix, world: World) -> bool:
    """Returns True if this rank counts its update of a matrix in sums over the stats group. Other ranks that
    make the same update do not count it."""
    if matrix.expert_rank is not None:
        return world.expert_owner == 0
    return world.tp_rank == 0 and counts_dense(world)
