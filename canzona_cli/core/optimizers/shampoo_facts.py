"""A description of Shampoo and SOAP that does not import torch: settings and costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from canzona_cli.core.fields import CURVE, OPTIMIZER, PLAN, Count, Share, Side

from .facts import Algorithm, Facts, OptimizerBase, Rule, Work

NEWTON_MATMULS = {2: (4, 5, 5, 5, 5, 5, 2), 1: (3, 4, 4, 4, 4, 4, 4, 2)}
"""The number of matmuls in each step of Newton's iteration for an inverse root, by the number of the matrix's
sides that have roots."""


@dataclass(frozen=True, kw_only=True)
class KroneckerConfig(OptimizerBase):
    """The settings of optimizers with Kronecker factors: Shampoo and SOAP. Their matrices have Adam's moments too."""

    adamw_beta1: Annotated[
        Share | None, "Decay of the first moment of parameters that are not matrices; null: beta1.", CURVE
    ] = None
    adamw_beta2: Annotated[
        Share | None, "Decay of the second moment of parameters that are not matrices; null: beta2.", CURVE
    ] = None
    shampoo_beta: Annotated[Share, "Decay of the Kronecker factors.", CURVE] = 0.95
    precondition_frequency: Annotated[
        Count,
        "Steps between refreshes of Shampoo's inverse roots, or of SOAP's eigenbases.",
        CURVE | PLAN,
    ] = 10
    max_preconditioner_dim: Annotated[
        Side,
        "A side longer than this is not preconditioned. In models with experts the default is the experts' width, and"
        " at least 1024, because every expert has separate factors.",
        CURVE | PLAN,
    ] = 8192
    stagger: Annotated[
        bool,
        "Compute refreshes, from the third on, in parts, one in each step of a period, so that no step is much longer"
        " than others; the result is used from the end of the period on, in Shampoo a little earlier. false: compute"
        " each refresh in one step.",
        CURVE | PLAN,
    ] = True

    @property
    def adamw_betas(self) -> tuple[float, float]:
        return (
            self.beta1 if self.adamw_beta1 is None else self.adamw_beta1,
            self.beta2 if self.adamw_beta2 is None else self.adamw_beta2,
        )


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(KroneckerConfig):
    """Shampoo on matrices, AdamW on the rest (Gupta et al. 2018)."""

    name: Annotated[Literal["shampoo"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class SoapConfig(KroneckerConfig):
    """SOAP on matrices, AdamW on the rest (Vyas et al. 2024)."""

    name: Annotated[Literal["soap"], "The optimizer.", OPTIMIZER | PLAN]


def _shampoo(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    """Counts Shampoo's work. Traffic per element of the matrix: 50 bytes for momentum, weight and casts; for the norm
    of Adam's update 8 + 12 for the second moment, 8 for its root, 8 for eps, 12 for the quotient and 4 for the norm; 4
    for the norm of Shampoo's update and 8 for scaling. Per element of a square: 12 bytes to average the packed factor
    and 12 to unpack the root, in 15 launches for each side."""
    sides = factored_sides(a, rows, cols)
    squares = sum(side * side for side in sides)
    step = Work(
        matmuls=tuple(_side_matmuls(rows, cols, sides, 1)),
        traffic=114 * rows * cols + 24 * squares,
        launches=16 + 15 * len(sides),
    )
    counts = NEWTON_MATMULS.get(len(sides), ())

    def root_work(side: int, part: int) -> Work:
        if a.roots == "eigh":
            eigh = Work(matmuls=((1, side, side, side),), eigh=(side,), traffic=40 * side * side, launches=20)
            return eigh if part == 0 else Work()
        matmul_counts = [count for n, count in enumerate(counts) if newton_part(n, len(counts), part_count(a)) == part]
        share = len(matmul_counts) / len(counts)
        # X and M of the iteration are packed and unpacked between parts.
        stored = a.spread and len(matmul_counts) > 0
        return Work(
            matmuls=((sum(matmul_counts), side, side, side),) if matmul_counts else (),
            traffic=(100 * share + 48 * stored) * side * side,
            launches=110 * share + 24 * stored,
        )

    return step, _refresh_parts(a, rows, cols, root_work)


def _soap(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    """Counts SOAP's work. Traffic per element of the matrix: 86 bytes for Adam in the eigenbasis and the
    weight. Per element of a square: 12 bytes to average the packed factor."""
    sides = factored_sides(a, rows, cols)
    squares = sum(side * side for side in sides)
    step = Work(
        matmuls=tuple(_side_matmuls(rows, cols, sides, 2)),
        traffic=86 * rows * cols + 12 * squares,
        launches=14 + 7 * len(sides),
    )

    def rotation_work(side: int) -> Work:
        other = rows * cols // side
        return Work(matmuls=((2, side, side, other),), traffic=8 * rows * cols + 16 * side * side, launches=9)

    def refresh_work(side: int, part: int) -> Work:
        panels = _orthonormal_work(a, side, part)
        return _total([panels, rotation_work(side)]) if part == part_count(a) - 1 else panels

    return step, _refresh_parts(a, rows, cols, refresh_work)


def _orthonormal_work(a: Algorithm, side: int, part: int) -> Work:
    """Counts the work of one part of a side's power iteration and QR: a panel of columns is projected twice
    on the earlier columns and orthonormalised."""
    start, end = panel(side, part, part_count(a))
    width = end - start
    projected = Work(
        matmuls=((2, start, side, width), (2, side, start, width)) if start and width else (),
        qr=((side, width),) if width else (),
        traffic=40 * side * width if start else 0,
        launches=12 if start else 0,
    )
    power = Work(matmuls=((1, side, side, side),), traffic=28 * side * side, launches=9)
    return projected if part else _total([power, projected])


def _refresh_parts(a: Algorithm, rows: int, cols: int, side_work: Callable[[int, int], Work]) -> tuple[Work, ...]:
    """Returns the refresh work of both sides together, for each step over which a refresh is spread.

    Args:
        side_work: A function that returns the work of one part, given the side's length and the part's index.
    """
    sides = factored_sides(a, rows, cols)
    steps = range(part_count(a)) if sides else ()
    return tuple(_total([side_work(side, step) for side in sides]) for step in steps)


def _total(works: Sequence[Work]) -> Work:
    return Work(
        matmuls=tuple(matmul for work in works for matmul in work.matmuls),
        qr=tuple(shape for work in works for shape in work.qr),
        eigh=tuple(side for work in works for side in work.eigh),
        traffic=sum(work.traffic for work in works),
        launches=sum(work.launches for work in works),
    )


def part_count(a: Algorithm) -> int:
    """Returns the number of steps over which a refresh is spread; 1 if it is computed in one step."""
    return a.refresh_period if a.spread else 1


def newton_part(step: int, steps: int, parts: int) -> int:
    """Returns the index of the part of a spread refresh in which a step of Newton's iteration is run."""
    return step * parts // steps


def panel(side: int, part: int, parts: int) -> tuple[int, int]:
    """Returns the range (start, end) of the columns that a part of a spread refresh orthonormalises."""
    return side * part // parts, side * (part + 1) // parts


def factored_sides(a: Algorithm, rows: int, cols: int) -> tuple[int, ...]:
    """Returns the lengths of the sides that have a factor."""
    return tuple(side for side in (rows, cols) if side <= a.max_preconditioner_dim)


def _side_matmuls(rows: int, cols: int, sides: tuple[int, ...], applied: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the matmuls of each side with a factor, as in `Work.matmuls`: G G^T or G^T G, and `applied`
    products of the side's square and a matrix of G's shape."""
    for side in sides:
        other = rows * cols // side
        yield 1, side, other, side
        yield applied, side, side, other


def packed_elements(side: int) -> int:
    """Returns the number of elements of a packed symmetric (side, side) matrix."""
    return side * (side + 1) // 2


FACTS = (
    Facts(
        settings=ShampooConfig,
        rule=Rule(work=_shampoo, fragment_bytes=24, moments=2, packed=2, begun_packed=2),
        update="shampoo:Shampoo",
    ),
    Facts(
        settings=SoapConfig,
        rule=Rule(work=_soap, fragment_bytes=24, moments=2, packed=1, squares=1, begun_squares=1),
        update="soap:SOAP",
    ),
)
