"""What the engine holds beside state and Megatron's buffers, by rank, in bytes: it is allocated once, and stays.

With tp > 1 a micro-group's gradients and weights travel in messages, two sets of each because two groups are in flight
(one where an owner has one group), each as large as the rank's largest group: fragments out and in, weights the other
way round. A host puts the whole gradients of one group together in fp32.

With tp = 1 nothing travels, and gradients are used where they lie, if they lie whole and in fp32. q, k and v do not,
for they are interleaved in their parameter, and nothing does where gradients are reduced in bf16. An owner's group is
then worked through in batches that need no more than `BATCH_BYTES`, or one matrix.

Besides, an all-to-all of gradients needs memory while backward runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.exchange import exchange
from canzona_cli.planner.memory import BATCH_BYTES, element_bytes, exchange_bytes
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import scratch_bytes

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Of one rank."""

    exchange: int = 0
    """Messages: gradients and weights, sent and received."""
    gradients: int = 0
    """Whole fp32 gradients of a group or batch."""
    reduction: int = 0
    """For two buckets that travel all-to-all; unlike the rest it comes and goes under the backward pass."""

    @property
    def lasting(self) -> int:
        return self.exchange + self.gradients


def step_buffers(config: RunConfig, plan: Plan, stage: int) -> list[StepBuffers]:
    """Of a stage's cells, index `owner * tp + host`."""
    mesh = plan.subject.layout
    by_owner: dict[int, list[tuple[int, ...]]] = {}
    for group in sorted(plan.groups, key=lambda group: group.index):
        if group.stage == stage:
            by_owner.setdefault(group.owner, []).append(group.matrices)
    reduction = _reduction(config, plan, stage)
    found: list[StepBuffers] = []
    for owner in range(mesh.owners):
        groups, held = by_owner.get(owner, []), reduction.get(owner, 0)
        if mesh.tp == 1:
            copied = [_copied(config, plan.matrices[index], 1, 0) for group in groups for index in group]
            found.append(StepBuffers(gradients=batch_bytes(copied), reduction=held))
            continue
        hosts = [[plan.assignment.cells[index].host for index in group] for group in groups]
        moved = [
            exchange([plan.matrices[index] for index in group], at, mesh.tp)
            for group, at in zip(groups, hosts, strict=True)
        ]
        sets = min(2, len(groups))
        weight, gradient = exchange_bytes(config)
        for host in range(mesh.tp):
            messages = gradient * _most(one.gradients.sent[host] for one in moved)
            messages += gradient * _most(one.gradients.received[host] for one in moved)
            messages += weight * _most(one.weights.sent[host] for one in moved)
            messages += weight * _most(one.weights.received[host] for one in moved)
            copied_most = _most(
                sum(
                    _copied(config, plan.matrices[index], mesh.tp, host)
                    for index, own in zip(group, at, strict=True)
                    if own == host
                )
                for group, at in zip(groups, hosts, strict=True)
            )
            found.append(StepBuffers(exchange=sets * messages, gradients=_FP32 * copied_most, reduction=held))
    return found


def batch_bytes(elements: Sequence[int]) -> int:
    """fp32 bytes for the largest batch: consecutive matrices within `BATCH_BYTES`, or one that alone exceeds it."""
    most = filled = 0
    for size in elements:
        filled = size if filled + size > BATCH_BYTES // _FP32 else filled + size
        most = max(most, filled)
    return _FP32 * most


def _copied(config: RunConfig, matrix: Matrix, tp: int, host: int) -> int:
    """Elements of a matrix's whole gradient where its host does not have it whole, contiguous and in fp32."""
    head = matrix.name.rpartition(".")[2].isdigit()
    interleaved = matrix.kind in ("q", "k", "v") and not head
    here = matrix.home == host or (matrix.home is None and (tp == 1 or matrix.replicated))
    return 0 if here and not interleaved and element_bytes(config)[1] == _FP32 else matrix.elements


def _reduction(config: RunConfig, plan: Plan, stage: int) -> Mapping[int, int]:
    """Of each rank that needs any: its two largest buckets, for one may arrive while the one before is added up."""
    _, grad = element_bytes(config)
    held: dict[int, list[int]] = {}
    for bucket in plan.buckets:
        if bucket.stage == stage:
            for owner, size in scratch_bytes(bucket, plan.subject.layout.owners, grad).items():
                held.setdefault(owner, []).append(size)
    return {owner: sum(sorted(sizes)[-2:]) for owner, sizes in held.items()}


def _most(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
