"""One job of two launchers, each with a torchrun of its own, on loopback: they train together, and end together with
the same code."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from tests.dist.ranks import free_port
from tests.faults.support import Launched, alive
from tests.waiting import wait_until

SMALL = (
    *("recipe=qwen3-tiny", "cluster.nodes=2", "gpus=2", "parallel.tp=1", "parallel.pp=1", "model.num_layers=2"),
    *("train.seq_length=32", "train.steps=100000", "train.global_batch_size=2", "train.eval_interval=0"),
    *("checkpoint.at_end=false", "checkpoint.every_minutes=null"),
)


@pytest.mark.sweep  # two launches of real workers; tests/slurm has failures on two nodes
def test_a_signal_to_one_launcher_saves_the_run_and_both_say_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    run_dir = tmp_path / "run"
    places = (f"run.dir={run_dir}", f"cluster.rdzv_endpoint=127.0.0.1:{free_port()}")
    train = ("canzona_cli.cli.app", "train", *SMALL, *places)
    with ExitStack() as launched:
        one, other = (
            launched.enter_context(
                Launched(run_dir, *train, f"cluster.node_rank={node}", environment={"OMP_NUM_THREADS": "1"})
            )
            for node in range(2)
        )
        wait_until(lambda: one.steps >= 2, "2 steps", one.process, other.process)
        families = [*one.family(), *other.family()]
        other.process.send_signal(signal.SIGUSR2)
        ends = (one.finish(), other.finish())
    assert [code for code, _ in ends] == [75, 75], ends
    newest = CheckpointStore(one.files.checkpoints).latest()
    assert newest is not None
    assert verify(newest.path)[1] == []
    assert newest.step == one.steps, "no step is lost"
    assert not alive(families)
