"""A rank tells a batch system's signals from torchrun's: one asks to save, the other to go."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.waiting import PATIENCE_S

LISTENER = """
import time
from canzona_cli.training.process import listen_for_stops
preempted = listen_for_stops()
print("listening", flush=True)
preempted.wait()
print("preempted", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    """A process of ours that listens: we are to it what torchrun is to a rank."""
    process = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_a_signal_from_anybody_else_asks_to_save(rank: subprocess.Popen[str], name: str) -> None:
    subprocess.run(["/bin/sh", "-c", f"kill -{name} {rank.pid}"], check=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "preempted\n"
    assert rank.poll() is None


def test_torchruns_own_sigterm_ends_a_rank_at_once(rank: subprocess.Popen[str]) -> None:
    """It sends it to the ranks that are left when one has failed."""
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(PATIENCE_S) == -signal.SIGTERM
