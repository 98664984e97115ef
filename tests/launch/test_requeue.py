"""The notes with which launchers ask a job's script to requeue the job without the machine that failed."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.restarts import NOTES, note_failure

CRASH = Outcome(status="failed", exit_code=70, step=7, message="rank 1 died at 0x7f01", machine="n2")


def note(outcome: Outcome, path: Path) -> str:
    """Returns the machine in the note for an outcome."""
    assert note_failure(outcome, {NOTES: str(path)}) == ""
    return path.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize(
    ("outcome", "machine"),
    [
        (CRASH, "n2"),
        (replace(CRASH, exit_code=71), "n2"),
        (replace(CRASH, secondary=True), ""),
        (replace(CRASH, machine=None), ""),
    ],
)
def test_a_failure_of_a_machine_is_noted_with_its_name_where_it_is_certain(
    tmp_path: Path, outcome: Outcome, machine: str
) -> None:
    assert note(outcome, tmp_path / "runs" / "failed-7-0") == machine


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [("done", 0), ("failed", 2), ("failed", 3), ("failed", 4), ("diverged", 70), ("preempted", 75)],
)
def test_other_endings_are_not_noted(tmp_path: Path, status: str, exit_code: int) -> None:
    path = tmp_path / "failed-7-0"
    outcome = replace(CRASH, status=status, exit_code=exit_code)  # type: ignore[arg-type]
    assert note_failure(outcome, {NOTES: str(path)}) == ""
    assert note_failure(CRASH, {}) == "", "outside of a job"
    assert list(tmp_path.iterdir()) == []


def test_a_failure_that_repeats_on_another_machine_is_not_noted_again(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"failed-7-{start}" for start in range(3))
    note(CRASH, first)
    note(CRASH, tmp_path / "failed-71-0")
    again = replace(CRASH, machine="n3", message="rank 0 died at 0x55ff")
    said = note_failure(again, {NOTES: str(second)})
    assert said == "this job already failed this way at step 7, and is not requeued"
    assert not second.exists()
    assert note(replace(again, step=8), third) == "n3", "it got further"
    assert note(replace(again, step=8), third) == "n3", "another machine of the run writes the same note"
