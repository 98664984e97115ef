"""The settings of a run by section: model, parallelism, training, schedule, engine, and a user's custom optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from canzona_cli.core.fields import (
    CURVE,
    LAYOUT,
    MODEL,
    NOTHING,
    OPTIMIZER,
    PLAN,
    SPREAD,
    Affects,
    Count,
    CountOrZero,
    Epsilon,
    Example,
    Fp8Recipe,
    Positive,
    Precision,
    Range,
    Ranks,
    Share,
    Side,
)
from canzona_cli.core.optimizers.facts import OptimizerBase, known_optimizers
from canzona_cli.core.setup.cluster import HashedOnce

if TYPE_CHECKING:
    UpdateName = str
    OptimizerName = str
    OptimizerConfig = OptimizerBase
else:
    UpdateName = Literal[tuple(known_optimizers())]
    OptimizerName = UpdateName | Literal["custom"]


Layers = Annotated[int, Range(at_least=1, at_most=2048)]
Heads = Annotated[int, Range(at_least=1, at_most=2048)]
Sequences = Annotated[int, Range(at_least=1, at_most=1 << 16)]
"""A number of sequences in a step, limited because simulations iterate over the micro-batches."""
Recompute = Literal["none", "selective", "full"]
NonFinite = Literal["stop", "skip"]
Divergence = Literal["stop", "warn"]
DecayStyle = Literal["cosine", "wsd", "linear", "constant"]
Experts = Annotated[int, Range(at_least=0, at_most=1024)]
Dispatcher = Literal["allgather", "alltoall", "flex"]
BalancingLoss = Literal["none", "sequence", "global"]

WARMUP_SHARE = 20
"""The divisor that gives the default warm-up: a twentieth of the decay steps."""
WARMUP_CEILING = 2000
"""The maximum default number of warm-up steps, as in published runs of these model sizes."""
WSD_DECAY_SHARE = 10


PARTS_OF_LLAMA: Final[Mapping[str, bool | int]] = MappingProxyType(
    {"gated": True, "layernorm": False, "biases": False, "positions": 0}
)
"""The settings of a model that has no part of GPT-2 (`ModelConfig.parts_of_gpt2`)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(HashedOnce):
    """A decoder-only transformer with RMSNorm, SwiGLU, GQA, RoPE and no bias, like Qwen3 and Llama, dense or with
    experts, or with parts of GPT-2 instead."""

    AFFECTS: ClassVar[Affects] = MODEL | PLAN
    __hash__ = HashedOnce.__hash__

    name: Annotated[str, "Name of the model, for reports.", NOTHING]
    num_layers: Annotated[Layers, "Transformer layers."]
    hidden_size: Annotated[Side, "Width of the residual stream."]
    ffn_hidden_size: Annotated[Side, "Width of the feed-forward layers, or of each expert."]
    num_attention_heads: Annotated[Heads, "Query heads."]
    num_query_groups: Annotated[Heads, "Key/value heads (GQA groups)."]
    head_dim: Annotated[Side, "Width of one attention head."]
    vocab_size: Annotated[Side, "Rows of the embedding."]
    tied_embeddings: Annotated[bool, "Share one weight between embedding and output layer."]
    rope_base: Annotated[float, Range(at_least=1, at_most=1e12), "Base of the rotary embedding.", CURVE] = 1_000_000.0
    rope_scaling: Annotated[
        Annotated[float, Range(at_least=1, at_most=1e6)] | None,
        "Factor by which Llama 3.1's rotary scaling stretches a context of 8,192 tokens; null: none.",
        CURVE,
    ] = None
    norm_eps: Annotated[Epsilon, "Epsilon of the norms.", CURVE] = 1e-6
    qk_norm: Annotated[bool, "Normalise queries and keys per head: true for Qwen3, false for Llama.", MODEL] = True
    num_experts: Annotated[Experts, "Experts in a layer, each a feed-forward network; 0: a dense model."] = 0
    moe_layer_freq: Annotated[
        tuple[Annotated[int, Range(at_least=0, at_most=1)], ...] | Annotated[int, Range(at_least=1, at_most=2048)],
        "Layers with experts: every n-th, beginning with the first, or a list of a 1 or 0 for each layer.",
        Example("[0,1,1,1]"),
    ] = 1
    dense_ffn_hidden_size: Annotated[
        Annotated[int, Range(at_least=0, at_most=1 << 24)],
        "Width of the feed-forward networks in layers without experts; 0: that of an expert.",
    ] = 0
    experts_per_token: Annotated[int, Range(at_least=2, at_most=1024), "Experts that process each token.", CURVE] = 2
    shared_ffn_hidden_size: Annotated[
        Annotated[int, Range(at_least=0, at_most=1 << 24)],
        "Width of a feed-forward network beside the experts that processes every token; 0: none.",
    ] = 0
    balancing_loss: Annotated[
        BalancingLoss,
        "Loss that spreads tokens evenly over experts, per sequence or global batch; none: no such loss.",
        CURVE,
    ] = "sequence"
    balancing_weight: Annotated[Share, "Weight of `balancing_loss`.", CURVE] = 1e-3
    gated: Annotated[bool, "Gate the feed-forward layers (SwiGLU); false: GELU, and one matrix fewer per layer."] = True
    layernorm: Annotated[bool, "LayerNorm in place of RMSNorm."] = False
    biases: Annotated[bool, "Biases of all linear layers in attention and feed-forward networks."] = False
    positions: Annotated[
        Annotated[int, Range(at_least=0, at_most=1 << 24)], "Number of learned positions; 0: a rotary embedding."
    ] = 0
    init_std: Annotated[
        Positive,
        "Standard deviation of the initial weights; residual projections use `init_std / sqrt(2 * num_layers)`.",
        NOTHING,
    ] = 0.02

    @property
    def dense_width(self) -> int:
        """The width of the feed-forward networks in layers without experts."""
        return self.dense_ffn_hidden_size or self.ffn_hidden_size

    @property
    def megatron_layer_freq(self) -> int | list[int]:
        """`moe_layer_freq` as Megatron's arguments have it."""
        return self.moe_layer_freq if isinstance(self.moe_layer_freq, int) else [*self.moe_layer_freq]

    @property
    def parts_of_gpt2(self) -> Mapping[str, bool | int]:
        """The settings whose values put a part of GPT-2 in the place of one of Llama."""
        return {name: value for name in PARTS_OF_LLAMA if (value := getattr(self, name)) != PARTS_OF_LLAMA[name]}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The settings that distribute a model over ranks. They determine dp: `gpus / (tp * pp * cp)`."""

    AFFECTS: ClassVar[Affects] = LAYOUT | PLAN

    tp: Annotated[Ranks | None, "Tensor-parallel ranks; null: chosen."] = None
    pp: Annotated[Ranks | None, "Pipeline stages; null: chosen."] = None
    vpp: Annotated[
        Count | None,
        "Model chunks of each pipeline stage (interleaved 1F1B). With n chunks, the idle time at both"
        " ends of a step is divided by n, and the number of messages multiplied by n. null: chosen.",
    ] = None
    cp: Annotated[Ranks | None, "Context-parallel ranks; null: chosen."] = None
    ep: Annotated[
        Ranks | None,
        "Expert-parallel ranks: the experts of a layer are divided among this many ranks of a pipeline "
        "stage. With more than 1, tensor parallelism does not cut experts. null: chosen on GPUs, 1 on CPUs.",
    ] = None
    dispatcher: Annotated[
        Dispatcher | None,
        "How tokens reach experts on other ranks. alltoall: every rank gets the tokens for its experts; allgather:"
        " every rank gets all tokens; flex: like alltoall, with DeepEP's kernels, on GPUs only. null: alltoall.",
        NOTHING,
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        "Shard norms' activations over TP ranks. null: true if the model has experts or layers are built with"
        " Transformer Engine, tp > 1, and tp * cp divides seq_length.",
        NOTHING,
    ] = None
    overlap_grad_reduce: Annotated[bool, "Reduce a bucket's gradients during the backward pass.", PLAN] = True
    overlap_param_gather: Annotated[
        bool, "Gather a bucket's new weights during the forward pass; needs overlap_grad_reduce.", NOTHING
    ] = True
    bucket_elements: Annotated[
        Count | None,
        "Elements in one gradient bucket; null: Megatron's max(40M, 1M * dp * cp), or a multiple that the planner finds"
        " faster.",
        PLAN,
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings for a run's length, batch, precision, guards, validation and samples."""

    steps: Annotated[Count, "Optimizer steps of the run.", NOTHING]
    seq_length: Annotated[Side, "Tokens in a sequence.", CURVE | PLAN]
    batch_tokens: Annotated[
        Count, "Target number of tokens per optimizer step if `global_batch_size` is null.", NOTHING
    ]
    global_batch_size: Annotated[
        Sequences | None,
        "Sequences per optimizer step over all ranks; null: the number closest to `batch_tokens` that the layout "
        "can divide.",
        CURVE,
    ] = None
    batch_rampup: Annotated[
        tuple[tuple[Sequences, Count], ...],
        "Smaller batches at the beginning of the run, each with the number of steps that have it; then the batch is"
        " `global_batch_size`. The learning rate follows steps, whatever their batch.",
        CURVE,
        Example("[[8,100],[16,100]]"),
    ] = ()
    micro_batch_size: Annotated[
        Sequences | None, "Sequences in one forward pass on one data-parallel rank; null: chosen.", PLAN
    ] = None
    recompute: Annotated[
        Recompute | None,
        "Activation recomputation: none, selective (core attention), full (entire layers); null: chosen.",
        SPREAD | PLAN,
    ] = None
    precision: Annotated[Precision, "bf16 weights with fp32 masters, or all in fp32.", CURVE | PLAN] = "bf16"
    fp8: Annotated[
        Literal["none"] | Fp8Recipe,
        "Run the layers' matmuls in FP8, by Transformer Engine with this scaling recipe. Weights, gradients, masters,"
        " optimizers, core attention and the output layer stay as they are, and MFU stays relative to the bf16 peak.",
        CURVE | PLAN,
    ] = "none"
    grad_reduce_dtype: Annotated[Precision, "Precision of gradient sums over DP ranks.", CURVE | PLAN] = "fp32"
    ema: Annotated[
        Share,
        "Decay of an exponential moving average of the weights, in fp32, beside the masters: each step,"
        " average = ema * average + (1 - ema) * weight. It is validated beside the weights, saved, and exported by"
        " `canzona checkpoint export --ema`; training does not depend on it. 0: no average.",
        PLAN,
    ] = 0.0
    non_finite: Annotated[
        NonFinite,
        "On NaN or infinite gradients: stop all ranks before any weight changes, or skip and count the update.",
        NOTHING,
    ] = "stop"
    divergence: Annotated[
        Divergence,
        "If training diverges: stop and name the last checkpoint before the divergence, or warn and fail "
        "only if the run has still diverged after the last step. Training has diverged if the loss stays "
        "more than half-way from its best value back to its initial value or that of a uniform guess, whichever is "
        "higher, or if validation is clearly worse than before training, twice in a row or at the end.",
        NOTHING,
    ] = "stop"
    seed: Annotated[
        int, Range(at_least=0, below=2**31), "Seed of the initial weights and the order of the data.", CURVE
    ] = 1234
    eval_interval: Annotated[
        CountOrZero,
        "Steps between validations, which also run before the first and after the last step; 0: never.",
        NOTHING,
    ] = 100
    eval_sequences: Annotated[
        Count,
        "Sequences per validation, from each set of a blend: the same ones in every run of the data, at most all that"
        " are held out.",
        NOTHING,
    ] = 1024

    @property
    def weight_bytes(self) -> int:
        """The number of bytes per element of a weight."""
        return 2 if self.precision == "bf16" else 4

    @property
    def gradient_bytes(self) -> int:
        """The number of bytes per element of the gradient buffer."""
        return 4 if self.grad_reduce_dtype == "fp32" else self.weight_bytes

    def batch_at(self, batch: int, step: int) -> int:
        """Returns the number of sequences in a step; `batch` is that of the steps after `batch_rampup`."""
        return self.sequences(batch, step, step)

    def sequences(self, batch: int, first: int, last: int) -> int:
        """Returns the number of sequences in the steps from `first` to `last`.

        Args:
            batch: the number of sequences in a step after `batch_rampup`.
        """
        total = done = 0
        for size, steps in (*self.batch_rampup, (batch, last)):
            total += size * max(0, min(last, done + steps) - max(first - 1, done))
            done += steps
        return total


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The settings of the learning-rate schedule: a linear warm-up, then a decay."""

    AFFECTS: ClassVar[Affects] = CURVE

    decay: Annotated[
        DecayStyle,
        "Shape of the decay after the warm-up, to the minimum at `decay_steps`. wsd (warm-up, stable, decay): the peak"
        " until the last `wsd_decay_steps`, then linear. constant: no decay.",
    ] = "cosine"
    warmup_steps: Annotated[
        CountOrZero | None, "Steps of linear warm-up; null: a twentieth of `decay_steps`, at most 2000."
    ] = None
    decay_steps: Annotated[Count | None, "Step at which the rate reaches its minimum; null: `train.steps`."] = None
    wsd_decay_steps: Annotated[
        Count | None, "For wsd: steps of the decay at the end; null: a tenth of the steps after the warm-up."
    ] = None

    def complete(self, steps: int) -> "ScheduleConfig":
        """Returns the schedule with its nulls resolved for a run of `steps` steps."""
        decay_steps = self.decay_steps if self.decay_steps is not None else steps
        warmup_steps = self.warmup_steps
        if warmup_steps is None:
            warmup_steps = min(WARMUP_CEILING, decay_steps // WARMUP_SHARE)
        wsd_decay_steps = self.wsd_decay_steps
        if self.decay == "wsd" and wsd_decay_steps is None:
            wsd_decay_steps = max(1, (decay_steps - warmup_steps) // WSD_DECAY_SHARE)
        return replace(self, decay_steps=decay_steps, warmup_steps=warmup_steps, wsd_decay_steps=wsd_decay_steps)


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


@dataclass(frozen=True, kw_only=True)
class CustomConfig(OptimizerBase):
    """A torch optimizer that updates whole matrices. `source` names its class: a user's, or one in
    `canzona_cli/core/optimizers`."""

    name: Annotated[Literal["custom"], "The optimizer.", OPTIMIZER | PLAN]
    PLAUSIBLE_LR: ClassVar[float] = 10.0
    source: Annotated[
        str,
        "FILE.py:Class, or module:Class of an installed package listed in `allow`. "
        "The class is called with the matrices, lr, weight_decay and `options`.",
        Example("my_optimizer.py:MyOptimizer"),
        OPTIMIZER | CURVE,
    ]
    allow: Annotated[
        tuple[str, ...],
        "Packages whose classes `source` may name. Files need no entry.",
        Example("[my_package]"),
        NOTHING,
    ] = ()
    options: Annotated[
        dict[str, bool | int | float | str | tuple[bool | int | float | str, ...]],
        "Additional keyword arguments of the class: plain values and lists of plain values.",
        Example("'{momentum:0.9}'"),
        CURVE,
    ] = field(default_factory=dict, hash=False)
    cost_like: Annotated[
        UpdateName,
        "Optimizer whose update costs and state sizes plans assume for the class. Update times that"
        " cluster.measured_updates lists for custom take precedence.",
        SPREAD | PLAN,
    ] = "muon"

    @property
    def built_in(self) -> bool:
        """True if the class is part of canzona, so that a recipe may name it without the user's consent."""
        return self.source.startswith("canzona_cli.core.optimizers.")


OPTIMIZERS: Mapping[str, type[OptimizerBase]] = {
    **{name: facts.settings for name, facts in known_optimizers().items()},
    "custom": CustomConfig,
}
if not TYPE_CHECKING:
    OptimizerConfig = reduce(or_, OPTIMIZERS.values())
