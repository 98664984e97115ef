"""What an update of a matrix does, by its rule: products, factorisations, passes over memory, launches; and its FLOPs.

Adding an update rule is a function here and an entry in `RULES`; `planner.cost` says what it takes on a device.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from canzona_cli.config.schema import Form, UpdateName
from canzona_cli.planner.parts import Algorithm

GRAFTING_BYTES = {"none": 0, "sgd": 16, "adam": 64}
"""Bytes of memory traffic per element of Shampoo's grafting. Its update's norm 4 and the scaling 8; the gradient's norm
4; or Adam's second moment 8 + 12, its root 8, eps 8, the quotient 12 and the norm of that 4."""
GRAFTING_LAUNCHES = {"none": 0, "sgd": 3, "adam": 8}
"""Kernels of the same."""
NEWTON_PRODUCTS = {2: 31, 1: 29}
"""Products of an inverse root by Newton's iteration, by how many sides of a matrix have roots."""
MUON_AROUND = 14
"""Kernels of Muon around its iteration, for each matrix whether it is stacked or not."""
PROBE_ROWS = 32
"""Rows of a matrix from which the Gram form estimates what it lost in rounding (`optimizers.gram_form`)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one update does."""

    products: tuple[tuple[int, int, int, int], ...] = ()
    """Dense products: how many of (m, k) by (k, n)."""
    symmetric: tuple[tuple[int, int, int], ...] = ()
    """Those of (m, k) by (k, m) whose result is symmetric; a kernel that knows it needs half of it."""
    qr: tuple[int, ...] = ()
    """Sides of the squares whose Q is computed."""
    eigh: tuple[int, ...] = ()
    """Sides of the squares whose eigenvectors are computed."""
    elementwise: float = 0.0
    """FLOPs of elementwise kernels, counted for AdamW alone: next to matrix products they are negligible."""
    traffic: float = 0.0
    """Bytes elementwise kernels and copies move."""
    launches: float = 0
    iteration: "Work | None" = None
    """Newton-Schulz in the run's precision, beside products with factors in fp32."""

    @property
    def flops(self) -> float:
        """QR with explicit Q is 4/3 n^3 + 4/3 n^3, eigh with vectors 9 n^3 (Golub & Van Loan, 4th ed., 5.2 and 8.3)."""
        return (
            self.elementwise
            + self.product_flops
            + sum(8 / 3 * n**3 for n in self.qr)
            + sum(9.0 * n**3 for n in self.eigh)
        )

    @property
    def product_flops(self) -> float:
        """Of all products, symmetric ones in full."""
        beside = self.iteration.product_flops if self.iteration else 0.0
        return beside + sum(2.0 * count * m * k * n for count, m, k, n in self.products) + self._symmetric_flops

    @property
    def symmetric_flops(self) -> float:
        return self._symmetric_flops + (self.iteration.symmetric_flops if self.iteration else 0.0)

    @property
    def _symmetric_flops(self) -> float:
        return sum(2.0 * count * m * k * m for count, m, k in self.symmetric)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What plans know of an update rule."""

    work: Callable[[Algorithm, int, int], tuple[Work, Work]]
    """Of a (rows, cols) matrix: what every update does, and what one with a refresh does on top."""
    fragment_bytes: int
    """Memory traffic per element, besides writing the weight, of what an update of one matrix does on a fragment only:
    decay, weight and, with Newton-Schulz, momentum and scaling."""
    moments: int
    """State with an element for each of the weight, in fp32; another one for Shampoo's Adam grafting."""
    row_vectors: int = 0
    """State with an element for each row."""
    orthogonal: bool = False
    """Newton-Schulz iterations, with scratch for them."""
    shared: bool = False
    """It has a shared form (`planner.sharing`)."""
    packed: int = 0
    """Symmetric squares for each side that has a factor, kept by half."""
    squares: int = 0
    """Other squares for each such side."""
    vectors: int = 0
    """Vectors for each such side."""

    @property
    def preconditioned(self) -> bool:
        return self.packed > 0


@lru_cache(maxsize=4096)
def work(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """What every update of a (rows, cols) matrix does, and what one with a refresh does on top."""
    return RULES[a.name].work(a, rows, cols)


def flops(a: Algorithm, rows: int, cols: int) -> float:
    """FLOPs of one update of a (rows, cols) matrix, a multiply-add being two; refreshes spread over their period.

    With m = min(rows, cols), n = max(rows, cols), r = rows, c = cols:
    - muon, normuon, Newton-Schulz (Jordan et al. 2024), s steps: standard s (4 m^2 n + 2 m^3) for X X', A A and B
      X; Gram form, see `_gram`: 8 m^2 n + 28 m^3 for s = 5. The form auto is the cheaper by these;
    - shampoo: statistics and both roots applied 4 r^2 c + 4 r c^2; a refresh is per side an eigendecomposition and a
      product, 9 n^3 + 2 n^3, or the products of a Newton iteration, 62 n^3 (58 n^3 where only one side has a root);
    - soap: statistics, projection and its inverse 6 r^2 c + 6 r c^2; a refresh is per side a product that serves
      the estimated eigenvalues and the power iteration, and a QR, 2 n^3 + 8/3 n^3, and the first moment turned to the
      new bases 4 r^2 c + 4 r c^2;
    - kl-shampoo: statistics 2 r^2 c + 2 r c^2, whitening and turning 6 r^2 c + 6 r c^2 + 2 m^2 n; a
      refresh is per side a product and a QR, 2 n^3 + 8/3 n^3;
    - soap-muon: soap and muon;
    - adamw: 15 per element.
    A side longer than `max_preconditioner_dim` has none of the terms of its preconditioner.
    """
    return min(step.flops + refresh.flops / a.refresh_period for step, refresh in _works(a, rows, cols))


def _works(a: Algorithm, rows: int, cols: int) -> Iterator[tuple[Work, Work]]:
    """Of each form that it may have."""
    for form in get_args(Form) if a.form == "auto" else (a.form,):
        yield work(replace(a, form=form), rows, cols)


def _adamw(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    return Work(elementwise=15.0 * rows * cols), Work()


def _muon(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Newton-Schulz, and around it what a GPU does with each element on fp32 masters.

    Bytes per element: momentum 12, Nesterov 12, norm 4 and division 4 + w, decay 8, weight 8 + w, whether it is finite
    4, the copy of the weight for the model 4 + w. In Gram form decay and weight in one pass 12, as the last product is
    in fp32; those of a stack as they were, and leaving out what is not trusted 2 w.
    """
    iteration, w = _iteration(a, rows, cols), product_bytes(a)
    traffic = iteration.traffic + (40 + 2 * w + _moved(a)) * rows * cols
    launches = iteration.launches + MUON_AROUND + (2 if _in_one_pass(a) else 0)
    return replace(iteration, traffic=traffic, launches=launches), Work()


def _moved(a: Algorithm) -> int:
    """Bytes per element of Muon's decay and weight."""
    w = product_bytes(a)
    return 12 if _in_one_pass(a) else 16 + (3 if a.form == "gram" else 1) * w


def _in_one_pass(a: Algorithm) -> bool:
    """Whether decay and update are, of what the Gram form leaves in fp32."""
    return a.form == "gram" and a.stack is not True


def _normuon(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Muon's, and per element the norms of rows w bytes and their scaling w + 4, of what is in fp32 already 4 and 8;
    then decay and weight 20, in one pass 12."""
    muon, none = _muon(a, rows, cols)
    w = product_bytes(a)
    left_out = 2 * w if a.form == "gram" and a.stack is True else 0
    scaled = 12 if _in_one_pass(a) else 2 * w + 4
    traffic = muon.traffic + (scaled + (12 if a.form == "gram" else 20) + left_out - _moved(a)) * rows * cols
    return replace(muon, traffic=traffic, launches=muon.launches + 8), none


def product_bytes(a: Algorithm) -> int:
    """Bytes of an element in Newton-Schulz."""
    return 2 if a.precision == "bf16" else 4


def _iteration(a: Algorithm, rows: int, cols: int) -> Work:
    """Newton-Schulz alone. `addmm` first copies what it adds to."""
    assert a.form != "auto"
    m, n = sorted((rows, cols))
    steps, width = a.ns_steps, product_bytes(a)
    if a.form == "gram":
        return _gram(steps, m, n, width)
    return Work(
        products=((steps, m, m, n),),
        symmetric=((steps, m, n), (steps, m, m)),
        traffic=2 * width * steps * (m * n + m * m),
        launches=5 * steps,
    )


def _gram(steps: int, m: int, n: int, width: int) -> Work:
    """The Gram form: X X' and Q X once in each of its `segments`, in between polynomials of the Gram matrix R alone.

    Every step takes R R; all but a segment's first take Q P, all but its last P R P, for P the step's polynomial and Q
    the product of those so far. All are polynomials of one symmetric matrix, so they are symmetric themselves. With
    u = 2 m^3 and r = n / m, 5 steps in segments of 2 and 3 take (4 r + 14) u; the standard form 5 (2 r + 1) u.

    Squares are passed over as the products' type: zeros and the polynomials' other terms are written into what a
    product is added to (in bf16, on processors, X too). The probe takes norms of `PROBE_ROWS` rows, of Q, copied,
    around a segment's last step, of R and of X; what it makes of them takes launches of a single number each.
    """
    parts = segments(steps)
    squares = 4 * steps - 3 * len(parts)
    passes = sum(8 * k - 5 for k in parts)
    several = sum(k > 1 for k in parts)
    rows = min(m, PROBE_ROWS)
    probe = width * rows * ((3 * len(parts) + 4 * several) * m + len(parts) * n)
    return Work(
        products=((len(parts), m, m, n),),
        symmetric=((len(parts), m, n), (squares, m, m)),
        traffic=width * passes * m * m + probe,
        launches=sum(13 * k + 10 for k in parts) + 10 * several - 4,
    )


def segments(steps: int) -> tuple[int, ...]:
    """Newton-Schulz steps that the Gram form makes on one Gram matrix, before it makes the iterate and a new one: two,
    and three at the end of an odd number (why: `optimizers.gram_form`)."""
    return (2,) * (steps // 2 - 1) + (2 + steps % 2,) if steps > 1 else (1,)


def _shampoo(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Per element 50 bytes of momentum, weight and casts, and grafting; of squares 12 to average a packed statistic and
    12 to unpack a root, in 15 launches."""
    sides = factored_sides(a, rows, cols)
    squares = sum(side * side for side in sides)
    step = Work(
        products=tuple(_sided(rows, cols, sides, 1, 1)),
        traffic=(50 + GRAFTING_BYTES[a.grafting]) * rows * cols + 24 * squares,
        launches=8 + 15 * len(sides) + GRAFTING_LAUNCHES[a.grafting],
    )
    newton = a.roots == "newton"
    count = NEWTON_PRODUCTS[len(sides)] if newton and sides else 1
    refresh = Work(
        products=tuple((count, side, side, side) for side in sides),
        eigh=() if newton else sides,
        traffic=(100 if newton else 40) * squares,
        launches=(110 if newton else 20) * len(sides),
    )
    return step, refresh if sides else Work()


def _soap(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Per element 86 bytes of Adam in the eigenbasis and the weight; statistics as Shampoo."""
    sides = factored_sides(a, rows, cols)
    squares = sum(side * side for side in sides)
    step = Work(
        products=tuple(_sided(rows, cols, sides, 1, 2)),
        traffic=86 * rows * cols + 12 * squares,
        launches=14 + 7 * len(sides),
    )
    refresh = Work(
        products=(*((1, side, side, side) for side in sides), *_sided(rows, cols, sides, 0, 2)),
        qr=sides,
        traffic=8 * rows * cols * len(sides) + 44 * squares,
        launches=18 * len(sides),
    )
    return step, refresh if sides else Work()


def _soap_muon(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """SOAP's, and Newton-Schulz: per element norm 4, division 4 + w, the copy back w + 4 and scaling 8 bytes."""
    step, refresh = _soap(a, rows, cols)
    traffic = step.traffic + (20 + 2 * product_bytes(a)) * rows * cols
    return replace(step, traffic=traffic, launches=step.launches + 4, iteration=_iteration(a, rows, cols)), refresh


def _kl_shampoo(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Per element 42 bytes of momentum, weight and casts, 64 of whitening and eigenvalues; statistics as Shampoo."""
    sides = factored_sides(a, rows, cols)
    squares = sum(side * side for side in sides)
    m, n = sorted((rows, cols))
    both = ((1, m, m, n),) if len(sides) == 2 else ()
    step = Work(
        products=(*_sided(rows, cols, sides, 1, 3), *both),
        traffic=106 * rows * cols + 12 * squares,
        launches=14 + 18 * len(sides),
    )
    refresh = Work(
        products=tuple((1, side, side, side) for side in sides),
        qr=sides,
        traffic=24 * squares,
        launches=6 * len(sides),
    )
    return step, refresh if sides else Work()


def factored_sides(a: Algorithm, rows: int, cols: int) -> tuple[int, ...]:
    """Lengths of those sides that have a factor."""
    return tuple(side for side in (rows, cols) if side <= a.max_preconditioner_dim)


def _sided(
    rows: int, cols: int, sides: tuple[int, ...], statistics: int, applied: int
) -> Iterator[tuple[int, int, int, int]]:
    """Products of a preconditioned side: `statistics` times G G' or G' G, `applied` times the square and G."""
    for side in sides:
        other = rows * cols // side
        if statistics:
            yield statistics, side, other, side
        yield applied, side, side, other


RULES: Mapping[UpdateName, Rule] = {
    "adamw": Rule(work=_adamw, fragment_bytes=28, moments=2),
    "muon": Rule(work=_muon, fragment_bytes=64, moments=1, orthogonal=True, shared=True),
    "normuon": Rule(work=_normuon, fragment_bytes=76, moments=1, row_vectors=1, orthogonal=True),
    "shampoo": Rule(work=_shampoo, fragment_bytes=24, moments=1, packed=2),
    "kl-shampoo": Rule(work=_kl_shampoo, fragment_bytes=24, moments=1, packed=1, squares=1, vectors=1),
    "soap": Rule(work=_soap, fragment_bytes=24, moments=2, packed=1, squares=1),
    "soap-muon": Rule(work=_soap_muon, fragment_bytes=24, moments=2, packed=1, squares=1, orthogonal=True),
}
