"""Matmuls whose result is known to be symmetric. Where it is faster, only half of the result is computed and
then mirrored.

CPUs compute large matmuls in strips of rows. Everything else is an ordinary matmul.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from . import cpu_matmuls

STRIPS, LEAST = 5, 2e8
"""The number of strips of rows, and the number of multiply-adds above which strips are faster. Measured in
bf16 on one core of an AMD EPYC with AVX512-BF16 (no AMX), as a ratio to the time of the full matmul: X X^T
of 256x1024 1.07, 256x3072 0.84, 384x1536 0.81, 512x1024 0.85, 640x640 0.83, 640x3200 0.72, 1024x1024 0.82,
1024x3072 0.72, 1280x6400 0.64; A A + b A of 384 1.16, 512 0.99, 640 0.85, 1024 0.88, 1280 0.73. Recursive
halving, strips of columns and other numbers of strips (2 to 8) do not gain more. Mirroring accounts for about
0.05. All variants gave the same bits as the full matmul."""
AMX_STRIPS, AMX_LEAST = 3, 1.5e9
"""The same numbers for processors with AMX, where mirroring takes a larger share of the time. Measured on one
core of a Xeon: 768x2560 0.78. Two and four strips are slower, and nothing gains at 512x2560 and 1024x1024."""


def gram(x: torch.Tensor, out: torch.Tensor, *, add: torch.Tensor | None = None) -> torch.Tensor:
    """Computes X X^T + `add` into `out`.

    Args:
        x: (side, long) or (batch, side, long), with any strides.
        out: (side, side) or (batch, side, side), contiguous, overwritten. Must not share memory with `x`.
        add: Symmetric, of the shape of `out`; either `out` itself or without shared memory. None to add
            nothing.

    Returns:
        `out`.
    """
    _multiply(x, x.mT, out, add, 0.0 if add is None else 1.0, 1.0)
    return out


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    add: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Computes alpha A B + beta `add` into `out`, where A and B are polynomials of the same symmetric matrix.
    They commute, so A B is symmetric too.

    Args:
        a, b: (side, side) or (batch, side, side), symmetric.
        out: A contiguous tensor of the same shape, overwritten; may share memory with `add` only.
        add: Symmetric, of the same shape. None to add nothing.
        beta: The factor of `add`; ignored without `add`.
        alpha: The factor of A B.

    Returns:
        `out`.
    """
    # b.mT equals b, and its columns, which a strip reads, are contiguous.
    _multiply(a, b.mT, out, add, beta, alpha)
    return out


def strip_count(side: int, long: int) -> int:
    """Returns the number of strips in which a CPU multiplies (side, long) by (long, side) in bf16 or fp16; 1
    if strips would be slower."""
    strips, least = (AMX_STRIPS, AMX_LEAST) if _has_amx() else (STRIPS, LEAST)
    return strips if float(side) * side * long >= least else 1


def full_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
) -> None:
    """Computes the matmul, or a batch of them (batch, side, long), in full with torch's own kernels."""
    if add is None and alpha == 1:
        torch.matmul(a, b, out=out)
        return
    fused: Callable[..., torch.Tensor] = torch.addmm if a.ndim == 2 else torch.baddbmm
    fused(out if add is None else add, a, b, beta=0.0 if add is None else beta, alpha=alpha, out=out)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
) -> None:
    if a.ndim == 2:
        side, long = a.shape
        if a.device.type == "cpu" and a.dtype in cpu_matmuls.NARROW and (strips := strip_count(side, long)) > 1:
            _in_strips(strips, a, b, out, add, beta, alpha)
            return
    full_matmul(a, b, out, add, beta, alpha)


def _in_strips(
    strips: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: torch.Tensor | None,
    beta: float,
    alpha: float,
) -> None:
    """Computes only the lower block triangle, which takes (strips + 1) / (2 strips) of the operations, and
    mirrors it."""
    side = a.size(0)
    height = -(-side // (32 * strips)) * 32
    for top in range(0, side, height):
        end = min(side, top + height)
        added = None if add is None else add[top:end, :end]
        full_matmul(a[top:end], b[:, :end], out[top:end, :end], added, beta, alpha)
        out[:top, top:end].copy_(out[top:end, :top].mT)


@cache
def _has_amx() -> bool:
    # torch 2.11 does not have the function.
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return bool(capabilities().get("amx_bf16"))
