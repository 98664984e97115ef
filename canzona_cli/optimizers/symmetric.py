"""Products whose result is known to be symmetric: half of it is computed and mirrored, where that is quicker.

On CPUs by strips of rows; on CUDA by the kernel that a start-up measurement chose (`ladder`); else as any
product.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

import torch

from . import cpu_products

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, float], object]
"""Called with a, b, out, add, beta, alpha: out <- alpha A B + beta `add`, `add` None for nothing. A is (side,
long) and B is (long, side): A's transpose, of the same memory, or, where both are squares, another symmetric
matrix that commutes with A."""

STRIPS, LEAST = 5, 2e8
"""Strips of rows, and the multiply-adds from which on they win. Measured on one core of an AMD EPYC with
AVX512-BF16 (no AMX), bf16, time over that of the whole product: X X^T of 256x1024 1.07, 256x3072 0.84,
384x1536 0.81, 512x1024 0.85, 640x640 0.83, 640x3200 0.72, 1024x1024 0.82, 1024x3072 0.72, 1280x6400 0.64; A A
+ b A of 384 1.16, 512 0.99, 640 0.85, 1024 0.88, 1280 0.73. Halving recursively, strips of columns, and other
numbers of strips (2 to 8) gain no more; without the mirror image it would be 0.05 less. All of them gave the
whole product's bits."""
AMX_STRIPS, AMX_LEAST = 3, 1.5e9
"""The same on one core of a Xeon with AMX, which multiplies faster than it mirrors: 768x2560 0.78; two and
four strips are slower, and none gains at 512x2560 and 1024x1024."""

Shape = tuple[int, int, torch.dtype]
"""(side, long) of A, and its type."""

_chosen: dict[Shape, Kernel] = {}


def use(kernels: Mapping[Shape, Kernel]) -> None:
    """Multiply matrices A of these shapes by these kernels from now on."""
    _chosen.clear()
    _chosen.update(kernels)


def gram(x: torch.Tensor, out: torch.Tensor, *, add: torch.Tensor | None = None) -> torch.Tensor:
    """X X^T + `add`.

    Args:
        x: (side, long) or (batch, side, long), of any strides.
        out: (side, side) or (batch, side, side), contiguous; overwritten. Not memory of `x`.
        add: A symmetric matrix of its shape; `out` itself, or no memory of it; None for nothing.

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
    """alpha A B + beta `add`, where A and B commute: polynomials of one symmetric matrix,
    so that A B is symmetric too.

    Args:
        a, b: (side, side) or (batch, side, side), symmetric.
        out: A contiguous matrix of their shape, overwritten; it shares memory with none but `add`.
        add: A symmetric matrix of their shape; None for nothing.
        beta: Its factor; of no meaning without it.
        alpha: The product's factor.

    Returns:
        `out`.
    """
    _multiply(a, b.mT, out, add, beta, alpha)  # by its rows: a strip streams contiguous ones
    return out


def in_strips(side: int, long: int) -> int:
    """Strips of rows in which a CPU multiplies (side, long) by (long, side) in bf16 or fp16;
    1 where it is slower."""
    strips, least = (AMX_STRIPS, AMX_LEAST) if _amx() else (STRIPS, LEAST)
    return strips if float(side) * side * long >= least else 1


def plain(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
) -> None:
    """Multiply as any product; the one kernel that takes stacks (batch, side, long) too."""
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
        if (chosen := _chosen.get((side, long, a.dtype))) is not None:
            chosen(a, b, out, add, beta, alpha)
            return
        if a.device.type == "cpu" and a.dtype in cpu_products.NARROW and (strips := in_strips(side, long)) > 1:
            _in_strips(strips, a, b, out, add, beta, alpha)
            return
    plain(a, b, out, add, beta, alpha)


def _in_strips(
    strips: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: torch.Tensor | None,
    beta: float,
    alpha: float,
) -> None:
    """Multiply the lower block triangle, (strips + 1) / (2 strips) of the products, and its mirror image."""
    side = a.size(0)
    height = -(-side // (32 * strips)) * 32
    for top in range(0, side, height):
        end = min(side, top + height)
        more = None if add is None else add[top:end, :end]
        plain(a[top:end], b[:, :end], out[top:end, :end], more, beta, alpha)
        out[:top, top:end].copy_(out[top:end, :top].mT)


@cache
def _amx() -> bool:
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)  # not in torch 2.11
    return bool(capabilities().get("amx_bf16"))


def quack() -> Kernel:
    """Load QuACK's CuTe kernel (quack-kernels), which takes two polynomials of one matrix too."""
    return _quack("quack.gemm_interface")


def torchs_quack() -> Kernel:
    """Load the copy of it that torch's compiler comes with; needs nvidia-cutlass-dsl."""
    return _quack("torch._vendor.quack.gemm_interface")


def _quack(module: str) -> Kernel:
    gemm: Callable[..., object] = import_module(module).gemm_symmetric

    def kernel(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
    ) -> None:
        gemm(a, b, C=add, out=out, alpha=float(alpha), beta=float(beta))

    return kernel


LADDER: Mapping[str, Callable[[], Kernel]] = {"quack": quack, "torch's quack": torchs_quack}
"""The loaders of other packages' kernels by name, in the order they are tried in;
without any of them it is `plain`:
cuBLAS. A loader raises whatever keeps its kernel from being used here: most often ImportError."""
