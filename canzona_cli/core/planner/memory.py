"""The memory of each rank under a plan: the engine's buffers and the optimizers' scratch; and the total,
which includes state, weights and activations.

The engine allocates its buffers once and keeps them. With tp > 1 it has message buffers for the gradients and
weights of micro-groups. There are two sets of each, because two groups are in flight (one set if the owner
has only one group), and each set is as large as the rank's largest group. A host also assembles the whole
fp32 gradients of one group. Shared matrices need scratch for the squares of two interleaved matrices. If
their gradients are not already contiguous and in fp32, they also need a buffer for the fp32 gradient of one
fragment.

With tp = 1 there are no messages, and gradients are used in place if they are contiguous and in fp32.
Gradients of q, k and v are not contiguous, because they are interleaved in their parameter; and if gradients
are reduced in bf16, none is in fp32. Gradients that cannot be used in place are copied in batches of at most
`BATCH_BYTES`, or of one matrix. The matrices' optimizers also keep scratch (`StepBuffers.workspace`). Rings
need further memory during the backward and the forward pass (`StepBuffers.reduction`,
`StepBuffers.gathering`).

All sizes are in bytes on one rank.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType

from canzona_cli.core.costs.buffers import stage_weights, transient, weight_copies
from canzona_cli.core.costs.memory import Memory, capacity, estimate, factor_bytes, headroom, optimizer_state
from canzona_cli.core.costs.scratch import FP32, batch_slices, workspace_bytes
from canzona_cli.core.model.families import interleaved_kinds
from canzona_cli.core.model.family import Kind
from canzona_cli.core.model.matrices import Matrix, Shape
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.planner.buckets import alike_stages
from canzona_cli.core.planner.exchange import group_traffic
from canzona_cli.core.planner.order import LANES
from canzona_cli.core.planner.pipeline import Job, make_jobs
from canzona_cli.core.planner.plan import Plan, SameObject, rank_buckets, sum_by_cell
from canzona_cli.core.planner.reduction import ring_scratch
from canzona_cli.core.setup import Layout, Mesh, Setup


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """The bytes of the engine's buffers on one rank, in addition to state and Megatron's buffers."""

    exchange: int = 0
    """The bytes of message buffers: gradients and weights, sent and received."""
    gradients: int = 0
    """The bytes of the whole fp32 gradients of a group or batch, and of the gradient of one shared
    fragment."""
    workspace: int = 0
    """The bytes of scratch that the optimizers keep."""
    reduction: int = 0
    """The bytes for gradients that are being reduced; allocated only during the backward pass."""
    gathering: int = 0
    """The bytes for weights that are being gathered; allocated only during the forward pass."""

    @property
    def lasting(self) -> int:
        """The bytes that the engine keeps from step to step."""
        return self.exchange + self.gradients + self.workspace


def step_buffers(setup: Setup, plan: Plan, stage: int) -> list[StepBuffers]:
    """Returns the buffers of each cell of a stage, at index `owner * tp + host`."""
    reduced, gathered = ring_scratch(plan, stage, setup.train.gradient_bytes, setup.train.weight_bytes)
    return [
        replace(of_cell, reduction=reduced.get(cell, 0), gathering=gathered.get(cell, 0))
        for cell, of_cell in enumerate(_engine_buffers(setup, SameObject(plan), _first_stages(SameObject(plan))[stage]))
    ]


@lru_cache(maxsize=8)
def _first_stages(key: SameObject[Plan]) -> Mapping[int, int]:
    """Returns the first of several alike stages, by stage."""
    plan = key.value
    stages = alike_stages(plan.matrices, plan.costs, plan.assignment)
    return {stage: stages[stage].first if stage in stages else stage for stage in range(plan.subject.layout.pp)}


@lru_cache(maxsize=32)
def _engine_buffers(setup: Setup, of_plan: SameObject[Plan], stage: int) -> list[StepBuffers]:
    """Returns the `step_buffers` of a stage, except `reduction` and `gathering`."""
    plan, mesh = of_plan.value, of_plan.value.subject.layout
    by_owner: dict[int, list[list[Job]]] = {}
    for group in sorted(plan.groups, key=lambda group: group.index):
        if group.stage == stage:
            jobs = make_jobs(group.matrices, plan.matrices, plan.costs, plan.assignment)
            by_owner.setdefault(group.owner, []).append(jobs)
    experts: list[list[Matrix]] = [[] for _ in range(mesh.cells)]
    for matrix, cell in plan.placed[stage]:
        if matrix.expert_rank is not None:
            experts[cell.index(mesh.tp)].append(matrix)
    copies = _Copies(interleaved=interleaved_kinds(setup.model), fp32=setup.train.gradient_bytes == FP32)
    cache: dict[Hashable, list[StepBuffers]] = {}
    buffers: list[StepBuffers] = []
    for owner in range(mesh.owners):
        groups = by_owner.get(owner, [])
        row = slice(owner * mesh.tp, (owner + 1) * mesh.tp)
        # Most of the thousands of owners have the same matrices as another owner.
        key = (
            tuple(tuple((_buffer_key(job.matrix), job.host, job.shared_cost) for job in group) for group in groups),
            tuple(tuple(map(_EXPERT_KEY, of_host)) for of_host in experts[row]),
        )
        if key not in cache:
            cache[key] = list(_buffers_of_owner(setup, plan.subject.optimizer, copies, groups, experts[row]))
        buffers += cache[key]
    return buffers


def _buffer_key(matrix: Matrix) -> Hashable:
    """Returns a key of all properties of a matrix on which its buffers depend."""
    return matrix.shape, matrix.kind, matrix.shard_dim, matrix.home, _is_head(matrix)


_EXPERT_KEY = attrgetter("shape", "kind")
"""The `_buffer_key` of an expert with an `expert_rank`, whose other properties are always the same."""


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """The rule that says which gradients are copied: all but those that are contiguous and in fp32 in the
    buffer in which they are reduced."""

    interleaved: frozenset[Kind]
    """The kinds of matrices whose gradients are not contiguous."""
    fp32: bool
    """True if gradients are reduced in fp32."""

    def of_host(self, matrix: Matrix, tp: int, host: int) -> int:
        """Counts the elements of a matrix's gradient that its host has to copy: none if the host has the
        whole gradient contiguous and in fp32, otherwise all."""
        interleaved = matrix.kind in self.interleaved and not _is_head(matrix)
        stored_whole = matrix.home == host or (matrix.home is None and (tp == 1 or matrix.replicated))
        return 0 if stored_whole and not interleaved and self.fp32 else matrix.elements

    def of_fragment(self, matrix: Matrix, tp: int) -> int:
        """Counts the elements of a shared matrix's fragment that a rank has to copy: none if the fragment's
        gradient is contiguous and in fp32, otherwise all."""
        return 0 if matrix.kind not in self.interleaved and self.fp32 else matrix.elements // tp

    def batch_copies(self, matrices: Sequence[Matrix]) -> tuple[int, list[list[Shape]]]:
        """Returns the fp32 bytes of the largest batch of gradients that are copied, and the shapes of each
        batch.

        Args:
            matrices: matrices that one rank stores whole.
        """
        copied = [self.of_host(matrix, 1, 0) for matrix in matrices]
        shapes = [[matrix.shape for matrix in matrices[batch]] for batch in batch_slices(copied)]
        return batch_bytes(copied), shapes


def _buffers_of_owner(
    setup: Setup,
    algorithm: Algorithm,
    copies: _Copies,
    groups: Sequence[Sequence[Job]],
    experts: Sequence[Sequence[Matrix]],
) -> Iterator[StepBuffers]:
    """Yields the buffers of each host of an owner; the fields `reduction` and `gathering` are left at 0.

    Args:
        groups: the owner's micro-groups.
        experts: by host, the experts with an `expert_rank`.
    """
    tp = len(experts)
    shared = [job.matrix for group in groups for job in group if job.shared_cost is not None]
    hosted_groups = [[job for job in group if job.shared_cost is None] for group in groups]
    moved = [group_traffic([job.matrix for job in group], [job.host for job in group], tp) for group in hosted_groups]
    fragment_bytes = _largest(FP32 * copies.of_fragment(matrix, tp) for matrix in shared)
    shared_sizes = [(matrix.elements // tp, min(matrix.shape) ** 2) for matrix in shared]
    messages = (
        (setup.train.weight_bytes, [traffic.weights for traffic in moved]),
        (setup.engine.gradient_bytes, [traffic.gradients for traffic in moved]),
    )
    for rank in range(tp):
        exchange_bytes = 0
        for width, all_to_alls in messages:
            sets = min(2, len(hosted_groups))
            exchange_bytes += sets * width * _largest(traffic.sent[rank] for traffic in all_to_alls)
            exchange_bytes += sets * width * _largest(traffic.received[rank] for traffic in all_to_alls)
        hosted = [[job.matrix for job in group if job.host == rank] for group in hosted_groups]
        if tp == 1:
            gradient_bytes, batches = copies.batch_copies([matrix for group in hosted for matrix in group])
        else:
            most_copied = _largest(sum(copies.of_host(matrix, tp, rank) for matrix in group) for group in hosted)
            gradient_bytes = FP32 * most_copied
            batches = [[matrix.shape for matrix in group] for group in hosted]
        expert_bytes, expert_batches = copies.batch_copies(experts[rank])
        batches += expert_batches
        yield StepBuffers(
            exchange=exchange_bytes,
            gradients=gradient_bytes + fragment_bytes + expert_bytes,
            workspace=workspace_bytes(setup, algorithm, batches, shared_sizes[::LANES], shared_sizes[1::LANES]),
        )


def batch_bytes(elements: Sequence[int]) -> int:
    """Returns the fp32 bytes of the largest batch of an owner's matrices.

    Args:
        elements: the elements of each matrix whose gradient is copied; 0 for all other matrices.
    """
    return FP32 * _largest(sum(elements[batch]) for batch in batch_slices(elements))


def _is_head(matrix: Matrix) -> bool:
    """Returns True if the matrix belongs to one attention head, as `layers.3.q.5` does."""
    name = matrix.name
    return name[-1].isdigit() and name.rpartition(".")[2].isdigit()


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank of the job."""

    rank: int
    stage: int
    owner: int
    host: int

    @classmethod
    def of(cls, mesh: Mesh, stage: int, cell: int) -> "Place":
        owner, host = divmod(cell, mesh.tp)
        return cls(rank=mesh.rank(stage, cell), stage=stage, owner=owner, host=host)

    def describe(self, mesh: Mesh) -> str:
        """Describes the rank, for example as `rank 37: owner 4, host 5`; names its stage if there are
        several."""
        stage = f"stage {self.stage}, " if mesh.pp > 1 else ""
        return f"rank {self.rank}: {stage}owner {self.owner}, host {self.host}"


@dataclass(frozen=True, kw_only=True)
class PlanMemory(Memory):
    """The bytes on the rank that needs the most, under a plan.

    Its parts are weights, gradients, padding, masters, matrix_state, adamw_state, average, activations,
    logits, workspace and exchange. Memory that is never needed at the same time counts only once
    (`costs.buffers.Transient.parts`). `exchange` is `buffers.lasting`.
    """

    worst: Place
    """The place of `worst_rank`."""
    buffers: StepBuffers
    """The engine's buffers on the worst rank."""


def memory_of(setup: Setup, layout: Layout, plan: Plan | None) -> Memory:
    """Returns the memory of the fullest rank of a run: under its plan, or estimated if the run has no
    plan."""
    return estimate(setup, layout) if plan is None else plan_memory(setup, layout, plan)


def plan_memory(setup: Setup, layout: Layout, plan: Plan) -> PlanMemory:
    """Returns the memory of the rank that needs the most under a plan, in any stage.

    The last 8 results are cached, because making a plan, the search for a layout and the study of the plan need the
    same.
    """
    return _plan_memory(setup, layout, SameObject(plan))


@lru_cache(maxsize=8)
def _plan_memory(setup: Setup, layout: Layout, key: SameObject[Plan]) -> PlanMemory:
    plan = key.value
    stages = [_stage_memory(setup, layout, plan, stage) for stage in range(plan.subject.layout.pp)]
    return max(stages, key=lambda memory: (memory.total, -memory.worst.rank))


def _stage_memory(setup: Setup, layout: Layout, plan: Plan, stage: int) -> PlanMemory:
    """Returns the memory of a stage's fullest cell."""
    mesh, algorithm = plan.subject.layout, plan.subject.optimizer
    weight_bytes, gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
    # Fragments are counted from the plan, because a user's shapes differ from the shapes of `stage_weights`.
    fragments = sum(m.fragment_elements(mesh.tp) for m, _ in plan.placed[stage] if m.expert_rank in (None, 0))
    padding = sum(bucket.padding for bucket in rank_buckets(plan.buckets, stage))
    shapes = {matrix.shape for matrix, _ in plan.placed[stage]}
    bytes_of = {shape: factor_bytes(algorithm, *shape) for shape in shapes}
    hosted = (
        (cell, bytes_of[matrix.shape], False)
        for matrix, cell in (plan.placed[stage] if any(bytes_of.values()) else ())
        if matrix.index not in plan.assignment.shared_costs
    )
    elements = plan.held_elements[stage]
    factors = sum_by_cell(hosted, 0, cells=mesh.cells, tp=mesh.tp)
    buffers = step_buffers(setup, plan, stage)
    needed = transient(setup, algorithm, layout, stage)
    weights = stage_weights(setup, layout, stage)
    stored = weights.others + fragments
    adamw = weights.share(mesh, matrices=False)

    def varying(cell: int) -> dict[str, int]:
        """Returns the parts that differ between the cells of a stage."""
        return {
            **optimizer_state(setup, algorithm, adamw, elements[cell], factors[cell]),
            **needed.parts(reduction=buffers[cell].reduction, gathering=buffers[cell].gathering),
            "exchange": buffers[cell].lasting,
        }

    # Most of the thousands of cells are equal, so only the first of equal cells is evaluated.
    distinct = {(elements[cell], factors[cell], buffers[cell]): cell for cell in reversed(range(mesh.cells))}
    worst = max(distinct.values(), key=lambda cell: (sum(varying(cell).values()), -cell))
    place = Place.of(mesh, stage, worst)
    return PlanMemory(
        parts=MappingProxyType(
            {
                "weights": weight_bytes * stored + weight_copies(setup, layout, stage),
                "gradients": gradient_bytes * stored,
                "padding": (weight_bytes + gradient_bytes) * padding,
                **varying(worst),
            }
        ),
        worst=place,
        worst_rank=f"rank {place.rank}",
        capacity=capacity(setup),
        headroom=headroom(setup),
        buffers=buffers[worst],
    )
