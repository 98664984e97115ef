"""A model in a plan's buckets on real ranks, beside the same model whose gradients are simply all-reduced."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron import parallel
from canzona_cli.core.megatron.matrix_buffers import (
    global_parameters,
    placements,
    stage_buckets,
)
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.megatron.optimizer import wrap_data_parallel
from canzona_cli.core.megatron.owner_bucket_group import adamw_groups, matrix_groups
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan import Assignment, Plan, Range
from canzona_cli.core.planner.reduction import GATHERED
from canzona_cli.core.setup import Layout, Reduction
from tests.dist.jobs import SMALL

Named = dict[str, torch.Tensor]


@cache
def case(*overrides: str) -> tuple[RunConfig, Layout]:
    """`SMALL` under Muon and canzona; two micro-batches for two data-parallel ranks, as all ranks are unless told."""
    fixed = (
        *SMALL,
        "parallel.tp=1",
        "parallel.pp=1",
        "optimizer=muon",
        "engine.strategy=canzona",
        "train.precision=fp32",
    )
    return resolve(compose_run([*fixed, *overrides], training=False).config)


def planned(config: RunConfig, layout: Layout, reduction: Reduction | None = None) -> Plan:
    """The run's plan; with `reduction`, all of its buckets travel that way."""
    plan = make_plan(config.setup, layout)
    if reduction is None:
        return plan
    gathering = GATHERED[reduction]
    return replace(plan, buckets=tuple(replace(one, reduction=reduction, gathering=gathering) for one in plan.buckets))


def alternating(plan: Plan) -> Plan:
    """Every parameter of a bucket of the first stage a range of its own, owned by ranks 1, 0, 1, 0 and so on."""
    cells, buckets = list(plan.assignment.cells), []
    for bucket, places in zip(stage_buckets(plan, 0), placements(plan, stage_buckets(plan, 0)), strict=True):
        ranges = []
        for number, (name, (start, end)) in enumerate(places.items()):
            owner = (number + 1) % 2
            members = tuple(matrix.index for matrix in plan.matrices if matrix.parameter == name)
            ranges.append(Range(start=start, end=end, owner=owner, matrices=members))
            for index in members:
                cells[index] = replace(cells[index], owner=owner)
        buckets.append(replace(bucket, ranges=tuple(ranges)))
    return replace(plan, assignment=Assignment(cells=tuple(cells)), buckets=tuple(buckets))


def start(config: RunConfig, layout: Layout) -> World:
    logging.disable(logging.WARNING)
    return parallel.initialize(layout, "cpu", seed=config.train.seed)


def wrap(config: RunConfig, world: World, plan: Plan) -> DistributedDataParallel:
    """The model in the plan's buckets, matrices on `OwnerBucketGroup`s."""
    [ddp] = wrap_data_parallel(build_model(config.setup, world), config.setup, world, plan)
    return ddp


def wrap_plain(config: RunConfig, world: World) -> DistributedDataParallel:
    """The same model; `reference` all-reduces its gradients."""
    [model] = build_model(config.setup, world)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.train.grad_reduce_dtype == "fp32",
        overlap_grad_reduce=False,
        use_distributed_optimizer=False,
        bucket_size=config.parallel.bucket_elements,
        average_in_collective=False,
    )
    megatron = get_model_config(model)
    return DistributedDataParallel(config=megatron, ddp_config=ddp_config, module=model, pg_collection=world.groups)


def iterate(ddp: DistributedDataParallel, config: RunConfig, world: World, *, seed: int) -> None:
    """Forward and backward over all micro-batches; other tokens for every seed and data-parallel rank."""
    ddp.zero_grad_buffer()
    generator = torch.Generator().manual_seed(1000 * seed + world.dp_rank)
    layout, length = world.layout, config.train.seq_length
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=_tokens(generator, config.model.vocab_size, layout.micro_batch_size, length),
        model=[ddp],
        num_microbatches=layout.num_microbatches,
        seq_length=length,
        micro_batch_size=layout.micro_batch_size,
        forward_only=False,
    )


def _tokens(generator: torch.Generator, vocab_size: int, batch: int, length: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(vocab_size, (batch, length + 1), generator=generator)


def _forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> object:
    text = next(batches)
    positions = torch.arange(text.shape[1] - 1).expand(len(text), -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = losses.float().mean()
    return mean, mean.detach().clone()


@dataclass(frozen=True)
class Reference:
    """The gradients of every parameter as Megatron's all-reduce sums them, with bounds on the error of other sums."""

    reduced: Named
    exact: Named
    """Mean over data-parallel ranks in fp64; of a model on one TP rank and one stage."""
    magnitude: Named
    """The same of absolute values."""


def reference(plain: DistributedDataParallel, world: World) -> Reference:
    """Computes the reference after `iterate(plain, ...)`. Collective."""
    group = world.groups.dp_cp
    local = {name: main_grad(param).double() / group.size() for name, param in global_parameters([plain])}
    exact, magnitude = local, {name: grad.abs() for name, grad in local.items()}
    for grad in (*exact.values(), *magnitude.values()):
        torch.distributed.all_reduce(grad, group=group)
    finalize_model_grads([plain])
    reduced = {name: main_grad(param).clone() for name, param in global_parameters([plain])}
    return Reference(reduced, exact, magnitude)


def main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    grad = param.main_grad  # type: ignore[attr-defined]
    assert isinstance(grad, torch.Tensor)
    return grad


def owned_gradients(ddp: DistributedDataParallel) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Gradients this rank is responsible for: (parameter, slice of it flattened, values)."""
    names = {param: name for name, param in global_parameters([ddp])}
    for group in matrix_groups([ddp]):
        yield from _within(group.buckets[0], [(part.start, part.end) for part in group.owned], names)
    for other in adamw_groups([ddp]):
        ranks = other.intra_distributed_optimizer_instance_group
        for bucket in other.buckets:
            shard = bucket.grad_data.numel() // ranks.size()
            yield from _within(bucket, [(ranks.rank() * shard, (ranks.rank() + 1) * shard)], names)


def _within(
    bucket: object, ranges: list[tuple[int, int]], names: dict[torch.nn.Parameter, str]
) -> Iterator[tuple[str, slice, torch.Tensor]]:
    for param, (first, last) in bucket.param_to_index.items():  # type: ignore[attr-defined]
        for start, end in ranges:
            begin, stop = max(start, first) - first, min(end, last) - first
            if begin < stop:
                yield names[param], slice(begin, stop), main_grad(param).view(-1)[begin:stop]


def equal_on_all_replicas(ddp: DistributedDataParallel, world: World) -> bool:
    """Returns whether every data-parallel rank has bitwise the same parameters. Collective."""
    flat = torch.cat([param.detach().view(-1) for param in ddp.module.parameters()])
    copies = [torch.empty_like(flat) for _ in range(world.groups.dp_cp.size())]
    torch.distributed.all_gather(copies, flat, group=world.groups.dp_cp)
    return all(torch.equal(copy, flat) for copy in copies)
