"""The layout of Megatron's gradient and parameter buffers according to a plan.

Matrices get separate buffers (Megatron separates parameters by the tag `is_managed_by_layer_wise_optimizer`),
laid out exactly as the plan's buckets. All other parameters are laid out by Megatron's
`DistributedOptimizer`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from canzona_cli.core.costs.padding import align
from canzona_cli.core.megatron.model import global_names, unwrap
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.geometry import stored_shape
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import Parameter, stage_parameters
from canzona_cli.core.planner.plan import Bucket, Plan, rank_buckets
from canzona_cli.core.setup import Mesh

TAG = "is_managed_by_layer_wise_optimizer"
"""The parameter attribute that Megatron uses to assign parameters to separate buffers."""


class PlanMismatch(RuntimeError):
    """The error for a plan that does not fit this rank's model, layout or buffers."""

    def __init__(self, *, key: str, planned: object, actual: object) -> None:
        self.key, self.planned, self.actual = key, planned, actual
        super().__init__(f"{key}: planned {planned}, found {actual}")


def check_model(chunks: Sequence[torch.nn.Module], plan: Plan, world: World) -> None:
    """Checks that this rank's part of the model has exactly the matrices that the plan places on it.

    Args:
        chunks: this rank's part of the model, in forward order.

    Raises:
        PlanMismatch: the model differs from the plan, or the plan's buckets of this rank are not valid. The
            error describes the first difference.
    """
    tp = plan.subject.layout.tp
    trainable = {name: param for name, param in global_parameters(chunks) if param.requires_grad}
    by_parameter: dict[str, list[Matrix]] = {}
    for matrix in plan.matrices:
        if matrix.stage == world.pp_rank and matrix.expert_rank in (None, world.expert_rank):
            by_parameter.setdefault(matrix.parameter, []).append(matrix)
    for name, matrices in by_parameter.items():
        planned = stored_shape(matrices, tp)
        if name not in trainable:
            raise PlanMismatch(key=name, planned=f"a fragment of shape {planned}", actual="no such trainable parameter")
        if tuple(trainable[name].shape) != planned:
            raise PlanMismatch(key=name, planned=planned, actual=tuple(trainable[name].shape))
    for name, param in trainable.items():
        parts = name.split(".")
        is_matrix = param.dim() == 2 and "layers" in parts and not {"router", "gate_weight"} & {*parts}
        if is_matrix and name not in by_parameter:
            raise PlanMismatch(key=name, planned="nothing", actual=f"a matrix of shape {tuple(param.shape)}")
    by_bucket = placements(plan, stage_buckets(plan, world.pp_rank, world.expert_rank))
    placed = [name for bucket in by_bucket for name in bucket]
    if sorted(placed) != sorted(by_parameter):
        differing = next(iter(sorted(set(placed) ^ set(by_parameter)) or sorted(placed)))
        raise PlanMismatch(
            key=differing,
            planned="in one bucket",
            actual=f"in {placed.count(differing)} buckets of stage {world.pp_rank}",
        )


def matrix_parameters(chunks: Sequence[torch.nn.Module], plan: Plan, world: World) -> dict[str, torch.nn.Parameter]:
    """Returns this rank's parameters that contain matrices, by their names in the plan, in the order of the
    buffers, bucket by bucket. `check_model` must have accepted the plan."""
    named = dict(global_parameters(chunks))
    buckets = stage_buckets(plan, world.pp_rank, world.expert_rank)
    return {name: named[name] for bucket in buckets for name in bucket.parameters}


def tag_matrices(chunks: Sequence[torch.nn.Module], matrices: Mapping[str, torch.nn.Parameter]) -> None:
    """Marks `matrices` for separate buffers, and all other trainable parameters for AdamW's buffers.

    Must be called before `DistributedDataParallel` is built. Megatron's own rule would also treat routers as
    matrices.
    """
    chosen = set(matrices.values())
    for _, param in global_parameters(chunks):
        if param.requires_grad:
            setattr(param, TAG, param in chosen)


def full_param_layout(
    model: torch.nn.Module,
    chunk: int,
    plan: Plan,
    world: World,
    ddp_config: DistributedDataParallelConfig,
    bucket_size: int | None,
) -> FullParamLayout:
    """Returns the position of every parameter of a model chunk in its buffer, for
    `DistributedDataParallel(full_param_layout=...)`.

    Args:
        model: the chunk, with its matrices already marked by `tag_matrices`.
        chunk: the index of the chunk on this rank.
        bucket_size: the bucket size, in elements, that `DistributedDataParallel` will use for the parameters
            that are not matrices; None for a single bucket.

    Raises:
        PlanMismatch: the plan is for other ranks or another model.
    """
    if world.layout.mesh != plan.subject.layout:
        raise PlanMismatch(key="parallel", planned=plan.subject.layout, actual=world.layout.mesh)
    names = {param: name for name, param in global_parameters([model])}
    shards = world.groups.dp_cp.size()
    trainable = [param for param in names if param.requires_grad]
    layouts = {}
    for key, (params, indices) in group_params_for_buffers(trainable, ddp_config.grad_reduce_in_fp32).items():
        if key.is_managed_by_layer_wise_optimizer:
            buckets = stage_buckets(plan, world.pp_rank, world.expert_rank, chunk)
            members = tuple(bucket for bucket in buckets if (bucket.expert_rank is not None) == key.is_expert_parallel)
            layouts[key] = _matrix_layout(params, indices, names, plan, members)
        else:
            layouts[key] = DistributedOptimizer._compute_per_buffer_param_layout(
                params, bucket_size, shards, ddp_config, indices
            )
    return FullParamLayout(layouts=layouts)


def placements(plan: Plan, buckets: Sequence[Bucket]) -> tuple[Mapping[str, tuple[int, int]], ...]:
    """Returns the elements [start, end) of each parameter within its bucket, by the parameter's name, for
    each of `buckets`, which all belong to one stage.

    Raises:
        PlanMismatch: ranges overlap, exceed the bucket, or do not contain the matrices that are assigned to
            their owner; or the bucket's size or padding is not valid.
    """
    if not buckets:
        return ()
    names = {name for bucket in buckets for name in bucket.parameters}
    matrices = [matrix for matrix in plan.matrices if matrix.parameter in names]
    parameters = stage_parameters(matrices, buckets[0].stage, plan.subject.layout.tp)
    by_name = {parameter.name: parameter for parameter in parameters}
    return tuple(_bucket_placements(bucket, plan, by_name) for bucket in buckets)


def stage_buckets(plan: Plan, stage: int, expert_rank: int = 0, chunk: int | None = None) -> tuple[Bucket, ...]:
    """Returns the buckets that the ranks of a stage with this expert-parallel rank have, in the order of
    their indices. Within each kind (experts, other matrices), this is the order in which gradients become
    ready.

    Args:
        chunk: the model chunk whose buckets are returned; None for all chunks.
    """
    on_rank = sorted(rank_buckets(plan.buckets, stage, expert_rank), key=lambda bucket: bucket.index)
    return tuple(bucket for bucket in on_rank if chunk in (None, plan.matrices[bucket.ranges[0].matrices[0]].chunk))


def global_parameters(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters of model chunks, wrapped or not, with their names in the whole model."""
    for model in chunks:
        yield from global_names(unwrap(model))


def _bucket_placements(bucket: Bucket, plan: Plan, parameters: Mapping[str, Parameter]) -> dict[str, tuple[int, int]]:
    """Returns the elements [start, end) of each parameter within the bucket, by the parameter's name.

    The positions are derived from the plan's ranges, which also determine the owners of gradients, so the two
    cannot disagree.

    Raises:
        PlanMismatch: ranges overlap, exceed the bucket, or do not contain the matrices that are assigned to
            their owner; or the bucket's size or padding is not valid.
    """
    mesh, cells = plan.subject.layout, plan.assignment.cells
    label = f"bucket {bucket.index} of stage {bucket.stage}"
    _check_ranges(bucket, mesh, label)
    range_of = {index: owned for owned in bucket.ranges for index in owned.matrices}
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for name in bucket.parameters:
        parameter = parameters.get(name)
        if parameter is None or parameter.matrices[0] not in range_of:
            raise PlanMismatch(key=name, planned=f"in {label}", actual="no range of its matrices there")
        # A parameter starts at the beginning of a range, or after the previous parameter at the next aligned
        # element.
        start = position = max(align(position), range_of[parameter.matrices[0]].start)
        for part in parameter.parts:
            end = position + part.elements
            for index in part.matrices:
                owner = cells[index].reducing_rank(plan.matrices[index], mesh)
                owned = range_of.get(index)
                if owned is None or owned.owner != owner or not owned.start <= position <= end <= owned.end:
                    raise PlanMismatch(
                        key=plan.matrices[index].name,
                        planned=f"[{position}, {end}) of {label} on owner {owner}",
                        actual="no range" if owned is None else f"[{owned.start}, {owned.end}) on owner {owned.owner}",
                    )
            position = end
        places[name] = (start, position)
    used = sum(end - start for start, end in places.values())
    planned = bucket.elements - bucket.padding
    if used != planned:
        raise PlanMismatch(key=label, planned=f"{planned} elements without padding", actual=f"{used} elements")
    return places


def _check_ranges(bucket: Bucket, mesh: Mesh, label: str) -> None:
    """Checks the sizes of a bucket and its ranges.

    Args:
        label: the bucket's name in the error.

    Raises:
        PlanMismatch: ranges overlap or exceed the bucket, or the bucket's size is not a valid multiple.
    """
    ends = [0, *(position for part in bucket.ranges for position in (part.start, part.end)), bucket.elements]
    if any(earlier > later for earlier, later in pairwise(ends)):
        raise PlanMismatch(key=label, planned=f"ordered ranges within {bucket.elements} elements", actual=ends[1:-1])
    owners = mesh.reducers(bucket.expert_rank)
    if bucket.elements % owners or bucket.elements % align(1):
        raise PlanMismatch(
            key=label, planned=f"a multiple of {owners} ranks and of {align(1)} elements", actual=bucket.elements
        )


def _matrix_layout(
    params: Sequence[torch.nn.Parameter],
    indices: list[int],
    names: Mapping[torch.nn.Parameter, str],
    plan: Plan,
    buckets: Sequence[Bucket],
) -> PerBufferParamLayout:
    """Returns the layout of a buffer of matrices: a model chunk's buckets of one kind, one after another."""
    matrices = {names[param]: param for param in params}
    location: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
    bounds: list[tuple[int, int]] = []
    unpadded_sizes: list[int] = []
    offset = 0
    for index, (bucket, places) in enumerate(zip(buckets, placements(plan, buckets), strict=True)):
        for name, (start, end) in places.items():
            location[matrices[name]] = (offset + start, offset + end, index)
        bounds.append((offset, offset + bucket.elements))
        unpadded_sizes.append(bucket.elements - bucket.padding)
        offset += bucket.elements
    # Megatron forms buckets while it iterates over the parameters in reverse, and each bucket must be
    # complete before the next one starts.
    backwards = list(reversed(params))
    for previous, param in pairwise(backwards):
        if location[param][2] not in (location[previous][2], location[previous][2] + 1):
            raise PlanMismatch(
                key=names[param],
                planned=f"bucket {location[param][2]}",
                actual=f"registered next to bucket {location[previous][2]}",
            )
    return PerBufferParamLayout(
        param_index_map={param: location[param] for param in backwards},
        bucket_indices=bounds,
        per_bucket_numel_unpadded=unpadded_sizes,
        param_indices=indices,
        num_optimizer_shards=plan.subject.layout.reducers(buckets[0].expert_rank),
    )
