"""The share of a run's time that went into steps that count, over all its launches."""

from dataclasses import asdict
from pathlib import Path

import pytest

from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.records import StageEvent, StepMetrics
from canzona_cli.records.summary import earlier_events, events_of, goodput_of


def write(files: RunFiles, *, stages: tuple[float, ...] = (), steps: dict[int, float]) -> None:
    """A launch's start and end, and the times of its logged steps, of 10 s each."""
    files.root.mkdir(parents=True, exist_ok=True)
    for number, time in enumerate(stages):
        stage = "finish" if number else "start workers"
        append_json_line(files.events, asdict(StageEvent(time=time, stage=stage)))
    for step, time in steps.items():
        append_json_line(files.metrics, asdict(StepMetrics(step=step, step_s=10.0, time=time)))


def test_every_second_of_three_launches_is_counted_once(tmp_path: Path) -> None:
    """A line for every second step. The first launch died at step 8, saved at 4; the second before it trained; a day
    passed; the third made steps 5 to 10."""
    files = RunFiles(tmp_path)
    assert goodput_of(files, [*earlier_events(files), *events_of(files)]) is None
    write(RunFiles(files.attempts / "1"), steps={6: 1060.0, 8: 1080.0})
    write(RunFiles(files.attempts / "2"), stages=(1100.0, 1105.0), steps={})
    write(files, stages=(1000.0,), steps={2: 1020.0, 4: 1040.0})
    write(files, stages=(87_500.0, 87_575.0), steps={6: 87_530.0, 8: 87_550.0, 10: 87_570.0})
    found = goodput_of(files, [*earlier_events(files), *events_of(files)])
    assert found is not None
    assert (found.wall_s, found.kept_s, found.redone_s) == (87_575.0 - 1000.0, 100.0, 40.0)
    assert found.between_s == (1100.0 - 1080.0) + (87_500.0 - 1105.0)
    assert found.other_s == pytest.approx(found.wall_s - 100 - 40 - found.between_s)
    assert found.share == pytest.approx(100 / 86_575)


def test_a_slow_start_is_no_time_between_launches(tmp_path: Path) -> None:
    """The launcher announces the start, and rank 0 announces it again."""
    files = RunFiles(tmp_path)
    write(files, stages=(1000.0,), steps={})
    write(files, stages=(1040.0, 1075.0), steps={1: 1055.0, 2: 1065.0})
    found = goodput_of(files, events_of(files))
    assert found is not None
    assert (found.wall_s, found.kept_s, found.between_s) == (75.0, 20.0, 0.0)
