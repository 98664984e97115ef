"""A rough time of one optimizer step on a hardware profile: enough to rank layouts, not to promise a throughput.

Each term is a closed formula of shapes and the profile's peaks (see `step_time`). The planner's simulator replaces it
wherever a number is shown as a prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Device, Layout, RunConfig
from canzona_cli.model import qwen3
from canzona_cli.planner.activations import matrix_shapes, stage_weights
from canzona_cli.planner.memory import placement

BEST_EFFICIENCY = 0.65
"""Share of the bf16 peak that large matrix products of a layer reach."""
HALF_TOKENS = {"cuda": 512, "cpu": 64}
"""Tokens of a micro-batch at which a product reaches half of that: smaller ones do not fill the device."""
HALF_WIDTH = {"cuda": 256, "cpu": 32}
"""Columns of a tensor-parallel slice of the MLP at which it reaches half."""
UNFUSED_ATTENTION = 4.0
"""Time of core attention without a flash kernel over that of its FLOPs alone: the scores go through memory."""
FP32_SLOWDOWN = 8.0
"""bf16 peak over the rate of fp32 products."""
LINK_EFFICIENCY = 0.75
"""Share of a link's bandwidth that a large collective reaches."""
LAUNCH_SECONDS = {False: 15e-6, True: 30e-6}
"""Latency of one collective, inside a machine and across machines."""
OVERLAP = 0.8
"""Share of the compute next to it that a data-parallel collective can hide under."""
NEWTON_SCHULZ_EFFICIENCY = 0.5
"""Share of the bf16 peak Newton-Schulz reaches."""
STATE_PASSES = 2.5
"""Times an elementwise update moves its state through memory (read, write, and the gradient and weight)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank."""

    parts: Mapping[str, float]
    """compute, recompute, tp, bubble, pp, dp, matrix_update, adamw_update; they add up."""
    tokens: int
    """Tokens of that step, all ranks together."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def per_token(self) -> float:
        """Seconds per token: what layouts of slightly different batch sizes are compared by."""
        return self.total / self.tokens


def step_time(config: RunConfig, layout: Layout) -> StepTime:
    """Adds up, for the busiest stage (layers / pp and the output layer), with m micro-batches a step:

    - compute: 3 forwards of m micro-batches at `efficiency`; recompute: a fourth forward of the layers (full) or of
      core attention (selective);
    - tp: 4 all-reduces (as reduce-scatter and all-gather under sequence parallelism) of the residual stream per layer
      and micro-batch, 6 under full recomputation, none of it hidden;
    - bubble: (pp - 1) more micro-batches' time (1F1B); pp: its point-to-point transfers;
    - dp: gradients reduced and parameters gathered, less what hides under the last backward and the first forward;
    - matrix_update: Newton-Schulz of the rank with most (Shampoo and SOAP priced alike: it only ranks layouts);
      adamw_update: memory traffic of the elementwise state.
    """
    model, train, cluster = config.model, config.train, config.cluster
    t, m, width = layout.tp, layout.num_microbatches, 2 if train.precision == "bf16" else 4
    tokens = layout.micro_batch_size * train.seq_length / layout.cp
    layers = model.num_layers // layout.pp

    peak = cluster.bf16_tflops * 1e12 / (1.0 if train.precision == "bf16" else FP32_SLOWDOWN)
    rate = peak * efficiency(tokens, model.ffn_hidden_size / t, cluster.device)
    output = 2.0 * model.vocab_size * model.hidden_size
    forward = (qwen3.forward_flops_per_token(model, train.seq_length) - output) / layout.pp
    forward_s = tokens * (forward + output) / t / rate
    # Recomputed core attention; its first run is not priced apart, it is the same for every layout.
    core = (
        (1.0 if cluster.transformer_engine else UNFUSED_ATTENTION)
        * 2.0
        * train.seq_length
        * model.num_attention_heads
        * model.head_dim
        * layers
    )
    again = {"none": 0.0, "selective": core, "full": forward}[layout.recompute]
    again_s = tokens * again / t / rate

    stream = tokens * model.hidden_size * width
    collectives = layers * (6 if layout.recompute == "full" else 4)
    tp_s = 0.0
    if t > 1:
        wide = t > cluster.gpus_per_node
        ring = 2 * (t - 1) / t * stream / _bandwidth(config, across=wide)
        tp_s = collectives * (ring + LAUNCH_SECONDS[wide] * (2 if layout.sequence_parallel else 1))

    across = layout.world_size > cluster.gpus_per_node
    hop = stream / (t if layout.sequence_parallel else 1) / _bandwidth(config, across=across) + LAUNCH_SECONDS[across]
    pp_s = 2 * (m + layout.pp - 1) * hop if layout.pp > 1 else 0.0

    micro_batch_s = 3 * forward_s + again_s + tp_s
    update = _update(config, layout, peak)
    parts = {
        "compute": m * 3 * forward_s,
        "recompute": m * again_s,
        "tp": m * tp_s,
        "bubble": (layout.pp - 1) * micro_batch_s,
        "pp": pp_s,
        "dp": _data_parallel(config, layout, forward_s, width),
        **update,
    }
    return StepTime(parts=MappingProxyType(parts), tokens=layout.global_batch_size * train.seq_length)


def efficiency(tokens: float, columns: float, device: Device) -> float:
    """Share of the peak a layer's products reach with `tokens` rows and `columns` columns of a slice."""
    return BEST_EFFICIENCY * tokens / (tokens + HALF_TOKENS[device]) * columns / (columns + HALF_WIDTH[device])


def _data_parallel(config: RunConfig, layout: Layout, forward_s: float, width: int) -> float:
    """Exposed seconds of gradient reduction and parameter gathering over dp * cp ranks."""
    shards = layout.dp * layout.cp
    if shards == 1:
        return 0.0
    weights, held = stage_weights(config, layout, 0), placement(config, layout, 0)
    elements = weights.others + max(weights.matrices, held.padded if held is not None else 0)
    across = shards * layout.tp > config.cluster.gpus_per_node
    per_byte = (shards - 1) / shards / _bandwidth(config, across=across)
    grad = 4 if config.train.grad_reduce_dtype == "fp32" else width
    reduce_s, gather_s = elements * grad * per_byte, elements * width * per_byte
    if execution_of(config).everywhere:
        reduce_s, gather_s = 2 * reduce_s, 0.0  # all-reduced: every rank updates everything
    hidden_reduce = 2 * forward_s * OVERLAP if config.parallel.overlap_grad_reduce else 0.0
    hidden_gather = forward_s * OVERLAP if config.parallel.overlap_param_gather else 0.0
    # A tenth stays exposed however long the compute: the first and the last bucket have nothing to hide under.
    return max(0.1 * reduce_s, reduce_s - hidden_reduce) + max(0.1 * gather_s, gather_s - hidden_gather)


def _update(config: RunConfig, layout: Layout, peak: float) -> dict[str, float]:
    weights, held = stage_weights(config, layout, 0), placement(config, layout, 0)
    shards = layout.dp * layout.cp
    bandwidth = config.cluster.memory_gb_per_s * 1e9
    adamw_s = STATE_PASSES * 12 / bandwidth
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return {"matrix_update": 0.0, "adamw_update": (weights.matrices + weights.others) / shards * adamw_s}
    layers = config.model.num_layers // layout.pp
    shapes = matrix_shapes(config)
    flops = layers * sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)
    whole = layers * sum(rows * cols for rows, cols in shapes)
    if held is None:
        share, others = 1.0, weights.others
    elif execution is Execution.LAYERWISE:
        share, others = held.worst * layout.tp / whole, weights.others // shards  # every TP rank does all of it
    else:
        share, others = held.worst / whole, weights.others // shards
    return {
        "matrix_update": share * flops / (peak * NEWTON_SCHULZ_EFFICIENCY),
        "adamw_update": others * adamw_s,
    }


def _bandwidth(config: RunConfig, *, across: bool) -> float:
    """Bytes per second of one GPU's link."""
    cluster = config.cluster
    return LINK_EFFICIENCY * 1e9 * (cluster.inter_node_gb_per_s if across else cluster.intra_node_gb_per_s)
