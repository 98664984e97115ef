"""torch's profiler around chosen steps of a run, for `run.profile_steps`."""

import logging
from pathlib import Path

import torch

from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.run.files import RunFiles

ALL_RANKS = 8
"""The most ranks that are each profiled; with more only rank 0 is, because traces take megabytes and time."""


class StepProfiler:
    """Profiles steps `steps[0]` to `steps[1]` of this rank, with the breakdown's phases as ranges.

    Every rank of the job has one and calls it at every step.
    """

    def __init__(self, files: RunFiles, world: World, timer: PhaseTimer, steps: tuple[int, int] | None) -> None:
        self._first, self._last = steps or (0, 0)
        self._world, self._timer = world, timer
        self._path: Path | None = None
        if steps is not None and (world.rank == 0 or world.world_size <= ALL_RANKS):
            self._path = files.rank_profile(world.rank)
        self._running: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start with the first step. All ranks wait for one another: starting takes long, and is no part of a step."""
        if step != self._first:
            return
        if self._path is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=activities)
            self._running.start()
            self._timer.annotate(True)
        torch.distributed.barrier()

    def after(self, step: int, *, final: bool) -> None:
        """Stop and write with the last step, or with the run's own last one if that comes before. As `before`."""
        if not self._first or step < self._first or step > self._last or not (final or step == self._last):
            return
        if self._running is not None and self._path is not None:
            self._timer.annotate(False)
            self._running.stop()
            try:
                self._path.parent.mkdir(exist_ok=True)
                self._running.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:  # a full disk; torch reports it as the latter
                logging.getLogger(__name__).warning("%s cannot be written: %s", self._path, error)
            self._running = None
        torch.distributed.barrier()
