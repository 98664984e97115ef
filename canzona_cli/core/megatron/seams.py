"""The two functions of Megatron-LM's training that canzona replaces: the function that wraps the model, and
the function that builds the optimizer. Both can be replaced because Megatron-LM looks them up as globals of
`megatron.training.training` at each call."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training import training
from megatron.training.checkpointing import (
    _NON_PERSISTENT_CKPT_SUBDIR,
    _get_non_persistent_iteration,
    get_checkpoint_name,
    get_load_checkpoint_path_by_args,
    get_loaded_iteration,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from canzona_cli.core.errors import Problem, Unsupported, refuse
from canzona_cli.core.megatron.limits import Limit, problems
from canzona_cli.core.megatron.optimizer import Overrides
from canzona_cli.core.megatron.parallel import Wrapped

Wrap = Callable[
    [Sequence[torch.nn.Module], DistributedDataParallelConfig, MegatronOptimizerConfig, Namespace],
    list[DistributedDataParallel],
]
"""A function that wraps model chunks. Its arguments are the chunks, Megatron's configurations of data
parallelism and of the optimizer, and Megatron-LM's command-line arguments."""
Build = Callable[
    [MegatronOptimizerConfig, Wrapped, Overrides | None],
    MegatronOptimizer,
]
"""A function that builds the optimizer from Megatron's configuration, the wrapped chunks, and overrides for
parameter groups."""

LOOP: Final = (
    Limit("save_wgrads_interval", None, "no rank has the reduced gradients of all matrices"),
    Limit("ckpt_convert_format", None, "matrices can only be saved in the torch_dist format"),
    Limit("perform_rl_step", False, "masters and state of matrices cannot be moved to the host"),
    Limit("dump_param_to_param_group_map", None, "matrices are not in Megatron's parameter groups"),
)
"""The arguments of Megatron-LM for which the engine supports only one value."""


def replace_seams(wrap: Wrap, build: Build) -> None:
    """Replaces the two functions of `megatron.training.training`: `wrap` then wraps models, and `build`
    builds optimizers. The replacement for wrapping raises Unsupported if Megatron-LM's arguments need a
    feature that the engine lacks."""

    def wrap_model_chunks_with_ddp(
        model_chunks: Sequence[torch.nn.Module],
        config: object,
        ddp_config: DistributedDataParallelConfig,
        *,
        DP: type = DistributedDataParallel,
        **_: object,
    ) -> list[DistributedDataParallel]:
        args = training.get_args()
        unsupported = [*_loop_problems(args)]
        if DP is not DistributedDataParallel:
            reason = "canzona assigns ranges of buckets to owners, which needs Megatron's DistributedDataParallel"
            unsupported.append(Problem(key="model", value=DP.__name__, reason=reason, fix="turn FSDP off"))
        refuse(unsupported, Unsupported)
        ddp_config.use_distributed_optimizer = True  # as Megatron sets it for its layer-wise optimizer
        args.dist_ckpt_optim_fully_reshardable = True  # the other format ties AdamW's state to the layout
        settings, _ = training.get_megatron_optimizer_config(args)
        return wrap(model_chunks, ddp_config, settings, args)

    def get_megatron_optimizer(
        config: MegatronOptimizerConfig,
        model_chunks: Wrapped,
        config_overrides: Overrides | None = None,
        **_: object,
    ) -> MegatronOptimizer:
        return build(config, model_chunks, config_overrides)

    training.wrap_model_chunks_with_ddp = wrap_model_chunks_with_ddp
    training.get_megatron_optimizer = get_megatron_optimizer


def stored_keys() -> Collection[str]:
    """Returns the keys of the tensors in the checkpoint that Megatron-LM is to load."""
    args = training.get_args()
    folder = get_load_checkpoint_path_by_args(args)
    if args.non_persistent_ckpt_type is not None:
        root = args.non_persistent_global_ckpt_dir or f"{args.load}/{_NON_PERSISTENT_CKPT_SUBDIR}"
        iteration = _get_non_persistent_iteration(root, args)
        if iteration >= get_loaded_iteration():  # as Megatron-LM chooses; it has already seen the persistent one
            folder = get_checkpoint_name(root, iteration, return_base_dir=True)
    reader = FileSystemReader(folder)
    return reader.read_metadata().state_dict_metadata.keys()


def _loop_problems(args: Namespace) -> Iterator[Problem]:
    """Yields a problem for each argument that makes Megatron-LM's loop use a feature that the engine
    lacks."""
    yield from problems(args, LOOP)
    if args.non_persistent_ckpt_type == "local":
        reason = "its files belong to ranks, and have never been read back into the engine: their library needs GPUs"
        fix = "use --non-persistent-ckpt-type global"
        yield Problem(key="non_persistent_ckpt_type", value="local", reason=reason, fix=fix)
    if not args.use_layer_wise_distributed_optimizer:
        reason = "without it the loop expects every rank to have the complete optimizer"
        fix = "add --use-distributed-optimizer"
        yield Problem(key="use_distributed_optimizer", value=False, reason=reason, fix=fix)
    loads = args.load is not None and not (args.no_load_optim or args.finetune)
    if args.ckpt_format != "torch_dist" and (args.save is not None or loads):
        reason = "this format cannot store the optimizer state of matrices that hosts update"
        yield Problem(key="ckpt_format", value=args.ckpt_format, reason=reason, fix="use --ckpt-format torch_dist")
