"""The names of optimizer state in Megatron's checkpoints, and the number of steps that a checkpoint stores.
This module does not import Megatron."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch

SHARDING: Final = "fully_reshardable"
"""The format of AdamW's state that does not depend on ranks (`metadata["distrib_optim_sharding_type"]`)."""
STATE: Final = "optimizer.state."
"""The prefix of the keys of masters and state. A field, such as `exp_avg`, and the key of the weight
follow."""
OURS: Final = "optimizer.canzona."
"""The prefix of the keys of state that only canzona's optimizers have."""
MUONS_MASTER: Final = "fp32_param"
"""The field of the masters of Megatron's Muon."""
ADAMWS_MASTER: Final = "param"
"""The field of the masters of Megatron's AdamW."""


def zero_moments(weights: Iterable[str]) -> str:
    """Returns the warning that AdamW starts without moments for parameters that Megatron's Muon updated as matrices.

    Args:
        weights: the keys of the parameters.
    """
    names = ", ".join(dict.fromkeys(weights))
    return f"AdamW's moments of {names} begin at zero: the checkpoint was saved by Muon, which updated them"


def stored_step(common: object) -> float | None:
    """Returns the largest step count of any parameter group or parameter; None if no step count is stored.

    Args:
        common: The part of a checkpoint that all ranks read, or only its optimizers.
    """
    return max(_steps(common), default=None)


def _steps(common: object) -> Iterator[float]:
    unread, read = [common], set[int]()
    while unread:
        tree = unread.pop()
        if id(tree) in read or not isinstance(tree, Mapping | list):
            continue
        read.add(id(tree))  # a list in a pickle may contain itself
        if isinstance(tree, Mapping):
            for count in (tree.get("step"), tree.get("common_step")):
                if isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1):
                    yield float(count)
        unread += tree.values() if isinstance(tree, Mapping) else tree
