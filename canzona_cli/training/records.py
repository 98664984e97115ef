"""What workers leave in the run directory: metrics, validation, events, per-rank results."""

import os
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from canzona_cli.errors import CanzonaError, ExitCode
from canzona_cli.launch.files import RunFiles, append_json_line, write_json_atomic
from canzona_cli.launch.heartbeat import Heart
from canzona_cli.training.requests import StopRequests

Ending = Literal["done", "interrupted", "preempted"]
"""How a rank's work ended where nothing went wrong."""
Status = Literal["running", "failed"] | Ending
Stage = Literal["start workers", "build model", "build data", "load", "train", "validate", "save", "finish"]
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
        self.requests: StopRequests | None = None
        """What this process was asked by signals; None where it does not listen to them."""
        self.checkpoint: str | None = None
        """Name of the checkpoint the run ended with; one that a stop caused has been read back."""

    def running(self) -> None:
        self._write("running", None, None)

    def ended(self, ending: Ending) -> None:
        codes = {"done": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "preempted": ExitCode.PREEMPTED}
        self._write(ending, codes[ending], None)

    def failed(self, error: BaseException) -> ExitCode:
        problems: list[dict[str, object]] = []
        if isinstance(error, CanzonaError):
            # Written for the user: where in our code it was raised would only bury what to do.
            code, origin = error.exit_code, ""
            problems = [
                {"key": p.key, "value": None if p.value is None else str(p.value), "reason": p.reason, "fix": p.fix}
                for p in error.problems
            ]
        else:
            code, origin = ExitCode.CRASH, "".join(traceback.format_exception(error))
        self._write(
            "failed",
            code,
            {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": origin,
                "problems": problems,
            },
        )
        return code

    def _write(self, status: Status, exit_code: ExitCode | None, error: dict[str, object] | None) -> None:
        if status != "running":
            self.heart.end()
        write_json_atomic(
            self._path,
            {
                "rank": self._rank,
                "pid": os.getpid(),
                "status": status,
                "exit_code": None if exit_code is None else int(exit_code),
                "step": self.step,
                "loss": self.loss,
                "checkpoint": self.checkpoint,
                "error": error,
                "time": time.time(),
            },
        )


class Journal:
    """The job's own files, written by one rank; on every other rank each call does nothing."""

    def __init__(self, files: RunFiles, *, writes: bool, tensorboard: bool = False, heart: Heart | None = None) -> None:
        self._files, self._writes, self._heart = files, writes, heart
        self._board = None
        if writes and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(files.root / "tensorboard"))

    def stage(self, stage: Stage, detail: str = "") -> None:
        if self._heart is not None:  # every rank's, whether it writes or not
            self._heart.stage(stage)
        if self._writes:
            event = {"time": time.time(), "event": "stage", "stage": stage, "detail": detail}
            append_json_line(self._files.events, event)

    def event(self, event: str, *, detail: str = "", level: Level | None = None, **facts: float | str) -> None:
        """A line of events.jsonl; with a level, its detail is shown to whoever watches the run."""
        if self._writes:
            shown = {} if level is None else {"level": level}
            append_json_line(
                self._files.events, {"time": time.time(), "event": event, **facts, "detail": detail, **shown}
            )

    def step(self, metrics: StepMetrics) -> None:
        if not self._writes:
            return
        append_json_line(self._files.metrics, {**vars(metrics), "time": time.time()})
        if self._board is not None:
            for key in ("loss", "lr", "grad_norm", "tokens_per_s"):
                if (value := getattr(metrics, key)) is not None:
                    self._board.add_scalar(f"train/{key}", value, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        if not self._writes:
            return
        append_json_line(self._files.validation, {"step": step, "loss": loss, "time": time.time()})
        if self._board is not None:
            self._board.add_scalar("validation/loss", loss, step)

    def breakdown(self, breakdown: dict[str, object]) -> None:
        if self._writes:
            write_json_atomic(self._files.breakdown, breakdown)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
