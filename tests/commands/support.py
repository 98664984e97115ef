"""Runs the real command in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import PATIENCE_S


def canzona(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`canzona ARGUMENTS` in an 80-column terminal that is not one; text out and err."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("CANZONA", "_CANZONA"))}
    return subprocess.run(
        [sys.executable, "-m", "canzona_cli.app", *arguments],
        cwd=cwd,
        env={**settings, **importable(), "COLUMNS": "80", "NO_COLOR": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def importable() -> dict[str, str]:
    """Makes the package importable from any directory, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)}
