"""The base class of the matrix optimizers, the precision of their matmuls, and their scratch memory."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch.optim.optimizer import ParamsT

OnFallback = Callable[[torch.Tensor, str], None]
"""A callback that receives the parameter and a text that names the failure and the fallback."""
MatmulPrecision = Literal["fp32", "tf32"]
"""The precision of fp32 matmuls: full fp32, or TF32 where a GPU has it (10 bits of mantissa, much faster)."""


class MatrixOptimizer(torch.optim.Optimizer):
    """The base class of matrix optimizers: implements `step()`; a subclass implements the update of one
    matrix.

    Every parameter is a whole matrix: 2-D, contiguous, fp32. Its gradient is fp32 with any strides, and is
    not changed. Parameters without a gradient are skipped. `lr` and `weight_decay` are read from the
    parameter groups at every step. The state of a matrix, `self.state[p]`, is created at its first step and
    consists of tensors and ints. Deleting it restarts the optimizer for that matrix.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, float]) -> None:
        """Args:
            params: Matrices, or parameter groups of matrices.
            defaults: Defaults of the settings that a parameter group may override; at least `lr` and
                `weight_decay`.

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
        """Updates every matrix that has a gradient.

        Raises:
            ValueError: A closure was passed; none of the algorithms re-evaluates the loss.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure")
        for group in self.param_groups:
            self._update_group([p for p in group["params"] if p.grad is not None], group)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None] | None:
        """Returns the shapes of the fp32 tensors in the state of matrix `p` (rows, cols) after its first
        step, by key. A shape of None stands for a step counter. Returns None, as here, if the class does not
        declare its state; the state in a checkpoint can then not be checked."""
        return None

    def convert_state(self, p: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns the state of matrix `p` in the format of this version of the class, given the state from a
        checkpoint of any version. Here there is nothing to convert."""
        return state

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        for p in matrices:
            self._update(p, self._gradient(p), group)

    @abstractmethod
    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        """Updates one matrix `p` (rows, cols) in place from its gradient (rows, cols)."""

    @staticmethod
    def _gradient(p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad

    def _matrices(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]


@contextmanager
def matmul_precision(precision: MatmulPrecision) -> Iterator[None]:
    """Sets the precision of fp32 matmuls inside the block, overriding the process-wide setting: `precision`
    on GPUs, always full fp32 on CPUs. On GPUs, bf16 and fp16 matmuls accumulate in fp32."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, cpu.fp32_precision
    reductions = cuda.allow_bf16_reduced_precision_reduction, cuda.allow_fp16_reduced_precision_reduction
    cuda.fp32_precision, cpu.fp32_precision = ("tf32" if precision == "tf32" else "ieee"), "ieee"
    # Otherwise cuBLAS may split a long sum (25,600 terms of a Gram matrix) and add the partial sums in bf16
    # or fp16.
    cuda.allow_bf16_reduced_precision_reduction = cuda.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before
        cuda.allow_bf16_reduced_precision_reduction, cuda.allow_fp16_reduced_precision_reduction = reductions


class Workspace:
    """Scratch memory: one flat buffer for each role, element size and device, as large as the largest request
    so far.

    Matrices of all shapes get views of the same memory, so scratch stays in cache from one matrix to the
    next. Types of the same width, such as bf16 and fp16, share a buffer. A workspace can be shared by
    optimizers that step one after another, but not by threads or CUDA streams, which would overwrite each
    other's data.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def get(self, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a contiguous tensor with arbitrary contents, valid until the next request for the same
        role."""
        size = math.prod(shape)
        key = (role, dtype.itemsize, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(dtype).view(*shape)

    def like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous tensor, as from `get`, of the shape, dtype and device of `tensor`."""
        return self.get(role, tensor.shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """The size of all buffers in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
