"""`canzona train` with its real workers: a wish to stop keeps every step, and nothing outlives a killed launcher."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from canzona_cli.run.files import RunFiles, read_json
from tests.faults.support import REPOSITORY, alive
from tests.waiting import PATIENCE_S, wait_until

SMALL = (
    *("recipe=qwen3-tiny", "gpus=2", "model.num_layers=2"),
    *("train.steps=100000", "train.seq_length=32", "train.global_batch_size=2"),
)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "canzona_cli.app", "train", *SMALL, "train.eval_interval=0", f"run.dir={tmp_path}/run"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        | {"PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def modules(log: Path | None) -> set[str]:
    """Imported by the process that wrote this log: Python has been asked to tell."""
    assert log is not None
    return set(re.findall(r"^import time:.*\| +(\S+)$", log.read_text(), re.MULTILINE))


def test_ctrl_c_keeps_every_step_and_shows_where_the_time_went(training: subprocess.Popen[str], tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    wait_until(lambda: files.metrics.exists() and files.metrics.read_text().count("\n") >= 5, "5 steps", training)
    family = psutil.Process(training.pid).children(recursive=True)
    assert len(family) == 3
    training.send_signal(signal.SIGINT)
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == 130, output
    assert "Traceback" not in output
    imported = [modules(log) for log in (files.agent_log(0), files.worker_log(0, 0), files.worker_log(0, 1))]
    slow = {"torch", "megatron.core", "canzona_cli.training.step", "torch._dynamo.convert_frame"}
    assert [slow & names for names in imported] == [slow, set(), set()], "torchrun does it for all"
    assert not any({"torch._inductor.compile_fx", "wandb.sdk"} & names for names in imported), "no compiler, no tracker"
    assert "Step-time breakdown" in output
    assert f"run directory: {files.root}" in output
    assert not alive(family)
    result = read_json(files.result)
    assert result is not None
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    assert result["step"] == files.metrics.read_text().count("\n")
    ranks = [read_json(files.rank(rank)) for rank in range(2)]
    assert [rank and rank["status"] for rank in ranks] == ["interrupted", "interrupted"]


def test_ctrl_c_before_training_begins_ends_everything_at_once(training: subprocess.Popen[str], tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    launcher = psutil.Process(training.pid)
    wait_until(lambda: files.agent_log(0).exists() and launcher.children(), "torchrun", training)
    family = launcher.children(recursive=True)
    training.send_signal(signal.SIGINT)
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == 130, output
    assert "training has not begun" in output
    assert not alive(family)
    result = read_json(files.result)
    assert result is not None
    assert (result["status"], result["step"]) == ("interrupted", 0)


def test_workers_that_are_still_starting_die_with_the_launcher(training: subprocess.Popen[str], tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    wait_until(lambda: files.rank(0).exists() and files.rank(1).exists(), "both ranks", training)
    family = psutil.Process(training.pid).children(recursive=True)
    assert len(family) == 3
    training.kill()
    assert not alive(family)
