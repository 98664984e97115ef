"""The rank that holds a run up, and when a run counts as held up at all."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from canzona_cli.errors import EnvironmentProblem
from canzona_cli.launch import hang
from canzona_cli.launch.hang import HangWatch, blame, hang_watch
from canzona_cli.run.heartbeat import PATIENCE, VARIABLE, Heart, Heartbeats, Sign

NOW = 1000.0


def sign(
    rank: int, *, ago: float = 70.0, beat_ago: float = 0.1, where: str = "train/forward", waiting: bool = False
) -> Sign:
    """Returns the sign of a process that last made progress `ago` seconds before `NOW`."""
    return Sign(
        rank=rank,
        pid=100 + rank,
        step=7,
        steps=7,
        where=where,
        waiting=waiting,
        progress=NOW - ago,
        beat=NOW - beat_ago,
        ended=False,
    )


def blamed(*signs: Sign, state: str = "sleeping") -> tuple[int, str]:
    found = blame(signs, now=NOW, began=NOW - 300, state=lambda _: state)
    assert found.rank is not None
    assert found.elsewhere == ("as have all ranks of this machine" in found.reason)
    return found.rank, found.reason


def test_a_stopped_process_is_the_culprit_though_others_have_waited_longer() -> None:
    reduce = partial(sign, where="train/grad_reduce", waiting=True)
    rank, reason = blamed(reduce(0, ago=75), reduce(1, ago=75), sign(2, beat_ago=70), reduce(3), state="stopped")
    assert rank == 2
    assert reason == (
        "is stopped (SIGSTOP; SIGCONT resumes it); last progress 70 s ago, in train/forward of step 7; "
        "ranks 0 1 3 waiting in train/grad_reduce of step 7"
    )


def test_where_all_wait_the_one_that_has_waited_longest_is_named_and_the_network_suspected() -> None:
    rank, reason = blamed(sign(0, waiting=True, ago=65), sign(1, waiting=True, ago=66))
    assert rank == 1
    assert "has waited for other ranks in train/forward of step 7 for 66 s" in reason
    assert "as have all ranks of this machine: check the network" in reason


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hearts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Heartbeats, list[Heart]]]:
    beats = Heartbeats(range(2))
    monkeypatch.setenv(VARIABLE, str(beats.folder))
    both = [Heart(rank) for rank in range(2)]
    yield beats, both
    for heart in both:
        heart.end()


def test_ranks_say_what_they_do_and_leave_no_file(hearts: tuple[Heartbeats, list[Heart]]) -> None:
    beats, (first, second) = hearts
    assert not beats.folder.exists()
    first.stage("train")
    first.step(31)
    first.phase("grad_reduce")
    with second.waiting():
        signs = beats.signs()
    assert [(s.pid, s.step, s.steps, s.where, s.waiting) for s in signs] == [
        (os.getpid(), 31, 1, "train/grad_reduce", False),
        (os.getpid(), 0, 0, "start workers", True),
    ]
    assert not beats.signs()[1].waiting
    first.end()
    assert [s.ended for s in beats.signs()] == [True, False]


def seconds_until_hang(watch: HangWatch, clock: Clock, *, most: int = 1000) -> int:
    for passed in range(most):
        if watch.check() is not None:
            return passed
        clock.now += 1
    raise AssertionError("never")


def test_only_a_later_step_is_held_to_the_limit_itself(hearts: tuple[Heartbeats, list[Heart]]) -> None:
    beats, both = hearts
    clock = Clock()
    watch = HangWatch(beats, timeout_s=10, clock=clock)
    assert seconds_until_hang(watch, clock) - 10 * PATIENCE in (1, 2), "start-up"
    for heart in both:
        heart.stage("train")
        heart.step(31)
    assert seconds_until_hang(watch, clock) - 10 * PATIENCE in (1, 2), "the first step of a resumed run may compile"
    for heart in both:
        heart.step(32)
    assert seconds_until_hang(watch, clock) - 10 in (1, 2)


def test_a_long_start_says_once_which_ranks_it_waits_for(hearts: tuple[Heartbeats, list[Heart]]) -> None:
    beats, (first, second) = hearts
    clock = Clock()
    watch = HangWatch(beats, timeout_s=600, clock=clock)
    first.mark_waiting(True)
    said = []
    for _ in range(90):
        watch.check()
        said.append(watch.describe_slow_start())
        clock.now += 1
    told = [text for text in said if text is not None]
    assert told == ["no progress for 30 s: rank 0 waiting in start workers, rank 1 at work in start workers"]
    second.step(1)
    watch.check()
    assert watch.describe_slow_start() is None, "it trains"


def test_one_rank_that_goes_on_keeps_the_run_alive_but_no_ended_one(hearts: tuple[Heartbeats, list[Heart]]) -> None:
    beats, (first, second) = hearts
    clock = Clock()
    watch = HangWatch(beats, timeout_s=10, clock=clock)
    for _ in range(100):
        first.progress()
        assert watch.check() is None
        clock.now += 1
    first.end()
    for _ in range(PATIENCE * 10):
        assert watch.check() is None
        second.progress()
        clock.now += 1
    second.end()
    assert seconds_until_hang(watch, clock) in (10, 11)
    stopped = watch.check()
    assert stopped is not None
    assert (stopped.name, stopped.rank) == ("torchrun", None)
    assert stopped.reason.startswith("has not exited, though all ranks ended ")


def test_a_machine_that_slept_does_not_hang(hearts: tuple[Heartbeats, list[Heart]]) -> None:
    beats, _ = hearts
    clock = Clock()
    watch = HangWatch(beats, timeout_s=10, clock=clock)
    assert watch.check() is None
    clock.now += 10_000
    assert watch.check() is None


def test_the_folder_of_signs_goes_with_the_watch_and_lies_where_there_is_room(tmp_path: Path) -> None:
    with hang_watch(range(4), timeout_s=10) as watch:
        assert watch is not None
        folder = Path(watch.environment[VARIABLE])
        assert len(list(folder.iterdir())) == 4
    assert not folder.exists()
    with hang_watch(range(4), timeout_s=None) as none:
        assert none is None
    beats = Heartbeats(range(1), parents=("/proc", str(tmp_path)))
    assert beats.folder.parent == tmp_path
    beats.close()
    with pytest.raises(EnvironmentProblem, match="=null turns heartbeats off"):
        Heartbeats(range(1), parents=("/proc",))


def test_a_machine_whose_ranks_all_wait_lets_the_one_with_the_culprit_speak_first(
    hearts: tuple[Heartbeats, list[Heart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_NO_BEAT_S", 1e9)  # the test's clock is faster than the hearts
    beats, both = hearts
    for heart in both:
        heart.mark_waiting(True)
    clock = Clock()
    watch = HangWatch(beats, timeout_s=10, clock=clock)
    assert seconds_until_hang(watch, clock) > 10 * PATIENCE + 5
