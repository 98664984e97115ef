"""Children of the launcher end, whatever happens meanwhile."""

import subprocess

import pytest

from canzona_cli.launch.processes import kill_tree


def test_a_child_that_ends_before_it_is_listed_needs_no_killing(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sh", "-c", "exit 3"])
    child.wait()
    monkeypatch.setattr(child, "poll", lambda: None)  # as it was a moment before
    kill_tree(child)
    assert child.returncode == 3
