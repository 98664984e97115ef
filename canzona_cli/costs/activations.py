"""Memory a rank needs while it computes, on top of what it keeps: activations, logits,
workspace of the update.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), rewritten for SwiGLU, grouped-query
attention, QK-norm and no dropout (see `layer_activations`). Everything is bytes on one rank; (t, p, c, D) are
tp, pp, cp and dp.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.schema import Layout, ModelConfig, RunConfig
from canzona_cli.costs.buffers import FP32, element_bytes, momentary_bytes
from canzona_cli.model.families import family_of, norm_parameters
from canzona_cli.model.matrices import layer_shapes


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """Parameters one tensor-parallel rank of one pipeline stage stores."""

    matrices: int
    """Elements in 2-D layer weights."""
    others: int
    """Elements AdamW updates: embedding, output layer, norms."""
    largest: int
    """Elements of the largest single parameter."""


def stage_weights(config: RunConfig, layout: Layout, stage: int) -> StageWeights:
    """Counts what a rank of `stage` stores. A tied output layer is a second copy of the embedding when p > 1."""
    return _stage_weights(config.model, layout.tp, layout.pp, stage)


@lru_cache(maxsize=1024)
def _stage_weights(model: ModelConfig, t: int, p: int, stage: int) -> StageWeights:
    layers = model.num_layers // p
    shapes = layer_shapes(model, "fused")
    vocabulary = model.vocab_size * model.hidden_size // t
    first, last = stage == 0, stage == p - 1
    copies = int(first) + int(last and not (first and model.tied_embeddings))
    others = layers * norm_parameters(model) + copies * vocabulary + (model.hidden_size if last else 0)
    return StageWeights(
        matrices=layers * sum(rows * cols // t for rows, cols in shapes),
        others=others,
        largest=max(vocabulary if copies else 0, *(rows * cols // t for rows, cols in shapes)),
    )


def matrix_shapes(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one layer's matrices as the strategy updates them."""
    return layer_shapes(config.model, splitting_of(config))


def layer_activations(config: RunConfig, layout: Layout, recompute: str) -> int:
    """Bytes one layer keeps for the backward pass of one micro-batch.

    With T = micro-batch * s / c tokens, element size w, and x = t under sequence parallelism, else 1:
    - the family's activations (`Family.activations`): T / x tokens of the residual stream, T / t of
      everything else;
    - core attention by torch (no Transformer Engine) with c > 1: the k and v of the whole sequence, 2 T c g d
      / t, in place of the rotated k, and on GPUs the context once more, T a d / t, where its two chunks are
      joined.
    On CPU SwiGLU is not fused. selective recomputes core attention, full keeps only the layer's input.
    """
    model, t, width = config.model, layout.tp, element_bytes(config)[0]
    tokens, stream = micro_batch_tokens(config, layout), stream_elements(config, layout)
    if recompute == "full":
        return width * stream
    on_cpu = config.cluster.device == "cpu"
    family = family_of(model)
    activations = family.activations(model, not on_cpu)
    cut = activations.cut * tokens // t
    if layout.cp > 1 and not config.cluster.fused_layers and recompute == "none":
        for attention in (work.attention for work in family.work(model) if work.attention is not None):
            queries, keys = attention.queries * tokens // t, attention.keys * tokens // t
            cut += 2 * layout.cp * keys - keys + (0 if on_cpu else queries)
    return width * (activations.stream * stream + cut)


@dataclass(frozen=True, kw_only=True)
class Transient:
    """Bytes one rank needs on top of its state, by when: a micro-batch, or the optimizer step."""

    activations: int
    logits: int
    working: int
    """The bytes that one layer's backward pass needs on top of activations; logits are gone by then."""
    update: int
    """The bytes that the optimizer step needs, when activations and logits are gone."""
    adamw: int = 0
    """The bytes that AdamW's update needs where it comes before the matrices'."""

    def parts(self, *, reduction: int = 0, gathering: int = 0) -> dict[str, int]:
        """Counts once what is never alive together: the later ones only beyond what has been freed by then.

        Args:
            reduction: the bytes that gradients on their way hold under the backward pass.
            gathering: the bytes that weights on their way hold under the forward pass, until the last layers
                have them: with up to all activations, but no logits.
        """
        freed = self.activations + self.logits
        working = max(self.working + reduction, gathering) - self.logits
        workspace = max(0, working, max(self.update, self.adamw) - freed)
        return {
            "activations": self.activations,
            "logits": self.logits,
            "workspace": workspace,
        }


def forwards_ahead(layout: Layout, stage: int) -> int:
    """Forward passes of a stage's model chunks before its first backward pass, as `get_pp_rank_microbatches`
    counts them."""
    ahead = layout.pp - stage - 1
    if layout.vpp > 1:
        ahead = 2 * ahead + (layout.vpp - 1) * layout.pp
    return min(ahead, layout.vpp * layout.num_microbatches)


def transient(config: RunConfig, layout: Layout, stage: int) -> Transient:
    """Returns the bytes that a rank of `stage` needs while it computes."""
    model, width, t = config.model, element_bytes(config)[0], layout.tp
    weights = stage_weights(config, layout, stage)
    tokens, layers = micro_batch_tokens(config, layout), model.num_layers // (layout.pp * layout.vpp)
    in_flight = min(forwards_ahead(layout, stage) + 1, layout.vpp * layout.num_microbatches)
    layer = layer_activations(config, layout, layout.recompute)
    activations = in_flight * layers * layer
    logits = 0
    if stage == layout.pp - 1:
        activations += 2 * element_bytes(config)[0] * stream_elements(config, layout)
        # Per vocabulary entry and token: the logits, their softmax in fp32 (in place in fp32), and their
        # gradient.
        logits = (2 * width + FP32 if width < FP32 else 2 * FP32) * tokens * model.vocab_size // t
    # The backward pass of one layer: gradients of its largest activations, the gathered stream, the gradient
    # of the largest weight before it joins the buffer, and what recomputation brings back.
    largest = family_of(model).activations(model, True).largest * tokens // t
    working = width * (largest + 2 * tokens * model.hidden_size + weights.largest)
    working += layer_activations(config, layout, "none") - layer
    update, adamw = _scratch(config, layout, weights)
    return Transient(activations=activations, logits=logits, working=working, update=update, adamw=adamw)


def _scratch(config: RunConfig, layout: Layout, weights: StageWeights) -> tuple[int, int]:
    """Scratch of the optimizer step when activations are gone,
    and of AdamW's part where that comes first, or 0.

    What canzona's engine and its optimizers hold all the time is in `step_buffers`.
    """
    execution = execution_of(config)
    # The engine takes the matrices' gradients from where they were reduced to.
    elements = weights.others if execution.ours else weights.matrices + weights.others
    share = FP32 * (elements if execution.everywhere else math.ceil(elements / layout.owners))
    # Reduced in bf16, gradients are copied to fp32 for the masters, until the step is over.
    copies = share if element_bytes(config)[1] < FP32 else 0
    # Without Transformer Engine's fused AdamW, torch's foreach version makes one fp32 temporary of what it
    # updates.
    adamw = copies if config.cluster.fused_layers else copies + share
    if execution is Execution.ADAMW:
        return adamw, 0
    return copies + momentary_bytes(config, matrix_shapes(config)), adamw if execution.ours else 0


def stream_elements(config: RunConfig, layout: Layout) -> int:
    """Counts the elements of one micro-batch's residual stream on one rank."""
    held = micro_batch_tokens(config, layout) * config.model.hidden_size
    return held // (layout.tp if layout.sequence_parallel else 1)


def micro_batch_tokens(config: RunConfig, layout: Layout) -> int:
    """Counts the tokens of a micro-batch on one rank."""
    return layout.micro_batch_size * config.train.seq_length // layout.cp
