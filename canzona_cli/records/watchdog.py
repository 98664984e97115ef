"""The watchdog of a rank: if the rank makes no progress for too long, it writes the Python stacks of all its
threads to its log and exits.

Every change of phase counts as progress. The ranks of a run are stuck together, so all of them write their stacks
at about the same time, except for a rank that cannot run at all (stopped, swapped out, or stuck in native code
that keeps Python's lock); torchrun kills it once another rank has exited.
"""

import faulthandler
import os
import threading
import time
from typing import Final, Literal

VARIABLE: Final = "CANZONA_HANG_TIMEOUT_S"
"""The environment variable with which the launcher sets the limit of the workers. Without it there is none."""
PATIENCE: Final = 3
"""The factor by which `run.hang_timeout_s` is multiplied during the first step, which may compile, and outside of
steps."""
MARK: Final = "canzona: no progress for"
"""The beginning of the line before the stacks of a rank that hangs."""
Stage = Literal["start workers", "build model", "build data", "load", "train", "validate", "save", "finish"]
"""The stages that a rank goes through, as named in events.jsonl."""
_LONGEST_GAP: Final = 5
"""The most intervals between checks that one check adds. Without this limit, a machine or a job that was suspended
would look like a hang. A rank also waits as long before it exits, so that ranks that are stuck together write their
stacks before torchrun ends them."""


class Watchdog:
    """The watchdog of this process."""

    def __init__(self) -> None:
        self._calls = self._steps = 0
        self._in_steps = self._ended = False
        if limit_s := float(os.environ.get(VARIABLE, 0)):
            threading.Thread(target=self._watch, args=(limit_s,), name="watchdog", daemon=True).start()

    def stage(self, name: Stage) -> None:
        """Records that the rank enters a stage."""
        self._in_steps = name in ("train", "validate")
        self.progress()

    def step(self) -> None:
        """Records that the rank begins a step."""
        self._steps += 1
        self.progress()

    def progress(self) -> None:
        """Records progress within a long operation."""
        self._calls += 1

    def end(self) -> None:
        """Stops the watchdog."""
        self._ended = True

    def _watch(self, limit_s: float) -> None:
        interval_s = min(1.0, limit_s / 10)
        silent_s, seen, checked = 0.0, 0, time.monotonic()
        while not self._ended:
            time.sleep(interval_s)
            passed_s, checked = time.monotonic() - checked, time.monotonic()
            passed_s = min(passed_s, _LONGEST_GAP * interval_s)
            silent_s = silent_s + passed_s if seen == self._calls else 0.0
            seen = self._calls
            is_patient = self._steps <= 1 or not self._in_steps
            if silent_s > limit_s * (PATIENCE if is_patient else 1) and not self._ended:
                os.write(2, f"{MARK} {silent_s:.0f} s\n".encode())
                faulthandler.dump_traceback(file=2)
                time.sleep(_LONGEST_GAP * interval_s)
                os._exit(1)
