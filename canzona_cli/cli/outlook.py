"""The simulated speed, duration and checkpoints of a run."""

from dataclasses import dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import checkpoint_bytes
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.setup import Layout


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected throughput, duration and checkpoint sizes of a run that is never interrupted."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """The model FLOP utilisation, relative to the profile's bf16 peak, as runs measure it."""
    training_s: float
    """The seconds of all steps, excluding start-up, saves and validation. Steps of a ramp-up count by their sequences,
    as if a small batch took as long for each as the full one."""
    gpu_hours: float
    """The hours of training, added up over all GPUs."""
    checkpoint_bytes: int
    """The bytes of one checkpoint."""
    checkpoints_kept: int
    """The largest possible number of checkpoints on disk at the end of the run."""
    host_bytes: int
    """The mean host memory per node, in bytes, that holds the ranks' copies of state for saves, from the first
    save on."""
    save_s: float | None
    """The seconds in which every machine writes its part of a checkpoint, if the file system serves all machines at
    once; None if the profile does not have the measured rate."""


def outlook(config: RunConfig, layout: Layout, iteration_s: float) -> Outlook:
    """Computes the outlook of a resolved run whose steps take `iteration_s` each."""
    setup, train, checkpoint = config.setup, config.train, config.checkpoint
    tokens_per_s = layout.global_batch_size * train.seq_length / iteration_s
    per_gpu = tokens_per_s / layout.world_size
    training_s = train.sequences(layout.global_batch_size, 1, train.steps) / layout.global_batch_size * iteration_s
    saved_bytes = checkpoint_bytes(setup)
    rate = setup.cluster.checkpoint_gb_per_s
    machine_bytes = saved_bytes / (setup.cluster.nodes or -(-layout.world_size // setup.cluster.gpus_per_node))
    return Outlook(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops_per_token(setup.model, train.seq_length) / (setup.cluster.bf16_tflops * 1e12),
        training_s=training_s,
        gpu_hours=layout.world_size * training_s / 3600,
        checkpoint_bytes=saved_bytes,
        checkpoints_kept=checkpoint.keep + (train.steps // checkpoint.keep_every if checkpoint.keep_every else 0),
        host_bytes=round(machine_bytes),
        save_s=None if rate is None else machine_bytes / rate / 1e9,
    )
