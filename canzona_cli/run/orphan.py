"""No process outlives the launcher: agent and workers are killed by the kernel when their parent dies.

`python orphan.py LAUNCHER_PID COMMAND...` becomes COMMAND after asking for that; workers call
`die_with_parent()` first thing. Standard library only: this file also runs by its path, before anything is
importable.
"""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
AGENT_VARIABLE = "CANZONA_AGENT_PID"
LAUNCHER_VARIABLE = "CANZONA_LAUNCHER_PID"
_FOR_THE_LAUNCHER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


def die_with_parent() -> None:
    """Have this worker killed when the torchrun agent that started it dies, however it dies.

    Call it before the slow imports. Does nothing when the agent was not started by `canzona train`: whoever
    types the torchrun command by hand may also put it into the background.
    """
    agent = os.environ.get(AGENT_VARIABLE)
    if agent is None:
        return
    if sys.platform == "linux":
        _ask_kernel(int(agent))
    else:
        watched = (int(agent), int(os.environ[LAUNCHER_VARIABLE]))
        threading.Thread(target=_watch, args=watched, name="parent-watch", daemon=True).start()


def _ask_kernel(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we asked: the signal will never come
        os._exit(1)


def _watch(agent: int, launcher: int) -> None:
    """Looks every second whether the parents live, where the kernel cannot tell us (macOS)."""
    while os.getppid() == agent:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            break
        time.sleep(1)
    os._exit(1)


def _become(launcher: int, command: list[str]) -> None:
    # A batch system signals every process of a job. torchrun would answer by killing its workers in the
    # middle of a step, or die; what to do is for the launcher and the workers to say. Programs keep ignoring
    # what they were started with, unless they ask otherwise, which torchrun does with every signal but the
    # one it is told here.
    for number in _FOR_THE_LAUNCHER:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        _ask_kernel(launcher)
    variables = {AGENT_VARIABLE: str(os.getpid()), LAUNCHER_VARIABLE: str(launcher), "PET_SIGNALS_TO_HANDLE": "SIGQUIT"}
    environment = os.environ | variables
    os.execvpe(command[0], command, environment)  # keeps the process id and the request to the kernel


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
