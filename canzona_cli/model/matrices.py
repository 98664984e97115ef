"""The matrices of a model: what a matrix optimizer updates, from shapes and layout alone; and the routing of
all parameters, to that optimizer or to AdamW.

Every 2-D weight of a layer is one; embedding, output layer, norms, biases and routers are AdamW's. Order,
names and shapes are canonical: they do not depend on the tensor-parallel size, and neither does which element
is which (q, k, v and gate, up as the published checkpoints store them, rows being outputs).
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.layout_rules import pipeline_problems, uneven_problems
from canzona_cli.config.schema import KroneckerConfig, Layout, ModelConfig, OptimizerName, RunConfig, Splitting
from canzona_cli.config.settings import problem_with
from canzona_cli.errors import ConfigError, refuse
from canzona_cli.fields import CountOrZero, Side
from canzona_cli.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of
from canzona_cli.model.family import Kind


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A logical, full 2-D weight that the optimizer treats as one."""

    index: CountOrZero
    """Position in the plan's list."""
    name: str
    """The name, as layers.3.gate; layers are numbered over the whole model."""
    kind: Kind
    layer: CountOrZero
    stage: CountOrZero
    """Pipeline stage."""
    chunk: CountOrZero = 0
    """Model chunk of its stage, the one with the first layers being 0 (`Layout.vpp`)."""
    rows: Side
    cols: Side
    shard_dim: Literal[0, 1] | None
    """Dimension that tensor parallelism cuts; None where every TP rank holds it whole."""
    parameter: str
    """The Megatron parameter it is part of: decoder.layers.3.mlp.linear_fc1.weight."""
    unit: CountOrZero
    """Matrices of one unit must have the same owner: q,
    k and v lie interleaved in one range of the buffer."""
    home: CountOrZero | None = None
    """The one TP rank that stores it, whole (a head's matrix); None for every other kind of matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def replicated(self) -> bool:
        """True where every TP rank holds the whole of it."""
        return self.shard_dim is None and self.home is None

    @property
    def cut_long(self) -> bool:
        """True where tensor parallelism cuts its long side (of a square either), so that fragments have all
        of the other."""
        return self.shard_dim is not None and self.shape[self.shard_dim] >= self.shape[1 - self.shard_dim]

    def holders(self, tp: int) -> range:
        """TP ranks that store a part of it: all of them, or its home alone."""
        return range(tp) if self.home is None else range(self.home, self.home + 1)

    def held_elements(self, tp: int) -> int:
        """Elements on each of its `holders`."""
        return self.elements if self.shard_dim is None or self.home is not None else self.elements // tp

    def fragment_shape(self, tp: int) -> tuple[int, int]:
        """Rows and columns on each of its `holders`, in whatever order those of the cut dimension come."""
        if self.shard_dim is None:
            return self.shape
        return (self.rows // tp, self.cols) if self.shard_dim == 0 else (self.rows, self.cols // tp)

    def fragment_elements(self, tp: int) -> int:
        """Elements on one TP rank; with a home, its share on average:
        the heads of a unit are dealt out evenly."""
        return self.elements if self.replicated else self.elements // tp


@dataclass(frozen=True, kw_only=True)
class LayerMatrix:
    """One matrix of one layer, before it is numbered."""

    name: str
    """The matrix's name in its layer: gate, or q.3 for the fourth head's."""
    kind: Kind
    rows: int
    cols: int
    shard_dim: Literal[0, 1] | None
    """Dimension that tensor parallelism cuts; None where every TP rank holds it whole."""
    parameter: str
    """The Megatron parameter it is part of, below its layer: mlp.linear_fc1.weight."""
    unit: int
    """Number within the layer; matrices of one unit must have the same owner."""
    slices: int = 0
    """Heads its parameter has of this kind, of which this is number `slice`:
    TP deals them out whole. 0: no head."""
    slice: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """Consecutive layers of one shape."""

    layers: int
    matrices: tuple[LayerMatrix, ...]


def matrices(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    """Lists all matrices of a model in registration order: layer by layer, proj, qkv, fc1,
    fc2 as Megatron makes them.

    split: q, k and v share a unit, because a TP rank's fragment of qkv is interleaved by query group; gate
    and up are units of their own, because its fragment of fc1 is `[gate_r; up_r]`, two ranges. per_head:
    every head of q, k and v is a matrix, which lives whole on one TP rank (`Matrix.home`); proj stays one.
    fused: as Megatron stores them. qkv:
    q, k and v as in split, fc1 as in fused, which is what Megatron's own Muon updates.

    Raises:
        ConfigError: a dimension that tensor parallelism does not cut evenly, or layers that stages do not.
    """
    return _matrices(model, replace(layout.bare, dp=1, global_batch_size=1), splitting)


@lru_cache(maxsize=16)
def _matrices(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    return number((LayerBlock(layers=model.num_layers, matrices=layer_matrices(model, splitting)),), layout)


def number(blocks: Sequence[LayerBlock], layout: Layout) -> tuple[Matrix, ...]:
    """The matrices of consecutive blocks, indexed in order, each with its pipeline stage,
    model chunk and unit.

    Raises:
        ConfigError: as `matrices`.
    """
    layers = sum(block.layers for block in blocks)
    cut = dict.fromkeys(_cut_by_tp(matrix for block in blocks for matrix in block.matrices))
    problems = [
        *uneven_problems("parallel.tp", layout.tp, cut, "parts"),
        *pipeline_problems(layers, layout.pp, layout.vpp),
    ]
    refuse(problems)
    matrices: list[Matrix] = []
    layer = unit = 0
    per_chunk = layers // (layout.pp * layout.vpp)
    for block in blocks:
        units = 1 + max(matrix.unit for matrix in block.matrices)
        for _ in range(block.layers):
            chunk, stage = divmod(layer // per_chunk, layout.pp)
            for matrix in block.matrices:
                dealt = matrix.slices > 0 and layout.tp > 1
                matrices.append(
                    Matrix(
                        index=len(matrices),
                        name=f"layers.{layer}.{matrix.name}",
                        kind=matrix.kind,
                        layer=layer,
                        stage=stage,
                        chunk=chunk,
                        rows=matrix.rows,
                        cols=matrix.cols,
                        shard_dim=None if dealt else matrix.shard_dim,
                        parameter=f"decoder.layers.{layer}.{matrix.parameter}",
                        unit=unit + matrix.unit,
                        home=matrix.slice * layout.tp // matrix.slices if dealt else None,
                    )
                )
            layer, unit = layer + 1, unit + units
    return tuple(matrices)


@lru_cache(maxsize=64)
def layer_shapes(model: ModelConfig, splitting: Splitting) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one layer's matrices, in registration order."""
    return tuple((matrix.rows, matrix.cols) for matrix in layer_matrices(model, splitting))


def stage_matrices(matrices: Sequence[Matrix], stage: int) -> tuple[Matrix, ...]:
    """Selects the matrices of one pipeline stage, in order."""
    return tuple(matrix for matrix in matrices if matrix.stage == stage)


_SPLIT: Mapping[Splitting, Container[Kind]] = {
    "fused": (),
    "qkv": ("qkv",),
    "split": ("qkv", "fc1"),
    "per_head": ("qkv", "fc1"),
}
"""Parameters whose parts are matrices of their own; the others are one matrix each."""


def layer_matrices(model: ModelConfig, splitting: Splitting) -> tuple[LayerMatrix, ...]:
    """One layer's, in registration order."""
    matrices: list[LayerMatrix] = []
    unit = 0
    for parameter in family_of(model).weights(model):
        split = parameter.kind in _SPLIT[splitting]
        parts = {part.kind: parameter.repeats * part.rows for part in parameter.parts}
        for kind, rows in (parts if split else {parameter.kind: parameter.rows}).items():
            heads = rows // model.head_dim if splitting == "per_head" and parameter.kind == "qkv" else 0
            for head in range(heads or 1):
                matrices.append(
                    LayerMatrix(
                        name=f"{kind}.{head}" if heads else kind,
                        kind=kind,
                        rows=rows // (heads or 1),
                        cols=parameter.cols,
                        shard_dim=parameter.shard_dim,
                        parameter=parameter.name,
                        unit=unit,
                        slices=heads,
                        slice=head,
                    )
                )
            # Parts that repeat lie interleaved in one range of the buffer, so they share a unit.
            unit += parameter.cut != "repeats"
        unit += parameter.cut == "repeats"
    return tuple(matrices)


def _cut_by_tp(matrices: Iterable[LayerMatrix]) -> Iterator[tuple[int, str]]:
    """Counts what tensor parallelism deals out evenly: rows, columns, or whole heads."""
    for matrix in matrices:
        name = matrix.name.partition(".")[0]
        if matrix.slices:
            yield matrix.slices, f"heads of {name}"
        elif matrix.shard_dim is not None:
            yield (matrix.rows, f"rows of {name}") if matrix.shard_dim == 0 else (matrix.cols, f"columns of {name}")


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Parameters or matrices whose names differ only in their numbers."""

    pattern: str
    """The name of matrices, layers.*.q, or layers.*.q.* where each head is one;
    else Megatron's name of a parameter."""
    count: int
    elements: int
    """Elements of all together."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of a whole model."""

    VERSION: ClassVar[int] = 1
    optimizer: OptimizerName
    matrices: tuple[Routed, ...]
    """Matrices that `optimizer` updates whole; none where that is AdamW."""
    adamw: tuple[Routed, ...]
    """Parameters that AdamW updates element by element."""


def routing(config: RunConfig) -> Routing:
    """Routes a run's parameters; `tests/dist/test_initial_weights.py` compares it with Megatron's model.

    Raises:
        ConfigError: a matrix optimizer would have no matrix.
    """
    model, layers = config.model, config.model.num_layers
    alone = execution_of(config) is Execution.ADAMW
    vocabulary = model.vocab_size * model.hidden_size
    family = family_of(model)
    weights = {weight.name: weight.elements for weight in family.weights(model)} if alone else {}
    norms = {norm.name: norm.elements for norm in family.norms(model)}
    rest = (
        Routed(pattern=EMBEDDING, count=1, elements=vocabulary),
        *(
            Routed(pattern=f"decoder.layers.*.{name}", count=layers, elements=layers * elements)
            for name, elements in (weights | norms).items()
        ),
        Routed(pattern=FINAL_NORM, count=1, elements=model.hidden_size),
        *(() if model.tied_embeddings else (Routed(pattern=OUTPUT, count=1, elements=vocabulary),)),
    )
    return Routing(optimizer=config.optimizer.name, matrices=() if alone else _routed(config), adamw=rest)


def _routed(config: RunConfig) -> tuple[Routed, ...]:
    model, splitting, chosen = config.model, splitting_of(config), config.optimizer
    if isinstance(chosen, KroneckerConfig):
        longest, shortest = chosen.max_preconditioner_dim, min(map(min, layer_shapes(model, splitting)))
        if shortest > longest:
            reason = f"no side of any matrix is as short as that, so {chosen.name} would treat nothing as a matrix"
            fix = f"use at least optimizer.max_preconditioner_dim={shortest}, or optimizer=adamw"
            raise ConfigError(problem_with(config, "optimizer.max_preconditioner_dim", reason, fix))
    counts, elements = Counter[str](), Counter[str]()
    for matrix in layer_matrices(model, splitting):
        pattern = "layers.*." + re.sub(r"\.\d+$", ".*", matrix.name)
        counts[pattern] += model.num_layers
        elements[pattern] += model.num_layers * matrix.rows * matrix.cols
    return tuple(Routed(pattern=pattern, count=counts[pattern], elements=elements[pattern]) for pattern in counts)
