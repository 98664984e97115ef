"""A rank forked by the agent is what the same command started as a program is, but that it has its imports already."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from canzona_cli.training import agent
from tests.faults.support import REPOSITORY


@pytest.mark.parametrize("end", ["0", "3", "raise", f"signal {signal.SIGKILL:d}", f"signal {signal.SIGQUIT:d}"])
def test_a_fork_is_what_a_program_would_be(end: str, tmp_path: Path) -> None:
    command = (sys.executable, "-u", "-m", "tests.training.probe", end)
    # Without a locale, a program that is Python sets this one itself.
    environment = {"LC_CTYPE": "C.UTF-8", "PYTHONPATH": str(REPOSITORY), "RANK": "7", "CUDA_VISIBLE_DEVICES": ""}
    said: list[tuple[int, dict[str, Any], str]] = []
    handler = signal.signal(signal.SIGQUIT, lambda *_: None)  # as torchrun has one when it starts its ranks
    kept = os.dup(0)  # and a socket
    os.set_inheritable(kept, True)
    try:
        for start in (agent._start, subprocess.Popen):
            with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
                code = start(command, env=environment, stdout=out, stderr=err, start_new_session=True).wait()
            told = re.sub(r"(?s)Traceback.*(?=ValueError)", "", (tmp_path / "err").read_text())
            said.append((code, json.loads((tmp_path / "out").read_text()), told))
    finally:
        os.close(kept)
        signal.signal(signal.SIGQUIT, handler)
    (code, fork, last_words), (expected_code, program, expected_words) = said
    assert (code, last_words) == (expected_code, expected_words)
    assert {fact: said for fact, said in fork.items() if said != program[fact]} == {}
    assert fork["leads a session"]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="numactl"):
        agent._start(("numactl", sys.executable), env={}, stdout=None, stderr=None, start_new_session=True)
