"""Newton-Schulz on the Gram matrix: the polynomial of all steps is worked out on squares,
and applied at the end.

Every step multiplies X from its short side by a polynomial of A = X X^T. With Q their product so far, X is Q
X0 and A is Q A0 Q, so that nothing but squares of the short side is needed (Gram Newton-Schulz: Zhang, Amsel,
Chen, Dao 2026, https://dao-lab.ai/blog/2026/gram-newton-schulz). In the standard form every step sees what
rounding did to X, here none sees what it does to A: so Q is applied, and A made anew of X, between `segments`
of steps.

Digits. Squares are kept as alpha I + R, with alpha near the mean of A's eigenvalues when a segment starts,
and R in the products' type: near convergence R is small, and so is what is lost of it. Any alpha would do, so
it is one of few (`ALPHAS`): the host knows all that follows from each, and a GPU looks its row up instead of
working it out in some sixty launches of a single number. At the start, X being of norm 1, the mean itself is
known. A step's polynomial P is whole where it multiplies, its diagonal rounded: it is another polynomial
then, and as good as long as Q and A see the same. So what they get of its diagonal is worked out from what
has become of it.

Range. Where fp16 is as fast it takes the place of bf16 here (`products_type`), for it has three bits more.
Its normal numbers are 6e-5 to 65504. Of a Gaussian 5120 x 25600 of norm 1 elements are 9e-5, and of its Gram
matrix off the diagonal 1e-6: too small. So X is given as t X, of `starting_norm` t = 2^k, and the first step
makes of t X what its polynomial makes of X (`undoing`): nothing else of the iteration knows of t. No element
of a symmetric matrix is above its largest eigenvalue, so R is at most t^2 = 4096 in that step, and all that
is made of it 8.3 t, as factors are t to t^5 times smaller. With t^2 at most the short side the mean of the
eigenvalues is at most 1, as everywhere. Behind that step numbers are larger by its slope squared, 12 to 67:
off the diagonal that Gram matrix is 2e-5, and what is lost of it, 2e-8, no more than some 1e-4 in the end.

Error. With u the unit roundoff, relative and elementwise, take roundings for independent, of variance u^2 / 3
(Higham, Mary 2019, doi:10.1137/18M1226312). Two of them are amplified in a segment of k steps. Their share of
the m singular values' root mean square:

- Of the Gram matrix. E, of |E|_F^2 = u^2 / 3 |R|_F^2, has become Q E Q by the last step, Q being the product
  of k - 1, and |Q E Q|_F is about |E|_F |Q|_F^2 / m. The last polynomial a + b A + c A A takes |b| times
  that: |b| u / 3^0.5 |R|_F |Q|_F^2 / m^1.5. Small singular values lose by it, as the segment stretches those
  most.
- Of Q itself. E X, of |E X|_F^2 = u^2 / 3 sum_ij Q_ij^2 A_jj: no more than if rows of Q and X had nothing to
  do with each other, |E X|_F^2 = u^2 / 3 |Q|_F^2 |X|_F^2 / m, as Q is small where X is large.

Beyond the polynomials' range none of this holds. `cans` goes to its very edge, from where a rounding is
enough: of a Gaussian 16 x 48 in bf16 the largest singular value became 3.6 where standard leaves 1.1, and
restarts in every step are no help, so `Muon` refuses it. The other sets keep away from it.

A later segment stretches an error by about the root mean square of its Q. Norms are those of some rows
(`SAMPLES`). A row that outweighs all others is of large singular values, and is stretched least.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from . import cpu_products, symmetric
from .matrix_optimizer import Workspace
from .muon_facts import SAMPLES, segments

DOUBT = 0.15
"""Estimated error (see above) above which a result is not trusted: less than ten times the 0.02 to 0.2 that
the polynomials themselves leave. Estimated in bf16 are 0.009 to 0.145 of Gaussian matrices, most of squares
of side 16."""
LARGEST_NORM = 2.0**6
"""The largest norm that is iterated on in fp16: its square is well inside the range."""
LOWEST, PER_OCTAVE = -24, 8
ALPHAS = tuple(2.0 ** (LOWEST + i // PER_OCTAVE) * (1 + (i % PER_OCTAVE + 0.5) / PER_OCTAVE) for i in range(192))
"""The values of alpha from 2^-24 up to 1, at most 6% from any number between; numbers of bf16, so that R
loses nothing of them. A mean above 1 is that of a broken matrix, and its polynomials might overflow."""

Number = float | torch.Tensor
"""A float for one matrix on the host; else (..., 1, 1) in fp32, on the device,
so that nobody waits for it."""
Step = tuple[float, float, float]


def products_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Picks the type of X and of squares on `device`, where the standard form's are `dtype`. Processors with
    instructions for bf16 multiply fp16 400 times slower; those without take as long for either."""
    has_fp16 = device.type == "cuda" or (device.type == "cpu" and cpu_products.installed())
    return torch.float16 if dtype is torch.bfloat16 and has_fp16 else dtype


def starting_norm(side: int, dtype: torch.dtype) -> float:
    """t, a power of two: what the Frobenius norm of an X of `dtype` with this short side has to be."""
    return min(LARGEST_NORM, 2.0 ** ((side.bit_length() - 1) // 2)) if dtype is torch.float16 else 1.0


def undoing(norm: float, steps: Sequence[Step]) -> Sequence[Step]:
    """Steps that make of an X, `norm` times as large, what `steps` make of X."""
    (a, b, c), *others = steps
    return ((a / norm, b / norm**3, c / norm**5), *others)


def gram_newton_schulz(
    x: torch.Tensor, steps: Sequence[Step], workspace: Workspace, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalise `x`, of Frobenius norm `starting_norm` or 0, as `newton_schulz`.

    Args:
        into: fp32, of the shape of a single `x` in fp16: the last product goes there as it adds up.

    Returns:
        `into`, or else `x` or the workspace's twin of it; and whether it can be trusted: bool, of x's batch,
        never true of what is not finite.
    """
    twin = workspace.like("ns_twin", x)
    side = min(x.shape[-2:])
    norm = starting_norm(side, x.dtype)
    of_norm = undoing(norm, steps)
    mean: Number = norm * norm / side
    error: Number = 0.0
    done = 0
    for count in segments(len(steps)):
        done += count
        out = twin if into is None or done < len(steps) else into
        error = _segment(x, of_norm[done - count : done], out, workspace, mean, error)
        x, twin = out, x
        mean = mean_square(x)
    trusted = torch.as_tensor(error <= DOUBT) & torch.as_tensor(mean <= most(steps) ** 2)
    return x, trusted.view(x.shape[:-2])


def most(steps: Sequence[Step]) -> float:
    """Largest root mean square of singular values that a result to be trusted may have: the largest that the
    polynomial leaves of one in [0, 1], and a third of `DOUBT`.

    The error's estimate is one of many singular values. Of few, a single one may end up beyond the
    polynomials' range:
    of a Gaussian 3x3 it was 1.7 where 0.06 was estimated.
    """
    return _largest(tuple(steps)) + DOUBT / 3


@cache
def _largest(steps: tuple[Step, ...]) -> float:
    largest = 0.0
    for point in range(1001):
        y = point / 1000
        for a, b, c in steps:
            y = a * y + b * y**3 + c * y**5
        largest = max(largest, abs(y))
    return largest


def _segment(
    x: torch.Tensor, steps: Sequence[Step], out: torch.Tensor, workspace: Workspace, mean: Number, error: Number
) -> Number:
    """`steps` on one Gram matrix, from `x` to `out`.

    Args:
        mean: The mean of its eigenvalues.
        error: As it is in front of them.

    Returns:
        `error` as it is behind them.
    """
    wide = x.size(-2) <= x.size(-1)
    side = min(x.shape[-2:])
    r = workspace.get("ns_gram", (*x.shape[:-2], side, side), x.dtype, x.device)
    known = follows(steps, mean)
    centred_gram(x if wide else x.mT, known[0], r)
    spread = norm_of_rows(r) if len(steps) > 1 else 0.0
    applied = polynomial(r, steps, known, workspace)
    behind = applied.error(error, mean, spread)
    applied.apply(x, out, wide=wide)
    return behind


def centred_gram(short: torch.Tensor, alpha: Number, out: torch.Tensor) -> None:
    """`out` <- X X^T - alpha I, X being `short` (..., side, long)."""
    out.zero_().diagonal(dim1=-2, dim2=-1).sub_(_flat(alpha))
    symmetric.gram(short, out, add=out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Polynomial:
    """gamma I + q, which takes X through some steps from its short side. To be asked before its workspace is
    used again."""

    q: torch.Tensor
    """(..., side, side), in a workspace."""
    gamma: Number
    before: Number
    """Norm of some rows of the product of all steps but the last."""
    slope: float
    """b of the last."""
    last: tuple[torch.Tensor, Number | None, torch.Tensor, Number]
    """p, value, r and alpha of the last step; None where p is whole."""

    def error(self, error: Number, mean: Number, spread: Number) -> Number:
        """Estimates the error after the steps.

        Args:
            error: In front of them.
            mean: The mean of the eigenvalues of the Gram matrix.
            spread: `norm_of_rows` of what was rounded to get R.
        """
        side = self.q.size(-1)
        rows, unit = -(-side // _every(side)), torch.finfo(self.q.dtype).eps / 2 / 3**0.5
        root: Number = mean**0.5
        lost = spread * self.before * self.before * (abs(self.slope) * unit / rows**1.5)
        behind: Number = norm_of_rows(self.q, self.gamma) * (error + root * unit) * float(rows) ** -0.5 + lost
        return behind

    def left(self) -> Number:
        """Estimates the mean square of the singular values after the steps, from some rows of the last step's
        Gram matrix."""
        return self.left_of(slice(0, self.q.size(-1)))

    def left_of(self, rows: slice) -> Number:
        """Computes what `rows` add to `left`."""
        p, value, r, alpha = self.last
        side = p.size(-1)
        every = _every(side)
        first = -(-rows.start // every) * every
        some = p[..., first : rows.stop : every, :]
        if value is not None:
            some = some.clone()
            some[..., first::every].diagonal(dim1=-2, dim2=-1).add_(_flat(value))
        behind = torch.matmul(some, r).float() + alpha * some.float()
        return _number(behind.mul_(some.float()).sum((-2, -1)) / -(-side // every))

    def apply(self, x: torch.Tensor, out: torch.Tensor, *, wide: bool) -> None:
        """`out` <- what it makes of `x`, from x's short side. To be called last: q is
        made whole, but in bf16, which has too few digits for q and gamma in one."""
        if x.dtype is torch.bfloat16:
            apply(x, self.q, self.gamma, out, wide=wide)
        else:
            self.q.diagonal(dim1=-2, dim2=-1).add_(_flat(self.gamma))
            _product(*_sides(x, self.q, wide=wide), out)


def polynomial(r: torch.Tensor, steps: Sequence[Step], known: Sequence[Number], workspace: Workspace) -> Polynomial:
    """Multiplies out `steps` from a Gram matrix alpha I + `r`, which is overwritten, (..., side, side).

    Args:
        known: the values that `follows` derives from alpha.
    """
    s, q, m = (workspace.get(role, r.shape, r.dtype, r.device) for role in ("ns_poly", "ns_all", "ns_half"))
    before: Number = 0.0
    p = q
    for place, (_, _, c) in enumerate(steps):
        # A is alpha I + r, this step's polynomial of it P = value I + p, the product of those before it
        # turned I + q.
        alpha, factor, value, turned, both = known[5 * place : 5 * place + 5]
        last = place + 1 == len(steps)
        p = s if place else q
        symmetric.product(r, r, p, add=torch.mul(r, factor, out=p), alpha=c)
        if len(steps) == 1:
            break
        diagonal = add_diagonal(p, value)
        if place:
            if last:
                before = norm_of_rows(q, turned)
            symmetric.product(p, q, m, add=times(p, diagonal, turned, m))
            q, m = m, q
        if not last:
            symmetric.product(p, r, m, add=times(p, diagonal, alpha, m))
            symmetric.product(p, m, r, add=times(p, diagonal, both, r))
        if not place:
            q.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    known_p = known[-4] if len(steps) == 1 else None
    return Polynomial(q=q, gamma=known[-1], before=before, slope=steps[-1][1], last=(p, known_p, r, known[-6]))


def add_diagonal(p: torch.Tensor, value: Number) -> torch.Tensor:
    """`p` <- value I + `p`, rounded, (..., side, side).

    Returns:
        What its diagonal then has besides value: (..., side).
    """
    diagonal = p.diagonal(dim1=-2, dim2=-1)
    return torch.sub(diagonal.add_(_flat(value)), _flat(value))


def times(p: torch.Tensor, diagonal: torch.Tensor, factor: Number, out: torch.Tensor) -> torch.Tensor:
    """`out` <- factor p, of the `p` and the `diagonal` that `add_diagonal` made: without value."""
    torch.mul(p, factor, out=out)
    torch.mul(diagonal, _flat(factor), out=out.diagonal(dim1=-2, dim2=-1))
    return out


def follows(steps: Sequence[Step], mean: Number) -> Sequence[Number]:
    """`_numbers` of the alpha next to `mean`, alpha first."""
    if not isinstance(mean, torch.Tensor):
        return _numbers(tuple(steps), ALPHAS[nearest(mean)])
    # The exponent, and the mantissa's first bits; of NaN too it has to be a place.
    places = (mean.view(torch.int32) >> 20).sub_((127 + LOWEST) * PER_OCTAVE).clamp_(0, len(ALPHAS) - 1)
    rows = _table(tuple(steps), mean.device).index_select(0, places.view(-1))
    return rows.view(*mean.shape, -1).unbind(-1)


def nearest(mean: float) -> int:
    """Finds the place of the alpha next to `mean`; the last for what is not finite."""
    if not mean < ALPHAS[-1]:
        return len(ALPHAS) - 1
    mantissa, exponent = math.frexp(max(mean, 2.0**LOWEST))
    return (exponent - 1 - LOWEST) * PER_OCTAVE + int((2 * mantissa - 1) * PER_OCTAVE)


@cache
def _table(steps: tuple[Step, ...], device: torch.device) -> torch.Tensor:
    """(alphas, numbers)."""
    return torch.tensor([_numbers(steps, alpha) for alpha in ALPHAS], device=device)


@cache
def _numbers(steps: tuple[Step, ...], alpha: float) -> tuple[float, ...]:
    """Computes what follows from a segment's alpha. For each step: alpha, the factor of r in p, the value of
    the polynomial at alpha, the product of those before it, value times alpha. Then that product of all."""
    numbers: list[float] = []
    gamma = 1.0
    for a, b, c in steps:
        value = a + b * alpha + c * alpha * alpha
        numbers += (alpha, b + 2 * c * alpha, value, gamma, value * alpha)
        gamma, alpha = value * gamma, value * value * alpha
    return *numbers, gamma


def norm_of_rows(square: torch.Tensor, gamma: Number | None = None) -> Number:
    """Frobenius norm of some rows of `square`, or of gamma I + `square`."""
    every = _every(square.size(-1))
    some = square[..., ::every, :]
    if gamma is not None:
        some = some.clone()
        some[..., ::every].diagonal(dim1=-2, dim2=-1).add_(_flat(gamma))
    return _number(torch.linalg.vector_norm(some, dim=(-2, -1), dtype=torch.float32))


def _every(side: int) -> int:
    return -(-side // SAMPLES)


def _number(of_each: torch.Tensor) -> Number:
    """Takes one number for each matrix of a batch, (...)."""
    return float(of_each) if of_each.ndim == 0 and of_each.device.type == "cpu" else of_each[..., None, None]


def _flat(number: Number) -> Number:
    """Shapes a number for a batch's diagonals."""
    return number.squeeze(-1) if isinstance(number, torch.Tensor) else number


def apply(x: torch.Tensor, q: torch.Tensor, gamma: Number, out: torch.Tensor, *, wide: bool) -> None:
    """out <- (gamma I + q) x from x's short side."""
    fused: Callable[..., torch.Tensor] = torch.addmm if x.ndim == 2 else torch.baddbmm
    # As a factor of `fused`, oneDNN would compile a kernel for every new gamma.
    fused(torch.mul(x, gamma, out=out), *_sides(x, q, wide=wide), out=out)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """`out` <- a b, in fp32 not rounded to their type."""
    if out.dtype is a.dtype:
        torch.matmul(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # processors have no such product
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def blend(out: torch.Tensor, a: torch.Tensor, x: Number, b: torch.Tensor, y: Number) -> torch.Tensor:
    """out <- x a + y b."""
    torch.mul(a, x, out=out)
    return out.add_(b, alpha=y) if isinstance(y, float) else out.addcmul_(b, y)


def _sides(x: torch.Tensor, q: torch.Tensor, *, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """q is symmetric but for rounding. Later steps are on its left, and have to come last: else the error of
    a tall 66x64 in bf16 is twice that of a wide 64x66."""
    return (q, x) if wide else (x, q.mT)


def mean_square(x: torch.Tensor, *, wide: bool | None = None) -> Number:
    """Mean of the singular values' squares, from some rows or columns.

    Args:
        wide: True if they are rows; None: whichever are fewer.
    """
    short = x if (x.size(-2) <= x.size(-1) if wide is None else wide) else x.mT
    some = short[..., :: _every(short.size(-2)), :]
    return _number(torch.linalg.vector_norm(some, dim=(-2, -1), dtype=torch.float32).square() / some.size(-2))
