"""The time of attention between the QKV and the output projections: rotary embedding, QK-norm, and core
attention with its context-parallel collectives."""

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import micro_batch_tokens
from canzona_cli.costs.links import Groups, Links, Transfer
from canzona_cli.costs.update import matmul_rate
from canzona_cli.model.family import Attention

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.55, 0.45
"""The shares of the bf16 peak that a causal flash kernel reaches in the forward and the backward pass with
heads of 128 at 4k tokens on Hopper: Shah et al. 2024 (FlashAttention-3, arXiv 2407.08608, figures 5 and
6)."""
TORCH_ATTENTION = 1.6
"""The time of torch's kernel, FlashAttention-2, relative to Transformer Engine's on Hopper: 1.5 to 2 forward,
1.5 to 1.75 backward (the same paper)."""
CPU_ATTENTION = 0.4
"""The share of a core's fp32 rate that torch's attention kernel reaches on CPUs, in fp32 and in bf16, forward
and backward: measured 0.25 to 0.8 with 256 to 2,048 tokens and heads of 32 to 128, lowest with the fewest
tokens."""
CUT_STARTS = 0.58
"""The operations that context parallelism adds to a layer without Transformer Engine, in units of an average
module's operations. They put keys and values back in order. Counted on CPU ranks with 256 tokens: the four
modules of a layer have 157 operations instead of 138 in the forward pass, and 241 instead of 209 in the
backward pass."""
QK_NORM_PASSES = 5.8
"""The time of a norm over rows of 128 elements (QK-norm) relative to a norm over full rows with the same
number of elements in total: 345 us to 60 us (B200, https://github.com/flashinfer-ai/flashinfer/issues/2396,
2026-01)."""


def core_attention(
    config: RunConfig, layout: Layout, attention: Attention
) -> tuple[float, float, tuple[Transfer, Transfer]]:
    """Returns the forward and backward seconds of one layer's core attention for a micro-batch on one rank,
    and the context-parallel transfers of both passes."""
    cluster, t = config.cluster, layout.tp
    tokens, unit = micro_batch_tokens(config, layout), config.train.precision
    operations = 2.0 * tokens * config.train.seq_length * attention.queries / t
    if cluster.device == "cpu":
        forward = operations / (CPU_ATTENTION * matmul_rate(cluster, 1, "fp32"))
        backward = 2.5 * forward
    else:
        peak = cluster.bf16_tflops * 1e12 if unit == "bf16" else matmul_rate(cluster, 1, unit)
        slower = 1.0 if cluster.fused_layers else TORCH_ATTENTION
        forward = slower * operations / (ATTENTION_FORWARD * peak)
        backward = 2.5 * slower * operations / (ATTENTION_BACKWARD * peak)
    if layout.cp == 1:
        return forward, backward, (Transfer(), Transfer())
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).cp
    slice_bytes = 2.0 * tokens * attention.keys / t * config.train.weight_bytes
    if cluster.fused_layers:
        # While the attention of one slice is computed, the next slice is sent; in the backward pass, so is
        # the slice's gradient.
        hop_s, hops = links.point_to_point(slice_bytes, crosses=group.machines > 1).seconds, layout.cp - 1
        exposed_s = max(0.0, hop_s - forward / layout.cp)
        exposed_backward_s = max(0.0, 2 * hop_s - backward / layout.cp)
        return forward, backward, (Transfer(latency_s=hops * exposed_s), Transfer(latency_s=hops * exposed_backward_s))
    size = layout.cp * slice_bytes
    gather, scatter = links.all_gather(size, group), links.reduce_scatter(size, group)
    share = t / layout.cp  # an owner's t ranks are in t groups, each of which c owners share
    return forward, backward, (gather.with_cores(share * gather.cores), scatter.with_cores(share * scatter.cores))


def head_passes(config: RunConfig, attention: Attention) -> float:
    """Returns the time of rotary embedding and QK-norm as a number of passes over queries and keys."""
    if not attention.normalised:
        return 2.0
    return 2.0 + 2.0 * (QK_NORM_PASSES if config.cluster.fused_layers else 1.0)


def query_key_elements(attention: Attention, layout: Layout) -> int:
    """Counts the elements of a token's queries and keys on one TP rank."""
    return attention.queries // layout.tp + attention.keys // layout.tp
