"""One job of two launchers, each with a torchrun of its own, on loopback: they train together, and end together with
the same code and the same culprit."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.run.files import RunFiles, read_json
from tests.dist.ranks import free_port
from tests.faults.support import REPOSITORY, alive
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sweep  # two launches of real workers each, and tests/slurm has launches on two nodes
SMALL = (
    *("recipe=qwen3-tiny", "cluster.nodes=2", "parallel.pp=1", "model.num_layers=2", "train.seq_length=32"),
    *("train.eval_interval=0", "checkpoint.at_end=false", "checkpoint.every_minutes=null"),
)


class TwoNodes:
    """`canzona train` twice, as on two machines that share a directory."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        self.files = RunFiles(run_dir)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        common = (*SMALL, *overrides, f"run.dir={run_dir}", f"cluster.rdzv_endpoint=127.0.0.1:{free_port()}")
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-m", "canzona_cli.app", "train", *common, f"cluster.node_rank={node}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]

    def wait_for_steps(self, count: int) -> None:
        def enough() -> bool:
            return self.files.metrics.exists() and self.files.metrics.read_text().count("\n") >= count

        wait_until(enough, f"{count} steps", *self.launchers)

    def family(self, node: int) -> list[psutil.Process]:
        """A launcher's torchrun and workers."""
        family: list[psutil.Process] = psutil.Process(self.launchers[node].pid).children(recursive=True)
        return family

    def finish(self) -> list[tuple[int, str]]:
        """Exit code and output of each launcher."""
        outputs = [launcher.communicate(timeout=PATIENCE_S)[0] for launcher in self.launchers]
        return [(launcher.returncode, output) for launcher, output in zip(self.launchers, outputs, strict=True)]

    def end(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Callable[..., TwoNodes]]:
    started: list[TwoNodes] = []

    def start(*overrides: str) -> TwoNodes:
        started.append(TwoNodes(tmp_path / "run", *overrides))
        return started[0]

    yield start
    for run in started:
        run.end()
        for launcher in run.launchers:
            launcher.wait()


@pytest.mark.parametrize("victim", ["torchrun", "launcher"])
def test_when_one_machine_loses_its_processes_both_launchers_name_it_and_nothing_is_left(
    two_nodes: Callable[..., TwoNodes], victim: str
) -> None:
    run = two_nodes("gpus=2", "parallel.tp=1", "train.steps=100000", "train.global_batch_size=2")
    run.wait_for_steps(2)
    families = [run.family(node) for node in range(2)]
    if victim == "torchrun":
        next(p for p in families[1] if p.ppid() == run.launchers[1].pid).kill()
    else:
        run.launchers[1].send_signal(signal.SIGKILL)
    (code, said), (other_code, other_said) = run.finish()
    assert code == 70, said
    culprit = "machine 1: torchrun was killed by signal 9" if victim == "torchrun" else "machine 1 ("
    result = read_json(run.files.result)
    assert result is not None
    assert str(result["message"]).startswith(culprit), result
    if victim == "torchrun":
        assert other_code == 70
        assert culprit in other_said
    else:
        assert "is gone: its launcher exited without reporting" in str(result["message"])
    assert not alive([*families[0], *families[1]])


def test_a_signal_to_one_launcher_saves_the_run_and_both_say_preempted(two_nodes: Callable[..., TwoNodes]) -> None:
    run = two_nodes("gpus=2", "parallel.tp=1", "train.steps=100000", "train.global_batch_size=2")
    run.wait_for_steps(2)
    families = [run.family(node) for node in range(2)]
    run.launchers[1].send_signal(signal.SIGUSR2)
    ends = run.finish()
    assert [code for code, _ in ends] == [75, 75], ends
    newest = CheckpointStore(run.files.checkpoints).latest()
    assert newest is not None
    assert verify(newest.path)[1] == []
    assert newest.step == run.files.metrics.read_text().count("\n"), "no step is lost"
    assert not alive([*families[0], *families[1]])


def test_a_rank_that_is_stopped_is_named_by_both_launchers(two_nodes: Callable[..., TwoNodes]) -> None:
    hang = "run.hang_timeout_s=20"  # three times that for the start, beside whatever else the machine does
    run = two_nodes("gpus=2", "parallel.tp=1", "train.steps=100000", "train.global_batch_size=2", hang)
    run.wait_for_steps(4)
    families = [run.family(node) for node in range(2)]
    pid = (read_json(run.files.rank(1)) or {})["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGSTOP)
    (code, said), (other_code, other_said) = run.finish()
    assert (code, other_code) == (71, 71), said + other_said
    result = read_json(run.files.result)
    assert result is not None
    assert result["rank"] == 1
    assert "rank 1 is stopped (SIGSTOP" in str(result["message"])
    assert "rank 1 is stopped" in other_said
    assert not alive([*families[0], *families[1]])
