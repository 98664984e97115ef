"""What workers leave in the run directory: metrics, validation, events, per-rank results."""

import os
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from canzona_cli.errors import CanzonaError, ExitCode
from canzona_cli.launch.files import RunFiles, append_json_line, write_json_atomic

Status = Literal["running", "done", "failed", "interrupted"]
Stage = Literal["start workers", "build model", "build data", "train", "validate", "finish"]


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
        self.step = 0
        self.loss: float | None = None

    def running(self) -> None:
        self._write("running", None, None)

    def done(self) -> None:
        self._write("done", ExitCode.OK, None)

    def interrupted(self) -> None:
        self._write("interrupted", ExitCode.INTERRUPTED, None)

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
        write_json_atomic(
            self._path,
            {
                "rank": self._rank,
                "pid": os.getpid(),
                "status": status,
                "exit_code": None if exit_code is None else int(exit_code),
                "step": self.step,
                "loss": self.loss,
                "error": error,
                "time": time.time(),
            },
        )


class Journal:
    """The job's own files, written by one rank; on every other rank each call does nothing."""

    def __init__(self, files: RunFiles, *, writes: bool, tensorboard: bool = False) -> None:
        self._files, self._writes = files, writes
        self._board = None
        if writes and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(files.root / "tensorboard"))

    def stage(self, stage: Stage, detail: str = "") -> None:
        if self._writes:
            event = {"time": time.time(), "event": "stage", "stage": stage, "detail": detail}
            append_json_line(self._files.events, event)

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
