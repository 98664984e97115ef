"""Newton-Schulz iteration: approximates the nearest semi-orthogonal matrix using only matmuls.

X <- a X + (b A + c A A) X with A = X X^T drives every singular value towards 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Sets of coefficients differ in how fast they increase small
singular values and in how close to 1 the result is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, cycle, islice, repeat

import torch

from . import cpu_matmuls
from .matrix_optimizer import Workspace
from .muon_facts import CoefficientSet

COEFFICIENTS: dict[CoefficientSet, tuple[tuple[float, float, float], ...]] = {
    # Jordan et al. 2024: one triple, steep at zero; singular values end between about 0.7 and 1.2.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # One triple per step: https://leloykun.github.io/ponder/muon-opt-coeffs/, as in modded-nanogpt.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al. 2025, arXiv:2505.16932; includes the safety factor 1.01 of its Algorithm 1.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # https://github.com/thib-s/flash-newton-schulz
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # DeepSeek-V4 technical report: eight steep steps, then two that converge to 1.
    "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
REPEAT_LAST: frozenset[CoefficientSet] = frozenset({"polar_express", "deepseekv4"})
"""The sets whose last triple converges to 1: further steps repeat that triple. With the other sets, further
steps start again at the first triple."""


def coefficients(name: CoefficientSet, steps: int) -> tuple[tuple[float, float, float], ...]:
    """Returns the coefficients (a, b, c) of each step."""
    table = COEFFICIENTS[name]
    endless = chain(table, repeat(table[-1])) if name in REPEAT_LAST else cycle(table)
    return tuple(islice(endless, steps))


def newton_schulz(
    x: torch.Tensor,
    steps: Sequence[tuple[float, float, float]],
    workspace: Workspace,
    *,
    wide: bool | None = None,
    total: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Orthogonalises `x` by the standard form of the iteration.

    Args:
        x: (rows, cols) or (batch, rows, cols), contiguous, with no singular value above 1; overwritten. Its
            dtype is the precision of the matmuls, which accumulate in fp32 for every dtype.
        steps: (a, b, c) of each step.
        workspace: Scratch for a second x and two squares (side, side) of the short side.
        wide: True if the whole matrix has at most as many rows as columns; None if the shape of `x` decides.
            Required for a fragment, which may be tall although the whole matrix is wide, or the reverse.
        total: A function that sums a fragment's Gram matrix over all fragments, in place; None for a whole
            matrix.

    Returns:
        `x` or the workspace's second x, whichever was written last.
    """
    twin = workspace.like("ns_twin", x)
    if wide is None:
        wide = x.size(-2) <= x.size(-1)
    side = x.size(-2) if wide else x.size(-1)
    gram = workspace.get("ns_gram", (*x.shape[:-2], side, side), x.dtype, x.device)
    poly = workspace.get("ns_poly", gram.shape, x.dtype, x.device)
    fused: Callable[..., torch.Tensor] = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in steps:
        short = x if wide else x.mT  # (side, long)
        symmetric_gram(short, gram)
        if total is not None:
            total(gram)
        symmetric_product(gram, gram, poly, add=gram, beta=b, alpha=c)
        if wide:
            fused(x, poly, x, beta=a, out=twin)
        else:
            fused(x, x, poly, beta=a, out=twin)
        x, twin = twin, x
    return x


# Matmuls whose result is known to be symmetric. Where it is faster, only half of the result is computed and
# then mirrored.
#
# CPUs compute large matmuls in strips of rows. Everything else is an ordinary matmul.

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


def symmetric_gram(x: torch.Tensor, out: torch.Tensor, *, add: torch.Tensor | None = None) -> torch.Tensor:
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


def symmetric_product(
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
