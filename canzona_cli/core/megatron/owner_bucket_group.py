"""Buckets of matrices whose gradients are reduced to owners, and whose parameters are gathered from owners.

Only the collectives are replaced. Megatron still decides when gradients are ready, which bucket is next and
when to wait. After a reduction, a rank's bucket contains gradients only in the ranges that the rank owns; the
rest is undefined."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
from torch.distributed import ProcessGroup, Work

from canzona_cli.core.errors import Problem, Unsupported, WorkerCrashed, refuse
from canzona_cli.core.megatron.limits import BUCKETS, problems
from canzona_cli.core.megatron.matrix_buffers import TAG, PlanMismatch, global_parameters, stage_buckets
from canzona_cli.core.megatron.owner_collectives import gathering_method, reduce_each, reduction_method
from canzona_cli.core.megatron.parallel import World, Wrapped
from canzona_cli.core.megatron.timers import Waitable
from canzona_cli.core.planner.plan import Bucket, Plan, Range
from canzona_cli.core.planner.reduction import GATHERED_AHEAD


class PendingCollectives:
    """A handle for collectives in flight, which Megatron waits for and phase timers watch."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)

    def wait(self) -> None:
        """Makes the current stream, or the host on a device without streams, wait for all collectives. May be
        called repeatedly and from any stream."""
        for work in self.works:
            work.wait()


class OwnerBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """A bucket group with one bucket of matrices. Its methods differ from Megatron's in the collectives,
    which the plan chooses (`planned.reduction`, `planned.gathering`; see `owner_collectives`), and in the
    error for missing gradients."""

    grad_reduce_handle: Waitable | None
    param_gather_handle: Waitable | None

    def __init__(
        self,
        bucket: _ParamAndGradBucket,
        planned: Bucket,
        ddp_config: DistributedDataParallelConfig,
        group: ProcessGroup,
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        """
        Args:
            bucket: the bucket that Megatron built.
            planned: the plan's bucket.
            group: the ranks among which the bucket's owners are numbered: the data- and context-parallel
                ranks, or, for experts that are divided among ranks, the ranks with the same experts.
            names: the parameters' names in the whole model, for error messages.

        Raises:
            PlanMismatch: the bucket does not have the planned size.
            Unsupported: `ddp_config` has settings that the bucket group does not support.
        """
        refuse(problems(ddp_config, BUCKETS), Unsupported)
        super().__init__([bucket], ddp_config, group, group.size())
        self.planned = planned
        self.owned: tuple[Range, ...] = tuple(part for part in planned.ranges if part.owner == group.rank())
        """The ranges of the bucket that this rank owns."""
        self._bucket, self._group, self._config, self._names = bucket, group, ddp_config, names
        self.reducing, self.gathering = reduction_method(planned, group), gathering_method(planned, group)
        self.first_matrix = min(index for part in planned.ranges for index in part.matrices)
        """The plan's index of the bucket's first matrix: the one that the forward pass needs first and whose
        gradient is ready last."""
        self.all_groups: Sequence[_ParamAndGradBucketGroup] = (self,)
        """All bucket groups of the rank. With them, a bucket without gradients can be distinguished from a
        step without a backward pass."""
        if bucket.grad_data.numel() != planned.elements:
            raise PlanMismatch(
                key=f"bucket {planned.index} of stage {planned.stage}",
                planned=f"{planned.elements} elements",
                actual=f"{bucket.grad_data.numel()} elements",
            )

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if force_all_reduce:
            super().start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None, "the bucket's previous reduction was not waited for"
        if self._config.check_for_nan_in_grad or self._config.check_for_large_grads:
            self.check_grads(self._config.check_for_nan_in_grad, self._config.check_for_large_grads)
        # Gradients are summed on their way to owners, also if Megatron's own collectives average them.
        scale = self._bucket.gradient_scaling_factor / (self._group.size() if self._config.average_in_collective else 1)
        if scale != 1.0:
            with torch.no_grad():
                self._bucket.grad_data.mul_(scale)
        handle = PendingCollectives(self.reducing.start(self._bucket.grad_data))
        if self._config.overlap_grad_reduce:
            self.grad_reduce_handle = handle
        else:
            handle.wait()
            self.reducing.finish(self._bucket.grad_data)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self._require_gradients()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        self.reducing.finish(self._bucket.grad_data)

    def start_param_sync(self, force_sync: bool = False) -> None:
        if force_sync and self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()
            return
        assert self.param_gather_handle is None, "the bucket's previous gathering was not waited for"
        handle = PendingCollectives(self.gathering.start(self._bucket.param_data))
        if self._config.overlap_param_gather and not force_sync:
            self.param_gather_handle = handle
        else:
            handle.wait()
            self._post_param_sync()
        self.param_gather_dispatched = True

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        following = self.next_param_gather_bucket_group
        # Within a layer, the order in which parameters are registered (proj, qkv) is not the order in which
        # they are needed (qkv, proj). So if a layer is in two buckets, the next bucket may already have been
        # dispatched. This is harmless, so Megatron's warning is avoided.
        already_started = following is not None and following.param_gather_dispatched
        super().finish_param_sync(skip_next_bucket_dispatch=skip_next_bucket_dispatch or already_started)

    def _post_param_sync(self) -> None:
        """Completes a gathering that has been waited for, and then calls Megatron's method."""
        self.gathering.finish(self._bucket.param_data)
        super()._post_param_sync()

    def _require_gradients(self) -> None:
        """Checks that the bucket's overlapped reduction was started. Megatron starts it when the bucket's
        last gradient is ready. Megatron's own error would not name the missing gradients.

        Raises:
            WorkerCrashed: backward did not compute gradients for some parameters of the bucket.
        """
        if not self._config.overlap_grad_reduce or self.grad_reduce_finished or self.grad_reduce_handle is not None:
            return
        missing = [param for param in self._bucket.params_list if param not in self.per_param_grad_ready_counts]
        # If there was no backward pass, the buffers were filled in another way, which Megatron allows in the
        # first step.
        prefilled = self.is_first_batch and not any(group.per_param_grad_ready_counts for group in self.all_groups)
        if prefilled or not missing:
            return
        names = ", ".join(self._names[param] for param in missing)
        raise WorkerCrashed(
            Problem(
                key="gradients",
                value="missing",
                reason=f"backward did not compute gradients for {names}, so their bucket's reduction never started",
                fix="make every trainable parameter take part in every step, or set "
                "parallel.overlap_grad_reduce=false, which treats missing gradients as zero",
            )
        )


def install(chunks: Wrapped, plan: Plan, world: World) -> None:
    """Replaces the bucket groups of the plan's matrices by `OwnerBucketGroup`s. Must be called right after
    `chunks` were wrapped in `DistributedDataParallel`.

    With `overlap_param_gather`, parameters are gathered in `gathering_order`, `GATHERED_AHEAD` bucket groups
    at a time: each bucket group starts a later one when the forward pass has waited for it. The other bucket
    groups are started by the code that steps AdamW.

    Raises:
        PlanMismatch: The chunks' matrix buckets are not those of the plan.
        Unsupported: See `OwnerBucketGroup`.
    """
    planned = stage_buckets(plan, world.pp_rank, world.expert_rank)
    names = {param: name for name, param in global_parameters(chunks)}
    dense = [bucket for bucket in planned if bucket.expert_rank is None]
    experts = [bucket for bucket in planned if bucket.expert_rank is not None]
    _replace([(ddp, ddp.bucket_groups) for ddp in chunks], dense, world.owners, names)
    _replace([(ddp, ddp.expert_parallel_bucket_groups) for ddp in chunks], experts, world.expert_owners, names)
    for group in matrix_groups(chunks):
        group.all_groups = bucket_groups(chunks)
    for group in bucket_groups(chunks):
        group.next_param_gather_bucket_group = group.previous_grad_reduce_bucket_group = None
    if chunks[0].ddp_config.overlap_param_gather:
        order = gathering_order(chunks)
        for group, following in zip(order, order[GATHERED_AHEAD:], strict=False):
            group.next_param_gather_bucket_group = following


def _replace(
    built: Sequence[tuple[DistributedDataParallel, list[_ParamAndGradBucketGroup]]],
    planned: Sequence[Bucket],
    owners: ProcessGroup,
    names: Mapping[torch.nn.Parameter, str],
) -> None:
    """Replaces the bucket groups of matrices in Megatron's lists, one list for each model chunk in forward
    order.

    Args:
        planned: the plan's buckets that belong in the lists, in the order in which their gradients become
            ready.
        owners: the ranks among which the buckets' owners are numbered.
        names: the parameters' names in the whole model.
    """
    positions = [
        (ddp, groups, index)
        for ddp, groups in reversed(built)
        for index, group in enumerate(groups)
        if _holds_matrices(group)
    ]
    if len(positions) != len(planned):
        kind = "buckets of experts" if planned and planned[0].expert_rank is not None else "buckets"
        raise PlanMismatch(key=kind, planned=len(planned), actual=len(positions))
    for bucket, (ddp, groups, index) in zip(planned, positions, strict=True):
        [replaced] = groups[index].buckets
        groups[index] = OwnerBucketGroup(replaced, bucket, ddp.ddp_config, owners, names)
        for param in replaced.params_list:
            ddp.param_to_bucket_group[param] = groups[index]


def bucket_groups(chunks: Wrapped) -> list[_ParamAndGradBucketGroup]:
    """Returns all of this rank's bucket groups: for each model chunk, the groups in the order in which their
    gradients become ready, followed by the groups of experts that are divided among ranks."""
    return [group for ddp in reversed(chunks) for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)]


def matrix_groups(chunks: Wrapped) -> list[OwnerBucketGroup]:
    """Returns the bucket groups of the plan's matrices, in the order in which their gradients become
    ready."""
    groups = [group for group in bucket_groups(chunks) if isinstance(group, OwnerBucketGroup)]
    return sorted(groups, key=lambda group: group.first_matrix, reverse=True)


def adamw_groups(chunks: Wrapped) -> list[_ParamAndGradBucketGroup]:
    """Returns Megatron's own bucket groups, whose parameters AdamW updates, in the order in which their
    gradients become ready."""
    return [group for group in bucket_groups(chunks) if not isinstance(group, OwnerBucketGroup)]


def gathering_order(chunks: Wrapped) -> list[_ParamAndGradBucketGroup]:
    """Returns the bucket groups whose parameters are gathered after the matrix updates, in the order in which
    the forward pass needs them.

    AdamW's bucket groups of the first model chunk are not included, because their parameters are gathered
    while matrices are updated. AdamW's bucket groups of later chunks are included: they are small, so
    gathering them mainly costs latency.
    """
    first, *later = chunks
    order: list[_ParamAndGradBucketGroup] = matrix_groups([first])[::-1]
    for chunk in later:
        order += [*reversed(adamw_groups([chunk])), *reversed(matrix_groups([chunk]))]
    return order


def gathers_ahead(config: DistributedDataParallelConfig) -> bool:
    """Returns True if an optimizer step starts to gather the parameters that the next forward pass needs
    first. With `align_param_gather`, Megatron's schedule starts all gatherings instead."""
    return bool(config.overlap_param_gather and not config.align_param_gather)


def mark_gathered(chunks: Wrapped) -> None:
    """Marks all parameters as gathered after a step that did not change any of them, so that the next forward
    pass does not start or wait for a gathering."""
    for group in bucket_groups(chunks):
        group.param_gather_dispatched = True


def _holds_matrices(group: _ParamAndGradBucketGroup) -> bool:
    return all(getattr(param, TAG, False) for bucket in group.buckets for param in bucket.params_list)


REDUCTIONS = 16
"""The number of small reductions that `grouped_time_ratio` times."""
GROUPED = 0.75
"""The `grouped_time_ratio` below which reductions are considered grouped. If they run one after another, the
ratio is 1. In one launch, NCCL gives each small reduction a channel, and even the two channels of a single
network port take half the time."""
_AHEAD_BYTES = 64 << 20
"""The bytes of each all-reduce that keeps the device busy until the host has submitted all reductions; 0.2 ms
over NVLink."""
_AHEAD = 4
"""The number of all-reduces that keep the device busy."""
_REPEATS = 7


def find_contradiction(chunks: Wrapped, world: World, *, assumed: bool) -> str | None:
    """Measures whether the reductions of a bucket run as one NCCL group, and compares the result with
    `cluster.grouped_collectives`. Collective.

    The result depends on torch's backend and has to be measured: the same calls are one group in torch's
    legacy NCCL backend, but separate launches in the backend that torch 2.15 uses by default
    (`TORCH_DIST_USE_NCCL2`).

    Args:
        assumed: the value of `cluster.grouped_collectives` that the plan was made with.

    Returns:
        A description of how the measurement contradicts the plan's assumption; None if it does not, or if
        there is nothing to measure.
    """
    group, device = world.owners, world.device
    planned = (bucket.planned for bucket in matrix_groups(chunks))
    # This is measured even if the plan reduces no bucket by owner, because it may have avoided that on the
    # assumption that reductions are not grouped.
    has_several_ranges = any(len(bucket.ranges) > 1 for bucket in planned)
    if device.type != "cuda" or group.size() == 1 or not has_several_ranges:
        return None
    return describe_contradiction(grouped_time_ratio(group, device, device_seconds), assumed=assumed)


def describe_contradiction(ratio: float, *, assumed: bool) -> str | None:
    """Describes how `ratio`, a measured `grouped_time_ratio`, contradicts the value `assumed` of
    `cluster.grouped_collectives`; None if it does not."""
    if is_grouped(ratio) == assumed:
        return None
    measured = f"{REDUCTIONS} small reductions submitted together take {ratio:.0%} as long as one by one"
    if assumed:
        return (
            f"reductions of a bucket run one after another here ({measured}), but the plan prices them as one launch: "
            "plan with cluster.grouped_collectives=false, or set TORCH_DIST_USE_NCCL2=0 for torch's other backend"
        )
    return f"reductions of a bucket are grouped here ({measured}): plan with cluster.grouped_collectives=true"


def is_grouped(ratio: float) -> bool:
    """Returns True if `ratio`, as measured by `grouped_time_ratio`, shows that reductions submitted together
    run as one group."""
    return ratio < GROUPED


def grouped_time_ratio(
    group: ProcessGroup, device: torch.device, seconds: Callable[[Callable[[], None]], float]
) -> float:
    """Measures the time that `REDUCTIONS` small reductions to different owners take if they are submitted
    together, as a fraction of their time if they are submitted one by one. Returns the largest fraction of
    any rank. Collective.

    Args:
        seconds: a function that measures the time of an operation.
    """
    data = torch.zeros(REDUCTIONS, device=device)
    parts = [(data[index : index + 1], index % group.size()) for index in range(REDUCTIONS)]
    busy_data = torch.zeros(_AHEAD_BYTES // data.element_size(), device=device)

    def reduce(batches: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> None:
        for work in [work for batch in batches for work in reduce_each(batch, group)]:
            work.wait()

    def median_s(batches: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> float:
        reduce(batches)  # a warm-up, because the first call also creates communicators
        times_s = []
        for _ in range(_REPEATS):
            for _ in range(_AHEAD):
                torch.distributed.all_reduce(busy_data, group=group)
            times_s.append(seconds(lambda: reduce(batches)))
        return statistics.median(times_s)

    ratio = torch.full((), median_s([parts]) / median_s([[part] for part in parts]), device=device)
    torch.distributed.all_reduce(ratio, op=torch.distributed.ReduceOp.MAX, group=group)
    return float(ratio.item())


def device_seconds(operation: Callable[[], None]) -> float:
    """Returns the seconds that `operation` takes on the current stream, measured between two events. The host
    waits."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
