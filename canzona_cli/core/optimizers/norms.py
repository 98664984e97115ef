"""Norms and sums of squares of tensors of any length, as precise on CPUs as on GPUs.

On a CPU, torch's norm of a whole tensor adds all squares in fp32, one after another in each lane of a vector
register: at 1e8 elements the result is 1% too small. On CUDA, torch adds partial sums in a tree. Therefore, on a
CPU, the functions here take the norms of short pieces, and add the squares of these norms in fp64. That takes as
long as torch's norm, and copies nothing.

Within a piece, squares are fp32. A piece whose norm exceeds 1.8e19 therefore makes the result infinite, as it does
on CUDA and in Megatron's own functions.
"""

from collections.abc import Sequence

import torch

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
