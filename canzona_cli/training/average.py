"""The exponential moving average of the weights (`train.ema`).

The average of a master is a part of its optimizer's state, so it lies where the master does, is saved and loaded with
the other state, and starts anew from the weight if that state is reset after an update that was not finite.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from canzona_cli.checkpoint.contents import AVERAGE
from canzona_cli.checkpoint.restore import publish_masters
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.engine.masters import UpdatedMatrix
from canzona_cli.core.megatron.holdings import MasterRange, finish_gathering, megatron_masters
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import gather


class WeightAverage:
    """The average of this rank's masters. It begins as the weights after the first step that it sees. All ranks have
    to call all methods."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._items: list[MasterRange | UpdatedMatrix] = [*megatron_masters(trainee.optimizer, trainee.chunks)]
        if isinstance(trainee.optimizer, CanzonaOptimizer):
            matrices = trainee.optimizer.matrices
            self._items += [*matrices.whole, *matrices.fragments]
        self.begun = any(gather(any(AVERAGE in item.state for item in self._items), bool))
        """True once there is an average: after a step, or in a checkpoint."""
        if self.begun:
            self._begin()

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights to the average. Call this after each step that changed them."""
        known = [item for item in self._items if AVERAGE in item.state]
        if known:
            add = get_ema_multi_avg_fn(self._trainee.setup.train.ema)  # type: ignore[no-untyped-call]
            add([_average(item) for item in known], [item.master.detach() for item in known], 0)
        self._begin()
        self.begun = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the average in place of the weights inside the block."""
        finish_gathering(self._trainee.chunks)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _begin(self) -> None:
        """Begins the averages that are missing."""
        for item in self._items:
            if AVERAGE not in item.state:
                optimizer = item.inner if isinstance(item, MasterRange) else item.optimizer
                optimizer.state[item.master][AVERAGE] = item.master.detach().clone()

    @torch.no_grad()
    def _swap(self) -> None:
        for item in self._items:
            weight = item.master.clone()
            item.master.copy_(_average(item))
            _average(item).copy_(weight)
        publish_masters(self._trainee)


def _average(item: MasterRange | UpdatedMatrix) -> torch.Tensor:
    average = item.state[AVERAGE]
    assert isinstance(average, torch.Tensor)
    return average
