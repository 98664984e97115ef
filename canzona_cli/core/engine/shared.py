"""The shared matrices of one rank: matrices whose fragments all TP ranks of an owner update together
(`optimizers/shared_muon`), with their optimizer and scratch, and the handling of updates that cannot be
trusted."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from canzona_cli.core.engine.masters import UpdatedMatrix, skipped_updates
from canzona_cli.core.engine.wire import Copy, Wiring, Write, join_writes, write_finite
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.matrix_optimizer import Workspace
from canzona_cli.core.optimizers.shared_muon import SharedMuon
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Turns, Wait
from canzona_cli.core.planner.order import LANES, shared_order


class SharedMatrix:
    """A shared matrix, as one rank of its owner's row sees it.

    Args:
        master: the rank's fragment, fp32, which `optimizer` updates.
        optimizer: the optimizer of all shared matrices of this rank.
        weight, reduced: views of the rank's fragment of the weight and of the reduced gradient.
        scratch: flat fp32 scratch, at least as long as the fragment, which all shared matrices of the rank
            use.
    """

    def __init__(
        self,
        matrix: Matrix,
        master: torch.nn.Parameter,
        optimizer: SharedMuon,
        *,
        weight: torch.Tensor,
        reduced: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        self.matrix, self.master, self._optimizer, self.weight = matrix, master, optimizer, weight
        self._in_place = lies_flat(reduced)
        if self._in_place:
            self._gradient, self._copy = reduced.view(master.shape), None
        else:
            self._gradient = scratch[: master.numel()].view(master.shape)
            self._copy = Copy(self._gradient.view(reduced.shape), reduced)
        self.needs_update_alone = False
        """True if `update_together` did not update the fragment, so `update_alone` must; the same on all
        ranks."""

    @property
    def is_distrusted(self) -> bool:
        """True if `update_alone` updates the matrix in this step because an earlier update was not trusted;
        the same on all ranks."""
        return self._optimizer.is_distrusted(self.master)

    def update_together(self, scale: float, ranks: FragmentGroup) -> Turns[None]:
        """Updates the fragment in Gram form. Sets `needs_update_alone` instead if the matrix is distrusted,
        or if the result cannot be trusted. Collective.

        Args:
            scale: the factor of the gradient (clipping).

        Yields:
            The collectives to wait for before the generator is resumed.
        """
        self._take_gradient(scale)
        if self._in_place and scale != 1.0:
            self._gradient.mul_(scale)
        whole = self.matrix.shape
        if self.is_distrusted:
            self.needs_update_alone = True
        else:
            trusted = yield from self._optimizer.update_together(self.master, whole=whole, ranks=ranks)
            self.needs_update_alone = not trusted
        self.master.grad = None

    def update_alone(self, scale: float, group: torch.distributed.ProcessGroup | None) -> None:
        """Updates the fragment of a matrix with `needs_update_alone`, in standard form. Collective."""
        self._take_gradient(scale)
        self._optimizer.update_alone(
            self.master,
            whole=self.matrix.shape,
            total=lambda part: torch.distributed.all_reduce(part, group=group),
        )
        self.master.grad = None

    def write(self) -> Write:
        """Returns the write of the rounded master to the weight, for an update that may not be finite."""
        same_dtype = self.weight.dtype is self.master.dtype
        return Write(
            target=self.weight,
            source=self.master.detach().view(self.weight.shape),
            rounded=self.weight if same_dtype else torch.empty_like(self.weight),
        )

    def publish(self) -> None:
        """Writes the rounded master to the weight."""
        self.weight.copy_(self.master.detach().view(self.weight.shape))

    @torch.no_grad()
    def reload(self) -> None:
        """Copies the weight into the master."""
        self.master.detach().view(self.weight.shape).copy_(self.weight)

    def _take_gradient(self, scale: float) -> None:
        """Sets `master.grad`. If the optimizer cannot read the gradient in Megatron's buffer, the gradient is
        first copied into scratch and multiplied by `scale`; otherwise `update_together` scales it in
        place."""
        if self._copy is not None:
            self._copy.run(scale)
        self.master.grad = self._gradient


class Sharing:
    """The optimizer of this rank's fragments of its owner's shared matrices.

    Args:
        matrices: the shared matrices of the owner, in the plan's order.
        parts: the number of parts of each matrix's update. Between two parts the ranks exchange square
            matrices.
    """

    def __init__(self, wiring: Wiring, matrices: Sequence[Matrix], parts: Sequence[int]) -> None:
        self._wiring, self._parts = wiring, parts
        self.hosted = tuple(matrices)
        masters = [wiring.masters[matrix.index] for matrix in matrices]
        self.optimizer = optimizer = wiring.make_optimizer(matrices, masters)
        assert isinstance(optimizer, SharedMuon)
        views = [(wiring.fragments.gradient(matrix), wiring.fragments.weight(matrix)) for matrix in matrices]
        copied_elements = [reduced.numel() for reduced, _ in views if not lies_flat(reduced)]
        self._scratch = torch.empty(max(copied_elements, default=0), dtype=torch.float32, device=wiring.device)
        self._sums = torch.zeros(len(self.hosted), device=wiring.device)
        """A number for each matrix, finite if the last update of the matrix was finite: (matrices,)."""
        self._places = {matrix.index: place for place, matrix in enumerate(self.hosted)}
        self.matrices = [
            SharedMatrix(matrix, master, optimizer, weight=weight, reduced=reduced, scratch=self._scratch)
            for matrix, master, (reduced, weight) in zip(matrices, masters, views, strict=True)
        ]
        self._extra_workspaces = [Workspace() for _ in range(LANES - 1)]
        """The scratch of matrices whose updates are interleaved, except for the matrix that uses the
        optimizer's own scratch."""
        self._lanes = [
            FragmentGroup(
                index=wiring.rank,
                count=wiring.fragments.tp,
                total=self._timed("all_reduce"),
                swap=self._timed("all_to_all_single"),
                gather=self._timed("all_gather_into_tensor"),
                workspace=workspace,
            )
            for workspace in (None, *self._extra_workspaces)
        ]

    def _timed(self, name: Literal["all_reduce", "all_to_all_single", "all_gather_into_tensor"]) -> Callable[..., Wait]:
        """Returns a function that starts the named collective over the TP ranks and returns a function that
        waits for it. Both are timed as exchanges."""
        timer = self._wiring.timer

        def begin(*tensors: torch.Tensor) -> Wait:
            with timer.phase("exchange"):
                finish = self._wiring.start(getattr(torch.distributed, name), *tensors)

            def wait() -> None:
                with timer.phase("exchange"):
                    finish()

            return wait

        return begin

    @property
    def scratch_bytes(self) -> int:
        """The size of the scratch in bytes, without the optimizer's workspace."""
        return self._scratch.nbytes + sum(workspace.nbytes for workspace in self._extra_workspaces)

    @torch.no_grad()
    def update(self, scale: float) -> None:
        """Updates the matrices in Gram form, interleaved in the order of `planner.order.shared_order`, and
        writes their weights. Matrices that cannot be updated in this form are left to `update_alone`.
        Collective over the TP ranks."""
        running: dict[int, Turns[None]] = {}
        pending: dict[int, Sequence[Wait] | None] = {}
        for index, part in shared_order(self._parts):
            shared = self.matrices[index]
            with self._wiring.timer.phase("matrix_update"):
                if part == 0:
                    running[index] = shared.update_together(scale, self._lanes[index % LANES])
                for wait in pending.get(index) or ():
                    wait()
                pending[index] = next(running[index], None)
            if part + 1 < self._parts[index]:
                continue
            assert pending[index] is None, "the plan is for another optimizer: the update has more parts than planned"
            if not shared.needs_update_alone:
                with self._wiring.timer.phase("exchange"):
                    shared.publish()

    @torch.no_grad()
    def update_alone(self, scale: float) -> None:
        """Updates the matrices with `needs_update_alone`, which are the same on all TP ranks, in standard
        form, one after another. Collective over the TP ranks."""
        remaining = [shared for shared in self.matrices if shared.needs_update_alone]
        if not remaining:
            return
        group, on_host = self._wiring.tp_group, self._wiring.device.type == "cpu"
        with self._wiring.timer.phase("matrix_update"):
            for shared in remaining:
                shared.update_alone(scale, group)
            # As for a hosted matrix, the sum of the master is finite only if all elements are.
            sums = torch.stack([shared.master.detach().sum() for shared in remaining])
        with self._wiring.timer.phase("exchange"):
            torch.distributed.all_reduce(sums, group=group)
            places = [self._places[shared.matrix.index] for shared in remaining]
            self._sums[torch.tensor(places, device=sums.device)] = sums
            writes = join_writes([(index, shared.write()) for index, shared in enumerate(remaining)])
            write_finite(writes, sums, on_host=on_host)

    def fallbacks(self) -> torch.Tensor:
        """Returns the number of updates of the last step that were skipped or not finite: (1,), on the
        device. The number is the same on all TP ranks, so only TP rank 0 returns it; the other ranks return
        0."""
        count = skipped_updates((self,), self._wiring.device) + self._sums.isfinite().logical_not().sum()
        return count if self._wiring.rank == 0 else torch.zeros_like(count)

    @torch.no_grad()
    def repair(self) -> None:
        """Restores the previous weights of matrices whose last update was not finite, and resets their
        optimizer state. No communication is needed, because every rank has its fragment of the previous
        weight. The host waits for the device."""
        for shared, master_sum in zip(self.matrices, self._wiring.timer.read(self._sums), strict=True):
            if math.isfinite(master_sum):
                continue
            shared.reload()
            UpdatedMatrix(matrix=shared.matrix, master=shared.master, optimizer=self.optimizer).reset()
        self._sums.zero_()


def lies_flat(gradient: torch.Tensor) -> bool:
    """Returns True if an optimizer can use a fragment's reduced gradient without a copy: fp32 and
    contiguous."""
    return gradient.dtype is torch.float32 and gradient.is_contiguous()
