"""The baseline, strategy sc: every rank updates every matrix of its stage, whole, with the optimizers the engine hosts.

Megatron's own sc has Muon only. For every other optimizer this does what its `muon_tp_mode=duplicated` does: gradients
are all-reduced over the data-parallel ranks; then, one matrix after another, tensor-parallel ranks gather its
fragments, all of them update the whole, and each keeps its own fragment of the new weight. Nothing overlaps, every
rank has all masters and states, and what comes out equals strategy canzona's, turns of refreshes included.
"""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from canzona_cli.config.schema import CustomConfig, RunConfig
from canzona_cli.engine.agreement import agree_on_optimizer
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.factory import optimizer_factory
from canzona_cli.engine.fallbacks import Fallbacks
from canzona_cli.engine.fragments import Fragments
from canzona_cli.engine.hosted import MakeOptimizer, is_whole
from canzona_cli.engine.masters import MasterOptimizer
from canzona_cli.megatron.adamw import build_adamw
from canzona_cli.megatron.matrix_buffers import global_parameters, tag_matrices
from canzona_cli.megatron.optimizer import adamw_settings
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrices import stage_matrices
from canzona_cli.model.matrix import Matrix


def build_redundant(
    model: DistributedDataParallel, config: RunConfig, world: World, timer: PhaseTimer
) -> CanzonaOptimizer:
    """The optimizer of strategy sc where Megatron has none, over a model wrapped without sharding. Collective.

    Raises:
        OptimizerRefused: on all ranks together: a user's own class cannot update 2-D parameters by `step()` alone.
    """
    matrices = matrices_of(config.model, world.layout, config.engine.splitting)
    own = stage_matrices(matrices, world.pp_rank)
    named = dict(global_parameters(model))
    parameters = {matrix.parameter: named[matrix.parameter] for matrix in own}
    tag_matrices(model, parameters)
    masters = {
        matrix.index: torch.nn.Parameter(
            torch.empty(matrix.rows, matrix.cols, dtype=torch.float32, device=world.device)
        )
        for matrix in own
    }
    settings, fallbacks = adamw_settings(config), Fallbacks(own, masters)
    source = config.optimizer.source if isinstance(config.optimizer, CustomConfig) else None
    make_optimizer = agree_on_optimizer(lambda: optimizer_factory(config, matrices, fallbacks), source, world)
    fragments = Fragments(config.model, world.layout.tp, world.tp_rank, parameters)
    gathering = Gathering(fragments, own, world)
    updater = RedundantOptimizer(settings, model, own, masters, gathering, make_optimizer, fallbacks, timer, world)
    return CanzonaOptimizer(
        build_adamw(model, world, settings),
        updater,
        model,
        stats_group=world.groups.mp,
        timer=timer,
        non_finite=config.train.non_finite,
    )


class Gathering:
    """Makes matrices whole on every TP rank, one at a time; nothing goes on meanwhile.

    Args:
        matrices: whose largest the messages are as long as.
    """

    def __init__(self, fragments: Fragments, matrices: Sequence[Matrix], world: World) -> None:
        self.fragments, self.rank = fragments, world.tp_rank
        self._tp, self._group = world.layout.tp, world.groups.tp
        gathered = [m.elements for m in matrices if self.travels(m) and m.home is None]
        largest = max(gathered, default=0)
        self._send = torch.empty(largest // self._tp, dtype=torch.float32, device=world.device)
        self._receive = torch.empty(largest, dtype=torch.float32, device=world.device)

    @property
    def bytes(self) -> int:
        """Of the messages."""
        return self._send.nbytes + self._receive.nbytes

    def travels(self, matrix: Matrix) -> bool:
        """Whether a rank lacks a part of it."""
        return self._tp > 1 and not matrix.replicated

    def gather(self, matrix: Matrix, fragment: torch.Tensor, whole: torch.Tensor) -> None:
        """Fragments of all TP ranks into `whole`, fp32 (rows, columns). Every rank of the group calls it.

        Args:
            fragment: this rank's, as `Fragments` has it; where the matrix lives on another rank alone it is not read.
        """
        at_home = matrix.home is None or matrix.home == self.rank
        if not self.travels(matrix) or matrix.home is not None:
            if at_home:
                self.fragments.in_whole(matrix, whole, self.rank).copy_(fragment)
            if self.travels(matrix):
                torch.distributed.broadcast(whole, group=self._group, group_src=matrix.home)
            return
        size = matrix.elements // self._tp
        send, receive = self._send[:size], self._receive[: matrix.elements]
        send.view(fragment.shape).copy_(fragment)
        torch.distributed.all_gather_into_tensor(receive, send, group=self._group)
        for peer, part in enumerate(receive.chunk(self._tp)):
            view = self.fragments.in_whole(matrix, whole, peer)
            view.copy_(part.view(view.shape))


class RedundantUpdate:
    """One matrix on one rank.

    Args:
        scratch: fp32, as long as the largest matrix; holds the gradient while this matrix is updated.
        optimizer: of `master` alone.
    """

    def __init__(
        self,
        matrix: Matrix,
        master: torch.nn.Parameter,
        gathering: Gathering,
        scratch: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        timer: PhaseTimer,
    ) -> None:
        self.hosted, self.optimizer = (matrix,), optimizer
        self._matrix, self._master, self._gathering, self._timer = matrix, master, gathering, timer
        fragments = gathering.fragments
        self._fragment = fragments.gradient(matrix) if _stores(gathering, matrix) else scratch[:0]
        self._in_place = lies_whole(gathering, matrix)
        whole = self._fragment if self._in_place else scratch[: matrix.elements]
        self._gradient = whole.view(matrix.rows, matrix.cols)

    def run(self, scale: float) -> None:
        """Gather the gradient, times `scale` (clipping), update the master, keep this rank's fragment of it."""
        matrix, gathering, master = self._matrix, self._gathering, self._master
        # With nothing to gather, what is copied is a part of the update.
        with self._timer.phase("exchange" if gathering.travels(matrix) else "matrix_update"):
            if not self._in_place:
                gathering.gather(matrix, self._fragment, self._gradient)
        with self._timer.phase("matrix_update"):
            if scale != 1.0:
                self._gradient.mul_(scale)
            master.grad = self._gradient
            self.optimizer.step()
            master.grad = None
            self.publish()

    def publish(self) -> None:
        """Keep this rank's fragment of the master."""
        matrix, fragments = self._matrix, self._gathering.fragments
        if _stores(self._gathering, matrix):
            fragments.weight(matrix).copy_(fragments.in_whole(matrix, self._master.detach(), self._gathering.rank))


class RedundantOptimizer(MasterOptimizer):
    """All matrices of this rank's stage, one after another.

    Unlike strategy canzona it does not put back a weight whose update was not finite: that is left to the loss.

    Args:
        matrices: of the stage, in their order, which is the same on every rank: their gathers meet.
        masters: of all of them.
    """

    def __init__(
        self,
        config: MegatronOptimizerConfig,
        model: DistributedDataParallel,
        matrices: Sequence[Matrix],
        masters: dict[int, torch.nn.Parameter],
        gathering: Gathering,
        make_optimizer: MakeOptimizer,
        fallbacks: Fallbacks,
        timer: PhaseTimer,
        world: World,
    ) -> None:
        super().__init__(config, model, masters, world.device)
        self._matrices, self._gathering, self._fallbacks = matrices, gathering, fallbacks
        # Every rank falls back alike; one of them counts.
        self._counts = world.tp_rank == 0 and int(world.groups.dp_cp.rank()) == 0
        copied = [matrix.elements for matrix in matrices if not lies_whole(gathering, matrix)]
        self._scratch = torch.empty(max(copied, default=0), dtype=torch.float32, device=world.device)
        self.reload_model_params()
        self.groups: list[RedundantUpdate] = [
            RedundantUpdate(
                matrix,
                masters[matrix.index],
                gathering,
                self._scratch,
                make_optimizer((matrix,), [masters[matrix.index]]),
                timer,
            )
            for matrix in matrices
        ]

    def gradients_for_norm(self) -> list[torch.Tensor]:
        """This rank's fragments; where TP ranks have equal copies of a matrix, only the first one's count."""
        gathering = self._gathering
        held = [matrix for matrix in self._matrices if _stores(gathering, matrix)]
        return [gathering.fragments.gradient(m) for m in held if not m.replicated or gathering.rank == 0]

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update all matrices of the stage."""
        for group in self.groups:
            group.run(self._scale)
        return True

    @torch.no_grad()
    def publish(self) -> None:
        for group in self.groups:
            group.publish()

    def fallbacks(self) -> torch.Tensor:
        told = self._fallbacks.take()
        return torch.tensor(float(told if self._counts else 0), device=self._device)

    def repair(self) -> None:
        """Nothing is put back."""

    @torch.no_grad()
    def reload_model_params(self, state_dict: object = None) -> None:
        """Take the model's weights as masters."""
        for matrix in self._matrices:
            stored = _stores(self._gathering, matrix)
            fragment = self._gathering.fragments.weight(matrix) if stored else self._scratch[:0]
            self._gathering.gather(matrix, fragment, self.masters[matrix.index].detach())

    @property
    def exchange_bytes(self) -> int:
        return self._gathering.bytes + self._scratch.nbytes


def lies_whole(gathering: Gathering, matrix: Matrix) -> bool:
    """Whether the reduced gradient can be handed to an optimizer as it lies in Megatron's buffer."""
    return not gathering.travels(matrix) and is_whole(matrix, gathering.fragments.gradient(matrix))


def _stores(gathering: Gathering, matrix: Matrix) -> bool:
    """Whether this TP rank has a part of the weight."""
    return gathering.rank in matrix.holders(gathering.fragments.tp)
