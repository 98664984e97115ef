"""The Gram form of Newton-Schulz (`gram_form`) of a matrix in fragments whose squares are cut by rows.

Every rank adds up its rows of all Gram matrices, makes its rows of each product, and has the others' gathered
where one needs the whole on its right. So nobody is alone with the squares, and all know the same. The norm
of the whole is known before. Gram matrices are rounded without their alphas before they travel, and again
where they are added up:
roundings being independent, what `gram_form` takes for one of size |R| is of size (|R|^2 + sum_r |R_r|^2)^0.5
here.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from .gram_form import (
    DOUBT,
    Number,
    Polynomial,
    Step,
    apply,
    blend,
    centred_gram,
    follows,
    mean_square,
    most,
    norm_of_rows,
    starting_norm,
    undoing,
)
from .matrix_optimizer import Workspace
from .muon_facts import segments
from .symmetric import plain

Shape = tuple[int, int]
"""Rows and columns of the whole matrix; its fragments have all of one of them."""
Sum = Callable[[torch.Tensor], object]
"""Adds up a tensor over all fragments, in place, for all of them alike."""
Wait = Callable[[], object]
"""Waits until what was begun is done; on a GPU the current stream waits, not the host."""
type Turns[Result] = Generator[Sequence[Wait], None, Result]
"""Goes on once all that it yields is waited for: another one may have its turn meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The means of a fragment's optimizer to work with the other fragments' at the same time: collectives,
    which all begin alike; their tensors are left alone until they are waited for. A square's rows are cut
    evenly among them."""

    place: int
    """The place among the fragments."""
    count: int
    total: Callable[[torch.Tensor], Wait]
    """Begins what `Sum` does."""
    swap: Callable[[torch.Tensor, torch.Tensor], Wait]
    """Sends the rows of this place of everyone's (m, m) into (count, m / count, m), in the fragments' order;
    contiguous."""
    gather: Callable[[torch.Tensor, torch.Tensor], Wait]
    """Gathers (m, m) of everyone's (m / count, m), which may be its own rows of it; contiguous."""
    workspace: Workspace | None = None
    """Scratch that keeps its content from turn to turn; None: the optimizer's."""

    def rows(self, side: int) -> slice:
        """Selects the rows of this place."""
        height = side // self.count
        return slice(self.place * height, (self.place + 1) * height)


def each_turn[Result](running: Turns[Result], within: Callable[[], AbstractContextManager[object]]) -> Turns[Result]:
    """Runs each turn of `running` within a context that other turns do not see."""
    while True:
        with within():
            try:
                waits = next(running)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield waits


def gram_by_rows(
    x: torch.Tensor, steps: Sequence[Step], ranks: Together, workspace: Workspace, *, wide: bool
) -> Turns[tuple[torch.Tensor, torch.Tensor]]:
    """Orthogonalise the whole that `x` is a fragment of, of Frobenius norm `starting_norm` or 0. Collective.

    Args:
        x: (rows, cols), contiguous; overwritten.
        steps: (a, b, c) of each step.
        wide: True if rows are the side that is not cut, a multiple of `ranks.count`.

    Returns:
        `x` or the workspace's twin of it; and whether to trust it: (), the same for all fragments.
    """
    twin = workspace.like("ns_twin", x)
    side, done = x.size(0 if wide else 1), 0
    rows = ranks.rows(side)
    norm = starting_norm(side, x.dtype)
    error: Number = 0.0
    left = torch.zeros(1, dtype=torch.float64, device=x.device)
    counts = segments(len(steps))
    for number, count in enumerate(counts):
        of_segment = undoing(norm, steps)[done : done + count]
        done += count
        r = workspace.get("ns_gram", (side, side), x.dtype, x.device)
        alpha = follows(of_segment[:1], mean_square(x, wide=wide))[0]
        centred_gram(x if wide else x.mT, alpha, r)
        sums = torch.cat([_told(alpha, x), _told(norm_of_rows(r), x).square()])
        parts = workspace.get("ns_half", (ranks.count, side // ranks.count, side), x.dtype, x.device)
        yield ranks.total(sums), ranks.swap(parts, r)
        mean = _number(sums[0]) if number else norm * norm / side
        known = follows(of_segment, mean)
        _add_up(r[rows], parts, rows.start, sums[0] - _told(known[0], x))
        yield (ranks.gather(r, r[rows]),)
        rounded = _number((sums[1] + _told(norm_of_rows(r), x).square()).sqrt())
        polynomial = yield from _polynomial(r, of_segment, known, ranks, workspace, twin)
        apply(x, polynomial.q, polynomial.gamma, twin, wide=wide)
        error = polynomial.error(error, mean, rounded)
        left = _told(polynomial.left_of(rows), x)
        x, twin = twin, x
    # One rank's doubt travels in the sum: were each to decide alone, some would wait for others in the wrong
    # exchange.
    left = torch.where(torch.as_tensor(error <= DOUBT, device=x.device).view(1), left, torch.inf)
    yield (ranks.total(left),)
    return x, (left <= most(steps) ** 2).view(())


def _add_up(rows: torch.Tensor, parts: torch.Tensor, first: int, more: torch.Tensor) -> None:
    """`rows`, from row `first` on, <- everyone's `parts`, added up in their order and in fp32; and `more` on
    the diagonal, before it is rounded."""
    diagonal = parts.diagonal(first, dim1=1, dim2=2).sum(0, dtype=torch.float32) + more.float()
    torch.sum(parts, 0, out=rows)
    rows.diagonal(first).copy_(diagonal)


def _polynomial(
    r: torch.Tensor,
    steps: Sequence[Step],
    known: Sequence[Number],
    ranks: Together,
    workspace: Workspace,
    free: torch.Tensor,
) -> Turns[Polynomial]:
    """Does what `gram_form.polynomial` does. Only this place's rows of the last p are there.

    A turn for each product, in such an order that most gathers are needed only behind the next one. `free` is
    scratch as large as a fragment: of a matrix no shorter than its square.
    """
    rows = ranks.rows(r.size(0))
    s, q = (workspace.get(role, r.shape, r.dtype, r.device) for role in ("ns_poly", "ns_all"))
    half = workspace.get("ns_half", r[rows].shape, r.dtype, r.device)
    beside = free.view(-1)[: half.numel()].view_as(half)
    before: Number = 0.0
    p = q
    late: tuple[Wait, ...] = ()
    for place, (_, _, c) in enumerate(steps):
        alpha, factor, value, turned, both = known[5 * place : 5 * place + 5]
        last = place + 1 == len(steps)
        p = s if place else q
        # What others are sent is read on meanwhile, and is not where p arrives.
        mine = p[rows] if last else beside
        _multiply(r[rows], r, torch.mul(r[rows], factor, out=mine), c)
        if len(steps) == 1:
            yield (ranks.gather(p, mine),)
            break
        gathered = () if last else (ranks.gather(p, mine),)
        yield late
        if not last:
            _multiply(mine, r, blend(half, mine, alpha, r[rows], value))
            yield gathered
            # The other way round than there: p is whole already.
            _multiply(half, p, blend(r[rows], half, value, mine, both))
            gathered = (ranks.gather(r, r[rows]),)
            yield () if place else gathered
        if place:
            if last:
                before = norm_of_rows(q, turned)
            _multiply(mine, q, blend(half, q[rows], value, mine, turned))
            late = (ranks.gather(q, half),)
            yield late if last else gathered
    return Polynomial(q=q, gamma=known[-1], before=before, slope=steps[-1][1], last=(p, known[-4], r, known[-6]))


def _multiply(rows: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, alpha: float = 1.0) -> None:
    """`out` <- itself + alpha rows whole, `whole` being symmetric."""
    plain(rows, whole.mT, out, out, 1.0, alpha)


def _told(value: Number, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, float):  # filled in: a copy to a device would wait for it
        return torch.full((1,), value, dtype=torch.float64, device=like.device)
    return value.double().view(1)


def _number(value: torch.Tensor) -> Number:
    return float(value) if value.device.type == "cpu" else value.float().view(1, 1)
