"""Pieces of units have one writer each, and are cut out and pasted back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.checkpoint.manifest import Piece
from canzona_cli.checkpoint.reader import cut, paste
from canzona_cli.checkpoint.snapshot import Holding, share


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


def test_everything_is_written_by_one_of_its_holders_and_replicas_even_it_out() -> None:
    first, second = _piece(0, 30), _piece(30, 100)
    holdings = [
        Holding(wholes={"a": 100, "b": 100}, pieces=((first, 240),)),
        Holding(wholes={"a": 100, "b": 100}, pieces=((second, 560),)),
        # A replica of what rank 0 has.
        Holding(wholes={}, pieces=((first, 240),)),
    ]
    writers = share(holdings, {"u": 100})
    assert {writers.wholes["a"], writers.wholes["b"]} == {0, 1}, "redundant copies are shared out"
    assert writers.pieces == {first: 2, second: 1}
    assert writers == share(holdings, {"u": 100})


def test_a_rank_writes_of_an_embedding_what_it_holds() -> None:
    """Sharded over many ranks, it is not one rank's to hold and write."""
    pieces = [_piece(25 * n, 25 * (n + 1)) for n in range(4)]
    writers = share([Holding(wholes={}, pieces=((piece, 300),)) for piece in pieces], {"u": 100})
    assert writers.pieces == {piece: rank for rank, piece in enumerate(pieces)}


def test_pieces_that_do_not_make_up_a_unit_are_an_error() -> None:
    with pytest.raises(ValueError, match="do not add up to that"):
        share([Holding(wholes={}, pieces=((_piece(0, 90), 360),))], {"u": 100})
