"""Signs of life from training: at every change of phase, and around every wait for other ranks.

With gloo, and wherever the host waits at all, everything that waits for a collective ends in `Work.wait`,
whether our code, Megatron or torch itself calls it. NCCL's waits happen on the device; the host comes to wait
where it first reads from the device, the gradient norm: what we read passes through `PhaseTimer.fetch`, what
Megatron's own optimizers read there is marked by `instrument.attach`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from canzona_cli.run.heartbeat import Heart

if TYPE_CHECKING:  # a rank shows signs of life before it imports Megatron
    from canzona_cli.megatron.timers import PhaseTimer

Wait = Callable[..., object]


class Pulse:
    """Connects torch, a phase timer and a heart, for the life of the process."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart
        self._timer: PhaseTimer | None = None
        torch.distributed.Work.wait = self._watched(torch.distributed.Work.wait)  # type: ignore[method-assign,assignment]

    def follow(self, timer: PhaseTimer) -> None:
        """Pass on the timer's phases, and tell it how long its phases waited."""
        self._timer = timer
        timer.on_change = self._heart.phase
        timer.on_wait = self._heart.waits

    def _watched(self, original: Wait) -> Wait:
        heart, clock = self._heart, time.perf_counter

        @functools.wraps(original)
        def wait(*args: object, **kwargs: object) -> object:
            heart.waits(True)
            begun = clock()
            try:
                return original(*args, **kwargs)
            finally:
                heart.waits(False)
                if self._timer is not None:
                    self._timer.waited(clock() - begun)

        return wait
