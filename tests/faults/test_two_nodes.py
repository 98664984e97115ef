"""One job of two launchers, each with a torchrun of its own, on loopback: they train together, and end together with
the same code and the same culprit."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from tests.dist.ranks import free_port
from tests.faults.support import Launched, alive
from tests.waiting import wait_until

pytestmark = pytest.mark.sweep  # two launches of real workers each, and tests/slurm has launches on two nodes
SMALL = (
    *("recipe=qwen3-tiny", "cluster.nodes=2", "gpus=2", "parallel.tp=1", "parallel.pp=1", "model.num_layers=2"),
    *("train.seq_length=32", "train.steps=100000", "train.global_batch_size=2", "train.eval_interval=0"),
    *("checkpoint.at_end=false", "checkpoint.every_minutes=null"),
)
Start = Callable[..., tuple[Launched, Launched]]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts `canzona train` twice, as on two machines that share a directory; returns after some steps."""
    for name in os.environ:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    with ExitStack() as launched:

        def start(*overrides: str, steps: int = 2) -> tuple[Launched, Launched]:
            run_dir = tmp_path / "run"
            places = (f"run.dir={run_dir}", f"cluster.rdzv_endpoint=127.0.0.1:{free_port()}")
            train = ("canzona_cli.cli.app", "train", *SMALL, *overrides, *places)
            threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            one, other = (
                launched.enter_context(Launched(run_dir, *train, f"cluster.node_rank={node}", environment=threads))
                for node in range(2)
            )
            wait_until(lambda: one.steps >= steps, f"{steps} steps", one.process, other.process)
            return one, other

        yield start


@pytest.mark.parametrize("victim", ["torchrun", "launcher"])
def test_when_one_machine_loses_its_processes_both_launchers_name_it_and_nothing_is_left(
    training: Start, victim: str
) -> None:
    one, other = training()
    families = [*one.family(), *other.family()]
    if victim == "torchrun":
        next(p for p in other.family() if p.ppid() == other.process.pid).kill()
    else:
        other.process.send_signal(signal.SIGKILL)
    code, said = one.finish()
    other_code, other_said = other.finish()
    assert code == 70, said
    culprit = "machine 1: torchrun was killed by signal 9" if victim == "torchrun" else "machine 1 ("
    message = str(one.result()["message"])
    assert message.startswith(culprit), message
    if victim == "torchrun":
        assert other_code == 70
        assert culprit in other_said
    else:
        assert "is gone: its launcher exited without reporting" in message
    assert not alive(families)


def test_a_signal_to_one_launcher_saves_the_run_and_both_say_preempted(training: Start) -> None:
    one, other = training()
    families = [*one.family(), *other.family()]
    other.process.send_signal(signal.SIGUSR2)
    ends = (one.finish(), other.finish())
    assert [code for code, _ in ends] == [75, 75], ends
    newest = CheckpointStore(one.files.checkpoints).latest()
    assert newest is not None
    assert verify(newest.path)[1] == []
    assert newest.step == one.steps, "no step is lost"
    assert not alive(families)


def test_a_rank_that_is_stopped_is_named_by_both_launchers(training: Start) -> None:
    # Three times that for the start, beside whatever else the machine does.
    one, other = training("run.hang_timeout_s=20", steps=4)
    families = [*one.family(), *other.family()]
    os.kill(one.pid(1), signal.SIGSTOP)
    code, said = one.finish()
    other_code, other_said = other.finish()
    assert (code, other_code) == (71, 71), said + other_said
    result = one.result()
    assert result["rank"] == 1
    assert "rank 1 does not respond" in str(result["message"])
    assert "rank 1 does not respond" in other_said
    assert not alive(families)
