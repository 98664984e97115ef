"""The settings of training: model, data, batch, length and learning-rate schedule,
and how it is spread over ranks."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from canzona_cli.fields import (
    CURVE,
    LAYOUT,
    MODEL,
    NOTHING,
    PLAN,
    SPREAD,
    Count,
    CountOrZero,
    Epsilon,
    Example,
    Positive,
    Precision,
    Range,
    Ranks,
    Share,
    Side,
)

Layers = Annotated[int, Range(at_least=1, at_most=2048)]
Heads = Annotated[int, Range(at_least=1, at_most=2048)]
Sequences = Annotated[int, Range(at_least=1, at_most=1 << 16)]
"""The sequences of one step; simulations walk through its micro-batches."""
Recompute = Literal["none", "selective", "full"]
NonFinite = Literal["stop", "skip"]
Divergence = Literal["stop", "warn"]
LossSpike = Literal["ignore", "warn", "stop"]
DecayStyle = Literal["cosine", "wsd", "linear", "constant"]

WARMUP_SHARE = 20
"""A twentieth of the decay is warm-up ..."""
WARMUP_CEILING = 2000
"""... up to this many steps, which is what published runs of these sizes use."""
WSD_DECAY_SHARE = 10


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Qwen3 family (RMSNorm, QK-norm, SwiGLU, GQA, RoPE, no bias)."""

    name: Annotated[str, "Name of the model, for reports.", NOTHING]
    num_layers: Annotated[Layers, "Transformer layers.", MODEL | PLAN]
    hidden_size: Annotated[Side, "Width of the residual stream.", MODEL | PLAN]
    ffn_hidden_size: Annotated[Side, "Width of the feed-forward layers.", MODEL | PLAN]
    num_attention_heads: Annotated[Heads, "Query heads.", MODEL | PLAN]
    num_query_groups: Annotated[Heads, "Key/value heads (GQA groups).", MODEL | PLAN]
    head_dim: Annotated[Side, "Width of one attention head.", MODEL | PLAN]
    vocab_size: Annotated[Side, "Rows of the embedding.", MODEL | PLAN]
    tied_embeddings: Annotated[bool, "Whether the output layer shares the embedding's weight.", MODEL | PLAN]
    rope_base: Annotated[float, Range(at_least=1, at_most=1e12), "Base of the rotary embedding.", CURVE] = 1_000_000.0
    norm_eps: Annotated[Epsilon, "Epsilon of the RMSNorms.", CURVE] = 1e-6
    qk_norm: Annotated[bool, "Normalise queries and keys, head by head.", MODEL] = True
    init_std: Annotated[
        Positive,
        "Standard deviation of the initial weights; residual projections use `init_std / sqrt(2 * num_layers)`.",
        NOTHING,
    ] = 0.02


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The settings that spread one model over ranks. dp is what is left: `gpus / (tp * pp * cp)`."""

    tp: Annotated[Ranks | None, "Tensor-parallel ranks; null: chosen.", LAYOUT | PLAN] = None
    pp: Annotated[Ranks | None, "Pipeline stages; null: chosen.", LAYOUT | PLAN] = None
    vpp: Annotated[
        Count | None,
        "Model chunks of each pipeline stage, which take turns (interleaved 1F1B): as many times less waiting at the"
        " ends of a step, and as many times more messages. 1: each stage has consecutive layers; null: chosen.",
        LAYOUT | PLAN,
    ] = None
    cp: Annotated[Ranks | None, "Context-parallel ranks; null: chosen.", LAYOUT | PLAN] = None
    sequence_parallel: Annotated[
        bool | None,
        "Shard activations of norms over TP ranks. It needs Transformer Engine; null: on where there is one and tp"
        " > 1.",
        NOTHING,
    ] = None
    overlap_grad_reduce: Annotated[bool, "Reduce a bucket's gradients during the backward pass.", PLAN] = True
    overlap_param_gather: Annotated[bool, "Gather a bucket's new weights during the forward pass.", NOTHING] = True
    bucket_elements: Annotated[
        Count | None, "Elements in one gradient bucket; null: Megatron's max(40M, 1M * dp).", PLAN
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The job: how long, on how much data a step, in which precision."""

    steps: Annotated[Count, "Optimizer steps of the run.", NOTHING]
    seq_length: Annotated[Side, "Tokens in a sequence.", CURVE]
    batch_tokens: Annotated[Count, "Tokens per optimizer step to aim for when `global_batch_size` is null.", NOTHING]
    global_batch_size: Annotated[
        Sequences | None,
        "Sequences per optimizer step over all ranks; null: the multiple of dp nearest to `batch_tokens`.",
        CURVE,
    ] = None
    micro_batch_size: Annotated[
        Sequences | None, "Sequences in one forward pass on one data-parallel rank; null: chosen.", NOTHING
    ] = None
    recompute: Annotated[
        Recompute | None,
        "Activation recomputation: none, selective (core attention), full (whole layers); null: chosen.",
        SPREAD,
    ] = None
    precision: Annotated[Precision, "bf16: bf16 weights with fp32 masters. fp32: everything in fp32.", CURVE | PLAN] = (
        "bf16"
    )
    grad_reduce_dtype: Annotated[Precision, "Precision in which data-parallel ranks sum gradients.", CURVE | PLAN] = (
        "fp32"
    )
    non_finite: Annotated[
        NonFinite,
        "On NaN or infinite gradients: stop all ranks before any weight changes, or skip that step and count it.",
        NOTHING,
    ] = "stop"
    loss_spike: Annotated[
        LossSpike,
        "On a sudden rise of the loss: ignore it, warn, or stop and leave the last checkpoint as it is.",
        NOTHING,
    ] = "warn"
    loss_spike_sigmas: Annotated[
        Positive, "A rise counts when the loss is this many standard deviations above its recent mean.", NOTHING
    ] = 8.0
    divergence: Annotated[
        Divergence,
        "When training is lost: stop (exit code 70, naming the last checkpoint from before), or warn, train on, and end"
        " so only where it is still lost after the last step. Lost is a loss that stays half-way back to a uniform"
        " guess, or above what it began with, or a validation worse than before training, twice or at the end. None of"
        " it mends itself overnight, and spikes, warm-ups and new data do not reach it.",
        NOTHING,
    ] = "stop"
    seed: Annotated[
        int, Range(at_least=0, below=2**31), "Seed of the initial weights and the order of the data.", CURVE
    ] = 1234
    eval_interval: Annotated[
        CountOrZero,
        "Steps between validations; 0 for none. Validation also runs before step 1 and after the last step.",
        NOTHING,
    ] = 100
    eval_batches: Annotated[Count, "Global batches a validation reads, of each set of a blend.", NOTHING] = 8
    sample_every: Annotated[
        CountOrZero,
        "Steps between samples of what the model writes (its likeliest token each time), in the live view, events.jsonl"
        " and trackers; another follows the last step. 0: none.",
        NOTHING,
    ] = 0
    sample_prompt: Annotated[
        str | None,
        "The text that a sample continues; null: the beginning of a document.",
        Example("'def main'"),
        NOTHING,
    ] = None
    sample_tokens: Annotated[
        Count,
        "Most tokens of a sample. Each is a forward pass over prompt and sample; both end with the sequence.",
        NOTHING,
    ] = 48


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, then a decay."""

    decay: Annotated[DecayStyle, "Shape of the decay after the warm-up.", CURVE] = "cosine"
    warmup_steps: Annotated[
        CountOrZero | None, "Steps of linear warm-up; null: a twentieth of `decay_steps`, 2000 at most.", CURVE
    ] = None
    decay_steps: Annotated[
        Count | None, "Step at which the rate has reached its minimum; null: `train.steps`.", CURVE
    ] = None
    wsd_decay_steps: Annotated[
        Count | None, "For wsd, steps of the final decay; null: a tenth of what follows the warm-up.", CURVE
    ] = None

    def complete(self, steps: int) -> "ScheduleConfig":
        """The schedule with its nulls chosen for a run of `steps` steps."""
        decay_steps = self.decay_steps if self.decay_steps is not None else steps
        warmup_steps = self.warmup_steps
        if warmup_steps is None:
            warmup_steps = min(WARMUP_CEILING, decay_steps // WARMUP_SHARE)
        wsd_decay_steps = self.wsd_decay_steps
        if self.decay == "wsd" and wsd_decay_steps is None:
            wsd_decay_steps = max(1, (decay_steps - warmup_steps) // WSD_DECAY_SHARE)
        return replace(self, decay_steps=decay_steps, warmup_steps=warmup_steps, wsd_decay_steps=wsd_decay_steps)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The settings of where tokens come from."""

    source: Annotated[
        Literal["stdlib", "prepared"],
        "stdlib: the Python standard library's own sources, tokenised once and cached. prepared: files at `path`, or"
        " those of `blend`.",
        CURVE,
    ]
    path: Annotated[str | None, "For prepared: the prefix of the .bin/.idx pair, without extension.", CURVE] = None
    blend: Annotated[
        dict[str, Positive] | None,
        "For prepared, in place of path: prefixes of several pairs, each with its weight, that is, its share of the"
        " samples in relation to the others'.",
        Example("'{data/code:0.7,data/web:0.3}'"),
        CURVE,
    ] = field(default=None, hash=False)
    tokenizer: Annotated[str, "For stdlib: byte, bpe, or the path of a Hugging Face tokenizer.json.", CURVE] = "byte"
    tokenizer_vocab_size: Annotated[Side, "Entries of a bpe trained on the spot.", CURVE] = 16384
    validation_fraction: Annotated[Share, "Share of the documents held out, from the end.", CURVE] = 0.02
    cache_dir: Annotated[
        str | None,
        "Folder of prepared corpora, sample indices and searched layouts; null: $CANZONA_CACHE, else ~/.cache/canzona.",
        NOTHING,
    ] = None
