"""The tools that torch.compile needs are looked for where Triton looks for them."""

import sysconfig
from pathlib import Path

import pytest

from canzona_cli.core.costs.machine import missing_for_compiling


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH and where Python's header files are: both empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def _compiler(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_bare_machine_lacks_one_thing_after_another(bare: Path) -> None:
    assert missing_for_compiling() == "a C compiler"
    _compiler(bare / "clang")
    assert missing_for_compiling() == "Python's header files"
    (bare / "Python.h").touch()
    assert missing_for_compiling() is None


def test_a_named_compiler_counts_alone(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is Triton's: with CC set, gcc and clang are not looked for."""
    (bare / "Python.h").touch()
    monkeypatch.setenv("CC", str(_compiler(bare / "mine")))
    assert missing_for_compiling() is None
    _compiler(bare / "gcc")
    monkeypatch.setenv("CC", "nothing-of-this-name")
    assert missing_for_compiling() == "a C compiler"
