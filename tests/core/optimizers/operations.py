"""Counts of the operations that a step enqueues."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute: neither views nor questions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))
