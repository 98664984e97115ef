"""Launchers of several machines: only those of one launch meet, and all say the same of how it ended."""

import threading
from pathlib import Path

import pytest

from canzona_cli.core.errors import EnvironmentProblem, Problem
from canzona_cli.launch.machines import Machines, verdict_of
from canzona_cli.launch.outcome import Outcome
from canzona_cli.records.files import RunFiles, read_json, write_json_atomic
from tests.waiting import wait_until

DONE = Outcome(status="done", exit_code=0, message="", step=4, loss=1.5)
STOPPED = Outcome(status="interrupted", exit_code=130, message="stopped")
PREEMPTED = Outcome(status="preempted", exit_code=75, message="")
CRASHED = Outcome(
    status="failed",
    exit_code=2,
    message="token id 300",
    rank=3,
    traceback=("line",),
    log=Path("/logs/3"),
    problems=(Problem(key="data.path", value="x", reason="is bad", fix="mend it"),),
)
LOST = Outcome(status="failed", exit_code=70, message="rank 0: connection reset", rank=0, secondary=True)
GONE = Outcome(status="failed", exit_code=70, message="machine 1 is gone")


def ignore(_: str) -> None:
    return


def machines(root: Path, count: int) -> list[Machines]:
    return [Machines(RunFiles(root), node_rank=number, nodes=count) for number in range(count)]


@pytest.mark.parametrize("first", ["machine 0", "the others"])
def test_machines_meet_whoever_comes_first_and_learn_where_the_ranks_do(tmp_path: Path, first: str) -> None:
    head, *others = machines(tmp_path, 3)
    heard: list[str] = []
    threads = [threading.Thread(target=lambda one=one: heard.append(one.arrive(patience_s=20))) for one in others]
    gathering = threading.Thread(target=lambda: head.gather("127.0.0.1:1", patience_s=20, say=ignore))
    for thread in [gathering, *threads] if first == "machine 0" else [*threads, gathering]:
        thread.start()
    for thread in [*threads, gathering]:
        thread.join()
    assert heard == ["127.0.0.1:1"] * 2


def test_what_an_earlier_launch_left_is_no_meeting(tmp_path: Path) -> None:
    head, other = machines(tmp_path, 2)
    (tmp_path / "nodes").mkdir()
    write_json_atomic(tmp_path / "nodes" / "arrived-1.json", {"token": "old"})
    write_json_atomic(tmp_path / "nodes" / "meeting.json", {"endpoint": "old:1", "tokens": {"1": "old"}})
    write_json_atomic(tmp_path / "nodes" / "ended-1.json", {"status": "failed", "exit_code": 70})
    with pytest.raises(EnvironmentProblem, match="machine 0 did not start"):
        other.arrive(patience_s=0.3)
    with pytest.raises(EnvironmentProblem, match="did not arrive"):
        head.gather("new:1", patience_s=0.3, say=ignore)


def test_a_machine_that_does_not_come_is_named(tmp_path: Path) -> None:
    head, _, other = machines(tmp_path, 3)
    (tmp_path / "nodes").mkdir()

    def arrive() -> None:
        with pytest.raises(EnvironmentProblem):
            other.arrive(patience_s=5)

    thread = threading.Thread(target=arrive)
    thread.start()
    wait_until((tmp_path / "nodes" / "arrived-2.json").exists, "machine 2")
    with pytest.raises(EnvironmentProblem) as error:
        head.gather("h:1", patience_s=4, say=ignore)
    thread.join()
    assert error.value.problems[0].value == "1"


def test_all_machines_say_what_the_one_that_failed_by_itself_says(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    both = machines(tmp_path, 2)
    ends: dict[int, Outcome] = {}

    def conclude(number: int, own: Outcome) -> None:
        ends[number] = both[number].conclude(own, patience_s=20)

    threads = [threading.Thread(target=conclude, args=end) for end in enumerate([LOST, CRASHED])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == {0: CRASHED, 1: CRASHED}


def test_a_machine_that_says_nothing_at_the_end_is_the_culprit(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    write_json_atomic(tmp_path / "nodes" / "arrived-1.json", {"token": "t", "host": "gpu17"})
    head, other = machines(tmp_path, 2)
    assert head.conclude(LOST, patience_s=0).message.startswith("machine 1 (gpu17) is gone")
    (tmp_path / "nodes" / "verdict.json").unlink()
    assert other.conclude(LOST, patience_s=0).message.startswith("machine 0 is gone"), "it never arrived"


def test_one_machine_needs_nobody(tmp_path: Path) -> None:
    alone = Machines(RunFiles(tmp_path))
    alone.gather("", say=ignore)
    assert not alone.others_failed()
    assert alone.conclude(LOST) is LOST
    assert list(tmp_path.iterdir()) == []


def test_who_is_to_blame() -> None:
    assert verdict_of({0: LOST, 1: CRASHED}, [GONE]) == CRASHED
    aborted = Outcome(status="failed", exit_code=70, message="rank 0 was killed by signal 6 (SIGABRT)", rank=0)
    assert verdict_of({1: CRASHED, 0: aborted}, []) == CRASHED, "the first counts"
    assert verdict_of({0: LOST}, [GONE]) == GONE
    assert verdict_of({0: DONE, 1: LOST}, []) == LOST
    assert verdict_of({0: DONE, 1: STOPPED}, []) == STOPPED
    assert verdict_of({0: PREEMPTED, 1: DONE}, []) == PREEMPTED
    assert verdict_of({0: PREEMPTED, 1: STOPPED}, []) == PREEMPTED
    unnamed = Outcome(status="failed", exit_code=70, message="torchrun was killed by signal 9")
    assert verdict_of({0: LOST, 1: unnamed}, []).message == "machine 1: torchrun was killed by signal 9"


def test_another_machines_failure_is_noticed_after_its_workers_had_time_to_lose_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodes").mkdir()
    head, other = machines(tmp_path, 2)
    now = [1000.0]
    monkeypatch.setattr("canzona_cli.launch.machines.time.monotonic", lambda: now[0])
    assert not head.others_failed()
    other.conclude(CRASHED, patience_s=-1)
    assert read_json(tmp_path / "nodes" / "ended-1.json") is not None
    seen = []
    for _ in range(15):
        now[0] += 2.5
        seen.append(head.others_failed())
    assert not seen[0]
    assert seen[-1]
