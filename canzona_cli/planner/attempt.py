"""One attempt at a plan, within the memory of a rank: whole matrices are balanced, some are shared where that is done
sooner, then what travels longest of two that update as fast is left; buckets and micro-groups follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.activations import stage_weights
from canzona_cli.planner.assign import assign
from canzona_cli.planner.buckets import bucket_elements, buckets
from canzona_cli.planner.cost import rounded
from canzona_cli.planner.exchange import exchange_bytes
from canzona_cli.planner.micro_groups import Grouped, micro_groups
from canzona_cli.planner.modes import best_of
from canzona_cli.planner.packing import lower_bound
from canzona_cli.planner.paper import capacities
from canzona_cli.planner.parts import HOSTED, Assignment, Bucket, Cell, PlanSettings, Share
from canzona_cli.planner.pipeline import HostedPipeline, planning
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import ReductionModel
from canzona_cli.planner.sharing import shares
from canzona_cli.planner.subject import subject, update_costs
from canzona_cli.planner.travel import few_owners, in_order_of_reductions, slowest, travel

SHARING_GAIN = 1.03
"""Nothing is shared where the busiest rank without it is busy for at most this times what any plan takes."""

ALIKE = 0.001
"""Of assignments whose steps are longer by at most this part the one is taken whose buckets travel for least."""


def attempt(
    config: RunConfig,
    layout: Layout,
    shapes: ModelShapes | None,
    members: tuple[Matrix, ...],
    memory_cap: int | None,
    c_max_bytes: int | None = None,
) -> Plan:
    """The plan that is done first, as far as prices are right.

    Args:
        members: of the plan, see `subject.planned_matrices`.
        memory_cap: elements of matrices that a rank may keep.
        c_max_bytes: of micro-groups, where smaller ones save memory; None: as asked.
    """
    sizes: list[int | None] = [c_max_bytes]
    if config.engine.strategy == "paper" and config.engine.c_max_mib is None and c_max_bytes is None and layout.tp > 1:
        sizes += capacities(max(matrix.elements for matrix in members) * max(exchange_bytes(config)), None)
    ways = [_Attempt(config, layout, shapes, members, memory_cap, size) for size in sizes]
    return (ways[0] if len(ways) == 1 else min(ways, key=lambda way: way.seconds())).plan()


def lower_bounds(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> tuple[float, ...]:
    """`Plan.lower_bounds`."""
    costs, possible = update_costs(config, members), _possible(config, layout, members)
    return tuple(lower_bound(members, costs, stage, layout.owners, layout.tp, possible) for stage in range(layout.pp))


def _possible(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """What may be shared."""
    return HOSTED if config.engine.mode == "hosted" else shares(config, layout, members)


class _Attempt:
    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        shapes: ModelShapes | None,
        members: tuple[Matrix, ...],
        memory_cap: int | None,
        c_max_bytes: int | None,
    ) -> None:
        self._config, self._layout, self._members, self._memory_cap = config, layout, members, memory_cap
        self._own_shapes = shapes is not None
        self._about = subject(config, layout, shapes)
        asked = self._about.settings
        self._asked = asked if c_max_bytes is None else replace(asked, c_max_bytes=c_max_bytes)
        self._limit = bucket_elements(config, layout)
        self._costs, self._bounds = update_costs(config, members), lower_bounds(config, layout, members)
        self._possible = _possible(config, layout, members)
        self._width = max(exchange_bytes(config))
        self._grouped = Grouped(self._asked, self._width, HostedPipeline.of(planning(config), layout))
        self._model = ReductionModel(config, layout)
        self._laid_out: dict[tuple[Cell, ...], tuple[Bucket, ...]] = {}

    def plan(self) -> Plan:
        assignment = self._that_travels_least(self._shared_where_sooner(self._balanced))
        return Plan(
            subject=self._about,
            matrices=self._members,
            costs=self._costs,
            assignment=assignment,
            buckets=self._buckets(assignment),
            groups=micro_groups(self._members, self._costs, assignment, self._grouped),
            lower_bounds=self._bounds,
        )

    def seconds(self) -> float:
        """What nothing hides of the plan, without sharing."""
        return self._price(self._balanced)[0]

    @cached_property
    def _balanced(self) -> Assignment:
        """Owner and host of every matrix; nothing is shared unless all is to be."""
        return self._assigned(self._asked, self._possible if self._asked.mode == "shared" else HOSTED, self._memory_cap)

    def _shared_where_sooner(self, hosted: Assignment) -> Assignment:
        """Where modes are free and whole matrices leave ranks idle: some of them shared."""
        if self._asked.mode != "auto" or not self._possible or not self._leaves_idle(hosted):
            return hosted
        members, costs, layout = self._members, self._costs, self._layout
        balanced = self._assigned(self._asked, self._possible, self._memory_cap)
        found = best_of(members, costs, hosted, balanced, self._possible, layout.tp, self._grouped, self._memory_cap)
        if not found.shares or self._own_shapes:
            return found
        others = [stage_weights(self._config, layout, stage).others for stage in range(layout.pp)]
        gathered = [self._model.gather_evenly(elements) for elements in others]
        # AdamW's parameters, gathered under the updates, may take longer than either.
        sooner = self._price(hosted, gathered)[0] > (1 + ALIKE) * self._price(found, gathered)[0]
        return found if sooner else hosted

    def _that_travels_least(self, assignment: Assignment) -> Assignment:
        """The same balance with other owners, or natural order, where buckets then travel for less."""
        asked, layout = self._asked, self._layout
        if not (asked.strategy == "canzona" and asked.layout == "owner" and asked.alpha == 1 and layout.owners > 1):
            return assignment
        ways = [assignment, few_owners(self._members, self._costs, assignment, layout, self._limit)]
        ways = [in_order_of_reductions(self._members, way, layout, self._limit) for way in ways]
        if self._memory_cap is None and asked.mode != "shared":
            # Balanced for its own sake an assignment may travel for longer than that gains.
            ways.append(self._assigned(replace(asked, strategy="asc"), HOSTED, None))
        prices = [self._price(way) for way in ways]
        least = min(seconds for seconds, _ in prices)
        _, best = min((whole, n) for n, (seconds, whole) in enumerate(prices) if seconds <= (1 + ALIKE) * least)
        return ways[best]

    def _assigned(self, asked: PlanSettings, possible: Mapping[int, Share], memory_cap: int | None) -> Assignment:
        return assign(
            self._members,
            [float(one.elements) for one in self._members] if asked.strategy == "paper" else self._costs,
            self._layout,
            asked,
            memory_cap,
            bucket_elements=self._limit,
            bytes_per_element=self._width,
            shares=possible,
        )

    def _leaves_idle(self, assignment: Assignment) -> bool:
        layout = self._layout
        busiest = (
            max(assignment.loads(self._members, self._costs, stage, layout.owners, layout.tp))
            for stage in range(layout.pp)
        )
        return any(busy > SHARING_GAIN * bound for busy, bound in zip(busiest, self._bounds, strict=True))

    def _buckets(self, assignment: Assignment) -> tuple[Bucket, ...]:
        if assignment.cells not in self._laid_out:
            found = buckets(self._members, assignment, self._layout, self._asked, self._limit)
            self._laid_out[assignment.cells] = self._model.choose(found, self._asked, scratch=True)
        return self._laid_out[assignment.cells]

    def _price(self, assignment: Assignment, hidden: Sequence[float] | None = None) -> tuple[float, float]:
        """Seconds that nothing hides, of updates at least what is `hidden` under them (by stage); and of all buckets'
        travel."""
        unhidden, whole = travel(self._buckets(assignment), self._model)
        busy = slowest(self._members, self._costs, assignment, self._grouped)
        if hidden is not None:
            busy = {stage: max(own, hidden[stage]) for stage, own in busy.items()}
        return rounded(max(busy[stage] + unhidden[stage] for stage in busy)), rounded(whole)
