"""The tools for moving matrices between ranks: views of fragments, messages, a stream for packing messages,
and writes of weights."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from canzona_cli.core.megatron.timers import PhaseTimer, Watcher
from canzona_cli.core.model import geometry
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.matrix_optimizer import runs, view_run
from canzona_cli.core.optimizers.shared_rows import Wait
from canzona_cli.core.planner.exchange import Route
from canzona_cli.core.setup import ModelConfig


class Fragments:
    """The views of one tensor-parallel rank's fragments of matrices.

    Args:
        model: the model, whose heads and groups determine where q, k and v are in linear_qkv.
        tp: the number of tensor-parallel ranks.
        rank: this rank's TP rank.
        parameters: this rank's parameters in Megatron's buffers, by the plan's names.
    """

    def __init__(self, model: ModelConfig, tp: int, rank: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._model, self.tp, self._rank, self._parameters = model, tp, rank, parameters

    def as_single_rank(self) -> "Fragments":
        """Returns the views for matrices that tensor parallelism does not cut, as if this were the only TP
        rank."""
        return Fragments(self._model, 1, 0, self._parameters)

    def gradient(self, matrix: Matrix) -> torch.Tensor:
        """Returns a view of this rank's fragment of the reduced gradient; with a plan, valid only on the
        matrix's owner."""
        main_grad: object = getattr(self._parameters[matrix.parameter], "main_grad", None)
        assert isinstance(main_grad, torch.Tensor)
        return self.view_in_parameter(matrix, main_grad)

    def weight(self, matrix: Matrix) -> torch.Tensor:
        """Returns a view of this rank's fragment of the weight."""
        return self.view_in_parameter(matrix, self._parameters[matrix.parameter].detach())

    def view_in_parameter(self, matrix: Matrix, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a view of this rank's fragment of the matrix in `parameter`, 2-D or 3-D
        (`geometry.locate_in_parameter`)."""
        view = geometry.locate_in_parameter(matrix, self._model, self.tp)
        return parameter.view(view.shape)[view.index]

    def view_in_whole(self, matrix: Matrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a view of TP rank `rank`'s fragment in the whole matrix (rows, columns), in the shape of
        `view_in_parameter`."""
        view = geometry.locate_in_matrix(matrix, self._model, self.tp, rank)
        return whole.view(view.shape)[view.index]

    def blocks(self, matrix: Matrix, *, whole: bool) -> Iterator[geometry.Block]:
        """Yields the positions of a matrix (`whole`), or of this rank's fragment of it, in the parameter as a
        single TP rank would store it."""
        stored = geometry.stored_blocks(matrix.name, matrix.shape, self._model)
        held = stored if whole else geometry.matrix_blocks(matrix, self._model, tp=self.tp, rank=self._rank)
        return geometry.locate_in_whole_parameter(matrix, held, self._model)


class SideStream:
    """A stream for work that overlaps with later work on the current stream. On a device without streams, the
    work is done immediately.

    `record_stream` is not needed: the buffers that are used in a block of `work` are allocated at set-up and
    never freed, and tensors that are created in a block are used and freed in the same block.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority, because these short copies compete with matmuls that fill the device, and other ranks
        # wait for the messages.
        self._stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def work(self) -> Iterator[None]:
        """Runs the block on this stream, after all work that has been enqueued on the current stream so
        far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Makes the current stream wait for all work that has been enqueued on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


SETS = 2
"""The number of buffer sets for each direction, gradients or weights. While group i is updated, gradients of
group i + 1 are received and weights of group i - 1 are sent, so two sets of each direction are in use."""


class Messages:
    """The send and receive buffers of one direction, each flat and large enough for each of the routes. A
    buffer is empty if no route needs it."""

    def __init__(self, routes: Sequence[Route], dtype: torch.dtype, device: torch.device) -> None:
        sent = max((route.sent for route in routes), default=0)
        received = max((route.received for route in routes), default=0)
        sets = range(min(SETS, len(routes)))
        self.sends = [torch.zeros(sent, dtype=dtype, device=device) for _ in sets]
        self.receives = [torch.zeros(received, dtype=dtype, device=device) for _ in sets]

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.sends, *self.receives))


class AllToAll:
    """An all-to-all of one micro-group over the TP ranks, in one set of the message buffers.

    `send` (route.sent,) and `receive` (route.received,) are views of that set's buffers; both are empty if
    there are no buffers.

    Args:
        index: the index of the micro-group; even and odd micro-groups use different buffers.
    """

    def __init__(self, route: Route, messages: Messages, index: int, wiring: "Wiring") -> None:
        self.route, self._wiring = route, wiring
        self._wait: Wait | None = None
        if not messages.sends:
            self.send = self.receive = torch.empty(0)
            return
        buffer_set = index % len(messages.sends)
        self.send = messages.sends[buffer_set][: route.sent]
        self.receive = messages.receives[buffer_set][: route.received]

    def start(self) -> None:
        """Starts sending the packed message, if anything is communicated."""
        route = self.route
        if route.travels:
            splits = list(route.receive_splits), list(route.send_splits)
            self._wait = self._wiring.start(torch.distributed.all_to_all_single, self.receive, self.send, *splits)

    def wait(self) -> None:
        """Waits until the message has arrived. On a GPU the current stream waits, not the host."""
        if self._wait is not None:
            self._wait()
            self._wait = None


MakeOptimizer = Callable[[Sequence[Matrix], list[torch.nn.Parameter]], torch.optim.Optimizer]
"""A function that creates the optimizer of some matrices from the matrices and their masters (whole matrices
or fragments)."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The objects that are shared by all classes that update matrices on one rank."""

    fragments: Fragments
    rank: int
    """The TP rank."""
    tp_group: torch.distributed.ProcessGroup | None
    """The group of TP ranks; None with one TP rank, where nothing is communicated."""
    timer: PhaseTimer
    watcher: Watcher
    side_stream: SideStream
    """The stream on which messages are packed and received weights are written."""
    device: torch.device
    masters: Mapping[int, torch.nn.Parameter]
    """The fp32 weights that this rank updates, by matrix index: whole matrices (rows, columns), and fragments
    of shared matrices."""
    make_optimizer: MakeOptimizer

    def as_single_rank(self) -> "Wiring":
        """Returns the wiring for matrices that this rank stores whole, which need no communication."""
        return replace(self, fragments=self.fragments.as_single_rank(), rank=0, tp_group=None)

    def start(self, collective: Callable[..., torch.distributed.Work | None], *arguments: object) -> Wait:
        """Starts a collective over the TP ranks, and records the time for which it is in flight.

        Returns:
            A function that waits for the collective. On a GPU the current stream waits, not the host.
        """
        begin = self.timer.now()
        work = collective(*arguments, group=self.tp_group, async_op=True)
        assert work is not None
        span = self.timer.span("exchange_total", begin)
        self.watcher.watch(span, work)

        def wait() -> None:
            work.wait()
            self.watcher.waited(span)

        return wait


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from one tensor to another of the same shape, with conversion of the dtype."""

    target: torch.Tensor
    source: torch.Tensor

    def run(self, scale: float = 1.0) -> None:
        """Writes `source` times `scale` into `target`."""
        if scale == 1.0:
            self.target.copy_(self.source)
        elif self.source.dtype is self.target.dtype:
            torch.mul(self.source, scale, out=self.target)
        else:
            # Scaled after the conversion, because scaling in bf16 would round a gradient twice.
            self.target.copy_(self.source)
            self.target.mul_(scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A write of a fragment's new values into a weight. It is skipped if the update was not finite."""

    target: torch.Tensor
    source: torch.Tensor
    rounded: torch.Tensor
    """Scratch of the shape and dtype of `target`, used if `source` has another dtype, because `torch.where`
    of two dtypes would compute in the wider dtype and allocate memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """The writes of evenly spaced fragments of one shape, joined into one. All tensors are (count,
    *shape)."""

    flags: slice
    """The indices of the fragments' flags."""
    target: torch.Tensor
    source: torch.Tensor
    rounded: torch.Tensor


def join_copies(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies of the same shape and types if both their sources and their targets are evenly spaced. The
    tensors of a joined copy are (count, *shape)."""
    merged: list[Copy] = []
    for same_kind in group_by_key(copies, lambda copy: (copy.target.shape, copy.target.dtype, copy.source.dtype)):
        targets, sources = [copy.target for copy in same_kind], [copy.source for copy in same_kind]
        merged += [Copy(view_run(targets[run]), view_run(sources[run])) for run in runs(targets, sources)]
    return merged


def join_writes(writes: Sequence[tuple[int, Write]]) -> list[Writes]:
    """Joins writes whose fragments and flags are evenly spaced.

    Args:
        writes: pairs of the index of a flag and a write.
    """
    merged: list[Writes] = []
    for same_kind in group_by_key(
        writes, lambda write: (write[1].target.shape, write[1].target.dtype, write[1].source.dtype)
    ):
        places = [place for place, _ in same_kind]
        targets = [write.target for _, write in same_kind]
        sources = [write.source for _, write in same_kind]
        rounded = [write.rounded for _, write in same_kind]
        for run in runs(places, targets, sources, rounded):
            flags = places[run]
            step = flags[1] - flags[0] if len(flags) > 1 else 1
            merged.append(
                Writes(
                    flags=slice(flags[0], flags[-1] + 1, step),
                    target=view_run(targets[run]),
                    source=view_run(sources[run]),
                    rounded=view_run(rounded[run]),
                )
            )
    return merged


def group_by_key[T](items: Sequence[T], key: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """Returns lists of the items with equal keys, in the order of each key's first item."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


def write_finite(writes: Sequence[Writes], flags: torch.Tensor, *, on_host: bool) -> None:
    """Writes the fragments whose flag is finite; other targets stay unchanged.

    Args:
        flags: a number for each fragment: (count,).
        on_host: True if the flags are in host memory. Otherwise the device decides, and the host does not
            wait.
    """
    finite_flags = torch.isfinite(flags)
    if on_host:
        finite: list[bool] = finite_flags.tolist()
        for write in writes:
            if all(finite[write.flags]):
                write.target.copy_(write.source)
                continue
            for is_finite, target, source in zip(finite[write.flags], write.target, write.source, strict=True):
                if is_finite:
                    target.copy_(source)
        return
    for write in writes:
        source = write.source
        if source.dtype is not write.target.dtype:
            source = write.rounded.copy_(source)
        mask = finite_flags[write.flags].view(-1, *(1 for _ in source.shape[1:]))
        torch.where(mask, source, write.target, out=write.target)
