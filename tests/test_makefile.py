"""`make setup` installs again where the dependencies are others, whatever the dates of the files."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "scripts/constraints.txt")


def test_dependencies_are_installed_again_where_their_files_have_changed_and_only_there(tmp_path: Path) -> None:
    def installs() -> bool:
        return "pip install" in subprocess.run(
            ["make", "--dry-run", "setup"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip

    (tmp_path / "scripts").mkdir()
    for name in ("Makefile", *FILES):
        shutil.copy(ROOT / name, tmp_path / name)
    assert installs(), "nothing is installed"
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").write_text("".join((tmp_path / name).read_text() for name in FILES))
    assert not installs()
    for name in FILES:
        os.utime(tmp_path / name)
        assert not installs(), "it is newer, and the same"
    for name in FILES:
        file = tmp_path / name
        text = file.read_text()
        file.write_text(text.replace("torch", "torch2"))
        os.utime(file, (0, 0))
        assert installs(), f"{name} is older, and another"
        file.write_text(text)
