"""Documents are held out by a rule that anybody can repeat: fairly, whole, with their duplicates, and for good."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from canzona_cli.config.schema import DataConfig
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.order import Mask, held_out, split_tokens
from tests.data.test_indexed import Document, write
from tests.data.texts import drawn


def texts(count: int, seed: int = 0) -> list[Document]:
    draw = random.Random(seed)
    return [[[draw.randrange(256) for _ in range(draw.randint(4, 20))]] for _ in range(count)]


def of_share(share: float) -> DataConfig:
    return DataConfig(source="prepared", validation_fraction=share)


def drawn_by_us(folder: Path, documents: Sequence[Document], share: float) -> Mask:
    pair = inspect_pair(write(folder / "p", documents))
    return held_out(pair, "drawn", of_share(share))


def test_the_rule_is_the_hash_of_the_tokens_and_the_share_is_within_its_spread(tmp_path: Path) -> None:
    documents = texts(4000)
    earlier = np.zeros(4000, dtype=np.bool_)
    for share in (0.002, 0.02, 0.1, 0.5):
        found = drawn_by_us(tmp_path, documents, share)
        assert (found == drawn(tmp_path / "p", share)).all()
        assert abs(found.sum() - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5
        assert (found >= earlier).all(), "a larger share holds out the documents of a smaller one"
        earlier = found
        pair, settings = inspect_pair(tmp_path / "p"), of_share(share)
        held = int(pair.lengths[found].sum())
        assert split_tokens(pair, "drawn", settings) == (pair.tokens - held, held)
        own_set = replace(settings, validation="elsewhere")
        assert split_tokens(pair, "drawn", own_set) == (pair.tokens, 0), "all documents are trained on"


def test_sorted_documents_are_held_out_of_each_kind(tmp_path: Path) -> None:
    """The last documents are all of the second kind, 9 of 10 documents of the first."""
    documents = [[[kind] * length] for kind in (1, 2) for length in range(1, 1 + (1800 if kind == 1 else 200))]
    kinds = np.array([document[0][0] for document in documents])
    found = drawn_by_us(tmp_path, documents, 0.05)
    assert abs((kinds[found] == 2).mean() - 0.1) < 4 * (0.1 * 0.9 / found.sum()) ** 0.5
    last = held_out(inspect_pair(tmp_path / "p"), "tail", of_share(0.05))
    assert {*kinds[last].tolist()} == {2}


def test_equal_documents_are_on_one_side_which_others_do_not_change(tmp_path: Path) -> None:
    documents = texts(300)
    found = drawn_by_us(tmp_path, documents, 0.3)
    side = {str(document): bool(held) for document, held in zip(documents, found, strict=True)}
    more = [*texts(500, seed=1), *documents, *documents[::-1]]
    again = drawn_by_us(tmp_path, more, 0.3)
    sides = [(str(document), bool(held)) for document, held in zip(more, again, strict=True)]
    assert {text: held for text, held in sides if text in side} == side
    assert len({*sides}) == len({text for text, _ in sides})


def test_a_document_of_several_sequences_is_on_one_side(tmp_path: Path) -> None:
    whole = texts(400)
    cut: list[Document] = [[document[0][:2], document[0][2:3], document[0][3:]] for document in whole]
    found = drawn_by_us(tmp_path, cut, 0.2).reshape(400, 3)
    assert (found.any(axis=1) == found.all(axis=1)).all()
    assert (found[:, 0] == drawn_by_us(tmp_path, whole, 0.2)).all(), "however its tokens are cut"


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5, 0.9999])
def test_neither_side_is_empty_unless_all_documents_are_equal(tmp_path: Path, share: float) -> None:
    for count in (2, 3, 5):
        for seed in range(10):
            found = drawn_by_us(tmp_path, texts(count, seed=seed), share)
            assert 0 < found.sum() < count
    assert not drawn_by_us(tmp_path, texts(1) * 5, share).any()
    assert not drawn_by_us(tmp_path, texts(5), 0.0).any(), "nothing is held out with a share of 0"


def test_tokens_are_read_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANZONA_CACHE", str(tmp_path / "cache"))
    pair, settings = inspect_pair(write(tmp_path / "p", texts(20))), of_share(0.3)
    said: list[str] = []
    for times in (1, 1):
        held_out(pair, "drawn", settings, lambda what, share: said.append(what))
        assert len(said) == times
    other = drawn_by_us(tmp_path, texts(20, seed=1), 0.3)
    assert (other == drawn(tmp_path / "p", 0.3)).all()
    for path in (tmp_path / "cache" / "scans").iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    again = held_out(inspect_pair(tmp_path / "p"), "drawn", settings)
    assert (again == other).all(), "what is damaged in the cache is not used"
