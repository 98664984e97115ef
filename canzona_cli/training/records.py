"""Writes the workers' files in the run directory: metrics, validations, events, and the results of ranks."""

import errno
import logging
import os
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from canzona_cli.config.secrets import redact, shown_value
from canzona_cli.core.errors import CanzonaError, Diverged, EnvironmentProblem, ExitCode, Problem
from canzona_cli.records.breakdown import MeasuredBreakdown
from canzona_cli.records.codec import record_dict, save
from canzona_cli.records.files import (
    RunFiles,
    append_json_line,
    try_append_json_line,
    write_json_atomic,
    write_json_or_overwrite,
)
from canzona_cli.records.protection import Stage, Watchdog
from canzona_cli.records.records import (
    CheckpointEvent,
    Ending,
    Incident,
    Level,
    RankError,
    RankResult,
    RankStatus,
    RunStatus,
    StageEvent,
    StepMetrics,
    ValidationLoss,
)

_NOT_A_RUN = (
    "a worker needs a run directory that `canzona train` has made; start the run with `canzona train`, which also runs "
    "this command"
)


class RankRecord:
    """The record of a rank's progress and ending, in the file ranks/rank-NNNNN.json. The file is written when
    the rank starts and when it ends."""

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._path = files.rank(rank)
        self._rank = rank
        self.watchdog = Watchdog()
        self.step = 0
        self.loss: float | None = None
        self.preempted = threading.Event()
        """An event that is set when a signal asks this process to save and stop
        (`process.listen_for_stops`)."""
        self.checkpoint: str | None = None
        """The name of the run's final checkpoint; None if there is none."""
        self.lost: Mapping[str, int] = {}
        """The number of lines that could not be written, by the name of their file."""

    def record_start(self) -> None:
        """Records that this rank has started.

        Raises:
            EnvironmentProblem: the file cannot be written.
        """
        try:
            self._write("running", None, None)
        except OSError as error:
            reason = f"rank {self._rank} cannot write {self._path}: {error.strerror}"
            fix = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else _NOT_A_RUN
            raise EnvironmentProblem(Problem(key="run.dir", reason=reason, fix=fix)) from None

    def record_end(self, ending: Ending) -> ExitCode:
        """Records how this rank ended.

        Returns:
            The exit code of the process. It is 0 for every ending, so that torchrun does not treat a stop as
            a failure. If the file cannot be written, it is the exit code that belongs to the ending.
        """
        codes = {"done": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "preempted": ExitCode.PREEMPTED}
        return ExitCode.OK if self._try_write(ending, codes[ending], None) else codes[ending]

    def record_failure(self, error: BaseException) -> ExitCode:
        """Records the error that ended this rank; returns the exit code of the process."""
        code = error.exit_code if isinstance(error, CanzonaError) else ExitCode.CRASH
        self._try_write("diverged" if isinstance(error, Diverged) else "failed", code, _describe(error))
        return code

    def _try_write(self, status: RunStatus, exit_code: ExitCode, error: RankError | None) -> bool:
        """Stops the watchdog and records how this rank ended. On a full disk the file is overwritten in
        place. Returns False if the file cannot be written."""
        self.watchdog.end()
        try:
            self._write(status, exit_code, error)
        except OSError as failure:
            logging.getLogger(__name__).warning("%s cannot be written: %s", self._path, failure.strerror)
            return False
        return True

    def _write(self, status: RankStatus, exit_code: ExitCode | None, error: RankError | None) -> None:
        result = RankResult(
            rank=self._rank,
            pid=os.getpid(),
            status=status,
            exit_code=exit_code,
            step=self.step,
            loss=self.loss,
            checkpoint=self.checkpoint,
            lost=dict(self.lost),
            error=error,
            time=time.time(),
        )
        write = write_json_atomic if status == "running" else write_json_or_overwrite
        write(self._path, record_dict(result))


def _describe(error: BaseException) -> RankError:
    """Returns the record of an error, in which the user's secrets are redacted."""
    name, message = type(error).__name__, redact(str(error))
    if not isinstance(error, CanzonaError):
        return RankError(type=name, message=message, traceback=redact("".join(traceback.format_exception(error))))
    # No traceback: these errors are written for the user, and a traceback would distract from the fix.
    problems = tuple(
        Problem(
            key=problem.key,
            value=None if problem.value is None else str(shown_value(problem.key, problem.value)),
            reason=redact(problem.reason),
            fix=redact(problem.fix),
        )
        for problem in error.problems
    )
    since = error.since if isinstance(error, Diverged) else None
    return RankError(type=name, message=message, problems=problems, since=since)


class Journal:
    """The writer of the files that a run has only once. One rank writes them; on other ranks, the methods
    write nothing.

    Args:
        writes: True on the rank that writes.
        watchdog: the watchdog, to which every rank reports its stages.
    """

    def __init__(self, files: RunFiles, *, writes: bool, watchdog: Watchdog | None = None) -> None:
        self._files, self._writes, self._watchdog = files, writes, watchdog
        self.lost: dict[str, int] = {}
        """The number of lines that could not be written, by the name of their file; empty in a healthy
        run."""
        self._down: dict[str, int] = {}
        """The number of lines lost since the last successful write, by the name of a file that currently
        cannot be written."""

    def stage(self, stage: Stage, detail: str = "") -> None:
        """Reports the start of a stage to the watchdog and in events.jsonl."""
        if self._watchdog is not None:  # every rank reports its stage, even if it writes no events
            self._watchdog.stage(stage)
        self._append(self._files.events, record_dict(StageEvent(time=time.time(), stage=stage, detail=detail)))

    def incident(self, event: str, *, detail: str = "", level: Level | None = None, **facts: float | str) -> None:
        """Adds an event to events.jsonl. If `level` is given, `detail` is also shown to users who follow the
        run."""
        incident = Incident(time=time.time(), event=event, detail=detail, level=level, facts=facts)
        self._append(self._files.events, incident.line())

    def checkpoint(self, event: CheckpointEvent) -> None:
        """Records a checkpoint that has been written to disk."""
        self._append(self._files.events, record_dict(replace(event, time=time.time())))

    def step(self, metrics: StepMetrics) -> None:
        """Adds a step to metrics.jsonl."""
        self._append(self._files.metrics, record_dict(replace(metrics, time=time.time())))

    def validation(self, step: int, loss: float, sets: Mapping[str, float | None] | None = None) -> None:
        """Adds a validation to validation.jsonl. Losses, also those by data set, are in nats per token."""
        record = ValidationLoss(step=step, loss=loss, sets=sets or {}, time=time.time())
        self._append(self._files.validation, record_dict(record))

    def breakdown(self, breakdown: MeasuredBreakdown) -> None:
        """Writes the run's breakdown."""
        if self._writes:
            try:
                save(self._files.breakdown, breakdown)
            except OSError as error:
                self._warn(f"{self._files.breakdown.name} cannot be written ({error.strerror})")

    def _append(self, path: Path, line: Mapping[str, object]) -> None:
        """Adds a line to a file. If that fails, counts the lost line. Warns when lines begin to be lost, and when
        the file can be written again."""
        if not self._writes:
            return
        name = path.name
        try:
            append_json_line(path, line)
        except OSError as error:
            self.lost[name] = self.lost.get(name, 0) + 1
            self._down[name] = self._down.get(name, 0) + 1
            if self._down[name] == 1:
                reason = error.strerror or error
                self._warn(f"{name} cannot be written ({reason}); training continues without writing to it")
        else:
            if lost_lines := self._down.pop(name, 0):
                self._warn(f"{name} can be written again; {lost_lines} lines were lost")

    def _warn(self, text: str) -> None:
        """Logs a warning on this rank, and adds it to events.jsonl if that can be written."""
        logging.getLogger(__name__).warning(text)
        incident = Incident(time=time.time(), event="writer", detail=text, level="warning")
        try_append_json_line(self._files.events, incident.line())
