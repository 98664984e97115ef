"""The memory that engine and optimizers hold on each rank of a plan,
next to state and Megatron's own buffers.

The engine allocates its buffers once, and they stay. With tp > 1 a micro-group's gradients and weights travel
in messages, two sets of each because two groups are in flight (one where an owner has one group), each as
large as the rank's largest group: fragments out and in, weights the other way round. A host puts the whole
gradients of one group together in fp32. Shared matrices need an fp32 gradient of one fragment that does not
lie so, and have their squares in scratch, where two take turns.

With tp = 1 nothing travels, and gradients are used where they lie, if they lie whole and in fp32. q, k and v
do not, for they are interleaved in their parameter, and nothing does where gradients are reduced in bf16. An
owner's group is then worked through in batches that need no more than `BATCH_BYTES`, or one matrix. The
matrices' optimizers keep scratch of their own (`workspace`). Besides, some ways of reducing gradients and
gathering weights need memory while the backward and the forward pass run (`reduction`).

Everything is bytes on one rank.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import (
    BATCH_BYTES,
    FP32,
    element_bytes,
    exchange_bytes,
    stage_weights,
    transient,
    workspace_bytes,
)
from canzona_cli.costs.memory import Memory, capacity, factor_bytes, optimizer_state
from canzona_cli.costs.sharing import Share
from canzona_cli.model.geometry import interleaved_kinds
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.exchange import group_traffic
from canzona_cli.planner.order import LANES
from canzona_cli.planner.plan import Place, Plan
from canzona_cli.planner.reduction import GATHERED_AHEAD, scratch_bytes


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """The buffers that the engine holds on one rank, next to state and Megatron's buffers."""

    exchange: int = 0
    """Messages: gradients and weights, sent and received."""
    gradients: int = 0
    """Whole fp32 gradients of a group or batch, and of one shared fragment."""
    workspace: int = 0
    """Scratch that the optimizers keep."""
    reduction: int = 0
    """Bytes for gradients on their way; unlike the rest it comes and goes under the backward pass."""
    gathering: int = 0
    """Bytes for weights of buckets on their way; it comes and goes under the forward pass."""

    @property
    def lasting(self) -> int:
        return self.exchange + self.gradients + self.workspace


def step_buffers(config: RunConfig, plan: Plan, stage: int) -> list[StepBuffers]:
    """Buffers of a stage's cells, index `owner * tp + host`."""
    mesh = plan.subject.layout
    by_owner: dict[int, list[tuple[int, ...]]] = {}
    for group in sorted(plan.groups, key=lambda group: group.index):
        if group.stage == stage:
            by_owner.setdefault(group.owner, []).append(group.matrices)
    reduced, gathered = _travelling(config, plan, stage)
    known: dict[Hashable, list[StepBuffers]] = {}
    buffers: list[StepBuffers] = []
    for owner in range(mesh.owners):
        groups = [
            [
                _Placed(plan.matrices[index], plan.assignment.cells[index].host, plan.assignment.shares.get(index))
                for index in group
            ]
            for group in by_owner.get(owner, ())
        ]
        travelling = reduced.get(owner, 0), gathered.get(owner, 0)
        # Of thousands of owners few have different matrices.
        key = (travelling, tuple(tuple((_alike(one.matrix), one.host, one.share) for one in group) for group in groups))
        if key not in known:
            known[key] = [
                replace(of_owner, reduction=travelling[0], gathering=travelling[1])
                for of_owner in _owners_buffers(config, groups, mesh.tp)
            ]
        buffers += known[key]
    return buffers


def _alike(matrix: Matrix) -> Hashable:
    """Returns what a matrix's buffers depend on."""
    return matrix.shape, matrix.kind, matrix.shard_dim, matrix.home, _is_head(matrix)


class _Placed(NamedTuple):
    """A matrix of a micro-group."""

    matrix: Matrix
    host: int
    share: Share | None


def _owners_buffers(config: RunConfig, groups: Sequence[Sequence[_Placed]], tp: int) -> Iterator[StepBuffers]:
    """Yields the buffers of one owner's ranks, by host, as far as they do not depend on buckets.

    Args:
        groups: its micro-groups.
    """
    if tp == 1:
        members = [one.matrix for group in groups for one in group]
        copied = [_copied(config, matrix, 1, 0) for matrix in members]
        together = [[members[place].shape for place in batch] for batch in _batches(copied)]
        yield StepBuffers(gradients=batch_bytes(copied), workspace=workspace_bytes(config, together))
        return
    widths = exchange_bytes(config)
    shared = [one.matrix for group in groups for one in group if one.share is not None]
    groups = [[one for one in group if one.share is None] for group in groups]
    moved = [group_traffic([one.matrix for one in group], [one.host for one in group], tp) for group in groups]
    in_order = _most(FP32 * _fragment_copied(config, matrix, tp) for matrix in shared)
    cut = [(matrix.elements // tp, min(matrix.shape) ** 2) for matrix in shared]
    for rank in range(tp):
        exchange = 0
        for width, sides in zip(
            widths, ([one.weights for one in moved], [one.gradients for one in moved]), strict=True
        ):
            sets = min(2, len(groups))
            exchange += sets * width * _most(side.sent[rank] for side in sides)
            exchange += sets * width * _most(side.received[rank] for side in sides)
        hosted = [[one.matrix for one in group if one.host == rank] for group in groups]
        copied_most = _most(sum(_copied(config, matrix, tp, rank) for matrix in group) for group in hosted)
        yield StepBuffers(
            exchange=exchange,
            gradients=FP32 * copied_most + in_order,
            workspace=workspace_bytes(
                config, [[matrix.shape for matrix in group] for group in hosted], cut[::LANES], cut[1::LANES]
            ),
        )


def batch_bytes(elements: Sequence[int]) -> int:
    """fp32 bytes for the largest of `_batches`."""
    return FP32 * _most(sum(elements[place] for place in batch) for batch in _batches(elements))


def _batches(elements: Sequence[int]) -> list[list[int]]:
    """Places of consecutive matrices that go within `BATCH_BYTES` of fp32,
    or of one that alone exceeds it."""
    batches: list[list[int]] = []
    filled = 0
    for place, size in enumerate(elements):
        if not batches or filled + size > BATCH_BYTES // FP32:
            batches.append([])
            filled = 0
        batches[-1].append(place)
        filled += size
    return batches


def _copied(config: RunConfig, matrix: Matrix, tp: int, host: int) -> int:
    """Elements of a matrix's whole gradient where its host does not have it whole, contiguous and in fp32."""
    interleaved = matrix.kind in interleaved_kinds(config.model) and not _is_head(matrix)
    here = matrix.home == host or (matrix.home is None and (tp == 1 or matrix.replicated))
    return 0 if here and not interleaved and element_bytes(config)[1] == FP32 else matrix.elements


def _fragment_copied(config: RunConfig, matrix: Matrix, tp: int) -> int:
    """Elements of a fragment's gradient where that does not lie contiguous and in fp32."""
    contiguous = matrix.kind not in interleaved_kinds(config.model) and element_bytes(config)[1] == FP32
    return 0 if contiguous else matrix.elements // tp


def _is_head(matrix: Matrix) -> bool:
    return matrix.name.rpartition(".")[2].isdigit()


def _travelling(config: RunConfig, plan: Plan, stage: int) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Bytes for gradients and for weights, by rank that needs any.

    Any number of buckets' gradients travel at a time; of weights the largest count, as many as travel at a
    time and one more, which is put where it belongs meanwhile.
    """
    width, grad = element_bytes(config)
    buckets, owners = [bucket for bucket in plan.buckets if bucket.stage == stage], plan.subject.layout.owners
    reduced = Counter[int]()
    for bucket in buckets:
        reduced.update(scratch_bytes(bucket, bucket.reduction, owners, grad))
    gathered = (scratch_bytes(bucket, bucket.gathering, owners, width) for bucket in buckets)
    return reduced, _largest(GATHERED_AHEAD + 1, gathered)


def _largest(count: int, needed: Iterable[Mapping[int, int]]) -> Mapping[int, int]:
    held: dict[int, list[int]] = {}
    for of_bucket in needed:
        for owner, size in of_bucket.items():
            held.setdefault(owner, []).append(size)
    return {owner: sum(sorted(sizes)[-count:]) for owner, sizes in held.items()}


def _most(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


@dataclass(frozen=True, kw_only=True)
class PlanMemory(Memory):
    """Bytes on the rank that needs most."""

    parts: Mapping[str, int]
    """weights, gradients, padding, masters, matrix_state, adamw_state, activations, logits, workspace,
    exchange. What is never alive together counts once, see `activations.Transient`. `exchange` is
    `buffers.lasting`."""
    worst: Place
    buffers: StepBuffers
    """The buffers of that rank."""


def plan_memory(config: RunConfig, layout: Layout, plan: Plan) -> PlanMemory:
    """Memory of the fullest rank under a plan: every stage's fullest cell,
    with what that stage needs besides."""
    stages = [_stage_memory(config, layout, plan, stage) for stage in range(plan.subject.layout.pp)]
    return max(stages, key=lambda memory: (memory.total, -memory.worst.rank))


def _stage_memory(config: RunConfig, layout: Layout, plan: Plan, stage: int) -> PlanMemory:
    mesh, how = plan.subject.layout, plan.subject.optimizer
    width, grad = element_bytes(config)
    whole, factors = [0] * mesh.cells, [0] * mesh.cells
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        if matrix.stage == stage:
            shared = matrix.index in plan.assignment.shares
            for one, elements in cell.held(matrix, mesh.tp, shared=shared):
                whole[one.owner * mesh.tp + one.host] += elements
            factors[cell.owner * mesh.tp + cell.host] += 0 if shared else factor_bytes(how, matrix.rows, matrix.cols)
    buffers, needed = step_buffers(config, plan, stage), transient(config, layout, stage)
    weights = stage_weights(config, layout, stage)

    def varying(cell: int) -> dict[str, int]:
        return {
            **optimizer_state(config, layout, weights.others, whole[cell], factors[cell]),
            **needed.parts(reduction=buffers[cell].reduction, gathering=buffers[cell].gathering),
            "exchange": buffers[cell].lasting,
        }

    # Of thousands of cells few are different; of those with the same, the first stands for all.
    different = {(whole[cell], factors[cell], buffers[cell]): cell for cell in reversed(range(mesh.cells))}
    worst = max(different.values(), key=lambda cell: (sum(varying(cell).values()), -cell))
    # Fragments as planned: a user's own shapes differ from those of `stage_weights`.
    stored = weights.others + sum(m.fragment_elements(mesh.tp) for m in plan.matrices if m.stage == stage)
    padding = sum(bucket.padding for bucket in plan.buckets if bucket.stage == stage)
    return PlanMemory(
        parts=MappingProxyType(
            {
                "weights": width * stored,
                "gradients": grad * stored,
                "padding": (width + grad) * padding,
                **varying(worst),
            }
        ),
        worst=Place.of(mesh, stage, worst),
        capacity=capacity(config),
        buffers=buffers[worst],
    )
