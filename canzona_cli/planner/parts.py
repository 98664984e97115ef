"""What a `Plan` consists of: the ranks and settings it is for, who updates which matrix, buckets, micro-groups."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from canzona_cli.fields import CountOrZero, Seconds
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.facts import Algorithm

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rank of a pipeline stage's grid."""

    owner: int
    """DP rank."""
    host: int
    """TP rank of the owner's TP group."""

    def held(self, matrix: Matrix, tp: int, *, shared: bool) -> Iterator[tuple["Cell", int]]:
        """Who keeps a matrix of this cell's, and how many elements of it: the cell all of it, or each of its row a
        fragment."""
        if not shared:
            yield self, matrix.elements
            return
        for host in range(tp):
            yield Cell(owner=self.owner, host=host), matrix.elements // tp


@dataclass(frozen=True, kw_only=True)
class Share:
    """The price of a shared matrix's update."""

    fragment: tuple[Seconds, ...]
    """Seconds of every rank of the owner's TP group: before, between and after its exchanges
    (`sharing.shared_exchanges`)."""

    @property
    def each(self) -> float:
        """The seconds of every rank in all."""
        return sum(self.fragment)


HOSTED: Mapping[int, Share] = MappingProxyType({})
"""`Assignment.shares` where there are none."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which cell updates which matrix, `cells[matrix.index]`, and which ones the owner's whole TP group does."""

    cells: tuple[Cell, ...]
    shares: Mapping[int, Share] = HOSTED
    """Of shared matrices, by index."""

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
    """Of the buffer, padding included."""
    padding: CountOrZero
    reduction: Reduction = "reduce"
    """How its gradients get to their owners."""
    gathering: Gathering = "broadcast"
    """How its weights come back from them."""
    parameters: tuple[str, ...]
    """In buffer order."""
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
    """What the planner was asked for."""

    strategy: Strategy
    layout: BufferLayout = "owner"
    splitting: Splitting = "split"
    alpha: float = 1.0
    c_max_bytes: int | None = None
    """Largest fused exchange of one rank; null: chosen by `auto`."""
    grouping: Grouping = "auto"
    reduction: Reduction | None = None
    """Of every bucket; null: chosen for each, see `planner.reduction`."""
    exchange_dtype: Precision = "fp32"
    """What gradients travel in between TP ranks."""
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
    """What a plan is for and was computed from; runs with equal subjects get equal plans."""

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
