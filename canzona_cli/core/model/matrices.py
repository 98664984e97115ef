"""Lists the matrices that a matrix optimizer updates, and assigns all parameters to that optimizer or to
AdamW. The matrices depend only on the model's shapes, the layout, and the splitting of weights.

The 2-D weights of layers, except routers, are matrices or consist of several matrices; AdamW updates
embedding, output layer, norms, biases and routers. Order, names, shapes and the position of each element do
not depend on the tensor-parallel size (q, k, v, gate and up are as in published checkpoints, with outputs as
rows).
"""

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import ClassVar, Literal

from canzona_cli.core.errors import ConfigError, problem_with, refuse
from canzona_cli.core.fields import CountOrZero, Side
from canzona_cli.core.model.families import (
    EMBEDDING,
    FINAL_BIAS,
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    all_layers,
    family_of,
    layer_kinds,
)
from canzona_cli.core.model.family import Kind
from canzona_cli.core.setup import Execution, KroneckerConfig, Layout, ModelConfig, OptimizerName, Setup, Splitting
from canzona_cli.core.setup.execution import splitting_of
from canzona_cli.core.setup.layout_rules import uneven_problems
from canzona_cli.core.setup.stages import chunk_layers, pipeline_problems

Shape = tuple[int, int]
"""The (rows, columns) of a matrix."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A full 2-D weight that the optimizer updates as one matrix."""

    index: CountOrZero
    """The position in the plan's list of matrices."""
    name: str
    """The name, such as layers.3.gate. Layers are numbered through the whole model."""
    kind: Kind
    layer: CountOrZero
    stage: CountOrZero
    """The pipeline stage."""
    chunk: CountOrZero = 0
    """The model chunk within the stage (`Layout.vpp`); chunk 0 has the first layers."""
    rows: Side
    cols: Side
    shard_dim: Literal[0, 1] | None
    """The dimension that tensor parallelism divides; None if TP ranks do not have fragments."""
    parameter: str
    """The Megatron parameter that holds the matrix: decoder.layers.3.mlp.linear_fc1.weight."""
    unit: CountOrZero
    """The index of the matrix's unit. Matrices of a unit must have the same owner: q, k and v, for example,
    are interleaved in one range of the buffer."""
    home: CountOrZero | None = None
    """The only TP rank that stores the matrix, for per-head matrices; None for other matrices."""
    expert_rank: CountOrZero | None = None
    """The expert-parallel rank whose cells (`Mesh.expert_rank`) store the whole matrix. Only experts'
    matrices have one, and only if `Mesh.ep` exceeds 1; None for all other matrices."""

    @cached_property
    def shape(self) -> Shape:
        return self.rows, self.cols

    @cached_property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def replicated(self) -> bool:
        """True if every TP rank stores the whole matrix."""
        return self.shard_dim is None and self.home is None and self.expert_rank is None

    @property
    def cut_long(self) -> bool:
        """True if tensor parallelism divides the long side, so that fragments have the full short side.
        Either side of a square is a long side."""
        return self.shard_dim is not None and self.shape[self.shard_dim] >= self.shape[1 - self.shard_dim]

    def holders(self, tp: int) -> range:
        """Returns the TP ranks that store the matrix or a fragment of it: only its home if it has one,
        otherwise all. For a matrix with an `expert_rank`, `tp` must be 1."""
        return range(tp) if self.home is None else range(self.home, self.home + 1)

    def held_elements(self, tp: int) -> int:
        """Returns the number of elements on each of the matrix's `holders`."""
        return self.elements if self.shard_dim is None or self.home is not None else self.elements // tp

    def fragment_shape(self, tp: int) -> tuple[int, int]:
        """Returns the (rows, columns) on each of the matrix's `holders`. The rows may be in another order
        than in the matrix."""
        if self.shard_dim is None:
            return self.shape
        return (self.rows // tp, self.cols) if self.shard_dim == 0 else (self.rows, self.cols // tp)

    def fragment_elements(self, tp: int) -> int:
        """Returns the number of elements on one TP rank. For a matrix with a home, this is the average over
        TP ranks, which store equal numbers of heads. A matrix with an `expert_rank` is whole on one rank."""
        return self.elements if self.shard_dim is None and self.home is None else self.elements // tp


@dataclass(frozen=True, kw_only=True)
class LayerMatrix:
    """One matrix of a layer, before matrices are numbered through the model."""

    name: str
    """The matrix's name in its layer: gate, or q.3 for the fourth head's."""
    kind: Kind
    rows: int
    cols: int
    shard_dim: Literal[0, 1] | None
    """The dimension that tensor parallelism divides; None if every TP rank stores the whole matrix."""
    parameter: str
    """The Megatron parameter that holds the matrix, without the prefix of the layer:
    mlp.linear_fc1.weight."""
    unit: int
    """The index of the unit within the layer; matrices of a unit must have the same owner."""
    slices: int = 0
    """The number of heads of this kind in the parameter, which TP must divide evenly; 0 unless the matrix
    belongs to one head."""
    slice: int = 0
    """The index of the matrix's head, below `slices`."""
    expert: int | None = None
    """The index of the expert in the layer; None for matrices outside experts."""

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """Consecutive layers with the same matrices."""

    layers: int
    matrices: tuple[LayerMatrix, ...]


def matrices(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    """Lists all matrices of a model in registration order: layer by layer, proj, qkv, fc1, fc2 as Megatron
    makes them.

    Args:
        splitting: the way in which parameters are divided into matrices. fused: each parameter is one matrix.
            qkv: q, k and v are separate matrices, fc1 is one matrix, as in Megatron's Muon. split: q, k, v,
            gate and up are separate matrices. q, k and v share a unit, because a TP rank's fragment of qkv is
            interleaved by query group; gate and up are two units, because its fragment of fc1, `[gate_r;
            up_r]`, is two ranges. per_head: like split, but every head of q, k and v is a matrix, stored on
            one TP rank (`Matrix.home`).

    Raises:
        ConfigError: tensor parallelism does not divide a dimension evenly, or the layers cannot be cut into
            the stages.
    """
    return _matrices(model, replace(layout.bare, dp=1, global_batch_size=1), splitting)


@lru_cache(maxsize=16)
def _matrices(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    _refuse_uneven(_blocks(model, splitting), layout)
    # TP only divides matrices, unless a head is one: layouts that differ in tp share the list.
    return _numbered(model, layout if splitting == "per_head" else replace(layout, tp=1), splitting)


@lru_cache(maxsize=16)
def _numbered(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    return number_matrices(_blocks(model, splitting), layout)


def _blocks(model: ModelConfig, splitting: Splitting) -> tuple[LayerBlock, ...]:
    return tuple(
        LayerBlock(layers=layers, matrices=layer_matrices(kind, splitting)) for kind, layers in all_layers(model)
    )


def number_matrices(blocks: Sequence[LayerBlock], layout: Layout) -> tuple[Matrix, ...]:
    """Numbers the matrices of consecutive blocks, and assigns each to a pipeline stage, a model chunk, a unit
    and, if only some ranks store it, a home or an expert-parallel rank.

    Raises:
        ConfigError: see `matrices`.
    """
    _refuse_uneven(blocks, layout)
    matrices: list[Matrix] = []
    index = layer = unit = 0
    stage_and_chunk = _stages_and_chunks(sum(block.layers for block in blocks), layout)
    for block in blocks:
        units = 1 + max(matrix.unit for matrix in block.matrices)
        experts = 1 + max((matrix.expert for matrix in block.matrices if matrix.expert is not None), default=0)
        of_layer = [_in_layout(matrix, layout, experts) for matrix in block.matrices]
        for matrix in of_layer:
            _ = matrix.shape, matrix.elements  # computed here, once for all layers
        for _ in range(block.layers):
            stage, chunk = stage_and_chunk[layer]
            prefix = f"layers.{layer}."
            for matrix in of_layer:
                numbered = object.__new__(Matrix)  # three times as fast as `replace`, which sets field by field
                vars(numbered).update(
                    vars(matrix),
                    index=index,
                    name=prefix + matrix.name,
                    layer=layer,
                    stage=stage,
                    chunk=chunk,
                    parameter=f"decoder.{prefix}{matrix.parameter}",
                    unit=unit + matrix.unit,
                )
                matrices.append(numbered)
                index += 1
            layer += 1
            unit += units
    return tuple(matrices)


def _refuse_uneven(blocks: Sequence[LayerBlock], layout: Layout) -> None:
    """Raises ConfigError if tensor parallelism does not divide a dimension evenly, or the layers cannot be cut into
    the stages."""
    matrices = (matrix for block in blocks for matrix in block.matrices if not _is_whole(matrix, layout))
    uneven = uneven_problems("parallel.tp", layout.tp, dict.fromkeys(_cut_by_tp(matrices)))
    refuse([*uneven, *pipeline_problems(sum(block.layers for block in blocks), layout.pp, layout.vpp)])


def _in_layout(matrix: LayerMatrix, layout: Layout, experts: int) -> Matrix:
    """Returns a matrix with the names and numbers that it has in its layer.

    Args:
        experts: the number of experts in the layer.
    """
    per_head, whole = matrix.slices > 0 and layout.tp > 1, _is_whole(matrix, layout)
    return Matrix(
        index=0,
        name=matrix.name,
        kind=matrix.kind,
        layer=0,
        stage=0,
        chunk=0,
        rows=matrix.rows,
        cols=matrix.cols,
        shard_dim=None if per_head or whole else matrix.shard_dim,
        parameter=matrix.parameter,
        unit=matrix.unit,
        home=matrix.slice * layout.tp // matrix.slices if per_head else None,
        expert_rank=(matrix.expert or 0) * layout.ep // experts if whole else None,
    )


def _is_whole(matrix: LayerMatrix, layout: Layout) -> bool:
    """Returns True if tensor parallelism does not cut the matrix, because it belongs to an expert and experts
    are divided among ranks."""
    return layout.ep > 1 and matrix.expert is not None


def _stages_and_chunks(layers: int, layout: Layout) -> Mapping[int, tuple[int, int]]:
    """Returns the stage and the model chunk of each layer."""
    return {
        layer: (stage, chunk)
        for stage in range(layout.pp)
        for chunk in range(layout.vpp)
        for layer in chunk_layers(layers, layout, stage, chunk)
    }


@lru_cache(maxsize=64)
def layer_shapes(model: ModelConfig, splitting: Splitting) -> tuple[Shape, ...]:
    """Returns the (rows, columns) of each matrix of a layer, in registration order."""
    return tuple((matrix.rows, matrix.cols) for matrix in layer_matrices(model, splitting))


@lru_cache(maxsize=64)
def layer_runs(model: ModelConfig, splitting: Splitting) -> tuple[tuple[Shape, int], ...]:
    """Returns `layer_shapes` as (shape, number of matrices) of consecutive equal shapes: a few, even with hundreds of
    experts."""
    return tuple((shape, len(list(equal))) for shape, equal in groupby(layer_shapes(model, splitting)))


def matrix_shapes(setup: Setup) -> tuple[Shape, ...]:
    """Returns the (rows, columns) of each matrix of a layer of each kind, with weights split as in the run's
    strategy."""
    splitting = splitting_of(setup)
    return tuple(shape for kind in layer_kinds(setup.model) for shape in layer_shapes(kind, splitting))


def stage_matrices(matrices: Sequence[Matrix], stage: int) -> tuple[Matrix, ...]:
    """Selects the matrices of one pipeline stage, in order."""
    return tuple(matrix for matrix in matrices if matrix.stage == stage)


_SPLIT: Mapping[Splitting, Container[Kind]] = {
    "fused": (),
    "qkv": ("qkv",),
    "split": ("qkv", "fc1"),
    "per_head": ("qkv", "fc1"),
}
"""The parameters whose parts are separate matrices, by splitting; every other parameter is one matrix."""


@lru_cache(maxsize=64)
def layer_matrices(model: ModelConfig, splitting: Splitting) -> tuple[LayerMatrix, ...]:
    """Lists the matrices of one layer, in registration order."""
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
                        name=f"{kind}.{head}" if heads else f"{parameter.unit_prefix}{kind}",
                        kind=kind,
                        rows=rows // (heads or 1),
                        cols=parameter.cols,
                        shard_dim=parameter.shard_dim,
                        parameter=parameter.name,
                        unit=unit,
                        slices=heads,
                        slice=head,
                        expert=parameter.expert,
                    )
                )
            # Parts that repeat are interleaved in one range of the buffer, so they share a unit.
            if parameter.cut != "repeats":
                unit += 1
        if parameter.cut == "repeats":
            unit += 1
    return tuple(matrices)


@lru_cache(maxsize=64)
def layer_on_rank(
    model: ModelConfig, splitting: Splitting, ep: int
) -> tuple[Sequence[LayerMatrix], Sequence[LayerMatrix]]:
    """Lists the matrices of one layer that a rank stores: the matrices that tensor parallelism cuts, and the
    whole matrices of the rank's experts under expert parallelism."""
    layer = layer_matrices(model, splitting)
    if ep == 1:
        return layer, ()
    cut = tuple(matrix for matrix in layer if matrix.expert is None)
    experts = model.num_experts // ep
    return cut, tuple(matrix for matrix in layer if matrix.expert is not None and matrix.expert < experts)


def _cut_by_tp(matrices: Iterable[LayerMatrix]) -> Iterator[tuple[int, str]]:
    """Yields the (number, name) of rows, columns or heads that tensor parallelism must divide evenly."""
    for matrix in matrices:
        if matrix.slices:
            yield matrix.slices, f"heads of {matrix.kind}"
        elif matrix.shard_dim == 0:
            yield matrix.rows, f"rows of {matrix.kind}"
        elif matrix.shard_dim == 1:
            yield matrix.cols, f"columns of {matrix.kind}"


@dataclass(frozen=True, kw_only=True)
class Routed:
    """A group of parameters or matrices whose names differ only in numbers."""

    pattern: str
    """The name with `*` for numbers: layers.*.q, layers.*.experts.*.gate or, per head, layers.*.q.* for
    matrices; Megatron's name for parameters."""
    count: int
    elements: int
    """The total number of elements."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The parameters of a model by the optimizer that updates them."""

    VERSION: ClassVar[int] = 1
    optimizer: OptimizerName
    matrices: tuple[Routed, ...]
    """The matrices that `optimizer` updates; empty if `optimizer` is AdamW."""
    adamw: tuple[Routed, ...]
    """The parameters that AdamW updates."""


def routing(setup: Setup) -> Routing:
    """Assigns a run's parameters to its optimizer or to AdamW; `tests/dist/test_initial_weights.py` compares
    the result with Megatron's model.

    Raises:
        ConfigError: the matrix optimizer would have no matrix to update.
    """
    model = setup.model
    adamw_only = setup.execution is Execution.ADAMW
    vocabulary = model.vocab_size * model.hidden_size

    def of_layer(kind: ModelConfig) -> Iterator[tuple[str, int]]:
        family = family_of(kind)
        for parameter in (*(family.weights(kind) if adamw_only else ()), *family.small(kind)):
            yield parameter.name, parameter.elements

    positions, final_bias = model.positions * model.hidden_size, model.layernorm
    adamw = (
        Routed(pattern=EMBEDDING, count=1, elements=vocabulary),
        *((Routed(pattern=POSITIONS, count=1, elements=positions),) if positions else ()),
        *_group_by_pattern("decoder.layers.*.", model, of_layer),
        Routed(pattern=FINAL_NORM, count=1, elements=model.hidden_size),
        *((Routed(pattern=FINAL_BIAS, count=1, elements=model.hidden_size),) if final_bias else ()),
        *(() if model.tied_embeddings else (Routed(pattern=OUTPUT, count=1, elements=vocabulary),)),
    )
    return Routing(optimizer=setup.optimizer.name, matrices=() if adamw_only else _group_matrices(setup), adamw=adamw)


def _group_matrices(setup: Setup) -> tuple[Routed, ...]:
    """Groups the matrices that the run's matrix optimizer updates.

    Raises:
        ConfigError: the optimizer would have no matrix to update.
    """
    model, splitting, chosen = setup.model, splitting_of(setup), setup.optimizer
    if isinstance(chosen, KroneckerConfig):
        longest, shortest = chosen.max_preconditioner_dim, min(map(min, matrix_shapes(setup)))
        if shortest > longest:
            reason = f"every matrix has longer sides, so {chosen.name} would update no matrix"
            fix = f"use at least optimizer.max_preconditioner_dim={shortest}, or optimizer=adamw"
            raise ConfigError(problem_with(setup, "optimizer.max_preconditioner_dim", reason, fix))

    def of_layer(kind: ModelConfig) -> Iterator[tuple[str, int]]:
        return ((matrix.name, matrix.elements) for matrix in layer_matrices(kind, splitting))

    return _group_by_pattern("layers.*.", model, of_layer)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$")
"""The index of a head or of an expert in a name."""


def _group_by_pattern(
    prefix: str, model: ModelConfig, named: Callable[[ModelConfig], Iterable[tuple[str, int]]]
) -> tuple[Routed, ...]:
    """Groups the parameters or matrices of all layers by pattern.

    Args:
        named: a function that returns the names in a layer, without `prefix`, with their elements, given a model
            all of whose layers are like it.
    """
    counts, elements = Counter[str](), Counter[str]()
    for kind, layers in all_layers(model):
        for name, elements_each in named(kind):
            pattern = prefix + _NUMBER.sub("*", name)
            counts[pattern] += layers
            elements[pattern] += layers * elements_each
    return tuple(Routed(pattern=pattern, count=counts[pattern], elements=elements[pattern]) for pattern in counts)
