"""Files of a run directory: whole or absent for every reader, and valid JSON whatever the numbers."""

import json
import os
import resource
import threading
from pathlib import Path

import pytest

from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch.view import Monitor, TrainView
from canzona_cli.records.codec import JsonLines
from canzona_cli.records.files import RunFiles, append_json_line, read_json, write_json_atomic
from canzona_cli.records.records import Note, RunStatus, StageEvent, StepMetrics, ValidationLoss
from canzona_cli.records.summary import events_of


class Recorder(TrainView):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def progress(self, what: str, fraction: float) -> None:
        self.seen.append((what, fraction))

    def stage(self, event: StageEvent) -> None:
        self.seen.append(("stage", event.stage))

    def step(self, metrics: StepMetrics) -> None:
        self.seen.append(("step", metrics.step))

    def validation(self, validation: ValidationLoss) -> None:
        self.seen.append(("validation", validation.step))

    def note(self, note: Note) -> None:
        self.seen.append(("note", note.text))

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        self.seen.append(("close", status))


def test_a_reader_sees_whole_files_while_they_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rank.json"
    write_json_atomic(path, {"filler": ["x" * 1000] * 50, "number": 0})
    ended = threading.Event()

    def rewrite() -> None:
        for number in range(1, 60):
            write_json_atomic(path, {"filler": ["x" * 1000] * 50, "number": number})
        ended.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    numbers = []
    while not ended.is_set():
        numbers.append(json.loads(path.read_text())["number"])
    writer.join()
    assert numbers == sorted(numbers)
    assert [p.name for p in tmp_path.iterdir()] == ["rank.json"]


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "rank.json"
    write_json_atomic(path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_text_atomic(path, "more than that")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_json(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["rank.json"]


def test_a_name_that_is_not_utf8_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json_atomic(tmp_path / "a.json", {"log": name})
    append_json_line(tmp_path / "a.jsonl", {"log": name})
    assert read_json(tmp_path / "a.json") == read_json(tmp_path / "a.jsonl") == {"log": name}


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"loss": float("nan"), "all": [float("inf"), 1.5, {"x": float("-inf")}]})
    assert read_json(tmp_path / "a.json") == {"loss": None, "all": [None, 1.5, {"x": None}]}


def test_a_line_counts_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.read() == []
    path.write_bytes('{"step": 1}\n{"step": 2, "note": "ü'.encode()[:-1])  # ends inside a character
    assert lines.read() == [{"step": 1}]
    assert lines.read() == []
    with path.open("ab") as file:
        file.write("ü".encode()[1:] + b'"}\nnot json\n[3]\n{"step": 4}\n')
    assert lines.read() == [{"step": 2, "note": "ü"}, {"step": 4}]


def test_the_monitor_passes_records_on_in_the_order_they_were_written(tmp_path: Path) -> None:
    files, view = RunFiles(tmp_path), Recorder()
    monitor = Monitor(files, view)
    append_json_line(files.events, {"time": 1.0, "event": "stage", "stage": "start workers"})
    append_json_line(files.events, {"time": 1.5, "event": "stage", "stage": "start workers"})
    append_json_line(files.validation, {"time": 2.0, "step": 0, "loss": 5.5})
    append_json_line(files.metrics, {"time": 3.0, "step": 1, "loss": 5.4})
    append_json_line(files.events, {"time": 4.0, "event": "stage", "stage": "finish"})
    monitor.poll()
    assert view.seen == [("stage", "start workers"), ("validation", 0), ("step", 1), ("stage", "finish")]
    append_json_line(files.metrics, {"time": 5.0, "step": 2, "loss": 5.3})
    monitor.poll()
    assert view.seen[4:] == [("step", 2)]
    assert (monitor.last_step, monitor.last_validation) == (
        StepMetrics(step=2, loss=5.3, time=5.0),
        ValidationLoss(step=0, loss=5.5, time=2.0),
    )


def test_a_view_that_fails_costs_the_run_its_display_and_is_put_on_record(tmp_path: Path) -> None:
    class Failing(Recorder):
        def step(self, metrics: StepMetrics) -> None:
            raise KeyError("colour")

    files, view = RunFiles(tmp_path), Failing()
    monitor = Monitor(files, view)
    append_json_line(files.metrics, {"time": 1.0, "step": 7})
    monitor.poll()
    append_json_line(files.validation, {"time": 2.0, "step": 7, "loss": 5.5})
    monitor.poll()
    assert (monitor.last_step, view.seen) == (StepMetrics(step=7, time=1.0), [])
    assert monitor.last_validation == ValidationLoss(step=7, loss=5.5, time=2.0)
    assert "the run can no longer be shown: KeyError" in files.events.read_text()


def test_events_that_are_no_stages_are_said_in_a_line_and_what_an_earlier_launch_wrote_is_not(tmp_path: Path) -> None:
    files, view = RunFiles(tmp_path), Recorder()
    append_json_line(files.events, {"time": 1.0, "event": "stage", "stage": "train"})
    append_json_line(files.metrics, {"time": 1.5, "step": 1, "loss": 5.4})
    monitor = Monitor(files, view)
    assert not monitor.training
    facts = {"step": 30, "seconds": 2.5, "stall_s": 0.004, "bytes": 13 << 20, "path": "checkpoints/step-00000030"}
    append_json_line(files.events, {"time": 2.0, "event": "checkpoint", **facts})
    append_json_line(files.events, {"time": 3.0, "event": "straggler", "detail": "rank 2 is slow", "level": "warning"})
    append_json_line(files.events, {"time": 4.0, "event": "end", "detail": "done"})
    monitor.poll()
    assert view.seen == [
        ("note", "saved step 30: 13.0 MiB in 2.50 s, training waited 4.00 ms"),
        ("note", "rank 2 is slow"),
    ]


def test_lines_that_are_not_records_are_left_out_of_the_view_and_of_the_report(tmp_path: Path) -> None:
    files, view = RunFiles(tmp_path), Recorder()
    for line in ({}, {"loss": 1.0}, {"step": "x", "loss": "y"}, {"step": 5, "loss": []}):
        append_json_line(files.metrics, line)
        append_json_line(files.validation, line)
        append_json_line(files.events, {"event": "stage", **line})
    with files.events.open("a") as file:
        file.write('{"event": ["stage"]}\n{"event": "checkpoint"}\n[1]\nnull\n{\n\x00\n')
    Monitor(files, view).poll()
    assert view.seen == []
    assert events_of(files) == []
