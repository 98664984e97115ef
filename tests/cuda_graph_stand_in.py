"""CUDA graphs on a CPU: what is captured has no effect until it is replayed, with the numbers it was captured with.

As on CUDA: kernels are recorded with their memory, and with what the host gave them; a replay runs them on whatever is
in that memory then. Reading a value back while something is captured is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StandInGraph:
    """`torch.cuda.CUDAGraph`."""

    made: list["StandInGraph"]

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []
        self.replays = 0
        StandInGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        for kernel in self.kernels:
            kernel()


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`torch.cuda.graph`: results have the right shapes, but memory that was there before is put back at the end."""

    def __init__(self, graph: StandInGraph, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        names = [argument.name for argument in func._schema.arguments]
        written = {argument.name for argument in func._schema.arguments if argument.is_write}
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name in written:
                for tensor in tree_leaves(value):
                    storage = tensor.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)

        def kernel() -> None:
            for there, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != new.data_ptr():
                    there.copy_(new)

        self._graph.kernels.append(kernel)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for storage, before in self._before.values():
            storage.copy_(before)


@contextmanager
def cuda_graphs() -> Iterator[list[StandInGraph]]:
    """Inside, torch captures graphs of what runs on the CPU; those that were begun."""
    StandInGraph.made = []
    with (
        patch.object(torch.cuda, "CUDAGraph", StandInGraph),
        patch.object(torch.cuda, "graph", _Capture),
        patch.object(torch.cuda, "graph_pool_handle", lambda: "pool"),
    ):
        yield StandInGraph.made
