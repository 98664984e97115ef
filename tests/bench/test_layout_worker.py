"""A rank's handling of a turn that failed in a process of its own."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from canzona_cli.bench import worker
from canzona_cli.bench.layouts import prepare
from canzona_cli.bench.sitting import BenchFiles, Turns
from canzona_cli.config.compose import dump_resolved
from canzona_cli.errors import ExitCode
from canzona_cli.run.files import RunFiles
from canzona_cli.training.records import RankRecord

Act = Callable[[RunFiles, int, int, str], None]


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch, act: Act) -> str:
    """Returns how a rank ends when its turns do what `act` does, in two rounds of two layouts."""
    entrants = prepare(["recipe=tiny", "gpus=2", "model.num_layers=2"], count=2, rounds=1, steps=1).entrants
    names = tuple(entrants)[:2]
    files = RunFiles(BenchFiles(folder).sitting(0))
    files.root.mkdir()
    for name in names:
        BenchFiles(folder).config(name).write_text(dump_resolved(entrants[name].config), encoding="utf-8")
    Turns(names=names, rounds=2, steps_per_turn=3).write(files)
    monkeypatch.setattr(worker, "_turn", act)
    return worker.layouts_rank(files, RankRecord(files, 0), 0)


def test_each_layout_has_a_turn_and_a_process_in_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(files: RunFiles, rank: int, number: int, name: str) -> None:
        (files.root / f"{number} {name}").write_text(str(os.getpid()))

    assert taken(tmp_path, monkeypatch, note) == "done"
    left = {path.name: path.read_text() for path in (tmp_path / "sitting-0").glob("? tp*")}
    assert len(left) == 4
    assert len({*left.values(), str(os.getpid())}) == 5


@pytest.mark.parametrize("told", ["", "rank 1: no room"])
def test_a_failing_layout_has_no_further_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """A turn that dies; and one that waits for another rank, which has said why it will never come."""

    def fail(files: RunFiles, rank: int, number: int, name: str) -> None:
        (files.root / f"{number} {name}").touch()
        if name != Turns.read(files).names[0]:
            os._exit(0)
        if told:
            BenchFiles.failure(files, name).write_text(told)
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    assert taken(tmp_path, monkeypatch, fail) == "done"
    files = RunFiles(tmp_path / "sitting-0")
    bad, good = Turns.read(files).names
    assert {path.name for path in files.root.glob("? tp*")} == {f"0 {bad}", f"0 {good}", f"1 {good}"}
    assert BenchFiles.failure(files, bad).read_text() == (told or "rank 0 ended with code -9")
    assert not BenchFiles.failure(files, good).exists()


def test_a_turn_that_was_asked_to_stop_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(files: RunFiles, rank: int, number: int, name: str) -> None:
        (files.root / f"{number} {name}").touch()
        os._exit(ExitCode.INTERRUPTED)

    assert taken(tmp_path, monkeypatch, stop) == "interrupted"
    assert len(list((tmp_path / "sitting-0").glob("? tp*"))) == 1
