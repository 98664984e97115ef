"""Runs of tensors of one shape that are evenly spaced in memory, so that one view covers all of them.

The weights of a layer's experts are such a run, and so are their gradients in Megatron's buffer. Gate and up
alternate there, so a view of all gates skips the ups between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch


def runs(*columns: Sequence[torch.Tensor | int]) -> Iterator[slice]:
    """Yields the range of indices of each run, in order. Within a run the tensors, or numbers, of every
    column are evenly spaced; each run is as long as possible, at least one index.

    Args:
        columns: Lists of tensors or of numbers, all of the same length.
    """
    start = 0
    gaps: list[int | None] = []
    for index in range(1, len(columns[0])):
        new_gaps = [_gap(column[index - 1], column[index]) for column in columns]
        if None in new_gaps or (index - start > 1 and new_gaps != gaps):
            yield slice(start, index)
            start = index
        gaps = new_gaps
    if columns[0]:
        yield slice(start, len(columns[0]))


def view_run(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensors of a run as one view: (count, *shape)."""
    first = run[0]
    gap = run[1].storage_offset() - first.storage_offset() if len(run) > 1 else 0
    return first.as_strided((len(run), *first.shape), (gap, *first.stride()))


def _gap(item: torch.Tensor | int, following: torch.Tensor | int) -> int | None:
    """Returns the distance from one number, or tensor, to the following one; for tensors in elements. None if
    the two cannot be in the same run."""
    if isinstance(item, int) or isinstance(following, int):
        return int(following - item) if following > item else None
    gap = int(following.storage_offset() - item.storage_offset())
    is_run = (
        gap > 0
        and item.shape == following.shape
        and item.stride() == following.stride()
        and item.dtype is following.dtype
        and item.untyped_storage()._cdata == following.untyped_storage()._cdata
    )
    return gap if is_run else None


@dataclass(frozen=True, slots=True)
class Run:
    """Matrices of one shape that an optimizer updates with the same operations: a single matrix, or several
    that are evenly spaced and whose gradients are too."""

    matrices: Sequence[torch.Tensor]
    """The parameters, which are the keys of the optimizer's state."""
    weights: torch.Tensor
    """The weights: (rows, cols) for one matrix, (count, rows, cols) for several."""
    gradients: torch.Tensor
    """The gradients, in the shape of `weights`."""

    @classmethod
    def from_matrix(cls, p: torch.Tensor) -> Self:
        """Returns a run that consists of a single matrix or fragment, which has a gradient."""
        assert p.grad is not None
        return cls([p], p, p.grad)

    @classmethod
    def from_matrices(cls, matrices: Sequence[torch.Tensor]) -> Iterator[Self]:
        """Yields the runs of `matrices`, which all have the same shape and a gradient."""
        gradients = [p.grad for p in matrices if p.grad is not None]
        for part in runs(matrices, gradients):
            members = matrices[part]
            if len(members) == 1:
                yield cls.from_matrix(members[0])
            else:
                yield cls(members, view_run(members), view_run(gradients[part]))
