"""Fragments of every layout and matrices of every splitting are blocks of the same units, down to the element.

Megatron's own parameters are held against the same geometry in tests/dist/test_initial_weights.py.
"""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.core.model import geometry
from canzona_cli.core.model.families import EMBEDDING
from canzona_cli.core.model.geometry import Block, View, fragment_blocks, stored_blocks, stored_shape, unit_shape
from canzona_cli.core.model.matrices import Matrix, matrices
from canzona_cli.core.setup import ModelConfig, Splitting
from canzona_cli.core.setup.layout_rules import possible_tp
from tests.core.model.test_matrices import models
from tests.sizes import layout, model

SPLITTINGS: tuple[Splitting, ...] = get_args(Splitting)
Units = dict[str, np.ndarray]


def _numbered(shape: ModelConfig) -> Units:
    """Every unit of layer 0, all elements of all of them different."""
    units: Units = {}
    first = 0
    for kind in ("q", "k", "v", "proj", "gate", "up", "down"):
        rows, cols = unit_shape(f"layers.0.{kind}", shape)
        units[f"layers.0.{kind}"] = np.arange(first, first + rows * cols).reshape(rows, cols)
        first += rows * cols
    return units


def _filled(units: Units, blocks: tuple[Block, ...], shape: tuple[int, int]) -> np.ndarray:
    found = np.full(shape, -1)
    for block in blocks:
        rows = units[block.unit][block.unit_row : block.unit_row + block.rows]
        found[block.row : block.row + block.rows] = rows[:, block.unit_col : block.unit_col + block.cols]
    assert (found >= 0).all(), "a row that is in no block"
    return found


def _seen(array: np.ndarray, view: View) -> np.ndarray:
    return array.reshape(view.shape)[view.index]


def _of_layer_0(shape: ModelConfig, tp: int, splitting: Splitting) -> dict[str, list[Matrix]]:
    found: dict[str, list[Matrix]] = {}
    for matrix in matrices(shape, layout(tp=tp), splitting):
        if matrix.layer == 0:
            found.setdefault(matrix.parameter, []).append(matrix)
    return found


@settings(deadline=None, max_examples=60)
@given(shape=models(), splitting=st.sampled_from(SPLITTINGS), data=st.data())
def test_fragments_and_matrices_agree_on_elements(
    shape: ModelConfig, splitting: Splitting, data: st.DataObject
) -> None:
    tp = data.draw(st.sampled_from(possible_tp(shape)))
    units = _numbered(shape)
    together: dict[str, np.ndarray] = {}
    for rank in range(tp):
        for name, members in _of_layer_0(shape, tp, splitting).items():
            stored = stored_shape(members, tp)
            parameter = _filled(units, fragment_blocks(name, stored, shape, tp=tp, rank=rank), stored)
            counted = np.zeros_like(parameter)
            for matrix in members:
                if matrix.home not in (None, rank):
                    continue
                whole = together.setdefault(matrix.name, np.full((matrix.rows, matrix.cols), -1))
                place = geometry.locate_in_parameter(matrix, shape, tp)
                _seen(whole, geometry.locate_in_matrix(matrix, shape, tp, rank))[...] = _seen(parameter, place)
                _seen(counted, place)[...] += 1
            assert (counted == 1).all(), f"not every element of {name} is in one matrix"
    for name, whole in together.items():
        expected = _filled(units, stored_blocks(name, whole.shape, shape), whole.shape)
        assert (whole == expected).all(), name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_megatron_interleaves_query_groups_and_stacks_gate_on_up(tp: int) -> None:
    """Written out by hand for the small model: 8 heads of 32 rows in 4 groups, 768 feed-forward rows."""
    shape = model("tiny")
    last = tp - 1
    qkv = fragment_blocks(
        "decoder.layers.2.self_attention.linear_qkv.weight", (512 // tp, 256), shape, tp=tp, rank=last
    )
    assert [(block.unit, block.unit_row, block.row, block.rows) for block in qkv[-3:]] == [
        ("layers.2.q", 192, 512 // tp - 128, 64),
        ("layers.2.k", 96, 512 // tp - 64, 32),
        ("layers.2.v", 96, 512 // tp - 32, 32),
    ]
    fc1 = fragment_blocks("decoder.layers.2.mlp.linear_fc1.weight", (1536 // tp, 256), shape, tp=tp, rank=last)
    assert [(block.unit, block.unit_row, block.row, block.rows) for block in fc1] == [
        ("layers.2.gate", 768 // tp * last, 0, 768 // tp),
        ("layers.2.up", 768 // tp * last, 768 // tp, 768 // tp),
    ]
    [proj] = fragment_blocks(
        "decoder.layers.2.self_attention.linear_proj.weight", (256, 256 // tp), shape, tp=tp, rank=last
    )
    assert (proj.unit, proj.unit_col, proj.rows, proj.cols) == ("layers.2.proj", 256 // tp * last, 256, 256 // tp)


def test_every_other_parameter_has_a_unit_of_its_own_whatever_stores_it() -> None:
    """Transformer Engine keeps norms in the layer behind them; tied embeddings have two names and one unit."""
    shape = model("tiny")
    te = fragment_blocks("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", (256,), shape, tp=2, rank=1)
    local = fragment_blocks("decoder.layers.3.pre_mlp_layernorm.weight", (256,), shape, tp=1, rank=0)
    assert te == local
    assert local[0].unit == "layers.3.pre_mlp_layernorm.weight"
    assert unit_shape(local[0].unit, shape) == (256,)
    assert unit_shape("layers.0.self_attention.q_layernorm.weight", shape) == (32,)
    [final] = fragment_blocks("decoder.final_layernorm.weight", (256,), shape, tp=2, rank=1)
    assert final.unit == "final_layernorm.weight"
    rows = shape.vocab_size // 2
    [out] = fragment_blocks("output_layer.weight", (rows, 256), shape, tp=2, rank=1)
    [into] = fragment_blocks("embedding.word_embeddings.weight", (rows, 256), shape, tp=2, rank=1)
    assert out == into
    assert (out.unit, out.unit_row, unit_shape(out.unit, shape)) == (EMBEDDING, rows, (2 * rows, 256))
