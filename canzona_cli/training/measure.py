"""Measures steps: computes the breakdown of a run, profiles single steps, and detects ranks that are slower
than their peers."""

import logging
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.parallel import World, gather
from canzona_cli.core.megatron.timers import PhaseTimer, StepTiming
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.phases import IN_STEP
from canzona_cli.core.setup.execution import strategy_of
from canzona_cli.records.breakdown import MeasuredBreakdown, PeakMemory, PhaseTime, RankTimes
from canzona_cli.records.files import RunFiles
from canzona_cli.records.statistics import OverRanks, by_phase, load_balance, mean_phases
from canzona_cli.training.records import Journal

WARM_UP_STEPS = 2
"""The number of initial steps that are not measured; a launch of one or two steps measures its last step.
Initial steps include lazy initialisation (allocations, kernels) and Megatron's first reduction, which is not
overlapped."""

_UPDATES = ("matrix_update", "adamw_update")
"""The phases whose load balance over ranks is part of the breakdown."""


@dataclass(frozen=True, kw_only=True)
class _RankMeans:
    """One rank's mean times over the measured steps, in seconds, and its peak memory, as a record that the
    ranks exchange."""

    step_s: float
    phases: Mapping[str, float]
    peak_memory: float
    """The peak memory of the rank, in bytes."""


def measured_steps(steps: Sequence[StepTiming], profiled: tuple[int, int] | None) -> Sequence[StepTiming]:
    """Returns the steps that the breakdown averages over: those after the warm-up that are not profiled; if all
    are, those after the warm-up.

    Args:
        profiled: the numbers of the first and the last profiled step; None if no step is profiled.
    """
    after_warm_up = steps[_warm_up(steps) :]
    first, last = profiled or (0, -1)
    return [step for step in after_warm_up if not first <= step.number <= last] or after_warm_up


def _warm_up(steps: Sequence[StepTiming]) -> int:
    """Returns the number of initial steps that are not measured."""
    return min(WARM_UP_STEPS, max(0, len(steps) - 1))


def gather_breakdown(config: RunConfig, world: World, steps: Sequence[StepTiming]) -> MeasuredBreakdown | None:
    """Gathers every rank's mean phase times, and returns the run's breakdown on rank 0. Collective.

    Each rank averages over its measured steps; minimum, mean and maximum are then taken over ranks. Profiled steps, and
    steps of a ramp-up, are not measured, unless there are no other steps.

    Args:
        steps: the timings of this launch's steps.

    Returns:
        The breakdown; None on other ranks, or if no step was measured.
    """
    batch = world.layout.global_batch_size
    batches = {step.number: config.train.batch_at(batch, step.number) for step in steps}
    full = [step for step in steps if batches[step.number] == batch] or steps
    measured = measured_steps(full, config.run.profile_steps)
    means = _RankMeans(
        step_s=sum(s.step_s for s in measured) / max(1, len(measured)),
        phases=mean_phases([step.phases for step in measured]),
        peak_memory=_peak_memory(world),
    )
    rank_means = gather(means, _RankMeans)
    if world.rank != 0 or not measured:
        return None
    step_time = _phase_time([rank.step_s for rank in rank_means])
    phases = by_phase([rank.phases for rank in rank_means])
    sequences = sum(batches[step.number] for step in measured) / len(measured)
    tokens_per_s = sequences * config.train.seq_length / step_time.mean_s
    per_gpu = tokens_per_s / world.world_size
    tflops = per_gpu * flops_per_token(config.model, config.train.seq_length) / 1e12
    memory = [rank.peak_memory for rank in rank_means]
    return MeasuredBreakdown(
        strategy=strategy_of(config.setup),
        optimizer=config.optimizer.name,
        device=config.cluster.device,
        layout=world.layout,
        steps_measured=len(measured),
        steps_skipped=len(steps) - len(full) + _warm_up(full),
        steps_profiled=len(full) - _warm_up(full) - len(measured),
        step=step_time,
        phases={name: _phase_time(times, step_time.mean_s, in_step=name in IN_STEP) for name, times in phases.items()},
        ranks=tuple(RankTimes(rank=rank, phases=times.phases) for rank, times in enumerate(rank_means)),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        peak_tflops_per_gpu=config.cluster.bf16_tflops,
        mfu=tflops / config.cluster.bf16_tflops,
        load_balance={name: load_balance(phases[name]) for name in _UPDATES if any(phases.get(name, ()))},
        peak_memory_bytes=PeakMemory(min=min(memory), mean=sum(memory) / len(memory), max=max(memory)),
    )


def _phase_time(by_rank: Sequence[float], step_mean: float | None = None, *, in_step: bool = True) -> PhaseTime:
    """Summarises the times of a phase over ranks.

    Args:
        by_rank: each rank's mean time, in seconds.
        step_mean: the mean step time in seconds, of which the phase's share is computed; None if the phase is
            the whole step.
        in_step: see `PhaseTime`.
    """
    times = OverRanks.of(by_rank)
    share = 1.0 if step_mean is None else times.mean_s / step_mean
    return PhaseTime(**vars(times), share=share, in_step=in_step)


def _peak_memory(world: World) -> float:
    """Returns this rank's peak memory so far, in bytes: on CUDA of torch's allocations, otherwise of the
    process."""
    if world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(world.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


MOST_PROFILED_RANKS = 8
"""The largest number of ranks that are all profiled. With more ranks only rank 0 is profiled, because traces
are large."""


class StepProfiler:
    """A profiler of some of this rank's steps, with the breakdown's phases as named ranges.

    Every rank must have a profiler and call it before and after every step.

    Args:
        steps: the first and the last step to profile; None to profile no steps.
    """

    def __init__(self, files: RunFiles, world: World, timer: PhaseTimer, steps: tuple[int, int] | None) -> None:
        self._first, self._last = steps or (0, 0)
        self._world, self._timer = world, timer
        self._path: Path | None = None
        if steps is not None and (world.rank == 0 or world.world_size <= MOST_PROFILED_RANKS):
            self._path = files.rank_profile(world.rank)
        self._running: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Starts the profiler if this is the first step to profile. The call is then collective: all ranks
        wait for each other, because starting a profiler takes long and must not be timed as part of the
        step."""
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

    def after_step(self, step: int, *, final: bool) -> None:
        """Stops the profiler and writes the trace if this is the last step to profile, or the run's last
        step. The call is then collective, as in `before_step`. Does nothing after other steps.

        Args:
            final: True if the run ends after this step.
        """
        if not self._first or step < self._first or step > self._last or not (final or step == self._last):
            return
        if self._running is not None and self._path is not None:
            self._timer.annotate(False)
            self._running.stop()
            try:
                self._path.parent.mkdir(exist_ok=True)
                self._running.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
                logging.getLogger(__name__).warning("%s cannot be written: %s", self._path, error)
            self._running = None
        torch.distributed.barrier()


WINDOW: Final = 20
"""The number of steps whose times are compared at a time."""
LEAST_EXCESS: Final = 0.05
"""The fraction of the step time by which a straggler's own time must exceed that of its peers."""
LIMITS: Final[Mapping[str, float]] = {
    "cpu": 1.5,  # ranks that share cores slow each other down
    "cuda": 1.25,  # every rank has its own device
}
"""The ratio to the peers' time above which a rank is a straggler, by the type of device."""


class StragglerWatch:
    """A detector of ranks that are slower than their peers and hold up the job.

    Every rank must have a detector and call it after every step; rank 0 reports stragglers. Steps take the
    same time on all ranks, so step times do not show which rank is slow. A rank's own time does: data,
    forward and backward, without waits for other ranks (`StepTiming.own_s`). A rank's peers are the other
    ranks of its pipeline stage, which do the same work.

    A rank is a straggler if the ratio of its own time to the median of its peers, as a median over `WINDOW`
    steps, is above `LIMITS`, and if its own time exceeds theirs by more than `LEAST_EXCESS` of the step time.
    On four healthy gloo ranks that shared two cores with other jobs, at most a fifth of a rank's steps took
    1.5 times as long as its peers' steps.
    """

    def __init__(self, world: World, timer: PhaseTimer, journal: Journal) -> None:
        self._world, self._timer, self._journal = world, timer, journal
        self._limit = LIMITS[world.device.type]
        self._own: list[float] = []
        self._step_s = 0.0
        self._warm = False
        """True after the first step, which is ignored because it compiles, allocates and fills caches."""
        self._exchange: tuple[int, float, Callable[[], list[float]]] | None = None
        """The window whose times are being exchanged: its last step, its mean step time in seconds, and a
        function that waits for the times of all ranks; None if no exchange is in progress."""
        self._reported: frozenset[int] = frozenset()
        """The stragglers of the previous window, which have already been reported."""

    def after_step(self, step: int) -> None:
        """Adds the newest step whose times are known, and compares the ranks once in `WINDOW` steps.
        Collective.

        The comparison needs a small all-gather. Its result is read only one step later, so no rank waits for
        it.
        """
        if self._exchange is not None:
            last_step, step_s, receive = self._exchange
            self._exchange = None
            self._judge(last_step, step_s, receive())
        timing = self._timer.newest
        if timing is None or not self._warm:
            self._warm = timing is not None
            return
        self._own.append(timing.own_s)
        self._step_s += timing.step_s / WINDOW
        if len(self._own) == WINDOW:
            self._exchange = step, self._step_s, self._send()
            self._own, self._step_s = [], 0.0

    def _send(self) -> Callable[[], list[float]]:
        """Starts to gather the window's times, and this rank's stage, from all ranks. Returns a function that
        waits for the result."""
        message = torch.tensor([*self._own, self._world.pp_rank], dtype=torch.float64)
        message = message.to(self._world.device, non_blocking=True)
        gathered = message.new_empty(self._world.world_size * len(message))
        torch.distributed.all_gather_into_tensor(gathered, message)
        return self._timer.fetch(gathered)

    def _judge(self, step: int, step_s: float, received: list[float]) -> None:
        """Reports the stragglers of a window, given the gathered times and stages of all ranks."""
        rows = [received[start : start + WINDOW + 1] for start in range(0, len(received), WINDOW + 1)]
        times, stages = [row[:-1] for row in rows], [int(row[-1]) for row in rows]
        slow = find_stragglers(times, stages, step_s=step_s, limit=self._limit)
        # A straggler is reported once, and again only if it recovered in the meantime.
        for rank in slow.keys() - self._reported:
            detail = f"rank {rank} is slow: its data, forward and backward take {slow[rank]:.2g} times its peers' time"
            facts = {"step": step, "rank": rank, "factor": slow[rank]}
            self._journal.incident("straggler", detail=detail, level="warning", **facts)
        self._reported = frozenset(slow)


def find_stragglers(
    own_times: Sequence[Sequence[float]], stages: Sequence[int], *, step_s: float, limit: float
) -> dict[int, float]:
    """Returns the stragglers of one window, each with the median, over steps, of the ratio of its own time to
    its peers' median.

    Args:
        own_times: Each rank's own time in each step, in seconds, as `own_times[rank][step]`.
        stages: Each rank's pipeline stage. A rank without peers in its stage is never a straggler.
        step_s: The mean step time of the window, in seconds.
        limit: The ratio above which a rank is a straggler.
    """
    slow: dict[int, float] = {}
    for rank, times in enumerate(own_times):
        peers = [own_times[other] for other, stage in enumerate(stages) if stage == stages[rank] and other != rank]
        if not peers:
            continue
        peer_medians = [statistics.median(step_times) for step_times in zip(*peers, strict=True)]
        ratio = statistics.median(time / median for time, median in zip(times, peer_medians, strict=True))
        own_s, peers_s = statistics.mean(times), statistics.mean(peer_medians)
        if ratio > limit and own_s - peers_s > LEAST_EXCESS * step_s:
            slow[rank] = ratio
    return slow
