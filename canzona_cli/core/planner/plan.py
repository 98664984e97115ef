"""The `Plan`: which rank updates which matrix, in which buckets and micro-groups. `canzona plan` prints it
and the engine executes it. A plan is frozen, has a version, and has a hash of its content that is the same on
every rank and node.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.core.costs.sharing import HOSTED, SharedCost, SharedCosts, shared_exchanges
from canzona_cli.core.fields import CountOrZero, NotNegative, Seconds
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import (
    Gathering,
    Mesh,
    Mode,
    Precision,
    Reduction,
    Splitting,
    Strategy,
)

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rank of a pipeline stage's grid."""

    owner: int
    """The index of the data- and context-parallel rank."""
    host: int
    """The TP rank in the owner's TP group."""

    @classmethod
    def at(cls, index: int, mesh: Mesh) -> "Cell":
        """Returns the cell at `index` in its stage; the inverse of `Cell.index`."""
        owner, host = divmod(index, mesh.tp)
        return cls(owner=owner, host=host)

    def index(self, tp: int) -> int:
        """Returns the cell's index in its stage, `owner * tp + host`."""
        return self.owner * tp + self.host

    def reducing_rank(self, matrix: Matrix, mesh: Mesh) -> int:
        """Returns the rank that receives a matrix's reduced gradient, numbered in the group that reduces it:
        the cell's owner, or for an expert its `Mesh.expert_owner`."""
        return self.owner if matrix.expert_rank is None else mesh.expert_owner(self.index(mesh.tp))


def sum_by_cell[Amount: (int, float)](
    placed: Iterable[tuple[Cell, Amount, bool]], zero: Amount, *, cells: int, tp: int
) -> list[Amount]:
    """Adds up amounts for each cell of a stage, at index `Cell.index`.

    Args:
        placed: (cell, amount, on_all_hosts) triples. If `on_all_hosts` is True, the amount is added to every
            cell of the cell's owner.
        zero: the start of each sum, 0 or 0.0.
    """
    sums = [zero] * cells
    for cell, amount, on_all_hosts in placed:
        first_cell = cell.owner * tp
        for index in range(first_cell, first_cell + tp) if on_all_hosts else (first_cell + cell.host,):
            sums[index] += amount
    return sums


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The cell that updates each matrix, `cells[matrix.index]`, and the matrices that are shared by an
    owner's TP group."""

    cells: tuple[Cell, ...]
    shared_costs: SharedCosts = HOSTED
    """The costs of the shared matrices, by index."""

    def loads(self, matrices: Iterable[Matrix], costs: Sequence[float], dp: int, tp: int) -> list[float]:
        """Returns the update seconds of each cell of a stage, at index `owner * tp + host`.

        Args:
            matrices: the matrices of the stage.
            costs: the seconds of all matrices.
        """
        loads = [0.0] * (dp * tp)
        for index in [matrix.index for matrix in matrices]:
            cell, shared_cost = self.cells[index], self.shared_costs.get(index)
            first_cell = cell.owner * tp
            if shared_cost is None:
                loads[first_cell + cell.host] += costs[index]
                continue
            for each in range(first_cell, first_cell + tp):
                loads[each] += shared_cost.each
        return loads


class SameObject[Value](NamedTuple):
    """A plan or a list of thousands of matrices as the key of a cache. Only the same object is equal, because comparing
    values would take longer than computing what is cached."""

    value: Value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Range(NamedTuple):
    """Consecutive elements of a bucket that have one owner, as offsets into one TP rank's buffer. A plan file
    stores a range as a list of its fields."""

    start: CountOrZero
    end: CountOrZero
    owner: CountOrZero
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A piece of a stage's matrix buffer whose gradients are reduced, and whose weights are gathered,
    together."""

    index: CountOrZero
    stage: CountOrZero
    elements: CountOrZero
    """The elements of the bucket on one rank, padding included."""
    padding: CountOrZero
    reduction: Reduction = "reduce"
    """The way in which gradients are reduced to their owners."""
    gathering: Gathering = "broadcast"
    """The way in which weights are gathered from their owners."""
    parameters: tuple[str, ...]
    """The parameters in buffer order."""
    ranges: tuple[Range, ...]
    """The owners' ranges, ascending; elements between two ranges are padding. An owner may have several
    ranges, or none."""
    expert_rank: CountOrZero | None = None
    """The expert-parallel rank to which the bucket's experts belong; owners are then numbered by
    `Mesh.expert_owner`. None for other matrices."""


def rank_buckets(buckets: Iterable[Bucket], stage: int, expert_rank: int = 0) -> list[Bucket]:
    """Returns the buckets of a rank, in order, given its stage and expert-parallel rank."""
    return [bucket for bucket in buckets if bucket.stage == stage and bucket.expert_rank in (None, expert_rank)]


@dataclass(frozen=True, kw_only=True)
class MicroGroup:
    """The matrices of one owner that are sent together over the owner's TP group, in one fused all-to-all in
    each direction. Shared matrices in a group are not sent."""

    stage: CountOrZero
    owner: CountOrZero
    index: CountOrZero
    """The group's place in the order of execution."""
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The planner's settings."""

    strategy: Strategy
    splitting: Splitting = "split"
    alpha: float = 1.0
    """The weight of the total over buckets in the paper's cuts; 1 for other strategies."""
    c_max_bytes: int | None = None
    """C_max, the largest number of bytes that a host receives in one fused exchange; None if the planner
    chooses it."""
    reduction: Reduction | None = None
    """The way in which all buckets are reduced; None if the planner chooses a way for each bucket."""
    exchange_dtype: Precision = "fp32"
    """The number type in which gradients are sent between TP ranks."""
    mode: Literal["auto"] | Mode = "auto"

    def capacity(self, bytes_per_element: int) -> int | None:
        """Returns C_max in elements; None if it is not set."""
        return None if self.c_max_bytes is None else self.c_max_bytes // bytes_per_element


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The inputs of a plan; runs with equal subjects get equal plans."""

    model: Mapping[str, Scalar]
    """The model's shapes, excluding its name: two models with the same shapes share a plan."""
    layout: Mesh
    optimizer: Algorithm
    settings: PlanSettings
    buffers: Mapping[str, Scalar]
    """The bucket size, the types of weights and reduced gradients, and the size and recomputation of a
    micro-batch."""
    profile: Mapping[str, Scalar]
    """The values of the hardware profile on which costs depend."""

    def content(self) -> dict[str, dict[str, Scalar]]:
        """Returns each field as a dictionary of plain values."""
        return {name: {**part} if isinstance(part, Mapping) else asdict(part) for name, part in vars(self).items()}

    def flat(self) -> dict[str, Scalar]:
        """Returns all values under dotted keys such as `layout.tp`."""
        return {f"{part}.{name}": value for part, values in self.content().items() for name, value in values.items()}


VERSION = 11
"""The version of plan files. A change of their content or its meaning raises it; other versions are not
read."""
_CONTENT = ("version", "subject", "lower_bounds", "matrices", "buckets", "micro_groups")
_MATRIX = tuple(field.name for field in fields(Matrix))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run. Plans with equal content have equal hashes, no matter which process made them."""

    subject: Subject
    matrices: tuple[Matrix, ...]
    costs: tuple[float, ...]
    """The seconds that one rank needs to update each matrix."""
    assignment: Assignment
    buckets: tuple[Bucket, ...]
    """The matrices' buckets; AdamW's parameters stay in Megatron's own buffers."""
    groups: tuple[MicroGroup, ...]
    lower_bounds: tuple[float, ...]
    """The lower bound on each stage's update seconds, which no assignment can beat."""
    version: int = VERSION

    @cached_property
    def hash(self) -> str:
        """The sha256 of the content's canonical JSON, in hexadecimal."""
        return _digest(self.content())

    @property
    def name(self) -> str:
        return self.hash[:8]

    @cached_property
    def placed(self) -> tuple[tuple[tuple[Matrix, Cell], ...], ...]:
        """The matrices of each stage with their cells."""
        stages: list[list[tuple[Matrix, Cell]]] = [[] for _ in range(self.subject.layout.pp)]
        for matrix, cell in zip(self.matrices, self.assignment.cells, strict=True):
            stages[matrix.stage].append((matrix, cell))
        return tuple(map(tuple, stages))

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each matrix: hosted or shared."""
        shared = self.assignment.shared_costs
        return tuple("shared" if matrix.index in shared else "hosted" for matrix in self.matrices)

    def loads(self, stage: int) -> list[float]:
        """Returns the update seconds of each cell of a stage, at index `owner * tp + host`."""
        mesh = self.subject.layout
        matrices = (matrix for matrix, _ in self.placed[stage])
        return self.assignment.loads(matrices, self.costs, mesh.owners, mesh.tp)

    @cached_property
    def held_elements(self) -> tuple[list[int], ...]:
        """The matrix elements that each cell of each stage holds, at index `owner * tp + host`. A hosted
        matrix is held whole by its host; a shared matrix is divided evenly among the hosts of its owner."""
        mesh, shared = self.subject.layout, self.assignment.shared_costs
        stages = tuple([0] * mesh.cells for _ in range(mesh.pp))
        for matrix, cell in zip(self.matrices, self.assignment.cells, strict=True):
            held, first_cell = stages[matrix.stage], cell.owner * mesh.tp
            if matrix.index not in shared:
                held[first_cell + cell.host] += matrix.elements
                continue
            for index in range(first_cell, first_cell + mesh.tp):
                held[index] += matrix.elements // mesh.tp
        return stages

    def content(self) -> dict[str, object]:
        """Returns everything that the hash covers, ready for JSON; `from_content` is the inverse."""
        return {
            "version": self.version,
            "subject": self.subject.content(),
            "lower_bounds": self.lower_bounds,
            "matrices": [
                {
                    **_fields_for_file(matrix),
                    "seconds": cost,
                    **vars(cell),
                    **_execution_fields(self.assignment.shared_costs.get(matrix.index)),
                }
                for matrix, cost, cell in zip(self.matrices, self.costs, self.assignment.cells, strict=True)
            ],
            "buckets": [_fields_for_file(bucket) for bucket in self.buckets],
            "micro_groups": [{**vars(group)} for group in self.groups],
        }

    def to_json(self, **extra: object) -> str:
        """Returns the text of a plan file: the content, its hash, and `extra`, which the hash does not cover.

        Every matrix, bucket and micro-group has a line, so that `diff` can compare two plans.
        """
        return "{\n" + ",\n".join(_lines({"hash": self.hash, **self.content(), **extra})) + "\n}\n"

    @classmethod
    def from_content(cls, content: Mapping[str, object]) -> "Plan":
        """Makes a plan from its content, which was read from a file or received from another rank.

        Raises:
            ValueError: an entry is missing, unknown or of a wrong type, or the plan is inconsistent (see
                `_check`).
        """
        parsed = parse(_Content, content)
        plan = cls(
            version=parsed.version,
            subject=parsed.subject,
            lower_bounds=parsed.lower_bounds,
            matrices=tuple(Matrix(**{name: getattr(entry, name) for name in _MATRIX}) for entry in parsed.matrices),
            costs=tuple(entry.seconds for entry in parsed.matrices),
            assignment=Assignment(
                cells=tuple(Cell(owner=entry.owner, host=entry.host) for entry in parsed.matrices),
                shared_costs=MappingProxyType(
                    {
                        place: SharedCost(fragment=entry.fragment)
                        for place, entry in enumerate(parsed.matrices)
                        if entry.execution != "hosted"
                    }
                ),
            ),
            buckets=parsed.buckets,
            groups=parsed.micro_groups,
        )
        if plan.hash != content_hash(content):
            raise ValueError("its entries are not exactly those of a plan")
        _check(plan)
        return plan


def content_hash(content: Mapping[str, object]) -> str:
    """Computes the hash of a plan file's content; ignores entries that the hash does not cover."""
    return _digest({name: content[name] for name in _CONTENT if name in content})


def _digest(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _fields_for_file(entry: Matrix | Bucket) -> dict[str, object]:
    """Returns the fields of a matrix or bucket for a plan file, without `expert_rank` if that is None."""
    values = {**vars(entry)}
    if isinstance(entry, Matrix):
        values.pop("shape", None), values.pop("elements", None)  # cached properties
    if entry.expert_rank is None:
        del values["expert_rank"]
    return values


def _execution_fields(shared_cost: SharedCost | None) -> dict[str, object]:
    """Returns the fields of a plan file that say whether a matrix is hosted or shared."""
    if shared_cost is None:
        return {"execution": "hosted"}
    return {"execution": "shared", "fragment": shared_cost.fragment}


def _lines(content: Mapping[str, object]) -> Iterator[str]:
    """Yields the lines of a plan file: one for each value, and one for each entry of a list of entries."""
    for name, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            # All entries are encoded in one call, which is faster, with a separator that occurs in no text.
            entries = json.dumps(value, allow_nan=False, separators=(",\0", ": "))[1:-1]
            yield f'"{name}": [\n ' + entries.replace("},\0{", "},\n {").replace("\0", " ") + "\n]"
        else:
            yield f'"{name}": {json.dumps(value, allow_nan=False)}'


@dataclass(frozen=True, kw_only=True)
class _MatrixEntry(Matrix):
    """A matrix's entry in a plan file."""

    seconds: Seconds
    owner: CountOrZero
    host: CountOrZero
    execution: Mode
    fragment: tuple[Seconds, ...] = ()
    """The seconds of `SharedCost.fragment` if the matrix is shared, otherwise empty."""


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
    """Checks the properties on which the engine relies. Every matrix is listed once, is on a cell of the grid
    that stores it, and is in exactly one range of a bucket and in exactly one micro-group of its owner. A
    shared matrix is one that can be shared. An expert with an `expert_rank` is in a bucket of that
    expert-parallel rank and in no micro-group.

    Raises:
        ValueError: the plan is inconsistent.
    """
    if len(plan.lower_bounds) != plan.subject.layout.pp:
        raise ValueError(f"it has {len(plan.lower_bounds)} lower bounds for {plan.subject.layout.pp} stages")
    _check_matrices(plan)
    _check_buckets(plan)
    _check_groups(plan)


def _check_matrices(plan: Plan) -> None:
    mesh, cells = plan.subject.layout, plan.assignment.cells
    if twice := [name for name, count in Counter(matrix.name for matrix in plan.matrices).items() if count > 1]:
        raise ValueError(f"it has two matrices called {twice[0]}")
    for index, (matrix, cell) in enumerate(zip(plan.matrices, cells, strict=True)):
        if matrix.index != index or not 0 <= matrix.stage < mesh.pp or not 0 <= matrix.chunk < mesh.vpp:
            raise ValueError(f"matrix {matrix.name} has an index, stage or chunk that is not valid")
        if not (0 <= cell.owner < mesh.owners and 0 <= cell.host < mesh.tp):
            raise ValueError(f"matrix {matrix.name} is on owner {cell.owner}, host {cell.host}: outside the grid")
        if matrix.expert_rank not in (None, mesh.expert_rank(cell.index(mesh.tp))):
            raise ValueError(
                f"matrix {matrix.name} is on owner {cell.owner}, host {cell.host}, which does not store it"
            )
        shared_cost = plan.assignment.shared_costs.get(index)
        if shared_cost is None:
            continue
        parts = len(shared_exchanges(plan.subject.optimizer.ns_steps)) + 1
        evenly = min(matrix.shape) % mesh.tp == 0
        if not (mesh.tp > 1 and matrix.cut_long and evenly and len(shared_cost.fragment) == parts):
            raise ValueError(f"matrix {matrix.name} cannot be shared as the plan says")


def _check_buckets(plan: Plan) -> None:
    mesh, cells = plan.subject.layout, plan.assignment.cells
    ranged = [index for bucket in plan.buckets for part in bucket.ranges for index in part.matrices]
    if sorted(ranged) != list(range(len(plan.matrices))):
        raise ValueError("the buckets do not contain every matrix exactly once")
    for bucket in plan.buckets:
        end = 0
        of_bucket = [plan.matrices[index] for part in bucket.ranges for index in part.matrices]
        if any((matrix.stage, matrix.expert_rank) != (bucket.stage, bucket.expert_rank) for matrix in of_bucket):
            raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} has matrices of other ranks")
        for part in bucket.ranges:
            if not end <= part.start < part.end <= bucket.elements:
                raise ValueError(
                    f"bucket {bucket.index} of stage {bucket.stage} has ranges that overlap or exceed its elements"
                )
            if any(cells[i].reducing_rank(plan.matrices[i], mesh) != part.owner for i in part.matrices):
                raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} gives a matrix to another owner")
            end = part.end
        if len({matrix.chunk for matrix in of_bucket}) > 1:
            raise ValueError(f"bucket {bucket.index} of stage {bucket.stage} has matrices of several model chunks")


def _check_groups(plan: Plan) -> None:
    cells = plan.assignment.cells
    grouped = [index for group in plan.groups for index in group.matrices]
    if sorted(grouped) != [matrix.index for matrix in plan.matrices if matrix.expert_rank is None]:
        raise ValueError("the micro-groups do not contain every matrix that is sent between TP ranks exactly once")
    for group in plan.groups:
        for index in group.matrices:
            if (plan.matrices[index].stage, cells[index].owner) != (group.stage, group.owner):
                raise ValueError(f"matrix {plan.matrices[index].name} is in another owner's micro-group")
