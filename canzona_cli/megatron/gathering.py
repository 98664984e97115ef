"""Parameter gathering that is still in flight when nobody's next forward pass would wait for it."""

from megatron.core.distributed import DistributedDataParallel


def finish_gathering(model: DistributedDataParallel) -> None:
    """Wait for what the last optimizer step gathers, as the next forward pass would, and leave nothing for it to do."""
    if not model.ddp_config.overlap_param_gather:
        return  # the step itself has waited
    for group in reversed(model.bucket_groups):
        group.finish_param_sync(skip_next_bucket_dispatch=True)
