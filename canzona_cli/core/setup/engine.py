"""The settings of the engine, checkpoints and run directory; the complete configuration; and the mesh and
layout of a run."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from canzona_cli.core.fields import (
    CURVE,
    NOTHING,
    PLAN,
    SPREAD,
    Affects,
    Example,
    Positive,
    Precision,
    Range,
)

Strategy = Literal["canzona", "paper", "asc", "layerwise", "sc"]
Splitting = Literal["fused", "qkv", "split", "per_head"]
Mode = Literal["hosted", "shared"]
"""The ways to update a matrix: as a whole on its host, or jointly by the TP group of its owner."""
Reduction = Literal["reduce", "ring"]
"""The ways to reduce a bucket's gradients to their owners: one reduction per owner, or a reduce-scatter in
equal parts, which are then sent on to their owners."""
Gathering = Literal["broadcast", "ring"]
"""The ways to gather a bucket's weights: one broadcast per owner, or an all-gather of equal parts, to which
the owners have sent their ranges."""

MuonTpMode = Literal["duplicated", "distributed", "layer_sharded"]
"""The ways in which Megatron's Muon divides exact updates over TP ranks: every rank gathers and updates the whole
matrix; every rank keeps its fragment, and a square is all-reduced in every Newton-Schulz step; or one TP rank
updates the whole matrix for all. Megatron-core 0.19 has the first two, Megatron-LM's main branch all three."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings that decide which ranks update which matrices, and how."""

    AFFECTS: ClassVar[Affects] = SPREAD | PLAN

    strategy: Annotated[
        Strategy,
        "canzona, paper (the engine of arXiv 2602.06079) and asc execute a plan. layerwise is "
        "Megatron's layer-wise optimizer. sc: every rank updates every matrix, with Megatron's "
        "own Muon or, for other optimizers, canzona's engine. Has no effect with optimizer=adamw.",
    ]
    splitting: Annotated[
        Splitting,
        "Splitting of weights into matrices. fused: none; qkv: q, k and v (the finest for layerwise, and"
        " for sc with Muon); split: gate and up too; per_head: also each head of q, k and v.",
    ] = "split"
    alpha: Annotated[
        float,
        Range(at_least=0, at_most=1),
        "Quantity that paper balances over data-parallel ranks: 0: communication, 1: compute, in between: both.",
    ] = 1.0
    mode: Annotated[
        Literal["auto"] | Mode,
        "Ranks that update a matrix: hosted (only its host), shared (all TP ranks of its owner, if optimizer"
        " and matrix allow it), or auto (chosen for each matrix; on GPUs hosted unless cluster.verified has shared)."
        " paper and asc always use hosted.",
    ] = "auto"
    c_max_mib: Annotated[
        Positive | None, "Size limit of one rank's fused exchange; null: chosen automatically.", Example("64")
    ] = None
    reduction: Annotated[
        Reduction | None,
        "How gradients reach their owners, and weights return: reduce (a reduction and a broadcast per owner)"
        " or ring (a reduce-scatter and an all-gather of equal parts, exchanged with the owners). null: the"
        " faster one for each bucket.",
    ] = None
    plan: Annotated[
        str | None,
        "The plan file to execute; null: the newest file in ./plans that fits this run, or else a new plan.",
        NOTHING,
    ] = None
    exchange_dtype: Annotated[
        Precision,
        "Precision of gradients in messages between TP ranks; bf16 rounds them and halves the messages.",
        CURVE | PLAN,
    ] = "fp32"
    muon_tp_mode: Annotated[
        MuonTpMode,
        "How TP ranks divide the updates of Megatron's own Muon (layerwise, sc). duplicated: every rank updates the"
        " whole matrix; distributed: every rank its fragment, with an all-reduce in every Newton-Schulz step;"
        " layer_sharded: one rank for all. layer_sharded can only be simulated, because it is in Megatron-LM's main"
        " branch.",
        SPREAD,
    ] = "duplicated"

    @property
    def gradient_bytes(self) -> int:
        """The number of bytes per gradient element in a message between TP ranks."""
        return 2 if self.exchange_dtype == "bf16" else 4
