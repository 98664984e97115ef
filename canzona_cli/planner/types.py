"""The words of a plan as types. Frozen, JSON-serialisable, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.schema import BufferLayout, Grouping, Precision, Reduction, Splitting, Strategy
from canzona_cli.model.matrix import Matrix

Mode = Literal["hosted"]
"""How a matrix is updated; later: gram_sharded."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What an update costs depends on."""

    name: Literal["adamw", "muon", "shampoo", "soap"]
    """Whose update is priced; for a user's own optimizer the one it is like."""
    custom: bool = False
    """A user's own: measurements are looked up under its own label."""
    ns_steps: int = 5
    newton_schulz: Literal["standard", "gram"] = "standard"
    refresh_period: int = 10
    """Shampoo and SOAP: steps between refreshes of roots or eigenbases."""
    max_preconditioner_dim: int = 8192
    """Shampoo and SOAP: a side longer than this is not preconditioned."""
    grafting: Literal["none", "sgd", "adam"] = "none"
    """Shampoo: whose update's norm it is given."""
    precision: Precision = "bf16"
    """Muon: what its products are in. Shampoo's and SOAP's are in fp32."""
    tf32: bool = True
    """Shampoo and SOAP: in TF32 where there is any."""
    stack: bool = False
    """Muon: matrices of one shape in batched products."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rank of a pipeline stage's grid."""

    owner: int
    """DP rank."""
    host: int
    """TP rank of the owner's TP group."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which cell updates which matrix: `cells[matrix.index]`."""

    cells: tuple[Cell, ...]

    def loads(self, matrices: Sequence[Matrix], costs: Sequence[float], stage: int, dp: int, tp: int) -> list[float]:
        """Seconds of update per cell of a stage, index `owner * tp + host`."""
        loads = [0.0] * (dp * tp)
        for matrix, cell, cost in zip(matrices, self.cells, costs, strict=True):
            if matrix.stage == stage:
                loads[cell.owner * tp + cell.host] += cost
        return loads


@dataclass(frozen=True, kw_only=True)
class Range:
    """Consecutive elements of a bucket with one owner; offsets in this rank's (TP fragment) elements."""

    start: int
    end: int
    owner: int
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One unit of gradient reduction and parameter gathering of one stage's matrix buffer."""

    index: int
    stage: int
    parameters: tuple[str, ...]
    """In buffer order."""
    elements: int
    """Of the buffer, padding included."""
    padding: int
    ranges: tuple[Range, ...]
    """Ascending; what lies between two is padding. An owner may have none, or several."""
    reduction: Reduction = "reduce"
    """How its gradients get to their owners; even only where every owner's shard is as long as the others'."""


@dataclass(frozen=True, kw_only=True)
class MicroGroup:
    """Matrices of one owner whose fragments travel in one fused all-to-all over the owner's TP group."""

    stage: int
    owner: int
    index: int
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
