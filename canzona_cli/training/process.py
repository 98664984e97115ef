"""One rank as a process: signs of life, requests to stop, and an end that never hangs."""

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from canzona_cli.config.secrets import RedactingFormatter
from canzona_cli.errors import EnvironmentProblem
from canzona_cli.run.files import RunFiles
from canzona_cli.run.heartbeat import STACKS_SIGNAL, Heart
from canzona_cli.run.orphan import die_with_parent
from canzona_cli.run.records import FIRST_STAGE, Ending
from canzona_cli.run.streams import guard
from canzona_cli.run.words import plural
from canzona_cli.training.records import Journal, RankRecord

if TYPE_CHECKING:  # a rank shows signs of life before it imports Megatron
    from canzona_cli.megatron.timers import PhaseTimer

_ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask a rank to save and stop: batch systems send them before they kill."""
IMPORTED_BY_ALL: Final = (
    "canzona_cli.megatron",  # before anything else imports Megatron
    "canzona_cli.training.assemble",
    "canzona_cli.config.compose",
    "torch._dynamo",  # torch's own optimizers import it in their first step
)
"""The slow imports of ranks of every kind, for `canzona_cli.training.agent`."""
Work = Callable[[RunFiles, RankRecord, int], Ending]
"""Given the run's files, this rank's record and its number; how it ended. Slow imports belong into it: they
come after the first sign of life."""


def run_rank(run_dir: Path, work: Work) -> NoReturn:
    """Do this rank's work and exit; the exit code is also in the rank's result file."""
    os.umask(os.umask(0o077) | 0o002)  # nothing of a run is for everybody to write, its logs and traces included
    guard()
    logging.basicConfig(level=logging.WARNING)
    logging.root.handlers[0].setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    die_with_parent()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    preempted = listen_for_stops()
    files = RunFiles(run_dir)
    rank = int(os.environ["RANK"])
    record = RankRecord(files, rank)
    record.preempted = preempted
    try:
        record.running()
    except EnvironmentProblem as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    Journal(files, writes=rank == 0).stage(FIRST_STAGE, plural(int(os.environ["WORLD_SIZE"]), "rank"))
    hush()
    try:
        import canzona_cli.megatron  # noqa: F401 - before anything imports Megatron

        ending = work(files, record, rank)
    except BaseException as error:
        code = record.failed(error)
        logging.getLogger(__name__).exception("rank %d failed", rank)
        # No destructors, no collective shutdown: peers may be waiting in a collective that will never
        # complete.
        sys.stderr.flush()
        os._exit(int(code))
    code = record.ended(ending)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk and every group is closed; tearing down torch would only keep the terminal for
    # seconds.
    os._exit(code)


def listen_for_stops() -> threading.Event:
    """Returns an event that is set once a signal asks this rank to save and stop. Call it in the main thread,
    before any other thread is started.

    A thread waits for the signals, so that they are noticed while the training thread is inside a collective, and
    so that it is known who sent them: torchrun sends SIGTERM to the ranks that are left once one has failed, and
    then there is nothing to save.
    """
    preempted = threading.Event()
    if sys.platform != "linux":  # who sent a signal cannot be known
        for number in _ASKING:
            signal.signal(number, lambda *_: preempted.set())
        return preempted
    # Blocked here and in all threads to come; the one below takes them one by one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    for number in _ASKING:
        signal.signal(number, signal.SIG_DFL)

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo(_ASKING)
            if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.kill(os.getpid(), signal.SIGTERM)
            preempted.set()

    threading.Thread(target=wait, name="stop-requests", daemon=True).start()
    return preempted


class Pulse:
    """Shows signs of life from training: at every change of phase, and around every wait for other ranks.

    With gloo, and wherever the host waits at all, everything that waits for a collective ends in `Work.wait`,
    whether our code, Megatron or torch itself calls it. NCCL's waits happen on the device; the host comes to wait
    where it first reads from the device, the gradient norm: what we read passes through `PhaseTimer.fetch`, what
    Megatron's own optimizers read there is marked by `instrument.attach`.
    """

    def __init__(self, heart: Heart) -> None:
        from torch.distributed import Work

        self._heart = heart
        self._timer: PhaseTimer | None = None
        wait = Work.wait

        @functools.wraps(wait)
        def watched(*args: object, **kwargs: object) -> object:
            begun = time.perf_counter()
            with heart.waiting():
                try:
                    return wait(*args, **kwargs)  # type: ignore[arg-type]
                finally:
                    if self._timer is not None:
                        self._timer.waited(time.perf_counter() - begun)

        Work.wait = watched  # type: ignore[method-assign, assignment]

    def follow(self, timer: "PhaseTimer") -> None:
        """Passes on the timer's phases, and tells it how long its phases waited."""
        self._timer = timer
        timer.on_change = self._heart.phase
        timer.on_wait = self._heart.waits


def hush() -> None:
    """Silences torch's and Megatron's warnings of optional packages and of their own future: the reader of a
    log cannot act on them, and they would stand above a rank's error."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
