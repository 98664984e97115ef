"""A plan's figures without a simulation: load balance and its bound, bytes moved,
memory of the fullest rank."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.schema import Form, Gathering, Layout, NewtonSchulzConfig, Reduction, RunConfig
from canzona_cli.costs.buffers import element_bytes, exchange_bytes, stage_weights
from canzona_cli.costs.sharing import Share, shared_bytes, shared_collectives
from canzona_cli.costs.update import form_of, stack_of
from canzona_cli.planner.exchange import GroupTraffic, group_traffic
from canzona_cli.planner.plan import Bucket, MicroGroup, Place, Plan
from canzona_cli.planner.reduction import collectives, sent_elements, shares


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Update cost over the ranks of the stage that takes longest, as max / mean: 1.0 is perfect."""

    dp: float
    """The balance over owners, each with the sum of its hosts."""
    tp: float
    """The balance over the hosts of the owner that has the slowest one;
    `grid` is the product for that owner."""
    grid: float
    """The balance over all cells: how much longer the update takes than with a perfect spread."""
    lower_bound: float
    """No assignment has a smaller `grid`."""
    slowest_s: float
    """Seconds of update on the slowest rank."""
    mean_s: float
    slowest: Place

    @property
    def gap(self) -> float:
        """The distance of the plan from its bound; 0.01 is one per cent."""
        return self.grid / self.lower_bound - 1


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes one rank sends in a step, and collectives it takes part in;
    of the busiest one where ranks differ."""

    dp_reduce_bytes: int
    """Gradients of everything a rank stores, reduced over the owners' group: (n - 1) / n of its buffers,
    padded where that is how a bucket travels; of one that goes round in a ring, all of it."""
    dp_gather_bytes: int
    """Updated weights, the same way back."""
    tp_exchange_bytes: int
    """Gradient fragments to hosts, new weights and their flags from them."""
    dp_reductions: int
    """Collectives that reduce the matrices' gradients: one for each owner's range of a bucket,
    or few for all."""
    dp_gathers: int
    """Collectives that gather their weights."""
    reduced_by: Mapping[Reduction, int]
    """The number of buckets whose gradients travel each way, the most usual first;
    empty where nothing travels."""
    gathered_by: Mapping[Gathering, int]
    """The number of buckets whose weights travel each way."""
    tp_exchanges: int
    """All-to-alls of the micro-groups, two each, and collectives of shared matrices."""
    dp_byte_balance: float
    """Elements of every bucket's busiest owner over an even share, buckets weighed by size: what alpha trades
    against load balance. 1.0 where all owners reduce and gather equally much of each bucket."""
    padding_fraction: float
    """Padding for each element of the matrices' buffers that is none; 0.5 stores half as much again."""


@dataclass(frozen=True, kw_only=True)
class UpdateKind:
    """Matrices that are updated alike."""

    rows: int
    cols: int
    matrices: int
    seconds: float
    """The seconds of one of them by one rank."""
    shared: int
    """The number of them that their owners' TP groups update together, in Gram form."""
    fragment_s: float
    """Then: of every rank, for one of them; 0 where none is."""
    form: Form | None
    """None where nothing is orthogonalised."""
    products: Literal["plain", "symmetric"]
    """True where products with a symmetric result are priced as symmetric kernels' (`cluster.symmetric_factor`)."""
    together: int
    """The most that a host updates at once, in batched products; 1: one by one."""
    error: float | None
    """Root mean square of |s - 1| over singular values s of the update that were 0.007 to 1 of the largest,
    in exact arithmetic; rounding adds less than 0.01 in either form, in bf16 or fp16. None where that is not
    known."""


POLYNOMIAL_ERROR = {
    "simple": 0.198,
    "quintic": 0.017,
    "polar_express": 0.088,
    "cans": 0.081,
    "aol": 1.54,
    "deepseekv4": 0.198,
}
"""`UpdateKind.error` of five steps, by coefficients; `aol` is made for four."""


def kinds(config: RunConfig, plan: Plan) -> tuple[UpdateKind, ...]:
    """Describes how each shape of the plan is updated, the one that takes longest in all first."""
    how, optimizer = plan.subject.optimizer, config.optimizer
    orthogonal = isinstance(optimizer, NewtonSchulzConfig)
    counted = Counter((m.rows, m.cols, cost) for m, cost in zip(plan.matrices, plan.costs, strict=True))
    shares: dict[tuple[int, int], list[Share]] = {}
    for index, share in plan.assignment.shares.items():
        shares.setdefault(plan.matrices[index].shape, []).append(share)
    error = None
    if isinstance(optimizer, NewtonSchulzConfig) and how.ns_steps == 5:
        error = POLYNOMIAL_ERROR[optimizer.coefficients]
    halved = orthogonal and how.precision == "bf16" and config.cluster.symmetric_factor < 1
    return tuple(
        UpdateKind(
            rows=rows,
            cols=cols,
            matrices=number,
            seconds=cost,
            shared=len(counts),
            fragment_s=counts[0].each if counts else 0.0,
            form=form_of(how, rows, cols, config.cluster) if orthogonal else None,
            products="symmetric" if halved and stack_of(how, rows, cols, config.cluster) == 1 else "plain",
            together=stack_of(how, rows, cols, config.cluster),
            error=error,
        )
        for (rows, cols, cost), number in sorted(counted.items(), key=lambda one: -one[1] * one[0][2])
        for counts in (shares.get((rows, cols), ()),)
    )


def balance(plan: Plan) -> Balance:
    """The load balance of the stage whose slowest rank takes longest."""
    mesh = plan.subject.layout
    stages = [plan.loads(stage) for stage in range(mesh.pp)]
    stage = max(range(mesh.pp), key=lambda s: max(stages[s]))
    loads, bound = stages[stage], plan.lower_bounds[stage]
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
    """The traffic of one step besides the forward and backward pass's own traffic."""
    mesh = plan.subject.layout
    width, grad = element_bytes(config)
    reduced = [
        stage_weights(config, layout, stage).others * (mesh.owners - 1) / mesh.owners for stage in range(mesh.pp)
    ]
    gathered = [*reduced]
    for bucket in plan.buckets:
        reduced[bucket.stage] += sent_elements(bucket, bucket.reduction, mesh.owners)
        gathered[bucket.stage] += sent_elements(bucket, bucket.gathering, mesh.owners)
    stages = [[collectives(one, mesh.owners) for one in plan.buckets if one.stage == stage] for stage in range(mesh.pp)]
    travelling = plan.buckets if mesh.owners > 1 else ()
    return Communication(
        dp_reduce_bytes=round(max(reduced) * grad),
        dp_gather_bytes=round(max(gathered) * width),
        tp_exchange_bytes=max(exchange_sent(config, plan), default=0),
        dp_reductions=max(sum(reductions for reductions, _ in stage) for stage in stages),
        dp_gathers=max(sum(gathers for _, gathers in stage) for stage in stages),
        reduced_by=dict(Counter(bucket.reduction for bucket in travelling).most_common()),
        gathered_by=dict(Counter(bucket.gathering for bucket in travelling).most_common()),
        tp_exchanges=max(exchanges(plan).values(), default=0),
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


def _traffic(plan: Plan) -> Iterator[tuple[MicroGroup, GroupTraffic]]:
    """Yields what each micro-group moves."""
    for group in plan.groups:
        travelling = [index for index in group.matrices if index not in plan.assignment.shares]
        hosts = [plan.assignment.cells[index].host for index in travelling]
        yield group, group_traffic([plan.matrices[index] for index in travelling], hosts, plan.subject.layout.tp)


def exchanges(plan: Plan) -> Counter[tuple[int, int]]:
    """Counts all-to-alls of a step, and collectives of shared matrices, by stage and owner."""
    elements: Counter[tuple[int, int]] = Counter()
    for group, traffic in _traffic(plan):
        elements[group.stage, group.owner] += traffic.collectives
    of_shared = sum(shared_collectives(plan.subject.optimizer.ns_steps).values())
    for index in plan.assignment.shares:
        elements[plan.matrices[index].stage, plan.assignment.cells[index].owner] += of_shared
    return elements


def exchange_sent(config: RunConfig, plan: Plan) -> list[int]:
    """Bytes each rank sends inside its TP group in a step: by stage, then cell."""
    mesh = plan.subject.layout
    width, grad = exchange_bytes(config)
    sent = [0] * (mesh.pp * mesh.cells)
    for group, moved in _traffic(plan):
        first = mesh.rank(group.stage, group.owner * mesh.tp)
        for host, (gradients, weights) in enumerate(zip(moved.gradients.sent, moved.weights.sent, strict=True)):
            sent[first + host] += gradients * grad + weights * width
    for index in plan.assignment.shares:
        matrix = plan.matrices[index]
        first = mesh.rank(matrix.stage, plan.assignment.cells[index].owner * mesh.tp)
        for rank in range(first, first + mesh.tp):
            sent[rank] += shared_bytes(matrix, mesh.tp, plan.subject.optimizer.ns_steps, width)
    return sent


def padding_fraction(buckets: Iterable[Bucket]) -> float:
    """Elements of padding for each element that is none, over all stages."""
    padding = elements = 0
    for bucket in buckets:
        padding, elements = padding + bucket.padding, elements + bucket.elements
    return padding / (elements - padding) if elements > padding else 0.0
