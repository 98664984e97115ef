"""What the engine holds in the course of a step beside state and Megatron's buffers: by rank, in bytes.

With tp > 1 a micro-group's gradients and weights travel in buffers of their own, two sets of each because two groups
are in flight (one where an owner has one group), each as large as the rank's largest group. A host turns the whole
gradients of a group into fp32, and copies the group's masters first, so that it can undo an update that is not finite.

With tp = 1 nothing travels, and whole fp32 gradients are updated from where they lie. Those that are not there need a
place: q, k and v, interleaved in their parameter, and everything where gradients are reduced in bf16. An owner's group
is worked through in batches, so that neither they nor the copies of masters take more than `BATCH_BYTES`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.planner.memory import BATCH_BYTES, element_bytes, exchange_bytes
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import scratch_bytes
from canzona_cli.planner.types import Matrix

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Of one rank."""

    exchange: int = 0
    """Sent and received fragments and whole matrices, gradients and weights."""
    gradients: int = 0
    """Whole fp32 gradients of a group."""
    guard: int = 0
    """Masters of a group before its update."""
    reduction: int = 0
    """All ranks' copies of its shares of two buckets, while backward runs."""

    @property
    def update(self) -> int:
        """Alive together, in the optimizer step."""
        return self.exchange + self.gradients + self.guard


def step_buffers(config: RunConfig, plan: Plan, stage: int) -> list[StepBuffers]:
    """Of a stage's cells, index `owner * tp + host`."""
    mesh = plan.subject.layout
    by_owner: dict[int, list[tuple[int, ...]]] = {}
    for group in plan.groups:
        if group.stage == stage:
            by_owner.setdefault(group.owner, []).append(group.matrices)
    reduction = _reduction(config, plan, stage)
    found: list[StepBuffers] = []
    for owner in range(mesh.owners):
        groups = by_owner.get(owner, [])
        if mesh.tp == 1:
            updates = [_batched(config, [plan.matrices[index] for group in groups for index in group])]
        else:
            updates = _hosted(config, plan, groups)
        held = reduction.get(owner, 0)
        found += [
            StepBuffers(exchange=each.exchange, gradients=each.gradients, guard=each.guard, reduction=held)
            for each in updates
        ]
    return found


def _hosted(config: RunConfig, plan: Plan, groups: Sequence[tuple[int, ...]]) -> list[StepBuffers]:
    """An owner's hosts."""
    tp, cells = plan.subject.layout.tp, plan.assignment.cells
    stored_most, hosted_most = [0] * tp, [0] * tp
    for group in groups:
        everywhere, stored, hosted = 0, [0] * tp, [0] * tp
        for index in group:
            matrix = plan.matrices[index]
            hosted[cells[index].host] += matrix.elements
            if matrix.home is None:
                everywhere += matrix.fragment_elements(tp)
            else:
                stored[matrix.home] += matrix.elements
        stored_most = [max(most, everywhere + own) for most, own in zip(stored_most, stored, strict=True)]
        hosted_most = [max(most, own) for most, own in zip(hosted_most, hosted, strict=True)]
    sets = min(2, len(groups))
    weight, gradient = exchange_bytes(config)
    return [
        # Gradients: fragments sent, whole matrices received. Weights: the other way round.
        StepBuffers(
            exchange=sets * (gradient + weight) * (stored + hosted), gradients=_FP32 * hosted, guard=_FP32 * hosted
        )
        for stored, hosted in zip(stored_most, hosted_most, strict=True)
    ]


def _batched(config: RunConfig, matrices: Sequence[Matrix]) -> StepBuffers:
    """The only host of an owner."""
    _, grad = element_bytes(config)
    units = Counter(matrix.unit for matrix in matrices)
    copied = [matrix.elements for matrix in matrices if grad != _FP32 or units[matrix.unit] > 1]
    return StepBuffers(gradients=batch_bytes(copied), guard=batch_bytes([matrix.elements for matrix in matrices]))


def batch_bytes(elements: Sequence[int]) -> int:
    """fp32 bytes of the largest batch such matrices are worked through in; one that is larger is a batch."""
    return min(_FP32 * sum(elements), max(BATCH_BYTES, _FP32 * max(elements, default=0)))


def _reduction(config: RunConfig, plan: Plan, stage: int) -> Mapping[int, int]:
    """Of each owner that needs any: its two largest, for a bucket may arrive while the one before is added up."""
    _, grad = element_bytes(config)
    held: dict[int, list[int]] = {}
    for bucket in plan.buckets:
        if bucket.stage == stage:
            for owner, size in scratch_bytes(bucket, plan.subject.layout.owners, grad).items():
                held.setdefault(owner, []).append(size)
    return {owner: sum(sorted(sizes)[-2:]) for owner, sizes in held.items()}
