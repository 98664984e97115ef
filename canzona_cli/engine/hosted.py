"""One micro-group on one TP rank: its part of the two all-to-alls,
and the update of the matrices it hosts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from canzona_cli.costs.buffers import BATCH_BYTES
from canzona_cli.engine.wire import AllToAll, Copy, Fragments, Messages, Wiring, Write, write_finite
from canzona_cli.megatron.timers import Span
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.exchange import Parcel, senders, to_hosts
from canzona_cli.run.phases import Phase


class HostedGroup:
    """Call, in the pipeline's order: send_gradients, receive_gradients, step, send_weights, receive_weights.

    Everything is bound to its place once; a step moves data and allocates nothing. Gradients are put together
    and matrices updated on the current stream; what is sent, and weights that come back, are left to
    `wiring.aside`, which the caller joins.

    Args:
        hosted: the matrices of the micro-group that this rank hosts, in the plan's order.
        gradients: fragments from all ranks to the hosts of their matrices.
        weights: fragments of new weights from the hosts back to all ranks.
        scratch: fp32, flat, of at least `scratch_elements(hosted)`; gradients of what is updated, one group
            at a time.
        finite: by hosted matrix, where to say how the update went: a number, or NaN or infinite where it was
            not.
    """

    def __init__(
        self,
        wiring: Wiring,
        hosted: tuple[Matrix, ...],
        gradients: AllToAll,
        weights: AllToAll,
        scratch: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        self.hosted = hosted
        self._wiring, self._gradients, self._weights = wiring, gradients, weights
        self._spans: dict[AllToAll, Span] = {}
        # With one TP rank nothing travels: what is copied is a part of the update.
        self._moving: Phase = "exchange" if wiring.tp_group is not None else "matrix_update"
        self._on_host = wiring.device.type == "cpu"
        self._masters = [wiring.masters[m.index] for m in hosted]
        self.optimizer = wiring.make_optimizer(hosted, self._masters) if hosted else None
        self._finite = finite

        fragments = wiring.fragments
        # Gradients out: own parameter to message.
        self._grad_pack = _packed(gradients, ((p, fragments.gradient(p.matrix)) for p in gradients.route.sends))
        # Gradients in: message and own parameter to the whole.
        self._grads: list[torch.Tensor] = []
        """Gradients of the hosted matrices, fp32 (rows, columns)."""
        self._grad_unpack: list[Copy] = []
        self._in_place: list[torch.Tensor] = []
        self._bind_gradients(scratch)
        # Weights out: master to messages and to own parameter.
        self._weight_pack = _packed(
            weights,
            (
                (p, fragments.in_whole(p.matrix, wiring.masters[p.matrix.index].detach(), p.peer))
                for p in weights.route.sends
            ),
        )
        self._flag_sends = [weights.send[f[0] : f[-1] + 1] for f in weights.route.send_flags if f]
        self._own_weights = [
            (place, _own_write(fragments, m, fragments.in_whole(m, master.detach(), wiring.rank)))
            for place, (m, master) in enumerate(zip(hosted, self._masters, strict=True))
            if wiring.rank in m.holders(fragments.tp)
        ]
        # Weights in: message to own parameter.
        self._bind_arriving_weights()

    def _bind_gradients(self, scratch: torch.Tensor) -> None:
        """Binds the place where each hosted matrix's gradient is put together: in `scratch`, or where it lies
        whole already."""
        fragments, rank = self._wiring.fragments, self._wiring.rank
        offset = 0
        for matrix in self.hosted:
            if lies_whole(self._wiring, matrix):
                reduced = fragments.gradient(matrix)
                self._grads.append(reduced.view(matrix.rows, matrix.cols))
                self._in_place.append(reduced)
                continue
            whole = scratch[offset : offset + matrix.elements].view(matrix.rows, matrix.cols)
            offset += matrix.elements
            self._grads.append(whole)
            for parcel in self._gradients.route.receives:
                if parcel.matrix is matrix:
                    view = fragments.in_whole(matrix, whole, parcel.peer)
                    self._grad_unpack.append(Copy(view, _at(self._gradients.receive, parcel.offset, view)))
            if rank in senders(matrix, rank, fragments.tp):
                self._grad_unpack.append(Copy(fragments.in_whole(matrix, whole, rank), fragments.gradient(matrix)))

    def _bind_arriving_weights(self) -> None:
        """Binds fragments of what is hosted elsewhere, each with the flag of its matrix."""
        fragments, weights = self._wiring.fragments, self._weights
        arriving = weights.route.receive_flags
        places = {matrix.index: number for number, (matrix, _) in enumerate(arriving)}
        self._flag_places = torch.tensor(
            [place for _, place in arriving], dtype=torch.int64, device=self._wiring.device
        )
        self._weight_unpack = [
            (
                places[parcel.matrix.index],
                Write(target=weight, source=_at(weights.receive, parcel.offset, weight), rounded=weight),
            )
            for parcel in weights.route.receives
            for weight in (fragments.weight(parcel.matrix),)
        ]

    def run(self, stage: int, scale: float) -> None:
        """Runs one stage of the pipeline (`planner.pipeline`); `scale` multiplies gradients (clipping)."""
        if stage == 0:
            self.send_gradients()
        elif stage == 1:
            self.receive_gradients(scale)
            self.step()
            self.send_weights()
        else:
            self.receive_weights()

    def send_gradients(self) -> None:
        """Pack this rank's fragments and send them to their hosts."""
        with self._wiring.timer.phase(self._moving), self._wiring.aside.work():
            for copy in self._grad_pack:
                copy.run()
            self._start(self._gradients)

    def receive_gradients(self, scale: float) -> None:
        """Wait for the fragments and put the hosted matrices' gradients together,
        times `scale` (clipping)."""
        with self._wiring.timer.phase(self._moving):
            # Where nothing comes in, only the next message to be packed has to wait until this one is away.
            with nullcontext() if self._grad_unpack else self._wiring.aside.work():
                self._finish(self._gradients)
            for copy in self._grad_unpack:
                copy.run(scale)
            if scale != 1.0:
                for gradient in self._in_place:
                    gradient.mul_(scale)

    def discard(self) -> None:
        """Wait for the fragments; nobody reads them."""
        with self._wiring.timer.phase(self._moving):
            self._finish(self._gradients)

    def step(self) -> None:
        """Update the hosted matrices."""
        if self.optimizer is None:
            return
        with self._wiring.timer.phase("matrix_update"):
            for master, gradient in zip(self._masters, self._grads, strict=True):
                master.grad = gradient
            self.optimizer.step()
            for place, master in enumerate(self._masters):
                master.grad = None
                # A sum is finite only if all of it is; weights are far too small to overflow it.
                torch.sum(master.detach(), dim=(0, 1), out=self._finite[place])

    def send_weights(self) -> None:
        """Pack the others' fragments in model precision, send them back, and write own ones."""
        with self._wiring.timer.phase(self._moving), self._wiring.aside.work():
            for copy in self._weight_pack:
                copy.run()
            for flags in self._flag_sends:
                flags.copy_(self._finite)
            self._start(self._weights)
            write_finite(self._own_weights, self._finite, on_host=self._on_host)

    def receive_weights(self) -> None:
        """Wait for the updated fragments and write them;
        those of a non-finite update are left as they were."""
        with self._wiring.timer.phase(self._moving), self._wiring.aside.work():
            self._finish(self._weights)
            if self._weight_unpack:
                flags = self._weights.receive.index_select(0, self._flag_places)
                write_finite(self._weight_unpack, flags, on_host=self._on_host)

    def _start(self, exchange: AllToAll) -> None:
        begin = self._wiring.timer.now()
        work = exchange.start()
        if work is not None:
            span = self._wiring.timer.span("exchange_total", begin)
            self._wiring.watcher.watch(span, work)
            self._spans[exchange] = span

    def _finish(self, exchange: AllToAll) -> None:
        span = self._spans.pop(exchange, None)
        late = span is not None and span.end is None
        exchange.wait()
        if late and span is not None:
            self._wiring.watcher.waited(span)


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """The hosted matrices of one owner, in micro-groups, with the memory they are updated in."""

    matrices: tuple[Matrix, ...]
    """The matrices of all groups, in the groups' order, whichever rank hosts them."""
    owned: tuple[Matrix, ...]
    """The hosted and the shared matrices of the owner, in the plan's order."""
    hosts: Mapping[int, int]
    """The host of each matrix, by index."""
    groups: Sequence[HostedGroup]
    finite: torch.Tensor
    """A number for each matrix hosted here, finite where its last update was."""
    places: torch.Tensor
    """The places of those matrices among `matrices`."""
    bytes: int
    """Bytes of message buffers and gradient scratch."""


@torch.no_grad()
def gather_masters(wiring: Wiring, hosts: Mapping[int, int], matrices: Sequence[Matrix]) -> None:
    """Makes masters of the model's weights. Collective:
    every TP rank calls it with the same matrices that travel."""
    fragments, masters, rank, tp = wiring.fragments, wiring.masters, wiring.rank, wiring.fragments.tp
    # A few at a time: this needs memory on top of the pipeline's own.
    for batch in runs(matrices, BATCH_BYTES // 4):
        route = to_hosts(batch, [hosts[matrix.index] for matrix in batch], rank=rank, tp=tp)
        exchange = AllToAll(route, Messages.for_routes([route], torch.float32, wiring.device), 0, wiring.tp_group)
        for parcel in route.sends:
            weight = fragments.weight(parcel.matrix)
            exchange.send[parcel.offset : parcel.offset + parcel.elements].view(weight.shape).copy_(weight)
        exchange.start()
        exchange.wait()
        for parcel in route.receives:
            view = fragments.in_whole(parcel.matrix, masters[parcel.matrix.index].detach(), parcel.peer)
            view.copy_(exchange.receive[parcel.offset : parcel.offset + parcel.elements].view(view.shape))
        for matrix in batch:
            if hosts[matrix.index] == rank and rank in senders(matrix, rank, tp):
                target = fragments.in_whole(matrix, masters[matrix.index].detach(), rank)
                target.copy_(fragments.weight(matrix))


def runs(
    matrices: Sequence[Matrix], limit: int, size: Callable[[Matrix], int] = lambda matrix: matrix.elements
) -> list[list[Matrix]]:
    """Groups consecutive matrices whose sizes add up to at most `limit`, or one that alone exceeds it."""
    batches: list[list[Matrix]] = []
    filled = 0
    for matrix in matrices:
        if not batches or filled + size(matrix) > limit:
            batches.append([])
            filled = 0
        batches[-1].append(matrix)
        filled += size(matrix)
    return batches


def scratch_elements(wiring: Wiring, hosted: Iterable[Matrix]) -> int:
    """Counts the fp32 elements that the gradients of matrices hosted here need next to Megatron's buffer."""
    return sum(matrix.elements for matrix in hosted if not lies_whole(wiring, matrix))


def lies_whole(wiring: Wiring, matrix: Matrix) -> bool:
    """Tells whether the reduced gradient can be handed to an optimizer as it lies in this rank's Megatron buffer."""
    if senders(matrix, wiring.rank, wiring.fragments.tp) != range(wiring.rank, wiring.rank + 1):
        return False
    gradient = wiring.fragments.gradient(matrix)
    return gradient.dtype is torch.float32 and gradient.numel() == matrix.elements and gradient.is_contiguous()


def _own_write(fragments: Fragments, matrix: Matrix, source: torch.Tensor) -> Write:
    weight = fragments.weight(matrix)
    # The fragment's reduced gradient has been used up when its weight is written, and has room for the
    # rounded weight.
    same = weight.dtype is source.dtype
    room = weight if same else fragments.gradient(matrix).view(weight.dtype)[..., : weight.shape[-1]]
    return Write(target=weight, source=source, rounded=room)


def _packed(exchange: AllToAll, parcels: Iterable[tuple[Parcel, torch.Tensor]]) -> list[Copy]:
    """Lists copies of fragments to their places in the message that is sent."""
    return [Copy(_at(exchange.send, parcel.offset, fragment), fragment) for parcel, fragment in parcels]


def _at(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Views the part of a flat buffer from `offset` on, in the shape of `like`."""
    return buffer[offset : offset + like.numel()].view(like.shape)
