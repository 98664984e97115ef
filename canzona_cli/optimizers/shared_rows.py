"""The Gram form of Newton-Schulz (`gram_form`) for a matrix in fragments: the ranks that have the fragments
share the work on the squares, which are cut by rows.

Every rank sums its rows of all ranks' Gram matrices and computes its rows of each matmul. The rows are
gathered where a matmul needs the whole square as its right operand, so all ranks get the same numbers. The
norm of the whole matrix is known beforehand.

Each rank's Gram matrix is rounded, without its alpha, before it is sent, and the sum is rounded again.
Roundings are independent, so where `gram_form` assumes a rounding error of size |R|, it is (|R|^2 + sum_r
|R_r|^2)^0.5 here.
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
    alpha_numbers,
    apply,
    blend,
    centred_gram,
    largest_rms,
    mean_square,
    norm_of_rows,
    starting_norm,
    unscaled_steps,
)
from .matrix_optimizer import Workspace
from .muon_facts import segments
from .symmetric import plain

Shape = tuple[int, int]
"""The rows and columns of the whole matrix; fragments are cut along one of the two."""
Sum = Callable[[torch.Tensor], object]
"""A function that sums a tensor over all fragments, in place, with the same result for each."""
Wait = Callable[[], object]
"""A function that waits for a collective; on a GPU the current stream waits, not the host."""
type Turns[Result] = Generator[Sequence[Wait], None, Result]
"""A generator that yields the collectives it has to wait for. The caller may run another generator meanwhile
and resumes this one after it has called every `Wait`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentGroup:
    """The collectives that the ranks with fragments of a matrix use to update it together. Each rank has an
    equal share of the rows of every square. All ranks start the same collectives in the same order, and do
    not touch the tensors until they have waited."""

    index: int
    """The index of this rank among the fragments."""
    count: int
    """The number of fragments."""
    total: Callable[[torch.Tensor], Wait]
    """The function that starts an in-place sum over all fragments."""
    swap: Callable[[torch.Tensor, torch.Tensor], Wait]
    """The function that starts an all-to-all of every rank's square (m, m), after which this rank has its
    rows of each square: (count, m / count, m), in the order of fragments. Called with the output and the
    input, both contiguous."""
    gather: Callable[[torch.Tensor, torch.Tensor], Wait]
    """The function that starts an all-gather of every rank's rows (m / count, m) into (m, m). Called with the
    output and the input, both contiguous; the input may be this rank's rows of the output."""
    workspace: Workspace | None = None
    """The scratch, which keeps its contents between turns; None: the optimizer's."""

    def rows(self, side: int) -> slice:
        """Returns the rows of a square (side, side) that this rank computes."""
        height = side // self.count
        return slice(self.index * height, (self.index + 1) * height)


def each_turn[Result](running: Turns[Result], within: Callable[[], AbstractContextManager[object]]) -> Turns[Result]:
    """Runs each turn of the generator `running` inside a new context from `within`."""
    while True:
        with within():
            try:
                waits = next(running)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield waits


def gram_by_rows(
    x: torch.Tensor, steps: Sequence[Step], ranks: FragmentGroup, workspace: Workspace, *, wide: bool
) -> Turns[tuple[torch.Tensor, torch.Tensor]]:
    """Orthogonalises a matrix of which `x` is a fragment. Collective.

    Args:
        x: The fragment (rows, cols), contiguous, overwritten. The whole matrix has the Frobenius norm
            `starting_norm` or 0.
        steps: (a, b, c) of each step.
        ranks: The collectives among the ranks that have fragments.
        workspace: Scratch for a second x and four squares of the short side.
        wide: True if the columns are cut; the rows are then the short side, a multiple of `ranks.count`.

    Yields:
        The collectives to wait for before the generator is resumed.

    Returns:
        The fragment of the result, which is `x` or the workspace's second x; and whether it can be trusted:
        () bool, the same on all ranks.
    """
    twin = workspace.like("ns_twin", x)
    side, done = x.size(0 if wide else 1), 0
    rows = ranks.rows(side)
    norm = starting_norm(side, x.dtype)
    error: Number = 0.0
    left = torch.zeros(1, dtype=torch.float64, device=x.device)
    counts = segments(len(steps))
    for segment, count in enumerate(counts):
        of_segment = unscaled_steps(norm, steps)[done : done + count]
        done += count
        r = workspace.get("ns_gram", (side, side), x.dtype, x.device)
        alpha = alpha_numbers(of_segment[:1], mean_square(x, wide=wide))[0]
        centred_gram(x if wide else x.mT, alpha, r)
        sums = torch.cat([_as_tensor(alpha, x), _as_tensor(norm_of_rows(r), x).square()])
        parts = workspace.get("ns_half", (ranks.count, side // ranks.count, side), x.dtype, x.device)
        yield ranks.total(sums), ranks.swap(parts, r)
        mean = _number(sums[0]) if segment else norm * norm / side
        numbers = alpha_numbers(of_segment, mean)
        _add_up(r[rows], parts, rows.start, sums[0] - _as_tensor(numbers[0], x))
        yield (ranks.gather(r, r[rows]),)
        rounded = _number((sums[1] + _as_tensor(norm_of_rows(r), x).square()).sqrt())
        polynomial = yield from _polynomial(r, of_segment, numbers, ranks, workspace, twin)
        apply(x, polynomial.q, polynomial.gamma, twin, wide=wide)
        error = polynomial.error(error, mean, rounded)
        left = _as_tensor(polynomial.left_of(rows), x)
        x, twin = twin, x
    # A rank that does not trust its result makes the sum infinite, so that all ranks make the same decision.
    # Otherwise they would wait for each other in different collectives.
    left = torch.where(torch.as_tensor(error <= DOUBT, device=x.device).view(1), left, torch.inf)
    yield (ranks.total(left),)
    return x, (left <= largest_rms(steps) ** 2).view(())


def _add_up(rows: torch.Tensor, parts: torch.Tensor, first: int, more: torch.Tensor) -> None:
    """Writes the sum of all ranks' `parts` (count, height, side) into `rows` (height, side), the rows of a
    square from row `first` on. Sums are in the order of ranks and in fp32; `more` is added to the diagonal
    before rounding."""
    diagonal = parts.diagonal(first, dim1=1, dim2=2).sum(0, dtype=torch.float32) + more.float()
    torch.sum(parts, 0, out=rows)
    rows.diagonal(first).copy_(diagonal)


def _polynomial(
    r: torch.Tensor,
    steps: Sequence[Step],
    numbers: Sequence[Number],
    ranks: FragmentGroup,
    workspace: Workspace,
    free: torch.Tensor,
) -> Turns[Polynomial]:
    """Computes the same as `gram_form.polynomial`, except that the last step's p has only this rank's rows.

    Yields once for each matmul, in an order in which most gathers overlap with the next matmul.

    Args:
        free: Scratch as large as the fragment, which has at least as many elements as this rank's rows of a
            square.
    """
    rows = ranks.rows(r.size(0))
    s, q = (workspace.get(role, r.shape, r.dtype, r.device) for role in ("ns_poly", "ns_all"))
    half = workspace.get("ns_half", r[rows].shape, r.dtype, r.device)
    own_rows = free.view(-1)[: half.numel()].view_as(half)
    before: Number = 0.0
    p = q
    late: tuple[Wait, ...] = ()
    for index, (_, _, c) in enumerate(steps):
        alpha, factor, value, gamma, value_alpha = numbers[5 * index : 5 * index + 5]
        last = index + 1 == len(steps)
        p = s if index else q
        # Not a view of p, because these rows are still read while the gathered p is being received.
        mine = p[rows] if last else own_rows
        _multiply(r[rows], r, torch.mul(r[rows], factor, out=mine), c)
        if len(steps) == 1:
            yield (ranks.gather(p, mine),)
            break
        gathered = () if last else (ranks.gather(p, mine),)
        yield late
        if not last:
            _multiply(mine, r, blend(half, mine, alpha, r[rows], value))
            yield gathered
            # The reverse order of `gram_form.polynomial`, because p has already been gathered.
            _multiply(half, p, blend(r[rows], half, value, mine, value_alpha))
            gathered = (ranks.gather(r, r[rows]),)
            yield () if index else gathered
        if index:
            if last:
                before = norm_of_rows(q, gamma)
            _multiply(mine, q, blend(half, q[rows], value, mine, gamma))
            late = (ranks.gather(q, half),)
            yield late if last else gathered
    return Polynomial(q=q, gamma=numbers[-1], before=before, slope=steps[-1][1], last=(p, numbers[-4], r, numbers[-6]))


def _multiply(rows: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, alpha: float = 1.0) -> None:
    """Adds alpha `rows` `whole` to `out` in place, where `whole` is symmetric."""
    plain(rows, whole.mT, out, out, 1.0, alpha)


def _as_tensor(value: Number, like: torch.Tensor) -> torch.Tensor:
    """Converts a number to fp64 (1,) on the device of `like`."""
    if isinstance(value, float):  # `full` does not synchronise, whereas a copy from the host would
        return torch.full((1,), value, dtype=torch.float64, device=like.device)
    return value.double().view(1)


def _number(value: torch.Tensor) -> Number:
    return float(value) if value.device.type == "cpu" else value.float().view(1, 1)
