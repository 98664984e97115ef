"""All shared matrices of one rank: their one optimizer, its scratch, and what is done when an answer is not trusted."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from canzona_cli.engine.buffers import SETS
from canzona_cli.engine.hosted import Wiring, write_finite
from canzona_cli.engine.masters import left_out, settle
from canzona_cli.engine.shared import SharedMatrix, SharedMemory, as_wide, lies_flat
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.shared import SharedForm, Together, Turns, Wait
from canzona_cli.optimizers.workspace import Workspace
from canzona_cli.planner.pipeline import LANES, in_flight, turns

_log = logging.getLogger(__name__)


class Sharing:
    """The fragments of an owner's shared matrices that lie on this rank.

    Args:
        groups: of each micro-group of the owner, its shared matrices and the ranks that host their squares.
        by_rows: those whose squares are cut by rows, in the plan's order, each with how many parts its update has.
        rounds: of the iteration, where the groups have any.
        dtype: of the messages' elements that contributions have; of as many bytes their squares are of the products'.
    """

    def __init__(
        self,
        wiring: Wiring,
        groups: Sequence[Sequence[tuple[Matrix, int]]],
        by_rows: Sequence[tuple[Matrix, int]],
        rounds: int,
        dtype: torch.dtype,
    ) -> None:
        self._wiring, self.groups = wiring, groups
        self.hosted = (*(matrix for matrix, _ in by_rows), *(matrix for group in groups for matrix, _ in group))
        self.optimizer = wiring.make_optimizer(self.hosted, [wiring.masters[matrix.index] for matrix in self.hosted])
        assert isinstance(self.optimizer, SharedForm)
        assert not any(groups) or self.optimizer.rounds == rounds, "the plan is another optimizer's"
        self.form: SharedForm = self.optimizer
        self.memory = self._memory(rounds, as_wide(self.form.dtype, dtype))
        self._sums = torch.zeros(len(self.hosted), device=wiring.device)
        """Of matrices, in their order: finite where the last update was."""
        self._places = {matrix.index: place for place, matrix in enumerate(self.hosted)}
        self._by_rows = [SharedMatrix(wiring, matrix, self.form, None, self.memory.gradient) for matrix, _ in by_rows]
        self._parts = [parts for _, parts in by_rows]
        self.matrices = [*self._by_rows]
        """As `hosted`, once those of all groups are made."""
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
        """That collective over the TP ranks, begun and waited for in the phase of what travels."""
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

    def _memory(self, rounds: int, dtype: torch.dtype) -> SharedMemory:
        wiring = self._wiring
        tp, device = wiring.fragments.tp, wiring.device
        fragments = max(sum(matrix.held_elements(tp) for matrix, _ in group) for group in self.groups)
        squares = max(
            sum(min(matrix.shape) ** 2 for matrix, host in group if host == wiring.rank) for group in self.groups
        )
        copied = [m.held_elements(tp) for m in self.hosted if not lies_flat(wiring.fragments.gradient(m))]
        return SharedMemory(
            iterates=tuple(
                torch.empty(fragments, dtype=self.form.dtype, device=device)
                for _ in range(min(in_flight(rounds), len(self.groups)))
            ),
            squares=tuple(
                tuple(torch.empty(squares, dtype=dtype, device=device) for _ in range(min(SETS, len(self.groups))))
                for _ in range(rounds)
            ),
            gradient=torch.empty(max(copied, default=0), dtype=torch.float32, device=device),
        )

    @torch.no_grad()
    def update_by_rows(self, scale: float) -> None:
        """Update those whose squares are cut by rows, in the order of `planner.pipeline.turns`. Collective."""
        running: dict[int, Turns[None]] = {}
        landing: dict[int, Sequence[Wait] | None] = {}
        for place, part in turns(self._parts):
            one, last = self._by_rows[place], part + 1 == self._parts[place]
            with self._wiring.timer.phase("matrix_update"):
                if part == 0:
                    running[place] = one.together(scale, self._lanes[place % LANES])
                for wait in landing.get(place) or ():
                    wait()
                landing[place] = next(running[place], None)
            if not last:
                continue
            assert landing[place] is None, "the plan is another optimizer's"
            if not one.left:
                with self._wiring.timer.phase("exchange"):
                    one.publish()

    @torch.no_grad()
    def update_alone(self, scale: float) -> None:
        """Update what answers were not trusted for, one matrix after another. Collective over the TP ranks, which all
        know the same of it."""
        left = [one for one in self.matrices if one.left]
        if not left:
            return
        group, on_host = self._wiring.tp_group, self._wiring.device.type == "cpu"
        with self._wiring.timer.phase("matrix_update"):
            for one in left:
                one.alone(scale, group)
            # As of a hosted matrix: only a finite one has a finite sum.
            sums = torch.stack([one.master.detach().sum() for one in left])
        with self._wiring.timer.phase("exchange"):
            torch.distributed.all_reduce(sums, group=group)
            self._sums[torch.tensor([self._places[one.matrix.index] for one in left], device=sums.device)] = sums
            write_finite([(place, one.write()) for place, one in enumerate(left)], sums, on_host=on_host)

    def fallbacks(self) -> torch.Tensor:
        """Updates of the last step that were left out or not finite: (1,). All TP ranks know the same: one counts."""
        count = left_out((self,), self._wiring.device) + self._sums.isfinite().logical_not().sum()
        return count if self._wiring.rank == 0 else torch.zeros_like(count)

    @torch.no_grad()
    def repair(self, masters: Mapping[int, torch.nn.Parameter]) -> None:
        """As `PlannedOptimizer.repair`; here every rank has its part of the previous weight itself. The host waits."""
        settle((self,), masters)
        for one, total in zip(self.matrices, self._wiring.timer.read(self._sums), strict=True):
            if math.isfinite(total):
                continue
            one.reload()
            self.optimizer.state.pop(one.master, None)
            _log.warning(
                "%s keeps its weight: its update was not finite; its optimizer state starts anew", one.matrix.name
            )
        self._sums.zero_()
