"""Computes the figures of a plan that need no simulation: load balance and its bound, bytes and collectives,
and the update of each shape."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.sharing import SharedCost, shared_bytes, shared_collectives
from canzona_cli.core.costs.update import form_of, stack_of
from canzona_cli.core.planner.exchange import GroupTraffic, group_traffic
from canzona_cli.core.planner.memory import Place
from canzona_cli.core.planner.plan import Bucket, MicroGroup, Plan, rank_buckets
from canzona_cli.core.planner.reduction import collectives, owned_elements, sent_elements
from canzona_cli.core.setup import Form, Gathering, Layout, MomentumConfig, Reduction, Setup


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The load balance of the stage whose slowest rank takes longest: the ratio of the longest update time to
    the mean. 1.0 is perfect."""

    dp: float
    """The balance over owners. An owner's seconds are the sum over its hosts."""
    tp: float
    """The balance over the hosts of the owner that has the slowest host. If this owner is also the busiest,
    `grid` is `dp` times `tp`."""
    grid: float
    """The balance over all cells, which equals the time of the update relative to its time with perfect
    balance."""
    lower_bound: float
    """The lower bound on `grid`: no assignment has a smaller value."""
    ranks: float
    """The balance over the ranks of all stages, which may have different numbers of layers."""
    ranks_bound: float
    """The lower bound on `ranks`."""
    slowest_s: float
    """The update seconds of the slowest rank."""
    mean_s: float
    """The mean update seconds of the stage's ranks."""
    slowest: Place

    @property
    def gap(self) -> float:
        """The relative distance of `grid` from its lower bound; 0.01 is one per cent."""
        return self.grid / self.lower_bound - 1


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The bytes that one rank sends in a step, and the collectives in which it takes part. If ranks differ,
    each of these values is the largest of all ranks."""

    dp_reduce_bytes: int
    """The bytes of gradients that a rank sends for reductions over n owners, padding included: the whole of
    buckets whose ring hands elements over, and (n - 1) / n of other buckets and of AdamW's gradients."""
    dp_gather_bytes: int
    """The bytes of weights that a rank sends for gatherings, counted as in `dp_reduce_bytes`."""
    tp_exchange_bytes: int
    """The bytes that a rank sends within its TP group: gradient fragments to hosts, new weights and flags
    from hosts, and the squares of shared matrices."""
    dp_reductions: int
    """The number of collectives that reduce the matrices' gradients: one for each range of a bucket, or a few
    for a bucket in a ring."""
    dp_gathers: int
    """The number of collectives that gather the matrices' weights."""
    reduced_by: Mapping[Reduction, int]
    """The number of buckets that are reduced in each way, the most frequent way first; empty with one
    owner."""
    gathered_by: Mapping[Gathering, int]
    """The number of buckets that are gathered in each way, the most frequent way first; empty with one
    owner."""
    tp_exchanges: int
    """The number of collectives over the TP group: at most two all-to-alls for each micro-group, and the
    collectives of shared matrices."""
    dp_byte_balance: float
    """The balance of communication: the elements of each bucket's fullest owner, summed over buckets,
    relative to the sum with equal shares. 1.0 is perfect. alpha trades this balance against load balance."""
    padding_fraction: float
    """The padding in the matrices' buffers relative to the matrices; 0.5 means 50% more memory."""


@dataclass(frozen=True, kw_only=True)
class UpdateKind:
    """The matrices of one shape and cost, which are updated in the same way."""

    rows: int
    cols: int
    matrices: int
    seconds: float
    """The seconds that one rank takes to update one matrix."""
    shared: int
    """The number of these matrices that are shared. Shared matrices are updated in Gram form."""
    fragment_s: float
    """The seconds that every rank of the TP group takes for one shared matrix; 0 if none is shared."""
    form: Form | None
    """The form of the orthogonalisation; None if the optimizer does not orthogonalise."""
    together: int
    """The largest number of matrices that a host updates at once, in batched matmuls; 1 if matrices are not
    batched."""
    error: float | None
    """The distance of the update from an orthogonal matrix in exact arithmetic: the root mean square of |s -
    1| over its singular values s. Singular values below 0.007 times the input's largest are left out.
    Rounding adds less than 0.01 in either form, in bf16 or fp16. None if it is unknown."""


POLYNOMIAL_ERROR = {
    "simple": 0.198,
    "quintic": 0.017,
    "polar_express": 0.088,
    "aol": 1.54,
    "deepseekv4": 0.198,
}
"""The `UpdateKind.error` of five steps, by coefficients; `aol` is designed for four steps."""


def kinds(setup: Setup, plan: Plan) -> tuple[UpdateKind, ...]:
    """Describes how each shape of the plan is updated; the shape that takes longest in total comes first."""
    algorithm, optimizer = plan.subject.optimizer, setup.optimizer
    orthogonal = isinstance(optimizer, MomentumConfig)
    counted = Counter((m.rows, m.cols, cost) for m, cost in zip(plan.matrices, plan.costs, strict=True))
    shared_costs: dict[tuple[int, int], list[SharedCost]] = {}
    for index, shared_cost in plan.assignment.shared_costs.items():
        shared_costs.setdefault(plan.matrices[index].shape, []).append(shared_cost)
    error = None
    if isinstance(optimizer, MomentumConfig) and algorithm.ns_steps == 5:
        error = POLYNOMIAL_ERROR[optimizer.coefficients]
    described = []
    for (rows, cols, cost), count in sorted(counted.items(), key=lambda item: -item[1] * item[0][2]):
        shared = shared_costs.get((rows, cols), ())
        stack = stack_of(algorithm, rows, cols, setup.cluster)
        described.append(
            UpdateKind(
                rows=rows,
                cols=cols,
                matrices=count,
                seconds=cost,
                shared=len(shared),
                fragment_s=shared[0].each if shared else 0.0,
                form=form_of(algorithm, rows, cols, setup.cluster) if orthogonal else None,
                together=stack,
                error=error,
            )
        )
    return tuple(described)


def balance(plan: Plan) -> Balance:
    """Computes the load balance of the stage whose slowest rank takes longest."""
    mesh = plan.subject.layout
    stages = [plan.loads(stage) for stage in range(mesh.pp)]
    stage = max(range(mesh.pp), key=lambda s: max(stages[s]))
    loads, bound = stages[stage], plan.lower_bounds[stage]
    owners = [math.fsum(loads[o * mesh.tp : (o + 1) * mesh.tp]) for o in range(mesh.owners)]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    total = math.fsum(owners)
    mean, owner_mean = total / mesh.cells, total / mesh.owners
    grid = max(1.0, loads[slowest] / mean)
    mean_of_all = math.fsum(map(math.fsum, stages)) / (mesh.pp * mesh.cells)
    ranks = max(1.0, loads[slowest] / mean_of_all)
    return Balance(
        dp=max(owners) / owner_mean,
        tp=loads[slowest] / (owners[slowest // mesh.tp] / mesh.tp),
        grid=grid,
        lower_bound=min(max(bound / mean, 1.0), grid),  # the bound exceeds `grid` only by rounding
        ranks=ranks,
        ranks_bound=min(max(max(plan.lower_bounds) / mean_of_all, 1.0), ranks),
        slowest_s=loads[slowest],
        mean_s=mean,
        slowest=Place.of(mesh, stage, slowest),
    )


def communication(setup: Setup, layout: Layout, plan: Plan) -> Communication:
    """Counts the traffic of one step in reductions, gatherings and exchanges, excluding the traffic of the
    model's forward and backward passes."""
    mesh = plan.subject.layout
    weight_bytes, gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
    ranks = (_traffic_of(setup, layout, plan, *rank) for rank in product(range(mesh.pp), range(mesh.ep)))
    reduced, gathered, reductions, gathers = map(max, zip(*ranks, strict=True))
    communicated = [bucket for bucket in plan.buckets if mesh.reducers(bucket.expert_rank) > 1]
    return Communication(
        dp_reduce_bytes=round(reduced * gradient_bytes),
        dp_gather_bytes=round(gathered * weight_bytes),
        tp_exchange_bytes=max(exchange_sent(setup, plan), default=0),
        dp_reductions=reductions,
        dp_gathers=gathers,
        reduced_by=dict(Counter(bucket.reduction for bucket in communicated).most_common()),
        gathered_by=dict(Counter(bucket.gathering for bucket in communicated).most_common()),
        tp_exchanges=max(exchanges(plan).values(), default=0),
        dp_byte_balance=_byte_balance(plan),
        padding_fraction=padding_fraction(plan.buckets),
    )


def _traffic_of(
    setup: Setup, layout: Layout, plan: Plan, stage: int, expert_rank: int
) -> tuple[float, float, int, int]:
    """Counts the elements that a rank sends in reductions and in gatherings, and the number of reductions and
    of gatherings of its matrices."""
    mesh = plan.subject.layout
    adamw = stage_weights(setup, layout, stage).others * (mesh.owners - 1) / mesh.owners
    reduced, gathered, reductions, gathers = adamw, adamw, 0, 0
    for bucket in rank_buckets(plan.buckets, stage, expert_rank):
        owners = mesh.reducers(bucket.expert_rank)
        reduced += sent_elements(bucket, bucket.reduction, owners)
        gathered += sent_elements(bucket, bucket.gathering, owners)
        to_reduce, to_gather = collectives(bucket, owners)
        reductions += to_reduce
        gathers += to_gather
    return reduced, gathered, reductions, gathers


def _byte_balance(plan: Plan) -> float:
    busiest = equal = 0.0
    for bucket in plan.buckets:
        elements = owned_elements(bucket)
        busiest += max(elements.values())
        equal += sum(elements.values()) / plan.subject.layout.reducers(bucket.expert_rank)
    return busiest / equal if equal else 1.0


def _traffic(plan: Plan) -> Iterator[tuple[MicroGroup, GroupTraffic]]:
    """Yields each micro-group with the traffic of its hosted matrices."""
    for group in plan.groups:
        hosted = [index for index in group.matrices if index not in plan.assignment.shared_costs]
        hosts = [plan.assignment.cells[index].host for index in hosted]
        yield group, group_traffic([plan.matrices[index] for index in hosted], hosts, plan.subject.layout.tp)


def exchanges(plan: Plan) -> Counter[tuple[int, int]]:
    """Counts a step's collectives over each TP group, by stage and owner: all-to-alls of micro-groups and
    collectives of shared matrices."""
    counts: Counter[tuple[int, int]] = Counter()
    for group, traffic in _traffic(plan):
        counts[group.stage, group.owner] += traffic.collectives
    for_each_shared = sum(shared_collectives(plan.subject.optimizer.ns_steps).values())
    for index in plan.assignment.shared_costs:
        counts[plan.matrices[index].stage, plan.assignment.cells[index].owner] += for_each_shared
    return counts


def exchange_sent(setup: Setup, plan: Plan) -> list[int]:
    """Counts the bytes that each rank sends within its TP group in a step, at index `Mesh.rank(stage,
    cell)`."""
    mesh = plan.subject.layout
    weight_bytes, gradient_bytes = setup.train.weight_bytes, setup.engine.gradient_bytes
    sent = [0] * (mesh.pp * mesh.cells)
    for group, moved in _traffic(plan):
        first_rank = mesh.rank(group.stage, group.owner * mesh.tp)
        for host, (gradients, weights) in enumerate(zip(moved.gradients.sent, moved.weights.sent, strict=True)):
            sent[first_rank + host] += gradients * gradient_bytes + weights * weight_bytes
    for index in plan.assignment.shared_costs:
        matrix = plan.matrices[index]
        first_rank = mesh.rank(matrix.stage, plan.assignment.cells[index].owner * mesh.tp)
        for rank in range(first_rank, first_rank + mesh.tp):
            sent[rank] += shared_bytes(matrix, mesh.tp, plan.subject.optimizer.ns_steps, weight_bytes)
    return sent


def padding_fraction(buckets: Iterable[Bucket]) -> float:
    """Returns the padding of buckets relative to the matrices in them; 0.5 means 50% more memory."""
    padding = elements = 0
    for bucket in buckets:
        padding, elements = padding + bucket.padding, elements + bucket.elements
    return padding / (elements - padding) if elements > padding else 0.0
