"""Saves a run while it trains: when, in which thread, and what a failure means.

A save has two parts. The training thread copies what is to be kept into host memory, on all ranks together.
Then each rank writes its copy in a thread of its own, and rank 0's makes a checkpoint of all of them: these
threads meet through files (`canzona_cli.checkpoint.commit`), never through collectives, which belong to
training.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

import torch

from canzona_cli.checkpoint.commit import abandon, begin, bytes_written, finish, write_part
from canzona_cli.checkpoint.manifest import Header, Progress, Shard, partial_path, step_name
from canzona_cli.checkpoint.snapshot import Snapshots
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.errors import Problem, SaveFailed
from canzona_cli.megatron.model import Trainee
from canzona_cli.megatron.parallel import gather
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import CheckpointEvent
from canzona_cli.training.records import Journal

_PATIENCE_S: Final = 600.0
"""Seconds that rank 0 waits for the others' parts while none of them grows."""
_LOOK_S: Final = 5.0


@dataclass(kw_only=True)
class _Save:
    """One checkpoint on its way to the disk, on one rank."""

    step: int
    thread: threading.Thread | None = None
    failure: SaveFailed | None = None
    """The failure that stopped it, whichever rank it was; on rank 0."""
    said: bool = False
    """True once it was reported that the next save is due and waits for this one."""


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One rank's reason why it could not save, as it sends it to the others."""

    reason: str | None


class Saver:
    """Saves one run. All ranks call the same methods in the same order.

    Args:
        texts: files of the run to keep beside the tensors, by name.
        last: the newest checkpoint's name so far, for messages; None when there is none.
        alive: called now and then while training waits for a save that goes on.
        clock: seconds; rank 0's decides.
    """

    def __init__(
        self,
        trainee: Trainee,
        files: RunFiles,
        journal: Journal,
        *,
        texts: Mapping[str, str],
        last: str | None = None,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainee, self._files, self._journal = trainee, files, journal
        self._texts, self._clock, self._alive, self._last = texts, clock, alive, last
        self._snapshots = Snapshots(trainee)
        self._running: _Save | None = None
        self._saved_at = clock()

    def due(self, step: int) -> bool:
        """Returns True to save after this step, by steps or by time; rank 0 decides.

        While the previous save is still being written, one that is due by time waits for the first step after
        it, and an event says so: a slow disk then costs checkpoints, not training time. Saves due by steps
        are never put off, because `keep_every` counts on those very steps: training waits instead. Nor is the
        last one.
        """
        settings = self._trainee.config.checkpoint
        if settings.every_steps is not None and step % settings.every_steps == 0:
            return True
        minutes = settings.every_minutes
        if minutes is None or self._clock() - self._saved_at < 60 * minutes:
            return False
        running = self._being_written()
        if running is None or step == self._trainee.config.train.steps:
            return True
        if not running.said:
            running.said = True
            detail = f"the checkpoint due after step {step:,} waits until that of step {running.step:,} is on the disk"
            self._journal.incident("save_waits", step=step, detail=detail, level="info")
        return False

    def save(self, progress: Progress) -> None:
        """Save while training goes on. Collective.

        Waits for the save before, and says so, if that is not on the disk yet: its memory is used again. What
        fails is said, and ends nothing: the checkpoints before stay, and the next save tries again.
        """
        self._start(progress)
        if not self._trainee.config.checkpoint.asynchronous:
            self.settle()

    def save_now(self, progress: Progress) -> str:
        """Save because the run ends here: written and complete when this returns. Collective.

        Returns:
            The checkpoint's name.

        Raises:
            SaveFailed: on every rank together; names the last checkpoint there is.
        """
        self._start(progress)
        return self.wait(progress)

    def wait(self, progress: Progress) -> str:
        """Wait for the save of `progress`, which was begun before. Collective.

        Returns:
            The checkpoint's name.

        Raises:
            SaveFailed: as `save_now`.
        """
        failure = self.settle()
        failed = _Failure(reason=None if failure is None else f"{failure.problems[0].reason}; {self._kept()}")
        agreed = gather(failed)[0].reason  # rank 0's, which completes checkpoints
        if agreed is not None:
            raise SaveFailed(
                Problem(
                    key="checkpoint",
                    value=step_name(progress.step),
                    reason=f"the run ended at step {progress.step:,} without being saved: {agreed}",
                    fix="make sure that checkpoints can be written, and start the run again",
                )
            )
        return step_name(progress.step)

    def _start(self, progress: Progress) -> None:
        begun = self._clock()
        running = self._being_written()
        if running is not None:
            detail = f"training waits after step {progress.step:,} until step {running.step:,} is on the disk"
            self._journal.incident("save_waits", step=progress.step, detail=detail, level="info")
        self.settle()
        self._saved_at = self._clock()
        save = self._running = _Save(step=progress.step)
        if not self._begin(save):
            return
        shard, config = self._snapshots.take(), self._trainee.config
        header = Header(
            progress=progress,
            optimizer=config.optimizer.name,
            strategy=config.engine.strategy,
            splitting=config.engine.splitting,
            world_size=self._trainee.world.world_size,
            created=time.time(),
            canzona=version("canzona"),
        )
        write = partial(self._write, save, shard, header, stall_s=self._clock() - begun)
        save.thread = threading.Thread(target=write, name=f"save-{progress.step}", daemon=True)
        save.thread.start()

    def _begin(self, save: _Save) -> bool:
        """Makes the folder, on rank 0; returns True if all ranks can write into it. Collective."""
        world = self._trainee.world
        if world.rank == 0:
            try:
                begin(self._files.checkpoints, save.step)
            except SaveFailed as error:
                self._failed(save, error)
        ready = torch.full((1,), float(save.failure is None), device=world.device)
        torch.distributed.broadcast(ready, src=0)
        return any(self._trainee.timer.read(ready))

    def _write(self, save: _Save, shard: Shard, header: Header, *, stall_s: float) -> None:
        """Writes on a thread of its own."""
        begun, world = self._clock(), self._trainee.world
        folder = partial_path(self._files.checkpoints, save.step)
        try:
            write_part(folder, world.rank, shard)
            if world.rank != 0:
                return
            path = finish(folder, world.world_size, header, self._texts, _PATIENCE_S)
        except BaseException as error:  # nothing of a save may end the run by itself
            if world.rank == 0:
                abandon(folder)
            if world.rank == 0 or not isinstance(error, SaveFailed):  # else rank 0 finds it in this rank's part
                self._failed(save, error)
            return
        self._last = path.name
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds, place = self._clock() - begun, str(path.relative_to(self._files.root))
        self._journal.checkpoint(
            CheckpointEvent(step=save.step, seconds=seconds, stall_s=stall_s, bytes=size, path=place)
        )
        self._retain()

    def _being_written(self) -> _Save | None:
        save = self._running
        return save if save is not None and save.thread is not None and save.thread.is_alive() else None

    def _failed(self, save: _Save, error: BaseException) -> None:
        """Reports at once that a checkpoint is missing; on rank 0, which knows of every rank's part."""
        if not isinstance(error, SaveFailed):
            error = SaveFailed(Problem(key="checkpoint", reason=f"{type(error).__name__}: {error}"))
        save.failure = error
        detail = f"step {save.step:,} was not saved: {error.problems[0].reason}; {self._kept()}"
        self._journal.incident("save_failed", step=save.step, detail=detail, level="warning")

    def _retain(self) -> None:
        settings = self._trainee.config.checkpoint
        try:
            CheckpointStore(self._files.checkpoints).retain(settings.keep, settings.keep_every)
        except OSError as error:
            detail = f"old checkpoints could not be removed: {error.strerror or error}"
            self._journal.incident("retention", detail=detail, level="warning")

    def settle(self) -> SaveFailed | None:
        """Wait until this rank's part of the running save is over; on rank 0, until all of it is.

        Returns:
            What stopped it, on rank 0; the same however often it is asked, until the next save begins.
        """
        save = self._running
        if save is None or save.thread is None:
            return None if save is None else save.failure
        written = 0
        while save.thread.is_alive():
            save.thread.join(_LOOK_S)
            before, written = written, bytes_written(partial_path(self._files.checkpoints, save.step))
            if written != before:  # a slow disk is no hang
                self._alive()
        return save.failure

    def _kept(self) -> str:
        return f"the last checkpoint is {self._last}" if self._last else "there is no checkpoint yet"
