"""canzona's engine for Megatron-LM's `pretrain`."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from canzona_cli.core.api import Engine
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.errors import EnvironmentProblem, Problem, Unsupported, refuse
from canzona_cli.core.megatron import contract
from canzona_cli.core.megatron.optimizer import Overrides
from canzona_cli.core.megatron.parallel import Wrapped


def use_in_megatron_lm(*settings: str) -> None:
    """Makes Megatron-LM's `pretrain`, and any other code that builds models with its `get_model`, train with
    canzona's engine.

    Call this before `pretrain`. Keep the arguments for Megatron's Muon: `--optimizer muon
    --use-distributed-optimizer`, and with tensor parallelism also `--muon-tp-mode duplicated`. This is
    experimental, like `Engine`.

    Args:
        settings: Settings for `Engine`, for example "cluster=h100-80g".

    Raises:
        EnvironmentProblem: `megatron.training` is not installed, or is not the version that canzona expects.
    """
    refuse(contract.verify_loop(), EnvironmentProblem)
    from canzona_cli.core.megatron.seams import replace_seams, stored_keys

    engines: WeakKeyDictionary[torch.nn.Module, tuple[Engine, MegatronOptimizerConfig]] = WeakKeyDictionary()

    def wrap(
        chunks: Sequence[torch.nn.Module],
        ddp_config: DistributedDataParallelConfig,
        config: MegatronOptimizerConfig,
        args: Namespace,
    ) -> list[DistributedDataParallel]:
        # A model may have positions for longer sequences than those that are trained.
        sizes = (f"train.micro_batch_size={args.micro_batch_size}", f"train.seq_length={args.seq_length}")
        engine = Engine(config, *sizes, *settings)
        wrapped = engine.wrap(chunks, ddp_config)
        engines[wrapped[0]] = engine, config
        return wrapped

    def build(config: MegatronOptimizerConfig, chunks: Wrapped, overrides: Overrides | None) -> CanzonaOptimizer:
        if chunks[0] not in engines:
            reason = "it was not wrapped by get_model of megatron.training"
            fix = "build it with a model provider, or use canzona_cli.Engine in your own loop"
            raise Unsupported(Problem(key="model", reason=reason, fix=fix))
        engine, planned_for = engines[chunks[0]]
        if replace(config, timers=None) != replace(planned_for, timers=None):
            reason = "it has changed since the model was wrapped and its updates were planned"
            raise Unsupported(Problem(key="OptimizerConfig", reason=reason, fix="set it with Megatron-LM's arguments"))
        planned_for.timers = config.timers
        optimizer = engine.optimizer(chunks, overrides)
        optimizer.stored = stored_keys
        return optimizer

    replace_seams(wrap, build)
