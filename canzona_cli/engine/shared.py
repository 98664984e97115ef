"""The shared matrices of one rank, fragments that all TP ranks of an owner update together (`optimizers/shared_muon`):
their one optimizer and its scratch, and what is done when an update is not trusted.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from canzona_cli.engine.masters import left_out, settle
from canzona_cli.engine.wire import Copy, Wiring, Write, write_finite
from canzona_cli.model.matrices import Matrix
from canzona_cli.optimizers.matrix_optimizer import Workspace
from canzona_cli.optimizers.shared_muon import SharedMuon
from canzona_cli.optimizers.shared_rows import Together, Turns, Wait
from canzona_cli.planner.order import LANES, turns

_log = logging.getLogger(__name__)


class SharedMatrix:
    """A shared matrix on one rank of its owner's row.

    Args:
        gradient: fp32, flat, at least as long as the fragment; several take turns at it.
    """

    def __init__(self, wiring: Wiring, matrix: Matrix, optimizer: SharedMuon, gradient: torch.Tensor) -> None:
        self.matrix, self.master, self._optimizer = matrix, wiring.masters[matrix.index], optimizer
        self.weight = wiring.fragments.weight(matrix)
        reduced = wiring.fragments.gradient(matrix)
        self._in_place = lies_flat(reduced)
        if self._in_place:
            self._gradient, self._gathered = reduced.view(self.master.shape), None
        else:
            self._gradient = gradient[: matrix.held_elements(wiring.fragments.tp)].view(self.master.shape)
            self._gathered = Copy(self._gradient.view(reduced.shape), reduced)
        self.left = False
        """True while its last update is still to be made `alone`; the same on all ranks."""

    @property
    def excluded(self) -> bool:
        """Tells whether it is updated `alone` in this step; the same on all ranks."""
        return self._optimizer.excluded(self.master)

    def together(self, scale: float, ranks: Together) -> Turns[None]:
        """Updates the fragment, or sets `left`. Collective."""
        self._take_gradient(scale)
        if self._in_place and scale != 1.0:
            self._gradient.mul_(scale)
        whole = self.matrix.shape
        self.left = self.excluded or not (yield from self._optimizer.together(self.master, whole=whole, ranks=ranks))
        self.master.grad = None

    def alone(self, scale: float, group: torch.distributed.ProcessGroup | None) -> None:
        """Update it in the same step without the iteration that went wrong. Collective."""
        self._take_gradient(scale)
        self._optimizer.alone(
            self.master,
            whole=self.matrix.shape,
            total=lambda part: torch.distributed.all_reduce(part, group=group),
        )
        self.master.grad = None

    def write(self) -> Write:
        """Returns the write of the new fragment of the weight."""
        same = self.weight.dtype is self.master.dtype
        return Write(
            target=self.weight,
            source=self.master.detach().view(self.weight.shape),
            rounded=self.weight if same else torch.empty_like(self.weight),
        )

    def publish(self) -> None:
        """Round the master into the weight."""
        self.weight.copy_(self.master.detach().view(self.weight.shape))

    @torch.no_grad()
    def reload(self) -> None:
        """Take the weight as master."""
        self.master.detach().view(self.weight.shape).copy_(self.weight)

    def _take_gradient(self, scale: float) -> None:
        """Puts the gradient where the optimizer reads it; what lies in place was scaled the first time."""
        if self._gathered is not None:
            self._gathered.run(scale)
        self.master.grad = self._gradient


class Sharing:
    """The fragments of an owner's shared matrices that lie on this rank.

    Args:
        parts: the parts of each matrix's update, in the plan's order.
    """

    def __init__(self, wiring: Wiring, matrices: Sequence[Matrix], parts: Sequence[int]) -> None:
        self._wiring, self._parts = wiring, parts
        self.hosted = tuple(matrices)
        self.optimizer = wiring.make_optimizer(matrices, [wiring.masters[matrix.index] for matrix in matrices])
        assert isinstance(self.optimizer, SharedMuon)
        copied = [m.held_elements(wiring.fragments.tp) for m in matrices if not lies_flat(wiring.fragments.gradient(m))]
        self._gradient = torch.empty(max(copied, default=0), dtype=torch.float32, device=wiring.device)
        self._sums = torch.zeros(len(self.hosted), device=wiring.device)
        """A number for each matrix, in their order: finite where the last update was."""
        self._places = {matrix.index: place for place, matrix in enumerate(self.hosted)}
        self.matrices = [SharedMatrix(wiring, matrix, self.optimizer, self._gradient) for matrix in matrices]
        self.beside = [Workspace() for _ in range(LANES - 1)]
        """Scratch of those that take turns with one that has the optimizer's."""
        self._lanes = [
            Together(
                place=wiring.rank,
                count=wiring.fragments.tp,
                total=self._travelling("all_reduce"),
                swap=self._travelling("all_to_all_single"),
                gather=self._travelling("all_gather_into_tensor"),
                workspace=workspace,
            )
            for workspace in (None, *self.beside)
        ]

    def _travelling(
        self, name: Literal["all_reduce", "all_to_all_single", "all_gather_into_tensor"]
    ) -> Callable[..., Wait]:
        """Returns that collective over the TP ranks, begun and waited for in the phase of exchanges."""
        timer, watcher = self._wiring.timer, self._wiring.watcher

        def begin(*tensors: torch.Tensor) -> Wait:
            with timer.phase("exchange"):
                span = timer.span("exchange_total", timer.now())
                work = getattr(torch.distributed, name)(*tensors, group=self._wiring.tp_group, async_op=True)
                watcher.watch(span, work)

            def wait() -> None:
                with timer.phase("exchange"):
                    late = span.end is None
                    work.wait()
                    if late:
                        watcher.waited(span)

            return wait

        return begin

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a fragment's gradient that does not lie in one piece."""
        return self._gradient.nbytes

    @torch.no_grad()
    def update(self, scale: float) -> None:
        """Update all matrices, in the order of `planner.order.turns`. Collective."""
        running: dict[int, Turns[None]] = {}
        landing: dict[int, Sequence[Wait] | None] = {}
        for place, part in turns(self._parts):
            shared, last = self.matrices[place], part + 1 == self._parts[place]
            with self._wiring.timer.phase("matrix_update"):
                if part == 0:
                    running[place] = shared.together(scale, self._lanes[place % LANES])
                for wait in landing.get(place) or ():
                    wait()
                landing[place] = next(running[place], None)
            if not last:
                continue
            assert landing[place] is None, "the plan is another optimizer's"
            if not shared.left:
                with self._wiring.timer.phase("exchange"):
                    shared.publish()

    @torch.no_grad()
    def update_alone(self, scale: float) -> None:
        """Update what was not trusted, one matrix after another. Collective over the TP ranks, which all
        know the same of it."""
        left = [shared for shared in self.matrices if shared.left]
        if not left:
            return
        group, on_host = self._wiring.tp_group, self._wiring.device.type == "cpu"
        with self._wiring.timer.phase("matrix_update"):
            for shared in left:
                shared.alone(scale, group)
            # As of a hosted matrix: only a finite one has a finite sum.
            sums = torch.stack([shared.master.detach().sum() for shared in left])
        with self._wiring.timer.phase("exchange"):
            torch.distributed.all_reduce(sums, group=group)
            self._sums[torch.tensor([self._places[shared.matrix.index] for shared in left], device=sums.device)] = sums
            write_finite([(place, shared.write()) for place, shared in enumerate(left)], sums, on_host=on_host)

    def fallbacks(self) -> torch.Tensor:
        """Counts the updates of the last step that were left out or not finite: (1,). All TP ranks know the
        same: one counts."""
        count = left_out((self,), self._wiring.device) + self._sums.isfinite().logical_not().sum()
        return count if self._wiring.rank == 0 else torch.zeros_like(count)

    @torch.no_grad()
    def repair(self, masters: Mapping[int, torch.nn.Parameter]) -> None:
        """Repairs as `PlannedOptimizer.repair` does; here every rank has its part of the previous weight
        itself. The host waits."""
        settle((self,), masters)
        for shared, total in zip(self.matrices, self._wiring.timer.read(self._sums), strict=True):
            if math.isfinite(total):
                continue
            shared.reload()
            self.optimizer.state.pop(shared.master, None)
            _log.warning(
                "%s keeps its weight: its update was not finite; its optimizer state starts anew", shared.matrix.name
            )
        self._sums.zero_()


def lies_flat(gradient: torch.Tensor) -> bool:
    """Tells whether an optimizer can take a fragment's reduced gradient as it lies."""
    return gradient.dtype is torch.float32 and gradient.is_contiguous()
