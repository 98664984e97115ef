"""What a plan comes to without simulating it: load balance and its bound, bytes moved, memory of the fullest rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.exchange import exchange
from canzona_cli.planner.memory import (
    capacity,
    element_bytes,
    exchange_bytes,
    factor_bytes,
    moment_bytes,
    stage_weights,
    transient,
)
from canzona_cli.planner.plan import Mesh, Plan
from canzona_cli.planner.reduction import shares
from canzona_cli.planner.step_buffers import StepBuffers, step_buffers
from canzona_cli.simulate.baselines import padding_fraction

_FP32 = 4


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
        """`rank 37: owner 4, host 5`."""
        stage = f"stage {self.stage}, " if mesh.pp > 1 else ""
        return f"rank {self.rank}: {stage}owner {self.owner}, host {self.host}"


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Update cost over ranks, as max / mean: 1.0 is perfect. Of the stage that takes longest."""

    dp: float
    """Over owners, each with the sum of its hosts."""
    tp: float
    """Over the hosts of the owner that has the slowest one; `grid` is the product for that owner."""
    grid: float
    """Over all cells: what the update's time is longer by than a perfect spread."""
    lower_bound: float
    """No assignment has a smaller `grid`."""
    slowest_s: float
    """Seconds of update on the slowest rank."""
    mean_s: float
    slowest: Place

    @property
    def gap(self) -> float:
        """How far the plan is above its bound; 0.01 is one per cent."""
        return self.grid / self.lower_bound - 1


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes one rank sends in a step, the busiest one where ranks differ."""

    dp_reduce_bytes: int
    """Gradients of everything a rank stores, reduced over the owners' group: (n - 1) / n of its buffers."""
    dp_gather_bytes: int
    """Updated weights, the same way back."""
    tp_exchange_bytes: int
    """Gradient fragments to hosts, new weights and their flags from them."""
    dp_byte_balance: float
    """Elements of every bucket's busiest owner over an even share, buckets weighed by size: what alpha trades against
    load balance. 1.0 where all owners reduce and gather equally much of each bucket."""
    padding_fraction: float
    """Padding for each element of the matrices' buffers that is none; 0.5 stores half as much again."""


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """Bytes on the rank that needs most."""

    parts: Mapping[str, int]
    """weights, gradients, padding, masters, matrix_state, adamw_state, activations, logits, workspace, exchange.
    What is never alive together counts once, see `memory.Transient`."""
    worst: Place
    capacity: int
    buffers: StepBuffers
    """Of that rank."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def balance(plan: Plan) -> Balance:
    """The load balance of the stage whose slowest rank takes longest."""
    mesh = plan.subject.layout
    stages = [plan.loads(stage) for stage in range(mesh.pp)]
    stage = max(range(mesh.pp), key=lambda s: max(stages[s]))
    loads = stages[stage]
    return _balance(loads, plan.lower_bounds[stage], mesh, stage)


def _balance(loads: Sequence[float], bound: float, mesh: Mesh, stage: int) -> Balance:
    owners = [math.fsum(loads[o * mesh.tp : (o + 1) * mesh.tp]) for o in range(mesh.owners)]
    total, slowest = math.fsum(owners), max(range(len(loads)), key=loads.__getitem__)
    mean, owner_mean = total / mesh.cells, total / mesh.owners
    grid = max(1.0, loads[slowest] / mean)
    return Balance(
        dp=max(owners) / owner_mean,
        tp=loads[slowest] / (owners[slowest // mesh.tp] / mesh.tp),
        grid=grid,
        lower_bound=min(max(bound / mean, 1.0), grid),  # apart from rounding it is never above
        slowest_s=loads[slowest],
        mean_s=mean,
        slowest=Place.of(mesh, stage, slowest),
    )


def communication(config: RunConfig, layout: Layout, plan: Plan) -> Communication:
    """What moves in one step besides the forward and backward pass's own traffic."""
    mesh = plan.subject.layout
    width, grad = element_bytes(config)
    reduced = [stage_weights(config, layout, stage).others for stage in range(mesh.pp)]
    for bucket in plan.buckets:
        reduced[bucket.stage] += bucket.elements
    moved = max(reduced) * (mesh.owners - 1) / mesh.owners
    return Communication(
        dp_reduce_bytes=round(moved * grad),
        dp_gather_bytes=round(moved * width),
        tp_exchange_bytes=max(exchange_sent(config, plan), default=0),
        dp_byte_balance=_byte_balance(plan),
        padding_fraction=padding_fraction(plan.buckets),
    )


def _byte_balance(plan: Plan) -> float:
    busiest = even = 0.0
    for bucket in plan.buckets:
        held = shares(bucket)
        busiest += max(held.values())
        even += sum(held.values()) / plan.subject.layout.owners
    return busiest / even if even else 1.0


def exchange_sent(config: RunConfig, plan: Plan) -> list[int]:
    """Bytes each rank sends inside its TP group in a step: by stage, then cell."""
    mesh, cells = plan.subject.layout, plan.assignment.cells
    width, grad = exchange_bytes(config)
    sent = [0] * (mesh.pp * mesh.cells)
    for group in plan.groups:
        moved = exchange(
            [plan.matrices[index] for index in group.matrices], [cells[index].host for index in group.matrices], mesh.tp
        )
        first = mesh.rank(group.stage, group.owner * mesh.tp)
        for host, (gradients, weights) in enumerate(zip(moved.gradients.sent, moved.weights.sent, strict=True)):
            sent[first + host] += gradients * grad + weights * width
    return sent


def plan_memory(config: RunConfig, layout: Layout, plan: Plan) -> PlanMemory:
    """Memory of the fullest rank under a plan: every stage's fullest cell, with what that stage needs besides."""
    found = [_stage_memory(config, layout, plan, stage) for stage in range(plan.subject.layout.pp)]
    return max(found, key=lambda memory: (memory.total, -memory.worst.rank))


def _stage_memory(config: RunConfig, layout: Layout, plan: Plan, stage: int) -> PlanMemory:
    mesh, algorithm = plan.subject.layout, plan.subject.optimizer
    width, grad = element_bytes(config)
    master = _FP32 if config.train.precision == "bf16" else 0
    moments = moment_bytes(algorithm)
    hosted, factors = [0] * mesh.cells, [0] * mesh.cells
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        if matrix.stage == stage:
            place = cell.owner * mesh.tp + cell.host
            hosted[place] += matrix.elements
            factors[place] += factor_bytes(algorithm, matrix.rows, matrix.cols)
    buffers, needed = step_buffers(config, plan, stage), transient(config, layout, stage)
    # With fp32 weights too: nowhere else is a hosted matrix whole.
    state = [(_FP32 + moments) * hosted[i] + factors[i] for i in range(mesh.cells)]

    def parts(cell: int) -> dict[str, int]:
        return {**needed.parts(reduction=buffers[cell].reduction), "exchange": buffers[cell].lasting}

    worst = max(range(mesh.cells), key=lambda cell: (state[cell] + sum(parts(cell).values()), -cell))
    weights = stage_weights(config, layout, stage)
    # Fragments as planned, which a user's own shapes make other than `stage_weights` has them.
    fragments = sum(matrix.fragment_elements(mesh.tp) for matrix in plan.matrices if matrix.stage == stage)
    stored = fragments + weights.others
    padding = sum(bucket.padding for bucket in plan.buckets if bucket.stage == stage)
    adamw = math.ceil(weights.others / mesh.owners)
    return PlanMemory(
        parts=MappingProxyType(
            {
                "weights": width * stored,
                "gradients": grad * stored,
                "padding": (width + grad) * padding,
                "masters": _FP32 * hosted[worst] + master * adamw,
                "matrix_state": moments * hosted[worst] + factors[worst],
                "adamw_state": 2 * _FP32 * adamw,
                **parts(worst),
            }
        ),
        worst=Place.of(mesh, stage, worst),
        capacity=capacity(config),
        buffers=buffers[worst],
    )
