"""Trackers with their real packages, offline: what they hold is read back, also after a run went on."""

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import TrackerName
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch import processes
from canzona_cli.launch.processes import run_trackers
from canzona_cli.records.codec import load_if_valid, save
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.records import Incident, RunResult, TrackerState
from canzona_cli.records.summary import events_of
from canzona_cli.training import trackers
from canzona_cli.training.trackers import TRACKERS, Follower, Point, TrackedRun
from tests.records.runs import CONFIG

Curves = dict[str, dict[int, list[float | str]]]
"""The values that were added, by name and step; the last one counts."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run with three steps, of which one has no finite gradient norm."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_PROJECT": "canzona"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # its thread would be there for whatever forks after it
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    files = RunFiles(tmp_path)
    files.logs.mkdir()
    write_text_atomic(files.config, dump_resolved(CONFIG))
    for step in (1, 2, 3):
        add(files, step, loss=4.0 - step)
    append_json_line(files.validation, {"step": 2, "loss": 2.5, "time": 102.0, "sets": {"code": 2.25}})
    return files


def add(files: RunFiles, step: int, *, loss: float) -> None:
    norm = None if step == 2 else 0.5
    append_json_line(files.metrics, {"step": step, "loss": loss, "grad_norm": norm, "tokens": 64, "time": 100.0 + step})


def told(files: RunFiles) -> list[str]:
    return [event.detail for event in events_of(files) if isinstance(event, Incident) and event.event == "tracker"]


def of_tensorboard(files: RunFiles, _: str) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(files.root / "tensorboard"))
    board.Reload()
    found: Curves = {}
    for tag in board.Tags()["scalars"]:
        for event in board.Scalars(tag):
            found.setdefault(tag, {}).setdefault(event.step, []).append(event.value)
    for tag in board.Tags()["tensors"]:
        for event in board.Tensors(tag):
            found.setdefault(tag, {}).setdefault(event.step, []).append(event.tensor_proto.string_val[0].decode())
    return found


def of_mlflow(files: RunFiles, run: str) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient()
    assert client.get_run(run).data.params["optimizer.name"] == "muon"
    assert client.get_run(run).info.status == "FINISHED"
    found: Curves = {}
    for name in client.get_run(run).data.metrics:
        for metric in client.get_metric_history(run, name):
            found.setdefault(name, {}).setdefault(metric.step, []).append(metric.value)
    return found


def of_wandb(files: RunFiles, run: str) -> Curves:
    """Returns the curves in the files that `wandb sync` would send; both launches' files have the same run."""
    import json

    from wandb.proto import wandb_internal_pb2

    found: Curves = {}
    for path in sorted(files.root.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")):
        for content in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    if name != "step" and not name.startswith("_"):
                        found.setdefault(name, {}).setdefault(row["step"], []).append(value)
    return found


def _records(log: bytes) -> Iterator[bytes]:
    """A log of LevelDB's format: blocks of 32 KiB, records in pieces of which each has a length and a kind."""
    block, at, whole = 1 << 15, 7, b""
    while at + 7 <= len(log):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


READERS: dict[TrackerName, Callable[[RunFiles, str], Curves]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


@pytest.mark.parametrize(
    # MLflow's first database takes it five seconds of a core.
    "name",
    [pytest.param(name, marks=[pytest.mark.sweep] if name == "mlflow" else []) for name in READERS],
)
def test_a_run_that_goes_on_does_so_in_the_same_curve(files: RunFiles, name: TrackerName) -> None:
    """Steps 1 to 3, then from the checkpoint of step 2 to step 4 with another loss in step 3."""
    first = Follower(files, name)
    first.send_new()
    save(files.result, RunResult(status="preempted", exit_code=75))
    first.finish()
    state = load_if_valid(files.tracker(name), TrackerState)
    assert state is not None
    assert state.taken == {"": 3, "validation_": 2}

    files.metrics.unlink()
    for step in (1, 2):
        add(files, step, loss=4.0 - step)
    if name == "wandb":
        time.sleep(1.1)  # its folder's name has the second in which it began
    add(files, 3, loss=1.5)  # a rank may be quicker than the tracker's process
    second = Follower(files, name, start=2)
    second.send_new()
    add(files, 4, loss=2.0)
    save(files.result, RunResult(status="done", exit_code=0))
    second.finish()
    again = load_if_valid(files.tracker(name), TrackerState)
    assert again is not None
    assert again.id == state.id
    assert told(files) == []
    assert threading.enumerate() == [threading.main_thread()], "and nothing of it goes on"

    curves = READERS[name](files, state.id or "")
    assert set(curves) == {"loss", "grad_norm", "tokens", "validation_loss", "validation_sets/code"}
    latest = {step: values[-1] for step, values in curves["loss"].items()}
    assert latest == {1: 3.0, 2: 2.0, 3: 1.5, 4: 2.0}, "step 3 is the one of the run as it is"
    sent = {step: len(values) for step, values in curves["loss"].items()}
    assert sent == {1: 1, 2: 1, 3: 1 if name == "tensorboard" else 2, 4: 1}
    assert sorted(curves["grad_norm"]) == [1, 3, 4], "no number is no point"
    assert curves["validation_loss"] == {2: [2.5]}


class Broken:
    """Refuses what it is handed until `mended`; counts the calls."""

    mended = False
    calls = 0
    points: tuple[Point, ...] = ()
    id = "broken"

    def __init__(self, run: TrackedRun) -> None:
        type(self).calls += 1
        if not self.mended:
            raise ConnectionError("cannot log in with hf_abcdefghijklmnopqrst")

    def add(self, points: list[Point]) -> None:
        type(self).points += tuple(points)

    def close(self, status: str | None) -> None:
        pass


def test_a_tracker_that_fails_is_told_once_and_loses_nothing(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    monkeypatch.setattr(trackers, "_FIRST_PAUSE_S", 0.0)
    follower = Follower(files, "wandb")
    for _ in range(4):
        follower.send_new()
    assert Broken.calls == 4
    (said,) = told(files)
    assert "training continues" in said
    assert "hf_abc" not in said, "what looks like a key is hidden"
    monkeypatch.setattr(Broken, "mended", True)
    follower.send_new()
    assert "none were lost" in told(files)[-1]
    assert sorted(point.step for point in Broken.points) == [1, 2, 2, 3]


def test_what_never_arrived_is_sent_by_the_next_launch(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "mlflow", Broken)
    monkeypatch.setattr(Broken, "mended", False)
    monkeypatch.setattr(Broken, "points", ())
    follower = Follower(files, "mlflow")
    follower.send_new()
    before = Broken.calls
    follower.send_new()
    assert Broken.calls == before, "it is given time"
    follower.finish()
    assert told(files)[-1].startswith("4 lines of the run's records did not reach mlflow")
    monkeypatch.setattr(Broken, "mended", True)
    Follower(files, "mlflow").finish()
    assert sorted(point.step for point in Broken.points) == [1, 2, 2, 3]


def test_the_process_takes_everything_before_it_ends(files: RunFiles) -> None:
    """The launcher starts it the same way; a line that comes last of all is there, and nothing of the process is
    left."""
    said: list[str] = []
    with run_trackers(files, ("tensorboard", "tensorboard"), start=0, environment={}, say=said.append):
        add(files, 4, loss=0.25)
    assert said == []
    assert of_tensorboard(files, "")["loss"] == {1: [3.0], 2: [2.0], 3: [1.0], 4: [0.25]}
    assert len([*files.root.glob("tensorboard/*")]) == 1


def test_one_that_hangs_is_ended(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes it started end too: it does not delay the end of a run."""
    child = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); print('up', flush=True); time.sleep(1000)"
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        started.append(process)
        return process

    monkeypatch.setattr(processes, "_start_tracker", start)
    monkeypatch.setattr(processes, "PATIENCE_S", 0.1)
    said: list[str] = []
    with run_trackers(files, ("wandb",), start=0, environment={}, say=said.append):
        pass
    (only,) = said
    assert "wandb has not received everything" in only
    (process,) = started
    assert process.returncode == -9
    assert process.stdout is not None
    assert process.stdout.read() == b"", "whoever held its output is gone, too"
