"""SIGTERM and SIGUSR2 whenever they come, to one process or to all: a verified checkpoint and 75, or none and 130."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.run.files import read_json
from tests.faults.support import TRAINED_RANKS as RANKS
from tests.faults.support import TrainingRun, alive

pytestmark = pytest.mark.sweep  # real workers: seconds of imports each

Start = Callable[..., TrainingRun]


@pytest.fixture
def start(tmp_path: Path, corpus_cache: Path) -> Iterator[Start]:
    started: list[TrainingRun] = []

    def begin(*overrides: str) -> TrainingRun:
        started.append(TrainingRun(tmp_path, corpus_cache, *overrides))
        return started[-1]

    yield begin
    for training in started:
        training.process.kill()
        training.process.wait()


def assert_saved(training: TrainingRun, code: int, output: str, family: list[psutil.Process]) -> None:
    """Ended as preempted, with one sound checkpoint of the last step that was done, and nothing half."""
    assert code == 75, output
    assert "Traceback" not in output
    assert not alive(family)
    result = read_json(training.files.result)
    assert result is not None
    assert (result["status"], result["exit_code"]) == ("preempted", 75)
    newest = CheckpointStore(training.files.checkpoints).newest()
    assert newest is not None
    manifest, problems = verify(newest.path)
    assert not problems
    assert manifest.progress.step == training.steps == result["step"]
    names = [path.name for path in training.files.checkpoints.iterdir()]
    assert not [name for name in names if name.startswith(".")], "half a checkpoint was left"


def test_usr2_to_every_process_of_the_job_saves_it(start: Start) -> None:
    training = start()
    training.wait_for(lambda: training.steps >= 3)
    family = training.family()
    assert len(family) == RANKS + 1
    for process in [*family, psutil.Process(training.process.pid)]:  # as `scancel --signal=USR2` does
        process.send_signal(signal.SIGUSR2)
    assert_saved(training, *training.finish(), family)


def test_sigterm_while_a_checkpoint_is_written_ends_in_a_whole_one(start: Start) -> None:
    training = start("checkpoint.every_steps=1")
    training.wait_for(lambda: training.steps >= 3)
    training.wait_for(lambda: any(training.files.checkpoints.glob(".step-*")))
    family = training.family()
    training.process.send_signal(signal.SIGTERM)
    assert_saved(training, *training.finish(), family)


def test_a_signal_at_start_up_leaves_no_checkpoint_and_says_so(start: Start) -> None:
    training = start()
    # Torchrun imports for seconds; between its ranks' first words and training there may be less than a moment.
    training.wait_for(lambda: training.files.agent_log(0).exists() and training.family())
    family = training.family()
    training.process.send_signal(signal.SIGTERM)
    code, output = training.finish()
    assert code == 130, output
    assert "there is no checkpoint to continue from" in output
    assert "Traceback" not in output
    assert not alive(family)
    assert CheckpointStore(training.files.checkpoints).newest() is None
