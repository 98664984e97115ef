"""The matrices' part of an optimizer step: micro-groups in a pipeline, then gathering over the data-parallel ranks."""

import logging
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.config.schema import RunConfig
from canzona_cli.engine.factory import Fallbacks
from canzona_cli.engine.hosted import HostedGroup, scratch_elements
from canzona_cli.engine.masters import MasterOptimizer, left_out, settle
from canzona_cli.engine.shared import Sharing
from canzona_cli.engine.wire import AllToAll, Messages, Wiring
from canzona_cli.megatron.optimizer import adamw_settings
from canzona_cli.megatron.owner_bucket_group import gathering_order, matrix_groups
from canzona_cli.megatron.parallel import World
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.exchange import Route, from_hosts, senders, to_hosts
from canzona_cli.planner.pipeline import ahead, order
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import GATHERED_AHEAD
from canzona_cli.planner.step_buffers import BATCH_BYTES

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_log = logging.getLogger(__name__)


class PlannedOptimizer(MasterOptimizer):
    """Executes one rank's part of a plan: owners hold reduced gradients, hosts update whole matrices.

    A host keeps the fp32 master and all optimizer state of the matrices it hosts; no other rank has any.

    Args:
        plan: whose groups of this rank's stage and owner are executed, in their order.
        wiring: of this rank; its `masters` are those of `hosted_matrices`.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[DistributedDataParallel],
        world: World,
        plan: Plan,
        wiring: Wiring,
        fallbacks: Fallbacks,
    ) -> None:
        super().__init__(adamw_settings(config), chunks, wiring.masters, wiring.device)
        self._chunks, self._wiring, self._fallbacks = chunks, wiring, fallbacks
        self._tp = world.layout.tp
        self._hosts = {
            matrix.index: cell.host for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True)
        }
        shares = plan.assignment.shares
        self._overlap = bool(chunks[0].ddp_config.overlap_param_gather)
        stage, owner = world.pp_rank, world.owner
        batches = self._batches(plan, stage, owner)
        self._owned = tuple(matrix for batch in batches for matrix in batch)
        shared = [matrix for matrix in self._owned if matrix.index in shares]
        batches = [tuple(matrix for matrix in batch if matrix.index not in shares) for batch in batches]
        self._whole = tuple(matrix for batch in batches for matrix in batch)
        """Those that are hosted."""
        out = [self._route(to_hosts, batch) for batch in batches]
        back = [self._route(from_hosts, batch) for batch in batches]
        sent = Messages.for_routes(out, _DTYPES[config.engine.exchange_dtype], wiring.device)
        returned = Messages.for_routes(back, _DTYPES[config.train.precision], wiring.device)
        self._messages = [sent, returned]
        hosted = [self._hosted(batch) for batch in batches]
        scratch = max((scratch_elements(wiring, own) for own in hosted), default=0)
        self._scratch = torch.empty(scratch, dtype=torch.float32, device=wiring.device)
        with torch.no_grad():
            self._gather_whole(self._whole)
        self._finite = torch.ones(sum(map(len, hosted)), device=wiring.device)
        """Of all matrices hosted here: finite where the last update was."""
        self._hosted_places = torch.tensor(
            [place for place, matrix in enumerate(self._whole) if self._hosts[matrix.index] == wiring.rank],
            dtype=torch.int64,
            device=wiring.device,
        )
        """Of `_finite`, among `_whole`."""
        parts = [len(shares[matrix.index].fragment) for matrix in shared]
        self._sharing = Sharing(wiring, shared, parts) if shared else None
        self.sharing = () if self._sharing is None else (self._sharing,)
        self.groups: list[HostedGroup] = [
            HostedGroup(
                wiring,
                hosted[number],
                AllToAll(out[number], sent, number, wiring.tp_group),
                AllToAll(back[number], returned, number, wiring.tp_group),
                self._scratch,
                finite,
            )
            for number, finite in enumerate(self._finite.split([len(own) for own in hosted]))  # type: ignore[no-untyped-call]
        ]
        self._begun = 0
        """Places in the order that are done in this step."""
        for one in self._sharing.matrices if self._sharing is not None else ():
            one.reload()
        self._slices = self._gradient_slices()

    # --- one step ---

    def gradients_for_norm(self) -> list[torch.Tensor]:
        """What this rank adds to the global gradient norm: every element of the stage's matrices on one rank."""
        return self._slices

    @torch.no_grad()
    def begin(self) -> None:
        """Pack and send the first groups' gradients. Messages carry them as they are: hosts scale what arrives."""
        self._run(ahead(len(self.groups)))

    @torch.no_grad()
    def discard(self) -> None:
        for group in self.groups[: self._begun]:
            group.discard()
        self._begun = 0
        self._wiring.aside.join()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update all matrices of this rank's owner and start gathering what the next forward needs first."""
        self._update()
        self._gather()
        return True

    def _update(self) -> None:
        """While group i is updated, messages of those before and behind it travel; what is packed and written for them
        is done aside. `planner.pipeline.order` says what comes when."""
        self._run(None)
        self._begun = 0
        if self._sharing is not None:
            self._sharing.update(self._scale)
            self._sharing.update_alone(self._scale)
        with self._wiring.timer.phase("exchange" if self._tp > 1 else "matrix_update"):
            self._wiring.aside.join()

    def _run(self, end: int | None) -> None:
        """What has not been begun, up to that place in the order."""
        for number, stage in islice(order(len(self.groups)), self._begun, end):
            self.groups[number].run(stage, self._scale)
        self._begun = max(self._begun, end or 0)

    def _gather(self) -> None:
        """Overlapped, what the forward needs first travels at once (`owner_bucket_group.install` has the rest follow);
        else all matrices now."""
        ahead = gathering_order(self._chunks)[:GATHERED_AHEAD]
        for bucket in ahead if self._overlap else reversed(matrix_groups(self._chunks)):
            bucket.start_param_sync()

    # --- what went wrong in an update ---

    def fallbacks(self) -> torch.Tensor:
        """Of matrices hosted here."""
        count = torch.full((1,), float(self._fallbacks.take()), device=self._wiring.device)
        if self._sharing is not None:
            count += self._sharing.fallbacks()
        return count + left_out(self.groups, self._device) + torch.isfinite(self._finite).logical_not().sum()

    @torch.no_grad()
    def repair(self) -> None:
        """Give matrices whose last update was not finite their previous weights back, and a new optimizer state.

        Fragments of such an update were never written, so the model's own weights are the previous ones; the master is
        made of them again. The TP ranks agree first: where no fragment travelled, flags did not either.
        """
        settle(self.groups, self.masters)
        if self._sharing is not None:
            self._sharing.repair(self.masters)
        finite = torch.ones(len(self._whole), device=self._wiring.device)
        finite[self._hosted_places] = torch.isfinite(self._finite).float()
        if self._wiring.tp_group is not None:
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN, group=self._wiring.tp_group)
        broken = [m for m, good in zip(self._whole, self._wiring.timer.read(finite), strict=True) if not good]
        if not broken:
            return
        self._gather_whole(sorted(broken, key=lambda matrix: matrix.index))
        for group in self.groups:
            for matrix in group.hosted:
                if matrix in broken:
                    assert group.optimizer is not None
                    group.optimizer.state.pop(self._wiring.masters[matrix.index], None)
                    _log.warning(
                        "%s keeps its weight: its update was not finite; its optimizer state starts anew", matrix.name
                    )
        self._finite.fill_(1.0)

    # --- whole matrices ---

    @torch.no_grad()
    def publish(self) -> None:
        """Masters to the weights of this owner's TP ranks; gathering them over the data-parallel ranks is not done."""
        for group in self.groups:
            group.send_weights()
            group.receive_weights()
        for one in self._sharing.matrices if self._sharing is not None else ():
            one.publish()
        self._wiring.aside.join()

    @torch.no_grad()
    def _gather_whole(self, matrices: Sequence[Matrix]) -> None:
        """Masters of `matrices` from the model's weights; every TP rank calls it with the same ones that travel."""
        fragments, masters, rank = self._wiring.fragments, self._wiring.masters, self._wiring.rank
        # A few at a time: this needs memory on top of the pipeline's own.
        for batch in _runs(matrices, BATCH_BYTES // 4):
            route = self._route(to_hosts, batch)
            exchange = AllToAll(
                route, Messages.for_routes([route], torch.float32, self._wiring.device), 0, self._wiring.tp_group
            )
            for parcel in route.sends:
                weight = fragments.weight(parcel.matrix)
                exchange.send[parcel.offset : parcel.offset + parcel.elements].view(weight.shape).copy_(weight)
            exchange.start()
            exchange.wait()
            for parcel in route.receives:
                view = fragments.in_whole(parcel.matrix, masters[parcel.matrix.index].detach(), parcel.peer)
                view.copy_(exchange.receive[parcel.offset : parcel.offset + parcel.elements].view(view.shape))
            for matrix in self._hosted(batch):
                if rank in senders(matrix, rank, self._tp):
                    own = fragments.in_whole(matrix, masters[matrix.index].detach(), rank)
                    own.copy_(fragments.weight(matrix))

    # --- set-up ---

    def _batches(self, plan: Plan, stage: int, owner: int) -> list[tuple[Matrix, ...]]:
        """This owner's micro-groups in order; where nothing travels, cut to what scratch there is for."""
        groups = sorted((g for g in plan.groups if (g.stage, g.owner) == (stage, owner)), key=lambda g: g.index)
        batches = [tuple(plan.matrices[index] for index in group.matrices) for group in groups]
        if self._tp > 1:
            return batches
        return [tuple(run) for batch in batches for run in _runs(batch, BATCH_BYTES // 4, self._one_scratch)]

    def _one_scratch(self, matrix: Matrix) -> int:
        return scratch_elements(self._wiring, (matrix,))

    def _hosted(self, batch: Sequence[Matrix]) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in batch if self._hosts[matrix.index] == self._wiring.rank)

    def _route(self, way: Callable[..., Route], batch: Sequence[Matrix]) -> Route:
        hosts = [self._hosts[matrix.index] for matrix in batch]
        return way(batch, hosts, rank=self._wiring.rank, tp=self._tp)

    def _gradient_slices(self) -> list[torch.Tensor]:
        """The owned ranges of the buckets; where TP ranks have equal copies of a matrix, only the first one's count."""
        fragments = self._wiring.fragments
        if any(matrix.replicated and self._tp > 1 for matrix in self._owned):
            held = [m for m in self._owned if self._wiring.rank in m.holders(self._tp)]
            return [fragments.gradient(m) for m in held if not m.replicated or self._wiring.rank == 0]
        found = []
        for group in matrix_groups(self._chunks):
            data = group.buckets[0].grad_data
            found += [data[part.start : part.end] for part in group.owned]
        return found

    @property
    def exchange_bytes(self) -> int:
        """The bytes of message buffers and gradient scratch."""
        kept = sum(messages.bytes for messages in self._messages) + self._scratch.nbytes
        return kept + (self._sharing.gradient_bytes if self._sharing is not None else 0)

    @property
    def workspace_bytes(self) -> int:
        beside = () if self._sharing is None else self._sharing.beside
        return super().workspace_bytes + sum(workspace.nbytes for workspace in beside)

    @torch.no_grad()
    def reload_model_params(self, state_dict: object = None) -> None:
        """Take the model's weights as masters, as after loading a checkpoint without optimizer state."""
        self._gather_whole(self._whole)
        for one in self._sharing.matrices if self._sharing is not None else ():
            one.reload()


def updated_matrices(plan: Plan, world: World) -> list[Matrix]:
    """What a rank keeps masters and state of, whole or, where they are shared, its fragment of."""
    return [
        matrix
        for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True)
        if (matrix.stage, cell.owner) == (world.pp_rank, world.owner)
        and (cell.host == world.tp_rank or matrix.index in plan.assignment.shares)
    ]


def _runs(
    matrices: Sequence[Matrix], limit: int, size: Callable[[Matrix], int] = lambda matrix: matrix.elements
) -> list[list[Matrix]]:
    """Consecutive matrices whose sizes add up to at most `limit`, or one that alone exceeds it."""
    runs: list[list[Matrix]] = []
    filled = 0
    for matrix in matrices:
        if not runs or filled + size(matrix) > limit:
            runs.append([])
            filled = 0
        runs[-1].append(matrix)
        filled += size(matrix)
    return runs
