"""The matrices of a model: what a matrix optimizer updates, from shapes and layout alone.

Every 2-D weight of a layer is one; embedding, output layer, norms, biases and routers are AdamW's. Order, names and
shapes are canonical: they do not depend on the tensor-parallel size, and neither does which element is which
(q, k, v and gate, up as the published checkpoints store them, rows being outputs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.schema import Layout, ModelConfig, Splitting
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.planner.types import Kind, Matrix


@dataclass(frozen=True, kw_only=True)
class LayerMatrix:
    """One matrix of one layer, before it is numbered."""

    name: str
    """gate, or q.3 for the fourth head's."""
    kind: Kind
    rows: int
    cols: int
    shard_dim: Literal[0, 1] | None
    """Dimension that tensor parallelism cuts; None where every TP rank holds it whole."""
    parameter: str
    """The Megatron parameter it is part of, below its layer: mlp.linear_fc1.weight."""
    unit: int
    """Number within the layer; matrices of one unit must have the same owner."""
    slices: int = 1
    """Equal whole pieces of its parameter (heads), of which this is number `slice`: TP deals them out uncut."""
    slice: int = 0


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive layers of one shape."""

    layers: int
    matrices: tuple[LayerMatrix, ...]


def matrices(model: ModelConfig, layout: Layout, splitting: Splitting) -> tuple[Matrix, ...]:
    """All matrices of a Qwen3 model in registration order: layer by layer, proj, qkv, fc1, fc2 as Megatron makes them.

    split: q, k and v share a unit, because a TP rank's fragment of qkv is interleaved by query group; gate and up are
    units of their own, because its fragment of fc1 is `[gate_r; up_r]`, two ranges. per_head: every head of q, k and v
    is a matrix, which lives whole on one TP rank (`Matrix.home`); proj stays one. fused: as Megatron stores them.

    Raises:
        ConfigError: a dimension that tensor parallelism does not cut evenly, or layers that stages do not.
    """
    return number((Block(layers=model.num_layers, matrices=_LAYERS[splitting](model)),), layout)


def number(blocks: Sequence[Block], layout: Layout) -> tuple[Matrix, ...]:
    """The matrices of consecutive blocks, indexed in order, each with its pipeline stage and its unit.

    Raises:
        ConfigError: as `matrices`.
    """
    layers = sum(block.layers for block in blocks)
    problems = [*_uneven(blocks, layout.tp), *_stages(layers, layout.pp)]
    if problems:
        raise ConfigError(*problems)
    found: list[Matrix] = []
    layer = unit = 0
    per_stage = layers // layout.pp
    for block in blocks:
        units = 1 + max(matrix.unit for matrix in block.matrices)
        for _ in range(block.layers):
            for matrix in block.matrices:
                dealt = matrix.slices > 1 and layout.tp > 1
                found.append(
                    Matrix(
                        index=len(found),
                        name=f"layers.{layer}.{matrix.name}",
                        kind=matrix.kind,
                        layer=layer,
                        stage=layer // per_stage,
                        rows=matrix.rows,
                        cols=matrix.cols,
                        shard_dim=None if dealt else matrix.shard_dim,
                        parameter=f"decoder.layers.{layer}.{matrix.parameter}",
                        unit=unit + matrix.unit,
                        home=matrix.slice * layout.tp // matrix.slices if dealt else None,
                    )
                )
            layer, unit = layer + 1, unit + units
    return tuple(found)


def stage_matrices(matrices: Sequence[Matrix], stage: int) -> tuple[Matrix, ...]:
    """Those of one pipeline stage, in order; they are consecutive."""
    return tuple(matrix for matrix in matrices if matrix.stage == stage)


_PROJ = "self_attention.linear_proj.weight"
_QKV = "self_attention.linear_qkv.weight"
_FC1 = "mlp.linear_fc1.weight"
_FC2 = "mlp.linear_fc2.weight"


def _fused(model: ModelConfig) -> tuple[LayerMatrix, ...]:
    hidden, ffn, queries, keys = _widths(model)
    return (
        LayerMatrix(name="proj", kind="proj", rows=hidden, cols=queries, shard_dim=1, parameter=_PROJ, unit=0),
        LayerMatrix(name="qkv", kind="qkv", rows=queries + 2 * keys, cols=hidden, shard_dim=0, parameter=_QKV, unit=1),
        LayerMatrix(name="fc1", kind="fc1", rows=2 * ffn, cols=hidden, shard_dim=0, parameter=_FC1, unit=2),
        LayerMatrix(name="down", kind="down", rows=hidden, cols=ffn, shard_dim=1, parameter=_FC2, unit=3),
    )


def _split(model: ModelConfig) -> tuple[LayerMatrix, ...]:
    hidden, _, queries, keys = _widths(model)
    return (
        LayerMatrix(name="proj", kind="proj", rows=hidden, cols=queries, shard_dim=1, parameter=_PROJ, unit=0),
        LayerMatrix(name="q", kind="q", rows=queries, cols=hidden, shard_dim=0, parameter=_QKV, unit=1),
        LayerMatrix(name="k", kind="k", rows=keys, cols=hidden, shard_dim=0, parameter=_QKV, unit=1),
        LayerMatrix(name="v", kind="v", rows=keys, cols=hidden, shard_dim=0, parameter=_QKV, unit=1),
        *_mlp(model),
    )


def _per_head(model: ModelConfig) -> tuple[LayerMatrix, ...]:
    hidden, dim, groups = model.hidden_size, model.head_dim, model.num_query_groups
    heads = model.num_attention_heads
    of: tuple[tuple[Kind, int], ...] = (("q", heads), ("k", groups), ("v", groups))
    return (
        _split(model)[0],
        *(
            LayerMatrix(
                name=f"{kind}.{head}",
                kind=kind,
                rows=dim,
                cols=hidden,
                shard_dim=0,
                parameter=_QKV,
                unit=1,
                slices=count,
                slice=head,
            )
            for kind, count in of
            for head in range(count)
        ),
        *_mlp(model),
    )


def _mlp(model: ModelConfig) -> tuple[LayerMatrix, ...]:
    hidden, ffn, _, _ = _widths(model)
    return (
        LayerMatrix(name="gate", kind="gate", rows=ffn, cols=hidden, shard_dim=0, parameter=_FC1, unit=2),
        LayerMatrix(name="up", kind="up", rows=ffn, cols=hidden, shard_dim=0, parameter=_FC1, unit=3),
        LayerMatrix(name="down", kind="down", rows=hidden, cols=ffn, shard_dim=1, parameter=_FC2, unit=4),
    )


_LAYERS = {"fused": _fused, "split": _split, "per_head": _per_head}


def _widths(model: ModelConfig) -> tuple[int, int, int, int]:
    """Hidden, feed-forward, all queries', all keys' (or values') width."""
    dim = model.head_dim
    return model.hidden_size, model.ffn_hidden_size, model.num_attention_heads * dim, model.num_query_groups * dim


def _uneven(blocks: Sequence[Block], tp: int) -> Iterator[Problem]:
    """Dimensions that tensor parallelism does not cut into equal parts, each matrix named once."""
    for name, dimension, size in dict.fromkeys(
        (matrix.name.partition(".")[0], "rows" if matrix.shard_dim == 0 else "columns", _cut(matrix))
        for block in blocks
        for matrix in block.matrices
    ):
        if size is not None and size[0] % tp:
            yield Problem(
                key="parallel.tp",
                value=tp,
                reason=f"cannot cut the {size[0]} {size[1] or dimension} of {name} into {tp} equal parts",
                fix="use a tp that divides them",
            )


def _cut(matrix: LayerMatrix) -> tuple[int, str] | None:
    """How many of what TP deals out: rows, columns, or whole heads."""
    if matrix.slices > 1:
        return matrix.slices, "heads"
    if matrix.shard_dim is None:
        return None
    return (matrix.rows, "") if matrix.shard_dim == 0 else (matrix.cols, "")


def _stages(layers: int, pp: int) -> Iterator[Problem]:
    if layers % pp:
        yield Problem(
            key="parallel.pp",
            value=pp,
            reason=f"cannot cut {layers} layers into {pp} equal stages",
            fix="use a pp that divides them",
        )
