"""Runs torchrun in an agent process that has already imported torch and Megatron, and whose forks are the
ranks.

Start it as `python -m canzona_cli.training.agent` with torchrun's arguments. On a laptop, imports take most
of the start-up time. With the agent, each node imports once instead of once per rank. A forked rank has the
session, environment, output, signals, open files and exit code of a newly started program; only its command
line is the agent's.

The agent is used only for CPU ranks on Linux: CUDA does not work in a forked process, GPU libraries may
initialise the device when they are imported, and macOS kills forks that use its frameworks.
"""

import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from functools import partial
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import IO, NoReturn

from canzona_cli.training.process import hush

SLOW_IMPORTS = "SLOW_IMPORTS"
"""The name of a constant in a worker's module that lists the modules to import before the agent forks.
Importing them must not start threads or computations. A rank itself imports them after it has reported its
start."""


def main() -> None:
    """Imports the ranks' slow modules, then runs torchrun with `_start` in place of `subprocess.Popen`."""
    gc.disable()  # imports leave hardly any garbage, and collecting takes a seventh of their time
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    hush()
    worker = run.get_args_parser().parse_args().training_script
    for name in runpy.run_module(worker).get(SLOW_IMPORTS, ()):
        with suppress(Exception):  # the rank's own import fails again, and the rank reports the error
            importlib.import_module(name)
    gc.freeze()  # otherwise the first collection in each rank would copy all the memory shared with the agent
    gc.enable()
    # Python warns of forks in a process with threads. The agent's thread for the store is harmless: the forks
    # do not use it, but connect to the store themselves.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded, use of fork")
    subprocess_handler.Popen = _start  # type: ignore[attr-defined, assignment]
    run.main()


def _start(
    args: tuple[str, ...], env: dict[str, str], stdout: IO[str] | None, stderr: IO[str] | None, start_new_session: bool
) -> "subprocess.Popen[bytes]":
    """Starts a rank as a fork of this process. torchrun calls this function in place of `subprocess.Popen`.

    Args:
        args: `python -u -m MODULE ARGUMENT...`.

    Raises:
        ValueError: `args` does not start a Python module.
    """
    if args[:3] != (sys.executable, "-u", "-m"):
        raise ValueError(f"only a Python module can be started as a fork: {args}")
    run_rank = partial(_run_rank, args[3:], env)
    # Python ignores some signals, such as SIGPIPE. Popen would reset them, which is right only for other
    # programs.
    return subprocess.Popen(
        args,
        env=env,
        preexec_fn=run_rank,
        restore_signals=False,
        stdout=stdout,
        stderr=stderr,
        start_new_session=start_new_session,
    )


def _run_rank(args: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Runs a module in this fork and then exits, so that Popen never starts its program. When Popen calls
    this function, it has already set the session and the output.

    Args:
        args: the module and its arguments.
    """
    code: object = 0
    try:
        # Close the inherited files: the sockets of the agent's store, so that its port is freed when the
        # agent ends, and the pipe through which Popen waits for a program to start.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        sys.stdout, sys.stderr = (TextIOWrapper(FileIO(descriptor, "w"), write_through=True) for descriptor in (1, 2))
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # the name that `top` shows
        gc.enable()  # Popen disables it while it forks
        sys.argv = [*args]
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
