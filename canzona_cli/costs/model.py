"""The time of a pipeline stage's forward and backward passes, module by module, from shapes and the profile's
rates.

A module is one Megatron weight with the operations around it. Times are per module, because a bucket of
gradients may become complete, or a bucket of weights may be needed, between any two modules. Matmuls run at
the profile's achieved rate for their size, core attention at a share of the peak, and elementwise work at
memory bandwidth. Tensor- and context-parallel collectives are counted separately, because they occupy a link.
On CPU ranks that share a node's cores, they also keep a different number of cores busy than computation does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from statistics import NormalDist

from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.config.stages import chunk_layers
from canzona_cli.costs.attention import CUT_STARTS, core_attention, head_passes, query_key_elements
from canzona_cli.costs.buffers import micro_batch_tokens, stream_elements
from canzona_cli.costs.experts import (
    copy_passes,
    dispatch,
    held_experts,
    held_weight,
    is_divided,
    launch_seconds,
    products_seconds,
)
from canzona_cli.costs.links import Groups, Links, Transfer
from canzona_cli.costs.update import matmul_seconds, memory_rate
from canzona_cli.model.families import family_of
from canzona_cli.model.family import Part, Work

ELEMENTWISE_PASSES = {True: 1.2, False: 3.0}
"""The memory traffic of elementwise work relative to fully fused kernels, with (True) and without (False)
Transformer Engine. With it, the excess comes from splitting and joining queries, keys and values and from
summing gradients (fitted to published step times, bench/published.yaml). Without it, most operations are
separate kernels.
"""
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 18, 8
"""The memory traffic of the vocabulary-parallel cross-entropy in bytes per logit: the cast to fp32, maximum,
exponential and sum in the forward pass; the gradient in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """The time of one module for one micro-batch on one rank."""

    part: Part
    layer: int
    """The index of the layer in the model; -1 for the embedding, the number of layers for the output
    layer."""
    forward_s: float
    backward_s: float
    """The seconds of the backward pass without recomputation."""
    again_s: float
    """The seconds of activation recomputation, which repeats forward work in the backward pass."""
    weights: int
    """The elements of the module's weight on this rank; 0 for a tied output layer on the embedding's
    stage."""
    moves: tuple[Transfer, Transfer]
    """The collectives of the forward pass, and those of the backward pass, which include recomputation. Their
    `cores` add up the cores of all groups that have ranks of one owner."""
    dispatched: bool = False
    """True if `moves` transfer tokens to experts on other ranks, or back from them."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """The time of one pipeline stage."""

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

        def of_chunk(chunk: tuple[Module, ...]) -> tuple[Transfer, Transfer]:
            forward, backward = zip(*(module.moves for module in chunk), strict=True) if chunk else ((), ())
            return reduce(Transfer.followed_by, forward, Transfer()), reduce(Transfer.followed_by, backward, Transfer())

        return tuple(map(of_chunk, self.chunks))

    @property
    def forward_s(self) -> float:
        """The forward seconds of one micro-batch through all chunks."""
        return sum(forward for forward, _ in self.passes)

    @property
    def backward_s(self) -> float:
        """The backward seconds of one micro-batch through all chunks."""
        return sum(backward for _, backward in self.passes)


@lru_cache(maxsize=64)
def stage_time(config: RunConfig, layout: Layout, stage: int) -> StageTime:
    """Returns the times of the modules of `stage`, for one micro-batch on one rank.

    Let T = micro-batch * s / c tokens, h the hidden size, a query heads and g key-value heads of d elements,
    f the width of the MLP, t = tp, and x = t with sequence parallelism, else 1. Per micro-batch and rank:
    - qkv: matmul T x h x (a+2g)d/t; core attention, 2 T s ad/t FLOPs forward (causal); norm 2 T h/x, QK-norm
      and rotary embedding 4 T (a+g)d/t elements through memory. With c > 1, keys and values are all-gathered
      before core attention, 2 T c gd/t elements. Transformer Engine passes them around a ring instead; this
      costs only the part of a slice's transfer that takes longer than its attention;
    - proj: matmul T x ad/t x h, residual 3 T h/x;
    - fc1: matmul T x h x 2f/t, norm 2 T h/x, SwiGLU 3 T f/t; fc2: matmul T x f/t x h, residual 3 T h/x;
    - the backward pass computes two matmuls for each matmul and 2.5 times core attention, moves twice the
      elements, and adds every weight's gradient to its buffer once per micro-batch;
    - experts: see `costs.experts`. If they are divided among ranks, tokens are sent before fc1 and after fc2,
      instead of the collectives below;
    - half an all-reduce of the residual stream before qkv and fc1 and after proj, fc2 and the embedding (with
      sequence parallelism an all-gather or a reduce-scatter), and the same in the backward pass.
    """
    batch = _MicroBatch.of(config, layout)
    layers, layer = config.model.num_layers, _layer(config, layout, batch)
    numbers_by_chunk = (chunk_layers(layers, layout, stage, chunk) for chunk in range(layout.vpp))
    chunks = [[replace(module, layer=number) for number in numbers for module in layer] for numbers in numbers_by_chunk]
    if stage == 0:
        chunks[0].insert(0, _embedding(config, layout, batch))
    if stage == layout.pp - 1:
        chunks[-1].append(_output(config, layout, batch, tied=stage == 0 and config.model.tied_embeddings))
    return StageTime(
        chunks=tuple(map(tuple, chunks)),
        hop=hop(config, layout),
        pass_s=1e-6 * config.cluster.pass_us,
    )


def passes(config: RunConfig, layout: Layout) -> list[list[tuple[float, float]]]:
    """Returns the forward and backward seconds of one micro-batch, by stage and model chunk: the
    `StageTime.passes` of all stages, computed faster, without lists of modules."""
    shared = replace(layout, pp=1, vpp=1, dp=layout.dp * layout.pp, num_microbatches=1, global_batch_size=1)
    layer, first, last = _pieces(config, shared)
    layers, pass_s = config.model.num_layers, 1e-6 * config.cluster.pass_us

    def of_chunk(stage: int, chunk: int) -> tuple[float, float]:
        count = len(chunk_layers(layers, layout, stage, chunk))
        return pass_s + count * layer[0], pass_s + count * layer[1]

    by_stage = [[of_chunk(stage, chunk) for chunk in range(layout.vpp)] for stage in range(layout.pp)]
    for end, (forward, backward) in ((0, first), (-1, last)):
        by_stage[end][end] = (by_stage[end][end][0] + forward, by_stage[end][end][1] + backward)
    return by_stage


@lru_cache(maxsize=1024)
def _pieces(config: RunConfig, layout: Layout) -> tuple[tuple[float, float], ...]:
    """Returns the forward and backward seconds of a layer, of the embedding and of the output layer.

    The seconds do not depend on pp or dp, so callers set these to fixed values, and all layouts share cached
    results. Nor do they depend on whether the output layer is tied.
    """
    batch = _MicroBatch.of(config, layout)
    ends = _embedding(config, layout, batch), _output(config, layout, batch, tied=False)
    pieces = (_layer(config, layout, batch), *((end,) for end in ends))
    times = (StageTime(chunks=(modules,), hop=Transfer(), pass_s=0.0) for modules in pieces)
    return tuple((time.forward_s, time.backward_s) for time in times)


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """The sizes and times of a micro-batch on one rank that all modules have in common."""

    tokens: int
    stream: int
    """The elements of the residual stream."""
    memory_s: float
    """The seconds of elementwise work per element and fused pass, with the factor `ELEMENTWISE_PASSES`."""
    accumulate_s: float
    """The seconds to add one element's gradient to its buffer."""
    exchange: Transfer
    """Half an all-reduce of the residual stream; with sequence parallelism, an all-gather."""
    copy_passes: float
    """The number of times that the elements in `Work.copied` pass through memory."""
    dispatch: Transfer
    """The transfer of tokens to experts on other ranks."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> "_MicroBatch":
        cluster, width = config.cluster, config.train.weight_bytes
        tokens, exchange = micro_batch_tokens(config, layout), Transfer()
        if layout.tp > 1:
            links, group = Links(cluster=cluster), Groups.of(layout, cluster).tp
            size = float(tokens * config.model.hidden_size * width)
            whole = links.all_gather(size, group) if layout.sequence_parallel else links.all_reduce(size, group)
            exchange = whole if layout.sequence_parallel else whole.scaled(0.5)
        return cls(
            tokens=tokens,
            stream=stream_elements(config, layout),
            memory_s=ELEMENTWISE_PASSES[cluster.fused_layers] * width / memory_rate(cluster),
            accumulate_s=2 * config.train.gradient_bytes / memory_rate(cluster),
            exchange=exchange,
            copy_passes=copy_passes(config, layout),
            dispatch=dispatch(config, layout) if layout.ep > 1 else Transfer(),
        )


def _layer(config: RunConfig, layout: Layout, batch: _MicroBatch) -> tuple[Module, ...]:
    """Returns the first layer's modules in forward order."""
    modules = [_module(config, layout, batch, work) for work in family_of(config.model).modules(config.model)]
    if config.cluster.dispatch_overlap:
        modules = _with_hidden_dispatch(config.cluster, modules)
    if config.model.num_experts:
        modules = _with_launches(config.cluster, modules)
    return tuple(modules)


def _with_hidden_dispatch(cluster: ClusterConfig, modules: Sequence[Module]) -> list[Module]:
    """Overlaps the transfers of a layer's tokens with another micro-batch's pass in the opposite direction:
    the transfer to the experts with one half of this pass, and the transfer back with the other half."""
    half_backward_s = sum(module.backward_s for module in modules) / 2
    half_forward_s = sum(module.forward_s for module in modules) / 2

    def with_hidden(module: Module) -> Module:
        forward, backward = module.moves
        units = cluster.collective_units
        exposed = forward.exposed(half_backward_s, units), backward.exposed(half_forward_s, units)
        return replace(module, moves=exposed)

    return [with_hidden(module) if module.dispatched else module for module in modules]


def _with_launches(cluster: ClusterConfig, modules: Sequence[Module]) -> list[Module]:
    """Adds the time of an expert layer's kernel launches to the module that has the router, fc1."""
    added_s = launch_seconds(cluster, sum(module.forward_s + module.moves[0].seconds for module in modules))
    added_backward_s = launch_seconds(cluster, sum(module.backward_s + module.moves[1].seconds for module in modules))

    def with_launches(module: Module) -> Module:
        again_s = module.again_s and module.again_s + added_s
        forward_s, backward_s = module.forward_s + added_s, module.backward_s + added_backward_s
        return replace(module, forward_s=forward_s, backward_s=backward_s, again_s=again_s)

    return [with_launches(module) if module.part == "fc1" else module for module in modules]


def _module(config: RunConfig, layout: Layout, batch: _MicroBatch, work: Work) -> Module:
    """Returns one module of the first layer."""
    cluster, tokens = config.cluster, batch.tokens
    weight, experts = held_weight(layout, work), held_experts(layout, work)
    products_s = products_seconds(config, layout, work)
    moved: float = work.stream * batch.stream + tokens * (work.elements // layout.tp)
    moved += tokens * work.copied * batch.copy_passes
    core_s, core_backward_s, (gather, scatter) = 0.0, 0.0, (Transfer(), Transfer())
    starts, weights = 1.0, experts * weight.elements
    if work.attention is not None:
        moved += head_passes(config, work.attention) * tokens * query_key_elements(work.attention, layout)
        core_s, core_backward_s, (gather, scatter) = core_attention(config, layout, work.attention)
        starts += 0.0 if layout.cp == 1 or cluster.fused_layers else CUT_STARTS
    forward = products_s + core_s + batch.memory_s * moved
    backward = 2 * products_s + core_backward_s + 2 * batch.memory_s * moved
    forward_s = _forward_seconds(cluster, layout, forward, starts)
    core_again_s = _forward_seconds(cluster, layout, core_s, starts=0.0)
    if is_divided(layout, work):
        transfer = transfer_back = batch.dispatch
    else:
        transfer = _exposed(cluster, layout, batch.exchange, products_s).followed_by(gather)
        transfer_back = _exposed(cluster, layout, batch.exchange, 2 * products_s).followed_by(scatter)
    moved_again = {"none": Transfer(), "selective": gather, "full": transfer}[layout.recompute]
    return Module(
        part=work.part,
        layer=0,
        forward_s=forward_s,
        backward_s=_backward_seconds(cluster, layout, backward + batch.accumulate_s * weights, starts),
        again_s={"none": 0.0, "selective": core_again_s, "full": forward_s}[layout.recompute],
        weights=weights,
        moves=(transfer, transfer_back.followed_by(moved_again)),
        dispatched=is_divided(layout, work),
    )


def _embedding(config: RunConfig, layout: Layout, batch: _MicroBatch) -> Module:
    moved_s = 2 * batch.memory_s * batch.stream
    return Module(
        part="embedding",
        layer=-1,
        forward_s=_forward_seconds(config.cluster, layout, moved_s),
        backward_s=_backward_seconds(config.cluster, layout, moved_s),
        again_s=0.0,
        weights=config.model.vocab_size // layout.tp * config.model.hidden_size,
        moves=(batch.exchange, batch.exchange),
    )


def _output(config: RunConfig, layout: Layout, batch: _MicroBatch, *, tied: bool) -> Module:
    """Returns the module of the output layer, the loss included.

    Args:
        tied: True if the output layer uses the embedding's weight on the same stage.
    """
    model, cluster = config.model, config.cluster
    vocabulary, tokens = model.vocab_size // layout.tp, batch.tokens
    weights = vocabulary * model.hidden_size
    product = matmul_seconds(cluster, tokens, model.hidden_size, vocabulary, config.train.precision)
    logits = tokens * vocabulary / memory_rate(cluster)
    moved_s = 2 * batch.memory_s * batch.stream
    backward = 2 * product + logits * LOSS_BACKWARD_BYTES + moved_s + batch.accumulate_s * weights
    return Module(
        part="output",
        layer=model.num_layers,
        forward_s=_forward_seconds(cluster, layout, product + logits * LOSS_FORWARD_BYTES + moved_s),
        backward_s=_backward_seconds(cluster, layout, backward),
        again_s=0.0,
        weights=0 if tied else weights,
        moves=(batch.exchange.followed_by(_loss_sums(cluster, layout, tokens)), batch.exchange),
    )


@lru_cache(maxsize=256)
def slowest_gpu_factor(cluster: ClusterConfig, ranks: int) -> float:
    """Returns the expected time of the slowest of `ranks` GPUs relative to an average GPU. Speeds are assumed
    to be normally distributed with `cluster.speed_spread` (Blom 1958, the expected largest of n)."""
    return 1.0 + cluster.speed_spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _exposed(cluster: ClusterConfig, layout: Layout, collective: Transfer, matmul_s: float) -> Transfer:
    """Returns the time that a tensor-parallel collective adds to its matmul of `matmul_s` seconds.

    With `cluster.tp_overlap`, the collective and the matmul are cut into as many pieces as the group has
    ranks, and one piece is multiplied while the next is communicated. One piece of the collective therefore
    does not overlap. The other pieces slow the matmul down by `collective_units` of their time.
    """
    if not cluster.tp_overlap or layout.tp == 1:
        return collective
    hidden = min((1 - 1 / layout.tp) * collective.link_s, matmul_s)
    return replace(collective, link_s=collective.link_s - (1 - cluster.collective_units) * hidden)


def _forward_seconds(cluster: ClusterConfig, layout: Layout, seconds: float, starts: float = 1.0) -> float:
    """Returns the forward seconds of a module on the slowest GPU.

    Args:
        seconds: the modelled seconds of its operations.
        starts: the number of its operations relative to a usual module, which determines the overhead of
            starting them.
    """
    computed_s = slowest_gpu_factor(cluster, layout.world_size) * seconds * cluster.forward_factor
    return computed_s + 1e-6 * cluster.forward_module_us * starts


def _backward_seconds(cluster: ClusterConfig, layout: Layout, seconds: float, starts: float = 1.0) -> float:
    """Returns the backward seconds of a module on the slowest GPU, see `_forward_seconds`."""
    computed_s = slowest_gpu_factor(cluster, layout.world_size) * seconds * cluster.backward_factor
    return computed_s + 1e-6 * cluster.backward_module_us * starts


def _loss_sums(cluster: ClusterConfig, layout: Layout, tokens: int) -> Transfer:
    """Returns the three all-reduces of the vocabulary-parallel cross-entropy: maximum, target logit and sum
    of exponentials, each with one fp32 number per token."""
    if layout.tp == 1:
        return Transfer()
    return Links(cluster=cluster).all_reduce(4.0 * tokens, Groups.of(layout, cluster).tp).scaled(3.0)


def hop(config: RunConfig, layout: Layout) -> Transfer:
    """Returns the transfer of one micro-batch's residual stream to the next pipeline stage."""
    if layout.pp == 1:
        return Transfer()
    width = config.train.weight_bytes
    crosses = Groups.of(layout, config.cluster).stage_crosses
    return Links(cluster=config.cluster).point_to_point(stream_elements(config, layout) * width, crosses=crosses)


def units_taken(config: RunConfig, layout: Layout) -> float:
    """Returns the share of a GPU's compute units that data-parallel collectives occupy. It is proportional to
    the number of network ports that the collectives use, because NCCL runs channels for each port."""
    cluster, group = config.cluster, Groups.of(layout, config.cluster).data
    ports = 1.0 if group.machines == 1 else group.per_machine / cluster.gpus_per_node
    return cluster.collective_units * ports
