"""Sends a run's records to one tracker, as a separate process: `python -m canzona_cli.training.trackers RUN
NAME STEP`.

The launcher starts the process next to torchrun, and closes its standard input when the run has ended. The
process reads the run's files, so ranks never wait for a tracker, however slow it is. If a tracker fails, the
process tries again, with increasing pauses. The run directory stores the ID that the tracker gave the run,
and the last step that was sent, so that the next launch continues the same curves.

TensorBoard, Weights & Biases and MLflow have the same interface here, and receive the names and steps of
metrics.jsonl. Destination and credentials come from each tracker's environment variables (`WANDB_API_KEY`,
`MLFLOW_TRACKING_URI`, ...). Without `MLFLOW_TRACKING_URI`, MLflow writes a database in the run directory.
Only the package of the tracker in use is imported.
"""

import math
import os
import select
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import batched, islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import TrackerName
from canzona_cli.config.secrets import redact
from canzona_cli.config.settings import leaves
from canzona_cli.records.codec import JsonLines, load_if_valid, save
from canzona_cli.records.files import RunFiles, try_append_json_line
from canzona_cli.records.records import Incident, Level, RunResult, RunStatus, TrackerState
from canzona_cli.records.words import clean, plural

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_INTERVAL_S = 1.0
_MOST_POINTS = 50
"""The largest number of points that are sent at once. MLflow accepts a thousand values at a time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""The first and the longest pause after a failure of a tracker, in seconds. Each further failure doubles the
pause."""
_PROJECT = "canzona"
"""The name of the project in Weights & Biases, and of the experiment in MLflow, unless the environment names
another."""
_MOST_PARAMETERS = 100
"""The largest number of parameters that MLflow accepts at once."""
_LONGEST_PARAMETER = 500
"""The number of characters to which a parameter's value is cut, because older MLflow servers accept no more."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The values from one line of a run's records, to be sent to a tracker."""

    step: int
    time: float
    """The time of the line, in seconds since 1970."""
    values: Mapping[str, float]
    """The finite numbers of the line by name."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run whose records are sent to a tracker."""

    run_dir: Path
    settings: Mapping[str, object]
    """All settings of the run, by dotted key."""
    id: str | None
    """The ID that the tracker gave the run; None if the tracker does not know the run yet."""
    first_step: int
    """The first step that will be sent. Values that the tracker already has for this step or later steps are
    outdated, because these steps are run again."""


class TensorBoard:
    """A tracker that writes TensorBoard event files. It writes record by record, so that a full disk is
    noticed at once."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.id = "tensorboard"
        folder = run.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter((folder / name).open("xb"))
        begin = time.time()
        self._write(Event(wall_time=begin, file_version="brain.Event:2"))
        # The START event makes TensorBoard discard the values that an earlier launch wrote from this step on.
        self._write(Event(wall_time=begin, step=run.first_step, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()

    def add(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            summary = Summary()
            for name, value in point.values.items():
                summary.value.add(tag=name, simple_value=value)
            self._write(Event(wall_time=point.time, step=point.step, summary=summary))
        self._file.flush()

    def close(self, status: RunStatus | None) -> None:
        self._file.close()

    def _write(self, event: "Event") -> None:
        self._file.write(event.SerializeToString())


class WeightsAndBiases:
    """A tracker that sends to Weights & Biases. The x axis is a metric called `step`, because Weights &
    Biases ignores values whose built-in step is lower than that of earlier values."""

    def __init__(self, run: TrackedRun) -> None:
        quiet_settings = {"CONSOLE": "off", "SILENT": "true", "ERROR_REPORTING": "false"}
        _set_defaults("WANDB", {"PROJECT": _PROJECT, "DIR": str(run.run_dir), **quiet_settings})
        import wandb

        name = os.environ.get("WANDB_NAME", run.run_dir.name)
        self._run = wandb.init(id=run.id or uuid.uuid4().hex[:12], name=name, resume="allow")
        self.id = str(self._run.id)
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def close(self, status: RunStatus | None) -> None:
        import wandb

        self._run.finish(exit_code=0 if status == "done" else 1)
        wandb.teardown()  # waits for its service, which may still be writing


class MLflow:
    """A tracker that sends to MLflow. It uses only MLflow's client, which has no global state and starts no
    threads that outlive it."""

    def __init__(self, run: TrackedRun) -> None:
        # Set before the import, which starts MLflow's telemetry.
        defaults = {"HTTP_REQUEST_MAX_RETRIES": "2", "HTTP_REQUEST_TIMEOUT": "20", "DISABLE_TELEMETRY": "true"}
        _set_defaults("MLFLOW", {"TRACKING_URI": f"sqlite:///{run.run_dir.absolute() / 'mlflow.db'}", **defaults})
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        self.id = self._client.create_run(experiment, run_name=run.run_dir.name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in run.settings.items()]
        for batch in batched(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self.id, params=list(batch))

    def add(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(1e3 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, status: RunStatus | None) -> None:
        ending = "FINISHED" if status == "done" else "KILLED" if status in ("interrupted", "preempted") else "FAILED"
        self._client.set_terminated(self.id, ending)


def _set_defaults(package: str, values: Mapping[str, str]) -> None:
    """Sets those environment variables of a package that the user has not set.

    Args:
        package: the prefix of the variables' names.
        values: the default values, by name without the prefix.
    """
    for name, value in values.items():
        os.environ.setdefault(f"{package}_{name}", value)


Tracker = TensorBoard | WeightsAndBiases | MLflow
"""An open tracker.

`id` is the ID that the tracker gave the run; a later launch passes it as `TrackedRun.id`. `add` sends points,
in the order of their file. `close` ends the run; its `status` is None if it is not known how the run ended.
Both may raise any exception of the tracker's package or of the network."""
TRACKERS: Mapping[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""The trackers by name, which is also the name of the tracker's package and of the canzona extra that
installs it."""


class Follower:
    """The sender of one run's records to one tracker. It continues after the last step that an earlier
    process sent.

    Args:
        start: the step from which this launch resumed; 0 in a new run. Later steps are sent even if the
            tracker already has them.
    """

    def __init__(self, files: RunFiles, name: TrackerName, *, start: int = 0) -> None:
        self._files, self._name = files, name
        paths = {"": files.metrics, "validation_": files.validation}
        self._records = {kind: JsonLines(path) for kind, path in paths.items()}
        """The readers of the run's records, by a prefix for the names of their values."""
        self._state = load_if_valid(files.tracker(name), TrackerState) or TrackerState()
        taken = {kind: min(self._state.taken.get(kind, -1), start) for kind in self._records}
        self._state = replace(self._state, taken=taken)
        self._waiting = deque((kind, point) for kind, point in self._read() if point.step > taken[kind])
        self._tracker: Tracker | None = None
        self._failures = 0
        """The number of failures since the last success."""
        self._retry_at = 0.0

    def send_new(self, *, ignore_pause: bool = False) -> None:
        """Reads new points, and sends all points that have not been sent, except during the pause after a
        failure. Never raises an error.

        Args:
            ignore_pause: True to send the points even in a pause.
        """
        self._waiting.extend(self._read())
        if time.monotonic() < self._retry_at and not ignore_pause:
            return
        try:
            if self._tracker is None:
                self._tracker = self._open()
            while self._waiting:
                batch = [*islice(self._waiting, _MOST_POINTS)]
                self._tracker.add([point for _, point in batch])
                for kind, point in batch:
                    self._waiting.popleft()
                    self._state = replace(self._state, taken={**self._state.taken, kind: point.step})
                self._save_state()
        except Exception as error:  # no error of a package or of the network may end the process
            self._handle_failure(error)
        else:
            if self._failures:
                self._report(f"{self._name} accepts metrics again; none were lost", "info")
            self._failures = 0

    def finish(self) -> None:
        """Sends the remaining points, closes the tracker, and reports points that could not be sent. Call
        this when the run has ended."""
        self.send_new(ignore_pause=True)
        result = load_if_valid(self._files.result, RunResult)
        try:
            if self._tracker is not None:
                self._tracker.close(None if result is None else result.status)
        except Exception as error:
            self._handle_failure(error)
        if self._waiting:
            lost = plural(len(self._waiting), "line")
            self._report(f"{lost} of the run's records did not reach {self._name}", "warning")

    def _open(self) -> Tracker:
        """Opens the tracker, and stores the ID that it gives the run."""
        run = TrackedRun(
            run_dir=self._files.root,
            settings=dict(leaves(asdict(load_resolved(self._files.config)))),
            id=self._state.id,
            first_step=max(self._state.taken.values()) + 1,
        )
        tracker = TRACKERS[self._name](run)
        self._state = replace(self._state, id=tracker.id)
        self._save_state()
        return tracker

    def _read(self) -> Iterator[tuple[str, Point]]:
        """Yields the points that have been added to the run's records since the last call, each with its
        prefix."""
        for kind, lines in self._records.items():
            for line in lines.read():
                step, written_at = line.pop("step", None), line.pop("time", None)
                if isinstance(step, int):
                    unix_s = float(written_at) if isinstance(written_at, int | float) else time.time()
                    yield kind, Point(step=step, time=unix_s, values=_numbers(line, kind))

    def _handle_failure(self, error: Exception) -> None:
        """Closes the tracker and begins a pause after a failure. Reports the first failure of several."""
        self._failures += 1
        self._retry_at = time.monotonic() + min(_FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S)
        if self._failures == 1:
            reason = redact(clean(f"{type(error).__name__}: {error}"))[:300]
            self._report(
                f"{self._name} does not accept metrics ({reason}); training continues, with retries", "warning"
            )
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close(None)
            self._tracker = None

    def _save_state(self) -> None:
        """Stores the tracker's ID and the last steps that were sent in the run directory."""
        with suppress(OSError):  # on a full disk, a later launch sends some points twice
            self._files.trackers.mkdir(exist_ok=True)
            save(self._files.tracker(self._name), self._state)

    def _report(self, text: str, level: Level) -> None:
        """Writes a message to standard error and to the run's events."""
        print(text, file=sys.stderr, flush=True)
        incident = Incident(time=time.time(), event="tracker", detail=text, level=level)
        try_append_json_line(self._files.events, incident.line())


def _numbers(line: Mapping[str, object], prefix: str) -> dict[str, float]:
    """Returns the finite numbers of a line, by name with the prefix. A number in a nested mapping is named
    `outer/inner`."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers


def follow(run_dir: Path, name: TrackerName, start: int) -> None:
    """Sends a run's records to a tracker until standard input is closed."""
    follower = Follower(RunFiles(run_dir), name, start=start)
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        follower.send_new()
    follower.finish()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), cast(TrackerName, sys.argv[2]), int(sys.argv[3]))
