"""A rank that makes no progress writes where it is and exits, earlier within steps than outside of them."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from canzona_cli.records import protection
from canzona_cli.records.protection import HANG_MARK, HANG_VARIABLE, Watchdog

SLEEPER = """
import sys, time
from canzona_cli.records.protection import Watchdog

def stuck_here():
    time.sleep(60)

watchdog = Watchdog()
for call in sys.argv[1].split():
    watchdog.stage("train") if call == "train" else getattr(watchdog, call)()
    time.sleep(0.05)
stuck_here() if sys.argv[2] == "stuck" else time.sleep(1.5)
"""


def sleep(calls: str, how: str = "stuck", limit_s: float = 0.4) -> tuple[int, str, float]:
    begun = time.monotonic()
    environment = os.environ | {HANG_VARIABLE: str(limit_s)}
    command = [sys.executable, "-c", SLEEPER, calls, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize(("calls", "least_s"), [("progress", 1.2), ("train step", 1.2), ("train step step", 0.4)])
def test_a_stuck_rank_says_where_and_exits_and_the_first_step_and_the_start_may_take_longer(
    calls: str, least_s: float
) -> None:
    code, said, took_s = sleep(calls)
    assert code == 1
    assert said.startswith(HANG_MARK)
    assert "in stuck_here" in said
    assert took_s > least_s


def test_an_ended_rank_and_one_without_a_limit_are_left_alone() -> None:
    assert sleep("train step step end", "rest")[:2] == (0, "")
    assert sleep("train step step", "rest", limit_s=0)[:2] == (0, "")


def test_a_machine_that_slept_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    gaps = iter([10_000.0, 1.0, 1.0])
    dog = Watchdog()

    def sleep(seconds: float) -> None:
        now[0] += next(gaps, 0.0)
        if now[0] > 10_001.0:
            dog.end()

    def ended(code: int) -> None:
        raise AssertionError(code)

    monkeypatch.setattr(protection, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(protection, "os", SimpleNamespace(write=os.write, _exit=ended))
    dog._watch(10.0)
