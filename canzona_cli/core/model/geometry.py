"""The geometry of parameters: which rows and columns of Megatron's parameters make up a matrix or a fragment.
It works with numbers only, without tensors.

With one tensor-parallel (TP) rank, a 2-D parameter consists of its *parts* from top to bottom, repeated
`repeats` times. TP divides either the repeats, or each part, or the columns:

    linear_qkv              query groups x [queries of the group; its key; its value]    TP divides the groups
    linear_fc1              1 x [gate; up]                  TP divides each part: a rank stores [gate_r; up_r]
    linear_proj, linear_fc2 1 x [proj], 1 x [down]          TP divides columns
    embedding, output layer 1 x [vocabulary]                TP divides rows

In *model space* nothing is divided or interleaved. Its tensors are called units: q, k, v, gate, up, proj and
down of each layer (`layers.3.q`; rows are outputs, heads in order; `layers.3.experts.17.gate` for an
expert's), their biases (`layers.3.q.bias`, one column), and every other parameter, under its Megatron name
without `decoder.` and without fusion. The
splitting decides which matrices a parameter holds: each of its parts, each head of q, k and v, or all parts
fused, which is the parameter as a single TP rank would store it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from canzona_cli.core.model.families import (
    EMBEDDING,
    OUTPUT,
    POSITIONS,
    family_of,
    vectors_of_layers,
    weights_of_layers,
)
from canzona_cli.core.model.family import Band, Kind, Weight
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.setup import ModelConfig

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HEAD = re.compile(r"(q|k|v)\.(\d+)")


def weight_of(name: str, model: ModelConfig) -> Weight | None:
    """Returns the 2-D parameter with a Megatron name; None for vectors, routers and unknown names. A tied
    output layer has the parameter of the embedding."""
    if name in (EMBEDDING, OUTPUT):
        unit = EMBEDDING if model.tied_embeddings else name
        vocabulary = Band("other", model.vocab_size)
        return Weight(name=unit, kind="other", parts=(vocabulary,), cols=model.hidden_size, cut="parts")
    weight = _weights_by_name(model).get(_layer_of(name)[1])
    return weight and replace(weight, name=name)


def is_expert(name: str, model: ModelConfig) -> bool:
    """Returns True if the parameter with a Megatron name is the weight of an expert."""
    weight = _weights_by_name(model).get(_layer_of(name)[1])
    return weight is not None and weight.expert is not None


@lru_cache(maxsize=16)
def _weights_by_name(model: ModelConfig) -> Mapping[str, Weight]:
    return {weight.name: weight for weight in weights_of_layers(model)}


def _weight_with_bias(name: str, model: ModelConfig) -> Weight | None:
    """Returns the weight of the linear layer whose bias has this name in its layer; None for other names."""
    stem = name.removesuffix(".bias")
    return None if stem == name else _weights_by_name(model).get(f"{stem}.weight")


# ------------------------------------------------------------------------------------------- in model space


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive rows of a 2-D tensor (a fragment or a stored tensor) that form a rectangle in a unit."""

    unit: str
    unit_row: int
    unit_col: int
    row: int
    """The block's first row in the tensor; a block spans all columns of the tensor."""
    rows: int
    cols: int


def fragment_blocks(name: str, shape: Sequence[int], model: ModelConfig, *, tp: int, rank: int) -> tuple[Block, ...]:
    """Locates the fragment of a parameter on one tensor-parallel rank in model space.

    Args:
        name: Megatron's name in the model.
        shape: the shape of the fragment, used only for norms, routers and learned positions, of which every rank has
            a copy. The vector of a norm is treated as one row.
    """
    layer, part = _layer_of(name)
    weight = weight_of(name, model)
    if weight is not None:
        return tuple(_blocks(weight, layer, tp, rank))
    if (biased := _weight_with_bias(part, model)) is not None:
        tp, rank = (1, 0) if biased.cut == "cols" else (tp, rank)
        blocks = _blocks(replace(biased, cols=1), layer, tp, rank)
        return tuple(replace(block, unit=f"{block.unit}.bias") for block in blocks)
    unfused = {vector.fused: vector.name for vector in vectors_of_layers(model)}
    return (_whole_unit(f"{layer}{unfused.get(part, part)}", shape),)


def matrix_blocks(matrix: Matrix, model: ModelConfig, *, tp: int, rank: int) -> tuple[Block, ...]:
    """Locates a matrix's fragment on one tensor-parallel rank in model space, with rows in the order of
    `locate_in_parameter`."""
    units = {block.unit for block in stored_blocks(matrix.name, matrix.shape, model)}
    blocks: list[Block] = []
    row = 0
    for block in fragment_blocks(matrix.parameter, (), model, tp=tp, rank=rank):
        if block.unit not in units:
            continue
        last = blocks[-1] if blocks else None
        if last is not None and (last.unit, last.unit_row + last.rows) == (block.unit, block.unit_row):
            blocks[-1] = replace(last, rows=last.rows + block.rows)
        else:
            blocks.append(replace(block, row=row))
        row += block.rows
    return tuple(blocks)


def stored_blocks(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[Block, ...]:
    """Locates a stored tensor in model space: a unit, or a matrix of any splitting.

    Args:
        name: layers.3.q, layers.3.q.5 (a head), layers.3.qkv, layers.3.experts.17.fc1, or the name of any
            other unit.
    """
    layer, part = _layer_of(name)
    if head := _HEAD.fullmatch(part):
        return (replace(_whole_unit(f"{layer}{head[1]}", shape), unit_row=int(head[2]) * model.head_dim),)
    fused = _fused_weights(model).get(part)
    return (_whole_unit(name, shape),) if fused is None else tuple(_blocks(fused, layer, 1, 0))


def locate_in_whole_parameter(matrix: Matrix, blocks: Sequence[Block], model: ModelConfig) -> Iterator[Block]:
    """Locates blocks of a matrix in its parameter as a single TP rank would store it; yields blocks whose
    `unit` is the parameter.

    Args:
        blocks: the blocks of a stored matrix or of a fragment (`stored_blocks`, `matrix_blocks`).
    """
    for part in fragment_blocks(matrix.parameter, (), model, tp=1, rank=0):
        for block in blocks:
            first_row = max(block.unit_row, part.unit_row)
            rows = min(block.unit_row + block.rows, part.unit_row + part.rows) - first_row
            if block.unit == part.unit and rows > 0:
                yield Block(
                    unit=matrix.parameter,
                    unit_row=part.row + first_row - part.unit_row,
                    unit_col=block.unit_col,
                    row=block.row + first_row - block.unit_row,
                    rows=rows,
                    cols=block.cols,
                )


def unit_shape(unit: str, model: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of a unit."""
    if unit in (EMBEDDING, OUTPUT):
        return model.vocab_size, model.hidden_size
    if unit == POSITIONS:
        return model.positions, model.hidden_size
    name = _layer_of(unit)[1]
    return unit_shapes(model).get(name, (model.hidden_size,))


@lru_cache(maxsize=16)
def unit_shapes(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of the units of a layer by name."""
    vectors = {vector.name: (vector.elements,) for vector in vectors_of_layers(model)}
    biased = {name: weight for name in vectors if (weight := _weight_with_bias(name, model)) is not None}
    return {
        **{name: shape for name, shape in vectors.items() if name not in biased},
        **{router.name: (router.rows, router.cols) for router in family_of(model).routers(model)},
        **{
            f"{weight.unit_prefix}{part.kind}": (weight.repeats * part.rows, weight.cols)
            for weight in weights_of_layers(model)
            for part in weight.parts
        },
        **{f"{part.kind}.bias": (weight.repeats * part.rows, 1) for weight in biased.values() for part in weight.parts},
    }


def whole_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    """Returns the full shape of the unit, or the matrix of any splitting, with this name."""
    layer, part = _layer_of(name)
    if head := _HEAD.fullmatch(part):
        return model.head_dim, unit_shape(f"{layer}{head[1]}", model)[1]
    fused = _fused_weights(model).get(part)
    return unit_shape(name, model) if fused is None else (fused.rows, fused.cols)


@lru_cache(maxsize=16)
def _fused_weights(model: ModelConfig) -> Mapping[str, Weight]:
    """Returns the parameters of a layer, by the name of the matrix that consists of all parts of the
    parameter."""
    return {f"{weight.unit_prefix}{weight.kind}": weight for weight in weights_of_layers(model)}


def _blocks(weight: Weight, layer: str, tp: int, rank: int) -> Iterator[Block]:
    """Yields the blocks of the fragment of `weight` that TP rank `rank` stores."""
    stored = weight.stored(tp)
    earlier_repeats = 0 if stored.cut == "cols" else rank * stored.repeats  # on earlier ranks
    row = 0
    for repeat in range(stored.repeats):
        for part in stored.parts:
            yield Block(
                unit=weight.name if part.kind == "other" else f"{layer}{weight.unit_prefix}{part.kind}",
                unit_row=(earlier_repeats + repeat) * part.rows,
                unit_col=rank * stored.cols if stored.cut == "cols" else 0,
                row=row,
                rows=part.rows,
                cols=stored.cols,
            )
            row += part.rows


def _whole_unit(unit: str, shape: Sequence[int]) -> Block:
    """Returns a block that is an entire unit; a vector is treated as one row."""
    rows, cols = (1, *shape) if len(shape) == 1 else shape
    return Block(unit=unit, unit_row=0, unit_col=0, row=0, rows=rows, cols=cols)


def _layer_of(name: str) -> tuple[str, str]:
    """Splits a name, without `decoder.`, into the prefix of its layer (`layers.3.`) and the rest. The prefix
    is empty for parameters outside the layers."""
    name = name.removeprefix("decoder.")
    match = _LAYER.fullmatch(name)
    return (f"layers.{match[1]}.", match[2]) if match else ("", name)


# ------------------------------------------------------------------------------------------- in the engine


@dataclass(frozen=True, slots=True)
class View:
    """The part `tensor.view(shape)[index]` of a tensor."""

    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


def locate_in_parameter(matrix: Matrix, model: ModelConfig, tp: int) -> View:
    """Locates the fragment of a matrix in the parameter that one of its holders stores.

    Returns:
        A view of shape (rows, columns) for a single head or a matrix cut by columns, and otherwise of shape
        (repeats or parts, rows, columns), whose first dimension may be 1.
    """
    everything = slice(None)
    weight = _weight_with(matrix, model)
    if weight is None or len(weight.parts) == 1:
        return View((matrix.rows, -1) if matrix.shard_dim == 1 else (1, -1, matrix.cols), (everything,))
    first, end = _parts_of(matrix, weight)
    if weight.cut == "parts":  # all parts have the same number of rows
        return View((len(weight.parts), -1, matrix.cols), (slice(first, end),))
    offsets = [sum(part.rows for part in weight.parts[:index]) for index in range(len(weight.parts) + 1)]
    shape = (-1, offsets[-1], matrix.cols)
    head = head_of(matrix)
    if head is None:
        return View(shape, (everything, slice(offsets[first], offsets[end])))
    repeat, inside = divmod(head, weight.parts[first].rows // model.head_dim)
    start = offsets[first] + inside * model.head_dim
    return View(shape, (repeat - (matrix.home or 0) * (weight.repeats // tp), slice(start, start + model.head_dim)))


def locate_in_matrix(matrix: Matrix, model: ModelConfig, tp: int, rank: int) -> View:
    """Locates the fragment of TP rank `rank` in the whole matrix, with the dimensions of
    `locate_in_parameter`."""
    everything = slice(None)
    if head_of(matrix) is not None:  # one rank has the entire head
        return View((matrix.rows, matrix.cols), (everything,))
    if matrix.shard_dim == 1:
        return View((matrix.rows, tp, -1), (everything, rank))
    if matrix.shard_dim is None:  # the ranks that store it have the whole matrix
        tp, rank = 1, 0
    weight = _weight_with(matrix, model)
    if weight is not None and weight.cut == "repeats":
        return View((tp, weight.repeats // tp, -1, matrix.cols), (rank,))
    first, end = (0, 1) if weight is None else _parts_of(matrix, weight)
    return View((end - first, tp, -1, matrix.cols), (everything, rank))


def stored_shape(matrices: Sequence[Matrix], tp: int) -> tuple[int, int]:
    """Returns the (rows, columns), on one TP rank, of the parameter that consists of `matrices`."""
    rows = sum(matrix.rows for matrix in matrices)
    matrix = matrices[0]  # all have the same columns and are cut in the same way
    if matrix.shard_dim == 1:
        return rows, matrix.cols // tp
    # One rank has all of a head's matrix, and all ranks have the same number of heads.
    cut_by_rows = matrix.shard_dim == 0 or matrix.home is not None
    return (rows // tp if cut_by_rows else rows), matrix.cols


def head_of(matrix: Matrix) -> int | None:
    """Returns the head of a per-head matrix, 5 for `layers.3.q.5`; None for matrices with all heads."""
    match = _HEAD.fullmatch(_layer_of(matrix.name)[1])
    return int(match[2]) if match else None


def _weight_with(matrix: Matrix, model: ModelConfig) -> Weight | None:
    """Returns a parameter that holds matrices of this kind (for experts, that of any expert); None for kind
    `other`."""
    return _weights_by_kind(model).get(matrix.kind)


@lru_cache(maxsize=16)
def _weights_by_kind(model: ModelConfig) -> Mapping[Kind, Weight]:
    return {kind: weight for weight in weights_of_layers(model) for kind in weight.kinds}


def _parts_of(matrix: Matrix, weight: Weight) -> tuple[int, int]:
    """Returns the range of the parameter's parts that a matrix consists of, as (first, end)."""
    if matrix.kind == weight.kind:
        return 0, len(weight.parts)
    [index] = [index for index, part in enumerate(weight.parts) if part.kind == matrix.kind]
    return index, index + 1
