"""Signals that ask a rank to save and stop: SIGTERM, SIGUSR1 and SIGUSR2,
which batch systems send before they kill.

A thread waits for them, so that they are noticed while the training thread is inside a collective, and so
that it is known who sent them: torchrun tells the ranks that are left to go by SIGTERM once one has failed,
and then there is nothing to save.
"""

import os
import signal
import sys
import threading

_ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopRequests:
    """The requests that this process got by signals, once it listens to them."""

    def __init__(self) -> None:
        self.preempted = False
        """True if the run shall be saved and ended."""

    def listen(self) -> None:
        """Call it in the main thread, before any other thread is started."""
        if sys.platform != "linux":  # who sent a signal cannot be known
            for number in _ASKING:
                signal.signal(number, lambda *_: self._ask())
            return
        # Blocked here and in all threads to come; the one below takes them one by one.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
        for number in _ASKING:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._wait, name="stop-requests", daemon=True).start()

    def _ask(self) -> None:
        self.preempted = True

    def _wait(self) -> None:
        while True:
            received = signal.sigwaitinfo(_ASKING)
            if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.kill(os.getpid(), signal.SIGTERM)
            self._ask()
