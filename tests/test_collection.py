"""No test may pass because nothing ran: every test file is one that pytest finds by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.sweep
def test_every_test_file_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--no-header", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    collected = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert collected == written
