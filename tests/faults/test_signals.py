"""SIGTERM and SIGUSR2 whenever they come, to one process or to all: a verified checkpoint and 75, or none and 130."""

import signal
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from tests.faults.support import TRAINED_RANKS as RANKS
from tests.faults.support import TrainingRun, alive

pytestmark = pytest.mark.sweep  # real workers: seconds of imports each


def assert_saved(training: TrainingRun, code: int, output: str, family: list[psutil.Process]) -> None:
    """Ended as preempted, with one sound checkpoint of the last step that was done, and nothing half."""
    assert code == 75, output
    assert "Traceback" not in output
    assert not alive(family)
    result = training.result()
    assert (result["status"], result["exit_code"]) == ("preempted", 75)
    newest = CheckpointStore(training.files.checkpoints).latest()
    assert newest is not None
    manifest, problems = verify(newest.path)
    assert not problems
    assert manifest.progress.step == training.steps == result["step"]
    names = [path.name for path in training.files.checkpoints.iterdir()]
    assert not [name for name in names if name.startswith(".")], "half a checkpoint was left"


def test_usr2_to_every_process_of_the_job_saves_it(tmp_path: Path, corpus_cache: Path) -> None:
    with TrainingRun(tmp_path, corpus_cache) as training:
        training.wait_for(lambda: training.steps >= 3)
        family = training.family()
        assert len(family) == RANKS + 1
        for process in [*family, psutil.Process(training.process.pid)]:  # as `scancel --signal=USR2` does
            process.send_signal(signal.SIGUSR2)
        code, output = training.finish()
    assert_saved(training, code, output, family)


def test_sigterm_while_a_checkpoint_is_written_ends_in_a_whole_one(tmp_path: Path, corpus_cache: Path) -> None:
    with TrainingRun(tmp_path, corpus_cache, "checkpoint.every_steps=1") as training:
        training.wait_for(lambda: training.steps >= 3)
        training.wait_for(lambda: any(training.files.checkpoints.glob(".step-*")))
        family = training.family()
        training.process.send_signal(signal.SIGTERM)
        code, output = training.finish()
    assert_saved(training, code, output, family)


def test_a_signal_at_start_up_leaves_no_checkpoint_and_says_so(tmp_path: Path, corpus_cache: Path) -> None:
    with TrainingRun(tmp_path, corpus_cache) as training:
        # Torchrun imports for seconds; between its ranks' first words and training there may be less than a moment.
        training.wait_for(lambda: training.files.agent_log(0).exists() and training.family())
        family = training.family()
        training.process.send_signal(signal.SIGTERM)
        code, output = training.finish()
    assert code == 130, output
    assert "there is no checkpoint to continue from" in output
    assert "Traceback" not in output
    assert not alive(family)
    assert CheckpointStore(training.files.checkpoints).latest() is None
