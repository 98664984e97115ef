"""From per-rank step timings to breakdown.json."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import StepTiming
from canzona_cli.model.qwen3 import flops_per_token
from canzona_cli.run.breakdown import MeasuredBreakdown, PeakMemory, PhaseTime, RankTimes
from canzona_cli.run.phases import IN_STEP

WARM_UP_STEPS = 2
"""The first steps pay for lazy initialisation: allocations, kernels, Megatron's first unoverlapped reduction."""


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
        phases=_mean_phases(measured),
        peak_memory=_peak_memory(world),
    )
    everyone = [own] * world.world_size
    torch.distributed.all_gather_object(everyone, own)
    if world.rank != 0 or not measured:
        return None
    step = _phase_time([rank.step_s for rank in everyone])
    by_rank = [rank.phases for rank in everyone]
    names = dict.fromkeys(name for phases in by_rank for name in phases)
    tokens_per_s = world.layout.global_batch_size * config.train.seq_length / step.mean_s
    per_gpu = tokens_per_s / world.world_size
    tflops = per_gpu * flops_per_token(config.model, config.train.seq_length) / 1e12
    memory = [rank.peak_memory for rank in everyone]
    return MeasuredBreakdown(
        strategy=config.engine.strategy if config.optimizer.name != "adamw" else "adamw",
        optimizer=config.optimizer.name,
        device=config.cluster.device,
        layout=world.layout,
        steps_measured=len(measured),
        steps_skipped=skipped,
        steps_profiled=len(steps) - skipped - len(measured),
        step=step,
        phases={
            name: _phase_time([phases.get(name, 0.0) for phases in by_rank], step.mean_s, in_step=name in IN_STEP)
            for name in names
        },
        ranks=tuple(RankTimes(rank=rank, phases=phases) for rank, phases in enumerate(by_rank)),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        model_tflops_per_gpu=tflops,
        peak_tflops_per_gpu=config.cluster.bf16_tflops,
        mfu=tflops / config.cluster.bf16_tflops,
        load_balance=_load_balance(by_rank),
        peak_memory_bytes=PeakMemory(min=min(memory), mean=sum(memory) / len(memory), max=max(memory)),
    )


def _mean_phases(steps: list[StepTiming]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step.phases)
    return {name: sum(step.phases.get(name, 0.0) for step in steps) / len(steps) for name in names}


def _phase_time(by_rank: Sequence[float], step_mean: float | None = None, *, in_step: bool = True) -> PhaseTime:
    """A phase over ranks; the step itself without `step_mean`."""
    mean = sum(by_rank) / len(by_rank)
    share = 1.0 if step_mean is None else mean / step_mean
    return PhaseTime(min_s=min(by_rank), mean_s=mean, max_s=max(by_rank), share=share, in_step=in_step)


def _load_balance(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """max/mean over ranks of each update's time; 1.0 is perfect."""
    balance = {}
    for name in ("matrix_update", "adamw_update"):
        times = [phases.get(name, 0.0) for phases in by_rank]
        if any(times):
            balance[name] = max(times) / (sum(times) / len(times))
    return balance


def _peak_memory(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(world.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
