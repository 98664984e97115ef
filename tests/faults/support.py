"""A two-rank run for the launcher's tests: its configuration, and starting it as a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import psutil

from canzona_cli.config.schema import DataConfig, RunConfig, RunSettings
from canzona_cli.core.setup import AdamWConfig, EngineConfig, ParallelConfig, TrainConfig
from canzona_cli.core.setup.cluster import Device
from canzona_cli.records.files import RunFiles, read_json
from tests.sizes import CPU, layout, model
from tests.waiting import PATIENCE_S, wait_until

REPOSITORY = Path(__file__).parents[2]

LAYOUT = layout(dp=2)


def run_config(*, run_dir: Path | None = None, root: Path = Path("runs"), gpus: int = 2, nodes: int = 1) -> RunConfig:
    """A resolved configuration; only the launcher's part of it matters here."""
    return RunConfig(
        name="tiny",
        gpus=gpus,
        model=model("tiny"),
        train=TrainConfig(steps=4, seq_length=32, batch_tokens=64, global_batch_size=2, micro_batch_size=1),
        optimizer=AdamWConfig(name="adamw", lr=1e-3),
        engine=EngineConfig(strategy="canzona"),
        cluster=replace(CPU, nodes=nodes),
        data=DataConfig(source="stdlib"),
        parallel=ParallelConfig(tp=1, pp=1),
        run=RunSettings(dir=None if run_dir is None else str(run_dir), root=str(root)),
    )


class Launched:
    """A launcher in a process of its own, and its run directory; at the end of a `with`, it is gone."""

    def __init__(self, run_dir: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.files = RunFiles(run_dir)
        path = (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, condition: Callable[[], object], what: str = "what the run should do") -> None:
        wait_until(condition, what, self.process)

    def family(self) -> list[psutil.Process]:
        """torchrun and its workers, at this moment."""
        family: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return family

    @property
    def steps(self) -> int:
        """Done so far."""
        return self.files.metrics.read_text().count("\n") if self.files.metrics.exists() else 0

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: self.steps >= count, f"{count} steps")

    def finish(self) -> tuple[int, str]:
        """The launcher's exit code and all it printed."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def result(self) -> dict[str, object]:
        record = read_json(self.files.result)
        assert record is not None, "no result.json"
        return record

    def record(self, rank: int) -> dict[str, object]:
        return read_json(self.files.rank(rank)) or {}

    def pid(self, rank: int) -> int:
        return int(str(self.record(rank)["pid"]))

    def log(self, rank: int) -> str:
        """The output of a worker on this machine."""
        log = self.files.worker_log(0, rank)
        assert log is not None
        return log.read_text()


class LaunchedRun(Launched):
    """`python -m tests.faults.launcher` on a run directory: supervisor, real torchrun, stand-in workers."""

    def __init__(
        self,
        run_dir: Path,
        behaviour: str,
        *,
        grace_s: float = 60.0,
        ranks: int = 2,
        hang_timeout_s: float = 0.0,
        device: Device = "cpu",
    ) -> None:
        values = (run_dir, behaviour, grace_s, ranks, hang_timeout_s, device)
        super().__init__(run_dir, "tests.faults.launcher", *map(str, values))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; a zombie waiting for its parent has."""
    deadline = time.monotonic() + PATIENCE_S / 2
    while True:
        rest = [p for p in processes if _runs(p)]
        if not rest or time.monotonic() > deadline:
            return rest
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
