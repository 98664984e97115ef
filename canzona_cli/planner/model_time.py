"""Seconds a stage's modules take forward and backward, from shapes and the profile's achieved rates.

A layer is two modules, attention and MLP, as a bucket's parameters may be ready (or needed) between them. Matrix
products run at the profile's achieved rate for their size, core attention at a share of the peak, everything
elementwise at memory bandwidth; tensor-parallel collectives are kept apart, for they use a link.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.cost import Unit, matmul_rate, matmul_seconds, memory_rate
from canzona_cli.planner.links import Groups, Links, Transfer
from canzona_cli.planner.memory import element_bytes

Part = Literal["embedding", "attention", "mlp", "output"]

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.55, 0.45
"""Share of the bf16 peak that a causal flash kernel reaches with heads of 128 at 4k tokens on Hopper: Shah et al. 2024
(FlashAttention-3, arXiv 2407.08608, figures 5 and 6)."""
UNFUSED_ATTENTION = 4.0
"""Time of core attention without a flash kernel over the time with one: the scores go through memory."""
ELEMENTWISE_PASSES = {True: 1.0, False: 3.0}
"""Memory traffic of elementwise work over what fused kernels need: with Transformer Engine, and without."""
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 18, 8
"""Memory traffic of the vocabulary-parallel cross-entropy, bytes per logit: to fp32, maximum, exponential and sum;
then the gradient."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A piece of a stage, for one micro-batch on one rank."""

    part: Part
    layer: int
    """Over the whole model; the embedding is before layer 0, the output layer after the last."""
    forward_s: float
    backward_s: float
    """Without recomputation."""
    again_s: float
    """Forward work that the backward repeats (activation recomputation)."""
    weights: int
    """Elements on this rank."""
    collectives: int
    """Tensor-parallel exchanges of the residual stream in the forward, and in the backward; recomputation may add."""
    collectives_again: int


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One pipeline stage."""

    modules: tuple[Module, ...]
    """In forward order."""
    tp: Transfer
    """One tensor-parallel exchange: an all-reduce of the residual stream, or its two halves."""
    hop: Transfer
    """Handing the residual stream to the next stage."""

    @property
    def forward_s(self) -> float:
        """One micro-batch, tensor-parallel exchanges included."""
        return sum(module.forward_s + module.collectives * self.tp.seconds for module in self.modules)

    @property
    def backward_s(self) -> float:
        return sum(
            module.backward_s + module.again_s + (module.collectives + module.collectives_again) * self.tp.seconds
            for module in self.modules
        )


@lru_cache(maxsize=64)
def stage_time(config: RunConfig, layout: Layout, stage: int) -> StageTime:
    """Times of the modules of `stage`.

    With T = micro-batch * s / c tokens, h hidden, a heads and g groups of d, f the MLP's width, t tp, x = t under
    sequence parallelism, per micro-batch and rank:
    - attention: products T x h x (a+2g)d/t and T x ad/t x h; core attention 2 T s ad/t FLOPs forward (causal);
      elementwise 5 T h/x (norm, residual) and 4 T (a+g)d/t (QK-norm, rotary) elements through memory;
    - mlp: products T x h x 2f/t and T x f/t x h; elementwise 5 T h/x and 3 T f/t;
    - the backward multiplies twice for each product, 2.5 times in core attention, moves twice the elements, and adds
      every weight's gradient to its buffer once a micro-batch.
    """
    model, t, cluster = config.model, layout.tp, config.cluster
    width, grad = element_bytes(config)
    unit: Unit = config.train.precision
    tokens = layout.micro_batch_size * config.train.seq_length // layout.cp
    stream = tokens * model.hidden_size // (t if layout.sequence_parallel else 1)
    heads, groups = model.num_attention_heads * model.head_dim // t, model.num_query_groups * model.head_dim // t
    ffn, hidden = model.ffn_hidden_size // t, model.hidden_size
    passes = ELEMENTWISE_PASSES[cluster.transformer_engine] * width / memory_rate(cluster)
    accumulate = 2 * grad / memory_rate(cluster)

    def products(*shapes: tuple[int, int]) -> float:
        return sum(matmul_seconds(cluster, tokens, inputs, outputs, unit) for outputs, inputs in shapes)

    core_flops = 2.0 * tokens * config.train.seq_length * heads
    peak = cluster.bf16_tflops * 1e12 if unit == "bf16" else matmul_rate(cluster, 1, unit)
    slower = 1.0 if cluster.transformer_engine else UNFUSED_ATTENTION
    core_forward = slower * core_flops / (ATTENTION_FORWARD * peak)
    core_backward = slower * 2.5 * core_flops / (ATTENTION_BACKWARD * peak)

    full = layout.recompute == "full"
    attention_products = products((heads + 2 * groups, hidden), (hidden, heads))
    attention_moves = passes * (5 * stream + 4 * tokens * (heads + groups))
    attention_weights = hidden * (2 * heads + 2 * groups)
    attention_forward = attention_products + core_forward + attention_moves
    mlp_products = products((2 * ffn, hidden), (hidden, ffn))
    mlp_moves = passes * (5 * stream + 3 * tokens * ffn)
    mlp_forward = mlp_products + mlp_moves
    exchanges = 1 if t > 1 else 0
    layers = model.num_layers // layout.pp
    modules = []
    for layer in range(stage * layers, (stage + 1) * layers):
        modules.append(
            Module(
                part="attention",
                layer=layer,
                forward_s=attention_forward,
                backward_s=2 * attention_products
                + core_backward
                + 2 * attention_moves
                + accumulate * attention_weights,
                again_s={"none": 0.0, "selective": core_forward, "full": attention_forward}[layout.recompute],
                weights=attention_weights,
                collectives=exchanges,
                collectives_again=exchanges if full else 0,
            )
        )
        modules.append(
            Module(
                part="mlp",
                layer=layer,
                forward_s=mlp_forward,
                backward_s=2 * mlp_products + 2 * mlp_moves + accumulate * 3 * ffn * hidden,
                again_s=mlp_forward if full else 0.0,
                weights=3 * ffn * hidden,
                collectives=exchanges,
                collectives_again=exchanges if full else 0,
            )
        )
    vocabulary = model.vocab_size // t
    if stage == 0:
        modules.insert(0, _embedding(model.hidden_size * vocabulary, passes * 2 * stream, exchanges))
    if stage == layout.pp - 1:
        product, logits = products((vocabulary, hidden)), tokens * vocabulary / memory_rate(cluster)
        modules.append(
            Module(
                part="output",
                layer=model.num_layers,
                forward_s=product + logits * LOSS_FORWARD_BYTES + passes * 2 * stream,
                backward_s=2 * product + logits * LOSS_BACKWARD_BYTES + accumulate * vocabulary * hidden,
                again_s=0.0,
                weights=0 if stage == 0 and model.tied_embeddings else vocabulary * hidden,
                collectives=exchanges,
                collectives_again=0,
            )
        )
    links, geometry = Links(cluster=cluster), Groups.of(layout, cluster)
    # Under sequence parallelism the exchange is a reduce-scatter and an all-gather: the same bytes on the same link.
    exchange = links.all_reduce(tokens * hidden * width, geometry.tp) if t > 1 else Transfer()
    hop = links.point_to_point(stream * width, crosses=geometry.stage_crosses)
    return StageTime(modules=tuple(modules), tp=exchange, hop=hop if layout.pp > 1 else Transfer())


def _embedding(weights: int, moves_s: float, exchanges: int) -> Module:
    return Module(
        part="embedding",
        layer=-1,
        forward_s=moves_s,
        backward_s=moves_s,
        again_s=0.0,
        weights=weights,
        collectives=exchanges,
        collectives_again=0,
    )
