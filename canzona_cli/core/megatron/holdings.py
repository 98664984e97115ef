"""The fp32 masters and optimizer state that Megatron's own optimizers hold on this rank, each with the part
of a parameter that it belongs to."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.owner_bucket_group import bucket_groups
from canzona_cli.core.megatron.parallel import Wrapped

_HOLDERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


@dataclass(frozen=True, kw_only=True)
class MasterRange:
    """The master and state that this rank has for a range of consecutive elements of a parameter's
    fragment."""

    parameter: str
    """The parameter's name in the whole model."""
    shape: tuple[int, ...]
    """The shape of the fragment."""
    start: int
    end: int
    """The end of the range: elements [start, end) of the flattened fragment."""
    master: torch.Tensor
    """The fp32 weights, of end - start elements; in fp32 training the parameter itself, or a view of it."""
    inner: torch.optim.Optimizer
    """The optimizer that updates the master; `inner.state[master]` is its state."""
    group: MutableMapping[str, object]
    """The parameter group of the master."""

    @property
    def state(self) -> MutableMapping[str, object]:
        """The optimizer's state for the master. Before the first step this is a new empty dict, and changes
        to it have no effect."""
        state: MutableMapping[str, object] = self.inner.state.get(self.master, {})
        return state

    def replace_state(self, tensors: dict[str, torch.Tensor], step: float | None) -> None:
        """Replaces the state of the master by `tensors`, each of which has as many elements as the master,
        and sets the step count to `step` unless it is None.

        torch's AdamW counts steps for each parameter; the fused versions of Transformer Engine and APEX count
        them for a parameter group.
        """
        state: dict[str, torch.Tensor] = {key: value.view(self.master.shape) for key, value in tensors.items()}
        if step is not None:
            if isinstance(self.inner, torch.optim.Adam):  # AdamW is a subclass
                state["step"] = torch.tensor(step, dtype=torch.float32)
            else:
                self.group["step"] = int(step)
        self.inner.state[self.master] = state

    @property
    def step(self) -> float | None:
        """The number of steps that have updated the master; None if its optimizer does not count them."""
        steps = self.state.get("step", self.group.get("step"))
        if isinstance(steps, torch.Tensor):
            return float(steps.item())
        return float(steps) if isinstance(steps, int | float) else None


def megatron_masters(optimizer: MegatronOptimizer, chunks: Wrapped) -> list[MasterRange]:
    """Returns the masters, with their state, that Megatron's own optimizers within `optimizer` have on this
    rank. canzona's optimizers are skipped."""
    names = {parameter: name for name, parameter in global_parameters(chunks)}
    return [master for leaf in _holders(optimizer) for master in _masters_of(leaf, names)]


def copy_masters_to_model(optimizer: MegatronOptimizer) -> None:
    """Writes the rounded masters of Megatron's own optimizers to the model's parameters, or to this rank's
    part of the parameter buffers."""
    for leaf in _holders(optimizer):
        if not isinstance(leaf, FP32Optimizer):
            leaf._copy_main_params_to_model_params()


def gather_parameters(chunks: Wrapped) -> None:
    """Gathers every rank's part of the parameter buffers on all data-parallel ranks, and waits for the
    result. Collective."""
    for model in chunks:
        if model.ddp_config.use_distributed_optimizer:
            model.start_param_sync(force_sync=True)


def finish_gathering(chunks: Wrapped) -> None:
    """Completes the gathering of parameters after an optimizer step: starts what the step has not started,
    and waits. Without this call, the next forward pass would do so."""
    if not chunks[0].ddp_config.overlap_param_gather:
        return  # the step has already waited
    for group in reversed(bucket_groups(chunks)):
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def leaves(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yields the optimizers that a chained optimizer consists of, recursively; for an optimizer that is not
    chained, only the optimizer itself."""
    if isinstance(optimizer, ChainedOptimizer):
        for child in optimizer.chained_optimizers:
            yield from leaves(child)
    else:
        yield optimizer


def _holders(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yields Megatron's own optimizers that have masters on this rank."""
    return (leaf for leaf in leaves(optimizer) if isinstance(leaf, _HOLDERS) and not leaf.is_stub_optimizer)


def _masters_of(optimizer: MegatronOptimizer, names: dict[torch.nn.Parameter, str]) -> Iterator[MasterRange]:
    """Yields the masters of one optimizer.

    Args:
        names: the parameters' names in the whole model.
    """
    inner = optimizer.optimizer
    group_of = {id(param): group for group in inner.param_groups for param in group["params"]}

    def master_range(param: torch.nn.Parameter, master: torch.Tensor, start: int) -> MasterRange:
        return MasterRange(
            parameter=names[param],
            shape=tuple(param.shape),
            start=start,
            end=start + master.numel(),
            master=master,
            inner=inner,
            group=group_of[id(master)],
        )

    if isinstance(optimizer, DistributedOptimizer):
        for param, (group_index, index) in optimizer.model_param_group_index_map.items():
            master = inner.param_groups[group_index]["params"][index]
            yield master_range(param, master, optimizer._get_model_param_range_map(param)["param"].start)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for params, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                yield master_range(param, master, 0)
        for params in optimizer.fp32_from_fp32_groups:
            for param in params:
                yield master_range(param, param, 0)
    else:
        for group in inner.param_groups:
            for param in group["params"]:
                yield master_range(param, param, 0)
