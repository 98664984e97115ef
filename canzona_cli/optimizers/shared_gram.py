"""The Gram form of Newton-Schulz (`gram_form`) of a matrix in fragments: their Gram matrices added up, and answered.

A fragment X_r was divided by its own norm s_r (in fp16 by s_r / t: `gram_form`), as nobody knows the whole's yet; with
s the root of all s_r^2, the Gram matrix of the whole, divided by s, is the sum of (s_r / s)^2 X_r X_r^T. From the
second round on fragments are parts of one matrix already.

Error. Each X_r X_r^T = alpha_r I + R_r is rounded before it travels, and the sum is, in the products' type. Roundings
being independent, what `gram_form` takes for one of size |R| is of size (|R|^2 + sum_r (s_r / s)^4 |R_r|^2)^0.5 here.
In fp32 sums are in the fragments' order: the same from step to step, and another than in products of the whole.
"""

from collections.abc import Hashable, Sequence

import torch

from .gram_form import (
    DOUBT,
    Number,
    Step,
    centred_gram,
    follows,
    most,
    norm_of_rows,
    polynomial,
    segments,
    starting_norm,
    undoing,
)
from .shared import Message
from .workspace import Workspace


def contribute(short: torch.Tensor, mean: Number, steps: Sequence[Step], out: Message, workspace: Workspace) -> None:
    """`out` <- the fragment's Gram matrix, alpha off its diagonal; alpha as the first number, as the third the norm of
    what is left.

    Args:
        short: the fragment (side, long), its first side the whole's shorter one.
        mean: of the Gram matrix's eigenvalues.
        steps: (a, b, c) of each Newton-Schulz step.
    """
    square = out.square
    if square.dtype is not short.dtype:
        square = workspace.get("ns_gram", square.shape, short.dtype, short.device)
    alpha = follows(steps[:1], mean)[0]
    centred_gram(short, alpha, square)
    for place, value in ((0, alpha), (2, norm_of_rows(square))):
        out.numbers[place] = _scalar(value)
    if square is not out.square:
        out.square.copy_(square)


class Answers:
    """Works out what contributions come to.

    Args:
        steps: (a, b, c) of each Newton-Schulz step.
        dtype: of the products.
    """

    def __init__(self, steps: Sequence[Step], dtype: torch.dtype, workspace: Workspace) -> None:
        self._steps, self._dtype, self._workspace = steps, dtype, workspace
        self._errors: dict[Hashable, Number] = {}
        """By matrix: of the rounds so far."""

    def answer(self, key: Hashable, contributions: Sequence[Message], out: Message, number: int) -> None:
        """`out` <- q of the polynomial gamma I + q; and gamma, s (1 behind the first round), and 1 or 0 for whether to
        trust it, which is known behind the last."""
        counts = segments(len(self._steps))
        done, count = sum(counts[:number]), counts[number]
        side = out.square.size(0)
        start = starting_norm(side, self._dtype)
        steps = undoing(start, self._steps)[done : done + count]
        alphas, norms, sizes = torch.stack([told.numbers for told in contributions]).double().unbind(1)
        if number == 0:
            whole = torch.linalg.vector_norm(norms)
            shares = (norms / whole.clamp_min(1e-300)).square_()
            mean: Number = start * start / side
        else:
            whole, shares = norms.new_ones(()), torch.ones_like(norms)
            mean = _number(alphas.sum(), out.square)
        known = follows(steps, mean)
        total = self._sum(contributions, shares)
        if number:
            # Fragments took off what suits each of them.
            total.diagonal().add_(alphas.sum() - torch.as_tensor(known[0], device=total.device).squeeze())
        r = self._workspace.get("ns_gram", total.shape, self._dtype, total.device).copy_(total)
        rounded = torch.cat([shares * sizes, torch.as_tensor(norm_of_rows(r), device=r.device).double().view(1)])
        found = polynomial(r, steps, known, self._workspace)
        error = found.error(self._errors.pop(key, 0.0), mean, _number(torch.linalg.vector_norm(rounded), r))
        trusted: float | torch.Tensor = 1.0
        if number + 1 < len(counts):
            self._errors[key] = error
        else:
            trusted = torch.as_tensor(error <= DOUBT) & torch.as_tensor(found.left() <= most(self._steps) ** 2)
        out.square.copy_(found.q)
        for place, value in enumerate((found.gamma, whole, trusted)):
            out.numbers[place] = _scalar(value)

    def _sum(self, contributions: Sequence[Message], shares: torch.Tensor) -> torch.Tensor:
        """What is left of the Gram matrix without the fragments' alphas, in fp32."""
        like = contributions[0].square
        total = self._workspace.get("shared_sum", like.shape, torch.float32, like.device)
        for number, (told, share) in enumerate(zip(contributions, shares, strict=True)):
            if not number:
                torch.mul(told.square, share.float().view(1, 1), out=total)
            elif like.device.type == "cpu":
                total.add_(told.square, alpha=float(share))
            else:
                total.addcmul_(told.square, share.float().view(1, 1))
        return total


def _number(value: torch.Tensor, like: torch.Tensor) -> Number:
    return float(value) if like.device.type == "cpu" else value.float().view(1, 1)


def _scalar(value: float | torch.Tensor) -> float | torch.Tensor:
    return value if isinstance(value, float) else value.squeeze()
