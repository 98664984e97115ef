"""What workers leave in the run directory: metrics, validation, events, per-rank results."""

import logging
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.secrets import redacted, shown_value
from canzona_cli.errors import CanzonaError, EnvironmentProblem, ExitCode, Problem
from canzona_cli.run.breakdown import MeasuredBreakdown
from canzona_cli.run.codec import save
from canzona_cli.run.files import RunFiles, try_append_json_line, write_json_atomic, write_json_or_overwrite
from canzona_cli.run.heartbeat import Heart
from canzona_cli.run.heartbeat import Stage as Stage
from canzona_cli.training.requests import StopRequests
from canzona_cli.training.writers import Board, Lines

Ending = Literal["done", "interrupted", "preempted"]
"""How a rank's work ended where nothing went wrong."""
Status = Literal["running", "failed"] | Ending
Level = Literal["info", "warning"]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    """Mean over the global batch, nats per token."""
    lr: float
    grad_norm: float | None
    """Before clipping; None where it is not finite."""
    tokens_per_s: float
    """Of the whole job."""
    step_s: float
    tokens: int
    """Trained on so far."""
    skipped: int = 0
    """Steps so far that changed nothing because their gradients were not finite."""
    fallbacks: int = 0
    """Matrix updates so far that were replaced by what their optimizer does when it fails."""


class RankRecord:
    """ranks/rank-NNNNN.json: how far this rank got and how it ended. Written at the start and at the end."""

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._path = files.rank(rank)
        self._rank = rank
        self.heart = Heart(rank)
        self.step = 0
        self.loss: float | None = None
        self.requests = StopRequests()
        """What this process was asked by signals; nothing where it does not listen to them."""
        self.checkpoint: str | None = None
        """Name of the checkpoint the run ended with; one that a stop caused has been read back."""
        self.lost: Mapping[str, int] = {}
        """Lines of the run's files that could not be written, by file."""

    def running(self) -> None:
        """Say that this rank has started.

        Raises:
            EnvironmentProblem: it cannot be written.
        """
        try:
            self._write("running", None, None)
        except OSError as error:
            reason = f"rank {self._rank} cannot write {self._path}: {error.strerror}"
            raise EnvironmentProblem(Problem(key="run.dir", reason=reason, fix="free some space")) from None

    def ended(self, ending: Ending) -> ExitCode:
        """Say how this rank ended.

        Returns:
            What the process exits with. torchrun is not to take a stop for a failure: a code other than 0 only tells
            what no file could.
        """
        codes = {"done": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "preempted": ExitCode.PREEMPTED}
        return ExitCode.OK if self._try_write(ending, codes[ending], None) else codes[ending]

    def failed(self, error: BaseException) -> ExitCode:
        problems: list[dict[str, object]] = []
        if isinstance(error, CanzonaError):
            # Written for the user: where in our code it was raised would only bury what to do.
            code, origin = error.exit_code, ""
            problems = [
                {
                    "key": p.key,
                    "value": None if p.value is None else str(shown_value(p.key, p.value)),
                    "reason": redacted(p.reason),
                    "fix": redacted(p.fix),
                }
                for p in error.problems
            ]
        else:
            code, origin = ExitCode.CRASH, "".join(traceback.format_exception(error))
        self._try_write(
            "failed",
            code,
            {
                "type": type(error).__name__,
                "message": redacted(str(error)),
                "traceback": redacted(origin),
                "problems": problems,
            },
        )
        return code

    def _try_write(self, status: Status, exit_code: ExitCode, error: dict[str, object] | None) -> bool:
        """Write how this rank ended; on a full disk over what it wrote when it started. Whether it could."""
        self.heart.end()
        try:
            self._write(status, exit_code, error)
        except OSError as failure:
            logging.getLogger(__name__).warning("%s cannot be written: %s", self._path, failure.strerror)
            return False
        return True

    def _write(self, status: Status, exit_code: ExitCode | None, error: dict[str, object] | None) -> None:
        value = {
            "rank": self._rank,
            "pid": os.getpid(),
            "status": status,
            "exit_code": None if exit_code is None else int(exit_code),
            "step": self.step,
            "loss": self.loss,
            "checkpoint": self.checkpoint,
            "lost": dict(self.lost),
            "error": error,
            "time": time.time(),
        }
        write = write_json_atomic if status == "running" else write_json_or_overwrite
        write(self._path, value)


class Journal:
    """The job's own files, written by one rank; on every other rank each call does nothing."""

    def __init__(self, files: RunFiles, *, writes: bool, tensorboard: bool = False, heart: Heart | None = None) -> None:
        self._files, self._writes, self._heart = files, writes, heart
        self._lines = Lines(self._warn)
        self._board = Board(files.root / "tensorboard", self._warn) if writes and tensorboard else None

    @property
    def lost(self) -> Mapping[str, int]:
        """Lines that could not be written, by the name of their file; empty in a healthy run."""
        return self._lines.lost

    def stage(self, stage: Stage, detail: str = "") -> None:
        if self._heart is not None:  # every rank's, whether it writes or not
            self._heart.stage(stage)
        if self._writes:
            event = {"time": time.time(), "event": "stage", "stage": stage, "detail": detail}
            self._lines.append(self._files.events, event)

    def event(self, event: str, *, detail: str = "", level: Level | None = None, **facts: float | str) -> None:
        """A line of events.jsonl; with a level, its detail is shown to whoever watches the run."""
        if self._writes:
            shown = {} if level is None else {"level": level}
            self._lines.append(
                self._files.events, {"time": time.time(), "event": event, **facts, "detail": detail, **shown}
            )

    def step(self, metrics: StepMetrics) -> None:
        if not self._writes:
            return
        self._lines.append(self._files.metrics, {**vars(metrics), "time": time.time()})
        if self._board is not None:
            values = {key: getattr(metrics, key) for key in ("loss", "lr", "grad_norm", "tokens_per_s")}
            shown = {f"train/{key}": value for key, value in values.items() if value is not None}
            self._board.add(shown, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        if not self._writes:
            return
        self._lines.append(self._files.validation, {"step": step, "loss": loss, "time": time.time()})
        if self._board is not None:
            self._board.add({"validation/loss": loss}, step)

    def breakdown(self, breakdown: MeasuredBreakdown) -> None:
        if not self._writes:
            return
        try:
            save(self._files.breakdown, breakdown)
        except OSError as error:
            self._warn(f"{self._files.breakdown.name} cannot be written ({error.strerror})")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _warn(self, said: str) -> None:
        """Say it in this rank's log, and to whoever watches the run if events can be written at all."""
        logging.getLogger(__name__).warning(said)
        event = {"time": time.time(), "event": "writer", "detail": said, "level": "warning"}
        try_append_json_line(self._files.events, event)
