"""The end of a run depends on the run alone: not on whether anybody can read what it prints, nor on what comes after
it."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.records import protection
from canzona_cli.records.files import RunFiles, read_json
from tests.attacks.victim import FULL, Attack, Streams, Victim, attacked, steps


@pytest.fixture
def full() -> Iterator[Streams]:
    """Standard output and error on a disk without room."""
    disk, nothing = os.open(FULL, os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    yield Streams(stdin=nothing, stdout=disk, stderr=disk)
    os.close(disk)
    os.close(nothing)


def assert_ended(files: RunFiles, victim: Victim, status: str, code: int) -> None:
    """The run's own account of its end, the exit code and the checkpoint agree."""
    result = read_json(files.result)
    assert result is not None, f"no result.json; exit code {victim.code}"
    assert (result["status"], result["exit_code"], victim.code) == (status, code, code)
    newest = CheckpointStore(files.checkpoints).latest()
    if status in ("interrupted", "preempted"):
        assert newest is not None
        assert newest.step == result["step"] == steps(files)
        assert not verify(newest.path)[1]
    else:
        assert newest is None


def test_a_closed_terminal_saves_the_run(train: Attack, files: RunFiles) -> None:
    """The kernel sends SIGHUP, and every line that is printed from then on fails; the signal comes again, as an
    interactive shell passes it on to its jobs."""
    master, slave = os.openpty()
    victim = train(Streams(stdin=slave, stdout=slave, stderr=slave, terminal=True), ending="slow")
    os.close(slave)
    os.set_blocking(master, False)
    shown = bytearray()

    def read() -> None:
        with suppress(BlockingIOError):
            shown.extend(os.read(master, 65536))

    victim.until(lambda: steps(files) >= 3 and b"\x1b[" in shown, read)  # the live view is on the screen
    os.close(master)
    victim.until(files.stop.exists)
    victim.signal(signal.SIGHUP)
    victim.finish()
    assert_ended(files, victim, "interrupted", 130)


ENDINGS = [
    ("done@1", None, "done", 0),
    ("crash@1", None, "failed", 70),
    pytest.param("hang@1", None, "failed", 71, marks=pytest.mark.sweep),
    ("stopped", signal.SIGTERM, "preempted", 75),
    pytest.param("stopped", signal.SIGINT, "interrupted", 130, marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("ending", "number", "status", "code"), ENDINGS)
def test_output_on_a_full_disk_changes_no_ending(
    train: Attack,
    files: RunFiles,
    full: Streams,
    ending: str,
    number: signal.Signals | None,
    status: str,
    code: int,
) -> None:
    victim = train(full, *(["run.hang_timeout_s=1"] if ending == "hang@1" else []), ending=ending)
    if number is not None:
        victim.until(lambda: steps(files) >= 3)
        victim.signal(number)
    victim.finish()
    assert_ended(files, victim, status, code)


def test_output_on_a_full_disk_changes_no_mistake_either_and_a_page_that_is_lost_is_one(
    train: Attack, files: RunFiles, full: Streams, tmp_path: Path
) -> None:
    assert train(full, "train.steps=-1").finish() == 2
    assert train(full, "model.num_layers=2000", "model.hidden_size=65536").finish() == 4
    (tmp_path / "step-00000001").mkdir()
    assert train(full, f"checkpoint.resume={tmp_path / 'step-00000001'}").finish() == 5
    assert not files.root.exists()
    lost = attacked("plan", "recipe=qwen3-tiny", "gpus=1", "--json", "--dry-run", streams=full, cwd=tmp_path)
    assert lost.finish() == 3


def test_signals_after_the_decision_do_not_change_it(train: Attack, files: RunFiles) -> None:
    """One every millisecond, from the first wish to stop until the process is gone."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    victim = train(Streams(stdin=nowhere, stdout=nowhere, stderr=nowhere))
    os.close(nowhere)
    victim.until(lambda: steps(files) >= 3)
    sent, late = 0, 0
    while not victim.ended():
        victim.signal(signal.SIGUSR2)
        sent, late = sent + 1, late + files.result.exists()
        time.sleep(0.001)
    assert_ended(files, victim, "preempted", 75)
    assert late > 3, f"none of {sent} came after the decision"


def test_with_all_streams_closed_nothing_is_printed_into_the_runs_files(train: Attack, files: RunFiles) -> None:
    victim = train(Streams(), ending="done@1")
    victim.finish()
    assert_ended(files, victim, "done", 0)
    assert files.claim.read_text().split()[1] == str(victim.pid)
    assert "elapsed" not in files.claim.read_text()
    assert files.agent_log(0).read_text() == "launch 1\n"


def test_a_reader_that_has_gone_or_reads_no_more_keeps_no_run_from_being_saved(
    train: Attack, files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`canzona train | less`, nobody at the keyboard: the pipe is full before the first line."""
    monkeypatch.setattr(protection, "_PATIENCE_S", 0.1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    victim = train(Streams(stdin=nothing, stdout=writer, stderr=writer))
    victim.until(lambda: steps(files) >= 3)
    victim.signal(signal.SIGTERM)
    victim.finish()
    assert_ended(files, victim, "preempted", 75)
    os.close(reader)
    with pytest.raises(OSError, match=os.strerror(errno.EPIPE)):
        os.write(writer, b"?")
    again = train(Streams(stdin=nothing, stdout=writer, stderr=writer), f"run.dir={files.root}-2", ending="done@1")
    assert again.finish() == 0
    os.close(writer)
    os.close(nothing)
