"""Newton-Schulz on the Gram matrix: the polynomial of all steps is worked out on squares, and applied at the end.

Every step multiplies X from its short side by a polynomial of A = X X^T. With Q their product so far, X is Q X0 and A
is Q A0 Q, so that nothing but squares of the short side is needed (Gram Newton-Schulz: Zhang, Amsel, Chen, Dao 2026,
https://dao-lab.ai/blog/2026/gram-newton-schulz). In the standard form every step sees what rounding did to X, here none
sees what it does to A: so Q is applied, and A made anew of X, between `segments` of steps.

Digits. Squares are kept as alpha I + R, with alpha the mean of A's eigenvalues when a segment starts, and R in the
products' type: near convergence R is small, and so is what is lost of it.

Error. With u the unit roundoff, relative and elementwise, take roundings for independent, of variance u^2 / 3 (Higham,
Mary 2019, doi:10.1137/18M1226312). Two of them are amplified in a segment of k steps. Their share of the m singular
values' root mean square:

- Of the Gram matrix. E, of |E|_F^2 = u^2 / 3 |R|_F^2, has become Q E Q by the last step, Q being the product of k - 1,
  and |Q E Q|_F is about |E|_F |Q|_F^2 / m. The last polynomial a + b A + c A A takes |b| times that:
  |b| u / 3^0.5 |R|_F |Q|_F^2 / m^1.5. Small singular values lose by it, as the segment stretches those most.
- Of Q itself. E X, of |E X|_F^2 = u^2 / 3 sum_ij S_ij^2 A_jj where Q = gamma I + S.

Beyond the polynomials' range none of this holds. `cans` goes to its very edge, from where a rounding is enough: of a
Gaussian 16 x 48 in bf16 the largest singular value became 3.6 where standard leaves 1.1, and restarts in every step are
no help, so `Muon` refuses it. The other sets keep away from it.

A later segment stretches an error by about the root mean square of its Q. The sum is an upper estimate: where it is
0.004 to 0.05, measured are 0.004 to 0.009 (Gaussian, decaying by 10, four large of 256), as in the standard form.
"""

import math
from collections.abc import Callable, Sequence

import torch

from . import symmetric
from .workspace import Workspace

DOUBT = 0.15
"""Estimated error (see above) above which a result is not trusted: less than ten times the 0.02 to 0.2 that the
polynomials themselves leave. Estimated are 0.005 to 0.095 of Gaussian matrices, most of small squares."""
LARGEST = 1.5
"""No set of coefficients leaves a singular value above it: the mean of rows' squares is at most its square."""
SAMPLES = 64
"""Rows, evenly spread, that stand for all where a mean is estimated."""

Number = float | torch.Tensor
"""Of one matrix on the host a float; else (..., 1, 1) in fp32, on the device, so that nobody waits for it."""
Step = tuple[float, float, float]


def segments(steps: int) -> tuple[int, ...]:
    """Steps the Gram form makes on each Gram matrix: two, and three at the end of an odd number.

    Where three steps are followed by others, what they leave beyond the polynomials' range (above 1.4) grows without
    bound: `deepseekv4` did so on Gaussian 256 x 257.
    """
    return (2,) * (steps // 2 - 1) + (2 + steps % 2,) if steps > 1 else (1,)


def gram_newton_schulz(
    x: torch.Tensor, steps: Sequence[Step], workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalise `x`, as `newton_schulz`.

    Returns:
        `x` or the workspace's twin of it, and whether it can be trusted: bool, of x's batch, never true of what is not
        finite.
    """
    twin = workspace.like("ns_twin", x)
    error: Number = 0.0
    done = 0
    for count in segments(len(steps)):
        error = _segment(x, steps[done : done + count], twin, workspace, error)
        x, twin = twin, x
        done += count
    estimated = torch.as_tensor(error, device=x.device).view(x.shape[:-2])
    return x, (estimated <= DOUBT) & (_mean_square(x) <= LARGEST**2)


def _segment(x: torch.Tensor, steps: Sequence[Step], out: torch.Tensor, workspace: Workspace, error: Number) -> Number:
    """`steps` on one Gram matrix, from `x` to `out`.

    Returns:
        `error` as it is behind them.
    """
    wide = x.size(-2) <= x.size(-1)
    batch, side = x.shape[:-2], min(x.shape[-2:])
    r, s, q, m = (
        workspace.get(role, (*batch, side, side), x.dtype, x.device)
        for role in ("ns_gram", "ns_poly", "ns_all", "ns_half")
    )
    host = x.ndim == 2 and x.device.type == "cpu"

    def number(of_each: torch.Tensor) -> Number:
        return float(of_each) if host else of_each.view(*batch, 1, 1)

    def flat(of_each: Number) -> Number:
        return of_each.squeeze(-1) if isinstance(of_each, torch.Tensor) else of_each

    # A mean above 1 is that of a broken matrix, and its polynomials might overflow.
    alpha = number(_mean_square(x).clamp_max(1.0))
    diagonal = r.zero_().diagonal(dim1=-2, dim2=-1)
    diagonal.sub_(flat(alpha))
    symmetric.gram(x if wide else x.mT, r, add=r)
    rows = (diagonal.float() + flat(alpha)).clamp_min(0.0)
    unit = torch.finfo(x.dtype).eps / 2 / 3**0.5
    lost: Number = 0.0
    spread = number(torch.linalg.vector_norm(r, dim=(-2, -1)).float()) if len(steps) > 1 else lost
    gamma: Number = 1.0
    stretch: Number = 1.0
    """|Q|_F^2 / m of Q = gamma I + q, or of the one before."""
    columns = rows
    for place, (a, b, c) in enumerate(steps):
        # This step's polynomial of A = alpha I + r is value I + p.
        value = a + b * alpha + c * alpha * alpha
        p = s if place else q
        symmetric.product(r, r, p, add=torch.mul(r, b + 2 * c * alpha, out=p), alpha=c)
        if place:
            lost = abs(b) * unit * spread * stretch / side**0.5
            symmetric.product(p, q, m, add=_blend(m, q, value, p, gamma))
            q, m = m, q
        gamma = value * gamma
        if place + 1 < len(steps):
            symmetric.product(p, r, m, add=_blend(m, p, alpha, r, value))
            symmetric.product(p, m, r, add=_blend(r, m, value, p, value * alpha))
            alpha = value * value * alpha
        if place + 2 >= len(steps):
            columns = torch.linalg.vector_norm(q, dim=-1).float().square()
            traced = q.diagonal(dim1=-2, dim2=-1).float().mean(-1)
            stretch = number(columns.mean(-1)) + 2 * gamma * number(traced) + gamma * gamma
    _apply(x, q, gamma, out, wide)
    root = math.sqrt(abs(stretch)) if isinstance(stretch, float) else stretch.abs().sqrt()
    return error * root + lost + unit * number((columns * rows).mean(-1).sqrt())


def _apply(x: torch.Tensor, q: torch.Tensor, gamma: Number, out: torch.Tensor, wide: bool) -> None:
    """out <- (gamma I + q) x from x's short side."""
    fused: Callable[..., torch.Tensor] = torch.addmm if x.ndim == 2 else torch.baddbmm
    left, right = (q, x) if wide else (x, q)
    # As a factor of `fused`, oneDNN would compile a kernel for every new gamma.
    fused(torch.mul(x, gamma, out=out), left, right, out=out)


def _blend(out: torch.Tensor, a: torch.Tensor, x: Number, b: torch.Tensor, y: Number) -> torch.Tensor:
    """out <- x a + y b."""
    torch.mul(a, x, out=out)
    return out.add_(b, alpha=y) if isinstance(y, float) else out.addcmul_(b, y)


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of the singular values' squares, from some rows or columns: (...,) in fp32."""
    short = x if x.size(-2) <= x.size(-1) else x.mT
    some = short[..., :: max(1, short.size(-2) // SAMPLES), :].float()
    return some.square().sum(dim=(-2, -1)) / some.size(-2)
