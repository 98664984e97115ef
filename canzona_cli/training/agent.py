"""torchrun whose ranks are forks of it, which has imported torch and Megatron: `python -m
canzona_cli.training.agent` with torchrun's own arguments.

Ranks that are programs of their own spend the first seconds of a run importing the same modules, each for
itself: on a laptop most of a start-up. Here a machine imports them once, and a rank differs from a program of
its own in its command line alone, which stays the agent's. Session, environment, output, signals, open files
and exit code are what starting a program would have made of them.

For ranks on CPUs: CUDA does not survive a fork, and what a GPU's software touches when it is imported is not
ours to know. And for Linux: macOS kills forks that use its frameworks.
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
"""The name by which a worker's module lists what its ranks import after their first sign of life. None of it
may compute, or leave a thread behind."""


def main() -> None:
    """Import what the ranks will, and be torchrun from then on."""
    gc.disable()  # nothing of it is garbage, and looking for some takes a seventh of the time
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    hush()
    worker = run.get_args_parser().parse_args().training_script
    for name in runpy.run_module(worker).get(SLOW_IMPORTS, ()):
        with suppress(Exception):  # a rank meets it again, and knows how to tell the launcher
            importlib.import_module(name)
    gc.freeze()  # or the first collection of each rank would copy all the memory that they share
    gc.enable()
    # The store's thread in here is not in the forks, and they use nothing of it: they connect to the store
    # anew.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded, use of fork")
    subprocess_handler.Popen = _start  # type: ignore[attr-defined, assignment]
    run.main()


def _start(
    args: tuple[str, ...], env: dict[str, str], stdout: IO[str] | None, stderr: IO[str] | None, start_new_session: bool
) -> "subprocess.Popen[bytes]":
    """Starts a rank for torchrun: `python -u -m MODULE ARGUMENT...`; the process is torchrun's own child."""
    if args[:3] != (sys.executable, "-u", "-m"):
        raise ValueError(f"cannot fork what is not a Python module: {args}")
    rank = partial(_be_rank, args[3:], env)
    # Python ignores some signals from its start on, and restoring them is for programs that are not Python.
    return subprocess.Popen(
        args,
        env=env,
        preexec_fn=rank,
        restore_signals=False,
        stdout=stdout,
        stderr=stderr,
        start_new_session=start_new_session,
    )


def _be_rank(args: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Run the module in this fork, which has its session and output already, and exit; the program that Popen
    would have started is never reached."""
    code: object = 0
    try:
        # The sockets of the agent's store, whose port shall go with the agent; and the pipe by which Popen
        # learns that all is well.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        sys.stdout, sys.stderr = (TextIOWrapper(FileIO(number, "w"), write_through=True) for number in (1, 2))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # what `top` shows
        gc.enable()  # Popen holds it back until a program has been started
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
