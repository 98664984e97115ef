"""Heartbeats: each rank writes signs of life to a small piece of shared memory, and the launcher reads them.
Neither side needs system calls.

The launcher creates a file for each rank in a local folder (in memory, if possible) and maps it. Each rank
maps its file and unlinks it at once, so that nothing is left behind if any process is killed later. Times are
read from the machine's monotonic clock, which all processes share. This module imports nothing slow, because
ranks write before their slow imports.
"""

import mmap
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from canzona_cli.errors import EnvironmentProblem, Problem
from canzona_cli.run.phases import IN_STEP

VARIABLE: Final = "CANZONA_HEARTBEATS"
"""The environment variable in which the launcher passes the folder of the heartbeat files to the workers."""
BEAT_S: Final = 0.5
"""The seconds between two beats of a rank's heartbeat thread."""
STACKS_SIGNAL: Final = signal.SIGQUIT
"""The signal that makes a worker write the Python stacks of all threads to its log. The worker continues."""
PATIENCE: Final = 3
"""The factor by which `run.hang_timeout_s` is multiplied during the first step and outside of steps."""
Stage = Literal["start workers", "build model", "build data", "load", "train", "validate", "save", "finish"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The stages that a rank goes through, as named in events.jsonl."""

# Each value is an 8-byte number, which is written atomically, so that the reader never sees a partial value.
_PID, _STEP, _STEPS, _STAGE, _PHASE, _WAITING, _PROGRESS, _BEAT, _ENDED = range(9)
_BYTES: Final = 8 * 9


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The last sign of life of a rank."""

    rank: int
    pid: int
    """The process id of the rank; 0 before its start."""
    step: int
    """The current step, counted from 1; 0 before training."""
    steps: int
    """The number of steps that this process has begun; fewer than `step` in a resumed run."""
    where: str
    """The stage and, within steps, the phase: `build data`, `train/forward`, `validate/other`."""
    waiting: bool
    """True while the rank waits for other ranks in a collective."""
    progress: float
    """The time of the training thread's last progress, in seconds of the monotonic clock."""
    beat: float
    """The time of the heartbeat thread's last beat, which shows that the process runs."""
    ended: bool


class Heart:
    """The rank's side of the heartbeat. A write takes a fraction of a microsecond. Without a launcher, the
    rank writes to private memory."""

    def __init__(self, rank: int) -> None:
        self._numbers = memoryview(_own_memory(rank)).cast("d")
        self._numbers[_PID] = os.getpid()
        self._beat()
        self.stage(STAGES[0])
        if VARIABLE in os.environ:
            threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()

    def stage(self, name: str) -> None:
        """Records that the rank enters a stage, one of `STAGES`."""
        self._numbers[_STAGE] = STAGES.index(name)
        self.phase("other")

    def step(self, step: int) -> None:
        """Records that the rank enters a step; steps are counted from 1."""
        self._numbers[_STEP] = step
        self._numbers[_STEPS] += 1
        self.progress()

    def phase(self, name: str) -> None:
        """Records that the rank enters a phase of a step."""
        self._numbers[_PHASE] = _PHASE_INDEX[name]
        self._numbers[_PROGRESS] = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a block in which the rank waits for other ranks."""
        self.mark_waiting(True)
        try:
            yield
        finally:
            self.mark_waiting(False)

    def mark_waiting(self, waiting: bool) -> None:
        """Marks the start (True) or the end (False) of a wait for other ranks."""
        self._numbers[_WAITING] = waiting
        self._numbers[_PROGRESS] = time.monotonic()

    def progress(self) -> None:
        """Records progress within a long operation."""
        self._numbers[_PROGRESS] = time.monotonic()

    def end(self) -> None:
        """Marks the rank as ended: its heartbeat thread stops, and the hang watch ignores the rank from now
        on."""
        self._numbers[_ENDED] = 1

    def _beat(self) -> None:
        self._numbers[_BEAT] = time.monotonic()

    def _keep_beating(self) -> None:
        while not self._numbers[_ENDED]:
            self._beat()
            time.sleep(BEAT_S)


_PHASE_INDEX: Final[Mapping[str, int]] = {name: index for index, name in enumerate(IN_STEP)}


class Heartbeats:
    """The launcher's side of the heartbeat: the shared memory of this machine's ranks."""

    def __init__(self, ranks: range, *, parents: Sequence[str | None] = ("/dev/shm", None)) -> None:
        """Creates the ranks' files in a new folder.

        Args:
            parents: parent folders to try, in this order; None is the folder for temporary files.

        Raises:
            EnvironmentProblem: none of the parent folders can be written.
        """
        self._ranks = ranks
        for parent in parents:
            if parent is None or os.path.isdir(parent):
                with suppress(OSError):  # full or not writable
                    self.folder = Path(tempfile.mkdtemp(prefix="canzona-", dir=parent))
                    try:
                        self._memory = {rank: _create(_file(self.folder, rank)) for rank in ranks}
                    except OSError:
                        self.close()
                        raise
                    return
        tried = " or ".join(parent or "the temporary folder" for parent in parents)
        reason = f"cannot write heartbeat files to {tried}"
        fix = "make room there, or set TMPDIR to a local folder; run.hang_timeout_s=null turns heartbeats off"
        raise EnvironmentProblem(Problem(key="run.hang_timeout_s", reason=reason, fix=fix))

    def signs(self) -> list[Sign]:
        """Returns the last sign of life of each rank, in rank order."""
        return [_sign(rank, self._memory[rank]) for rank in self._ranks]

    def close(self) -> None:
        """Removes the folder and the files of ranks that never started."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sign(rank: int, memory: mmap.mmap) -> Sign:
    with memoryview(memory) as data, data.cast("d") as numbers:
        values = numbers.tolist()
    stage = STAGES[int(values[_STAGE])]
    in_step = stage in ("train", "validate")
    return Sign(
        rank=rank,
        pid=int(values[_PID]),
        step=int(values[_STEP]),
        steps=int(values[_STEPS]),
        where=f"{stage}/{IN_STEP[int(values[_PHASE])]}" if in_step else stage,
        waiting=bool(values[_WAITING]),
        progress=values[_PROGRESS],
        beat=values[_BEAT],
        ended=bool(values[_ENDED]),
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def _create(path: Path) -> mmap.mmap:
    with path.open("xb+") as file:
        file.write(bytes(_BYTES))
        file.flush()
        return mmap.mmap(file.fileno(), _BYTES)


def _own_memory(rank: int) -> mmap.mmap | bytearray:
    """Maps the memory that this rank's launcher reads; without a launcher, returns private memory."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return bytearray(_BYTES)
    path = _file(Path(folder), rank)
    try:
        with path.open("rb+") as file:
            memory = mmap.mmap(file.fileno(), _BYTES)
        path.unlink()
    except OSError:  # the worker was started by hand with the environment of an earlier launch
        return bytearray(_BYTES)
    with suppress(OSError):  # the last rank removes the folder
        path.parent.rmdir()
    return memory
