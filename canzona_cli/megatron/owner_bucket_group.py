"""Matrix buckets whose gradients go to owners, and whose parameters come from them.

Everything around the collectives stays Megatron's: when gradients count as ready, which bucket is next, what is
waited for where. After a reduction only the owner's ranges of a bucket hold gradients; the rest of it is undefined.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from canzona_cli.errors import Problem, WorkerCrashed
from canzona_cli.megatron.in_flight import Waitable
from canzona_cli.megatron.matrix_buffers import TAG, PlanMismatch, global_parameters, stage_buckets
from canzona_cli.planner.plan import Bucket, Plan, Range
from canzona_cli.planner.reduction import in_order

Collective = Callable[[torch.Tensor, int, ProcessGroup], Work]
"""Of a tensor, to or from one rank of a group."""


class InFlight:
    """Collectives on their way: the handle that Megatron waits for and that phase timers watch."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)

    def wait(self) -> None:
        """Any number of times, from any stream."""
        for work in self.works:
            work.wait()


class OwnerBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """One bucket of matrices. `start_grad_sync` and `start_param_sync` are Megatron's but for what travels.

    `planned.reduction` says how gradients travel:
    - reduce: one reduction for each range, to its owner. What other ranks' parts are added up in is the backend's;
    - all_to_all: everybody sends every owner its ranges; owners add up in fp32, in the order of ranks. Two buckets'
      worth of received parts are alive at most;
    - even: Megatron's reduce-scatter and all-gather of equal shards.
    Parameters travel as one broadcast for each range, from its owner (even: as said).
    """

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
            names: of parameters in the whole model, to speak of them.
            group: the ranks among which owners are numbered: data and context parallel.

        Raises:
            PlanMismatch: the bucket has another size than planned, or even shards do not hold what their owners own.
        """
        _refuse_unsupported(ddp_config)
        super().__init__([bucket], ddp_config, group, group.size())
        self.planned = planned
        self.owned: tuple[Range, ...] = tuple(part for part in planned.ranges if part.owner == group.rank())
        """This rank's ranges of the bucket."""
        self._bucket, self._group, self._config, self._names = bucket, group, ddp_config, names
        self._in_order = in_order(planned)
        self._pieces = _pieces(planned, group.size(), adjoining=self._in_order)
        self._received: list[torch.Tensor] = []
        self._check_plan()

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if force_all_reduce or self._even:
            super().start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        earlier = self.previous_grad_reduce_bucket_group
        if earlier is not None and earlier.grad_reduce_handle is not None:
            earlier.finish_grad_sync(force_all_reduce=force_all_reduce)
        assert self.grad_reduce_handle is None, "this bucket's last reduction was never waited for"
        if self._config.check_for_nan_in_grad or self._config.check_for_large_grads:
            self.check_grads(self._config.check_for_nan_in_grad, self._config.check_for_large_grads)
        if self._bucket.gradient_scaling_factor != 1.0:
            with torch.no_grad():
                self._bucket.grad_data.mul_(self._bucket.gradient_scaling_factor)
        handle = InFlight(self._send_gradients())
        if self._config.overlap_grad_reduce:
            self.grad_reduce_handle = handle
        else:
            handle.wait()
            self._add_up()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self._require_gradients()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        self._add_up()

    def start_param_sync(self, force_sync: bool = False) -> None:
        if self._even:
            super().start_param_sync(force_sync=force_sync)
            return
        if force_sync and self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()
            return
        assert self.param_gather_handle is None, "this bucket's last gathering was never waited for"
        handle = InFlight(self._per_range(self._bucket.param_data, _broadcast))
        if self._config.overlap_param_gather and not force_sync:
            self.param_gather_handle = handle
        else:
            handle.wait()
            if force_sync and self._config.overlap_param_gather:
                self._post_param_sync()
        self.param_gather_dispatched = True

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        following = self.next_param_gather_bucket_group
        # Within a layer, parameters are registered in another order (proj, qkv) than they are needed (qkv, proj), so
        # at a bucket's border the following one may be first. Nothing is wrong then, whatever Megatron would warn of.
        early = following is not None and following.param_gather_dispatched
        super().finish_param_sync(skip_next_bucket_dispatch=skip_next_bucket_dispatch or early)

    def _require_gradients(self) -> None:
        """Megatron starts an overlapped reduction when the last gradient is there; it can only say that it did not."""
        if not self._config.overlap_grad_reduce or self.grad_reduce_finished or self.grad_reduce_handle is not None:
            return
        missing = [param for param in self._bucket.params_list if param not in self.per_param_grad_ready_counts]
        # Without any backward pass, somebody else filled the buffer; Megatron allows that in a first step.
        if not missing or (self.is_first_batch and len(missing) == len(self._bucket.params_list)):
            return
        names = ", ".join(self._names[param] for param in missing)
        raise WorkerCrashed(
            Problem(
                key="gradients",
                value="missing",
                reason=f"backward produced none for {names}, so the reduction of their bucket never started",
                fix="make every trainable parameter take part in every step, or use "
                "parallel.overlap_grad_reduce=false, which counts missing gradients as zero",
            )
        )

    @property
    def _even(self) -> bool:
        return self.planned.reduction == "even" and self._group.size() > 1

    def _send_gradients(self) -> list[Work]:
        if self._group.size() == 1:
            return []
        if self.planned.reduction == "reduce":
            return self._per_range(self._bucket.grad_data, _reduce)
        return self._exchange()

    def _per_range(self, data: torch.Tensor, collective: Collective) -> list[Work]:
        """One collective for each range."""
        if self._group.size() == 1:
            return []
        parts = [(data[part.start : part.end], part.owner) for part in self.planned.ranges]
        return _each(parts, self._group, collective)

    def _exchange(self) -> list[Work]:
        """Send every owner its ranges, and receive this rank's from everybody."""
        grads = self._bucket.grad_data
        pieces = [grads[piece] for owned in self._pieces for piece in owned]
        if self._in_order:
            sent = grads[self.planned.ranges[0].start : self.planned.ranges[-1].end]
        else:
            sent = torch.cat(pieces)
        shares = [sum(piece.stop - piece.start for piece in owned) for owned in self._pieces]
        own = shares[self._group.rank()]
        received = torch.empty(self._group.size() * own, dtype=grads.dtype, device=grads.device)
        work = torch.distributed.all_to_all_single(
            received, sent, [own] * self._group.size(), shares, group=self._group, async_op=True
        )
        assert work is not None
        # Kept until it is added up; what was packed must outlive its transfer, too.
        self._received = [received, sent]
        return [work]

    @torch.no_grad()
    def _add_up(self) -> None:
        """The rest of an all-to-all that has been waited for: this rank's ranges become the sum of what came in."""
        if not self._received:
            return
        parts = self._received[0].view(self._group.size(), -1)
        self._received = []
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        position = 0
        for piece in self._pieces[self._group.rank()]:
            size = piece.stop - piece.start
            self._bucket.grad_data[piece].copy_(total[position : position + size])
            position += size

    def _check_plan(self) -> None:
        planned, found = self.planned, self._bucket.grad_data.numel()
        where = f"bucket {planned.index} of stage {planned.stage}"
        if found != planned.elements:
            raise PlanMismatch(key=where, planned=f"{planned.elements} elements", found=f"{found} elements")
        shard = planned.elements // self._group.size()
        if self._even and any(
            not part.owner * shard <= part.start <= part.end <= (part.owner + 1) * shard for part in planned.ranges
        ):
            raise PlanMismatch(
                key=where, planned="reduced in even shards", found="ranges outside of their owner's shard"
            )


def install(ddp: DistributedDataParallel, plan: Plan, stage: int) -> None:
    """Replace the bucket groups of the plan's matrices by `OwnerBucketGroup`s, right after `ddp` was built.

    Parameters are gathered first layers first, one bucket of matrices after the other; AdamW's bucket groups follow
    nobody, so whoever steps AdamW starts them.

    Raises:
        PlanMismatch: `ddp` has other matrix buckets than the plan.
    """
    planned = stage_buckets(plan, stage)
    groups: list[_ParamAndGradBucketGroup] = ddp.bucket_groups
    places = [number for number, group in enumerate(groups) if _holds_matrices(group)]
    if len(places) != len(planned):
        raise PlanMismatch(key=f"buckets of stage {stage}", planned=len(planned), found=len(places))
    names = {param: name for name, param in global_parameters(ddp)}
    for bucket, place in zip(planned, places, strict=True):
        [built] = groups[place].buckets
        groups[place] = OwnerBucketGroup(
            built, bucket, ddp.ddp_config, groups[place].intra_distributed_optimizer_instance_group, names
        )
        for param in built.params_list:
            ddp.param_to_bucket_group[param] = groups[place]
    matrices = matrix_groups(ddp)
    for group in groups:
        group.next_param_gather_bucket_group = group.previous_grad_reduce_bucket_group = None
    if ddp.ddp_config.overlap_param_gather:
        for ahead, group in pairwise(matrices):
            group.next_param_gather_bucket_group = ahead
    if ddp.ddp_config.overlap_grad_reduce:
        # Waiting for the last but one keeps two buckets' received parts alive, and the newest under the backward pass.
        exchanging = [group for group in matrices if group.planned.reduction == "all_to_all"]
        for group, earlier in zip(exchanging[2:], exchanging, strict=False):
            group.previous_grad_reduce_bucket_group = earlier


def matrix_groups(ddp: DistributedDataParallel) -> list[OwnerBucketGroup]:
    """The plan's buckets, in the order their gradients become ready."""
    return [group for group in ddp.bucket_groups if isinstance(group, OwnerBucketGroup)]


def adamw_groups(ddp: DistributedDataParallel) -> list[_ParamAndGradBucketGroup]:
    """Megatron's own bucket groups, of what AdamW updates."""
    return [group for group in ddp.bucket_groups if not isinstance(group, OwnerBucketGroup)]


def nothing_to_gather(ddp: DistributedDataParallel) -> None:
    """After a step that changed no parameter: the next forward pass neither starts a gathering nor waits for one."""
    for group in ddp.bucket_groups:
        group.param_gather_dispatched = True


def _holds_matrices(group: _ParamAndGradBucketGroup) -> bool:
    return all(getattr(param, TAG, False) for bucket in group.buckets for param in bucket.params_list)


def reduce_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """A reduction of each tensor to its owner, as a bucket's are; what to wait for."""
    return _each(parts, group, _reduce)


def broadcast_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """A broadcast of each tensor from its owner, as a bucket's are; what to wait for."""
    return _each(parts, group, _broadcast)


def _each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup, collective: Collective) -> list[Work]:
    """Handed over together where the backend can, as NCCL: whether they are one launch is its own affair
    (`megatron.grouping`)."""
    device = parts[0][0].device
    if not group._get_backend(device).supports_coalescing:
        return [collective(data, owner, group) for data, owner in parts]
    with _coalescing_manager(group, device=device, async_ops=True) as launched:
        for data, owner in parts:
            collective(data, owner, group)
    return launched.works


def _reduce(data: torch.Tensor, owner: int, group: ProcessGroup) -> Work:
    work = torch.distributed.reduce(data, group=group, group_dst=owner, async_op=True)
    assert work is not None
    return work


def _broadcast(data: torch.Tensor, owner: int, group: ProcessGroup) -> Work:
    work = torch.distributed.broadcast(data, group=group, group_src=owner, async_op=True)
    assert work is not None
    return work


def _pieces(bucket: Bucket, owners: int, *, adjoining: bool) -> list[list[slice]]:
    """Each owner's slices of the bucket; `adjoining`, what alignment skips between them travels along."""
    ranges = bucket.ranges
    ends = [b.start for b in ranges[1:]] + [ranges[-1].end] if adjoining else [part.end for part in ranges]
    pieces: list[list[slice]] = [[] for _ in range(owners)]
    for part, end in zip(ranges, ends, strict=True):
        pieces[part.owner].append(slice(part.start, end))
    return pieces


def _refuse_unsupported(config: DistributedDataParallelConfig) -> None:
    """What of `_ParamAndGradBucketGroup.start_grad_sync` has no counterpart here; canzona never sets it."""
    assert config.use_distributed_optimizer, "parameters must be views of Megatron's buffer"
    assert config.num_distributed_optimizer_instances == 1
    assert not config.average_in_collective
    assert not config.reduce_scatter_with_fp32_accumulation
    assert not config.param_name_patterns_for_fp32_local_accumulation
    assert not config.reuse_grad_buf_for_mxfp8_param_ag
