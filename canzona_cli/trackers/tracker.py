"""Trackers that take a run's curves besides its files: TensorBoard, Weights & Biases, MLflow,
with one interface.

Each has the names and steps of metrics.jsonl. Where it sends them, and with which key, its own environment
variables say (`WANDB_API_KEY`, `WANDB_MODE`, `WANDB_PROJECT`, `MLFLOW_TRACKING_URI`,
`MLFLOW_EXPERIMENT_NAME`, ...). Without `MLFLOW_TRACKING_URI` MLflow writes a database in the run directory.
Their packages are imported when they are used.
"""

import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from canzona_cli.config.schema import TrackerName
from canzona_cli.run.records import RunStatus

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_PROJECT = "canzona"
"""The project of Weights & Biases, and the experiment of MLflow, where the environment names none."""
_MOST_PARAMETERS = 100
"""Values that MLflow takes at once."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The values of one line of a run's records."""

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """Finite numbers by name."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts by name. MLflow, whose runs have none with a step, leaves them out."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run that is followed."""

    run_dir: Path
    settings: Mapping[str, object]
    """Settings of the whole run, by dotted key."""
    id: str | None
    """The tracker's name of the run; None where it does not have one yet."""
    first_step: int
    """The first step that will be added: the tracker's values of this step and later ones are of steps done again."""


class Tracker(Protocol):
    """One that is open. Every call may raise whatever its package and the network raise."""

    @property
    def id(self) -> str:
        """The tracker's name of the run, which is `Tracked.id` when the run goes on."""

    def add(self, points: Sequence[Point]) -> None:
        """Points in the order of their file; afterwards they are the tracker's to keep."""

    def close(self, status: RunStatus | None) -> None:
        """Ends the run: nothing more comes.

        Args:
            status: how the run ended; None where that is not known.
        """


class TensorBoard:
    """An event file, written record by record: a full disk is seen at once.
    Standard names of TensorFlow's format."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter((folder / name).open("xb"))
        begin = time.time()
        self._write(Event(wall_time=begin, file_version="brain.Event:2"))
        # TensorBoard then forgets what an earlier launch wrote from this step on.
        self._write(Event(wall_time=begin, step=run.first_step, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()

    @property
    def id(self) -> str:
        return "tensorboard"

    def add(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            values += [value for name, text in point.texts.items() for value in text_pb(name, text).value]
            self._write(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
        self._file.flush()

    def close(self, status: RunStatus | None) -> None:
        self._file.close()

    def _write(self, event: "Event") -> None:
        self._file.write(event.SerializeToString())


class WeightsAndBiases:
    """A run of Weights & Biases whose axis is our step:
    it ignores what comes behind a later step of its own."""

    def __init__(self, run: Tracked) -> None:
        defaults = {"PROJECT": _PROJECT, "DIR": str(run.run_dir), "CONSOLE": "off", "SILENT": "true"}
        for name, value in {**defaults, "ERROR_REPORTING": "false"}.items():
            os.environ.setdefault(f"WANDB_{name}", value)
        import wandb

        name = os.environ.get("WANDB_NAME", run.run_dir.name)
        self._run = wandb.init(id=run.id or uuid.uuid4().hex[:12], name=name, resume="allow")
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def id(self) -> str:
        return str(self._run.id)

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values, **point.texts})

    def close(self, status: RunStatus | None) -> None:
        import wandb

        self._run.finish(exit_code=0 if status == "done" else 1)
        wandb.teardown()  # its service may still be writing what it was handed


class MLflow:
    """A run of MLflow, by its client alone: nothing global, and no thread that outlives it."""

    def __init__(self, run: Tracked) -> None:
        defaults = {"TRACKING_URI": f"sqlite:///{run.run_dir.absolute() / 'mlflow.db'}", "DISABLE_TELEMETRY": "true"}
        for name, value in {**defaults, "HTTP_REQUEST_MAX_RETRIES": "2", "HTTP_REQUEST_TIMEOUT": "20"}.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
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
        parameters = [Param(key, str(value)[:500]) for key, value in run.settings.items()]
        for some in batched(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self.id, params=list(some))

    def add(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(1e3 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, status: RunStatus | None) -> None:
        ended = "FINISHED" if status == "done" else "KILLED" if status in ("interrupted", "preempted") else "FAILED"
        self._client.set_terminated(self.id, ended)


TRACKERS: Mapping[TrackerName, type[TensorBoard] | type[WeightsAndBiases] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""A tracker's name is that of its package, and of canzona's extra that brings it."""
