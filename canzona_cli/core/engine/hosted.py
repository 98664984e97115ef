"""The update of one micro-group on one TP rank: its part of the two all-to-alls, and the update of the
matrices that this rank hosts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

from canzona_cli.core.costs.scratch import batch_slices
from canzona_cli.core.engine.wire import (
    AllToAll,
    Copy,
    Fragments,
    Messages,
    Wiring,
    Write,
    group_by_key,
    join_copies,
    join_writes,
    write_finite,
)
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.matrix_optimizer import runs, view_run
from canzona_cli.core.phases import Phase
from canzona_cli.core.planner.exchange import Parcel, Route, from_hosts, senders, to_hosts


class HostedGroup:
    """A micro-group on one TP rank. Its methods are called in this order: send_gradients, receive_gradients,
    step, send_weights, receive_weights.

    All buffers, and their views, are made at set-up; a step only copies data. Matrices of one shape whose
    fragments are evenly spaced in memory, such as experts, are copied, checked and written as one tensor.
    Gradients are assembled and matrices updated on the current stream. Messages are packed and arriving
    weights written on the stream of `wiring.side_stream`, which the caller joins.

    Args:
        hosted: the matrices of the micro-group that this rank hosts, in the order in which routes list them.
        gradients: the exchange of gradient fragments, from all ranks to the hosts of their matrices.
        weights: the exchange of new weight fragments, from the hosts back to all ranks.
        scratch: a flat fp32 tensor with at least the elements that `scratch_elements` counts, for the
            gradients of the group that is being updated; all groups share it.
        finite: one element for each hosted matrix, which receives the sum of its new master; the sum is NaN
            or infinite if the update was not finite.
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
        # With one TP rank nothing is sent, and the time for copies is attributed to the update.
        self._copy_phase: Phase = "exchange" if wiring.tp_group is not None else "matrix_update"
        self._on_host = wiring.device.type == "cpu"
        self._masters = [wiring.masters[m.index] for m in hosted]
        self.optimizer = wiring.make_optimizer(hosted, self._masters) if hosted else None
        self._finite = finite

        fragments = wiring.fragments
        # Gradients to send: from this rank's parameters into the message.
        self._grad_pack = _packing_copies(gradients, ((p, fragments.gradient(p.matrix)) for p in gradients.route.sends))
        # Gradients received: from the message and this rank's parameters into whole matrices.
        self._bind_gradients(scratch)
        self._check_views = list(self._views_to_check(finite))
        # Weights to send: from masters into messages and into this rank's parameters.
        self._weight_pack = _packing_copies(
            weights,
            (
                (p, fragments.view_in_whole(p.matrix, wiring.masters[p.matrix.index].detach(), p.peer))
                for p in weights.route.sends
            ),
        )
        self._flag_sends = [weights.send[places[0] : places[-1] + 1] for places in weights.route.send_flags if places]
        self._local_weights = join_writes(
            [
                (index, _local_write(fragments, m, fragments.view_in_whole(m, master.detach(), wiring.rank)))
                for index, (m, master) in enumerate(zip(hosted, self._masters, strict=True))
                if wiring.rank in m.holders(fragments.tp)
            ]
        )
        # Weights received: from the message into this rank's parameters.
        self._bind_arriving_weights()

    def _bind_gradients(self, scratch: torch.Tensor) -> None:
        """Chooses where each hosted matrix's gradient is assembled, and prepares the copies. A gradient that
        is not already whole in Megatron's buffer is assembled in `scratch`, next to the gradients of matrices
        of the same shape."""
        fragments, rank = self._wiring.fragments, self._wiring.rank
        grads: dict[int, torch.Tensor] = {}
        in_place: list[torch.Tensor] = []
        copied: list[Matrix] = []
        for matrix in self.hosted:
            if lies_whole(self._wiring, matrix):
                in_place.append(fragments.gradient(matrix).view(matrix.shape))
                grads[matrix.index] = in_place[-1]
            else:
                copied.append(matrix)
        offset = 0
        for same_shape in group_by_key(copied, lambda matrix: matrix.shape):
            for matrix in same_shape:
                grads[matrix.index] = scratch[offset : offset + matrix.elements].view(matrix.shape)
                offset += matrix.elements
        arriving = [
            (parcel.matrix, parcel.peer, self._gradients.receive[parcel.offset : parcel.offset + parcel.elements])
            for parcel in self._gradients.route.receives
        ]
        local = [(m, rank, fragments.gradient(m)) for m in copied if rank in senders(m, rank, fragments.tp)]
        unpack: list[Copy] = []
        for matrix, peer, fragment in (*arriving, *local):
            view = fragments.view_in_whole(matrix, grads[matrix.index], peer)
            unpack.append(Copy(view, fragment.view(view.shape)))
        self._grads = [grads[matrix.index] for matrix in self.hosted]
        self._grad_unpack = join_copies(unpack)
        self._in_place = [
            view_run(same_shape[run])
            for same_shape in group_by_key(in_place, lambda gradient: gradient.shape)
            for run in runs(same_shape)
        ]

    def _views_to_check(self, finite: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields two views for each run of hosted matrices of one shape: their masters (count, rows, columns)
        and their flags (count,)."""
        pairs = [(master.detach(), flag) for master, flag in zip(self._masters, finite.unbind(), strict=True)]
        for same_shape in group_by_key(pairs, lambda pair: pair[0].shape):
            masters, flags = [master for master, _ in same_shape], [flag for _, flag in same_shape]
            for run in runs(masters, flags):
                yield view_run(masters[run]), view_run(flags[run])

    def _bind_arriving_weights(self) -> None:
        """Prepares the writes of weight fragments that arrive from other hosts, each with the index of its
        matrix's flag."""
        fragments, weights = self._wiring.fragments, self._weights
        arriving_flags = weights.route.receive_flags
        flag_index = {matrix.index: index for index, (matrix, _) in enumerate(arriving_flags)}
        places = [place for _, place in arriving_flags]
        self._flag_places = torch.tensor(places, dtype=torch.int64, device=self._wiring.device)
        writes: list[tuple[int, Write]] = []
        for parcel in weights.route.receives:
            weight = fragments.weight(parcel.matrix)
            write = Write(target=weight, source=_view_at(weights.receive, parcel.offset, weight), rounded=weight)
            writes.append((flag_index[parcel.matrix.index], write))
        self._weight_unpack = join_writes(writes)

    def run(self, stage: int, scale: float) -> None:
        """Runs stage 0, 1 or 2 of the pipeline (`planner.order`). Gradients are multiplied by `scale`
        (clipping)."""
        if stage == 0:
            self.send_gradients()
        elif stage == 1:
            self.receive_gradients(scale)
            self.step()
            self.send_weights()
        else:
            self.receive_weights()

    def send_gradients(self) -> None:
        """Packs this rank's gradient fragments and starts sending them to the hosts of their matrices."""
        with self._wiring.timer.phase(self._copy_phase), self._wiring.side_stream.work():
            for copy in self._grad_pack:
                copy.run()
            self._gradients.start()

    def receive_gradients(self, scale: float) -> None:
        """Waits for the gradient fragments and assembles the hosted matrices' gradients, multiplied by
        `scale` (clipping)."""
        with self._wiring.timer.phase(self._copy_phase):
            # A rank that receives nothing only reuses the message buffer, so only the stream that packs
            # messages waits.
            with nullcontext() if self._grad_unpack else self._wiring.side_stream.work():
                self._gradients.wait()
            for copy in self._grad_unpack:
                copy.run(scale)
            if scale != 1.0:
                for gradient in self._in_place:
                    gradient.mul_(scale)

    def discard(self) -> None:
        """Waits for the gradient fragments without using them."""
        with self._wiring.timer.phase(self._copy_phase):
            self._gradients.wait()

    def step(self) -> None:
        """Updates the hosted matrices, and writes into `finite` a number for each of them, which is finite if
        the update was."""
        if self.optimizer is None:
            return
        with self._wiring.timer.phase("matrix_update"):
            for master, gradient in zip(self._masters, self._grads, strict=True):
                master.grad = gradient
            self.optimizer.step()
            for master in self._masters:
                master.grad = None
            for masters, flags in self._check_views:
                # A sum is finite only if all elements are. Weights are far too small for their sum to
                # overflow.
                torch.sum(masters, dim=(1, 2), out=flags)

    def send_weights(self) -> None:
        """Packs the other ranks' fragments of the new weights in the model's dtype, starts sending them, and
        writes this rank's fragments."""
        with self._wiring.timer.phase(self._copy_phase), self._wiring.side_stream.work():
            for copy in self._weight_pack:
                copy.run()
            for flags in self._flag_sends:
                flags.copy_(self._finite)
            self._weights.start()
            write_finite(self._local_weights, self._finite, on_host=self._on_host)

    def receive_weights(self) -> None:
        """Waits for the new weight fragments and writes them; weights whose update was not finite stay
        unchanged."""
        with self._wiring.timer.phase(self._copy_phase), self._wiring.side_stream.work():
            self._weights.wait()
            if self._weight_unpack:
                flags = self._weights.receive.index_select(0, self._flag_places)
                write_finite(self._weight_unpack, flags, on_host=self._on_host)


class Hosting:
    """One TP rank's part in the updates of its owner's micro-groups, or of its own experts, with the memory
    that these updates need. Creating it copies the model's weights to the masters, which is collective over
    the TP ranks.

    Args:
        batches: the hosted matrices of all TP ranks, group by group in the order of their updates.
        hosts: the TP rank that hosts each matrix, by matrix index.
        gradient_dtype, weight_dtype: the data types in which gradients and weights are sent.
    """

    def __init__(
        self,
        wiring: Wiring,
        batches: Sequence[Sequence[Matrix]],
        hosts: Mapping[int, int],
        gradient_dtype: torch.dtype,
        weight_dtype: torch.dtype,
    ) -> None:
        tp, rank, device = wiring.fragments.tp, wiring.rank, wiring.device
        self.wiring, self.hosts = wiring, hosts
        self.matrices = tuple(matrix for batch in batches for matrix in batch)
        """The matrices of all groups, in the groups' order, including those that other TP ranks host."""
        hosted = [tuple(matrix for matrix in batch if hosts[matrix.index] == rank) for batch in batches]

        def routes(make_route: Callable[..., Route]) -> list[Route]:
            return [make_route(batch, [hosts[m.index] for m in batch], rank=rank, tp=tp) for batch in batches]

        gradient_routes, weight_routes = routes(to_hosts), routes(from_hosts)
        gradient_messages = Messages(gradient_routes, gradient_dtype, device)
        weight_messages = Messages(weight_routes, weight_dtype, device)
        elements = max((scratch_elements(wiring, group) for group in hosted), default=0)
        scratch = torch.empty(elements, dtype=torch.float32, device=device)
        gather_masters(wiring, hosts, self.matrices)
        self.finite = torch.ones(sum(map(len, hosted)), device=device)
        """A number for each matrix that this rank hosts, finite if the last update of the matrix was finite:
        (hosted,)."""
        places = [place for place, matrix in enumerate(self.matrices) if hosts[matrix.index] == rank]
        self.places = torch.tensor(places, dtype=torch.int64, device=device)
        """The indices in `matrices` of the matrices that this rank hosts: (hosted,)."""
        flags = self.finite.split([len(group) for group in hosted])  # type: ignore[no-untyped-call]
        self.groups: list[HostedGroup] = []
        for index, group in enumerate(hosted):
            gradients = AllToAll(gradient_routes[index], gradient_messages, index, wiring)
            weights = AllToAll(weight_routes[index], weight_messages, index, wiring)
            self.groups.append(HostedGroup(wiring, group, gradients, weights, scratch, flags[index]))
        self.bytes = gradient_messages.bytes + weight_messages.bytes + scratch.nbytes
        """The size of the message buffers and the gradient scratch in bytes."""


@torch.no_grad()
def gather_masters(wiring: Wiring, hosts: Mapping[int, int], matrices: Sequence[Matrix]) -> None:
    """Copies the model's weights into the masters on the matrices' hosts. Collective over the TP ranks, which
    all pass the same matrices."""
    fragments, masters, rank, tp = wiring.fragments, wiring.masters, wiring.rank, wiring.fragments.tp
    # In batches, to limit the memory of these messages, which are in addition to the pipeline's.
    for batch in (matrices[part] for part in batch_slices([matrix.elements for matrix in matrices])):
        route = to_hosts(batch, [hosts[matrix.index] for matrix in batch], rank=rank, tp=tp)
        exchange = AllToAll(route, Messages([route], torch.float32, wiring.device), 0, wiring)
        for parcel in route.sends:
            weight = fragments.weight(parcel.matrix)
            exchange.send[parcel.offset : parcel.offset + parcel.elements].view(weight.shape).copy_(weight)
        exchange.start()
        exchange.wait()
        for parcel in route.receives:
            view = fragments.view_in_whole(parcel.matrix, masters[parcel.matrix.index].detach(), parcel.peer)
            view.copy_(exchange.receive[parcel.offset : parcel.offset + parcel.elements].view(view.shape))
        for matrix in batch:
            if hosts[matrix.index] == rank and rank in senders(matrix, rank, tp):
                target = fragments.view_in_whole(matrix, masters[matrix.index].detach(), rank)
                target.copy_(fragments.weight(matrix))


def scratch_elements(wiring: Wiring, hosted: Iterable[Matrix]) -> int:
    """Returns the number of fp32 elements of scratch that the gradients of the hosted matrices need in
    addition to Megatron's buffer."""
    return sum(matrix.elements for matrix in hosted if not lies_whole(wiring, matrix))


def lies_whole(wiring: Wiring, matrix: Matrix) -> bool:
    """Returns True if the whole reduced gradient is in this rank's Megatron buffer, contiguous and in fp32,
    so that an optimizer can use it without a copy."""
    if list(senders(matrix, wiring.rank, wiring.fragments.tp)) != [wiring.rank]:
        return False
    gradient = wiring.fragments.gradient(matrix)
    return gradient.dtype is torch.float32 and gradient.numel() == matrix.elements and gradient.is_contiguous()


def _local_write(fragments: Fragments, matrix: Matrix, source: torch.Tensor) -> Write:
    """Returns the write of this rank's fragment of a new weight."""
    weight = fragments.weight(matrix)
    # When the weight is written, the reduced gradient is no longer needed, so its memory can hold the rounded
    # weight.
    same_dtype = weight.dtype is source.dtype
    rounded = weight if same_dtype else fragments.gradient(matrix).view(weight.dtype)[..., : weight.shape[-1]]
    return Write(target=weight, source=source, rounded=rounded)


def _packing_copies(exchange: AllToAll, parcels: Iterable[tuple[Parcel, torch.Tensor]]) -> list[Copy]:
    """Returns the copies that pack fragments into the exchange's outgoing message."""
    copies = [Copy(_view_at(exchange.send, parcel.offset, fragment), fragment) for parcel, fragment in parcels]
    return join_copies(copies)


def _view_at(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a view, in the shape of `like`, of the elements of a flat buffer that start at `offset`."""
    return buffer[offset : offset + like.numel()].view(like.shape)
