"""The GPU manual's tables are true: code that only CUDA executes, with its tests, and the parts of the check."""

import ast
import re
from pathlib import Path

from gpu_check import PARTS

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "canzona_cli"
MANUAL = (PACKAGE / "core" / "megatron" / "README.md").read_text(encoding="utf-8")


def _rows(head: str) -> list[list[str]]:
    """Returns the cells of the table that begins with this line."""
    lines = MANUAL.partition(f"\n{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _parsed(*words: str) -> dict[str, ast.Module]:
    """Parses the package's files that have one of these words, by their names."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {name: ast.parse(text) for name, text in texts.items() if any(word in text for word in words)}


def _asks_for_the_device(module: ast.Module) -> bool:
    """Tells whether code uses torch.cuda or looks at a tensor's or rank's device."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node.value) == "torch.cuda"):
            return True
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("device.type"):
            return True
    return False


CODE = _rows("| code | code that runs only with CUDA | tested on a stand-in in |")


def test_every_module_that_asks_for_the_device_is_listed_once() -> None:
    modules = _parsed("cuda", "device.type")
    asking = {name for name, module in modules.items() if _asks_for_the_device(module)}
    listed = [name for code, _, _ in CODE for name in _names(code)]
    assert len(listed) == len(set(listed))
    # Nothing but Muon's passes on a GPU is in it, so it has no need to ask.
    assert set(listed) - asking == {"core/optimizers/muon_cuda.py"}
    assert asking <= set(listed)


def test_tests_that_stand_in_are_there_and_are_not_all_swept() -> None:
    for _, _, tests in CODE:
        assert _names(tests)
        for name in _names(tests):
            text = (ROOT / "tests" / name).read_text(encoding="utf-8")
            assert text.count("\ndef test_") > text.count("\n@pytest.mark.sweep")


def _named_as_never_executed() -> list[str]:
    return [name for cells in _rows("| code that no test executes | why |") for name in _names(cells[0])]


def test_code_that_nothing_executes_is_there() -> None:
    for name in _named_as_never_executed():
        path, _, function = name.partition(":")
        assert re.search(rf"def {function}\b", (PACKAGE / path).read_text(encoding="utf-8")), name


def test_parts_have_the_limits_that_the_manual_names() -> None:
    rows = _rows("| part | limit | requirement |")
    assert {name: limit for parts, limit, _ in rows for name in _names(parts)} == {
        name: f"{part.limit_s:.0f} s" for name, part in PARTS.items()
    }
