"""One matrix updated by several ranks, each on its own fragment: what an optimizer that can do so is asked for.

A matrix X, a square or cut along its long side, needs nothing whole but squares of its other side m: X X^T is the sum
of the fragments' own, and a polynomial of it multiplies every fragment from that side. So nothing as long as the matrix
travels, and the part that one rank does alone, on squares, is the smaller one.

Where whoever answers has nobody to share the work with, squares may be cut by rows instead (`Together`).

An optimizer with this form (`shared_muon`) does not know of ranks. Somebody (the engine) carries contributions of all
fragments to one place, in the fragments' order, and the answer back to all of them.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .workspace import Workspace

Shape = tuple[int, int]
"""Of the whole matrix: rows, columns. Of one of them its fragments have all."""
Sum = Callable[[torch.Tensor], object]
"""Adds up a tensor over all fragments, in place, for all of them alike."""
Wait = Callable[[], object]
"""Until what was begun is done; on a GPU the current stream waits, not the host."""
type Turns[Result] = Generator[Sequence[Wait], None, Result]
"""Goes on once all that it yields is waited for: another one may have its turn meanwhile."""

CONTRIBUTED, ANSWERED = 3, 3
"""fp32 numbers of a contribution, and of an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What travels of one matrix in one round."""

    square: torch.Tensor
    """(m, m), m being the side that is not cut; contiguous, of the type it travels in."""
    numbers: torch.Tensor
    """(CONTRIBUTED,) or (ANSWERED,), fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """What a fragment's optimizer is given to work with the other fragments' at the same time: collectives, which all
    begin alike; their tensors are left alone until they are waited for. A square's rows are cut evenly among them."""

    place: int
    """Among the fragments."""
    count: int
    total: Callable[[torch.Tensor], Wait]
    """As `Sum`."""
    swap: Callable[[torch.Tensor, torch.Tensor], Wait]
    """Of everyone's (m, m) the rows of this place into (count, m / count, m), in the fragments' order; contiguous."""
    gather: Callable[[torch.Tensor, torch.Tensor], Wait]
    """(m, m) of everyone's (m / count, m), which may be its own rows of it; contiguous."""
    workspace: Workspace | None = None
    """For what is kept from turn to turn; None: the optimizer's own."""

    def rows(self, side: int) -> slice:
        """Its own."""
        height = side // self.count
        return slice(self.place * height, (self.place + 1) * height)


@runtime_checkable
class SharedForm(Protocol):
    """An optimizer whose parameters may be fragments. Of each and in each step: `contribute`, `answer` at one place,
    `contribute` with the answer, and so on for `rounds`; then `finish`."""

    @property
    def rounds(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of a fragment's iterate, of the products and so of squares, on the device of the parameters."""
        ...

    def excluded(self, p: torch.Tensor) -> bool:
        """Whether `alone` makes the matrix' next update: its fragments contribute nothing, and nobody answers."""
        ...

    def contribute(
        self, p: torch.Tensor, x: torch.Tensor, out: Message, *, whole: Shape, answer: Message | None = None
    ) -> None:
        """What the fragment adds to the sum.

        Args:
            p: the fragment's weights, with its gradient in `p.grad`, which is only read; both fp32.
            x: of its shape, contiguous, of `dtype`: kept for this fragment alone until `finish`.
            out: overwritten.
            answer: to the last round's contributions; None in the first.
        """
        ...

    def answer(self, key: Hashable, contributions: Sequence[Message], out: Message, *, number: int) -> None:
        """Sum up contributions of all fragments, in their order, and work out what they are to do.

        Args:
            key: what names the matrix among those answered here.
            out: overwritten.
            number: of the round, from 0.
        """
        ...

    def finish(self, p: torch.Tensor, x: torch.Tensor, *, whole: Shape, answer: Message) -> bool:
        """Update the fragment, unless the answer is not to be trusted.

        Returns:
            False where `alone` is to be called, for all of the matrix's fragments alike.
        """
        ...

    def together(self, p: torch.Tensor, *, whole: Shape, ranks: Together) -> Turns[bool]:
        """Update the fragment without anybody who answers: what is worked out on squares is cut by rows. Arguments and
        what is returned as of `contribute` and `finish`; m is a multiple of `ranks.count`. The gradient is read in the
        first turn alone."""
        ...

    def alone(self, p: torch.Tensor, *, whole: Shape, total: Sum) -> None:
        """Update the fragment in the same step in another way, slow and safe; as `excluded` also some of the next."""
        ...


def each_turn[Result](running: Turns[Result], within: Callable[[], AbstractContextManager[object]]) -> Turns[Result]:
    """`running`, each of its turns within a context of its own, which another one's do not see."""
    while True:
        with within():
            try:
                waits = next(running)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield waits
