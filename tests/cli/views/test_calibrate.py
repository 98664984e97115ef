"""The report of `canzona calibrate` fits 60 columns and says what to do with it."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from canzona_cli.bench.calibrate.calibrate import Calibration, content_of
from canzona_cli.cli.views.calibrate import CalibrationView, Progress
from canzona_cli.launch.outcome import Outcome
from canzona_cli.records.records import StageEvent
from tests.bench.calibrate.calibrations import RECORD, calibration, cut_off, number, run


def shown(found: Calibration, written: Path | None) -> list[str]:
    text = io.StringIO()
    view = CalibrationView(calibration=found, config=run()[0], written=written)
    Console(file=text, width=60).print(view, soft_wrap=True)
    return text.getvalue().splitlines()


def test_every_number_stands_beside_its_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    long = number("updates", 0.0468, "muon/standard/5/stacked", 5120, 12288)
    lines = shown(calibration(replace(RECORD, measurements=(*RECORD.measurements, long))), Path("here.yaml"))
    words = [line.split() for line in lines]
    assert ["memory", "bandwidth,", "GB/s", "17", "10%"] in words
    assert ["bf16", "matmuls", "of", "512,", "TFLOP/s", "0.9", "10%"] in words
    assert ["muon/standard/5", "256x768", "2.50", "10%"] in words
    assert ["megatron/muon/standard/5", "256x768", "3.50", "10%"] in words
    assert "written: ./here.yaml" in lines
    assert "use it: canzona plan recipe=qwen3-tiny gpus=2 cluster=./here.yaml" in lines
    assert all(len(line) <= 60 for line in lines if not line.startswith(("use it", "written"))), lines


def test_how_it_ended_is_said() -> None:
    assert "interrupted: the numbers measured so far are kept" in shown(cut_off(), Path("here.yaml"))
    crash = Outcome(status="failed", exit_code=70, message="rank 1: it broke", log=Path("/logs/1"))
    failed = shown(calibration(replace(RECORD, measurements=()), crash), None)
    assert "failed: rank 1: it broke" in failed
    assert "full output: /logs/1" in failed
    assert not any("written" in line for line in failed)


def test_json_has_everything() -> None:
    found = calibration()
    said = content_of(found, Path("here.yaml"))
    assert said["profile_file"] == "here.yaml"
    profile, measurements = said["profile"], said["measurements"]
    assert isinstance(profile, dict)
    assert isinstance(measurements, list)
    assert profile["fp32_tflops"] == 0.2
    assert len(measurements) == len(RECORD.measurements)
    assert measurements[0]["relative_spread"] == pytest.approx(0.1)


def test_each_part_is_announced_once() -> None:
    text = io.StringIO()
    progress = Progress(Console(file=text, width=60))
    progress.stage(StageEvent(stage="start workers"))
    progress.stage(StageEvent(stage="AdamW"))
    assert [line.split("s  ")[1] for line in text.getvalue().splitlines()] == ["start workers", "measure AdamW"]
