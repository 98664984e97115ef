"""What canzona is compared with: Megatron's layer-wise optimizer, and the paper's own partition."""

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.assign import balanced_cuts, by_owner
from canzona_cli.planner.buckets import align, cut, lay_out, owners, stage_parameters, stages
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.plan import Assignment, Bucket, Cell, Range


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """Where `LayerWiseDistributedOptimizer` puts every matrix; all TP ranks of an owner update it (duplicated)."""

    owners: tuple[int, ...]
    """Owner of each matrix, by index."""
    buckets: tuple[Bucket, ...]

    @property
    def assignment(self) -> Assignment:
        """The owners as cells; hosts mean nothing, every TP rank of the owner updates the matrix."""
        return Assignment(cells=tuple(Cell(owner=owner, host=0) for owner in self.owners))

    def loads(self, matrices: Sequence[Matrix], costs: Sequence[float], stage: int, dp: int) -> list[float]:
        """Seconds of update per owner of a stage; each of its TP ranks spends all of them."""
        loads = [0.0] * dp
        for matrix, owner, cost in zip(matrices, self.owners, costs, strict=True):
            if matrix.stage == stage:
                loads[owner] += cost
        return loads


def layerwise(matrices: Sequence[Matrix], layout: Layout, bucket_elements: int | None = None) -> Layerwise:
    """Layout of megatron-core 0.19: whole parameters packed into equal padded shards by elements (`lay_out`).

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    shards = owners(layout)
    owner_of = [0] * len(matrices)
    found: list[Bucket] = []
    for stage in stages(matrices):
        parameters = stage_parameters(matrices, stage, layout.tp)
        sizes = [parameter.elements for parameter in parameters]
        for index, bucket in enumerate(lay_out(sizes, shards, bucket_elements if stage == 0 else None)):
            ranges, names, used = [], [], 0
            for owner, held in enumerate(bucket.shards):
                position = owner * bucket.shard_elements
                for number in held:
                    parameter, start = parameters[number], align(position)
                    position = start + parameter.elements
                    used += parameter.elements
                    names.append(parameter.name)
                    ranges.append(Range(start=start, end=position, owner=owner, matrices=parameter.matrices))
                    for matrix in parameter.matrices:
                        owner_of[matrix] = owner
            found.append(
                Bucket(
                    index=index,
                    stage=stage,
                    parameters=tuple(names),
                    elements=bucket.elements,
                    padding=bucket.elements - used,
                    ranges=tuple(ranges),
                    reduction="even",
                )
            )
    return Layerwise(owners=tuple(owner_of), buckets=tuple(found))


def paper_contiguous(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    layout: Layout,
    alpha: float = 1.0,
    bucket_elements: int | None = None,
) -> Assignment:
    """The paper's partition: whole parameters in natural order, weighed by elements (`balanced_cuts`).

    Hosts are packed by cost, which flatters it: its own pipeline balances within each micro-group only.
    """
    ranks = owners(layout)
    packer = HostPacker(costs, layout.tp)
    cells = [Cell(owner=0, host=0)] * len(matrices)
    for stage in stages(matrices):
        pieces = cut(stage_parameters(matrices, stage, layout.tp), bucket_elements, stage=stage)
        weights = [[float(parameter.elements) for parameter in bucket] for bucket in pieces]
        owner_of = {
            parameter.matrices: owner
            for bucket, owned in zip(pieces, balanced_cuts(weights, ranks, alpha), strict=True)
            for parameter, owner in zip(bucket, owned, strict=True)
        }
        units = {members[0]: members for members in owner_of}
        held = by_owner(units, {members[0]: owner for members, owner in owner_of.items()}, ranks)
        for owner, indices in enumerate(held):
            for index, host in zip(indices, packer.hosts(indices), strict=True):
                cells[index] = Cell(owner=owner, host=host)
    return Assignment(cells=tuple(cells))


def imbalance(loads: Sequence[float]) -> float:
    """Load balance: max over mean; 1.0 is perfect."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0
