"""The learning-rate schedule's nulls."""

from dataclasses import replace

from canzona_cli.config.schema import ScheduleConfig

WARMUP_SHARE = 20
"""A twentieth of the decay is warm-up ..."""
WARMUP_CEILING = 2000
"""... up to this many steps, what published runs of these sizes use."""
WSD_DECAY_SHARE = 10


def complete(schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
    """`schedule` with its nulls chosen for a run of `steps` steps."""
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else steps
    warmup_steps = schedule.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(WARMUP_CEILING, decay_steps // WARMUP_SHARE)
    wsd_decay_steps = schedule.wsd_decay_steps
    if schedule.decay == "wsd" and wsd_decay_steps is None:
        wsd_decay_steps = max(1, (decay_steps - warmup_steps) // WSD_DECAY_SHARE)
    return replace(schedule, decay_steps=decay_steps, warmup_steps=warmup_steps, wsd_decay_steps=wsd_decay_steps)
