"""Model space: fragments of every layout and matrices of every splitting are blocks of the same units."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.checkpoint.gathering import Holding, Piece, Whole, cut, paste, route
from canzona_cli.checkpoint.units import Block, fragment_blocks, stored_blocks, unit_shape
from canzona_cli.config.schema import Layout, ModelConfig, Splitting
from canzona_cli.engine.fragments import Fragments
from canzona_cli.model.matrices import matrices

MODEL = ModelConfig(
    name="small",
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=4,
    vocab_size=64,
    tied_embeddings=True,
)
PARAMETERS = {
    "self_attention.linear_qkv.weight": (64, 24, 0),
    "self_attention.linear_proj.weight": (24, 32, 1),
    "mlp.linear_fc1.weight": (80, 24, 0),
    "mlp.linear_fc2.weight": (24, 40, 1),
}
"""Whole rows and columns, and the dimension tensor parallelism cuts."""


def _layout(tp: int) -> Layout:
    return Layout(
        tp=tp,
        pp=1,
        cp=1,
        dp=1,
        micro_batch_size=1,
        num_microbatches=1,
        global_batch_size=1,
        recompute="none",
        sequence_parallel=False,
    )


def _numbered() -> dict[str, np.ndarray]:
    """Every unit of layer 1, all elements of all of them different."""
    units, first = {}, 0
    for kind in ("q", "k", "v", "proj", "gate", "up", "down"):
        shape = unit_shape(f"layers.1.{kind}", MODEL)
        units[f"layers.1.{kind}"] = np.arange(first, first + np.prod(shape)).reshape(shape)
        first += int(np.prod(shape))
    return units


def _filled(blocks: tuple[Block, ...], shape: tuple[int, int]) -> torch.Tensor:
    found = np.full(shape, -1)
    for block in blocks:
        rows = _numbered()[block.unit][block.unit_row : block.unit_row + block.rows]
        found[block.row : block.row + block.rows] = rows[:, block.unit_col : block.unit_col + block.cols]
    assert (found >= 0).all(), "a row that is in no block"
    return torch.from_numpy(found)


@pytest.mark.parametrize("splitting", ["fused", "qkv", "split", "per_head"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fragments_and_matrices_agree_about_every_element(splitting: Splitting, tp: int) -> None:
    """The engine's own `Fragments` cuts matrices out of parameters; what it finds there is what model space says."""
    for rank in range(tp):
        parameters = {}
        for name, (rows, cols, dim) in PARAMETERS.items():
            shape = (rows // tp, cols) if dim == 0 else (rows, cols // tp)
            blocks = fragment_blocks(f"decoder.layers.1.{name}", shape, MODEL, tp=tp, rank=rank)
            parameters[f"decoder.layers.1.{name}"] = _filled(blocks, shape)
        fragments = Fragments(MODEL, tp, rank, {})
        checked = 0
        for matrix in matrices(MODEL, _layout(tp), splitting):
            if matrix.layer != 1 or rank not in matrix.holders(tp):
                continue
            whole = _filled(stored_blocks(matrix.name, (matrix.rows, matrix.cols), MODEL), (matrix.rows, matrix.cols))
            here = fragments.in_parameter(matrix, parameters[matrix.parameter])
            assert here.equal(fragments.in_whole(matrix, whole, rank).reshape(here.shape)), matrix.name
            checked += 1
        assert checked


def test_every_other_parameter_has_a_unit_of_its_own_whatever_stores_it() -> None:
    """Transformer Engine keeps norms in the layer behind them; tied embeddings have two names and one unit."""
    te = fragment_blocks("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", (24,), MODEL, tp=2, rank=1)
    local = fragment_blocks("decoder.layers.3.pre_mlp_layernorm.weight", (24,), MODEL, tp=1, rank=0)
    assert te == local
    assert local[0].unit == "layers.3.pre_mlp_layernorm.weight"
    assert unit_shape(local[0].unit, MODEL) == (24,)
    assert unit_shape("layers.0.self_attention.q_layernorm.weight", MODEL) == (4,)
    [out] = fragment_blocks("output_layer.weight", (32, 24), MODEL, tp=2, rank=1)
    [into] = fragment_blocks("embedding.word_embeddings.weight", (32, 24), MODEL, tp=2, rank=1)
    assert out == into
    assert (out.unit_row, unit_shape(out.unit, MODEL)) == (32, (64, 24))


@given(rows=st.integers(1, 6), cols=st.integers(1, 5), data=st.data())
def test_flat_pieces_are_cut_out_of_rectangles_and_pasted_back(rows: int, cols: int, data: st.DataObject) -> None:
    above, left = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    whole = torch.arange(float((above + rows + 1) * (left + cols + 2))).view(above + rows + 1, -1)
    start = data.draw(st.integers(0, rows * cols - 1))
    end = data.draw(st.integers(start + 1, rows * cols))
    piece = Piece(unit="u", row=above, col=left, rows=rows, cols=cols, start=start, end=end)
    rectangle = whole[above : above + rows, left : left + cols]
    found = torch.empty(end - start)
    cut(rectangle[start // cols : -(-end // cols)], piece, found)
    assert found.equal(rectangle.reshape(-1)[start:end])
    empty = torch.full_like(whole, -1.0)
    paste(empty, piece, found)
    expected = torch.full((rows * cols,), -1.0)
    expected[start:end] = found
    assert empty[above : above + rows, left : left + cols].reshape(-1).equal(expected)
    assert int((empty >= 0).sum()) == end - start


def _piece(start: int, end: int, unit: str = "u") -> Piece:
    return Piece(unit=unit, row=0, col=0, rows=10, cols=10, start=start, end=end)


def test_a_unit_is_written_where_most_of_it_lies_and_everything_has_one_writer() -> None:
    fields = {"u": ("master", "exp_avg")}
    holdings = [
        Holding(
            wholes=(Whole(name="a", bytes=100), Whole(name="b", bytes=100)), pieces=(_piece(0, 30),), fields=fields
        ),
        Holding(
            wholes=(Whole(name="a", bytes=100), Whole(name="b", bytes=100)), pieces=(_piece(30, 100),), fields=fields
        ),
        # A replica of what rank 0 has.
        Holding(wholes=(), pieces=(_piece(0, 30),), fields=fields),
    ]
    routing = route(holdings, {"u": 100})
    assert {routing.writers["a"], routing.writers["b"]} == {0, 1}, "redundant copies are shared out"
    assert routing.writers["u"] == 1
    assert [(move.sender, move.writer) for move in routing.transfers] == [(0, 1), (1, 1)]
    assert routing == route(holdings, {"u": 100})


def test_pieces_that_do_not_make_up_a_unit_are_an_error() -> None:
    fields = {"u": ("master",)}
    with pytest.raises(ValueError, match="do not make them up"):
        route([Holding(wholes=(), pieces=(_piece(0, 90),), fields=fields)], {"u": 100})
