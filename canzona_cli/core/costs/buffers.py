"""Counts the part of a rank's memory that does not depend on a plan: parameters, activations and logits.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), rewritten for SwiGLU, grouped-query
attention, QK-norm and no dropout (see `layer_activations`). (t, c) are tp and cp.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from canzona_cli.core.costs.scratch import FP32, momentary_bytes
from canzona_cli.core.model.families import (
    family_of,
    final_norm_elements,
    layer_kinds,
    layer_models,
    small_parameters,
    stage_blocks,
)
from canzona_cli.core.model.family import Weight, Work
from canzona_cli.core.model.matrices import Shape, layer_on_rank
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.setup import Execution, Layout, Mesh, ModelConfig, Recompute, Setup
from canzona_cli.core.setup.execution import splitting_of, tp_mode_of
from canzona_cli.core.setup.stages import chunk_layers


def default_bucket_elements(owners: int) -> int:
    """Returns the number of elements at which Megatron closes a bucket by default (`DistributedDataParallel`,
    0.19)."""
    return max(40_000_000, 1_000_000 * owners)


def bucket_elements(setup: Setup, layout: Layout) -> int | None:
    """Returns the number of elements at which Megatron closes a bucket of the first stage; None if gradient
    reduction does not overlap with the backward pass, so that every buffer is one bucket."""
    if not setup.parallel.overlap_grad_reduce:
        return None
    return setup.parallel.bucket_elements or default_bucket_elements(layout.owners)


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """The number of parameter elements that one rank of a pipeline stage stores."""

    matrices: int
    """The elements of the layers' matrices, experts included."""
    experts: int
    """The elements of the rank's experts if ep > 1, because their gradients are then reduced over other ranks
    (`Mesh.expert_owners`); 0 if ep = 1."""
    others: int
    """The elements of the other parameters, which AdamW updates: embedding, output layer, norms, biases, routers."""
    largest: int
    """The elements of the largest single parameter."""

    def reduced(self, layout: Mesh) -> float:
        """Returns the mean number of matrix elements whose gradients are reduced to one rank."""
        return (self.matrices - self.experts) / layout.owners + self.experts / layout.expert_owners

    def share(self, layout: Mesh, *, matrices: bool) -> int:
        """Returns the number of elements that AdamW updates on a rank, if ranks have equal shares.

        Args:
            matrices: True if AdamW updates the matrices too.
        """
        if not matrices:
            return math.ceil(self.others / layout.owners)
        without_experts = self.others + self.matrices - self.experts
        return math.ceil(without_experts / layout.owners) + math.ceil(self.experts / layout.expert_owners)

    def adamw(self, execution: Execution, layout: Mesh) -> int:
        """Returns the number of elements that AdamW updates on a rank of a run with this execution."""
        return self.others if execution.everywhere else self.share(layout, matrices=execution is Execution.ADAMW)


def stage_weights(setup: Setup, layout: Layout, stage: int) -> StageWeights:
    """Counts the elements that a rank of `stage` stores. With pp > 1, a tied output layer is a second copy of
    the embedding."""
    return _stage_weights(setup.model, layout.tp, layout.pp, layout.vpp, layout.ep, stage)


@lru_cache(maxsize=4096)
def _stage_weights(model: ModelConfig, tp: int, pp: int, vpp: int, ep: int, stage: int) -> StageWeights:
    first, last = stage == 0, stage == pp - 1
    blocks = stage_blocks(model, Layout.plain(pp=pp, vpp=vpp), stage)
    of_blocks = [(n, _layer_weights(kind, tp, ep)) for kind, n in blocks]
    cut, experts, small = (sum(n * weights[part] for n, weights in of_blocks) for part in (0, 1, 3))
    largest = max(weights[2] for _, weights in of_blocks)
    vocabulary = model.vocab_size * model.hidden_size // tp
    copies = int(first) + int(last and not (first and model.tied_embeddings))
    return StageWeights(
        matrices=cut + experts,
        experts=experts,
        others=small
        + copies * vocabulary
        + (model.positions * model.hidden_size if first else 0)
        + (final_norm_elements(model) if last else 0),
        largest=max(vocabulary if copies else 0, largest),
    )


@lru_cache(maxsize=256)
def _layer_weights(model: ModelConfig, tp: int, ep: int) -> tuple[int, int, int, int]:
    """Counts the elements of one layer on a rank: of the matrices that tensor parallelism cuts, of the rank's
    experts if ep exceeds 1, of the largest matrix, and of norms, biases and routers."""
    divided, whole = layer_on_rank(model, "fused", ep)
    cut, experts = [matrix.elements // tp for matrix in divided], [matrix.elements for matrix in whole]
    return sum(cut), sum(experts), max(*cut, *experts), small_parameters(model, tp)


def stored_shapes(setup: Setup, layout: Layout, stage: int) -> Counter[Shape]:
    """Counts, by (rows, columns), the matrices of a stage that the ranks of a TP group store together. The
    run's strategy determines how weights are split into matrices. If experts are divided among ranks, only
    one rank's experts are included."""
    counts = Counter[Shape]()
    for kind, layers in stage_blocks(setup.model, layout, stage):
        for matrices in layer_on_rank(kind, splitting_of(setup), layout.ep):
            for matrix in matrices:
                counts[matrix.rows, matrix.cols] += layers
    return counts


def layer_activations(setup: Setup, kind: ModelConfig, layout: Layout, recompute: Recompute) -> int:
    """Counts the bytes that a layer keeps for the backward pass of one micro-batch. All layers of `kind` are like it.

    With sequences of s tokens, T = micro-batch * s / c, a query heads and g key-value heads of d elements,
    and x = t with sequence parallelism, else 1:
    - the family's activations (`Family.activations`): T / x tokens of the residual stream, T / t of
      everything else, but T of the tokens' copies for experts if ep is 1;
    - torch's core attention (without Transformer Engine) with c > 1 and no recomputation: k and v of the full
      sequence, 2 T c g d / t, instead of the rotated k; and a second copy of the attention's output,
      T a d / t, because its two chunks are joined.

    SwiGLU is not fused on CPUs. Recomputation `selective` recomputes core attention; `full` keeps only the
    layer's input.
    """
    t, width = layout.tp, setup.train.weight_bytes
    tokens, stream = micro_batch_tokens(setup, layout), stream_elements(setup, layout)
    if recompute == "full":
        return width * stream
    family, on_cpu = family_of(kind), setup.cluster.device == "cpu"
    activations = family.activations(kind, not on_cpu)
    cut = activations.cut * tokens // t + activations.copied * tokens * layout.expert_tp // t
    if layout.cp > 1 and not setup.cluster.fused_layers and recompute == "none":
        attentions = [work.attention for work in family.modules(kind) if work.attention is not None]
        for attention in attentions:
            queries, keys = attention.queries * tokens // t, attention.keys * tokens // t
            cut += 2 * layout.cp * keys - keys + queries
    return width * (activations.stream * stream + cut) + _fp8_inputs(setup, kind, layout)


def _fp8_inputs(setup: Setup, kind: ModelConfig, layout: Layout) -> int:
    """Counts the bytes by which a layer's activations grow if matmuls keep their inputs in FP8; usually they
    shrink.

    An input in FP8 takes one byte an element in place of two. The input of proj takes one more, because core attention
    keeps its output in bf16. Transformer Engine's modules keep the copy along columns only."""
    if setup.train.fp8 == "none":
        return 0
    grown = 0
    for work in family_of(kind).modules(kind):
        if work.experts > 1 or work.weight.cut == "cols":
            elements = module_tokens(setup, layout, work) * held_weight(layout, work).cols
        else:
            elements = stream_elements(setup, layout)
        grown += elements if work.part == "proj" else -elements
    return grown


def held_weight(layout: Layout, work: Work) -> Weight:
    """Returns the part of a module's weight, or of one expert's weight, that a rank stores."""
    return work.weight.stored(layout.expert_tp if work.experts > 1 else layout.tp)


def module_tokens(setup: Setup, layout: Layout, work: Work) -> int:
    """Returns the tokens of a micro-batch on a rank that a module's weights multiply: with experts, copies of them."""
    tokens = micro_batch_tokens(setup, layout)
    return tokens if work.experts == 1 else tokens * work.experts_per_token * layout.expert_tp // layout.tp


def weight_copies(setup: Setup, layout: Layout, stage: int) -> int:
    """Counts the bytes of a stage's weights in FP8, along rows and along columns, which Transformer Engine keeps from
    the first to the last micro-batch of a step."""
    return 0 if setup.train.fp8 == "none" else 2 * stage_weights(setup, layout, stage).matrices


@dataclass(frozen=True, kw_only=True)
class Transient:
    """The bytes that a rank needs temporarily, in addition to its state, during micro-batches and the
    optimizer step."""

    activations: int
    logits: int
    """The bytes that the loss and the output layer's backward pass need."""
    working: int
    """The bytes that one layer's backward pass needs in addition to activations, after logits are freed."""
    update: int
    """The bytes that the matrices' optimizer step needs, after activations and logits are freed."""
    adamw: int = 0
    """The bytes that AdamW's update needs if it runs before the matrices' update, otherwise 0."""

    def parts(self, *, reduction: int = 0, gathering: int = 0) -> dict[str, int]:
        """Returns the bytes by part. Memory that is never needed at the same time counts once: `workspace` is
        only the excess over memory that was freed earlier.

        Args:
            reduction: the bytes of scratch for reductions during the backward pass.
            gathering: the bytes of scratch for gatherings during the forward pass. These may be needed until
                the last layers, together with all activations, but before there are logits.
        """
        freed = self.activations + self.logits
        working = max(self.working + reduction, gathering) - self.logits
        workspace = max(0, working, max(self.update, self.adamw) - freed)
        return {"activations": self.activations, "logits": self.logits, "workspace": workspace}


def warmup_forwards(layout: Layout, stage: int) -> int:
    """Counts the warm-up forward passes of a stage's model chunks, as Megatron's `get_pp_rank_microbatches`
    does. Before the first backward pass, one more forward pass follows, if any is left."""
    warmup = layout.pp - stage - 1
    if layout.vpp > 1:
        warmup = 2 * warmup + (layout.vpp - 1) * layout.pp
    return min(warmup, layout.vpp * layout.num_microbatches)


def layers_in_flight(layers: int, layout: Layout, stage: int) -> int:
    """Counts the layers whose activations a stage holds at the peak. A layer counts once for each
    micro-batch.

    Megatron runs `warmup_forwards` forward passes, then alternates forward and backward passes. After every
    pp micro-batches it moves to the next chunk, and in backward passes to the previous chunk.

    Args:
        layers: the number of layers in the model.
    """
    chunks = tuple(len(chunk_layers(layers, layout, stage, chunk)) for chunk in range(layout.vpp))
    return _most_in_flight(chunks, layout.pp, layout.num_microbatches, stage)


@lru_cache(maxsize=4096)
def _most_in_flight(sizes: tuple[int, ...], pp: int, count: int, stage: int) -> int:
    """Returns the sum of the sizes of a stage's model chunks in flight at the peak, as in `layers_in_flight`.

    Args:
        sizes: the size of each chunk, such as its number of layers.
    """
    vpp = len(sizes)
    passes = vpp * count
    layout = Layout.plain(pp=pp, vpp=vpp, num_microbatches=count)
    in_flight = min(warmup_forwards(layout, stage) + 1, passes)
    if len(set(sizes)) == 1:
        return in_flight * sizes[0]
    chunk_of = [index // pp % vpp for index in range(in_flight + pp * vpp)]
    peak = current = sum(sizes[chunk] for chunk in chunk_of[:in_flight])
    for index in range(min(passes - in_flight, pp * vpp)):  # the pattern repeats after that
        forward, backward = chunk_of[in_flight + index], vpp - 1 - chunk_of[index]
        current += sizes[forward] - sizes[backward]
        peak = max(peak, current)
    return peak


def _activations_in_flight(
    model: ModelConfig, layout: Layout, stage: int, layer_bytes: Mapping[ModelConfig, int]
) -> int:
    """Counts the bytes of activations that a stage holds at the peak.

    Args:
        layer_bytes: the `layer_activations` of each kind of layer.
    """
    if len(layer_bytes) == 1:
        return layers_in_flight(model.num_layers, layout, stage) * sum(layer_bytes.values())
    kinds = layer_models(model)
    chunks = (chunk_layers(model.num_layers, layout, stage, chunk) for chunk in range(layout.vpp))
    sizes = tuple(sum(layer_bytes[kinds[layer]] for layer in layers) for layers in chunks)
    return _most_in_flight(sizes, layout.pp, layout.num_microbatches, stage)


def transient(setup: Setup, algorithm: Algorithm, layout: Layout, stage: int) -> Transient:
    """Counts the bytes that a rank of `stage` needs in addition to its state while it computes."""
    (of_stage,) = transients(setup, algorithm, layout, (stage,))
    return of_stage


def transients(setup: Setup, algorithm: Algorithm, layout: Layout, stages: Iterable[int]) -> Iterator[Transient]:
    """Yields the `transient` of each of several stages."""
    model, width, t = setup.model, setup.train.weight_bytes, layout.tp
    hidden, tokens = model.hidden_size, micro_batch_tokens(setup, layout)
    layer_bytes = {kind: layer_activations(setup, kind, layout, layout.recompute) for kind in layer_kinds(model)}
    # The backward pass of one layer: gradients of its largest activations, the gathered stream, the gradient
    # of the largest weight before it is added to the buffer, and the activations that recomputation restores.
    layer_working = {
        kind: width * (family_of(kind).activations(kind, True).largest * tokens // t)
        + layer_activations(setup, kind, layout, "none")
        - kept
        for kind, kept in layer_bytes.items()
    }
    for stage in stages:
        weights = stage_weights(setup, layout, stage)
        activations = _activations_in_flight(model, layout, stage, layer_bytes)
        logits = 0
        if stage == layout.pp - 1:
            activations += 2 * width * stream_elements(setup, layout)
            logits = _output_layer(
                setup, tokens * model.vocab_size // t, tokens * hidden, model.vocab_size * hidden // t
            )
        of_layer = max(layer_working[kind] for kind, _ in stage_blocks(model, layout, stage))
        working = of_layer + width * (2 * tokens * hidden + weights.largest)
        update, adamw = _step_bytes(setup, algorithm, layout, weights)
        yield Transient(activations=activations, logits=logits, working=working, update=update, adamw=adamw)


def _output_layer(setup: Setup, logits: int, stream: int, weights: int) -> int:
    """Counts the bytes that the loss and the output layer need in addition to activations, at the peak. The
    peak is either in the loss or in the backward pass of the output layer.

    The loss of bf16 logits needs an fp32 softmax at the same time as the logits or, later, their gradient.
    Megatron's fused loss, which runs on GPUs, first makes an fp32 gradient at the same time as both
    (tests/dist/test_peak_memory.py). The loss of fp32 logits overwrites the logits with their softmax and
    then with their gradient. The backward pass needs the gradients of the logits, the input and the weights.
    On processors without bf16 instructions it also needs fp32 copies of both factors and of the result.

    Args:
        logits: the logits of a micro-batch on one rank.
        stream: the elements of the output layer's input, gathered over TP ranks.
        weights: the elements of the output layer on one rank.
    """
    width = setup.train.weight_bytes
    if width == FP32:
        return FP32 * (logits + stream + weights)
    loss = (width + FP32 * (2 if setup.cluster.device == "cuda" else 1)) * logits
    if setup.cluster.bf16_in_fp32:
        return loss + FP32 * (stream + weights) + width * stream
    return max(loss, width * (logits + stream + weights))


HOME_BYTES = 16
"""The bytes of fp32 copies per element that a home receives, updates and sends back in Megatron's mode layer_sharded:
the momentum, the update, and the two buffers of the way back. A home's share of elements is that of a fragment."""


def _step_bytes(setup: Setup, algorithm: Algorithm, layout: Layout, weights: StageWeights) -> tuple[int, int]:
    """Counts the bytes of `Transient.update` and `Transient.adamw`.

    Buffers that canzona's engine and optimizers keep from step to step are in `step_buffers`.
    """
    execution = setup.execution
    # The engine reads the matrices' gradients from the buffer in which they were reduced.
    if execution.everywhere:
        share = FP32 * (weights.others if execution.ours else weights.matrices + weights.others)
    else:
        share = FP32 * weights.share(layout, matrices=not execution.ours)
    # Gradients that are reduced in bf16 are copied to fp32 for the masters and kept until the step is over.
    copies = share if setup.train.gradient_bytes < FP32 else 0
    # Without Transformer Engine's fused AdamW, torch's foreach version makes one fp32 temporary per updated
    # element.
    adamw = copies if setup.cluster.fused_layers else copies + share
    if execution is Execution.ADAMW:
        return adamw, 0
    update = momentary_bytes(setup, algorithm)
    if tp_mode_of(setup, layout.tp) == "layer_sharded":
        dense = weights.matrices - weights.experts
        update = max(update, HOME_BYTES * (dense // layout.owners if execution.has_owners else dense))
    return copies + update, adamw if execution.ours else 0


def stream_elements(setup: Setup, layout: Layout) -> int:
    """Counts the elements of one micro-batch's residual stream on one rank."""
    elements = micro_batch_tokens(setup, layout) * setup.model.hidden_size
    return elements // (layout.tp if layout.sequence_parallel else 1)


def micro_batch_tokens(setup: Setup, layout: Layout) -> int:
    """Counts the tokens of a micro-batch on one rank."""
    return layout.micro_batch_size * setup.train.seq_length // layout.cp
