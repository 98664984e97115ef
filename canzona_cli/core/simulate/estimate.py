"""Estimates a step's seconds without a plan or a simulation. The layout search ranks layouts by this
estimate."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from canzona_cli.core.costs.buffers import bucket_elements, stage_weights
from canzona_cli.core.costs.links import Groups, Links
from canzona_cli.core.costs.model import PASS_S, NormClip, hop, layers_and_ends, passes, units_taken
from canzona_cli.core.costs.modules import dispatch
from canzona_cli.core.costs.sharing import shared_costs
from canzona_cli.core.costs.update import adamw_seconds, algorithm_of, step_factor, update_costs, update_times
from canzona_cli.core.model.families import LayerBlocks, all_layers, layer_kinds, stage_blocks
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.attempt import bucket_limits
from canzona_cli.core.planner.bounds import simple_bound
from canzona_cli.core.planner.chunks import seconds_after_reduction
from canzona_cli.core.planner.make import outlined_seconds
from canzona_cli.core.planner.pipeline import HostedPipeline
from canzona_cli.core.setup import Execution, Layout, ModelConfig, Setup
from canzona_cli.core.setup.execution import splitting_of, with_flex
from canzona_cli.core.setup.stages import most_layers
from canzona_cli.core.simulate.update import UpdateModel


def estimated_step_seconds(setup: Setup, layout: Layout) -> float:
    """Estimates the seconds of a step in a layout, quickly. The estimate rarely exceeds the simulated
    seconds."""
    times = passes(setup, layout)
    return _surely_s(setup, layout, times) + _exposed_s(setup, layout, times[0]) + _updates_s(setup, layout)


def outlined_step_seconds(setup: Setup, layout: Layout) -> float:
    """Estimates a step more closely than `estimated_step_seconds` if it has a plan whose size of buckets is
    open: with the waits for the buckets of a plan without owners, of the best size. Other steps get the same
    estimate.

    Raises:
        ConfigError: the layout cannot divide the matrices.
    """
    added_s = None
    if setup.execution is Execution.PLANNED and setup.cluster.device == "cuda":
        added_s = outlined_seconds(setup, layout)
    if added_s is None:
        return estimated_step_seconds(setup, layout)
    return _surely_s(setup, layout, passes(setup, layout)) + added_s


def flex_speedup(setup: Setup, layout: Layout) -> float | None:
    """Estimates the time of a step relative to the same step with the dispatcher `flex`; None if no experts are
    divided among ranks, or the run cannot use it (`with_flex`)."""
    flex = with_flex(setup)
    if flex is None or layout.ep == 1:
        return None
    return estimated_step_seconds(setup, layout) / estimated_step_seconds(flex, layout)


def _surely_s(setup: Setup, layout: Layout, times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Returns the seconds of a step without data-parallel traffic and updates of matrices.

    Args:
        times: see `passes`.
    """
    execution, hop_s = setup.execution, hop(setup, layout).seconds
    stages_s = [sum(forward + backward + 2 * hop_s for forward, backward in chunks) for chunks in times]
    passes_s = layout.num_microbatches * max(stages_s) + (sum(stages_s) - max(stages_s)) / layout.vpp
    weights = stage_weights(setup, layout, 0)
    if execution.everywhere:
        adamw, all_elements = weights.others, weights.matrices + weights.others
    else:
        adamw = weights.share(layout, matrices=False)
        all_elements = weights.share(layout, matrices=True)
    clip_s = NormClip(setup, layout).seconds(all_elements, adamw)
    adamw_s = step_factor(setup, "adamw_update") * adamw_seconds(weights.adamw(execution, layout), setup.cluster)
    return passes_s + seconds_after_reduction(setup, layout, 0) + clip_s + adamw_s


def least_step_seconds(setup: Setup, layout: Layout) -> float:
    """Returns a lower bound of `estimated_step_seconds`, quicker still: the forward and backward passes, as
    if the embedding and the output layer were not on the stage with the most layers."""
    of_layers, ends_s = layers_and_ends(setup, layout)
    chunk_s = PASS_S * 2 + 2 * hop(setup, layout).seconds
    all_s = sum(n * of_layers[kind] for kind, n in all_layers(setup.model)) + layout.pp * layout.vpp * chunk_s + ends_s
    busiest_s = (
        max(sum(n * of_layers[kind] for kind, n in blocks) for blocks in _fullest(setup.model, layout))
        + layout.vpp * chunk_s
    )
    return layout.num_microbatches * busiest_s + (all_s - busiest_s) / layout.vpp


def least_sequence_seconds(setup: Setup, layout: Layout) -> float:
    """Returns a lower bound of `least_step_seconds` per sequence that is the same for all layouts that differ only in
    pp, vpp and dp: the passes of the layers, as if no stage ever waited for another."""
    of_layers, _ = layers_and_ends(setup, layout)
    layers_s = sum(n * of_layers[kind] for kind, n in all_layers(setup.model))
    return layers_s / (layout.pp * layout.dp * layout.micro_batch_size)


def _fullest(model: ModelConfig, layout: Layout) -> Sequence[LayerBlocks]:
    """Returns the layers of the stages of which one has the most work."""
    if len(kinds := layer_kinds(model)) == 1:
        return [((kinds[0], most_layers(model.num_layers, layout)),)]
    return [stage_blocks(model, layout, stage) for stage in range(layout.pp)]


def _exposed_s(setup: Setup, layout: Layout, passes_s: Sequence[tuple[float, float]]) -> float:
    """Estimates the seconds that data-parallel traffic adds to a step.

    Args:
        passes_s: the seconds of a micro-batch's forward and backward pass through each of the first stage's
            model chunks.
    """
    traffic, parallel = _traffic(setup, replace(layout.bare, vpp=1)), setup.parallel
    reduced_s, gathered_s = traffic.reduced_s, traffic.gathered_s
    if not parallel.overlap_grad_reduce:
        return reduced_s + gathered_s
    if setup.model.num_experts:
        # The first chunk may have fewer layers than the others.
        forward_s, backward_s = map(fmean, zip(*passes_s, strict=True))
        return max(traffic.last_s, _exposed_with_experts(setup, layout, traffic, (forward_s, backward_s)))
    forward_s, backward_s = passes_s[0]
    if parallel.overlap_param_gather:
        gathered_s = max(0.0, gathered_s / layout.vpp - forward_s)
    return max(traffic.last_s, reduced_s / layout.vpp - backward_s) + gathered_s


def _exposed_with_experts(setup: Setup, layout: Layout, traffic: "_Traffic", passes_s: tuple[float, float]) -> float:
    """Estimates the seconds that data-parallel traffic adds to a step of a model with experts, at the best
    bucket size.

    The gradients of such a model take about as long to reduce as a backward pass. Buckets are assumed to fill
    evenly, so the i-th of n buckets is ready after i / n of the backward pass, and needed after (i - 1) / n
    of the forward pass. Traffic slows passes down, because tokens are sent over the same link, and because
    collectives take a share of the GPU.
    """
    # Between a micro-batch's passes through two consecutive model chunks, other micro-batches pass.
    turns = (layout.vpp - 1) * layout.pp + 1
    travel_s, units = _link_use_s(setup, layout), units_taken(setup, layout)

    def added_s(seconds: float, latency_s: float, pass_s: float, buckets: float, stages: int) -> float:
        """Returns the seconds that `seconds` of traffic add to a step. The traffic slows one micro-batch down
        on `stages` stages in turn: gathering slows the first micro-batch down on all stages, and reduction
        the last micro-batch on one stage."""
        seconds += (buckets - 1) * latency_s
        overlapped = min(1.0, seconds / layout.vpp / pass_s)
        passes = max(min(turns, seconds / pass_s), stages * layout.vpp * overlapped)
        shared_s, taken_s = passes * travel_s, passes * units * (pass_s - travel_s)
        left_s = seconds + shared_s - (1 - 1 / buckets) * (turns * pass_s + shared_s + taken_s)
        return shared_s + taken_s + max(seconds / buckets, left_s, seconds / layout.vpp - pass_s)

    def exposed_s(limit: int) -> float:
        buckets = layout.vpp * max(1.0, traffic.elements / layout.vpp / limit)
        reduction_s = added_s(traffic.reduced_s, traffic.reduce_latency_s, passes_s[1], buckets, 1)
        if not setup.parallel.overlap_param_gather:
            return reduction_s + traffic.gathered_s
        return reduction_s + added_s(traffic.gathered_s, traffic.gather_latency_s, passes_s[0], buckets, layout.pp)

    return min(map(exposed_s, _bucket_sizes(setup, layout)))


def _bucket_sizes(setup: Setup, layout: Layout) -> tuple[int, ...]:
    """Returns the bucket sizes to try, in elements."""
    default = bucket_elements(setup, layout) or 1
    return bucket_limits(default) if setup.bucket_size_open and setup.execution is Execution.PLANNED else (default,)


def _link_use_s(setup: Setup, layout: Layout) -> float:
    """Returns the seconds for which a micro-batch's pass through a model chunk uses the link of data-parallel
    traffic, as the mean over the first stage's model chunks, including the transfer to the next stage."""
    link = Groups.of(layout, setup.cluster).experts.link
    transfers = [(1.0, hop(setup, layout))]
    if layout.ep > 1:
        blocks = stage_blocks(setup.model, layout, 0)
        layers = sum(n for kind, n in blocks if kind.num_experts) / layout.vpp
        transfers.append((2 * layers, dispatch(setup, layout)))
    return sum(count * transfer.link_s for count, transfer in transfers if transfer.link == link)


class _Traffic(NamedTuple):
    """The data-parallel traffic of a rank of the first stage."""

    elements: int
    """The elements that are cut into buckets: those of experts if experts are divided among ranks, otherwise
    those of all matrices."""
    reduced_s: float
    reduce_latency_s: float
    """The latency of the reduction of a bucket of experts; 0 if experts are not divided."""
    last_s: float
    """The part of `reduced_s` for the embedding's gradients. Their reduction is always exposed, because they
    are ready last."""
    gathered_s: float
    gather_latency_s: float


@lru_cache(maxsize=1024)
def _traffic(setup: Setup, layout: Layout) -> _Traffic:
    cluster, execution = setup.cluster, setup.execution
    links, groups = Links(cluster=cluster), Groups.of(layout, cluster)
    weights = stage_weights(setup, layout, 0)
    weight_bytes, gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
    embedding = (setup.model.vocab_size // layout.tp + setup.model.positions) * setup.model.hidden_size
    reducing, gathering = step_factor(setup, "grad_reduce"), step_factor(setup, "param_gather")
    reduce = links.all_reduce if execution.everywhere else links.reduce_scatter
    all_elements = weights.matrices + weights.others
    parts = (all_elements - weights.experts, groups.data), (weights.experts, groups.experts)
    reductions = [reduce(elements * gradient_bytes, group) for elements, group in parts]
    gatherings = [links.all_gather(elements * weight_bytes, group) for elements, group in parts]
    if execution.everywhere:
        gathering = 0.0
    if weights.experts:
        # Experts have a separate communicator, whose transfers hide the latency of the other transfers.
        reductions[0] = reductions[0]._replace(latency_s=0.0)
        gatherings[0] = gatherings[0]._replace(latency_s=0.0)
    return _Traffic(
        weights.experts or weights.matrices,
        reducing * sum(transfer.seconds for transfer in reductions),
        reducing * reductions[1].latency_s,
        reducing * reduce(embedding * gradient_bytes, groups.data).seconds,
        gathering * sum(transfer.seconds for transfer in gatherings),
        gathering * gatherings[1].latency_s,
    )


def _updates_s(setup: Setup, layout: Layout) -> float:
    """Estimates the seconds of matrix updates on the busiest rank of the stage with the most layers."""
    execution = setup.execution
    if execution is Execution.ADAMW:
        return 0.0
    ranks = layout.world_size // layout.tp
    one_stage = replace(layout.bare, pp=1, vpp=1, dp=ranks, global_batch_size=ranks)

    def planned_s(blocks: LayerBlocks) -> float:
        of_blocks = [(*_planned_layer(setup, kind, one_stage), layers) for kind, layers in blocks]
        even_s = sum(layers * layer_s for layer_s, _, layers in of_blocks) / layout.cells
        return max(even_s, _packing_bound_s(tuple(block[1:] for block in of_blocks), layout.cells))

    def unplanned_s(blocks: LayerBlocks) -> float:
        of_blocks = [(*_unplanned_layer(setup, kind, one_stage), layers) for kind, layers in blocks]
        if execution is Execution.LAYERWISE:
            return sum(n * (dense_s / layout.owners + experts_s / layout.cells) for dense_s, experts_s, n in of_blocks)
        return sum(n * (dense_s + experts_s / layout.ep) for dense_s, experts_s, n in of_blocks)

    of_stage = planned_s if execution is Execution.PLANNED else unplanned_s
    return max(map(of_stage, _fullest(setup.model, layout)))


@lru_cache(maxsize=1024)
def _packing_bound_s(blocks: tuple[tuple[tuple[float, ...], int], ...], cells: int) -> float:
    """Returns the `simple_bound` of blocks of layers, given the costs of a layer's matrices and the number of
    layers of each block."""
    return simple_bound(tuple(cost for costs, layers in blocks for cost in costs * layers), cells)


@lru_cache(maxsize=64)
def _unplanned_layer(setup: Setup, kind: ModelConfig, layout: Layout) -> tuple[float, float]:
    """Returns the mean seconds in which one TP rank receives and updates all matrices of a layer that every rank
    stores; and those in which it updates all experts of the layer, 0 unless experts are divided among
    ranks. All layers of `kind` are like it."""
    members = matrices_of(replace(kind, num_layers=1), layout, splitting_of(setup))
    model = UpdateModel(setup, layout, members, (), update_times(setup, members))
    dense = [matrix.index for matrix in members if matrix.expert_rank is None]
    experts = [matrix.index for matrix in members if matrix.expert_rank is not None]
    # If each matrix has one home, a layer has too few matrices to keep all homes busy, but a model has not.
    updates = model.unplanned(dense)
    exchange_s = min(update.exchange_s for update in updates)
    dense_s = exchange_s + fmean(update.matrix_update_s for update in updates)
    factor = step_factor(setup, "matrix_update")
    return dense_s, factor * sum(model.unplanned_seconds(index) for index in experts)


@lru_cache(maxsize=64)
def _planned_layer(setup: Setup, kind: ModelConfig, layout: Layout) -> tuple[float, tuple[float, ...]]:
    """Returns the seconds of the updates of a layer of `kind` under a plan, including the packing of hosted matrices,
    added up over the ranks of a TP group; and the seconds of each matrix, on its host or on one rank that
    shares it."""
    members = matrices_of(replace(kind, num_layers=1), layout, splitting_of(setup))
    factor = step_factor(setup, "matrix_update")
    packing_s = HostedPipeline.of(setup, layout).packing_s if layout.tp > 1 else 0.0
    possible = shared_costs(setup, algorithm_of(setup), layout, members)
    layer_s = 0.0
    matrices_s: list[float] = []
    for matrix, cost in zip(members, update_costs(setup, members), strict=True):
        parts = [factor * possible[matrix.index].each] if matrix.index in possible else []
        packed_s = packing_s if matrix.expert_rank is None else 0.0
        layer_s += min([factor * cost + matrix.elements * packed_s, *(layout.tp * part for part in parts)])
        matrices_s.append(min([factor * cost, *parts]))
    return layer_s, tuple(matrices_s)
