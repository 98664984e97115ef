"""Pieces of units are routed to one writer each, cut out and pasted back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.checkpoint.pieces import Holding, Piece, cut, paste, route


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
        Holding(wholes={"a": 100, "b": 100}, pieces=(_piece(0, 30),), fields=fields),
        Holding(wholes={"a": 100, "b": 100}, pieces=(_piece(30, 100),), fields=fields),
        # A replica of what rank 0 has.
        Holding(wholes={}, pieces=(_piece(0, 30),), fields=fields),
    ]
    routing = route(holdings, {"u": 100})
    assert {routing.writers["a"], routing.writers["b"]} == {0, 1}, "redundant copies are shared out"
    assert routing.writers["u/master"] == routing.writers["u/exp_avg"] == 1
    assert [(move.sender, move.writer) for move in routing.transfers] == [(0, 1), (1, 1)] * 2
    assert routing == route(holdings, {"u": 100})


def test_equal_holders_of_a_unit_write_a_tensor_of_it_each() -> None:
    """An embedding's master and moments, sharded over many ranks, are not all one rank's to hold and write."""
    fields = {"u": ("master", "exp_avg", "exp_avg_sq")}
    holdings = [Holding(wholes={}, pieces=(_piece(25 * n, 25 * (n + 1)),), fields=fields) for n in range(4)]
    routing = route(holdings, {"u": 100})
    assert sorted(routing.writers) == ["u/exp_avg", "u/exp_avg_sq", "u/master"]
    assert len(set(routing.writers.values())) == 3


def test_pieces_that_do_not_make_up_a_unit_are_an_error() -> None:
    fields = {"u": ("master",)}
    with pytest.raises(ValueError, match="do not add up to that"):
        route([Holding(wholes={}, pieces=(_piece(0, 90),), fields=fields)], {"u": 100})
