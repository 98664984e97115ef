"""What a step's time comes to over a whole run: speed, days, and room on the disk."""

from dataclasses import dataclass

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.families import flops_per_token
from canzona_cli.planner.memory import checkpoint_bytes


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Of a run without pauses."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs over the profile's bf16 peak, as runs measure it."""
    training_s: float
    """All steps; without start, saves and validation."""
    checkpoint_bytes: int
    """Of one checkpoint."""
    checkpoints_kept: int
    """At the end, where the run is long enough for all that are to be kept."""
    host_bytes: int
    """Of each machine's own memory that saves keep from the first one on, on average: copies of what its ranks save."""


def outlook(config: RunConfig, layout: Layout, iteration_s: float) -> Outlook:
    """Of a resolved run whose step takes `iteration_s`."""
    train, keep = config.train, config.checkpoint
    tokens_per_s = layout.global_batch_size * train.seq_length / iteration_s
    per_gpu, saved = tokens_per_s / layout.world_size, checkpoint_bytes(config)
    machines = config.cluster.nodes or -(-layout.world_size // config.cluster.gpus_per_node)
    return Outlook(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops_per_token(config.model, train.seq_length) / (config.cluster.bf16_tflops * 1e12),
        training_s=train.steps * iteration_s,
        checkpoint_bytes=saved,
        checkpoints_kept=keep.keep + (train.steps // keep.keep_every if keep.keep_every else 0),
        host_bytes=round(saved / machines),
    )
