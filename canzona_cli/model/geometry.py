"""The one geometry: which rows and columns of which Megatron parameter a matrix or a fragment is. Plain numbers.

With one tensor-parallel (TP) rank, a 2-D parameter is its *parts* one above the other, `repeats` times over;
TP cuts either the repeats, or each part, or the columns:

    linear_qkv              query groups x [queries of the group; its key; its value]    TP deals out whole groups
    linear_fc1              1 x [gate; up]                       TP cuts each part: a rank stores [gate_r; up_r]
    linear_proj, linear_fc2 1 x [proj], 1 x [down]               TP cuts columns
    embedding, output layer 1 x [vocabulary]                     TP cuts rows

*Model space* is where nothing is cut or interleaved. Its tensors are called units: q, k, v, gate, up, proj
and down of each layer (`layers.3.q`, rows being outputs, heads in order), and every other parameter under
Megatron's name in the whole model. A splitting says which matrices a parameter holds: each of its parts, or
all of them fused, which is the parameter itself as one TP rank would store it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.families import EMBEDDING, OUTPUT, family_of
from canzona_cli.model.family import Band, Kind, Weight
from canzona_cli.model.matrices import Matrix

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HEAD = re.compile(r"(q|k|v)\.(\d+)")


def weight_of(name: str, model: ModelConfig) -> Weight | None:
    """The parameter of that name in the whole model; None for a vector,
    and for what no model of the family has.

    A tied output layer is the embedding.
    """
    if name in (EMBEDDING, OUTPUT):
        unit = EMBEDDING if model.tied_embeddings else name
        vocabulary = Band("other", model.vocab_size)
        return Weight(name=unit, kind="other", parts=(vocabulary,), cols=model.hidden_size, cut="parts")
    part = _layer_of(name)[1]
    weight = next((weight for weight in family_of(model).weights(model) if weight.name == part), None)
    return weight and replace(weight, name=name)


# ------------------------------------------------------------------------------------------- in model space


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive rows of something 2-D that are a rectangle of a unit."""

    unit: str
    unit_row: int
    unit_col: int
    row: int
    """First row in what the block is a part of; it spans all its columns."""
    rows: int
    cols: int


def fragment_blocks(name: str, shape: Sequence[int], model: ModelConfig, *, tp: int, rank: int) -> tuple[Block, ...]:
    """Locates the fragment of a parameter on one tensor-parallel rank in model space.

    Args:
        name: Megatron's, in the whole model.
        shape: the shape of the fragment; a vector, which every rank has all of, counts as one row.
    """
    layer, part = _layer_of(name)
    weight = weight_of(name, model)
    if weight is None:
        unfused = {norm.fused: norm.name for norm in family_of(model).norms(model)}
        return (_all_of(f"{layer}{unfused.get(part, part)}", shape),)
    return tuple(_blocks(weight, layer, tp, rank))


def matrix_blocks(matrix: Matrix, model: ModelConfig, *, tp: int, rank: int) -> tuple[Block, ...]:
    """Locates a matrix's fragment on one tensor-parallel rank, 2-D in `in_parameter`'s order,
    in model space."""
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
    """Locates a stored tensor, a unit or a whole matrix of any splitting, in model space.

    Args:
        name: layers.3.q, layers.3.q.5 (a head), layers.3.qkv, layers.3.fc1, or any other unit's.
    """
    layer, part = _layer_of(name)
    if head := _HEAD.fullmatch(part):
        return (replace(_all_of(f"{layer}{head[1]}", shape), unit_row=int(head[2]) * model.head_dim),)
    fused = _fused(part, model)
    return (_all_of(name, shape),) if fused is None else tuple(_blocks(fused, layer, 1, 0))


def unit_shape(unit: str, model: ModelConfig) -> tuple[int, ...]:
    """Shape of a whole unit."""
    if unit in (EMBEDDING, OUTPUT):
        return model.vocab_size, model.hidden_size
    name = _layer_of(unit)[1]
    for weight in family_of(model).weights(model):
        for part in weight.parts:
            if part.kind == name:
                return weight.repeats * part.rows, weight.cols
    norms = {norm.name: norm.elements for norm in family_of(model).norms(model)}
    return (norms.get(name, model.hidden_size),)


def whole_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    """Shape of what a tensor of that name is the whole of: a unit, or a matrix of any splitting."""
    layer, part = _layer_of(name)
    if head := _HEAD.fullmatch(part):
        return model.head_dim, unit_shape(f"{layer}{head[1]}", model)[1]
    fused = _fused(part, model)
    return unit_shape(name, model) if fused is None else (fused.rows, fused.cols)


def _fused(kind: str, model: ModelConfig) -> Weight | None:
    """Returns the parameter that is one matrix of that kind, all parts together."""
    return next((weight for weight in family_of(model).weights(model) if weight.kind == kind), None)


def _blocks(whole: Weight, layer: str, tp: int, rank: int) -> Iterator[Block]:
    """`whole` as TP rank `rank` stores it."""
    stored, row = whole.stored(tp), 0
    for repeat in range(stored.repeats):
        for part in stored.parts:
            # Rows of this unit on the ranks before, and in the repeats before on this one.
            before = 0 if stored.cut == "cols" else rank * stored.repeats
            yield Block(
                unit=whole.name if part.kind == "other" else f"{layer}{part.kind}",
                unit_row=(before + repeat) * part.rows,
                unit_col=rank * stored.cols if stored.cut == "cols" else 0,
                row=row,
                rows=part.rows,
                cols=stored.cols,
            )
            row += part.rows


def _all_of(unit: str, shape: Sequence[int]) -> Block:
    rows, cols = (1, *shape) if len(shape) == 1 else shape
    return Block(unit=unit, unit_row=0, unit_col=0, row=0, rows=rows, cols=cols)


def _layer_of(name: str) -> tuple[str, str]:
    """`layers.3.` and what follows; nothing and the name where it belongs to no layer."""
    name = name.removeprefix("decoder.")
    match = _LAYER.fullmatch(name)
    return (f"layers.{match[1]}.", match[2]) if match else ("", name)


# ------------------------------------------------------------------------------------------- in the engine


@dataclass(frozen=True, slots=True)
class View:
    """`tensor.view(shape)[index]`."""

    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


def in_parameter(matrix: Matrix, model: ModelConfig, tp: int) -> View:
    """The fragment of a matrix within the parameter of one of its holders: (rows, columns),
    repeats or parts first."""
    everything = slice(None)
    whole = _weight_with(matrix, model)
    if whole is None or len(whole.parts) == 1:
        return View((matrix.rows, -1) if matrix.shard_dim == 1 else (1, -1, matrix.cols), (everything,))
    first, last = _parts_of(matrix, whole)
    if whole.cut == "parts":  # all as high
        return View((len(whole.parts), -1, matrix.cols), (slice(first, last),))
    offsets = [sum(part.rows for part in whole.parts[:number]) for number in range(len(whole.parts) + 1)]
    rows = (-1, offsets[-1], matrix.cols)
    head = head_of(matrix)
    if head is None:
        return View(rows, (everything, slice(offsets[first], offsets[last])))
    repeat, inside = divmod(head, whole.parts[first].rows // model.head_dim)
    start = offsets[first] + inside * model.head_dim
    return View(rows, (repeat - (matrix.home or 0) * (whole.repeats // tp), slice(start, start + model.head_dim)))


def in_whole(matrix: Matrix, model: ModelConfig, tp: int, rank: int) -> View:
    """Locates the fragment of TP rank `rank` in the whole matrix, in the shape that `in_parameter` has."""
    everything = slice(None)
    if head_of(matrix) is not None:  # a head lies whole on one rank
        return View((matrix.rows, matrix.cols), (everything,))
    if matrix.shard_dim == 1:
        return View((matrix.rows, tp, -1), (everything, rank))
    if matrix.shard_dim is None:  # every rank has all of it
        tp, rank = 1, 0
    whole = _weight_with(matrix, model)
    if whole is not None and whole.cut == "repeats":
        return View((tp, whole.repeats // tp, -1, matrix.cols), (rank,))
    first, last = (0, 1) if whole is None else _parts_of(matrix, whole)
    return View((last - first, tp, -1, matrix.cols), (everything, rank))


def stored_shape(matrices: Sequence[Matrix], tp: int) -> tuple[int, int]:
    """(rows, columns) on one TP rank of the parameter that holds `matrices`, and nothing else,
    one above the other."""
    rows, first = sum(matrix.rows for matrix in matrices), matrices[0]
    if first.shard_dim == 1:
        return rows, first.cols // tp
    # A head's matrix lies whole on one rank, and every rank holds as many heads.
    cut_by_rows = first.shard_dim == 0 or first.home is not None
    return (rows // tp if cut_by_rows else rows), first.cols


@lru_cache(maxsize=64)
def interleaved_kinds(model: ModelConfig) -> frozenset[Kind]:
    """Kinds of matrices whose rows lie interleaved with others' in their parameter."""
    weights = family_of(model).weights(model)
    return frozenset(part.kind for weight in weights if weight.cut == "repeats" for part in weight.parts)


def head_of(matrix: Matrix) -> int | None:
    """Returns the number of a matrix's head, 5 of `layers.3.q.5`; None where it has all heads."""
    match = _HEAD.fullmatch(_layer_of(matrix.name)[1])
    return int(match[2]) if match else None


def _weight_with(matrix: Matrix, model: ModelConfig) -> Weight | None:
    """The parameter that holds a matrix of that kind; None for a kind of the user's own."""
    return next(
        (weight for weight in family_of(model).weights(model) if matrix.kind in weight.kinds),
        None,
    )


def _parts_of(matrix: Matrix, whole: Weight) -> tuple[int, int]:
    """Returns the first part of its parameter that a matrix has, and the part after its last."""
    if matrix.kind == whole.kind:
        return 0, len(whole.parts)
    [number] = [number for number, part in enumerate(whole.parts) if part.kind == matrix.kind]
    return number, number + 1
