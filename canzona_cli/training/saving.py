"""Saves checkpoints of a run while training continues.

A save has two parts. First the training threads of all ranks copy the state to host memory. Then a separate
thread on each rank writes the copy, and rank 0's thread completes the checkpoint. These threads synchronise
through files (`canzona_cli.checkpoint.commit`), never through collectives, which only training may use.
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
from canzona_cli.config.schema import CheckpointConfig
from canzona_cli.core.errors import Problem, SaveFailed
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import CheckpointEvent
from canzona_cli.training.records import Journal

_PATIENCE_S: Final = 600.0
"""The time, in seconds, for which rank 0 waits for the other ranks' parts while no file grows."""
_CHECK_S: Final = 5.0
"""The seconds between two looks of a waiting rank at the files of a save."""


@dataclass(kw_only=True)
class _Save:
    """One save of a checkpoint, as seen by one rank."""

    step: int
    thread: threading.Thread | None = None
    failure: SaveFailed | None = None
    """The error that stopped the save; None if there is none so far. On rank 0 this may be the error of any
    rank; on other ranks it is only an unexpected error of that rank."""
    reported: bool = False
    """True if an event has already reported that the next save waits for this save."""


class Saver:
    """The writer of a run's checkpoints. All ranks must call its collective methods in the same order.

    Args:
        texts: The contents of files of the run that are stored in each checkpoint, by file name.
        last_checkpoint: The name of the newest checkpoint so far, for messages; None if there is none.
        alive: Called repeatedly while training waits for a save that makes progress.
        clock: A function that returns a time in seconds; rank 0's clock determines when a save is due.
    """

    def __init__(
        self,
        trainee: Trainee,
        settings: CheckpointConfig,
        files: RunFiles,
        journal: Journal,
        *,
        texts: Mapping[str, str],
        last_checkpoint: str | None = None,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainee, self._settings, self._files, self._journal = trainee, settings, files, journal
        self._texts, self._clock, self._alive = texts, clock, alive
        self._newest = last_checkpoint
        self._snapshots = Snapshots(trainee)
        self._last_save: _Save | None = None
        """The newest save, which may be complete; None before the first save."""
        self._saved_at = clock()

    def is_due(self, step: int) -> bool:
        """Returns True if a checkpoint is due after this step, by steps or by time. Called only on rank 0.

        While the previous save is still being written, a save that is due by time is postponed, and an event
        reports this: a slow disk then costs checkpoints rather than training time. A save that is due by
        steps is never postponed, because `keep_every` relies on checkpoints of these steps, and neither is
        the save after the last step. For these, training waits until the previous save is written.
        """
        settings = self._settings
        if settings.every_steps is not None and step % settings.every_steps == 0:
            return True
        minutes = settings.every_minutes
        if minutes is None or self._clock() - self._saved_at < 60 * minutes:
            return False
        running = self._unfinished_save()
        if running is None or step == self._trainee.setup.train.steps:
            return True
        if not running.reported:
            running.reported = True
            detail = f"the checkpoint due after step {step:,} waits until that of step {running.step:,} is written"
            self._journal.incident("save_waits", step=step, detail=detail, level="info")
        return False

    def save(self, progress: Progress) -> None:
        """Starts a save that is written while training continues. Collective.

        If the previous save is still being written, training waits for it, because its memory is reused; an
        event reports the wait. A failure is reported and does not end the run: earlier checkpoints remain,
        and the next save tries again. With checkpoint.asynchronous=false, waits until this save is written.
        """
        self._start(progress)
        if not self._settings.asynchronous:
            self.wait_until_written()

    def wait(self, progress: Progress) -> str:
        """Waits until the save of `progress`, which must have been started, is complete. Collective.

        Returns:
            The checkpoint's name.

        Raises:
            SaveFailed: on every rank together; the message names the last checkpoint.
        """
        failure = self.wait_until_written()
        reason = "" if failure is None else f"{failure.problems[0].reason}; {self._last_checkpoint()}"
        agreed = gather(reason, str)[0]  # rank 0 completes checkpoints, so its result decides
        if agreed:
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
        """Copies the state, after the previous save is written, and starts the thread that writes the copy.
        Collective."""
        begun = self._clock()
        running = self._unfinished_save()
        if running is not None:
            detail = f"training waits after step {progress.step:,} until the save of step {running.step:,} is written"
            self._journal.incident("save_waits", step=progress.step, detail=detail, level="info")
        self.wait_until_written()
        self._saved_at = self._clock()
        save = self._last_save = _Save(step=progress.step)
        if not self._begin(save):
            return
        shard = self._snapshots.take()
        config = self._trainee.setup
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
        """Creates the checkpoint's hidden folder on rank 0. Returns True, on every rank, if that succeeded.
        Collective."""
        world = self._trainee.world
        if world.rank == 0:
            try:
                begin(self._files.checkpoints, save.step)
            except SaveFailed as error:
                self._record_failure(save, error)
        ready = torch.full((1,), float(save.failure is None), device=world.device)
        torch.distributed.broadcast(ready, src=0)
        return any(self._trainee.timer.read(ready))

    def _write(self, save: _Save, shard: Shard, header: Header, *, stall_s: float) -> None:
        """Writes this rank's share. Rank 0 then completes the checkpoint and removes old checkpoints. Runs in
        the save's thread.

        Args:
            stall_s: The seconds for which the save stopped training, which the event reports.
        """
        begun = self._clock()
        world = self._trainee.world
        folder = partial_path(self._files.checkpoints, save.step)
        try:
            write_part(folder, world.rank, shard)
            if world.rank != 0:
                return
            path = finish(folder, world.world_size, header, self._texts, _PATIENCE_S)
        except BaseException as error:  # a failed save must not end the run
            if world.rank == 0:
                abandon(folder)
            # Rank 0 learns of another rank's SaveFailed from that rank's part file.
            if world.rank == 0 or not isinstance(error, SaveFailed):
                self._record_failure(save, error)
            return
        self._newest = path.name
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = self._clock() - begun
        place = str(path.relative_to(self._files.root))
        self._journal.checkpoint(
            CheckpointEvent(step=save.step, seconds=seconds, stall_s=stall_s, bytes=size, path=place)
        )
        self._retain()

    def _unfinished_save(self) -> _Save | None:
        """Returns the save that this rank is still writing; None if there is none."""
        save = self._last_save
        return save if save is not None and save.thread is not None and save.thread.is_alive() else None

    def _record_failure(self, save: _Save, error: BaseException) -> None:
        """Stores the error of a failed save, and reports it in an event, which only rank 0 writes."""
        if not isinstance(error, SaveFailed):
            error = SaveFailed(Problem(key="checkpoint", reason=f"{type(error).__name__}: {error}"))
        save.failure = error
        detail = f"step {save.step:,} was not saved: {error.problems[0].reason}; {self._last_checkpoint()}"
        self._journal.incident("save_failed", step=save.step, detail=detail, level="warning")

    def _retain(self) -> None:
        settings = self._settings
        try:
            CheckpointStore(self._files.checkpoints).retain(settings.keep, settings.keep_every)
        except OSError as error:
            detail = f"old checkpoints could not be removed: {error.strerror or error}"
            self._journal.incident("retention", detail=detail, level="warning")

    def wait_until_written(self) -> SaveFailed | None:
        """Waits until this rank has written its share of the last save; rank 0 waits until the checkpoint is
        complete.

        Returns:
            The error that stopped the save; None if it did not fail. Further calls return the same error
            until the next save starts. Only rank 0 gets the errors of all ranks.
        """
        save = self._last_save
        if save is None or save.thread is None:
            return None if save is None else save.failure
        written = 0
        while save.thread.is_alive():
            save.thread.join(_CHECK_S)
            before, written = written, bytes_written(partial_path(self._files.checkpoints, save.step))
            if written != before:  # the save makes progress, so this rank does not hang
                self._alive()
        return save.failure

    def _last_checkpoint(self) -> str:
        """Returns a clause, for messages, that names the last checkpoint."""
        return f"the last checkpoint is {self._newest}" if self._newest else "there is no checkpoint yet"
