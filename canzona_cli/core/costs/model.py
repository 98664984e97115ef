"""The time of a pipeline stage: its forward and backward passes, and its passes over gradients, which zero them,
compute their norm and clip them.

The forward and backward passes are timed module by module (`costs.modules`), because a bucket of gradients
may become complete, or a bucket of weights may be needed, between any two modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from itertools import accumulate

from canzona_cli.core.costs.buffers import stage_weights, stream_elements
from canzona_cli.core.costs.links import Groups, Links, Transfer
from canzona_cli.core.costs.modules import CAST_BYTES, Module, ModuleTimes
from canzona_cli.core.costs.update import adamw_seconds, memory_rate, step_factor
from canzona_cli.core.model.families import blocks_of_layers, layer_kinds, layer_models
from canzona_cli.core.setup import Layout, ModelConfig, Recompute, Setup
from canzona_cli.core.setup.stages import chunk_layers

PASS_S = 150e-6
"""The fixed seconds of one micro-batch's forward or backward pass through a model chunk, for any number of layers: the
host's work for the schedule, and to issue a send and a receive.

Measured with Megatron-core 0.19 and gloo: 130 to 180 us of host processor time (16 layers of width 32 on 2 ranks, 8
chunks per rank compared with 2, 4 micro-batches, the minimum of 40 steps). The same code runs with NCCL. A busy GPU may
hide some of this time, but that was not measured, so none is assumed hidden."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """The time of one pipeline stage. Its chunks are model chunks."""

    chunks: tuple[tuple[Module, ...], ...]
    """The modules of each model chunk, in forward order."""
    hop: Transfer
    """The transfer of the residual stream to the next stage."""
    pass_s: float
    """The seconds that a chunk's pass takes in addition to its modules."""

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The modules of all chunks. A module's place is its index in this tuple."""
        return tuple(module for chunk in self.chunks for module in chunk)

    @cached_property
    def places(self) -> tuple[range, ...]:
        """The places of the modules of each chunk."""
        ends = list(accumulate(map(len, self.chunks)))
        return tuple(range(end - len(chunk), end) for chunk, end in zip(self.chunks, ends, strict=True))

    @cached_property
    def passes(self) -> tuple[tuple[float, float], ...]:
        """The forward and backward seconds of each chunk for one micro-batch, collectives included."""
        return tuple(
            (computed + moves.seconds, computed_back + moves_back.seconds)
            for (computed, computed_back), (moves, moves_back) in zip(self.computed, self.moves, strict=True)
        )

    @cached_property
    def computed(self) -> tuple[tuple[float, float], ...]:
        """The forward and backward seconds of each chunk for one micro-batch, excluding collectives."""

        def of_chunk(chunk: tuple[Module, ...]) -> tuple[float, float]:
            forward_s = sum(module.forward_s for module in chunk)
            backward_s = sum(module.backward_s + module.again_s for module in chunk)
            return self.pass_s + forward_s, self.pass_s + backward_s

        return tuple(map(of_chunk, self.chunks))

    @cached_property
    def moves(self) -> tuple[tuple[Transfer, Transfer], ...]:
        """The forward and backward collectives of each chunk for one micro-batch."""

        @cache  # most chunks have the same collectives
        def in_sequence(moves: tuple[tuple[Transfer, Transfer], ...]) -> tuple[Transfer, Transfer]:
            forward, backward = zip(*moves, strict=True) if moves else ((), ())
            return reduce(Transfer.followed_by, forward, Transfer()), reduce(Transfer.followed_by, backward, Transfer())

        return tuple(in_sequence(tuple(module.moves for module in chunk)) for chunk in self.chunks)

    @property
    def forward_s(self) -> float:
        """The forward seconds of one micro-batch through all chunks."""
        return sum(forward for forward, _ in self.passes)

    @property
    def backward_s(self) -> float:
        """The backward seconds of one micro-batch through all chunks."""
        return sum(backward for _, backward in self.passes)


@lru_cache(maxsize=64)
def stage_time(setup: Setup, layout: Layout, stage: int) -> StageTime:
    """Returns the times of the modules of `stage`, for one micro-batch on one rank.

    With sequences of s tokens and c = cp, let T = micro-batch * s / c tokens, h the hidden size, a query
    heads and g key-value heads of d elements, f the width of the MLP, t = tp, and x = t with sequence
    parallelism, else 1. Per micro-batch and rank:
    - qkv: matmul T x h x (a+2g)d/t; core attention, 2 T s ad/t FLOPs forward (causal); norm 2 T h/x elements
      through memory, rotary embedding 2 T (a+g)d/t, and QK-norm, if any, as many again or, with Transformer
      Engine, `QK_NORM_PASSES` times as many. With c > 1, keys and values are all-gathered before core
      attention, 2 T c gd/t elements. Transformer Engine passes them around a ring instead; this costs the
      part of a slice's transfer that takes longer than its attention, and `RING_PASSES` (c-1) T ad/t to add
      the slices' outputs;
    - proj: matmul T x ad/t x h, residual 3 T h/x;
    - fc1 with a gate: matmul T x h x 2f/t, norm 2 T h/x, SwiGLU 3 T f/t; fc2: matmul T x f/t x h, residual
      3 T h/x;
    - the backward pass of these modules computes two matmuls for each matmul and 2.5 times core attention,
      moves twice the elements, and adds every weight's gradient to its buffer once per micro-batch;
    - experts: see `costs.modules`. If they are divided among ranks, tokens are sent before fc1 and after fc2,
      instead of the collectives below;
    - half an all-reduce of the residual stream before qkv, fc1 and the output layer and after proj, fc2 and
      the embedding (with sequence parallelism an all-gather or a reduce-scatter), and the same in the
      backward pass; in the loss, three all-reduces of one number per token.
    """
    times, model = ModuleTimes(setup, layout), setup.model
    modules, kinds = {kind: times.layer(kind) for kind in layer_kinds(model)}, layer_models(model)
    chunks = [
        [
            module._replace(layer=layer)
            for layer in chunk_layers(model.num_layers, layout, stage, chunk)
            for module in modules[kinds[layer]]
        ]
        for chunk in range(layout.vpp)
    ]
    if stage == 0:
        chunks[0].insert(0, times.embedding())
    if stage == layout.pp - 1:
        chunks[-1].append(times.output(tied=stage == 0 and model.tied_embeddings))
    return StageTime(chunks=tuple(map(tuple, chunks)), hop=hop(setup, layout), pass_s=PASS_S)


def passes(setup: Setup, layout: Layout) -> list[list[tuple[float, float]]]:
    """Returns the forward and backward seconds of one micro-batch, by stage and model chunk: the
    `StageTime.passes` of all stages, computed faster, without lists of modules."""
    layers, embedding, output = _pieces(setup, *_ranks(layout))
    model = setup.model

    def of_chunk(stage: int, chunk: int) -> tuple[float, float]:
        forward_s = backward_s = PASS_S
        for kind, count in blocks_of_layers(model, [chunk_layers(model.num_layers, layout, stage, chunk)]):
            forward_s += count * layers[kind][0]
            backward_s += count * layers[kind][1]
        return forward_s, backward_s

    by_stage = [[of_chunk(stage, chunk) for chunk in range(layout.vpp)] for stage in range(layout.pp)]
    # The first chunk of the first stage has the embedding, the last chunk of the last stage the output layer.
    for end, (forward_s, backward_s) in ((0, embedding), (-1, output)):
        by_stage[end][end] = (by_stage[end][end][0] + forward_s, by_stage[end][end][1] + backward_s)
    return by_stage


def layers_and_ends(setup: Setup, layout: Layout) -> tuple[Mapping[ModelConfig, float], float]:
    """Returns the seconds of a micro-batch's forward and backward pass through a layer, by its kind; and those through
    the embedding and the output layer together."""
    layers, embedding, output = _pieces(setup, *_ranks(layout))
    return {kind: sum(passes_s) for kind, passes_s in layers.items()}, sum(embedding) + sum(output)


def _ranks(layout: Layout) -> tuple[int, int, int, int, int, Recompute, bool]:
    """Returns all of a layout on which `_pieces` depend: pp and dp matter only as their product, so that many layouts
    share a cached result."""
    return (
        layout.tp,
        layout.cp,
        layout.dp * layout.pp,
        layout.ep,
        layout.micro_batch_size,
        layout.recompute,
        layout.sequence_parallel,
    )


@lru_cache(maxsize=4096)
def _pieces(
    setup: Setup,
    tp: int,
    cp: int,
    dp: int,
    ep: int,
    micro_batch_size: int,
    recompute: Recompute,
    sequence_parallel: bool,
) -> tuple[Mapping[ModelConfig, tuple[float, float]], tuple[float, float], tuple[float, float]]:
    """Returns the forward and backward seconds of a layer, by its kind, of the embedding and of the output layer, on
    one stage. They do not depend on whether the output layer is tied."""
    layout = Layout(
        tp=tp,
        pp=1,
        cp=cp,
        dp=dp,
        ep=ep,
        micro_batch_size=micro_batch_size,
        num_microbatches=1,
        global_batch_size=1,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    times = ModuleTimes(setup, layout)

    def seconds(*modules: Module) -> tuple[float, float]:
        stage = StageTime(chunks=(modules,), hop=Transfer(), pass_s=0.0)
        return stage.forward_s, stage.backward_s

    layers = {kind: seconds(*times.layer(kind)) for kind in layer_kinds(setup.model)}
    return layers, seconds(times.embedding()), seconds(times.output(tied=False))


def hop(setup: Setup, layout: Layout) -> Transfer:
    """Returns the transfer of one micro-batch's residual stream to the next pipeline stage."""
    if layout.pp == 1:
        return Transfer()
    width = setup.train.weight_bytes
    crosses = Groups.of(layout, setup.cluster).stage_crosses
    return Links(cluster=setup.cluster).point_to_point(stream_elements(setup, layout) * width, crosses=crosses)


def units_taken(setup: Setup, layout: Layout) -> float:
    """Returns the share of a GPU's compute units that data-parallel collectives occupy. Over several nodes it
    is proportional to the number of network ports that the collectives use, because NCCL runs channels for
    each port."""
    cluster, group = setup.cluster, Groups.of(layout, setup.cluster).data
    ports = 1.0 if group.machines == 1 else group.per_machine / cluster.gpus_per_node
    return cluster.collective_units * ports


def preparation_seconds(setup: Setup, layout: Layout, stage: int, padding: int = 0) -> float:
    """Returns the seconds that it takes, once in a step, to zero a stage's gradient buffers and to cast its weights to
    FP8.

    Args:
        padding: the elements of padding in the buffers.
    """
    weights = stage_weights(setup, layout, stage)
    moved = (weights.matrices + weights.others + padding) * setup.train.gradient_bytes
    if setup.train.fp8 != "none":
        moved += weights.matrices * CAST_BYTES[setup.train.fp8]
    return moved / memory_rate(setup.cluster)


NORM_BYTES, CLIP_BYTES = 4, 8
"""The bytes of memory traffic per fp32 gradient element: the norm reads it; the clip reads and writes it."""


class NormClip:
    """The time of gradient norm and clip, if ranks do not share a device."""

    def __init__(self, setup: Setup, layout: Layout) -> None:
        byte_s = step_factor(setup, "norm_clip") / memory_rate(setup.cluster)
        self.norm_element_s = NORM_BYTES * byte_s
        """The seconds that the norm takes for each gradient element that was reduced to a rank."""
        world = Groups.of(layout, setup.cluster).world
        self.all_reduce_s = Links(cluster=setup.cluster).all_reduce(8.0, world).seconds
        """The seconds of the all-reduce of a few numbers over all ranks."""
        self.clip_element_s = CLIP_BYTES * byte_s
        """The seconds for each element that is clipped in a separate pass."""

    def seconds(self, elements: float, clipped: float) -> float:
        """Returns the seconds of norm and clip on one rank, without waiting for other ranks.

        Args:
            elements: the gradient elements that were reduced to the rank.
            clipped: the elements that are clipped in a separate pass.
        """
        return elements * self.norm_element_s + self.all_reduce_s + clipped * self.clip_element_s


def least_before_updates(setup: Setup, layout: Layout) -> float:
    """Estimates the least seconds of norm, clip and AdamW on a rank: the time of an average owner in stage
    pp // 2, which has neither embedding nor output layer if pp > 2."""
    weights = stage_weights(setup, layout, layout.pp // 2)
    adamw = weights.others / layout.owners
    matrices = weights.reduced(layout)
    update_s = step_factor(setup, "adamw_update") * adamw_seconds(adamw, setup.cluster)
    return NormClip(setup, layout).seconds(matrices + adamw, adamw) + update_s
