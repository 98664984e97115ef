#!/usr/bin/env python3
"""Whether tests notice: tries each wrong edit of scripts/mutations.yaml in a copy of the sources, and says who noticed.

    make mutations                                   # all of them: about 40 s each on two busy cores
    python scripts/mutations.py [NAME ...]           # those whose name has one of the words in it

An edit is noticed when one of its tests fails, of those that `make test` runs, or is still running after ten minutes.
The tests that noticed one must pass without any, which is seen at the end, of all of them together. Exit 1: nobody
noticed an edit, it no longer applies, or what noticed it fails anyway. Needs what tests need.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutations.yaml"
PATIENCE_S = 600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
"""Names of parametrised tests may have blanks."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One wrong edit."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str | None:
        """The file's text with the edit in it; None where it no longer applies."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def mutations() -> list[Mutation]:
    """The list."""
    import yaml

    return [Mutation(**{**one, "tests": tuple(one["tests"])}) for one in yaml.safe_load(LIST.read_text())]


def stale(found: Sequence[Mutation]) -> list[Mutation]:
    """Those that no longer apply, or name tests that are not there."""
    return [
        one
        for one in found
        if one.applied((ROOT / one.file).read_text()) is None
        or not all((ROOT / test.partition("::")[0]).exists() for test in one.tests)
    ]


def noticed(tests: Sequence[str], copy: Path) -> str | None:
    """The first test that fails in `copy`; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-xq", "-rfE", "-m", "not sweep and not slurm", *tests]
    # A compiled module of the text before would be taken for the new one's, of the same second and size.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "still running"
    if ran.returncode == 0:
        return None
    found = _FAILED.search(ran.stdout)
    return found[1] if found else f"pytest: exit {ran.returncode}"


def main(words: Sequence[str]) -> int:
    """Exit code."""
    found = [one for one in mutations() if not words or any(word in one.name for word in words)]
    gone = stale(found)
    for one in gone:
        print(f"no longer applies: {one.name} ({one.file})")
    by: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "plans", "shared")
        shutil.copytree(ROOT, copy, ignore=skipped)
        print("| edit | file | noticed by | s |\n|---|---|---|---|", flush=True)
        for one in found:
            if one in gone:
                continue
            target, started = copy / one.file, time.monotonic()
            text = target.read_text()
            edited = one.applied(text)
            assert edited is not None
            target.write_text(edited)
            test = noticed(one.tests, copy)
            target.write_text(text)
            by |= {one.name: test} if test else {}
            print(
                f"| {one.name} | {one.file} | {test or '**nobody**'} | {time.monotonic() - started:.0f} |", flush=True
            )
        tests = sorted({test for test in by.values() if "::" in test})
        wrong = noticed(tests, copy) if tests else None
    if wrong:
        print(f"\nwithout any edit, too: {wrong}")
    print(f"\n{len(by)} of {len(found)} noticed")
    return 1 if wrong or len(by) < len(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
