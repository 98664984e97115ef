"""The base class of the matrix optimizers, and what they share: the precision of matmuls, scratch memory, views of
evenly spaced matrices, and norms."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

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


# Runs of tensors of one shape that are evenly spaced in memory, so that one view covers all of them.
#
# The weights of a layer's experts are such a run, and so are their gradients in Megatron's buffer. Gate and up
# alternate there, so a view of all gates skips the ups between them.


def runs(*columns: Sequence[torch.Tensor | int]) -> Iterator[slice]:
    """Yields the range of indices of each run, in order. Within a run the tensors, or numbers, of every
    column are evenly spaced; each run is as long as possible, at least one index.

    Args:
        columns: Lists of tensors or of numbers, all of the same length.
    """
    start = 0
    gaps: list[int | None] = []
    for index in range(1, len(columns[0])):
        new_gaps = [_gap(column[index - 1], column[index]) for column in columns]
        if None in new_gaps or (index - start > 1 and new_gaps != gaps):
            yield slice(start, index)
            start = index
        gaps = new_gaps
    if columns[0]:
        yield slice(start, len(columns[0]))


def view_run(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensors of a run as one view: (count, *shape)."""
    first = run[0]
    gap = run[1].storage_offset() - first.storage_offset() if len(run) > 1 else 0
    return first.as_strided((len(run), *first.shape), (gap, *first.stride()))


def _gap(item: torch.Tensor | int, following: torch.Tensor | int) -> int | None:
    """Returns the distance from one number, or tensor, to the following one; for tensors in elements. None if
    the two cannot be in the same run."""
    if isinstance(item, int) or isinstance(following, int):
        return int(following - item) if following > item else None
    gap = int(following.storage_offset() - item.storage_offset())
    is_run = (
        gap > 0
        and item.shape == following.shape
        and item.stride() == following.stride()
        and item.dtype is following.dtype
        and item.untyped_storage()._cdata == following.untyped_storage()._cdata
    )
    return gap if is_run else None


@dataclass(frozen=True, slots=True)
class Run:
    """Matrices of one shape that an optimizer updates with the same operations: a single matrix, or several
    that are evenly spaced and whose gradients are too."""

    matrices: Sequence[torch.Tensor]
    """The parameters, which are the keys of the optimizer's state."""
    weights: torch.Tensor
    """The weights: (rows, cols) for one matrix, (count, rows, cols) for several."""
    gradients: torch.Tensor
    """The gradients, in the shape of `weights`."""

    @classmethod
    def from_matrix(cls, p: torch.Tensor) -> Self:
        """Returns a run that consists of a single matrix or fragment, which has a gradient."""
        assert p.grad is not None
        return cls([p], p, p.grad)

    @classmethod
    def from_matrices(cls, matrices: Sequence[torch.Tensor]) -> Iterator[Self]:
        """Yields the runs of `matrices`, which all have the same shape and a gradient."""
        gradients = [p.grad for p in matrices if p.grad is not None]
        for part in runs(matrices, gradients):
            members = matrices[part]
            if len(members) == 1:
                yield cls.from_matrix(members[0])
            else:
                yield cls(members, view_run(members), view_run(gradients[part]))


# Norms and sums of squares of tensors of any length, as precise on CPUs as on GPUs.
#
# On a CPU, torch's norm of a whole tensor adds all squares in fp32, one after another in each lane of a vector
# register: at 1e8 elements the result is 1% too small. On CUDA, torch adds partial sums in a tree. Therefore, on a
# CPU, the functions here take the norms of short pieces, and add the squares of these norms in fp64. That takes as
# long as torch's norm, and copies nothing.
#
# Within a piece, squares are fp32. A piece whose norm exceeds 1.8e19 therefore makes the result infinite, as it does
# on CUDA and in Megatron's own functions.

PIECE = 1024
"""The number of elements whose squares are added in fp32. The worst case are equal elements, because all sums round
in the same direction: with pieces of 1,024 elements, the largest error of a norm that was measured is 4e-7; with
4,096 it is 2e-6, and with 16,384 1e-5."""


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums the squares of all elements of all tensors, without waiting for a GPU.

    Args:
        tensors: at least one, all on one device, fp32 or narrower, with any shapes and strides.

    Returns:
        The sum, () in fp32, on that device. It is NaN or infinite if an element is, and infinite if it exceeds fp32.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(list(torch._foreach_norm(list(tensors), 2, torch.float32))).square().sum()
    norms = torch.cat([norms for tensor in tensors for norms in _norms_of_pieces(tensor)])
    return norms.double().square_().sum().float()


def matrix_norm(matrices: torch.Tensor) -> torch.Tensor:
    """Computes the Frobenius norms of matrices (..., rows, cols), as (...) in fp32, without waiting for a GPU."""
    if matrices.device.type != "cpu":
        norms: torch.Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float32)
        return norms
    # Rows need no second operation for a rest, as pieces of 1,024 elements do.
    norms = torch.linalg.vector_norm(_norms_of_rows(matrices), dim=-1, dtype=torch.float64)
    return norms.float()


def _norms_of_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the norms of all pieces of a tensor on a CPU, in fp32 tensors (count,)."""
    if tensor.ndim > 1 and not tensor.is_contiguous():
        return (_norms_of_rows(tensor).flatten(),)
    flat = tensor.view(-1)
    if flat.numel() <= PIECE:  # most of AdamW's parameters
        return (torch.linalg.vector_norm(flat, dim=0, keepdim=True, dtype=torch.float32),)
    whole = flat.numel() // PIECE * PIECE
    pieces = (flat[:whole].view(-1, PIECE), flat[whole:].view(1, -1))
    return tuple(torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces)


def _norms_of_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Returns the norms (..., rows) of the rows of matrices (..., rows, cols), or those of their columns if the
    elements of a column are closer together in memory."""
    rows = matrices if matrices.stride(-1) <= matrices.stride(-2) else matrices.mT
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    return norms
