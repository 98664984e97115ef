"""The list of wrong edits: each still applies, to what would still be Python, and its tests are there.

Whether tests notice them: `make mutations`.
"""

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMES = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))
mutations, stale = (_NAMES[name] for name in ("mutations", "stale"))


def test_every_edit_applies_and_can_be_run() -> None:
    found = mutations()
    assert len({one.name for one in found}) == len(found) >= 20
    assert [one.name for one in stale(found)] == []
    for one in found:
        edited = one.applied((ROOT / one.file).read_text())
        assert edited is not None
        ast.parse(edited)


def test_what_no_longer_applies_is_told() -> None:
    first = mutations()[0]
    gone = type(first)(**{**vars(first), "old": "what is in no file"})
    twice = type(first)(**{**vars(first), "old": "return"})
    nowhere = type(first)(**{**vars(first), "tests": ("tests/test_nothing.py",)})
    assert stale([gone, first, twice, nowhere]) == [gone, twice, nowhere]
