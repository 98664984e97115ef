"""Runs one rank as a process, with a watchdog, requests to stop, and an exit that never hangs."""

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
from canzona_cli.core.errors import EnvironmentProblem
from canzona_cli.records.files import RunFiles
from canzona_cli.records.protection import die_with_parent, guard
from canzona_cli.records.records import FIRST_STAGE, Ending
from canzona_cli.records.words import plural
from canzona_cli.training.records import Journal, RankRecord

if TYPE_CHECKING:  # a rank must report that it has started before it imports Megatron, which is slow
    from canzona_cli.core.megatron.timers import PhaseTimer

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask a rank to save and stop; batch systems send them before they kill a job."""
IMPORTED_BY_ALL: Final = (
    "canzona_cli.core.megatron.quick_import",  # must come before anything that imports Megatron
    "canzona_cli.training.assemble",
    "canzona_cli.config.compose",
    "torch._dynamo",  # torch's own optimizers import it in their first step
)
"""The slow imports that every kind of rank needs. `canzona_cli.training.agent` does them before it forks the
ranks."""
Work = Callable[[RunFiles, RankRecord, int], Ending]
"""The function that does a rank's work. Its arguments are the run's files, the rank's record and the rank; it
returns how the work ended. Its slow imports belong inside the function, so that the rank can report its start
before them."""


def run_rank(run_dir: Path, work: Work) -> NoReturn:
    """Does this rank's work, records in the rank's result file how the work ended, and exits the process."""
    os.umask(os.umask(0o077) | 0o002)  # no file of a run, including logs and traces, may be world-writable
    guard()
    logging.basicConfig(level=logging.WARNING)
    logging.root.handlers[0].setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    die_with_parent()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    preempted = listen_for_stops()
    files = RunFiles(run_dir)
    rank = int(os.environ["RANK"])
    record = RankRecord(files, rank)
    record.preempted = preempted
    try:
        record.record_start()
    except EnvironmentProblem as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    Journal(files, writes=rank == 0).stage(FIRST_STAGE, plural(int(os.environ["WORLD_SIZE"]), "rank"))
    hush()
    try:
        import canzona_cli.core.megatron.quick_import  # noqa: F401 - before anything imports Megatron

        ending = work(files, record, rank)
    except BaseException as error:
        code = record.record_failure(error)
        logging.getLogger(__name__).exception("rank %d failed", rank)
        # The process exits without destructors or a collective shutdown, which would hang: peers may be
        # waiting in a collective that will never complete.
        sys.stderr.flush()
        os._exit(int(code))
    code = record.record_end(ending)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk and every process group is closed; tearing down torch would only take seconds
    # more.
    os._exit(code)


def listen_for_stops() -> threading.Event:
    """Returns an event that is set when a signal asks this rank to save and stop.

    Must be called in the main thread, before any other thread is started. On Linux a separate thread waits
    for the signals, so that they are noticed even while the training thread is inside a collective. That
    thread also sees which process sent a signal: torchrun sends SIGTERM to the remaining ranks after one of
    them has failed. In that case the process terminates, because a save is no longer possible.
    """
    preempted = threading.Event()
    if sys.platform != "linux":  # no sigwaitinfo, so the sender of a signal is unknown
        for signum in _STOP_SIGNALS:
            signal.signal(signum, lambda *_: preempted.set())
        return preempted
    # The signals are blocked in this thread and in the threads that it will start; the thread below receives
    # them one by one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    for signum in _STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo(_STOP_SIGNALS)
            if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.kill(os.getpid(), signal.SIGTERM)
            preempted.set()

    threading.Thread(target=wait, name="stop-requests", daemon=True).start()
    return preempted


def count_host_waits(timer: "PhaseTimer") -> None:
    """Adds the time that the host waits for collectives to a timer, from now on. In canzona, Megatron and torch,
    all of these waits call `Work.wait`, which is replaced."""
    from torch.distributed import Work

    wait = Work.wait

    @functools.wraps(wait)
    def timed_wait(*args: object, **kwargs: object) -> object:
        begun = time.perf_counter()
        try:
            return wait(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            timer.waited(time.perf_counter() - begun)

    Work.wait = timed_wait  # type: ignore[method-assign, assignment]


def hush() -> None:
    """Silences the warnings of torch and Megatron, most of which are about optional packages and
    deprecations.

    Users cannot act on them, and they would distract from a rank's error in the log.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
