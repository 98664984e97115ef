"""The time of attention between its two products: rotary embedding, QK-norm, and core attention with its
context-parallel collectives."""

from dataclasses import replace

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import micro_batch_tokens
from canzona_cli.costs.links import Groups, Links, Transfer
from canzona_cli.costs.update import matmul_rate
from canzona_cli.model.family import Attention

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.55, 0.45
"""The shares of the bf16 peak that a causal flash kernel reaches with heads of 128 at 4k tokens on Hopper:
Shah et al. 2024 (FlashAttention-3, arXiv 2407.08608, figures 5 and 6)."""
TORCH_ATTENTION = 1.6
"""The time of torch's kernel, FlashAttention-2, over the time of Transformer Engine's on Hopper: 1.5 to 2
forward, 1.5 to 1.75 backward (the same paper)."""
CPU_ATTENTION = 0.4
"""The share of a core's fp32 rate that torch's kernel reaches on CPU, in bf16 too and in both directions:
measured 0.25 to 0.8 with 256 to 2,048 tokens and heads of 32 to 128, the least with the fewest tokens."""
CUT_STARTS = 0.58
"""The additional operations of a layer without Transformer Engine whose sequence is cut, in modules' worth of
operations: keys and values are put in order. Counted on CPU ranks with 256 tokens, whose queries are two
blocks with or without the cut: 157 operations instead of 138 forward, 241 instead of 209 backward, for four
modules."""
QK_NORM_PASSES = 5.8
"""The time of a norm of rows of 128 elements (QK-norm) over the time of a norm of full rows with as many
elements in total: 345 us over 60 us (B200, https://github.com/flashinfer-ai/flashinfer/issues/2396, 2026-01)."""


def core_attention(
    config: RunConfig, layout: Layout, attention: Attention
) -> tuple[float, float, tuple[Transfer, Transfer]]:
    """Returns the forward and backward seconds of one layer's core attention, and the context-parallel
    transfers of both passes."""
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
        # A slice's attention is computed while the next slice is sent. In the backward pass its gradient is
        # sent too.
        hop_s = links.point_to_point(slice_bytes, crosses=group.machines > 1).seconds
        exposed, exposed_back = (max(0.0, n * hop_s - s / layout.cp) for n, s in ((1, forward), (2, backward)))
        ring = Transfer(latency_s=(layout.cp - 1) * exposed), Transfer(latency_s=(layout.cp - 1) * exposed_back)
        return forward, backward, ring
    size = layout.cp * slice_bytes
    gather, scatter = links.all_gather(size, group), links.reduce_scatter(size, group)
    share = t / layout.cp
    return (
        forward,
        backward,
        (replace(gather, cores=share * gather.cores), replace(scatter, cores=share * scatter.cores)),
    )


def head_passes(config: RunConfig, attention: Attention) -> float:
    """Returns the time of rotary embedding and QK-norm as a number of passes over queries and keys."""
    if not attention.normalised:
        return 2.0
    return 2.0 + 2.0 * (QK_NORM_PASSES if config.cluster.fused_layers else 1.0)


def heads(attention: Attention, layout: Layout) -> int:
    """Counts the elements of a token's queries and keys on one TP rank."""
    return attention.queries // layout.tp + attention.keys // layout.tp
