"""Makes sure that no process outlives the launcher: the kernel kills agent and workers when their parent
dies.

`python orphan.py LAUNCHER_PID COMMAND...` asks the kernel for this and then executes COMMAND in the same
process; workers call `die_with_parent()` first. This file imports only the standard library, because it also
runs as a script.
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
_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


def die_with_parent() -> None:
    """Makes this worker end as soon as the torchrun agent that started it dies, for any reason.

    Call this before the slow imports. It does nothing if canzona's launcher did not start the agent: somebody
    who runs torchrun by hand may want it to continue in the background.
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
    if os.getppid() != parent:  # the parent died before the request, so the signal will never come
        os._exit(1)


def _watch(agent: int, launcher: int) -> None:
    """Checks every second whether agent and launcher are alive, and exits if not. Replaces prctl on systems that
    do not have it (macOS)."""
    while os.getppid() == agent:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            break
        time.sleep(1)
    os._exit(1)


def _become(launcher: int, command: list[str]) -> None:
    # A batch system signals every process of a job. torchrun would then kill its workers in the middle of a
    # step, or die, but stopping is the launcher's and the workers' decision. Ignored signals stay ignored
    # across exec, unless the program installs handlers. torchrun does so only for the signals in
    # PET_SIGNALS_TO_HANDLE.
    for signum in _LAUNCHER_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        _ask_kernel(launcher)
    variables = {AGENT_VARIABLE: str(os.getpid()), LAUNCHER_VARIABLE: str(launcher), "PET_SIGNALS_TO_HANDLE": "SIGQUIT"}
    environment = os.environ | variables
    os.execvpe(command[0], command, environment)  # keeps the process id and the request to the kernel


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
