"""`canzona data show`: what was prepared, read back as text."""

from pathlib import Path

import pytest

from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.view import HeldOut, view
from tests.cli.commands.support import canzona
from tests.data.texts import drawn

LINES = ["a short line", "a line of some more words than the one before", "über\x1b[2J", *(["x"] * 5)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("\n".join(LINES) + "\n")
    canzona("data", "prepare", "a.txt", "-o", "corpus", "--document", "line", cwd=folder, code=0)
    return folder / "corpus"


def test_documents_and_lengths_are_those_of_the_text(prefix: Path) -> None:
    shown = view(prefix, documents=2, tokens=20)
    texts, sizes = LINES[:2], [len(line.encode()) + 1 for line in LINES]
    assert [(document.text, document.cut) for document in shown.documents] == [
        (texts[0], False),
        (texts[1][:20], True),
    ]
    assert [document.tokens for document in shown.documents] == sizes[:2]
    lengths = shown.lengths
    assert (lengths.least, lengths.most) == (min(sizes), max(sizes))
    assert lengths.mean == pytest.approx(inspect_pair(prefix).tokens / len(LINES))
    assert sum(documents for _, documents in lengths.histogram) == len(LINES)
    bounds = [0, *(most for most, _ in lengths.histogram)]
    for least, (most, documents) in zip(bounds, lengths.histogram, strict=False):
        assert documents == sum(least < size <= most for size in sizes)
    held_out = drawn(prefix, 0.02)
    if not held_out.any():  # the one with the least hash
        held_out = drawn(prefix, min(share / 100 for share in range(101) if drawn(prefix, share / 100).any()))
    assert shown.held_out == HeldOut(
        share=0.02, documents=int(held_out.sum()), tokens=int(inspect_pair(prefix).lengths[held_out].sum())
    )


def test_the_screen_has_the_facts_and_no_control_characters(prefix: Path) -> None:
    done = canzona("data", "show", str(prefix), "--documents", "3", code=0)
    for part in ("8", "byte, 257 ids, 256 ends a document", "document 0: 13 tokens", LINES[1], r"\x1b[2J"):
        assert part in done.stdout
    assert "\x1b[2J" not in done.stdout


def test_long_documents_fill_a_screen_of_25_lines_and_are_whole_for_who_asks(tmp_path: Path) -> None:
    lines = [f"line {number} {'word ' * 40}" for number in range(50)]
    for size in range(1, 12):
        (tmp_path / f"{size:02}.txt").write_text("\n".join([*lines, "x" * 2**size]))
    canzona("data", "prepare", ".", "-o", "corpus", cwd=tmp_path, code=0)
    asked = ("data", "show", "corpus", "--tokens", "2000")
    short, full = (canzona(*asked, *more, cwd=tmp_path).stdout.splitlines() for more in ((), ("-v",)))
    assert len(short) <= 25
    assert max(map(len, short)) <= 80
    assert sum(line.startswith("document 0") and "beginning" in line for line in short) == 1
    assert [line for line in full if line.startswith("line 3")] == [lines[3]] * 2
    assert not any(line.startswith("line 3") for line in short)


def test_a_missing_pair_is_a_mistake(prefix: Path) -> None:
    refused = canzona("data", "show", str(prefix) + "-nowhere", code=2)
    assert "nowhere" in refused.stderr
