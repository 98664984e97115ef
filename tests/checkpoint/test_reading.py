"""Pieces of units have one writer each; what is stored in pieces, or whole, is read as the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import Buffer, Piece, Shard
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.snapshot import Holding, Part, assign_writers
from canzona_cli.checkpoint.verify import read_manifest, verify
from canzona_cli.core.errors import CheckpointInvalid
from canzona_cli.core.model.families import EMBEDDING
from canzona_cli.core.setup import ModelConfig
from tests.checkpoint.checkpoints import header
from tests.dist.saved import resolve

MODEL: ModelConfig = replace(resolve("gpus=1")[0].model, vocab_size=6, hidden_size=5)
NORM = "final_layernorm.weight"
WHOLE = torch.arange(30.0).view(6, 5)
# Two tensor-parallel fragments, of three rows and of two columns beside one; cut again where rows do not end.
PIECES = (
    Piece(unit=EMBEDDING, row=0, col=0, rows=3, cols=5, start=0, end=7),
    Piece(unit=EMBEDDING, row=0, col=0, rows=3, cols=5, start=7, end=15),
    Piece(unit=EMBEDDING, row=3, col=0, rows=3, cols=2, start=0, end=6),
    Piece(unit=EMBEDDING, row=3, col=2, rows=3, cols=3, start=0, end=4),
    Piece(unit=EMBEDDING, row=3, col=2, rows=3, cols=3, start=4, end=9),
)
HALVES = tuple(Piece(unit=NORM, row=0, col=0, rows=1, cols=5, start=a, end=b) for a, b in ((0, 2), (2, 5)))


def _buffer(data: torch.Tensor, piece: Piece | None = None) -> Buffer:
    flat = data.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Buffer(dtype="F32", shape=tuple(data.shape), data=memoryview(flat), piece=piece)


def _of(piece: Piece) -> torch.Tensor:
    """Its elements, of the embedding or of that one's second row."""
    whole = WHOLE if piece.unit == EMBEDDING else WHOLE[1:2]
    rectangle = whole[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols]
    return rectangle.reshape(-1)[piece.start : piece.end].clone()


def _saved(root: Path, pieces: Sequence[Piece]) -> Path:
    """Three ranks write a piece in turn."""
    partial = begin(root, 3)
    for rank in range(3):
        own = {piece.name("master"): _buffer(_of(piece), piece) for piece in pieces[rank::3]}
        write_part(partial, rank, Shard(tensors=own, scalars={}))
    return finish(partial, 3, header(3), {}, 5.0)


def _saved_whole(root: Path) -> Path:
    partial = begin(root, 3)
    tensors = {f"{EMBEDDING}/master": _buffer(WHOLE), f"{NORM}/master": _buffer(WHOLE[1])}
    write_part(partial, 0, Shard(tensors=tensors, scalars={}))
    return finish(partial, 1, header(3), {}, 5.0)


@pytest.mark.parametrize("whole", [False, True])
def test_any_rectangle_of_a_whole_is_read(tmp_path: Path, whole: bool) -> None:
    folder = _saved_whole(tmp_path) if whole else _saved(tmp_path, (*PIECES, *HALVES))
    manifest, problems = verify(folder)
    assert problems == []
    with Reader(folder, manifest, MODEL) as reader:
        assert reader.unit_fields(EMBEDDING) == ["master"]
        assert reader.tensor(EMBEDDING, "master").equal(WHOLE)
        assert reader.tensor(NORM, "master").equal(WHOLE[1])
        for row in range(6):
            for rows in range(1, 7 - row):
                found = reader.region(EMBEDDING, "master", range(row, row + rows), range(1, 4))
                assert found.equal(WHOLE[row : row + rows, 1:4])
        assert reader.region(NORM, "master", range(1), range(5)).equal(WHOLE[1:2])
        assert reader.master(EMBEDDING).equal(WHOLE)
        assert reader.master(EMBEDDING, range(2, 5)).equal(WHOLE[2:5])
        assert reader.master(NORM, range(1, 3)).equal(WHOLE[1, 1:3])
        for start, end in combinations(range(9), 2):  # another run's pieces, of any elements of a rectangle
            piece = Piece(unit=EMBEDDING, row=2, col=1, rows=3, cols=3, start=start, end=end)
            assert reader.piece(piece, "master").equal(_of(piece))


def test_a_rank_that_lost_its_piece_is_noticed(tmp_path: Path) -> None:
    folder = _saved(tmp_path, PIECES[:-1])
    with Reader(folder, read_manifest(folder), MODEL) as reader:
        assert reader.region(EMBEDDING, "master", range(4), range(5)).equal(WHOLE[:4])
        with pytest.raises(CheckpointInvalid, match="does not have this"):
            reader.region(EMBEDDING, "master", range(4, 5), range(5))
        with pytest.raises(CheckpointInvalid, match="does not have this"):
            reader.tensor(EMBEDDING, "master")


def _holding(sizes: Mapping[str | Piece, int]) -> Holding:
    parts = (Part(name=key) if isinstance(key, str) else Part(name=key.unit, piece=key) for key in sizes)
    return Holding(parts=tuple(parts), bytes=tuple(sizes.values()))


def test_everything_is_written_by_one_of_its_holders_and_replicas_even_it_out() -> None:
    first, second = (Piece(unit=EMBEDDING, row=0, col=0, rows=6, cols=5, start=a, end=b) for a, b in ((0, 9), (9, 30)))
    # The last rank has a replica of what the first one has.
    holdings = [_holding({"a": 100, "b": 100, first: 72}), _holding({"a": 100, "b": 100, second: 168})]
    holdings.append(_holding({first: 72}))
    writers = assign_writers(holdings, MODEL)
    assert {writers[Part(name="a")], writers[Part(name="b")]} == {0, 1}, "redundant copies are shared out"
    assert (writers[Part(name=EMBEDDING, piece=first)], writers[Part(name=EMBEDDING, piece=second)]) == (2, 1)
    assert writers == assign_writers(holdings, MODEL)


def test_a_rank_writes_what_it_alone_holds_of_an_embedding() -> None:
    writers = assign_writers([_holding({piece: 4 * piece.elements}) for piece in PIECES], MODEL)
    assert writers == {Part(name=EMBEDDING, piece=piece): rank for rank, piece in enumerate(PIECES)}


def test_pieces_that_do_not_make_up_a_unit_are_an_error() -> None:
    with pytest.raises(ValueError, match="has 30 elements, but its pieces have 26"):
        assign_writers([_holding({piece: 4 * piece.elements}) for piece in PIECES[:3] + PIECES[4:]], MODEL)
