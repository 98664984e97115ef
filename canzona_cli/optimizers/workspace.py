"""Scratch memory that optimizers share: allocated at the first step, reused by every later one."""

import math
from collections.abc import Sequence

import torch


class Workspace:
    """One flat buffer per role, bytes of an element and device, as large as the largest request so far.

    A matrix of any shape gets a view of the same memory, so that scratch stays in cache from one matrix to the next;
    so do types of one width, as bf16 and fp16.
    Share one between optimizers that step one after another. Not between threads, nor between CUDA streams: two users
    at a time would overwrite each other.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def get(self, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a contiguous tensor with arbitrary contents; valid until `role` is asked for again."""
        size = math.prod(shape)
        key = (role, dtype.itemsize, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(dtype).view(*shape)

    def like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """`get` with a tensor's shape, dtype and device; contiguous whatever its strides."""
        return self.get(role, tensor.shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
