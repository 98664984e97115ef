"""Newton-Schulz iteration: approximates the nearest semi-orthogonal matrix using only matmuls.

X <- a X + (b A + c A A) X with A = X X^T drives every singular value towards 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Sets of coefficients differ in how fast they increase small
singular values and in how close to 1 the result is.
"""

from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice, repeat

import torch

from . import symmetric
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
        symmetric.gram(short, gram)
        if total is not None:
            total(gram)
        symmetric.product(gram, gram, poly, add=gram, beta=b, alpha=c)
        if wide:
            fused(x, poly, x, beta=a, out=twin)
        else:
            fused(x, x, poly, beta=a, out=twin)
        x, twin = twin, x
    return x
