"""Model space: the tensors a checkpoint stores, and where a parameter or a matrix of any layout lies in them.

A *unit* is a whole tensor that no layout cuts or splits further: q, k, v, gate, up, proj and down of each layer
(`layers.3.q`, rows being outputs, heads in order), and every other parameter under Megatron's name in the whole model
(`layers.3.input_layernorm.weight`, `embedding.word_embeddings.weight`). Whatever a rank holds, a tensor-parallel
fragment of a parameter or a matrix of some splitting, consists of blocks of units. Imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HEAD = re.compile(r"(q|k|v)\.(\d+)")
# Transformer Engine keeps a norm's weight in the linear layer that follows it.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_CUT_BY_COLUMNS = {"self_attention.linear_proj.weight": "proj", "mlp.linear_fc2.weight": "down"}
_VOCABULARY = (EMBEDDING, "output_layer.weight")


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


def fragment_blocks(
    parameter: str, shape: Sequence[int], model: ModelConfig, *, tp: int, rank: int
) -> tuple[Block, ...]:
    """Where the fragment of a parameter on one tensor-parallel rank lies in model space.

    Args:
        parameter: Megatron's name in the whole model.
        shape: of the fragment; a vector, which every rank has all of, counts as one row.
    """
    name = parameter.removeprefix("decoder.")
    layer, part = _layer_of(name)
    rows, cols = (1, *shape) if len(shape) == 1 else shape
    if part == "self_attention.linear_qkv.weight":
        groups = model.num_query_groups // tp
        return tuple(_attention(layer, model, cols, first=rank * groups, groups=groups))
    if part == "mlp.linear_fc1.weight":
        half = rows // 2
        return tuple(
            Block(unit=f"{layer}{kind}", unit_row=rank * half, unit_col=0, row=place * half, rows=half, cols=cols)
            for place, kind in enumerate(("gate", "up"))
        )
    if part in _CUT_BY_COLUMNS:
        unit = f"{layer}{_CUT_BY_COLUMNS[part]}"
        return (Block(unit=unit, unit_row=0, unit_col=rank * cols, row=0, rows=rows, cols=cols),)
    if name in _VOCABULARY:
        unit = EMBEDDING if model.tied_embeddings else name
        return (Block(unit=unit, unit_row=rank * rows, unit_col=0, row=0, rows=rows, cols=cols),)
    return (Block(unit=f"{layer}{_NORMS.get(part, part)}", unit_row=0, unit_col=0, row=0, rows=rows, cols=cols),)


def stored_blocks(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[Block, ...]:
    """Where a stored tensor, a unit or a whole matrix of any splitting, lies in model space.

    Args:
        name: layers.3.q, layers.3.q.5 (a head), layers.3.qkv, layers.3.fc1, or any other unit's.
    """
    layer, part = _layer_of(name)
    rows, cols = (1, *shape) if len(shape) == 1 else shape
    if head := _HEAD.fullmatch(part):
        start = int(head[2]) * model.head_dim
        return (Block(unit=f"{layer}{head[1]}", unit_row=start, unit_col=0, row=0, rows=rows, cols=cols),)
    if part == "qkv":
        return tuple(_attention(layer, model, cols, first=0, groups=model.num_query_groups))
    if part == "fc1":
        half = rows // 2
        return tuple(
            Block(unit=f"{layer}{kind}", unit_row=0, unit_col=0, row=place * half, rows=half, cols=cols)
            for place, kind in enumerate(("gate", "up"))
        )
    return (Block(unit=name, unit_row=0, unit_col=0, row=0, rows=rows, cols=cols),)


def unit_shape(unit: str, model: ModelConfig) -> tuple[int, ...]:
    """Of a whole unit."""
    hidden, head = model.hidden_size, model.head_dim
    if unit in _VOCABULARY:
        return model.vocab_size, hidden
    part = _layer_of(unit)[1]
    queries, keys = model.num_attention_heads * head, model.num_query_groups * head
    shapes = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "proj": (hidden, queries),
        "gate": (model.ffn_hidden_size, hidden),
        "up": (model.ffn_hidden_size, hidden),
        "down": (hidden, model.ffn_hidden_size),
    }
    if part in shapes:
        return shapes[part]
    return (head,) if part.endswith(("q_layernorm.weight", "k_layernorm.weight")) else (hidden,)


def _attention(layer: str, model: ModelConfig, cols: int, *, first: int, groups: int) -> Iterator[Block]:
    """linear_qkv as Megatron stores it: query group by query group, each its queries, its key, its value."""
    head = model.head_dim
    queries = model.num_attention_heads // model.num_query_groups
    row = 0
    for group in range(first, first + groups):
        for kind, heads in (("q", queries), ("k", 1), ("v", 1)):
            rows = heads * head
            yield Block(unit=f"{layer}{kind}", unit_row=group * rows, unit_col=0, row=row, rows=rows, cols=cols)
            row += rows


def _layer_of(name: str) -> tuple[str, str]:
    """`layers.3.` and what follows; nothing and the name where it is of no layer."""
    match = _LAYER.fullmatch(name)
    return (f"layers.{match[1]}.", match[2]) if match else ("", name)
