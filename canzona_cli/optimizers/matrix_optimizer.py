"""The base of Muon, Shampoo and SOAP: the walk over matrices, and products of a known precision."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch.optim.optimizer import ParamsT

OnFallback = Callable[[torch.Tensor, str], None]
"""Called with the matrix, and a text on what failed and what was used instead."""
ProductPrecision = Literal["fp32", "tf32"]
"""The way that fp32 products run: exactly, or on TF32 units where a GPU has them (10 bits of mantissa, much faster)."""


class MatrixOptimizer(torch.optim.Optimizer):
    """Owns `step()`; a subclass updates one matrix.

    Every parameter is a whole matrix: 2-D, contiguous, fp32. Its gradient is fp32, of any strides, and only
    read. A parameter without a gradient is skipped. `lr` and `weight_decay` are read from the parameter
    groups at every step. A matrix's state is made at its first step: tensors and plain ints in
    `self.state[p]`. Deleting it starts that matrix afresh.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, float]) -> None:
        """Args:
            params: Matrices, or parameter groups of them.
            defaults: Settings that a parameter group may set for itself.

        Raises:
            ValueError: A parameter is not a contiguous 2-D fp32 tensor, or a setting is out of range.
        """
        for key in ("lr", "weight_decay"):
            if defaults[key] < 0:
                raise ValueError(f"{key} is {defaults[key]}; it cannot be negative")
        super().__init__(params, dict(defaults))
        for p in self._matrices():
            if p.ndim != 2 or p.dtype != torch.float32 or not p.is_contiguous():
                raise ValueError(
                    f"{type(self).__name__} updates contiguous 2-D float32 matrices; one parameter is a "
                    f"{'' if p.is_contiguous() else 'strided '}{tuple(p.shape)} of {p.dtype}"
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient.

        Raises:
            ValueError: A closure was given; none of the algorithms evaluates the loss again.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure")
        for group in self.param_groups:
            self._update_group([p for p in group["params"] if p.grad is not None], group)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None] | None:
        """Describes the state of matrix `p` (rows, cols) from its first step on: shapes of fp32 tensors by
        name, None for a count of steps. None for all of it where a class does not say: a checkpoint may then
        hold anything."""
        return None

    def converted(self, p: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Converts the stored state of matrix `p`, of any version of the class, to what this version has."""
        return state

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        for p in matrices:
            self._update(p, self._gradient(p), group)

    @abstractmethod
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        """Update one matrix `p` (rows, cols) from its gradient (rows, cols)."""

    @staticmethod
    def _gradient(p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad

    def _matrices(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]


@contextmanager
def products(precision: ProductPrecision) -> Iterator[None]:
    """Run fp32 products with `precision`, whatever the process has set; on CPU always exactly. Products of
    bf16 and fp16 add up in fp32."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, cpu.fp32_precision
    parts = cuda.allow_bf16_reduced_precision_reduction, cuda.allow_fp16_reduced_precision_reduction
    cuda.fp32_precision, cpu.fp32_precision = ("tf32" if precision == "tf32" else "ieee"), "ieee"
    # Else cuBLAS may cut a long sum (25,600 terms of a Gram matrix) in parts, and add those up in their type.
    cuda.allow_bf16_reduced_precision_reduction = cuda.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before
        cuda.allow_bf16_reduced_precision_reduction, cuda.allow_fp16_reduced_precision_reduction = parts


class Workspace:
    """One flat buffer per role, bytes of an element and device, as large as the largest request so far.

    A matrix of any shape gets a view of the same memory, so that scratch stays in cache from one matrix to
    the next; so do types of one width, as bf16 and fp16. Share one between optimizers that step one after
    another. Not between threads, nor between CUDA streams: two users at a time would overwrite each other.
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
