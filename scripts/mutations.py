#!/usr/bin/env python3
"""Mutation tests: makes each wrong edit in scripts/mutations.yaml in a copy of the sources, and prints which test
fails.

    make mutations                                   # all edits: about 40 s each on two busy cores
    python scripts/mutations.py [WORD ...]           # edits whose names contain one of the words

An edit is noticed if one of its tests fails, or still runs after ten minutes; only tests that `make test` runs count.
At the end, the failed tests must pass without any edit. Exits 1 if an edit is not noticed or no longer applies, or if a
test fails without an edit. Needs the same packages as the tests.
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
"""The pattern of a failed test in pytest's summary; names of parametrised tests may contain spaces."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A wrong edit of a source file, with the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str | None:
        """Returns the file's text with the edit; None if the edit no longer applies."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def mutations() -> list[Mutation]:
    """Reads the edits of scripts/mutations.yaml."""
    import yaml

    return [Mutation(**{**fields, "tests": tuple(fields["tests"])}) for fields in yaml.safe_load(LIST.read_text())]


def stale(edits: Sequence[Mutation]) -> list[Mutation]:
    """Returns the edits that no longer apply or whose tests do not exist."""
    return [
        edit
        for edit in edits
        if edit.applied((ROOT / edit.file).read_text()) is None
        or not all((ROOT / test.partition("::")[0]).exists() for test in edit.tests)
    ]


def noticed(tests: Sequence[str], copy: Path) -> str | None:
    """Runs tests in a copy of the sources; returns the name of the first test that fails, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-xq", "-rfE", "-m", "not sweep and not slurm", *tests]
    # No bytecode is written: it would hide an edit that changes neither the size of a file nor the second of its time.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "still running"
    if process.returncode == 0:
        return None
    first_failure = _FAILED.search(process.stdout)
    return first_failure[1] if first_failure else f"pytest: exit {process.returncode}"


def main(words: Sequence[str]) -> int:
    """Tries the edits whose names contain one of the words; returns the exit code."""
    edits = [edit for edit in mutations() if not words or any(word in edit.name for word in words)]
    gone = stale(edits)
    for edit in gone:
        print(f"no longer applies: {edit.name} ({edit.file})")
    noticed_by: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "plans", "shared")
        shutil.copytree(ROOT, copy, ignore=skipped)
        print("| edit | file | noticed by | s |\n|---|---|---|---|", flush=True)
        for edit in edits:
            if edit in gone:
                continue
            target, started = copy / edit.file, time.monotonic()
            text = target.read_text()
            edited = edit.applied(text)
            assert edited is not None
            target.write_text(edited)
            test = noticed(edit.tests, copy)
            target.write_text(text)
            noticed_by |= {edit.name: test} if test else {}
            print(
                f"| {edit.name} | {edit.file} | {test or '**no test**'} | {time.monotonic() - started:.0f} |",
                flush=True,
            )
        tests = sorted({test for test in noticed_by.values() if "::" in test})
        wrong = noticed(tests, copy) if tests else None
    if wrong:
        print(f"\nfails without any edit: {wrong}")
    print(f"\n{len(noticed_by)} of {len(edits)} noticed")
    return 1 if wrong or len(noticed_by) < len(edits) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
