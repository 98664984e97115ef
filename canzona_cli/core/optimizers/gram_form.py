"""Newton-Schulz in Gram form: the polynomials of several steps are multiplied out on squares of the short
side, and their product is applied to X at once (Gram Newton-Schulz: Zhang, Amsel, Chen, Dao 2026,
https://dao-lab.ai/blog/2026/gram-newton-schulz).

Every step multiplies X from its short side by a polynomial of A = X X^T. If Q is the product of these
polynomials so far, then X is Q X0 and A is Q A0 Q, so only squares (side, side) are needed. In the standard
form every step computes A from X, with all of X's rounding errors. Here A differs from X X^T by rounding
errors that later steps do not correct. Therefore Q is applied to X, and A is computed again, after each of
the `segments` of steps.

Precision. Squares are stored as alpha I + R, where alpha is close to the mean of A's eigenvalues at the start
of a segment, and R has the dtype of the matmuls. Near convergence R is small, and so is its rounding error.
Any alpha gives the same result, so alpha is taken from a table (`ALPHAS`). The host computes the numbers that
follow from each alpha once, and a GPU looks them up instead of computing them in some sixty launches on
single numbers. At the start X has norm 1, so the mean is known exactly. Where a matmul needs a step's
polynomial P, P is stored including its diagonal, which is rounded. This makes P a different
polynomial, which does no harm as long as Q and A are multiplied by the same P. So the terms that Q and A get
from P's diagonal are computed from the rounded diagonal.

Range. Where fp16 is as fast as bf16, it replaces bf16 here (`gram_dtype`), because it has three more bits of
precision. Its normal numbers are 6e-5 to 65504. The elements of a Gaussian 5120 x 25600 matrix of norm 1 are
about 9e-5, and the off-diagonal elements of its Gram matrix about 1e-6, which is too small. So the caller
passes t X with t = 2^k (`starting_norm`), and the first step's coefficients are scaled to give the same
result as for X (`unscaled_steps`). No other part of the iteration depends on t. No element of a symmetric
matrix exceeds its largest eigenvalue, so R is at most t^2 = 4096 in the first step, and the squares computed
from it are at most 8.3 t, because the polynomials' coefficients are t to t^5 times smaller. Because t^2 is at
most the short side, the mean of the eigenvalues is at most 1; in later segments it is rarely above 1. After
the first step the numbers are larger by its slope squared, 12 to 67: the off-diagonal elements of that Gram
matrix are about 2e-5. Their rounding error, 2e-8, adds no more than about 1e-4 to the result.

Error. With u the unit roundoff, relative and elementwise, take roundings to be independent with variance u^2
/ 3 (Higham, Mary 2019, doi:10.1137/18M1226312). In a segment of k steps two roundings are amplified. Relative
to the root mean square of the m singular values, they contribute:

- The rounding of the Gram matrix. An error E with |E|_F^2 = u^2 / 3 |R|_F^2 has become Q E Q by the last
  step, where Q is the product of the first k - 1 polynomials, and |Q E Q|_F is about |E|_F |Q|_F^2 / m. The
  last polynomial a + b A + c A A multiplies it by |b|: |b| u / 3^0.5 |R|_F |Q|_F^2 / m^1.5. Small singular
  values suffer most, because the segment stretches them most.
- The rounding of Q. The error E X has |E X|_F^2 = u^2 / 3 sum_ij Q_ij^2 A_jj. This is at most the value that
  it would have if the rows of Q and X were unrelated, |E X|_F^2 = u^2 / 3 |Q|_F^2 |X|_F^2 / m, because Q is
  small where X is large.

Outside the polynomials' range these estimates do not hold. All sets of coefficients stay away from its edge.

A later segment multiplies an error by about the root mean square of its Q. Norms are estimated from some rows
(`SAMPLES`). A row that is much larger than the others belongs to large singular values, which are stretched
least.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from . import cpu_matmuls
from .matrix_optimizer import Workspace
from .muon_facts import SAMPLES, segments
from .newton_schulz import symmetric_gram, symmetric_product

DOUBT = 0.15
"""The estimated error (see above) above which a result is not trusted. It is similar to the error of the
polynomials themselves, whose results differ from 1 by 0.02 to 0.2. In bf16 the estimates for Gaussian
matrices are 0.009 to 0.145, the largest for 16 x 16 matrices."""
LARGEST_NORM = 2.0**6
"""The largest starting norm in fp16; its square is well inside fp16's range."""
LOWEST, PER_OCTAVE = -24, 8
"""The exponent of the smallest power of two among the values of alpha, and the number of values per power of
two."""
ALPHAS = tuple(2.0 ** (LOWEST + i // PER_OCTAVE) * (1 + (i % PER_OCTAVE + 0.5) / PER_OCTAVE) for i in range(192))
"""The values of alpha, from 2^-24 to 1, spaced so that any number in between is at most 6% away. All are
exact in bf16, so subtracting alpha from R's diagonal adds no error. For a mean above 1 the largest alpha is
used, because the matrix may not be valid, and its polynomials could overflow with a larger alpha."""

Number = float | torch.Tensor
"""A float for one matrix on the host; otherwise a tensor (..., 1, 1) in fp32 on the device, so that the host
does not wait."""
Step = tuple[float, float, float]


def gram_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of X and of squares in Gram form on `device`, given that the standard form uses
    `dtype`. fp16 replaces bf16 where both are equally fast: on CUDA, and on processors without bf16
    instructions (`cpu_matmuls`). On processors with bf16 instructions, fp16 matmuls are 400 times slower."""
    has_fp16 = device.type == "cuda" or (device.type == "cpu" and cpu_matmuls.is_installed())
    return torch.float16 if dtype is torch.bfloat16 and has_fp16 else dtype


def starting_norm(side: int, dtype: torch.dtype) -> float:
    """Returns t, the Frobenius norm that an X with this short side and `dtype` must have at the start: a
    power of two."""
    return min(LARGEST_NORM, 2.0 ** ((side.bit_length() - 1) // 2)) if dtype is torch.float16 else 1.0


def unscaled_steps(norm: float, steps: Sequence[Step]) -> Sequence[Step]:
    """Returns steps whose result for `norm` X is the result of `steps` for X."""
    (a, b, c), *later_steps = steps
    return ((a / norm, b / norm**3, c / norm**5), *later_steps)


def gram_newton_schulz(
    x: torch.Tensor, steps: Sequence[Step], workspace: Workspace, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalises `x`, as `newton_schulz` does, but in Gram form.

    Args:
        x: (rows, cols) or (batch, rows, cols), contiguous, of Frobenius norm `starting_norm` or 0;
            overwritten.
        steps: (a, b, c) of each step.
        workspace: Scratch for a second x and four squares of the short side.
        into: For a single `x` in fp16: an fp32 tensor of its shape that receives the result of the last
            matmul without rounding.

    Returns:
        The result, which is `into` if given, otherwise `x` or the workspace's second x; and a bool tensor, ()
        or (batch,), that is true where the result can be trusted. It is never true for a result that is not
        finite.
    """
    twin = workspace.like("ns_twin", x)
    side = min(x.shape[-2:])
    norm = starting_norm(side, x.dtype)
    scaled_steps = unscaled_steps(norm, steps)
    mean: Number = norm * norm / side
    error: Number = 0.0
    done = 0
    for count in segments(len(steps)):
        done += count
        out = twin if into is None or done < len(steps) else into
        error = _segment(x, scaled_steps[done - count : done], out, workspace, mean, error)
        x, twin = out, x
        mean = mean_square(x)
    trusted = torch.as_tensor(error <= DOUBT) & torch.as_tensor(mean <= largest_rms(steps) ** 2)
    return x, trusted.view(x.shape[:-2])


def largest_rms(steps: Sequence[Step]) -> float:
    """Returns the largest root mean square of singular values that a trusted result may have: the largest
    value of the polynomial on [0, 1], plus a third of `DOUBT`.

    The error estimate assumes many singular values. If there are few, a single one may leave the polynomials'
    range: for a Gaussian 3 x 3 matrix one singular value became 1.7 where the estimated error was 0.06.
    """
    return _largest_value(tuple(steps)) + DOUBT / 3


@cache
def _largest_value(steps: tuple[Step, ...]) -> float:
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
    """Applies a segment of steps, computed on one Gram matrix, to `x` and writes the result into `out`.

    Args:
        mean: The mean of the Gram matrix's eigenvalues.
        error: The estimated error before the segment.

    Returns:
        The estimated error after the segment.
    """
    wide = x.size(-2) <= x.size(-1)
    side = min(x.shape[-2:])
    r = workspace.get("ns_gram", (*x.shape[:-2], side, side), x.dtype, x.device)
    numbers = alpha_numbers(steps, mean)
    centred_gram(x if wide else x.mT, numbers[0], r)
    spread = norm_of_rows(r) if len(steps) > 1 else 0.0
    applied = polynomial(r, steps, numbers, workspace)
    error_after = applied.error(error, mean, spread)
    applied.apply(x, out, wide=wide)
    return error_after


def centred_gram(short: torch.Tensor, alpha: Number, out: torch.Tensor) -> None:
    """Writes X X^T - alpha I into `out` (..., side, side), where X is `short` (..., side, long)."""
    out.zero_().diagonal(dim1=-2, dim2=-1).sub_(_flatten(alpha))
    symmetric_gram(short, out, add=out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Polynomial:
    """The product gamma I + q of the polynomials of some steps. Multiplying X's short side by it is
    equivalent to these steps. Valid until its workspace is used again."""

    q: torch.Tensor
    """The product minus gamma I: (..., side, side), in a workspace."""
    gamma: Number
    before: Number
    """The norm of the sampled rows of the product of all polynomials except the last."""
    slope: float
    """The coefficient b of the last step."""
    last: tuple[torch.Tensor, Number | None, torch.Tensor, Number]
    """The tensors and numbers p, value, r and alpha of the last step; value is None if p includes its
    diagonal."""

    def error(self, error: Number, mean: Number, spread: Number) -> Number:
        """Estimates the error after the steps.

        Args:
            error: The estimated error before the steps.
            mean: The mean of the Gram matrix's eigenvalues.
            spread: `norm_of_rows` of R, whose rounding is estimated.
        """
        side = self.q.size(-1)
        rows = -(-side // _sample_distance(side))
        rounding = torch.finfo(self.q.dtype).eps / 2 / 3**0.5  # the standard deviation of a rounding, u / 3^0.5
        rms: Number = mean**0.5
        gram_error = spread * self.before * self.before * (abs(self.slope) * rounding / rows**1.5)
        total: Number = norm_of_rows(self.q, self.gamma) * (error + rms * rounding) * float(rows) ** -0.5 + gram_error
        return total

    def mean_square_part(self, rows: slice) -> Number:
        """Returns the contribution of `rows` to an estimate of the mean square of the singular values after
        the steps. The contributions of all rows add up to the estimate, which samples the rows of the last
        step's polynomial."""
        p, value, r, alpha = self.last
        side = p.size(-1)
        distance = _sample_distance(side)
        first_row = -(-rows.start // distance) * distance
        sample = p[..., first_row : rows.stop : distance, :]
        if value is not None:
            sample = sample.clone()
            sample[..., first_row::distance].diagonal(dim1=-2, dim2=-1).add_(_flatten(value))
        product = torch.matmul(sample, r).float() + alpha * sample.float()
        return _number(product.mul_(sample.float()).sum((-2, -1)) / -(-side // distance))

    def apply(self, x: torch.Tensor, out: torch.Tensor, *, wide: bool) -> None:
        """Writes (gamma I + q) x, multiplied from x's short side, into `out`. Must be called last, because it
        adds gamma to q in place. Only bf16, which cannot hold the sum precisely, keeps the two apart.
        """
        if x.dtype is torch.bfloat16:
            apply(x, self.q, self.gamma, out, wide=wide)
        else:
            self.q.diagonal(dim1=-2, dim2=-1).add_(_flatten(self.gamma))
            _matmul(*_sides(x, self.q, wide=wide), out)


def polynomial(r: torch.Tensor, steps: Sequence[Step], numbers: Sequence[Number], workspace: Workspace) -> Polynomial:
    """Multiplies out the polynomials of `steps` on a Gram matrix alpha I + `r`.

    Args:
        r: (..., side, side), overwritten.
        numbers: The numbers that follow from alpha (`alpha_numbers`).
    """
    s, q, m = (workspace.get(role, r.shape, r.dtype, r.device) for role in ("ns_poly", "ns_all", "ns_half"))
    before: Number = 0.0
    p = q
    for index, (_, _, c) in enumerate(steps):
        # A is alpha I + r; this step's polynomial of A is P = value I + p; the product of the earlier
        # polynomials is gamma I + q.
        alpha, factor, value, gamma, value_alpha = numbers[5 * index : 5 * index + 5]
        is_last = index + 1 == len(steps)
        p = s if index else q
        symmetric_product(r, r, p, add=torch.mul(r, factor, out=p), alpha=c)
        if len(steps) == 1:
            break
        diagonal = add_diagonal(p, value)
        if index:
            if is_last:
                before = norm_of_rows(q, gamma)
            symmetric_product(p, q, m, add=scaled_residual(p, diagonal, gamma, m))
            q, m = m, q
        if not is_last:
            symmetric_product(p, r, m, add=scaled_residual(p, diagonal, alpha, m))
            symmetric_product(p, m, r, add=scaled_residual(p, diagonal, value_alpha, r))
        if not index:
            q.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    last_value = numbers[-4] if len(steps) == 1 else None
    return Polynomial(q=q, gamma=numbers[-1], before=before, slope=steps[-1][1], last=(p, last_value, r, numbers[-6]))


def add_diagonal(p: torch.Tensor, value: Number) -> torch.Tensor:
    """Adds `value` to the diagonal of `p` (..., side, side) in place, which rounds the diagonal.

    Returns:
        The rounded diagonal minus `value`: (..., side).
    """
    diagonal = p.diagonal(dim1=-2, dim2=-1)
    return torch.sub(diagonal.add_(_flatten(value)), _flatten(value))


def scaled_residual(p: torch.Tensor, diagonal: torch.Tensor, factor: Number, out: torch.Tensor) -> torch.Tensor:
    """Writes factor (p - value I) into `out`, where `p` and `diagonal` are the results of `add_diagonal`."""
    torch.mul(p, factor, out=out)
    torch.mul(diagonal, _flatten(factor), out=out.diagonal(dim1=-2, dim2=-1))
    return out


def alpha_numbers(steps: Sequence[Step], mean: Number) -> Sequence[Number]:
    """Returns the numbers that `_numbers` computes, for the alpha whose interval contains `mean`. The first
    number is that alpha."""
    if not isinstance(mean, torch.Tensor):
        return _numbers(tuple(steps), ALPHAS[alpha_index(mean)])
    # The exponent and the first bits of the mantissa are the index; clamped, because NaN must also give a
    # valid index.
    indices = (mean.view(torch.int32) >> 20).sub_((127 + LOWEST) * PER_OCTAVE).clamp_(0, len(ALPHAS) - 1)
    rows = _table(tuple(steps), mean.device).index_select(0, indices.view(-1))
    return rows.view(*mean.shape, -1).unbind(-1)


def alpha_index(mean: float) -> int:
    """Returns the index of the alpha whose interval, an eighth of an octave, contains `mean`; the first index
    for a `mean` that is too small, the last for a `mean` that is too large or NaN."""
    if not mean < ALPHAS[-1]:
        return len(ALPHAS) - 1
    mantissa, exponent = math.frexp(max(mean, 2.0**LOWEST))
    return (exponent - 1 - LOWEST) * PER_OCTAVE + int((2 * mantissa - 1) * PER_OCTAVE)


@cache
def _table(steps: tuple[Step, ...], device: torch.device) -> torch.Tensor:
    """Returns `_numbers` for every alpha: (alphas, numbers), on the device."""
    return torch.tensor([_numbers(steps, alpha) for alpha in ALPHAS], device=device)


@cache
def _numbers(steps: tuple[Step, ...], alpha: float) -> tuple[float, ...]:
    """Returns the numbers that `polynomial` needs for a segment that starts at `alpha`. There are five for
    each step: alpha, the factor of r in p, the value of the step's polynomial at alpha, the product of the
    earlier steps' values, and value times alpha. The last number is the product of all values."""
    numbers: list[float] = []
    gamma = 1.0
    for a, b, c in steps:
        value = a + b * alpha + c * alpha * alpha
        numbers += (alpha, b + 2 * c * alpha, value, gamma, value * alpha)
        gamma, alpha = value * gamma, value * value * alpha
    return *numbers, gamma


def norm_of_rows(square: torch.Tensor, gamma: Number | None = None) -> Number:
    """Returns the Frobenius norm of at most `SAMPLES` evenly spaced rows of `square` (..., side, side), or,
    if `gamma` is given, of the same rows of gamma I + `square`."""
    distance = _sample_distance(square.size(-1))
    sample = square[..., ::distance, :]
    if gamma is not None:
        sample = sample.clone()
        sample[..., ::distance].diagonal(dim1=-2, dim2=-1).add_(_flatten(gamma))
    return _number(torch.linalg.vector_norm(sample, dim=(-2, -1), dtype=torch.float32))


def _sample_distance(side: int) -> int:
    """Returns the distance between consecutive sampled rows of a square."""
    return -(-side // SAMPLES)


def _number(values: torch.Tensor) -> Number:
    """Converts a tensor (...) with one number for each matrix of a batch to `Number`."""
    return float(values) if values.ndim == 0 and values.device.type == "cpu" else values[..., None, None]


def _flatten(number: Number) -> Number:
    """Reshapes a tensor (..., 1, 1) to (..., 1), so that it broadcasts over the diagonals of a batch."""
    return number.squeeze(-1) if isinstance(number, torch.Tensor) else number


def apply(x: torch.Tensor, q: torch.Tensor, gamma: Number, out: torch.Tensor, *, wide: bool) -> None:
    """Writes (gamma I + q) x, multiplied from x's short side, into `out`."""
    fused: Callable[..., torch.Tensor] = torch.addmm if x.ndim == 2 else torch.baddbmm
    # Not `beta=gamma`, because oneDNN would compile a kernel for every new gamma.
    fused(torch.mul(x, gamma, out=out), *_sides(x, q, wide=wide), out=out)


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the product `a @ b` into `out`. If `out` is fp32 and the operands are narrower, the product is
    not rounded to their dtype."""
    if out.dtype is a.dtype:
        torch.matmul(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # on CPUs torch.mm does not have out_dtype
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def blend(out: torch.Tensor, a: torch.Tensor, x: Number, b: torch.Tensor, y: Number) -> torch.Tensor:
    """Writes x a + y b into `out`."""
    torch.mul(a, x, out=out)
    return out.add_(b, alpha=y) if isinstance(y, float) else out.addcmul_(b, y)


def _sides(x: torch.Tensor, q: torch.Tensor, *, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the operands, in order, of the matmul of `q` with x's short side: (q, x) for a wide `x`, (x,
    q^T) for a tall one.

    q is symmetric up to rounding. The transpose keeps the factor of the last step outermost; without it the
    error of a 66 x 64 matrix in bf16 would be twice that of a 64 x 66 matrix.
    """
    return (q, x) if wide else (x, q.mT)


def mean_square(x: torch.Tensor, *, wide: bool | None = None) -> Number:
    """Estimates the mean square of the singular values from some rows or columns of `x`.

    Args:
        wide: True if the rows are the short side; None if the shape of `x` decides.
    """
    short = x if (x.size(-2) <= x.size(-1) if wide is None else wide) else x.mT
    sample = short[..., :: _sample_distance(short.size(-2)), :]
    return _number(torch.linalg.vector_norm(sample, dim=(-2, -1), dtype=torch.float32).square() / sample.size(-2))
