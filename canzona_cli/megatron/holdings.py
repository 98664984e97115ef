"""The holdings of Megatron's own optimizers on this rank: masters, their state,
and which part of which parameter."""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from canzona_cli.megatron.matrix_buffers import global_parameters
from canzona_cli.megatron.owner_bucket_group import bucket_groups

_HOLDERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Consecutive elements of one parameter's fragment that this rank updates."""

    parameter: str
    """Its name in the whole model."""
    shape: tuple[int, ...]
    """The shape of the fragment."""
    start: int
    end: int
    """Elements [start, end) of the fragment, flat."""
    master: torch.Tensor
    """fp32, end - start elements; in fp32 training the parameter itself."""
    inner: torch.optim.Optimizer
    """The optimizer that updates it: `inner.state[master]` is its state."""
    group: MutableMapping[str, object]
    """The parameter group it is in."""

    @property
    def state(self) -> MutableMapping[str, object]:
        """Empty before the first step. Changes made to it count only if it was not."""
        state: MutableMapping[str, object] = self.inner.state.get(self.master, {})
        return state

    def replace_state(self, tensors: dict[str, torch.Tensor], step: float | None) -> None:
        """Make `tensors`, each as long as the master, its state after `step` steps.

        torch's AdamW counts steps for each parameter, the fused ones of Transformer Engine and apex for a
        group.
        """
        state: dict[str, torch.Tensor] = {key: value.view(self.master.shape) for key, value in tensors.items()}
        if step is not None:
            if isinstance(self.inner, torch.optim.Adam):  # AdamW is one
                state["step"] = torch.tensor(step, dtype=torch.float32)
            else:
                self.group["step"] = int(step)
        self.inner.state[self.master] = state

    @property
    def step(self) -> float | None:
        """Steps it has made; None if no optimizer counts them."""
        steps = self.state.get("step", self.group.get("step"))
        if isinstance(steps, torch.Tensor):
            return float(steps.item())
        return float(steps) if isinstance(steps, int | float) else None


def held(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> list[Held]:
    """Lists everything that Megatron's optimizers inside `optimizer` hold here;
    canzona's own are passed over."""
    names = {parameter: name for name, parameter in global_parameters(chunks)}
    return [item for leaf in _holders(optimizer) for item in _held_by(leaf, names)]


def masters_to_model(optimizer: MegatronOptimizer) -> None:
    """Round this rank's masters into the model's parameters (or into its part of their buffers)."""
    for leaf in _holders(optimizer):
        if not isinstance(leaf, FP32Optimizer):
            leaf._copy_main_params_to_model_params()


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gathers every rank's part of the parameter buffers on all data-parallel ranks, now. Collective."""
    for model in chunks:
        if model.ddp_config.use_distributed_optimizer:
            model.start_param_sync(force_sync=True)


def finish_gathering(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait for what the last optimizer step gathers, as the next forward pass would,
    and leave nothing for it to do."""
    if not chunks[0].ddp_config.overlap_param_gather:
        return  # the step itself has waited
    for group in reversed(bucket_groups(chunks)):
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def leaves(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yields the optimizers that a chained one consists of, down to the last."""
    if isinstance(optimizer, ChainedOptimizer):
        for child in optimizer.chained_optimizers:
            yield from leaves(child)
    else:
        yield optimizer


def _holders(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yields Megatron's own that hold masters here."""
    return (leaf for leaf in leaves(optimizer) if isinstance(leaf, _HOLDERS) and not leaf.is_stub_optimizer)


def _held_by(optimizer: MegatronOptimizer, names: dict[torch.nn.Parameter, str]) -> Iterator[Held]:
    inner = optimizer.optimizer
    group_of = {id(param): group for group in inner.param_groups for param in group["params"]}

    def item(param: torch.nn.Parameter, master: torch.Tensor, start: int) -> Held:
        return Held(
            parameter=names[param],
            shape=tuple(param.shape),
            start=start,
            end=start + master.numel(),
            master=master,
            inner=inner,
            group=group_of[id(master)],
        )

    if isinstance(optimizer, DistributedOptimizer):
        for param, (group, order) in optimizer.model_param_group_index_map.items():
            master = inner.param_groups[group]["params"][order]
            yield item(param, master, optimizer._get_model_param_range_map(param)["param"].start)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for params, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                yield item(param, master, 0)
        for params in optimizer.fp32_from_fp32_groups:
            for param in params:
                yield item(param, param, 0)
    else:
        for group in inner.param_groups:
            for param in group["params"]:
                yield item(param, param, 0)
