"""The `Plan`: which rank updates which matrix, in which buckets and micro-groups. `canzona plan` prints it,
the engine executes it. Frozen, versioned, and with a hash over its whole content that is the same on every
rank and machine.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.config.schema import (
    BufferLayout,
    Gathering,
    Grouping,
    Mesh,
    Mode,
    Precision,
    Reduction,
    Splitting,
    Strategy,
)
from canzona_cli.costs.sharing import HOSTED, Share, shared_exchanges
from canzona_cli.fields import CountOrZero, NotNegative, Seconds
from canzona_cli.model.matrices import Matrix
from canzona_cli.optimizers.facts import Algorithm
from canzona_cli.run.codec import parse

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rank of a pipeline stage's grid."""

    owner: int
    """DP rank."""
    host: int
    """TP rank of the owner's TP group."""

    def held(self, matrix: Matrix, tp: int, *, shared: bool) -> Iterator[tuple["Cell", int]]:
        """Yields who keeps a matrix of this cell, and how many elements of it: the cell all of it, or each of
        its row a fragment."""
        if not shared:
            yield self, matrix.elements
            return
        for host in range(tp):
            yield Cell(owner=self.owner, host=host), matrix.elements // tp


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The cell of each matrix, `cells[matrix.index]`, and the matrices that an owner's whole TP group updates."""

    cells: tuple[Cell, ...]
    shares: Mapping[int, Share] = HOSTED
    """The prices of shared matrices, by index."""

    def loads(self, matrices: Sequence[Matrix], costs: Sequence[float], stage: int, dp: int, tp: int) -> list[float]:
        """Seconds of update per cell of a stage, index `owner * tp + host`."""
        loads = [0.0] * (dp * tp)
        for matrix, cell, cost in zip(matrices, self.cells, costs, strict=True):
            if matrix.stage != stage:
                continue
            first, share = cell.owner * tp, self.shares.get(matrix.index)
            if share is None:
                loads[first + cell.host] += cost
                continue
            for place in range(first, first + tp):
                loads[place] += share.each
        return loads


class Range(NamedTuple):
    """Consecutive elements of a bucket with one owner; offsets in this rank's (TP fragment) elements.

    A tuple, as it is in a plan's file.
    """

    start: CountOrZero
    end: CountOrZero
    owner: CountOrZero
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One unit of gradient reduction and parameter gathering of one stage's matrix buffer."""

    index: CountOrZero
    stage: CountOrZero
    elements: CountOrZero
    """The elements of the buffer, padding included."""
    padding: CountOrZero
    reduction: Reduction = "reduce"
    """The way its gradients get to their owners."""
    gathering: Gathering = "broadcast"
    """The way its weights come back from them."""
    parameters: tuple[str, ...]
    """The parameters in buffer order."""
    ranges: tuple[Range, ...]
    """Ascending; what lies between two is padding. An owner may have none, or several."""


@dataclass(frozen=True, kw_only=True)
class MicroGroup:
    """Matrices of one owner whose fragments travel in one fused all-to-all over the owner's TP group."""

    stage: CountOrZero
    owner: CountOrZero
    index: CountOrZero
    """Order of execution."""
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings that the planner was given."""

    strategy: Strategy
    layout: BufferLayout = "owner"
    splitting: Splitting = "split"
    alpha: float = 1.0
    c_max_bytes: int | None = None
    """Largest fused exchange of one rank; null: chosen by `auto`."""
    grouping: Grouping = "auto"
    reduction: Reduction | None = None
    """The way of every bucket; null: chosen for each, see `planner.reduction`."""
    exchange_dtype: Precision = "fp32"
    """The type in which gradients travel between TP ranks."""
    mode: Literal["auto"] | Mode = "auto"

    def capacity(self, bytes_per_element: int) -> int | None:
        """Elements that C_max is."""
        return None if self.c_max_bytes is None else self.c_max_bytes // bytes_per_element


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
class Subject:
    """The inputs of a plan; runs with equal subjects get equal plans."""

    model: Mapping[str, Scalar]
    """Shapes, not names: two models of the same shapes share a plan."""
    layout: Mesh
    optimizer: Algorithm
    settings: PlanSettings
    buffers: Mapping[str, Scalar]
    """Bucket size, overlap, widths of weights and gradients."""
    profile: Mapping[str, Scalar]
    """The hardware figures that costs come from."""

    def content(self) -> dict[str, dict[str, Scalar]]:
        """Each part as plain values, in the order of the fields."""
        return {name: {**part} if isinstance(part, Mapping) else asdict(part) for name, part in vars(self).items()}

    def flat(self) -> dict[str, Scalar]:
        """`layout.tp` and so on."""
        return {f"{part}.{name}": value for part, values in self.content().items() for name, value in values.items()}


VERSION = 8
"""Changes with the content or its meaning; a plan of another version is not read."""
_CONTENT = ("version", "subject", "lower_bounds", "matrices", "buckets", "micro_groups")
_MATRIX = tuple(field.name for field in fields(Matrix))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole of it. Equal content has an equal `hash`, whichever process computed it."""

    subject: Subject
    matrices: tuple[Matrix, ...]
    costs: tuple[float, ...]
    """Seconds of one update by one rank, by matrix."""
    assignment: Assignment
    buckets: tuple[Bucket, ...]
    """The matrices' buckets; AdamW's parameters stay in Megatron's own buffers."""
    groups: tuple[MicroGroup, ...]
    lower_bounds: tuple[float, ...]
    """Seconds, by stage: no assignment updates a stage's matrices in less."""
    version: int = VERSION

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON, hexadecimal."""
        return _digest(self.content())

    @property
    def name(self) -> str:
        return self.hash[:8]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each matrix."""
        return tuple("shared" if matrix.index in self.assignment.shares else "hosted" for matrix in self.matrices)

    def loads(self, stage: int) -> list[float]:
        """Seconds of update per cell of a stage, index `owner * tp + host`."""
        mesh = self.subject.layout
        return self.assignment.loads(self.matrices, self.costs, stage, mesh.owners, mesh.tp)

    def content(self) -> dict[str, object]:
        """Everything the hash covers, as JSON takes it; the inverse of `from_content`."""
        return {
            "version": self.version,
            "subject": self.subject.content(),
            "lower_bounds": self.lower_bounds,
            "matrices": [
                {**vars(matrix), "seconds": cost, **vars(cell), **_executed(self.assignment.shares.get(matrix.index))}
                for matrix, cost, cell in zip(self.matrices, self.costs, self.assignment.cells, strict=True)
            ],
            "buckets": [{**vars(bucket)} for bucket in self.buckets],
            "micro_groups": [{**vars(group)} for group in self.groups],
        }

    def to_json(self, **extra: object) -> str:
        """The plan as a file's text: its content, its hash, and `extra`, which the hash does not cover.

        One line per matrix, bucket and micro-group, so that two plans can be compared with `diff`.
        """
        return "{\n" + ",\n".join(_lines({"hash": self.hash, **self.content(), **extra})) + "\n}\n"

    @classmethod
    def from_content(cls, content: Mapping[str, object]) -> "Plan":
        """The plan that has this content, read from a file or received from another rank.

        Raises:
            ValueError: something is missing, unknown or of a wrong type, or it names ranks or matrices that
            do not
                exist.
        """
        read = parse(_Content, content)
        plan = cls(
            version=read.version,
            subject=read.subject,
            lower_bounds=read.lower_bounds,
            matrices=tuple(Matrix(**{name: getattr(entry, name) for name in _MATRIX}) for entry in read.matrices),
            costs=tuple(entry.seconds for entry in read.matrices),
            assignment=Assignment(
                cells=tuple(Cell(owner=entry.owner, host=entry.host) for entry in read.matrices),
                shares=MappingProxyType(
                    {
                        place: Share(fragment=entry.fragment)
                        for place, entry in enumerate(read.matrices)
                        if entry.execution != "hosted"
                    }
                ),
            ),
            buckets=read.buckets,
            groups=read.micro_groups,
        )
        if plan.hash != content_hash(content):
            raise ValueError("it does not have exactly the entries of a plan")
        _check(plan)
        return plan


def content_hash(content: Mapping[str, object]) -> str:
    """The hash that `content`, read from a file, should have; what the hash does not cover is left out."""
    return _digest({name: content[name] for name in _CONTENT if name in content})


def _digest(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _executed(share: Share | None) -> dict[str, object]:
    if share is None:
        return {"execution": "hosted"}
    return {"execution": "shared", "fragment": share.fragment}


def _lines(content: Mapping[str, object]) -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f'"{name}": [\n ' + ",\n ".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
        else:
            yield f'"{name}": {json.dumps(value, allow_nan=False)}'


@dataclass(frozen=True, kw_only=True)
class _MatrixEntry(Matrix):
    """A matrix in a file."""

    seconds: Seconds
    owner: CountOrZero
    host: CountOrZero
    execution: Mode
    fragment: tuple[Seconds, ...] = ()
    """`Share`, where it is shared."""


@dataclass(frozen=True, kw_only=True)
class _Content:
    """A plan's content as `Plan.content` writes it."""

    version: int
    subject: Subject
    lower_bounds: tuple[NotNegative, ...]
    matrices: tuple[_MatrixEntry, ...]
    buckets: tuple[Bucket, ...]
    micro_groups: tuple[MicroGroup, ...]


def _check(plan: Plan) -> None:
    """Checks what the engine relies on: every matrix once in the list, in the grid, in one range of a bucket
    and in one micro-group of its owner.
    """
    mesh, cells = plan.subject.layout, plan.assignment.cells
    if len(plan.lower_bounds) != mesh.pp:
        raise ValueError(f"it has {len(plan.lower_bounds)} lower bounds for {mesh.pp} stages")
    if twice := [name for name, count in Counter(matrix.name for matrix in plan.matrices).items() if count > 1]:
        raise ValueError(f"it has two matrices called {twice[0]}")
    for index, (matrix, cell) in enumerate(zip(plan.matrices, cells, strict=True)):
        if matrix.index != index or not 0 <= matrix.stage < mesh.pp or not 0 <= matrix.chunk < mesh.vpp:
            raise ValueError(f"matrix {matrix.name} is out of place")
        if not (0 <= cell.owner < mesh.owners and 0 <= cell.host < mesh.tp):
            raise ValueError(f"matrix {matrix.name} is on owner {cell.owner}, host {cell.host}: outside of the grid")
        share = plan.assignment.shares.get(index)
        if share is None:
            continue
        parts = len(shared_exchanges(plan.subject.optimizer.ns_steps)) + 1
        evenly = min(matrix.shape) % mesh.tp == 0
        if not (mesh.tp > 1 and matrix.cut_long and evenly and len(share.fragment) == parts):
            raise ValueError(f"matrix {matrix.name} cannot be shared as the plan says")
    ranged = [index for bucket in plan.buckets for part in bucket.ranges for index in part.matrices]
    if sorted(ranged) != list(range(len(plan.matrices))):
        raise ValueError("the buckets do not have every matrix exactly once")
    for bucket in plan.buckets:
        end = 0
        for part in bucket.ranges:
            if not end <= part.start < part.end <= bucket.elements:
                raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} has ranges that overlap or leave it")
            if any((plan.matrices[i].stage, cells[i].owner) != (bucket.stage, part.owner) for i in part.matrices):
                raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} gives a matrix to another owner")
            end = part.end
        if len({plan.matrices[i].chunk for part in bucket.ranges for i in part.matrices}) > 1:
            raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} has matrices of several model chunks")
    grouped = [index for group in plan.groups for index in group.matrices]
    if sorted(grouped) != list(range(len(plan.matrices))):
        raise ValueError("the micro-groups do not have every matrix exactly once")
    for group in plan.groups:
        for index in group.matrices:
            if (plan.matrices[index].stage, cells[index].owner) != (group.stage, group.owner):
                raise ValueError(f"matrix {plan.matrices[index].name} is in another owner's micro-group")
