"""The number of steps in the part of one of Megatron's checkpoints that all ranks read."""

from collections.abc import Iterator, Mapping

import torch


def stored_step(common: object) -> float | None:
    """Returns the largest count of steps of parameter groups and of parameters; None if there is no count."""
    return max(_steps(common), default=None)


def _steps(tree: object) -> Iterator[float]:
    if isinstance(tree, Mapping):
        for count in (tree.get("step"), tree.get("common_step")):
            if isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1):
                yield float(count)
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _steps(value)
