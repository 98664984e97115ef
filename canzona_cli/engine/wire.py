"""The means that move matrices between ranks: views of fragments, messages, a stream for packing them, and
writes of weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from canzona_cli.config.schema import ModelConfig
from canzona_cli.megatron.timers import PhaseTimer, Watcher
from canzona_cli.model import geometry
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.exchange import Route


class Fragments:
    """The fragments of one tensor-parallel rank.

    Args:
        model: heads and groups of the attention, to find q, k and v in linear_qkv.
        tp: Tensor-parallel ranks.
        rank: this one.
        parameters: this rank's parameters by the plan's names, in Megatron's buffers.
    """

    def __init__(self, model: ModelConfig, tp: int, rank: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._model, self.tp, self._rank, self._parameters = model, tp, rank, parameters

    def gradient(self, matrix: Matrix) -> torch.Tensor:
        """Views this rank's part of the reduced gradient; valid on the matrix's owner."""
        main_grad: object = getattr(self._parameters[matrix.parameter], "main_grad", None)
        assert isinstance(main_grad, torch.Tensor)
        return self.in_parameter(matrix, main_grad)

    def weight(self, matrix: Matrix) -> torch.Tensor:
        """Views this rank's part of the weight."""
        return self.in_parameter(matrix, self._parameters[matrix.parameter].detach())

    def in_parameter(self, matrix: Matrix, parameter: torch.Tensor) -> torch.Tensor:
        """Views the fragment in `parameter`, which this rank stores; 2-D or 3-D,
        see `geometry.in_parameter`."""
        view = geometry.in_parameter(matrix, self._model, self.tp)
        return parameter.view(view.shape)[view.index]

    def in_whole(self, matrix: Matrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Views the place of TP rank `rank`'s fragment in the whole (rows, columns),
        in the shape of `in_parameter`."""
        view = geometry.in_whole(matrix, self._model, self.tp, rank)
        return whole.view(view.shape)[view.index]


class Aside:
    """A stream for work that overlaps what computes after it;
    on a device without streams the work is just done.

    Nothing needs `record_stream`: what is touched within `work` was allocated at set-up and stays; and a
    tensor that is made within it is used and freed within it.
    """

    def __init__(self, device: torch.device) -> None:
        # Urgent: a few short copies beside products that occupy the whole device, and somebody waits for the
        # messages.
        self._stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def work(self) -> Iterator[None]:
        """Enqueues aside, after all that the computing stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Lets what computes go on only after all that was enqueued aside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


SETS = 2
"""While group i is updated, gradients of i + 1 travel in and weights of i - 1 out:
of each direction two are in use."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """One direction's send and receive buffers, each flat and as long as the largest micro-group needs."""

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    last: list[torch.distributed.Work | None]
    """The last exchange of each set."""

    @classmethod
    def for_routes(cls, routes: Sequence[Route], dtype: torch.dtype, device: torch.device) -> "Messages":
        """Allocates messages large enough for every route; no memory where nothing is sent or received."""
        sent = max((route.sent for route in routes), default=0)
        received = max((route.received for route in routes), default=0)
        sets = min(SETS, len(routes))
        return cls(
            sends=tuple(torch.zeros(sent, dtype=dtype, device=device) for _ in range(sets)),
            receives=tuple(torch.zeros(received, dtype=dtype, device=device) for _ in range(sets)),
            last=[None] * sets,
        )

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.sends, *self.receives))


class AllToAll:
    """One all-to-all of one micro-group over the TP group, on its part of the message buffers.

    Args:
        number: the number of the micro-group; even and odd ones use different buffers.
    """

    def __init__(
        self, route: Route, messages: Messages, number: int, group: torch.distributed.ProcessGroup | None
    ) -> None:
        self.route, self._group = route, group
        self._work: torch.distributed.Work | None = None
        self._last, self._place = messages.last, number % max(1, len(messages.sends))
        if not messages.sends:
            self.send = self.receive = torch.empty(0)
            return
        self.send = messages.sends[self._place][: route.sent]
        self.receive = messages.receives[self._place][: route.received]

    def start(self) -> torch.distributed.Work | None:
        """Sends the packed messages; the handle to watch, None where nothing travels."""
        if self.route.travels:
            self._work = torch.distributed.all_to_all_single(
                self.receive,
                self.send,
                list(self.route.receive_splits),
                list(self.route.send_splits),
                group=self._group,
                async_op=True,
            )
            self._last[self._place] = self._work
        return self._work

    def wait(self) -> None:
        """Waits until everything has arrived (on a GPU: the current stream waits, the host does not)."""
        if self._work is not None:
            self._work.wait()
            self._work = None


MakeOptimizer = Callable[[Sequence[Matrix], list[torch.nn.Parameter]], torch.optim.Optimizer]
"""A function that makes an ordinary optimizer of these whole matrices."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The parts that everything that updates matrices on one rank shares."""

    fragments: Fragments
    rank: int
    """TP rank."""
    tp_group: torch.distributed.ProcessGroup | None
    """The group of TP ranks; None with one TP rank, where nothing travels."""
    timer: PhaseTimer
    watcher: Watcher
    aside: Aside
    """The stream on which messages are packed and arriving weights are written."""
    device: torch.device
    masters: Mapping[int, torch.nn.Parameter]
    """The fp32 weights by matrix index of what this rank updates, (rows, columns);
    of a shared matrix its fragment."""
    make_optimizer: MakeOptimizer


@dataclass(frozen=True, slots=True)
class Copy:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A new fragment of a weight, which is only taken if its update was finite."""

    target: torch.Tensor
    source: torch.Tensor
    rounded: torch.Tensor
    """Shape and dtype of `target`; scratch where `source` has another dtype: `torch.where` of two dtypes
    would work in the wider one, in memory of its own."""


def write_finite(writes: Sequence[tuple[int, Write]], flags: torch.Tensor, *, on_host: bool) -> None:
    """Write what is given with the place of a finite flag; other targets stay as they are.

    Args:
        flags: flat.
        on_host: True if they are the host's; else it does not wait to know them.
    """
    good = torch.isfinite(flags)
    if on_host:
        finite: list[bool] = good.tolist()
        for place, write in writes:
            if finite[place]:
                write.target.copy_(write.source)
        return
    each = good.unbind()
    for place, write in writes:
        source = write.source
        if source.dtype is not write.target.dtype:
            source = write.rounded.copy_(source)
        torch.where(each[place], source, write.target, out=write.target)
