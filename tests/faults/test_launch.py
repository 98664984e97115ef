"""The launcher with real torchrun and two gloo ranks: it says how a run ended, and never leaves a process behind."""

import signal
import time
from pathlib import Path

import pytest

from tests.checkpoint.checkpoints import save
from tests.faults.support import LaunchedRun, alive


@pytest.mark.sweep  # workers that torchrun starts: seconds of imports each
def test_a_rank_that_raises_is_the_one_reported_not_its_neighbour_that_lost_the_connection(tmp_path: Path) -> None:
    with LaunchedRun(tmp_path / "run", "raise", device="cuda") as run:  # where torchrun starts programs, and forks none
        code, output = run.finish()
    assert "torch.distributed.run" in run.files.command.read_text()
    assert code == 70, output
    result = run.result()
    assert (result["status"], result["rank"], result["step"]) == ("failed", 1, 3)
    assert result["message"] == "rank 1: ValueError: the loss is not finite"
    assert Path(str(result["log"])).parts[-2:] == ("1", "stderr.log")
    assert "in train" in output, "the end of the traceback is missing"


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    with LaunchedRun(tmp_path / "run", "deaf", grace_s=600) as run:
        run.wait_for_steps(1)
        family = run.family()
        run.process.send_signal(signal.SIGINT)
        run.wait_for(run.files.stop.exists, "the request to stop")
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish()
    assert code == 130, output
    assert "did not end within" not in output
    assert not alive(family)
    assert run.result()["status"] == "interrupted"


def test_a_save_that_goes_on_is_waited_for_and_then_an_older_checkpoint_decides(tmp_path: Path) -> None:
    """Workers that never end and a checkpoint that grows for longer than the grace period, beside one that is whole."""
    with LaunchedRun(tmp_path / "run", "deaf", grace_s=2) as run:
        run.wait_for_steps(1)
        family = run.family()
        save(run.files.checkpoints, 3)
        partial = run.files.checkpoints / ".step-00000004.partial"
        partial.mkdir()
        run.process.send_signal(signal.SIGTERM)
        for size in range(1, 31):
            (partial / "rank-00000.safetensors").write_bytes(bytes(size))
            time.sleep(0.1)
        assert run.process.poll() is None, "it was killed while it was being saved"
        code, output = run.finish()
    assert code == 75, output
    assert "did not end within 2 s" in output
    assert "the checkpoint to continue from is step-00000003, and it is intact" in output
    assert not alive(family)
