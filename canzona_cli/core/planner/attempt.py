"""One attempt at a plan: assign matrices to cells (`assign`), form buckets (`buckets`) and micro-groups (`groups`),
choose how each bucket travels (`reduction`), estimate the waits (`exposure`), and keep the best.

Candidates are compared by the seconds that updates, reductions and gatherings add to an iteration. The times of the
forward and backward pass determine how much communication overlaps with them, so one attempt makes different plans for
different micro-batch sizes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from canzona_cli.core.costs.sharing import HOSTED, SharedCosts
from canzona_cli.core.costs.update import rounded
from canzona_cli.core.model.matrices import Matrix, stage_matrices
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.buckets import Pool, alike_pools, buckets, pool_buckets, typical_pools
from canzona_cli.core.planner.exposure import Exposure, Outline
from canzona_cli.core.planner.groups import Grouping
from canzona_cli.core.planner.pipeline import HostedPipeline
from canzona_cli.core.planner.plan import Assignment, Bucket, Cell, Plan, PlanSettings, SameObject, Subject
from canzona_cli.core.planner.reduction import with_ways
from canzona_cli.core.planner.seats import renumber_owners

SHARING_GAIN = 1.03
"""The threshold above which a plan with shared matrices is tried: the ratio of the busiest rank's update time
to its lower bound."""

ALIKE = 0.001
"""The relative difference in time below which candidates count as equally fast."""

BUCKET_SIZES = (1.0, 0.5, 2.0, 0.25, 4.0, 8.0)
"""The bucket sizes that are tried, as multiples of Megatron's default. With small buckets, less is left to
reduce after the backward pass and to gather before the forward pass. With large buckets, fewer latencies add
up."""


def bucket_limits(default: int) -> tuple[int, ...]:
    """Returns the bucket sizes to try, in elements; `default`, Megatron's size, comes first."""
    return tuple(dict.fromkeys(round(size * default) for size in BUCKET_SIZES))


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The matrices of a plan with their costs, and the bounds that hold for every assignment."""

    matrices: tuple[Matrix, ...]
    """The plan's matrices, see `make.planned_matrices`."""
    costs: tuple[float, ...]
    """The seconds that one rank needs to update each matrix."""
    bounds: tuple[float, ...]
    """The lower bounds of the plan (`Plan.lower_bounds`)."""
    possible: SharedCosts
    """The costs of the matrices that may be shared, by index."""
    pipeline: HostedPipeline
    """The costs of a TP group's exchanges."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An assignment with its buckets."""

    assignment: Assignment
    limit: int | None
    """The number of elements at which buckets are closed; None for one bucket per model chunk."""
    buckets: tuple[Bucket, ...]
    """The buckets of `typical_pools`."""
    seconds: float
    """The seconds that updates, reductions and gatherings add to an iteration."""


class Attempt:
    """One attempt at a plan, with a given memory cap and C_max. It can make plans for several micro-batch
    sizes.

    Args:
        subject: everything that the plan depends on.
        resizes: True if the planner chooses the size at which buckets are closed.
        memory_cap: the elements of matrices that a rank may keep; None for no limit.
        c_max: a smaller C_max, in elements, to save memory; None for the C_max of the run's settings.
    """

    def __init__(
        self, subject: Subject, prices: Prices, *, resizes: bool, memory_cap: int | None, c_max: int | None
    ) -> None:
        self._layout, self._subject, self._memory_cap = subject.layout, subject, memory_cap
        self._members = prices.matrices
        self._costs, self._bounds, self._possible = prices.costs, prices.bounds, prices.possible
        self._element_bytes = prices.pipeline.element_bytes
        settings = subject.settings
        self._settings = settings if c_max is None else replace(settings, c_max_bytes=c_max * self._element_bytes)
        self._grouping = Grouping(self._members, self._costs, self._settings, prices.pipeline)
        default = subject.buffers["bucket_elements"]
        assert default is None or isinstance(default, int)
        self._default_limit, self._resizes = default, resizes
        self._assignments: dict[tuple[PlanSettings, bool, int | None], Assignment] = {}
        self._outlined: dict[Exposure, Mapping[int, float]] = {}
        self._laid_out: dict[tuple[SameObject[tuple[Cell, ...]], int | None], tuple[tuple[Bucket, ...], ...]] = {}

    def plan(self, exposure: Exposure) -> Plan:
        """Returns the plan that adds the fewest seconds to an iteration.

        Args:
            exposure: computes these seconds from the times of the run's forward and backward passes.
        """
        best = self._best(exposure)
        return Plan(
            subject=self._subject,
            matrices=self._members,
            costs=self._costs,
            assignment=best.assignment,
            buckets=self._buckets(best),
            groups=self._grouping.micro_groups(best.assignment),
            lower_bounds=self._bounds,
        )

    def seconds(self, exposure: Exposure) -> float:
        """Returns the seconds that the balanced assignment adds to an iteration, before matrices are shared
        or owners renumbered."""
        return self._candidate(self._balanced(self._default_limit), self._default_limit, exposure).seconds

    @property
    def _several_owners(self) -> bool:
        layout = self._layout
        return layout.owners > 1 or (layout.ep > 1 and layout.expert_owners > 1)

    @property
    def _by_owner(self) -> bool:
        """True if there are several owners, and buckets are laid out by owner."""
        return self._settings.strategy == "canzona" and self._several_owners

    def _best(self, exposure: Exposure) -> Candidate:
        """Returns the first candidate that is as fast as the fastest, up to `ALIKE`.

        Candidates are, in this order: the balanced assignment with renumbered owners, and owners in natural
        order in buckets of the default size. The last is left out with a memory cap or mode shared. If
        buckets are not laid out by owner, only the assignment itself is a candidate.
        """
        limit = self._limit(exposure)
        assignment = self._shared_where_faster(self._balanced(limit), limit, exposure)
        if not self._by_owner:
            return self._candidate(assignment, limit, exposure)
        members, layout = self._members, self._layout
        candidates = [self._candidate(renumber_owners(members, assignment, layout, limit), limit, exposure)]
        if self._memory_cap is None and self._settings.mode != "shared":
            # A balanced assignment may lose more time to communication than its balance gains.
            natural = self._assign(replace(self._settings, strategy="asc"), self._default_limit, shared=False)
            candidates.append(self._candidate(natural, self._default_limit, exposure))
        return candidates[_first_fastest([candidate.seconds for candidate in candidates])]

    def _limit(self, exposure: Exposure) -> int | None:
        """Returns the number of elements at which buckets of the first stage are closed.

        If the planner may choose the size, it is the multiple of Megatron's default that is fastest by an
        estimate that needs no owners.
        """
        estimates_s = self.outlined_seconds(exposure)
        if not estimates_s:
            return self._default_limit
        return [*estimates_s][_first_fastest([*estimates_s.values()])]

    def outlined_seconds(self, exposure: Exposure) -> Mapping[int, float]:
        """Estimates the seconds that a plan adds to an iteration, by the size at which buckets are closed, for
        every size that the planner may choose. Owners are not needed. Empty if the size is given."""
        default = self._default_limit
        if default is None or not (self._resizes and self._several_owners and exposure.reductions.rings):
            return {}
        if exposure not in self._outlined:
            update_s = max(self._bounds)
            self._outlined[exposure] = {
                limit: exposure.estimate(self._outline(limit), self._members, update_s)
                for limit in bucket_limits(default)
            }
        return self._outlined[exposure]

    def _outline(self, limit: int) -> list[Outline]:
        """Returns the buckets of the first stage if they are closed at `limit` elements. Of the experts, only
        those of the first expert-parallel rank are included."""
        outlines: list[Outline] = []
        for pool in typical_pools(self._members):
            for bucket in pool_buckets(self._members, pool, self._layout, limit) if pool.stage == 0 else ():
                parts = [part.elements for parameter in bucket for part in parameter.parts]
                matrices = tuple(parameter.parts[0].matrices[0] for parameter in bucket)
                outline = Outline(
                    elements=sum(parts), largest=max(parts), matrices=matrices, experts=pool.expert_rank is not None
                )
                outlines.append(outline)
        return outlines

    def _balanced(self, limit: int | None) -> Assignment:
        """Returns the balanced assignment, which shares no matrix unless the mode is shared."""
        return self._assign(self._settings, limit, shared=self._settings.mode == "shared")

    def _shared_where_faster(self, hosted: Assignment, limit: int | None, exposure: Exposure) -> Assignment:
        """Shares matrices if the mode is auto, the assignment `hosted` leaves ranks idle, and sharing is
        faster."""
        if self._settings.mode != "auto" or not self._possible or not self._leaves_idle(hosted):
            return hosted
        shared = self._assign(self._settings, limit, shared=True)
        if all(one.owner == other.owner for one, other in zip(hosted.cells, shared.cells, strict=True)):
            shared = self._grouping.faster_owners(hosted, shared)
        # The buckets of the two assignments hardly differ.
        chunks = exposure.chunks(self._alternatives(hosted, limit, exposure)[0], self._members)
        shared_s, hosted_s = (
            exposure.gathering_seconds(chunks, self._grouping.slowest_owner_seconds(way)) for way in (shared, hosted)
        )
        return shared if hosted_s > (1 + ALIKE) * shared_s else hosted

    def _assign(self, settings: PlanSettings, limit: int | None, *, shared: bool) -> Assignment:
        """Returns the assignment with these settings, from a cache or newly made.

        Args:
            limit: the number of elements at which buckets are closed; None for one bucket per model chunk.
            shared: True if matrices may be shared.
        """
        key = settings, shared, limit
        if key not in self._assignments:
            self._assignments[key] = assign(
                self._members,
                [float(matrix.elements) for matrix in self._members] if settings.strategy == "paper" else self._costs,
                self._layout,
                settings,
                self._memory_cap if settings.strategy != "asc" else None,
                bucket_elements=limit,
                bytes_per_element=self._element_bytes,
                shared_costs=self._possible if shared else HOSTED,
            )
        return self._assignments[key]

    def _leaves_idle(self, assignment: Assignment) -> bool:
        """Returns True if some stage's busiest rank takes longer than `SHARING_GAIN` times the lower
        bound."""
        layout, bounds = self._layout, self._bounds
        return any(
            max(assignment.loads(stage_matrices(self._members, stage), self._costs, layout.owners, layout.tp))
            > SHARING_GAIN * bounds[stage]
            for stage in {pool.stage for pool in typical_pools(self._members)}
        )

    def _candidate(self, assignment: Assignment, limit: int | None, exposure: Exposure) -> Candidate:
        """Completes an assignment with buckets, which are reduced and gathered in the ways that add the
        fewest seconds to an iteration."""
        alternatives = self._alternatives(assignment, limit, exposure)
        update_s = self._grouping.slowest_owner_seconds(assignment)
        chunks = [exposure.chunks(alternative, self._members) for alternative in alternatives]
        reducing_s = [exposure.reduction_seconds(of_alternative) for of_alternative in chunks]
        gathering_s = [exposure.gathering_seconds(of_alternative, update_s) for of_alternative in chunks]
        reduced = _first_fastest(reducing_s)
        gathered = _first_fastest(gathering_s)
        chosen = tuple(
            with_ways(reduced_bucket, reduced_bucket.reduction, gathered_bucket.gathering)
            for reduced_bucket, gathered_bucket in zip(alternatives[reduced], alternatives[gathered], strict=True)
        )
        seconds = rounded(reducing_s[reduced] + gathering_s[gathered])
        return Candidate(assignment=assignment, limit=limit, buckets=chosen, seconds=seconds)

    def _alternatives(
        self, assignment: Assignment, limit: int | None, exposure: Exposure
    ) -> tuple[tuple[Bucket, ...], ...]:
        """Returns the buckets of `typical_pools` in each alternative of `ReductionModel.choices`."""
        key = SameObject(assignment.cells), limit
        if key not in self._laid_out:
            typical = typical_pools(self._members)
            made = buckets(self._members, assignment, self._layout, self._settings, limit, typical)
            self._laid_out[key] = tuple(exposure.reductions.choices(made, self._settings))
        return self._laid_out[key]

    def _buckets(self, candidate: Candidate) -> tuple[Bucket, ...]:
        """Returns the buckets of all pools. The buckets of alike pools are reduced and gathered in the same ways."""
        alike = alike_pools(self._members)
        if all(pool == first for pool, first in alike.items()):
            return candidate.buckets
        typical: dict[Pool, list[Bucket]] = defaultdict(list)
        for bucket in candidate.buckets:
            typical[Pool(bucket.stage, bucket.expert_rank)].append(bucket)
        made = buckets(self._members, candidate.assignment, self._layout, self._settings, candidate.limit)
        return tuple(
            with_ways(bucket, typical_bucket.reduction, typical_bucket.gathering)
            for place, of_pool in groupby(made, lambda bucket: Pool(bucket.stage, bucket.expert_rank))
            for bucket, typical_bucket in zip(of_pool, typical[alike[place]], strict=True)
        )


def _first_fastest(seconds: Sequence[float]) -> int:
    """Returns the index of the first time that is within `ALIKE` of the shortest."""
    least = min(seconds)
    return next(index for index, time in enumerate(seconds) if time <= (1 + ALIKE) * least)
