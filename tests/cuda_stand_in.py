"""A CUDA device that is not there: what only runs beside CUDA runs here on the CPU, and leaves a record of its order.

Streams, events, pinned memory and host waits get CPU meanings: every operation is done at once, in the host's order.
The record keeps what a real device would have been bound to: an operation comes after those before it on its stream,
after what its stream was told to wait for, and after what the host had waited for; a collective runs on its
communicator's own stream behind the stream that launched it, and `Work.wait` holds up the current stream alone. Else
a device may do two operations at the same time: `Record.races` are those that share memory which one of them writes.

Vector clocks, as in L. Lamport, "Time, clocks, and the ordering of events in a distributed system", CACM 21 (1978).
"""

import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._C._distributed_c10d import Backend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.collectives import COLLECTIVES, POINT_TO_POINT, READS, device_in, on_the_host, to_host

DEVICE = torch.device("cuda", 0)
COMPUTE = "compute"
_ONLY_READ = {"c10d::_allgather_base_": 1}
"""Collectives, and the position of the tensor that each sends and leaves unchanged."""
_READS_NOTHING = {
    f"aten::{name}" for name in ("empty_like", "new_empty", "new_empty_strided", "new_zeros", "zeros_like")
}
"""Operations that take a tensor's shape or kind and not its numbers."""
Clock = dict[str, int]
"""The number, by stream, of the last operation that is known to be over."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Memory that an operation reads or writes."""

    number: int
    what: str
    writes: bool
    place: tuple[int, tuple[int, ...], tuple[int, ...], int]
    """Bytes into the storage, sizes, strides in elements, bytes of an element."""

    def meets(self, other: "Access") -> bool:
        """Returns whether both touch a common byte of the same storage."""
        (first, last, dense), (others_first, others_last, others_dense) = self.reach, other.reach
        if last < others_first or others_last < first:
            return False
        if dense and others_dense:
            return True
        touched = np.zeros(max(last, others_last) + 1, dtype=bool)
        touched[self.bytes()] = True
        return bool(touched[other.bytes()].any())

    @cached_property
    def reach(self) -> tuple[int, int, bool]:
        """First and last byte, and whether all between them are touched."""
        start, sizes, strides, width = self.place
        elements = 1
        dense = True
        for stride, size in sorted(zip(strides, sizes, strict=True)):
            dense &= size == 1 or stride == elements
            elements *= size
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return start, start + (last + 1) * width - 1, dense

    def bytes(self) -> np.ndarray:
        start, sizes, strides, width = self.place
        offsets = np.zeros(1, dtype=np.int64)
        for size, stride in zip(sizes, strides, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        return (start + (offsets * width)[:, None] + np.arange(width)).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation, numbered in the host's order."""

    stream: str
    number: int
    name: str
    storages: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A stream was told to wait for a collective."""

    stream: str
    collective: Operation
    position: int
    """The number of operations that had been enqueued."""


@dataclass
class Record:
    """The events on this rank."""

    operations: list[Operation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Operations that used memory allocated by another stream during the record, which would need `record_stream`."""
    host_waits: list[str] = field(default_factory=list)
    """The host waited: for an event that had not passed yet, or for the whole device."""
    host_reads: list[str] = field(default_factory=list)
    """The host read a tensor, other than through a copy that it had waited for."""
    made_bytes: list[int] = field(default_factory=list)
    """The size of each tensor that was made on the device."""
    pinned: int = 0
    """Tensors that were asked for in pinned memory."""

    def landing(self) -> int:
        """Returns the number of pinned tensors that a stream may still be writing to."""
        return sum(map(_active().landing, _active().pinned))

    def forget(self) -> None:
        """Begin anew; what has been allocated so far was before anything ran."""
        device = _active()
        for found in vars(self).values():
            if isinstance(found, list):
                found.clear()
        device.made_on.clear()


class _Device:
    """The one device of this process while the stand-in is in place."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done: dict[str, Clock] = defaultdict(dict)
        """The operations that precede the next one, by stream and for "host"."""
        self.count: dict[str, int] = defaultdict(int)
        self.current: list[str] = [COMPUTE]
        self.accesses: dict[int, dict[str, list[Access]]] = defaultdict(lambda: defaultdict(list))
        self.made_on: dict[int, str] = {}
        self.known: dict[int, StorageWeakRef] = {}
        """The storage, by address, that the other entries describe. torch allocates some memory unseen, as for a number
        that is filled in, and that memory may lie where other memory lay before."""
        self.on_host: set[int] = set()
        self.pinned: set[int] = set()
        self.works: dict[int, tuple[object, Operation]] = {}
        self.travelling: set[int] = set()
        """The works among these that gloo has not been waited for yet."""
        self.together: list[torch.distributed.Work] | None = None
        """Works that are being coalesced."""
        self.launched: Operation | None = None

    def enqueue(self, name: str, stream: str, touched: Sequence[tuple[torch.Tensor, bool]]) -> Operation:
        """An operation on `stream`; `touched`: tensors, and whether they are written."""
        before = self.done[stream]
        _merge(before, self.done["host"])
        self.count[stream] += 1
        number = self.count[stream]
        storages = set()
        for tensor, writes in touched:
            storage = tensor.untyped_storage().data_ptr()
            if not storage or not tensor.numel():
                continue
            self._know(storage, tensor)
            storages.add(storage)
            start = int(tensor.storage_offset()) * tensor.itemsize
            place = (start, tuple(tensor.shape), tensor.stride(), tensor.itemsize)
            access = Access(number=number, what=f"{name} on {stream}", writes=writes, place=place)
            self._compare(storage, stream, access, before)
            self.accesses[storage][stream].append(access)
            maker = self.made_on.get(storage, stream)
            if maker != stream and not stream.startswith("nccl"):
                self.record.foreign.append(f"{access.what} uses memory of {maker}")
        before[stream] = number
        found = Operation(stream=stream, number=number, name=name, storages=frozenset(storages))
        self.record.operations.append(found)
        return found

    def _compare(self, storage: int, stream: str, access: Access, before: Clock) -> None:
        for other, earlier in self.accesses[storage].items():
            if other == stream:
                continue
            unordered = earlier[bisect_right(earlier, before.get(other, 0), key=lambda found: found.number) :]
            for found in unordered:
                if (found.writes or access.writes) and found.meets(access):
                    self.record.races.append(f"{found.what} | {access.what}")

    def _know(self, storage: int, tensor: torch.Tensor) -> None:
        """Memory in use: if what was here has been freed, this is new."""
        known = self.known.get(storage)
        if known is None or known.expired():  # type: ignore[no-untyped-call]
            self._new(storage, tensor)

    def _new(self, storage: int, tensor: torch.Tensor) -> None:
        """A device's allocator gives what a stream has freed to nobody else."""
        if storage in self.known:
            self.accesses.pop(storage, None)
            self.made_on.pop(storage, None)
            self.on_host.discard(storage)
            self.pinned.discard(storage)
        self.known[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def made(self, tensor: torch.Tensor) -> None:
        """Memory that the current stream has allocated."""
        storage = tensor.untyped_storage().data_ptr()
        self._new(storage, tensor)
        self.made_on[storage] = self.current[-1]
        self.record.made_bytes.append(tensor.nbytes)

    def read(self, storage: int, what: str) -> None:
        """The host reads memory."""
        if storage not in self.on_host | self.pinned:
            self.record.host_reads.append(what)

    def set_number(self, storage: int, what: str) -> None:
        """The host sets a number into memory: below torch 2.14 a copy that it waits for."""
        if storage not in self.on_host | self.pinned:
            self.record.host_waits.append(what)

    def landing(self, storage: int) -> bool:
        """Returns whether some write to this memory has not been waited for by the host."""
        writes = ((stream, found) for stream, each in self.accesses[storage].items() for found in each)
        return any(found.writes and found.number > self.done["host"].get(stream, 0) for stream, found in writes)

    def finish(self, work: torch.distributed.Work) -> None:
        """gloo's threads finish it now; later waits only order streams. (A reduce-scatter copies in each wait.)"""
        if id(work) in self.travelling:
            self.travelling.remove(id(work))
            with _disable_current_modes():
                _wait_for_real(work)

    def host_waits(self, clock: Clock, why: str) -> None:
        if not _covers(self.done["host"], clock):
            self.record.host_waits.append(f"{why} at {_caller()}")
            _merge(self.done["host"], clock)


class StandInEvent:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._timed, self._clock, self._time_s = enable_timing, dict[str, int](), 0.0

    def record(self, stream: "StandInStream | None" = None) -> None:
        name = _active().current[-1] if stream is None else stream.name
        self._clock, self._time_s = dict(_active().done[name]), time.perf_counter()

    def query(self) -> bool:
        return _covers(_active().done["host"], self._clock)

    def synchronize(self) -> None:
        _active().host_waits(self._clock, "event")

    def wait(self, stream: "StandInStream | None" = None) -> None:
        _merge(_active().done[_active().current[-1] if stream is None else stream.name], self._clock)

    def elapsed_time(self, other: "StandInEvent") -> float:
        assert self._timed
        assert other._timed
        assert self.query(), "CUDA raises: the first event has not passed"
        assert other.query(), "CUDA raises: the second event has not passed"
        return (other._time_s - self._time_s) * 1e3


class StandInStream:
    """`torch.cuda.Stream`."""

    made = 0

    def __init__(self, name: str | None = None, *, priority: int = 0, **_: object) -> None:
        if name is None:
            StandInStream.made += 1
        self.name = name or f"stream {StandInStream.made}"
        self.priority = priority

    def wait_stream(self, stream: "StandInStream") -> None:
        _merge(_active().done[self.name], _active().done[stream.name])

    def wait_event(self, event: StandInEvent) -> None:
        event.wait(self)

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        event = event or StandInEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _active().host_waits(dict(_active().done[self.name]), "stream")


_devices: list[_Device] = []
_wait_for_real = torch.distributed.Work.wait


def _active() -> _Device:
    return _devices[-1]


def _merge(clock: Clock, other: Mapping[str, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= number for stream, number in other.items())


def _caller() -> str:
    """The nearest line of ours or Megatron's; empty where host tensors are read: counters of torch's optimizers, and
    the host's random state."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if on_the_host(frame):
            return ""
        if "canzona_cli" in path.parts or "megatron" in path.parts:
            return f"{path.parent.name}/{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class _Functions(TorchFunctionMode):
    """Names of a device that is not there become the CPU's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        pinned = bool(kwargs.pop("pin_memory", None))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        name = getattr(func, "__name__", "")
        if name == "to":
            reads, copies = to_host(args[1:], kwargs), device_in(args[1:], kwargs) == "cpu"
            args = (args[0], *("cpu" if _is_cuda(arg) else arg for arg in args[1:]))
            if copies and not reads:
                # A copy, as from a device; there once the host has waited for what comes behind it on this stream.
                copy = args[0].clone()
                _active().on_host.add(copy.untyped_storage().data_ptr())
                return copy
            if reads:
                self._read(name, args[0])
        elif name in READS and isinstance(args[0], torch.Tensor):
            self._read(name, args[0])
        elif name == "__setitem__" and isinstance(args[2], int | float) and not _is_mask(args[1]) and _caller():
            _active().set_number(args[0].untyped_storage().data_ptr(), f"number set at {_caller()}")
        result = func(*args, **kwargs)
        if pinned:
            _active().record.pinned += 1
            _active().pinned |= {found.untyped_storage().data_ptr() for found in tensors_in(result)}
        return result

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        if place := _caller():
            _active().read(tensor.untyped_storage().data_ptr(), f"{name} at {place}")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation, on the stream that is current."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        device = _active()
        result = func(*args, **kwargs)
        given = [
            (tensor, bool(argument.alias_info and argument.alias_info.is_write))
            for argument, value in zip(
                func._schema.arguments, [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])],
                strict=False,
            )
            for tensor in tensors_in(value)
        ]  # fmt: skip
        if func._schema.name in _READS_NOTHING:
            given = []
        if func.namespace == "c10d":
            device.launched = self._collective(func, args, given)
            return result
        inputs = {tensor.untyped_storage().data_ptr() for tensor, _ in given}
        fresh = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in inputs]
        for tensor in fresh:
            device.made(tensor)
        if fresh or any(writes for _, writes in given):
            device.enqueue(func._schema.name, device.current[-1], [*given, *((tensor, True) for tensor in fresh)])
        return result

    def _collective(self, func: Any, args: tuple[Any, ...], given: list[tuple[torch.Tensor, bool]]) -> Operation:
        device = _active()
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        stream = f"nccl {torch._C._distributed_c10d.ProcessGroup.unbox(groups[0]).group_name}"
        _merge(device.done[stream], device.done[device.current[-1]])
        # Not every schema says what it writes.
        read = _ONLY_READ.get(func._schema.name)
        written = [(tensor, place != read) for place, (tensor, _) in enumerate(given)]
        return device.enqueue(func._schema.name, stream, written)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _is_mask(index: object) -> bool:
    """Returns whether a number set at this index is filled in by the device."""
    return any(tensor.dtype is torch.bool for tensor in tensors_in(index))


def _is_cuda(device: object) -> bool:
    return device_in((device,), {}) == "cuda"


@contextmanager
def _stream(stream: StandInStream | None) -> Iterator[None]:
    current = _active().current
    current.append(current[-1] if stream is None else stream.name)
    try:
        yield
    finally:
        current.pop()


def _unseen(original: Callable[..., object]) -> Callable[..., object]:
    def unseen(*args: object) -> object:
        with _disable_current_modes():
            return original(*args)

    return unseen


def _synchronize(device: object = None) -> None:
    everything: Clock = {}
    for stream, number in _active().count.items():
        everything[stream] = number
    _active().host_waits(everything, "device")


def _launching(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: object, **kwargs: object) -> object:
        device = _active()
        device.launched = None
        work: Any = original(*args, **kwargs)
        launched = _active().launched
        if work is not None and launched is not None:
            # The object is kept, so that its number is nobody else's.
            device.works[id(work)] = (work, launched)
            device.travelling.add(id(work))
            if device.together is not None:
                device.together.append(work)
            elif name not in POINT_TO_POINT:
                device.finish(work)
        return work

    return launch


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: torch.distributed.Work, *args: object, **kwargs: object) -> object:
        device, found = _active(), _active().works.get(id(work))
        if found is not None:
            operation = found[1]
            device.finish(work)
            stream = device.current[-1]
            device.record.waits.append(
                Wait(stream=stream, collective=operation, position=len(device.record.operations))
            )
            _merge(device.done[stream], {operation.stream: operation.number})
            return True
        return original(work, *args, **kwargs)

    return wait


def _start_coalescing(group: object, device: object) -> None:
    assert _active().together is None
    _active().together = []


def _end_coalescing(group: object, device: object) -> object:
    """The last one: a communicator's collectives run one after another."""
    device = _active()
    assert device.together
    for work in device.together:
        device.finish(work)
    last, device.together = device.together[-1], None
    return last


@contextmanager
def cuda_stand_in() -> Iterator[Record]:
    """CUDA's branches run within; `DEVICE` is their device. What was built before belongs to the host."""
    record = Record()
    group, work = torch.distributed.ProcessGroup, torch.distributed.Work
    _devices.append(_Device(record))
    cuda: dict[str, object] = {
        "Event": StandInEvent,
        "Stream": StandInStream,
        "stream": _stream,
        "current_stream": lambda device=None: StandInStream(_active().current[-1]),
        "synchronize": _synchronize,
        "max_memory_allocated": lambda device=None: 1,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(group, name, _launching(name, getattr(group, name))))
        stack.enter_context(patch.object(Backend, "supports_coalescing", True))
        stack.enter_context(patch.object(group, "_start_coalescing", _start_coalescing))
        stack.enter_context(patch.object(group, "_end_coalescing", _end_coalescing))
        stack.enter_context(patch.object(work, "wait", _waiting(work.wait)))
        # A subclass of Tensor that is made where every operation is looked at would already be a plain Tensor.
        stack.enter_context(patch("torch.nn.attention.bias.causal_lower_right", _unseen(causal_lower_right)))
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())  # type: ignore[no-untyped-call]
        try:
            yield record
        finally:
            _devices.pop()
