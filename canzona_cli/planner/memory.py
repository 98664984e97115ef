"""Memory one GPU needs for a run, from shapes alone: what lives on it, part by part, for the worst rank.

Persistent state follows from how Megatron-core 0.19 keeps it (see `optimizer_state`); activations follow Korthikanti
et al. 2022 (arXiv 2205.05198, section 4) rewritten for SwiGLU, grouped-query attention, QK-norm and no dropout (see
`layer_activations`). Everything is bytes on one rank; (t, p, c, D) are tp, pp, cp and dp.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model import qwen3
from canzona_cli.model.matrices import layer_shapes
from canzona_cli.planner.cost import algorithm
from canzona_cli.planner.placement import Placement, balance, layerwise
from canzona_cli.planner.types import Algorithm

GIB = 1 << 30
BATCH_BYTES = 256 << 20
"""With tp = 1 the engine works an owner's matrices through in batches of no more fp32 scratch than this."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the rank that needs most, beside what its GPU has."""

    parts: Mapping[str, int]
    """weights, gradients, optimizer, activations, logits, workspace, exchange. What is never alive together counts
    once: `workspace` is only what it needs beyond the memory that logits or activations have freed by then. `exchange`
    is the least of the engine's own buffers; how much more a plan takes is known once there is one."""
    worst_rank: str
    """Which rank that is: `every rank`, or `pp stage 0`."""
    capacity: int
    """Memory of the cluster profile's GPU less what it reserves."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def state(self) -> int:
        """What stays from step to step: weights, gradient buffers and optimizer state."""
        return self.parts["weights"] + self.parts["gradients"] + self.parts["optimizer"]

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """Parameters one tensor-parallel rank of one pipeline stage stores."""

    matrices: int
    """Elements in 2-D layer weights."""
    others: int
    """Elements AdamW updates: embedding, output layer, norms."""
    largest: int
    """Elements of the largest single parameter."""


def estimate(config: RunConfig, layout: Layout) -> MemoryEstimate:
    """Memory of the worst rank of `layout`.

    Only the first and the last stage can be the worst: the first has the embedding and the most micro-batches in
    flight, the last the output layer and the logits.
    """
    candidates = {stage: _stage_parts(config, layout, stage) for stage in sorted({0, layout.pp - 1})}
    stage = max(candidates, key=lambda s: sum(candidates[s].values()))
    return MemoryEstimate(
        parts=MappingProxyType(candidates[stage]),
        worst_rank="every rank" if layout.pp == 1 else f"pp stage {stage}",
        capacity=capacity(config),
    )


def capacity(config: RunConfig) -> int:
    """Bytes of one GPU a run may use."""
    return int((config.cluster.memory_gib - config.cluster.reserved_gib) * GIB)


def stage_weights(config: RunConfig, layout: Layout, stage: int) -> StageWeights:
    """What a rank of `stage` stores. A tied output layer is a second copy of the embedding when p > 1."""
    model, t = config.model, layout.tp
    layers = model.num_layers // layout.pp
    shapes = layer_shapes(model, "fused")
    vocabulary = model.vocab_size * model.hidden_size // t
    first, last = stage == 0, stage == layout.pp - 1
    copies = int(first) + int(last and not (first and model.tied_embeddings))
    others = layers * qwen3.norm_parameters(model) + copies * vocabulary + (model.hidden_size if last else 0)
    return StageWeights(
        matrices=layers * sum(rows * cols // t for rows, cols in shapes),
        others=others,
        largest=max(vocabulary if copies else 0, *(rows * cols // t for rows, cols in shapes)),
    )


def placement(config: RunConfig, layout: Layout, stage: int) -> Placement | None:
    """Who holds the matrices' optimizer state on a stage; None where it is not divided by whole matrices.

    layerwise: Megatron's own packing of TP fragments over D * c ranks, padding included. canzona: whole matrices
    over the D * c * t cells of the grid, balanced by state. asc: the same cells in natural order, unbalanced.
    """
    execution = execution_of(config)
    if not execution.has_owners:
        return None
    model, shards = config.model, layout.dp * layout.cp
    layers = model.num_layers // layout.pp
    if execution is Execution.LAYERWISE:
        bucket = config.parallel.bucket_elements or max(40_000_000, 1_000_000 * shards)
        overlap = config.parallel.overlap_grad_reduce and stage == 0  # Megatron buckets only the first stage
        sizes = tuple(rows * cols // layout.tp for rows, cols in layer_shapes(model, "fused"))
        return layerwise(sizes, layers, shards, bucket if overlap else None)
    return balance(matrix_shapes(config), layers, shards * layout.tp, in_order=config.engine.strategy == "asc")


def matrix_shapes(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one layer's matrices as the strategy updates them: Megatron's own splits q, k, v at most."""
    splitting = config.engine.splitting
    if not execution_of(config).ours and splitting != "fused":
        splitting = "qkv"
    return layer_shapes(config.model, splitting)


def optimizer_state(config: RunConfig, layout: Layout, stage: int) -> int:
    """Masters and moments on the worst rank of a stage.

    AdamW keeps an fp32 master and two moments, 12 bytes a parameter (8 with fp32 weights, which are their own
    masters), sharded over D * c by `DistributedOptimizer`. A matrix optimizer keeps a master, 4 bytes (0), its moments
    and its factors, see `moment_bytes` and `factor_bytes`:
    - sc: `Float16OptimizerWithFloat16Params` without any sharding, for matrices and AdamW parameters alike; where the
      engine does it (`Execution.REDUNDANT`), matrices are whole, with masters at fp32 weights too;
    - layerwise, asc, canzona: whole matrices on some rank (see `placement`), the AdamW parameters sharded. What asc and
      canzona host has a master with fp32 weights too: nowhere else is the matrix whole.
    """
    weights = stage_weights(config, layout, stage)
    master = _FP32 if config.train.precision == "bf16" else 0
    adamw, shards = master + 2 * _FP32, layout.dp * layout.cp
    if execution_of(config) is Execution.ADAMW:
        return adamw * math.ceil((weights.matrices + weights.others) / shards)
    kept = (_FP32 if execution_of(config).ours else master) + moment_bytes(algorithm(config))
    held = placement(config, layout, stage)
    if held is None:
        layers = config.model.num_layers // layout.pp
        factors = layers * sum(_factors(config, rows, cols) for rows, cols in matrix_shapes(config))
        copies = layout.tp if execution_of(config) is Execution.REDUNDANT else 1
        return kept * weights.matrices * copies + factors + adamw * weights.others
    factors = sum(count * _factors(config, rows, cols) for (rows, cols), count in held.worst_shapes.items())
    return kept * held.worst + factors + adamw * math.ceil(weights.others / shards)


def layer_activations(config: RunConfig, layout: Layout, recompute: str) -> int:
    """Bytes one layer keeps for the backward pass of one micro-batch.

    With T = micro-batch * s / c tokens, element size w, and x = t under sequence parallelism, else 1:
    - residual stream: two norm inputs and the two linear inputs they become, 4 T h / x elements;
    - attention: fused qkv T (a + 2g) d / t (it lives on in v), the queries gathered from it T a d / t, rotated q and k
      T (a + g) d / t, context T a d / t;
    - core attention without a flash kernel (no Transformer Engine): the softmax in fp32 and its copy in w bytes,
      a b s^2 / t each, and k and v repeated for every query head, 2 T a d / t, in place of the rotated k;
    - SwiGLU: gate and up 2 T f / t, their product T f / t.
    On CPU nothing is fused: norms keep their input and its normalised form in fp32, SwiGLU keeps silu(gate) and a
    copy of up. selective recomputes core attention, full keeps only the layer's input.
    """
    model, t, width = config.model, layout.tp, _width(config)
    tokens, stream = _tokens(config, layout), _stream(config, layout)
    if recompute == "full":
        return width * stream
    on_cpu, bf16 = config.cluster.device == "cpu", width < _FP32
    heads, groups = (
        count * model.head_dim * tokens // t for count in (model.num_attention_heads, model.num_query_groups)
    )
    fused_qkv, rotated_q, rotated_k, context = heads + 2 * groups, heads, groups, heads
    attention = width * (fused_qkv + heads + rotated_q + rotated_k + context)
    if on_cpu:
        # Inputs of the q and k norms in fp32, which are the queries and keys themselves with fp32 weights.
        attention += _FP32 * (heads + groups) + (_FP32 * (heads + groups) - width * heads if bf16 else 0)
    if not config.cluster.transformer_engine and recompute == "none":
        attention += (_FP32 + width if bf16 else _FP32) * _scores(config, layout)
        if heads > groups:
            attention += width * (2 * heads - rotated_k)
            # Repeating copied v, so nothing holds the fused qkv unless a norm kept its input there.
            attention -= width * fused_qkv if on_cpu and bf16 else 0
    mlp = width * (5 if on_cpu else 3) * tokens * model.ffn_hidden_size // t
    return 2 * _norm(config, stream) + attention + mlp


def _norm(config: RunConfig, elements: int) -> int:
    """Bytes an RMSNorm keeps, with its output, which the linear layer behind it keeps."""
    width = _width(config)
    return elements * (2 * _FP32 + width if config.cluster.device == "cpu" else 2 * width)


@dataclass(frozen=True, kw_only=True)
class Transient:
    """Bytes one rank needs on top of its state, by when: a micro-batch, or the optimizer step."""

    activations: int
    logits: int
    working: int
    """Of one layer's backward pass, on top of activations; logits are gone by then."""
    update: int
    """Of the optimizer step, when activations and logits are gone."""
    adamw: int = 0
    """Of AdamW's update where that goes before the matrices'."""

    def parts(self, *, reduction: int = 0) -> dict[str, int]:
        """What is never alive together counts once: the later ones only beyond what has been freed by then.

        Args:
            reduction: what an all-to-all of gradients holds under the backward pass.
        """
        freed = self.activations + self.logits
        working = self.working + reduction - self.logits
        workspace = max(0, working, max(self.update, self.adamw) - freed)
        return {
            "activations": self.activations,
            "logits": self.logits,
            "workspace": workspace,
        }


def element_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient buffer) bytes of a parameter."""
    width = _width(config)
    return width, _FP32 if config.train.grad_reduce_dtype == "fp32" else width


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient) bytes of an element that travels between TP ranks; C_max limits the larger."""
    return _width(config), 2 if config.engine.exchange_dtype == "bf16" else _FP32


def least_step_bytes(config: RunConfig, layout: Layout, stage: int) -> int:
    """Of `step_buffers`, what no plan can do without: groups of one matrix a host; with tp = 1 no plan has a choice."""
    if execution_of(config) is Execution.REDUNDANT:
        return _FP32 * _gathered_elements(config, layout)
    held = placement(config, layout, stage)
    if held is None or execution_of(config) is not Execution.PLANNED:
        return 0
    shapes = matrix_shapes(config)
    largest = max(math.prod(shape) for shape in shapes)
    if layout.tp > 1:
        travels = largest * (layout.tp - 1) // layout.tp  # out and in, as gradients and as weights, in two sets
        return 2 * 2 * sum(exchange_bytes(config)) * travels + _FP32 * largest
    batch = min(_FP32 * held.worst, max(BATCH_BYTES, _FP32 * largest))
    if element_bytes(config)[1] != _FP32:
        return batch
    if config.engine.splitting in ("fused", "per_head"):
        return 0
    model = config.model
    interleaved = model.hidden_size * model.head_dim * (model.num_attention_heads + 2 * model.num_query_groups)
    share = interleaved / sum(math.prod(shape) for shape in shapes)
    return min(int(_FP32 * held.worst * share), batch)


def _gathered_elements(config: RunConfig, layout: Layout) -> int:
    """Of sc by the engine, which gathers one matrix at a time: its fragment, all ranks' fragments, the whole they make.

    With tp = 1 only what does not lie whole in the gradient buffer is copied: all of it if reduced in bf16, else q, k
    and v where they are matrices.
    """
    largest = max(math.prod(shape) for shape in matrix_shapes(config))
    if layout.tp > 1:
        return largest // layout.tp + 2 * largest
    if element_bytes(config)[1] != _FP32:
        return largest
    interleaved = config.engine.splitting in ("qkv", "split")
    return config.model.hidden_size * config.model.head_dim * config.model.num_attention_heads if interleaved else 0


def _stage_parts(config: RunConfig, layout: Layout, stage: int) -> dict[str, int]:
    weights, held = stage_weights(config, layout, stage), placement(config, layout, stage)
    # Megatron pads its layer-wise buffers until whole parameters fit equal shards, and every rank stores them.
    stored = weights.others + (weights.matrices if held is None else max(weights.matrices, held.padded))
    width, grad = element_bytes(config)
    return {
        "weights": width * stored,
        "gradients": grad * stored,
        "optimizer": optimizer_state(config, layout, stage),
        **transient(config, layout, stage).parts(),
        "exchange": least_step_bytes(config, layout, stage),
    }


def transient(config: RunConfig, layout: Layout, stage: int) -> Transient:
    """What a rank of `stage` needs while it computes."""
    model, width, t = config.model, _width(config), layout.tp
    weights, held = stage_weights(config, layout, stage), placement(config, layout, stage)
    tokens, layers = _tokens(config, layout), model.num_layers // layout.pp
    in_flight = min(layout.pp - stage, layout.num_microbatches)  # 1F1B
    activations = in_flight * layers * layer_activations(config, layout, layout.recompute)
    logits = 0
    if stage == layout.pp - 1:
        activations += _norm(config, _stream(config, layout))
        # Per vocabulary entry and token: the logits, their softmax in fp32 (in place in fp32), and their gradient.
        logits = (2 * width + _FP32 if width < _FP32 else 2 * _FP32) * tokens * model.vocab_size // t
    # The backward pass of one layer: gradients of its largest activations, the gathered stream, the gradient of the
    # largest weight before it joins the buffer, and what recomputation brings back.
    working = width * (3 * tokens * model.ffn_hidden_size // t + 2 * tokens * model.hidden_size + weights.largest)
    working += layer_activations(config, layout, "none") - layer_activations(config, layout, layout.recompute)
    if not config.cluster.transformer_engine:
        working += (2 * _FP32 + width) * _scores(config, layout)
    return Transient(
        activations=activations,
        logits=logits,
        working=working,
        update=_update_workspace(config, layout, weights, held),
        adamw=_adamw_workspace(config, layout, weights) if execution_of(config).ours else 0,
    )


def _update_workspace(config: RunConfig, layout: Layout, weights: StageWeights, held: Placement | None) -> int:
    """What the optimizer step needs on top of its state, when activations are gone.

    Newton-Schulz holds, per element of the largest matrix it works on whole, the fp32 update, its gathered copy and
    three iterates, and two Gram matrices of the short side. Shampoo and SOAP hold three such matrices and four
    squares of the longest side they precondition. What canzona's engine copies besides is in `step_buffers`.
    """
    shards = layout.dp * layout.cp
    local = weights.matrices + weights.others
    if execution_of(config).ours:
        return _main_gradients(config, layout, weights) + _matrix_workspace(config)
    # Reduced in bf16, gradients are copied to fp32 for the masters.
    copies = _FP32 * (local if execution_of(config).everywhere else math.ceil(local / shards))
    copies = 0 if config.train.grad_reduce_dtype == "fp32" or config.train.precision == "fp32" else copies
    # Without Transformer Engine's fused AdamW, torch's foreach version makes one fp32 temporary of what it updates.
    foreach = 0 if config.cluster.transformer_engine else _FP32 * math.ceil(local / shards)
    if execution_of(config) is Execution.ADAMW:
        return copies + foreach
    return copies + _matrix_workspace(config)


def _matrix_workspace(config: RunConfig) -> int:
    """Of the largest matrix's update; one optimizer instance updates all, one after another."""
    how, width, shapes = algorithm(config), _width(config), matrix_shapes(config)
    rows, cols = max(shapes, key=math.prod)
    if how.name == "muon":
        return (2 * _FP32 + 3 * width) * rows * cols + 2 * width * min(rows, cols) ** 2
    if how.name == "adamw":
        return 3 * _FP32 * rows * cols
    sides = [side for shape in shapes for side in shape if side <= how.max_preconditioner_dim]
    return 3 * _FP32 * rows * cols + 4 * _FP32 * max(sides, default=0) ** 2


def _main_gradients(config: RunConfig, layout: Layout, weights: StageWeights) -> int:
    """Reduced in bf16, a rank's share of the other parameters' gradients is copied to fp32, until the step is over."""
    if config.train.grad_reduce_dtype == "fp32" or config.train.precision == "fp32":
        return 0
    return _FP32 * math.ceil(weights.others / _adamw_shards(config, layout))


def _adamw_workspace(config: RunConfig, layout: Layout, weights: StageWeights) -> int:
    """Of AdamW on the parameters that are no matrices; torch's foreach version makes an fp32 temporary of them."""
    share = math.ceil(weights.others / _adamw_shards(config, layout))
    foreach = 0 if config.cluster.transformer_engine else _FP32 * share
    return _main_gradients(config, layout, weights) + foreach


def _adamw_shards(config: RunConfig, layout: Layout) -> int:
    return 1 if execution_of(config) is Execution.REDUNDANT else layout.dp * layout.cp


def moment_bytes(algorithm: Algorithm) -> int:
    """Bytes of fp32 state per element of a matrix.

    Muon: momentum. Shampoo: momentum, and with Adam grafting its second moment. SOAP and AdamW: two moments.
    """
    two = algorithm.name in ("soap", "adamw") or (algorithm.name == "shampoo" and algorithm.grafting == "adam")
    return 2 * _FP32 if two else _FP32


def factor_bytes(algorithm: Algorithm, rows: int, cols: int) -> int:
    """Shampoo and SOAP: two statistics and two roots (bases), one square for each side that has them, fp32."""
    if algorithm.name not in ("shampoo", "soap"):
        return 0
    return 2 * _FP32 * sum(side**2 for side in (rows, cols) if side <= algorithm.max_preconditioner_dim)


def _factors(config: RunConfig, rows: int, cols: int) -> int:
    return factor_bytes(algorithm(config), rows, cols)


def _scores(config: RunConfig, layout: Layout) -> int:
    """Elements of one micro-batch's attention scores in one layer."""
    heads = config.model.num_attention_heads // layout.tp
    return layout.micro_batch_size * heads * (config.train.seq_length // layout.cp) * config.train.seq_length


def _stream(config: RunConfig, layout: Layout) -> int:
    """Elements of the residual stream of one micro-batch."""
    return _tokens(config, layout) * config.model.hidden_size // (layout.tp if layout.sequence_parallel else 1)


def _tokens(config: RunConfig, layout: Layout) -> int:
    return layout.micro_batch_size * config.train.seq_length // layout.cp


def _width(config: RunConfig) -> int:
    """Bytes of a weight or an activation."""
    return 2 if config.train.precision == "bf16" else _FP32
