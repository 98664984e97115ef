"""Memory that tensors of one rank take from step to step."""

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.megatron.trainee import Trainee


def tensor_bytes(trainee: Trainee) -> int:
    """Of everything this rank keeps: buffers, masters, optimizer state, messages, scratch; each storage once."""
    optimizer = trainee.optimizer
    tensors = [tensor for buffer in trainee.model.buffers for tensor in (buffer.param_data, buffer.grad_data)]
    tensors += list(trainee.model.parameters())
    extra = 0
    for leaf in _leaves(optimizer):
        if isinstance(optimizer, CanzonaOptimizer) and leaf is optimizer.matrices:
            tensors += [master.detach() for master in leaf.masters.values()]
            states = [group.optimizer.state for group in leaf.groups if group.optimizer is not None]
            extra += leaf.exchange_bytes
        else:
            tensors += leaf.get_parameters()
            states = [leaf.optimizer.state]
        tensors += [value for state in states for entry in state.values() for value in entry.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return extra + sum(storages.values())


def _leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for child in chained for leaf in _leaves(child)]
