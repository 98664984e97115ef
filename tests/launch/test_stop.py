"""The effect of signals on the launcher, and whether a preempted run has a checkpoint to continue from."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from canzona_cli.launch.outcome import unsaved_outcome
from canzona_cli.launch.processes import kill_tree
from canzona_cli.launch.stop import (
    Preempted,
    Requests,
    SaveWatch,
    checkpoint_to_resume,
    early_stop_outcome,
    handle_signals,
)
from canzona_cli.records.files import RunFiles
from tests.checkpoint.checkpoints import save


def test_the_first_signal_says_why_and_only_ctrl_c_is_counted() -> None:
    requests = Requests()
    with handle_signals(requests.add):
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    assert (requests.reason, requests.interrupts) == ("preempted", 1)
    by_hand = Requests()
    with handle_signals(by_hand.add):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):  # a closed terminal's shell passes it on
            os.kill(os.getpid(), number)
    assert (by_hand.reason, by_hand.interrupts) == ("interrupted", 0)


def test_what_the_launcher_was_started_to_ignore_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        requests = Requests()
        with handle_signals(requests.add):
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_decision_they_are_ignored() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with handle_signals(Requests().add, to_the_end=True):
            pass
        for number in numbers:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGUSR1, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_while_nobody_can_be_asked_a_signal_ends_what_is_done(number: int, error: type[BaseException]) -> None:
    requests = Requests(raising=True)
    with handle_signals(requests.add), pytest.raises(KeyboardInterrupt) as raised:
        os.kill(os.getpid(), number)
    assert raised.type is error
    requests.add(number, None)  # while what follows from the first is under way, the next one raises nothing


def test_a_save_is_under_way_while_there_is_half_a_checkpoint_and_moves_while_it_grows(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    watch = SaveWatch(files)
    assert not watch.is_saving()
    save(files.checkpoints, 3)
    assert not watch.is_saving()
    assert watch.last_progress == 0
    partial = files.checkpoints / ".step-00000004.partial"
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"1")
    assert watch.is_saving()
    first = watch.last_progress
    assert first > 0
    assert watch.is_saving()
    assert watch.last_progress == first, "nothing has been written since"
    (partial / "rank-00000.safetensors").write_bytes(b"12")
    assert watch.is_saving()
    assert watch.last_progress > first


def test_a_preempted_run_ends_with_75_only_where_a_whole_checkpoint_is(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert checkpoint_to_resume(files) is None
    assert "no checkpoint to continue from" in unsaved_outcome("stopped", None).message
    save(files.checkpoints, 3)
    path = save(files.checkpoints, 5)
    assert checkpoint_to_resume(files) == "step-00000005"
    told = unsaved_outcome("stopped", "step-00000005")
    assert (told.status, told.exit_code) == ("preempted", 75)
    shard = path / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert checkpoint_to_resume(files, thorough=False) == "step-00000005"
    assert checkpoint_to_resume(files) is None, "the one before is for a person to choose"
    shard.unlink()
    assert checkpoint_to_resume(files, thorough=False) is None


def test_before_the_workers_start_an_older_checkpoint_decides(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert early_stop_outcome(None, Preempted()).exit_code == 130
    assert early_stop_outcome(files, Preempted()).exit_code == 130
    save(files.checkpoints, 3)
    assert early_stop_outcome(files, Preempted()).exit_code == 75
    assert early_stop_outcome(files, KeyboardInterrupt()).exit_code == 130


def test_a_child_that_ends_before_it_is_listed_needs_no_killing(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sh", "-c", "exit 3"])
    child.wait()
    monkeypatch.setattr(child, "poll", lambda: None)  # as it was a moment before
    kill_tree(child)
    assert child.returncode == 3
