"""Optimizers that Megatron runs inside its own, made by themselves for measuring: its Muon, its Adam."""

import torch
from megatron.core.optimizer import Adam
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from canzona_cli.config.schema import MuonConfig, OptimizerBase, Precision


def megatron_muon(
    params: list[torch.nn.Parameter], settings: MuonConfig, precision: Precision
) -> torch.optim.Optimizer:
    """Muon as strategies sc and layerwise execute it on whole fp32 masters."""
    made: torch.optim.Optimizer = TensorParallelMuon(
        params,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fp32_matmul_prec="medium" if precision == "bf16" else "highest",
        coefficient_type=settings.coefficients,
        num_ns_steps=settings.ns_steps,
        scale_mode=settings.scale_mode,
        extra_scale_factor=settings.scale_factor,
        tp_mode="duplicated",
    )
    return made


def megatron_adam(params: list[torch.nn.Parameter], settings: OptimizerBase) -> torch.optim.Optimizer:
    """AdamW as `DistributedOptimizer` executes it on shards of masters: Transformer Engine's where it is installed."""
    made: torch.optim.Optimizer = Adam(
        params,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    return made
