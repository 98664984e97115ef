"""The `Plan`: which rank updates which matrix, in which buckets and micro-groups. `canzona plan` prints it, the engine
executes it. Frozen, versioned, and with a hash over its whole content that is the same on every rank and machine.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

from canzona_cli.config.schema import Mode
from canzona_cli.fields import CountOrZero, NotNegative, Seconds
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.parts import Assignment, Bucket, Cell, MicroGroup, Share, Subject
from canzona_cli.planner.sharing import shared_exchanges
from canzona_cli.run.codec import parse

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
    """Of the matrices; AdamW's parameters stay in Megatron's own buffers."""
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
        """By matrix."""
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
            ValueError: something is missing, unknown or of a wrong type, or it names ranks or matrices that do not
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
    """What `Plan.content` writes."""

    version: int
    subject: Subject
    lower_bounds: tuple[NotNegative, ...]
    matrices: tuple[_MatrixEntry, ...]
    buckets: tuple[Bucket, ...]
    micro_groups: tuple[MicroGroup, ...]


def _check(plan: Plan) -> None:
    """What the engine relies on: every matrix once in the list, in the grid, in one range of a bucket and in one
    micro-group of its owner.
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
