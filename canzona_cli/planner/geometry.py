"""How a stage's matrices lie in Megatron's gradient buffer before any owner is chosen: parameters, then buckets.

Megatron walks parameters backwards through the model, because that is the order their gradients become ready in, and
closes a bucket once it holds `bucket_elements` (`DistributedOptimizer._compute_per_buffer_param_layout`, 0.19).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.placement import chunks

ALIGNMENT = 64
"""Elements a parameter's start is a multiple of (Megatron's `pad_param_start`)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of a parameter that must have one owner."""

    unit: int
    matrices: tuple[int, ...]
    """Indices in the plan's list."""
    elements: int
    """On one TP rank."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One Megatron parameter; fc1 has two parts, [gate_r; up_r], everything else one."""

    name: str
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        """On one TP rank."""
        return sum(part.elements for part in self.parts)

    @property
    def matrices(self) -> tuple[int, ...]:
        return tuple(index for part in self.parts for index in part.matrices)

    def undivided(self) -> "Parameter":
        """The same as one part."""
        part = Part(unit=self.parts[0].unit, matrices=self.matrices, elements=self.elements)
        return replace(self, parts=(part,))


def owners(layout: Layout) -> int:
    """Ranks gradients are reduced over, which is what owners are chosen from: data and context parallel together."""
    return layout.dp * layout.cp


def stages(matrices: Sequence[Matrix]) -> list[int]:
    """Pipeline stages that have matrices, ascending."""
    return sorted({matrix.stage for matrix in matrices})


def stage_parameters(matrices: Sequence[Matrix], stage: int, tp: int) -> list[Parameter]:
    """A stage's parameters, in registration order."""
    grouped: dict[str, dict[int, list[Matrix]]] = {}
    for matrix in matrices:
        if matrix.stage == stage:
            grouped.setdefault(matrix.parameter, {}).setdefault(matrix.unit, []).append(matrix)
    return [
        Parameter(
            name=name,
            parts=tuple(
                Part(
                    unit=unit,
                    matrices=tuple(matrix.index for matrix in members),
                    elements=_on_one_rank(members, tp),
                )
                for unit, members in units.items()
            ),
        )
        for name, units in grouped.items()
    ]


def _on_one_rank(members: Sequence[Matrix], tp: int) -> int:
    """Elements one TP rank stores of a unit; heads lie whole on one rank each, as many on every rank."""
    dealt = sum(matrix.elements for matrix in members if matrix.home is not None)
    return dealt // tp + sum(matrix.fragment_elements(tp) for matrix in members if matrix.home is None)


def cut(
    parameters: Sequence[Parameter], bucket_elements: int | None, *, stage: int, shards: int | None = None
) -> list[list[Parameter]]:
    """Parameters of each bucket, last registered first. Megatron makes one bucket of every stage but the first.

    shards: with equal padded shards (layout aligned), their number; a bucket then grows, as Megatron's layer-wise ones
    do, until its largest parameter no longer dominates, because every shard is as long as that.
    """
    limit = bucket_elements if stage == 0 else None
    if shards is not None:
        sizes = [parameter.elements for parameter in parameters]
        return [[parameters[number] for number in chunk] for chunk in chunks(sizes, shards, limit)]
    found: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled = align(filled) + parameter.elements
        if limit is not None and filled >= limit:
            found.append(bucket)
            bucket, filled = [], 0
    return [*found, bucket] if bucket else found


def align(position: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Where a bucket that ends at `position` is padded to: divisible by the ranks, and the next one starts aligned."""
    return align(position, math.lcm(shards, ALIGNMENT))
