"""What canzona is compared with: the owners and buckets of Megatron's layer-wise optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.buckets import align, lay_out, owners, stage_parameters, stages
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
