"""CUDA graphs on a CPU: what is captured has no effect until it is replayed, with the numbers it was captured with.

As on CUDA: kernels are recorded with their memory, and with what the host gave them; a replay runs them on whatever is
in that memory then. Reading a value back while something is captured is refused, and spoils the capture.

Lifetimes are those of the torch it stands for. Private pools count their users. Until 2.14 cuBLAS has a workspace for
each stream, made by the first product on it, in the pool of whatever is captured there at the time; a graph knows it by
its address. Dropping a graph leaves it (2.11) or frees it for all graphs of that stream (2.12 to 2.14); from 2.15 on
a workspace lives as long as its product. What uses a workspace on another stream than the last user must have waited
for it. A capture that fails leaves 2.11's host allocator with a pointer to the graph, which every later pinned tensor
follows. Streams are handed out in turns, 32 of them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch
from weakref import finalize, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Version = Literal["2.11", "2.12", "2.15"]
"""The first torch that behaves so."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


@dataclass
class Workspace:
    """Memory of cuBLAS."""

    pool: int | None
    """None: that of everybody."""
    freed: bool = False
    used: tuple[int, int] | None = None
    """The stream that used it last, and the number of the launch there."""


@dataclass
class Pool:
    """Memory of graphs."""

    users: int = 0
    workspaces: list[Workspace] = field(default_factory=list)


@dataclass
class Captured:
    """A graph's content, for tests to look at after the graph is gone."""

    stream: int
    pool: int
    kernels: list[Callable[[], None]] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)
    before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)
    """Memory that a captured kernel would write, as it was."""
    spoilt: bool = False
    replays: int = 0


@dataclass
class Device:
    """The state of a process's CUDA."""

    version: Version
    made: list[Captured] = field(default_factory=list)
    """All captures that were begun."""
    current: int = 0
    """The current stream; 0 is the default one."""
    streams: int = 0
    """The number of streams handed out."""
    pools: dict[int, Pool] = field(default_factory=dict)
    handles: int = 0
    allocating: set[int] = field(default_factory=set)
    """Pools that the allocator believes are being captured into."""
    workspaces: dict[tuple[int, int], Workspace] = field(default_factory=dict)
    """The workspaces, by cuBLAS handle (one per thread) and stream."""
    launches: dict[int, int] = field(default_factory=dict)
    """The number of products and replays on each stream."""
    awaited: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of launches of another stream when a stream waited for it, by (waiting, awaited) stream."""
    asked: dict[int, "ref[StandInGraph]"] = field(default_factory=dict)
    """The graph, by pool, that the host allocator asks whether pinned memory is allocated during its capture."""
    capturing: Captured | None = None
    emptied: int = 0
    """The number of times the allocator returned its cached memory."""
    waits: int = 0
    """The number of times the host waited for the device."""

    def product(self) -> None:
        """Does what every product does with cuBLAS's workspace."""
        capture = self.capturing
        if self.version == "2.15":
            return
        key = threading.get_ident(), self.current
        if key not in self.workspaces:
            self.workspaces[key] = Workspace(None if capture is None else capture.pool)
            if capture is not None:
                self.pools[capture.pool].workspaces.append(self.workspaces[key])
        if capture is not None:
            capture.workspaces.append(self.workspaces[key])
        else:
            self.launch([self.workspaces[key]])

    def launch(self, workspaces: list[Workspace]) -> None:
        """Runs on the current stream what uses these workspaces."""
        number = self.launches[self.current] = self.launches.get(self.current, 0) + 1
        for workspace in workspaces:
            stream, before = workspace.used or (self.current, 0)
            waited = stream == self.current or self.awaited.get((self.current, stream), 0) >= before
            assert waited, "two streams use one workspace at the same time"
            workspace.used = self.current, number

    def pin(self) -> None:
        """Does what allocating pinned memory does with the captures that are under way."""
        assert all(graph() is not None for graph in self.asked.values()), "a graph that is gone is asked"

    def empty(self) -> None:
        self.emptied += 1
        assert not self.allocating, "captures_underway.empty() INTERNAL ASSERT FAILED"
        for number, pool in list(self.pools.items()):
            if not pool.users and all(workspace.freed for workspace in pool.workspaces):
                del self.pools[number]

    def wait(self, *_: object) -> None:
        self.waits += 1

    def end_allocating(self, pool: int) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def dropped(self, graph: Captured) -> None:
        if self.version == "2.12":
            for key in [key for key in self.workspaces if key[1] == graph.stream]:
                self.workspaces.pop(key).freed = True
        self.pools[graph.pool].users -= 1


class StandInStream:
    """`torch.cuda.Stream`, one of 32."""

    device = torch.device("cpu")

    def __init__(self, number: int | None = None) -> None:
        if number is None:
            number = 1 + _device().streams % 32
            _device().streams += 1
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandInStream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, stream: "StandInStream") -> None:
        device = _device()
        assert device.capturing is None
        device.awaited[self.number, stream.number] = device.launches.get(stream.number, 0)


class StandInGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._captured: Captured | None = None

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        device = _device()
        assert capture_error_mode == "thread_local"
        if device.current == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if pool in device.pools and not device.pools[pool].users:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        device.pools.setdefault(pool, Pool()).users += 1
        device.allocating.add(pool)
        device.asked[pool] = ref(self)
        device.capturing = self._captured = Captured(stream=device.current, pool=pool)
        device.made.append(self._captured)

    def capture_end(self) -> None:
        device, captured = _device(), self._captured
        if captured is None or device.capturing is not captured:
            raise RuntimeError("CUDA error: the stream is not capturing")
        device.capturing = None
        for storage, before in captured.before.values():
            storage.copy_(before)
        if captured.spoilt and device.version == "2.11":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        device.end_allocating(captured.pool)
        del device.asked[captured.pool]
        if captured.spoilt:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        finalize(self, device.dropped, captured)

    def replay(self) -> None:
        assert self._captured is not None
        assert not any(workspace.freed for workspace in self._captured.workspaces), "CUDA error: illegal address"
        _device().launch(self._captured.workspaces)
        self._captured.replays += 1
        for kernel in self._captured.kernels:
            kernel()


class StandInCapture:
    """`torch.cuda.graph`, as it is until 2.14: without unwinding."""

    default_stream: StandInStream | None = None

    def __init__(self, graph: StandInGraph, pool: int, capture_error_mode: str = "global") -> None:
        self._graph, self._pool, self._mode = graph, pool, capture_error_mode
        StandInCapture.default_stream = StandInCapture.default_stream or StandInStream()

    def __enter__(self) -> None:
        device = _device()
        device.wait()
        device.empty()
        assert StandInCapture.default_stream is not None
        self._before, device.current = device.current, StandInCapture.default_stream.number
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        _device().current = self._before


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation; while something is captured, results have the right shapes, but memory that was there before is
    put back at the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, _device()
        if func._schema.name in PRODUCTS:
            device.product()
        if device.capturing is None:
            return func(*args, **kwargs)
        captured = device.capturing
        if captured.spoilt or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            captured.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        names = [argument.name for argument in func._schema.arguments]
        written = {argument.name for argument in func._schema.arguments if argument.is_write}
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name in written:
                for tensor in tree_leaves(value):
                    storage = tensor.untyped_storage()
                    captured.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)

        def kernel() -> None:
            for there, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != new.data_ptr():
                    there.copy_(new)

        captured.kernels.append(kernel)
        return result


_devices: list[Device] = []


def _device() -> Device:
    return _devices[-1]


def _new_pool() -> int:
    _device().handles += 1
    return _device().handles


class StandInStreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: StandInStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, _device().current = _device().current, self._stream.number

    def __exit__(self, *error: object) -> None:
        _device().current = self._before


@contextmanager
def cuda_graphs(version: Version = "2.11") -> Iterator[Device]:
    """Lets torch capture graphs of work on the CPU while the context lasts."""
    device = Device(version)
    _devices.append(device)
    StandInCapture.default_stream = None
    cuda: dict[str, object] = {
        "CUDAGraph": StandInGraph,
        "Stream": StandInStream,
        "graph": StandInCapture,
        "stream": StandInStreamContext,
        "current_stream": lambda: StandInStream(device.current),
        "current_device": lambda: 0,
        "graph_pool_handle": _new_pool,
        "empty_cache": device.empty,
        "synchronize": device.wait,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        ended = patch.object(torch._C, "_cuda_endAllocateToPool", lambda _, pool: device.end_allocating(pool))
        stack.enter_context(ended)
        stack.enter_context(_Kernels())  # type: ignore[no-untyped-call]
        try:
            yield device
        finally:
            _devices.pop()
