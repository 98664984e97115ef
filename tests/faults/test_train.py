"""`canzona train` with its real workers: a wish to stop keeps every step, and nothing outlives a killed launcher."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.support import Launched, alive

SMALL = (
    *("recipe=qwen3-tiny", "gpus=2", "model.num_layers=2", "train.eval_interval=0"),
    *("train.steps=100000", "train.seq_length=32", "train.global_batch_size=2"),
)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Launched]:
    train = ("canzona_cli.cli.app", "train", *SMALL, f"run.dir={tmp_path}/run")
    with Launched(tmp_path / "run", *train, environment={"PYTHONPROFILEIMPORTTIME": "1"}) as run:
        yield run


def modules(log: str) -> set[str]:
    """Imported by the process that wrote this log: Python has been asked to tell."""
    return set(re.findall(r"^import time:.*\| +(\S+)$", log, re.MULTILINE))


def test_ctrl_c_keeps_every_step_and_shows_where_the_time_went(training: Launched) -> None:
    training.wait_for_steps(5)
    family = training.family()
    assert len(family) == 3
    training.process.send_signal(signal.SIGINT)
    code, output = training.finish()
    assert code == 130, output
    assert "Traceback" not in output
    logs = (training.files.agent_log(0).read_text(), training.log(0), training.log(1))
    imported = [modules(log) for log in logs]
    slow = {"torch", "megatron.core", "canzona_cli.training.step", "torch._dynamo.convert_frame"}
    assert [slow & names for names in imported] == [slow, set(), set()], "torchrun does it for all"
    assert not any({"torch._inductor.compile_fx", "wandb.sdk"} & names for names in imported), "no compiler, no tracker"
    assert "Step-time breakdown" in output
    assert f"run directory: {training.files.root}" in output
    assert not alive(family)
    result = training.result()
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    assert result["step"] == training.steps
    assert [training.record(rank)["status"] for rank in range(2)] == ["interrupted", "interrupted"]


@pytest.mark.sweep  # test_launch and test_processes end launches of quicker workers
def test_ctrl_c_before_training_begins_ends_everything_at_once(training: Launched) -> None:
    training.wait_for(lambda: training.files.agent_log(0).exists() and training.family(), "torchrun")
    family = training.family()
    training.process.send_signal(signal.SIGINT)
    code, output = training.finish()
    assert code == 130, output
    assert "training has not begun" in output
    assert not alive(family)
    result = training.result()
    assert (result["status"], result["step"]) == ("interrupted", 0)
