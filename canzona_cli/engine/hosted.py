"""One micro-group on one TP rank: its part of the exchanges, and the update of the matrices it hosts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.engine.buffers import Exchange, Messages
from canzona_cli.engine.fragments import Fragments
from canzona_cli.megatron.in_flight import Watcher
from canzona_cli.megatron.timers import PhaseTimer, Span
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.exchange import Route, senders
from canzona_cli.run.phases import Phase

MakeOptimizer = Callable[[Sequence[Matrix], list[torch.nn.Parameter]], torch.optim.Optimizer]
"""An ordinary optimizer of these whole matrices."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What all groups of a rank share."""

    fragments: Fragments
    rank: int
    """TP rank."""
    tp_group: torch.distributed.ProcessGroup | None
    timer: PhaseTimer
    watcher: Watcher
    device: torch.device
    masters: Mapping[int, torch.nn.Parameter]
    """By matrix index: the fp32 weights of what this rank hosts, (rows, columns)."""


class HostedGroup:
    """Call, in the pipeline's order: send_gradients, receive_gradients, step, send_weights, receive_weights.

    Everything is bound to its place once; a step moves data and allocates nothing.

    Args:
        matrices: of the micro-group, in the plan's order; `hosts` theirs, TP ranks.
        scratch: fp32, as long as `scratch_elements` of any group; gradients of what is updated, one group at a time.
        number: of the group in the pipeline.
    """

    def __init__(
        self,
        wiring: Wiring,
        matrices: Sequence[Matrix],
        hosts: Sequence[int],
        gradients: tuple[Route, Messages],
        weights: tuple[Route, Messages],
        scratch: torch.Tensor,
        number: int,
        make_optimizer: MakeOptimizer,
    ) -> None:
        self._wiring = wiring
        self.hosted = tuple(m for m, host in zip(matrices, hosts, strict=True) if host == wiring.rank)
        fragments = wiring.fragments
        self._gradients = Exchange(gradients[0], gradients[1], number, wiring.tp_group)
        self._weights = Exchange(weights[0], weights[1], number, wiring.tp_group)
        self._spans: dict[int, Span] = {}
        # With one TP rank nothing travels: what is copied is a part of the update.
        self._moving: Phase = "exchange" if wiring.tp_group is not None else "matrix_update"

        # Gradients out: parameter to message.
        self._grad_pack = [
            _Copy(
                _at(self._gradients.send, parcel.offset, fragments.gradient(parcel.matrix)),
                fragments.gradient(parcel.matrix),
            )
            for parcel in gradients[0].sends
        ]
        # Gradients in: message and own parameter to the whole.
        self._grads: list[torch.Tensor] = []
        self._grad_unpack: list[_Copy] = []
        self._in_place: list[torch.Tensor] = []
        self._bind_gradients(gradients[0], scratch)
        self._masters = [wiring.masters[m.index] for m in self.hosted]
        self.optimizer = make_optimizer(self.hosted, self._masters) if self.hosted else None

        # Weights out: master to messages and to own parameter.
        self._weight_pack = [
            _Copy(_at(self._weights.send, parcel.offset, view), view)
            for parcel in weights[0].sends
            for view in (fragments.in_whole(parcel.matrix, wiring.masters[parcel.matrix.index].detach(), parcel.peer),)
        ]
        self._own_weights = [
            (place, _Copy(fragments.weight(m), fragments.in_whole(m, master.detach(), wiring.rank)))
            for place, (m, master) in enumerate(zip(self.hosted, self._masters, strict=True))
            if wiring.rank in m.holders(fragments.tp)
        ]
        # Weights in: message to parameter.
        arriving = weights[0].receive_flags
        # Flags are asked for after the step, when another group's message may lie where they came in.
        self._told = torch.ones(len(arriving), dtype=self._weights.receive.dtype, device=wiring.device)
        self._told_at = torch.tensor([place for _, place in arriving], dtype=torch.int64, device=wiring.device)
        self._flag_receives = [(m, flag) for (m, _), flag in zip(arriving, self._told.unbind(), strict=True)]
        flags = {m.index: flag for m, flag in self._flag_receives}
        self._weight_unpack = [
            (
                flags[parcel.matrix.index],
                _Copy(
                    fragments.weight(parcel.matrix),
                    _at(self._weights.receive, parcel.offset, fragments.weight(parcel.matrix)),
                ),
            )
            for parcel in weights[0].receives
        ]
        self._travels = weights[0].travels
        self._flag_sends = [self._weights.send[f[0] : f[-1] + 1] for f in weights[0].send_flags if f]
        self.finite = torch.ones(len(self.hosted), device=wiring.device)
        """By hosted matrix: finite (a number) where the update was, NaN or infinite where it was not."""
        self._on_host = wiring.device.type == "cpu"

    def _bind_gradients(self, route: Route, scratch: torch.Tensor) -> None:
        fragments, rank = self._wiring.fragments, self._wiring.rank
        offset = 0
        for matrix in self.hosted:
            remote = [parcel for parcel in route.receives if parcel.matrix is matrix]
            own = fragments.gradient(matrix) if rank in senders(matrix, rank, fragments.tp) else None
            if not remote and own is not None and is_whole(matrix, own):
                self._grads.append(own.view(matrix.rows, matrix.cols))
                self._in_place.append(own)
                continue
            whole = scratch[offset : offset + matrix.elements].view(matrix.rows, matrix.cols)
            offset += matrix.elements
            self._grads.append(whole)
            for parcel in remote:
                view = fragments.in_whole(matrix, whole, parcel.peer)
                self._grad_unpack.append(_Copy(view, _at(self._gradients.receive, parcel.offset, view)))
            if own is not None:
                self._grad_unpack.append(_Copy(fragments.in_whole(matrix, whole, rank), own))

    def send_gradients(self) -> None:
        """Pack this rank's fragments and send them to their hosts."""
        with self._wiring.timer.phase(self._moving):
            for copy in self._grad_pack:
                copy.run()
            self._start(self._gradients)

    def receive_gradients(self, scale: float) -> None:
        """Wait for the fragments and put the hosted matrices' gradients together, times `scale` (clipping)."""
        with self._wiring.timer.phase(self._moving):
            self._finish(self._gradients)
            for copy in self._grad_unpack:
                copy.run(scale)
            if scale != 1.0:
                for gradient in self._in_place:
                    gradient.mul_(scale)

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
                torch.sum(master.detach(), dim=(0, 1), out=self.finite[place])

    def send_weights(self) -> None:
        """Write own fragments, pack the others' in model precision, and send them back."""
        with self._wiring.timer.phase(self._moving):
            for copy in self._weight_pack:
                copy.run()
            for place, copy in self._own_weights:
                self._write(copy, self.finite[place])
            for flags in self._flag_sends:
                flags.copy_(self.finite)
            self._start(self._weights)

    def receive_weights(self) -> None:
        """Wait for the updated fragments and write them; those of a non-finite update are left as they were."""
        with self._wiring.timer.phase(self._moving):
            self._finish(self._weights)
            if self._travels and self._flag_receives:
                torch.index_select(self._weights.receive, 0, self._told_at, out=self._told)
            for flag, copy in self._weight_unpack:
                self._write(copy, flag)

    def flags(self) -> list[tuple[Matrix, torch.Tensor]]:
        """Every matrix of the group whose flag this rank has: not finite where its update was not."""
        return [*zip(self.hosted, self.finite.unbind(), strict=True), *self._flag_receives]

    def _write(self, copy: "_Copy", flag: torch.Tensor) -> None:
        if self._on_host:
            if torch.isfinite(flag):
                copy.run()
        else:
            # The host must not wait to know the flag.
            copy.target.copy_(torch.where(torch.isfinite(flag), copy.source, copy.target))

    def _start(self, exchange: Exchange) -> None:
        begin = self._wiring.timer.now()
        work = exchange.start()
        if work is not None:
            span = self._wiring.timer.span("exchange_total", begin)
            self._wiring.watcher.watch(span, work)
            self._spans[id(exchange)] = span

    def _finish(self, exchange: Exchange) -> None:
        span = self._spans.pop(id(exchange), None)
        late = span is not None and span.end is None
        exchange.wait()
        if late and span is not None:
            self._wiring.watcher.waited(span)


def scratch_elements(fragments: Fragments, rank: int, matrices: Sequence[Matrix], hosts: Sequence[int]) -> int:
    """fp32 elements the gradients of a group need beside Megatron's buffer."""
    needed = 0
    for matrix, host in zip(matrices, hosts, strict=True):
        if host == rank and not _lies_whole(fragments, rank, matrix):
            needed += matrix.elements
    return needed


def _lies_whole(fragments: Fragments, rank: int, matrix: Matrix) -> bool:
    alone = senders(matrix, rank, fragments.tp) == range(rank, rank + 1)
    return alone and is_whole(matrix, fragments.gradient(matrix))


def is_whole(matrix: Matrix, gradient: torch.Tensor) -> bool:
    """Whether a gradient can be handed to an optimizer as it lies in Megatron's buffer."""
    return gradient.dtype is torch.float32 and gradient.numel() == matrix.elements and gradient.is_contiguous()


@dataclass(frozen=True, slots=True)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor

    def run(self, scale: float = 1.0) -> None:
        if scale == 1.0:
            self.target.copy_(self.source)
        elif self.source.dtype is self.target.dtype:
            torch.mul(self.source, scale, out=self.target)
        else:
            # In the target's precision: scaled in bf16, a gradient would be rounded twice.
            self.target.copy_(self.source)
            self.target.mul_(scale)


def _at(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The part of a flat buffer from `offset` on, in the shape of `like`."""
    return buffer[offset : offset + like.numel()].view(like.shape)
