"""The Gram form of Newton-Schulz (`gram_form`) for a matrix in fragments: each of the ranks that have
fragments computes some rows of every square.

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
from .newton_schulz import full_matmul

Shape = tuple[int, int]
"""The rows and columns of the whole matrix; fragments are cut along one of the two."""
Sum = Callable[[torch.Tensor], object]
"""A function that sums a tensor over all fragments, in place, with the same result for each."""
Wait = Callable[[], object]
"""A function that waits for a collective; on a GPU the current stream waits, not the host."""
type Turns[Result] = Generator[Sequence[Wait], None, Result]
"""A generator that yields the collectives that it has to wait for. Meanwhile the caller may run another
generator; it calls every `Wait` before it resumes this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentGroup:
    """The collectives that the ranks with fragments of a matrix use to update it together. Each rank computes
    an equal share of the rows of every square, such as the Gram matrix. All ranks start the same collectives
    in the same order, and do not touch the tensors until they have waited."""

    index: int
    """The index of this rank among the fragments."""
    count: int
    """The number of fragments."""
    total: Callable[[torch.Tensor], Wait]
    """The function that starts an in-place sum over all fragments."""
    swap: Callable[[torch.Tensor, torch.Tensor], Wait]
    """The function that starts an all-to-all of every rank's square (m, m). This rank receives its rows of
    each square: (count, m / count, m), in the order of fragments. Called with the output and the input, both
    contiguous."""
    gather: Callable[[torch.Tensor, torch.Tensor], Wait]
    """The function that starts an all-gather of every rank's rows (m / count, m) into (m, m). Called with the
    output and the input, both contiguous; the input may be this rank's rows of the output."""
    workspace: Workspace | None = None
    """The scratch, whose contents must not change between turns; None for the optimizer's."""

    def rows(self, side: int) -> slice:
        """Returns the rows of a square (side, side) that this rank computes."""
        height = side // self.count
        return slice(self.index * height, (self.index + 1) * height)


def run_turns[Result](turns: Turns[Result], context: Callable[[], AbstractContextManager[object]]) -> Turns[Result]:
    """Runs each turn of a generator inside a new context manager, which `context` creates."""
    while True:
        with context():
            try:
                waits = next(turns)
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
        The fragment of the result, which is `x` or the workspace's second x; and a flag, () bool, the same on
        all ranks: true if the result can be trusted.
    """
    twin = workspace.like("ns_twin", x)
    side, done = x.size(0 if wide else 1), 0
    rows = ranks.rows(side)
    norm = starting_norm(side, x.dtype)
    error: Number = 0.0
    mean_square_sum = torch.zeros(1, dtype=torch.float64, device=x.device)
    counts = segments(len(steps))
    for segment, count in enumerate(counts):
        segment_steps = unscaled_steps(norm, steps)[done : done + count]
        done += count
        r = workspace.get("ns_gram", (side, side), x.dtype, x.device)
        alpha = alpha_numbers(segment_steps[:1], mean_square(x, wide=wide))[0]
        centred_gram(x if wide else x.mT, alpha, r)
        sums = torch.cat([_as_tensor(alpha, x), _as_tensor(norm_of_rows(r), x).square()])
        parts = workspace.get("ns_half", (ranks.count, side // ranks.count, side), x.dtype, x.device)
        yield ranks.total(sums), ranks.swap(parts, r)
        mean = _number(sums[0]) if segment else norm * norm / side
        numbers = alpha_numbers(segment_steps, mean)
        _add_up(r[rows], parts, rows.start, sums[0] - _as_tensor(numbers[0], x))
        yield (ranks.gather(r, r[rows]),)
        rounded_norm = _number((sums[1] + _as_tensor(norm_of_rows(r), x).square()).sqrt())
        polynomial = yield from _polynomial(r, segment_steps, numbers, ranks, workspace, twin)
        apply(x, polynomial.q, polynomial.gamma, twin, wide=wide)
        error = polynomial.error(error, mean, rounded_norm)
        mean_square_sum = _as_tensor(polynomial.mean_square_part(rows), x)
        x, twin = twin, x
    # A rank that does not trust its result makes the sum infinite, so that all ranks make the same decision.
    # Otherwise they would wait for each other in different collectives.
    mean_square_sum = torch.where(torch.as_tensor(error <= DOUBT, device=x.device).view(1), mean_square_sum, torch.inf)
    yield (ranks.total(mean_square_sum),)
    return x, (mean_square_sum <= largest_rms(steps) ** 2).view(())


def _add_up(rows: torch.Tensor, parts: torch.Tensor, first_row: int, shift: torch.Tensor) -> None:
    """Writes the sum of all ranks' `parts` (count, height, side) into `rows` (height, side), the rows of a
    square from row `first_row` on. Sums are in the order of ranks and in fp32; `shift` is added to the
    square's diagonal before rounding."""
    diagonal = parts.diagonal(first_row, dim1=1, dim2=2).sum(0, dtype=torch.float32) + shift.float()
    torch.sum(parts, 0, out=rows)
    rows.diagonal(first_row).copy_(diagonal)


def _polynomial(
    r: torch.Tensor,
    steps: Sequence[Step],
    numbers: Sequence[Number],
    ranks: FragmentGroup,
    workspace: Workspace,
    scratch: torch.Tensor,
) -> Turns[Polynomial]:
    """Computes the same as `gram_form.polynomial`, except that the last step's p has only this rank's rows.

    Yields once for each matmul, in an order in which most gathers overlap with the next matmul.

    Args:
        scratch: A tensor of the fragment's size, overwritten; it has at least as many elements as this rank's
            rows of a square.
    """
    rows = ranks.rows(r.size(0))
    s, q = (workspace.get(role, r.shape, r.dtype, r.device) for role in ("ns_poly", "ns_all"))
    half = workspace.get("ns_half", r[rows].shape, r.dtype, r.device)
    scratch_rows = scratch.view(-1)[: half.numel()].view_as(half)
    before: Number = 0.0
    p = q
    pending: tuple[Wait, ...] = ()
    for index, (_, _, c) in enumerate(steps):
        alpha, factor, value, gamma, value_alpha = numbers[5 * index : 5 * index + 5]
        is_last = index + 1 == len(steps)
        p = s if index else q
        # Not a view of p, because these rows are still read while the gathered p is being received.
        p_rows = p[rows] if is_last else scratch_rows
        _multiply(r[rows], r, torch.mul(r[rows], factor, out=p_rows), c)
        if len(steps) == 1:
            yield (ranks.gather(p, p_rows),)
            break
        gathered = () if is_last else (ranks.gather(p, p_rows),)
        yield pending
        if not is_last:
            _multiply(p_rows, r, blend(half, p_rows, alpha, r[rows], value))
            yield gathered
            # The reverse order of `gram_form.polynomial`, because p has already been gathered.
            _multiply(half, p, blend(r[rows], half, value, p_rows, value_alpha))
            gathered = (ranks.gather(r, r[rows]),)
            yield () if index else gathered
        if index:
            if is_last:
                before = norm_of_rows(q, gamma)
            _multiply(p_rows, q, blend(half, q[rows], value, p_rows, gamma))
            pending = (ranks.gather(q, half),)
            yield pending if is_last else gathered
    return Polynomial(q=q, gamma=numbers[-1], before=before, slope=steps[-1][1], last=(p, numbers[-4], r, numbers[-6]))


def _multiply(rows: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, alpha: float = 1.0) -> None:
    """Adds alpha `rows` `whole` to `out` in place, where `whole` is symmetric."""
    full_matmul(rows, whole.mT, out, out, 1.0, alpha)


def _as_tensor(value: Number, like: torch.Tensor) -> torch.Tensor:
    """Converts a number to fp64 (1,) on the device of `like`."""
    if isinstance(value, float):  # `full` does not synchronise, whereas a copy from the host would
        return torch.full((1,), value, dtype=torch.float64, device=like.device)
    return value.double().view(1)


def _number(value: torch.Tensor) -> Number:
    return float(value) if value.device.type == "cpu" else value.float().view(1, 1)
