"""No test may pass because nothing ran: every test file is one that pytest finds by itself, and has tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests").rglob("*.py"))
TESTS = [path for path in FILES if path.name.startswith("test_")]


class _Finder:
    """Instead of importing the files that pytest finds, which takes half a minute, it notes them."""

    def __init__(self) -> None:
        self.found: list[Path] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        self.found.append(module_path)
        return _Nothing.from_parent(parent, path=module_path)


class _Nothing(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return []


def test_every_test_file_is_collected() -> None:
    finder = _Finder()
    ended = pytest.main(
        ["--rootdir", str(ROOT), "--collect-only", "--quiet", "-p", "no:cacheprovider", str(ROOT / "tests")],
        plugins=[finder],
    )
    assert ended == pytest.ExitCode.NO_TESTS_COLLECTED
    assert sorted(finder.found) == TESTS


def test_every_test_file_has_tests() -> None:
    for path in TESTS:
        names = [one.name for one in ast.parse(path.read_bytes()).body if isinstance(one, ast.FunctionDef)]
        assert any(name.startswith("test_") for name in names), path


def test_what_is_swept_says_so_in_its_own_file() -> None:
    """`make test-sweep` imports no other files."""
    marked = [path for path in FILES if "mark.sweep" in path.read_text() and path != Path(__file__)]
    assert marked
    assert set(marked) <= set(TESTS)
