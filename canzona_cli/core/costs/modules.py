"""The time of one module for one micro-batch on one rank, from shapes and the profile's rates.

A module is one Megatron weight with the operations around it. Matmuls run at the profile's achieved rate for
their size, core attention at a share of the peak, and elementwise work at memory bandwidth. Tensor- and
context-parallel collectives are counted separately, because they occupy a link. On CPU ranks that share a
node's cores, they also keep a different number of cores busy than computation does.

Tokens are assumed to be spread evenly over the experts of a layer, as the balancing loss intends. Let k of E
experts be chosen for each token, T be the tokens of a micro-batch on a TP group, t = tp, and the experts be
divided among e ranks (`Layout.ep`). Then a rank sends k T / t copies of tokens and receives as many:
k T e / (t E) for each of its E / e experts.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from canzona_cli.core.costs.buffers import held_weight, micro_batch_tokens, module_tokens, stream_elements
from canzona_cli.core.costs.links import Group, Groups, Link, Links, Transfer
from canzona_cli.core.costs.update import Unit, matmul_rate, matmul_seconds, memory_rate, rates
from canzona_cli.core.model.families import family_of
from canzona_cli.core.model.family import Attention, Part, Work
from canzona_cli.core.setup import ClusterConfig, Fp8Recipe, Layout, ModelConfig, Setup
from canzona_cli.core.setup.execution import dispatcher_of

ELEMENTWISE_PASSES = {True: 1.2, False: 3.0}
"""The memory traffic of elementwise work relative to fully fused kernels, with (True) and without (False)
Transformer Engine. With it, the excess comes from splitting and joining queries, keys and values and from
summing gradients (fitted to published step times, scripts/published.yaml). Without it, most operations are
separate kernels.
"""
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 18, 8
"""The memory traffic of the vocabulary-parallel cross-entropy in bytes per logit: the cast to fp32, maximum,
exponential and sum in the forward pass; the gradient in the backward pass."""
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.55, 0.45
"""The shares of the bf16 peak that a causal flash kernel reaches in the forward and the backward pass with
heads of 128 at 4k tokens on Hopper: Shah et al. 2024 (FlashAttention-3, arXiv 2407.08608, figures 5 and
6)."""
TORCH_ATTENTION = 1.6
"""The time of torch's kernel, FlashAttention-2, relative to Transformer Engine's on Hopper: 1.5 to 2 in the
forward pass, 1.5 to 1.75 in the backward pass (the same paper)."""
CPU_ATTENTION = 0.4
"""The share of a core's fp32 rate that torch's attention kernel reaches on CPUs, in fp32 and in bf16, forward
and backward: measured 0.25 to 0.8 with 256 to 2,048 tokens and heads of 32 to 128, lowest with the fewest
tokens."""
CUT_STARTS = 0.9
"""The operations that context parallelism adds to a layer without Transformer Engine, in units of an average
module's operations. They put keys and values back in order, and attend twice. Counted on CPU ranks with 256 tokens:
the four modules of a layer have 128 operations instead of 103 in the forward pass, and 167 instead of 138 in the
backward pass."""
RING_PASSES = 3
"""The passes of a slice's attention output through memory. Transformer Engine adds the output of each slice
to the sum of the others: it reads both and writes one (`flash_attn_fwd_out_correction`)."""
QK_NORM_PASSES = 5.8
"""The time of a norm over rows of 128 elements (QK-norm) relative to a norm over full rows with the same
number of elements in total: 345 us to 60 us (B200, https://github.com/flashinfer-ai/flashinfer/issues/2396,
2026-01)."""
CAST_BYTES: Mapping[Fp8Recipe, int] = MappingProxyType({"tensorwise": 6, "delayed": 4, "blockwise": 4, "mxfp8": 4})
"""The bytes of memory traffic that it takes to cast one bf16 element to FP8, once along rows and once along columns: 2
read and 2 written; tensorwise first reads the 2 bytes once more, to find the largest element. Casts of weights are not
counted: they are made once in a step."""
STREAMS = 4
"""The number of expert GEMMs that run concurrently on the streams of Transformer Engine's grouped linear
layers. Concurrent GEMMs take less time than GEMMs one after another if a single GEMM leaves parts of the GPU
idle."""
EXPERT_LAUNCHES = 60
"""The number of kernel launches for which the GPU waits in one pass of an expert layer: router, sort and
permutation are about 40 small kernels, and the host loses its lead over the GPU when it waits for the token
counts. Fitted to published step times of Qwen3-30B-A3B (scripts/published.yaml)."""
HOST_LAUNCHES = 400
"""The time that the host needs for one pass of an expert layer, as a number of kernel launches. Transformer
Engine's modules cost the host more than the launches of their kernels. Fitted to steps of Qwen3-30B-A3B with
few tokens, with and without CUDA graphs."""


class Module(NamedTuple):
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
    """The elements of the module's weight, or of its experts' weights, on this rank; 0 for a tied output
    layer on the embedding's stage."""
    moves: tuple[Transfer, Transfer]
    """The collectives of the forward pass, and those of the backward pass, which include recomputation. Their
    `cores` add up the cores of all groups that have ranks of one owner."""
    dispatched: bool = False
    """True if `moves` transfer tokens to experts on other ranks, or back from them."""


class ModuleTimes:
    """The times of a model's modules for one micro-batch on one rank."""

    def __init__(self, setup: Setup, layout: Layout) -> None:
        self._setup, self._layout, self._cluster = setup, layout, setup.cluster
        cluster, width = setup.cluster, setup.train.weight_bytes
        self._tokens, self._stream = micro_batch_tokens(setup, layout), stream_elements(setup, layout)
        self._memory_s = ELEMENTWISE_PASSES[cluster.fused_layers] * width / memory_rate(cluster)
        """The seconds of elementwise work per element and fused pass, `ELEMENTWISE_PASSES` included."""
        self._accumulate_s = 2 * setup.train.gradient_bytes / memory_rate(cluster)
        """The seconds to add one element's gradient to its buffer."""
        links, group = Links(cluster=cluster), Groups.of(layout, cluster).tp
        size = float(self._tokens * setup.model.hidden_size * width)
        half_reduced = links.all_reduce(size, group).scaled(0.5)
        self._exchange = links.all_gather(size, group) if layout.sequence_parallel else half_reduced
        """Half an all-reduce of the residual stream; with sequence parallelism, an all-gather."""
        self._loss_sums = links.all_reduce(4.0 * self._tokens, group).scaled(3.0)
        """The three all-reduces of the vocabulary-parallel cross-entropy: maximum, target logit and sum of
        exponentials, each with one fp32 number per token."""

    def layer(self, kind: ModelConfig) -> list[Module]:
        """Returns the modules of a layer in forward order. All layers of `kind` are like it."""
        works = family_of(kind).modules(kind)
        modules = [self._module(work) for work in works]
        if self._cluster.dispatch_overlap:
            modules = _with_hidden_dispatch(self._cluster, modules)
        first_experts = next((index for index, work in enumerate(works) if work.experts > 1), None)
        return modules if first_experts is None else _with_launches(self._cluster, modules, first_experts)

    def embedding(self) -> Module:
        model = self._setup.model
        moved_s = 2 * self._memory_s * self._stream
        forward_s, backward_s = self._on_slowest_gpu(moved_s, moved_s)
        return Module(
            part="embedding",
            layer=-1,
            forward_s=forward_s,
            backward_s=backward_s,
            again_s=0.0,
            weights=(model.vocab_size // self._layout.tp + model.positions) * model.hidden_size,
            moves=(self._exchange, self._exchange),
        )

    def output(self, *, tied: bool) -> Module:
        """Returns the module of the output layer, the loss included.

        Args:
            tied: True if the output layer uses the embedding's weight on the same stage.
        """
        model, cluster, tokens = self._setup.model, self._cluster, self._tokens
        vocabulary = model.vocab_size // self._layout.tp
        weights = vocabulary * model.hidden_size
        product_s = matmul_seconds(cluster, tokens, model.hidden_size, vocabulary, self._setup.train.precision)
        logits_byte_s = tokens * vocabulary / memory_rate(cluster)  # one byte of each logit
        moved_s = 2 * self._memory_s * self._stream
        forward_s, backward_s = self._on_slowest_gpu(
            product_s + logits_byte_s * LOSS_FORWARD_BYTES + moved_s,
            2 * product_s + logits_byte_s * LOSS_BACKWARD_BYTES + moved_s + self._accumulate_s * weights,
        )
        return Module(
            part="output",
            layer=model.num_layers,
            forward_s=forward_s,
            backward_s=backward_s,
            again_s=0.0,
            weights=0 if tied else weights,
            moves=(self._exchange.followed_by(self._loss_sums), self._exchange),
        )

    def _module(self, work: Work) -> Module:
        """Returns one module of a layer, with layer 0 as its layer."""
        config, layout, tokens = self._setup, self._layout, self._tokens
        products_s = products_seconds(config, layout, work)
        cast_s, cast_back_s = cast_seconds(config, layout, work)
        weights = _held_experts(layout, work) * held_weight(layout, work).elements
        moved_elements: float = work.stream * self._stream + tokens * (work.elements // layout.tp)
        moved_elements += tokens * work.copied * copy_passes(config, layout)
        core_s = core_backward_s = 0.0
        gather = scatter = Transfer()
        starts = 1.0
        attention = work.attention
        if attention is not None:
            head_elements = attention.queries // layout.tp + attention.keys // layout.tp
            moved_elements += _head_passes(config, attention) * tokens * head_elements
            core_s, core_backward_s, (gather, scatter) = _core_attention(config, layout, attention)
            if self._cluster.fused_layers:
                moved_elements += RING_PASSES * (layout.cp - 1) * tokens * (attention.queries // layout.tp)
            elif layout.cp > 1:
                starts += CUT_STARTS
        computed_s = products_s + cast_s + core_s + self._memory_s * moved_elements
        computed_back_s = 2 * products_s + cast_back_s + core_backward_s + 2 * self._memory_s * moved_elements
        forward_s, backward_s = self._on_slowest_gpu(computed_s, computed_back_s + self._accumulate_s * weights, starts)
        core_again_s, _ = self._on_slowest_gpu(core_s, 0.0, starts=0.0) if core_s else (0.0, 0.0)
        dispatched = work.experts > 1 and layout.ep > 1
        if dispatched:
            transfer = transfer_back = dispatch(config, layout)
        else:
            exposed, exposed_back = self._exposed_exchanges(work, products_s)
            transfer, transfer_back = exposed.followed_by(gather), exposed_back.followed_by(scatter)
        moved_again = {"none": Transfer(), "selective": gather, "full": transfer}[layout.recompute]
        return Module(
            part=work.part,
            layer=0,
            forward_s=forward_s,
            backward_s=backward_s,
            again_s={"none": 0.0, "selective": core_again_s, "full": forward_s}[layout.recompute],
            weights=weights,
            moves=(transfer, transfer_back.followed_by(moved_again)),
            dispatched=dispatched,
        )

    def _exposed_exchanges(self, work: Work, matmul_s: float) -> tuple[Transfer, Transfer]:
        """Returns the tensor-parallel collectives of a module's forward and backward pass, reduced to the time that
        they add to its matmuls.

        In the backward pass of qkv and fc1, Megatron starts collectives before a matmul that does not need them
        (`LinearWithGradAccumulationAndAsyncCommunication`; Transformer Engine's layers do the same). With sequence
        parallelism, it gathers the input again under the matmul of the input's gradient, and scatters that gradient
        under the matmul of the weight's gradient; without, it sums the former under the latter. CPU ranks gain
        nothing, because they share cores.

        Args:
            matmul_s: the seconds of the forward pass's matmul. Each of the two in the backward pass takes as long.
        """
        cluster, half, sequence_parallel = self._cluster, self._exchange, self._layout.sequence_parallel
        if cluster.device == "cpu":
            return half, half
        ring = self._exposed_ring(work, matmul_s)
        if work.weight.cut == "cols":
            return ring, ring if sequence_parallel else Transfer()
        together = 1.0 if sequence_parallel else 2.0
        hidden = half.scaled(together).exposed(matmul_s, cluster.collective_units)
        return ring, hidden.scaled(2.0 / together)

    def _exposed_ring(self, work: Work, matmul_s: float) -> Transfer:
        """Returns a collective whose result a matmul needs, or that needs a matmul's result, reduced to the time that
        it adds to the matmul.

        With `cluster.tp_overlap`, both are cut into as many pieces as the group has ranks, and one piece is multiplied
        while the next is communicated. One piece of the collective therefore does not overlap. The other pieces slow
        the matmul down by `collective_units` of their time, and its pieces run at the rate of smaller matmuls. Where
        that would take longer than no overlap, nothing overlaps.
        """
        cluster, collective, pieces = self._cluster, self._exchange, self._layout.tp
        if not cluster.tp_overlap or pieces == 1:
            return collective
        hidden_s = min((1 - 1 / pieces) * collective.link_s, matmul_s)
        slower_s = products_seconds(self._setup, self._layout, work, pieces) - matmul_s
        saved_s = (1 - cluster.collective_units) * hidden_s - slower_s
        return collective._replace(link_s=collective.link_s - max(0.0, saved_s))

    def _on_slowest_gpu(self, computed_s: float, computed_back_s: float, starts: float = 1.0) -> tuple[float, float]:
        """Returns the forward and backward seconds of a module on the slowest GPU.

        Args:
            computed_s: the modelled seconds of its forward pass.
            computed_back_s: the modelled seconds of its backward pass.
            starts: the number of its operations relative to an average module; the overhead of starting them
                is proportional to it.
        """
        cluster = self._cluster
        slowest = slowest_gpu_factor(cluster, self._layout.world_size)
        (factor, back_factor), (module_us, back_module_us) = cluster.pass_factors, cluster.module_us
        forward_s = slowest * computed_s * factor + 1e-6 * module_us * starts
        return forward_s, slowest * computed_back_s * back_factor + 1e-6 * back_module_us * starts


def _with_hidden_dispatch(cluster: ClusterConfig, modules: Sequence[Module]) -> list[Module]:
    """Overlaps the transfers of a layer's tokens with another micro-batch's pass in the opposite direction:
    the transfer to the experts with one half of that pass, and the transfer back with the other half."""
    half_backward_s = sum(module.backward_s for module in modules) / 2
    half_forward_s = sum(module.forward_s for module in modules) / 2

    def with_hidden(module: Module) -> Module:
        forward, backward = module.moves
        units = cluster.collective_units
        exposed = forward.exposed(half_backward_s, units), backward.exposed(half_forward_s, units)
        return module._replace(moves=exposed)

    return [with_hidden(module) if module.dispatched else module for module in modules]


def _with_launches(cluster: ClusterConfig, modules: Sequence[Module], place: int) -> list[Module]:
    """Adds the time of an expert layer's kernel launches to the module at `place`, the experts' fc1."""
    pass_s = sum(module.forward_s + module.moves[0].seconds for module in modules)
    pass_back_s = sum(module.backward_s + module.moves[1].seconds for module in modules)
    added_s, added_backward_s = launch_seconds(cluster, pass_s), launch_seconds(cluster, pass_back_s)

    def with_launches(module: Module) -> Module:
        again_s = module.again_s and module.again_s + added_s
        forward_s, backward_s = module.forward_s + added_s, module.backward_s + added_backward_s
        return module._replace(forward_s=forward_s, backward_s=backward_s, again_s=again_s)

    return [with_launches(module) if index == place else module for index, module in enumerate(modules)]


@lru_cache(maxsize=256)
def slowest_gpu_factor(cluster: ClusterConfig, ranks: int) -> float:
    """Returns the expected time of the slowest of `ranks` GPUs relative to an average GPU. Speeds are assumed
    to be normally distributed with `cluster.speed_spread` (Blom 1958, the expected largest of n)."""
    return 1.0 + cluster.speed_spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _core_attention(
    setup: Setup, layout: Layout, attention: Attention
) -> tuple[float, float, tuple[Transfer, Transfer]]:
    """Returns the forward and backward seconds of one layer's core attention for a micro-batch on one rank,
    and the context-parallel transfers of both passes."""
    cluster, t = setup.cluster, layout.tp
    tokens, unit = micro_batch_tokens(setup, layout), setup.train.precision
    flops = 2.0 * tokens * setup.train.seq_length * attention.queries / t
    if cluster.device == "cpu":
        forward_s = flops / (CPU_ATTENTION * matmul_rate(cluster, 1, "fp32"))
        backward_s = 2.5 * forward_s
    else:
        peak = cluster.bf16_tflops * 1e12 if unit == "bf16" else matmul_rate(cluster, 1, unit)
        slower = 1.0 if cluster.fused_layers else TORCH_ATTENTION
        forward_s = slower * flops / (ATTENTION_FORWARD * peak)
        backward_s = 2.5 * slower * flops / (ATTENTION_BACKWARD * peak)
    if layout.cp == 1:
        return forward_s, backward_s, (Transfer(), Transfer())
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).cp
    slice_bytes = 2.0 * tokens * attention.keys / t * setup.train.weight_bytes
    if cluster.fused_layers:
        # While the attention of one slice is computed, the next slice is sent; in the backward pass, so is
        # the slice's gradient. The slowest hop of a ring over several nodes is over the network.
        hop_s = links.point_to_point(slice_bytes, crosses=group.machines > 1).seconds
        hops = layout.cp - 1
        exposed_s = hops * max(0.0, hop_s - forward_s / layout.cp)
        exposed_backward_s = hops * max(0.0, 2 * hop_s - backward_s / layout.cp)
        ring, ring_back = (Transfer(link=group.link, link_s=seconds) for seconds in (exposed_s, exposed_backward_s))
        return forward_s, backward_s, (ring, ring_back)
    size = layout.cp * slice_bytes
    gather, scatter = links.all_gather(size, group), links.reduce_scatter(size, group)
    groups_per_owner = t / layout.cp  # its t ranks are in t groups, each of which c owners have in common
    transfers = gather.with_cores(groups_per_owner * gather.cores), scatter.with_cores(groups_per_owner * scatter.cores)
    return forward_s, backward_s, transfers


def _head_passes(setup: Setup, attention: Attention) -> float:
    """Returns the time of rotary embedding and QK-norm as a number of passes over queries and keys."""
    if not attention.normalised:
        return 2.0
    return 2.0 + 2.0 * (QK_NORM_PASSES if setup.cluster.fused_layers else 1.0)


def _held_experts(layout: Layout, work: Work) -> int:
    """Counts a module's experts on one rank; 1 for a module without experts."""
    return work.experts // layout.ep if work.experts > 1 else 1


def products_seconds(setup: Setup, layout: Layout, work: Work, pieces: int = 1) -> float:
    """Returns the seconds that a module's matmuls take in the forward pass of a micro-batch, each cut by tokens into
    `pieces` that run one after another."""
    cluster, weight, experts = setup.cluster, held_weight(layout, work), _held_experts(layout, work)
    volume = float(_tokens(setup, layout, work) * weight.elements)
    side = (volume / pieces) ** (1 / 3)
    if cluster.device == "cuda" and experts > 1:
        # Concurrent GEMMs run at the rate of one GEMM of their total volume, but not faster than a
        # GEMM of the smallest size in the profile's table.
        smallest, _ = rates(cluster)[0]
        side = max(side, min(float(smallest), side * min(STREAMS, experts) ** (1 / 3)))
    unit: Unit = "fp8" if setup.train.fp8 != "none" else setup.train.precision
    return experts * 2.0 * volume / matmul_rate(cluster, side, unit)


def cast_seconds(setup: Setup, layout: Layout, work: Work) -> tuple[float, float]:
    """Returns the seconds that it takes to cast the inputs of a module's matmuls to FP8, in the forward pass of a
    micro-batch, and the gradients of their outputs in the backward pass."""
    if setup.train.fp8 == "none":
        return 0.0, 0.0
    weight = held_weight(layout, work)
    row_s = (
        _held_experts(layout, work)
        * _tokens(setup, layout, work)
        * CAST_BYTES[setup.train.fp8]
        / memory_rate(setup.cluster)
    )
    return row_s * weight.cols, row_s * weight.rows


def _tokens(setup: Setup, layout: Layout, work: Work) -> int:
    """Returns the tokens of a micro-batch on a rank that one weight of a module multiplies."""
    tokens = module_tokens(setup, layout, work)
    return tokens if work.experts == 1 else max(1, tokens // _held_experts(layout, work))


def launch_seconds(cluster: ClusterConfig, seconds: float) -> float:
    """Returns the seconds that kernel launches add to a pass of an expert layer that keeps the GPU busy for
    `seconds`; 0 on CPUs, where a calibration's measurements include launches."""
    if cluster.device == "cpu":
        return 0.0
    waited_s, host_s = (launches * cluster.launch_us * 1e-6 for launches in (EXPERT_LAUNCHES, HOST_LAUNCHES))
    return max(waited_s, host_s - seconds)


def copy_passes(setup: Setup, layout: Layout) -> float:
    """Returns how many times the elements in `Work.copied` pass through a rank's memory.

    Copies of tokens are sorted by expert. After `alltoall` they are in the order of their senders and must be
    sorted again. If experts are divided among ranks, each TP rank copies 1 / tp of the tokens.
    """
    sorts = 2 if layout.ep > 1 and dispatcher_of(setup) == "alltoall" else 1
    return sorts * layout.expert_tp / layout.tp


def dispatch(setup: Setup, layout: Layout) -> Transfer:
    """Returns the transfer of a micro-batch's tokens to their experts. The transfer back takes as long.

    - allgather: every rank receives all ranks' tokens;
    - alltoall: every copy of a token is sent separately;
    - flex (DeepEP): one copy of a token is sent over the network to each node that has an expert of the
      token, and from there to each rank with such an expert; both links work at the same time.
    """
    links, group = Links(cluster=setup.cluster), Groups.of(layout, setup.cluster).dispatch
    tokens = micro_batch_tokens(setup, layout) // layout.tp
    size = float(tokens * setup.model.hidden_size * setup.train.weight_bytes)
    kind = dispatcher_of(setup)
    if kind == "allgather":
        moved = links.all_gather(group.size * size, group)
    elif kind == "flex":
        moved = _flex_dispatch(links, group, size, setup.model.experts_per_token)
    else:
        sent = [size * setup.model.experts_per_token * (group.size - 1) / group.size] * group.size
        moved = links.all_to_all(sent, sent, group)
    # Count the cores of all groups that one owner's ranks are in, as for tensor-parallel collectives.
    return moved.with_cores(moved.cores * layout.tp / layout.ep)


def _flex_dispatch(links: Links, group: Group, size: float, chosen: int) -> Transfer:
    """Returns the transfer of tokens by `flex`, see `dispatch`.

    Experts are assumed to be chosen evenly and independently, so each of n nodes or ranks has none of a
    token's experts with probability (1 - 1/n)^chosen.

    Args:
        size: the bytes of tokens on each rank.
        chosen: the number of experts for each token.
    """

    def reached(parts: int) -> float:
        """Returns the expected number of nodes (or ranks), out of `parts`, that have at least one of a
        token's experts."""
        return parts * (1.0 - (1.0 - 1.0 / parts) ** chosen)

    outside = (group.machines - 1) / group.machines
    inside = (group.per_machine - 1) / group.per_machine
    times: dict[Link, float] = {
        "network": size * reached(group.machines) * outside / links.bandwidth("network"),
        "machine": size * reached(group.size) * inside / links.bandwidth("machine"),
    }
    link: Link = "network" if times["network"] > times["machine"] else "machine"
    return Transfer(latency_s=links.latency(group.link), link=link, link_s=times[link])
