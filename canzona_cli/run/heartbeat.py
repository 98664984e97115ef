"""Signs of life: one small piece of memory per rank that the rank writes and its launcher reads,
without a system call.

The launcher makes the files in a folder of this machine (memory-backed where there is such a place) and maps
them; each rank maps its own and unlinks it at once, so that nothing stays behind whoever is killed. Times are
the machine's monotonic clock, which all its processes share. Standard library only: ranks write before their
slow imports.
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
"""The folder, in the environment of the workers."""
BEAT_S: Final = 0.5
"""Seconds between two beats of a rank's own thread."""
STACKS_SIGNAL: Final = signal.SIGQUIT
"""Makes a worker write the Python stacks of all its threads to its log; it goes on."""
PATIENCE: Final = 3
"""Everything but a step after the first may take so many times `run.hang_timeout_s`."""
Stage = Literal["start workers", "build model", "build data", "load", "train", "validate", "save", "finish"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The stages that a rank goes through, in the words of its journal."""

# One 8-byte number each: written in one piece, so that the reader never sees half of one.
_PID, _STEP, _STEPS, _STAGE, _PHASE, _WAITING, _PROGRESS, _BEAT, _ENDED = range(9)
_BYTES: Final = 8 * 9


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The last sign of life of a rank."""

    rank: int
    pid: int
    """0 before it has started."""
    step: int
    """The step it is in, from 1; 0 before training."""
    steps: int
    """Steps this process has begun; fewer than `step` where the run was resumed."""
    where: str
    """`build data`, `train/forward`, `validate/other`."""
    waiting: bool
    """True while it waits for other ranks, in a collective."""
    progress: float
    """The time at which its training thread last went on, seconds of the monotonic clock."""
    beat: float
    """The time at which the process last ran at all."""
    ended: bool


class Heart:
    """A rank's side. Every write takes a fraction of a microsecond; without a launcher it goes nowhere."""

    def __init__(self, rank: int) -> None:
        self._numbers = memoryview(_own_memory(rank)).cast("d")
        self._numbers[_PID] = os.getpid()
        self._beat()
        self.stage(STAGES[0])
        if VARIABLE in os.environ:
            threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()

    def stage(self, name: str) -> None:
        """Enter one of `STAGES`."""
        self._numbers[_STAGE] = STAGES.index(name)
        self.phase("other")

    def step(self, number: int) -> None:
        """Enter a step, from 1."""
        self._numbers[_STEP] = number
        self._numbers[_STEPS] += 1
        self.progress()

    def phase(self, name: str) -> None:
        """Enter a phase of a step."""
        self._numbers[_PHASE] = _PHASE_NUMBER[name]
        self._numbers[_PROGRESS] = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a block that ends only when other ranks have come as far."""
        self.waits(True)
        try:
            yield
        finally:
            self.waits(False)

    def waits(self, now: bool) -> None:
        """Begin to wait for other ranks, or go on."""
        self._numbers[_WAITING] = now
        self._numbers[_PROGRESS] = time.monotonic()

    def progress(self) -> None:
        """Something long has come a step further."""
        self._numbers[_PROGRESS] = time.monotonic()

    def end(self) -> None:
        """Says that no further sign will come, so that nobody waits for one."""
        self._numbers[_ENDED] = 1

    def _beat(self) -> None:
        self._numbers[_BEAT] = time.monotonic()

    def _keep_beating(self) -> None:
        while not self._numbers[_ENDED]:
            self._beat()
            time.sleep(BEAT_S)


_PHASE_NUMBER: Final[Mapping[str, int]] = {name: number for number, name in enumerate(IN_STEP)}


class Heartbeats:
    """The launcher's side: the memory of the ranks of this machine."""

    def __init__(self, ranks: range, *, places: Sequence[str | None] = ("/dev/shm", None)) -> None:
        """
        Args:
            places: folders to try in turn; None is the one for temporary files.

        Raises:
            EnvironmentProblem: none of them can be written.
        """
        self._ranks = ranks
        for place in places:
            if place is None or os.path.isdir(place):
                with suppress(OSError):  # full, or not ours to write
                    self.folder = Path(tempfile.mkdtemp(prefix="canzona-", dir=place))
                    try:
                        self._memory = {rank: _create(_file(self.folder, rank)) for rank in ranks}
                    except OSError:
                        self.close()
                        raise
                    return
        tried = " and ".join(place or "the temporary folder" for place in places)
        reason = f"{tried} cannot be written, where the launcher looks for signs of life"
        fix = "make room there, or set TMPDIR to a folder of this machine; run.hang_timeout_s=null does without"
        raise EnvironmentProblem(Problem(key="run.hang_timeout_s", reason=reason, fix=fix))

    def signs(self) -> list[Sign]:
        """The last sign of each rank, in rank order."""
        return [_sign(rank, self._memory[rank]) for rank in self._ranks]

    def close(self) -> None:
        """Remove what ranks that never started left."""
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
    """Maps the memory that this rank's launcher reads;
    memory that nobody reads where there is no launcher."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return bytearray(_BYTES)
    path = _file(Path(folder), rank)
    try:
        with path.open("rb+") as file:
            memory = mmap.mmap(file.fileno(), _BYTES)
        path.unlink()
    except OSError:  # started again by hand, with the environment of an earlier start
        return bytearray(_BYTES)
    with suppress(OSError):  # the last rank removes the folder
        path.parent.rmdir()
    return memory
