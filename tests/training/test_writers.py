"""Writers whose disk fails: what they lose is counted and told once, and nothing is raised."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canzona_cli.training.records import Lines


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """For this process: no file grows beyond `free` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_only_whole_lines_are_in_a_file_whose_disk_became_full(tmp_path: Path) -> None:
    said: list[str] = []
    lines, path = Lines(said.append), tmp_path / "metrics.jsonl"
    with full_disk(100):
        for step in range(10):
            lines.append(path, {"step": step, "filler": "x" * 10})
    kept = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert kept == [0, 1], "whole lines, up to the limit"
    assert lines.lost == {"metrics.jsonl": 8}
    lines.append(path, {"step": 10})
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 10}
    down, again = said
    assert "cannot be written" in down
    assert "8 of its lines are lost" in again


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    said: list[str] = []
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    Lines(said.append).append(tmp_path / "metrics.jsonl", {"step": 1})
    assert victim.read_text() == "mine"
    assert len(said) == 1
