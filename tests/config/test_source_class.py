"""A class is found in files and packages by reading them; nothing of them runs."""

import sys
from pathlib import Path

import pytest

from canzona_cli.config.checks import source_problem

NEVER = "raise SystemExit('it was run')\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files and a package, all of which would end the test if they ran."""
    package = tmp_path / "house" / "inner"
    package.mkdir(parents=True)
    for place in (package.parent / "__init__.py", package / "__init__.py"):
        place.write_text(NEVER)
    (package / "rule.py").write_text(NEVER + "class Signed: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "class Signed: ...",
        "from elsewhere import Signed",
        "from elsewhere import Other as Signed",
        "Signed = make()",
        "Signed: type = make()",
        "try:\n    import fast\nexcept ImportError:\n    class Signed: ...",
        "if True:\n    pass\nelse:\n    class Signed: ...",
        # Only running these would tell.
        "from elsewhere import *",
        "Other, Signed = make()",
        "globals()['Signed'] = object",
        "globals().update(Signed=object)",
        "def __getattr__(name): ...",
    ],
)
def test_what_may_be_there_is_not_refused(own: Path, text: str) -> None:
    (own / "own.py").write_text(f"{NEVER}{text}\n")
    assert source_problem("own.py", "Signed") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Singed: ...", "did you mean Singed?"),
        ("class Lion: ...\nclass Tiger: ...", "its classes are Lion, Tiger"),
        ("def outer():\n    class Signed: ...", "it has no class"),
        ("class Signed", "is not valid Python: expected ':', line 2"),
        ("\0", "is not valid Python"),
    ],
)
def test_what_is_missing_is_told_with_what_is_there(own: Path, text: str, said: str) -> None:
    (own / "own.py").write_text(f"{NEVER}{text}\n")
    assert said in (source_problem("own.py", "Signed") or "")


def test_packages_are_read_too(own: Path) -> None:
    assert source_problem("house.inner.rule", "Signed") is None
    assert "did you mean Signed?" in (source_problem("house.inner.rule", "Singed") or "")
    assert source_problem("house.inner.rulle", "Signed") == "house.inner has no module rulle"
    assert source_problem("hut.inner", "Signed") == "there is no package hut here"
    assert source_problem("torch.optim", "SGD") is None
    assert source_problem("torch.optim.sgd", "SDG") is not None
    assert not {name for name in sys.modules if name.partition(".")[0] == "house"}
