"""One matrix updated by several ranks, each on its own fragment: what an optimizer that can do so is asked for.

A matrix X, a square or cut along its long side, needs nothing whole but squares of its other side m: X X^T is the sum
of the fragments' own, and a polynomial of it multiplies every fragment from that side. So nothing as long as the matrix
travels.

Squares are cut by rows over the ranks. An optimizer with this form (`shared_muon`) does not know of ranks: the engine
gives it collectives (`Together`).
"""

from collections.abc import Callable, Generator, Sequence
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
    """An optimizer whose parameters may be fragments."""

    def excluded(self, p: torch.Tensor) -> bool:
        """Tells whether `alone` makes the matrix's next update."""
        ...

    def together(self, p: torch.Tensor, *, whole: Shape, ranks: Together) -> Turns[bool]:
        """Update the fragment, unless the result is not to be trusted.

        Args:
            p: the fragment's weights, with its gradient in `p.grad`, which is only read, in the first turn; both fp32.
            whole: its shorter side is a multiple of `ranks.count`.

        Returns:
            False where `alone` is to be called, for all of the matrix's fragments alike.
        """
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
