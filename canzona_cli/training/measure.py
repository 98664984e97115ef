"""The breakdown.json, made of per-rank step timings."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.config.execution import strategy_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.messages import gather
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import StepTiming
from canzona_cli.model.families import flops_per_token
from canzona_cli.run.breakdown import MeasuredBreakdown, PeakMemory, PhaseTime, RankTimes
from canzona_cli.run.phases import IN_STEP
from canzona_cli.run.statistics import OverRanks, by_phase, load_balance, mean_phases

WARM_UP_STEPS = 2
"""The first steps pay for lazy initialisation: allocations, kernels, Megatron's first unoverlapped reduction."""

_UPDATES = ("matrix_update", "adamw_update")
"""Phases whose balance over ranks is told."""


@dataclass(frozen=True, kw_only=True)
class _OwnMeans:
    """One rank's, over the measured steps."""

    step_s: float
    phases: Mapping[str, float]
    peak_memory: float
    """Bytes."""


def gather_breakdown(config: RunConfig, world: World, steps: list[StepTiming]) -> MeasuredBreakdown | None:
    """Collect every rank's mean phase times; the breakdown on rank 0, `None` on the others or with no step to show.

    Collective: every rank must call it. min, mean and max are over ranks, of each rank's mean over measured steps.
    Steps under torch's profiler are left out, unless there are no others.
    """
    skipped = min(WARM_UP_STEPS, max(0, len(steps) - 1))
    first, last = config.run.profile_steps or (0, -1)
    plain = [step for number, step in enumerate(steps, 1) if number > skipped and not first <= number <= last]
    measured = plain or steps[skipped:]
    own = _OwnMeans(
        step_s=sum(s.step_s for s in measured) / max(1, len(measured)),
        phases=mean_phases([step.phases for step in measured]),
        peak_memory=_peak_memory(world),
    )
    everyone = gather(own)
    if world.rank != 0 or not measured:
        return None
    step = _phase_time([rank.step_s for rank in everyone])
    phases = by_phase([rank.phases for rank in everyone])
    tokens_per_s = world.layout.global_batch_size * config.train.seq_length / step.mean_s
    per_gpu = tokens_per_s / world.world_size
    tflops = per_gpu * flops_per_token(config.model, config.train.seq_length) / 1e12
    memory = [rank.peak_memory for rank in everyone]
    return MeasuredBreakdown(
        strategy=strategy_of(config),
        optimizer=config.optimizer.name,
        device=config.cluster.device,
        layout=world.layout,
        steps_measured=len(measured),
        steps_skipped=skipped,
        steps_profiled=len(steps) - skipped - len(measured),
        step=step,
        phases={name: _phase_time(times, step.mean_s, in_step=name in IN_STEP) for name, times in phases.items()},
        ranks=tuple(RankTimes(rank=rank, phases=own.phases) for rank, own in enumerate(everyone)),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        peak_tflops_per_gpu=config.cluster.bf16_tflops,
        mfu=tflops / config.cluster.bf16_tflops,
        load_balance={name: load_balance(phases[name]) for name in _UPDATES if any(phases.get(name, ()))},
        peak_memory_bytes=PeakMemory(min=min(memory), mean=sum(memory) / len(memory), max=max(memory)),
    )


def _phase_time(by_rank: Sequence[float], step_mean: float | None = None, *, in_step: bool = True) -> PhaseTime:
    """A phase over ranks; the step itself without `step_mean`."""
    times = OverRanks.of(by_rank)
    share = 1.0 if step_mean is None else times.mean_s / step_mean
    return PhaseTime(**vars(times), share=share, in_step=in_step)


def _peak_memory(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(world.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
