"""AdamW for everything that is not a matrix.

Megatron's `DistributedOptimizer` on the buffers that hold no matrices, or its plain mixed-precision (or fp32) optimizer
where every rank updates everything.
"""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection

from canzona_cli.megatron.matrix_buffers import TAG
from canzona_cli.megatron.messages import without_pickles
from canzona_cli.megatron.parallel import World

_MATRICES = "canzona"
"""Name under which Megatron groups parameters that AdamW leaves alone."""


def build_adamw(
    chunks: Sequence[DistributedDataParallel], world: World, megatron_config: OptimizerConfig
) -> MegatronOptimizer:
    """AdamW on every parameter of a rank's model chunks that `tag_matrices` did not mark; norms and biases without
    weight decay.

    All ranks get the same parameter groups, if with nothing in them, as resuming from a checkpoint needs. Collective.

    Args:
        megatron_config: `optimizer="adam"`; with `use_distributed_optimizer=True` matrices lie in buffers of their own.
    """
    assert megatron_config.optimizer == "adam"
    overrides = get_standard_config_overrides(megatron_config)
    is_matrix = ParamPredicate(name="canzona_matrix", fn=lambda param: getattr(param, TAG, False))
    overrides[ParamKey(predicate=is_matrix)] = {"optimizer": _MATRICES}
    models = list(chunks)
    with without_pickles():
        groups = _get_param_groups(models, megatron_config, overrides)
    ranks = ProcessGroupCollection.setup_process_groups_for_optimizer(
        world.groups, models, use_gloo_process_groups=False
    )
    for model in models:
        model.overlap_param_gather_with_optimizer_step = False
    optimizer: MegatronOptimizer = _get_megatron_optimizer_based_on_param_groups(
        config=megatron_config,
        model_chunks=models,
        param_groups=[group for group in groups if group.get("optimizer") != _MATRICES],
        per_model_buffers={
            number: [buffer for buffer in model.buffers if not getattr(buffer.params[0], TAG, False)]
            for number, model in enumerate(models)
        },
        model_parallel_group=ranks["mp_group"],
        data_parallel_group=ranks["intra_dp_cp_group"],
        data_parallel_group_idx=ranks["mp_group"].rank(),
        intra_dist_opt_group=ranks["intra_dist_opt_group"],
        pg_collection=world.groups,
    )
    return optimizer
