"""How long a run's step takes at least under any plan: a proof, in microseconds, that a layout need not be simulated.

It follows the simulator from the first forward to the last updated weight and takes, wherever that depends on the plan
or on what runs at the same time, the least there can be. From the same prices: a time that changes there changes here.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.planner.activations import forwards_ahead, stage_weights
from canzona_cli.planner.buckets import FP32, element_bytes
from canzona_cli.planner.cost import COST_DIGITS, adamw_seconds, implementation, memory_rate, step_factor
from canzona_cli.planner.links import Groups, Links
from canzona_cli.planner.norm_clip import NormClip
from canzona_cli.planner.packing import simple_bound
from canzona_cli.planner.parts import HOSTED
from canzona_cli.planner.sharing import shares
from canzona_cli.planner.subject import update_costs
from canzona_cli.simulate.buffers import after_reduction
from canzona_cli.simulate.model_time import hop, passes
from canzona_cli.simulate.update import UpdateModel

_ROUNDING = 1 - 100 * 10.0**-COST_DIGITS
"""Sums of the same numbers in another order are not below it."""


def least_step_seconds(config: RunConfig, layout: Layout) -> float:
    """No plan of the run has a shorter simulated iteration.

    Proof, from the times of stage 0, for nothing ends before its last rank:

    - *pipeline*: for every stage s, the first micro-batch reaches it through the first model chunks of the stages
      before; it computes all forwards and backwards one after another, and waits for what it sends; and the last
      backward goes back through the same chunks. The first forward of stage 0 ends no sooner than the gathering of the
      parameters that it waits for;
    - *reduction*: the gradients travel one bucket after another, those of a model chunk from the beginning of its last
      backward on (without overlap all from the end), and the one with the embedding's only behind it. See `_reduced`;
    - *norm and clip*: the rank with most gradients reads no less than the mean, the one with most to update at least
      AdamW's share;
    - *update*: see `_update`; and what is gathered behind it without overlap.
    """
    execution, parallel, own = execution_of(config), config.parallel, implementation(config)
    overlap_gather = parallel.overlap_grad_reduce and parallel.overlap_param_gather
    traffic = _transfers(config, replace(layout.bare, vpp=1))
    weights = stage_weights(config, layout, 0)
    reduced = _reduced(config, layout, traffic, overlap_gather=overlap_gather) + after_reduction(config, layout, 0)

    shares = 1 if execution.everywhere else layout.owners
    how = NormClip.of(config, layout)
    clipped = reduced + how.seconds((weights.matrices + weights.others) / shares, weights.others / shares)
    elements = weights.others + (weights.matrices if execution is Execution.ADAMW else 0)
    adamw_s = step_factor(config.cluster, "adamw_update", own) * adamw_seconds(elements / shares, config.cluster)
    gathered = 0.0 if overlap_gather else traffic.gather_s + traffic.behind_s
    ended = clipped + adamw_s + _update(config, layout) + gathered + how.agree_s
    return _ROUNDING * ended


class _Traffic(NamedTuple):
    """Seconds."""

    reduce_s: float = 0.0
    """Of all gradients."""
    last_s: float = 0.0
    """Of the embedding's, which are ready last."""
    gather_s: float = 0.0
    """Of what the forward passes cannot do without."""
    behind_s: float = 0.0
    """Of what a plan may gather before them."""


def _reduced(config: RunConfig, layout: Layout, whole: _Traffic, *, overlap_gather: bool) -> float:
    """When stage 0's gradients are reduced.

    Of v model chunks, the last one's first forward comes behind (v - 1) p passes, and its last backward behind all
    forwards and what is left of its group of p micro-batches; by then the last micro-batch has been through its other
    stages and back.

    Args:
        whole: traffic of the whole stage.
    """
    weights, (_, grad) = stage_weights(config, layout, 0), element_bytes(config)
    first = whole if layout.vpp == 1 else _transfers(config, layout.bare)
    times, count, hop_s = passes(config, layout), layout.num_microbatches, hop(config, layout).seconds
    forwards, backwards = ([sum(one[way] for one in chunks) for chunks in times] for way in (0, 1))
    zeroed = (weights.matrices + weights.others) * grad / memory_rate(config.cluster)
    # Plans have their first buckets gathered from the very beginning, while gradients are set to zero.
    gathering = 0.0 if execution_of(config) is Execution.PLANNED else zeroed
    filled = zeroed + times[0][0][0]
    if overlap_gather:
        filled = max(filled, gathering + first.gather_s)
    # Every forward pass but the last of all sends and waits. So does every backward pass but the first stage's, with
    # more than one chunk a stage when no forward is left; the last of them is on the way back.
    sent_s = [count * (layout.vpp - (stage == layout.pp - 1)) * hop_s for stage in range(layout.pp)]
    sent_back_s = [
        hop_s * ((count - 1) * (stage > 0) if layout.vpp == 1 else forwards_ahead(layout, stage) - 1)
        for stage in range(layout.pp)
    ]
    forwarded = filled - times[0][0][0] + count * forwards[0] + sent_s[0]
    if layout.vpp > 1 and overlap_gather:
        left = (layout.pp - 1) * times[0][-1][0] + (count - layout.pp) * forwards[0]
        forwarded = max(forwarded, gathering + whole.gather_s + left)
    end, drained = forwarded + count * backwards[0] + sent_back_s[0], 0.0
    for stage in range(1, layout.pp):
        filled, drained = filled + hop_s, drained + hop_s + times[stage - 1][0][1]
        computed = count * (forwards[stage] + backwards[stage])
        end = max(end, filled + computed + sent_s[stage] + sent_back_s[stage] + drained)
        filled += times[stage][0][0]
    if not config.parallel.overlap_grad_reduce:
        return end + max(first.last_s, whole.reduce_s)
    reduced = max(end + first.last_s, end - times[0][0][1] + first.reduce_s)
    if layout.vpp > 1:
        there_and_back = sum(sum(chunks[-1]) for chunks in times[1:]) + (2 * layout.pp - 3) * hop_s
        computed = (count - layout.pp) * backwards[0] + (layout.pp - 1) * times[0][-1][1]
        reduced = max(reduced, forwarded + max(there_and_back, computed) + whole.reduce_s)
    return reduced


@lru_cache(maxsize=1024)
def _transfers(config: RunConfig, layout: Layout) -> _Traffic:
    """Least seconds of the data-parallel traffic of stage 0's first model chunk.

    A rank sends all of a bucket but its own share, of which the mean is a whole bucket over the ranks: through a ring
    or chains, or, all-to-all, over its links inside the machine and out of it at once, with the copies then added up.
    What the profile has measured may be faster than its figures: nothing then.
    """
    execution, cluster = execution_of(config), config.cluster
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).data
    if group.size == 1 or (group.machines == 1 and cluster.collectives):
        return _Traffic()
    weights, (width, grad) = stage_weights(config, layout, 0), element_bytes(config)
    own = implementation(config)
    reducing, gathering = (step_factor(cluster, phase, own) for phase in ("grad_reduce", "param_gather"))
    embedding = config.model.vocab_size * config.model.hidden_size // layout.tp
    matrices, others = weights.matrices // layout.vpp, weights.others // layout.vpp
    everything = matrices + others
    if execution.everywhere:
        both = (links.all_reduce(size * grad, group) for size in (everything, embedding))
        whole, last = (reducing * transfer.link_s for transfer in both)
        return _Traffic(whole, last)

    def ring(elements: int, bytes_each: int) -> float:
        """Without latency: in how many buckets is the plan's."""
        return links.reduce_scatter(float(elements * bytes_each), group).link_s

    last = reducing * links.reduce_scatter(float(embedding * grad), group).seconds
    if execution is not Execution.PLANNED:
        return _Traffic(reducing * ring(everything, grad), last, gathering * ring(everything, width))
    sent = matrices * grad * (group.size - 1) / group.size
    remote = (group.size - group.per_machine) / (group.size - 1)
    at_once = max(sent * (1 - remote) / links.bandwidth("machine"), sent * remote / links.bandwidth("network"))
    added = matrices / group.size * (group.size - 1) * (2 * FP32 + grad) / memory_rate(cluster)
    # Chains of successive buckets may overlap but for the last one's.
    latency = links.through(1.0, group).latency_s
    return _Traffic(
        reducing * (min(ring(matrices, grad) + latency, at_once + added) + ring(others, grad)),
        last,
        gathering * (ring(matrices, width) + latency),
        gathering * ring(others, width),
    )


def _update(config: RunConfig, layout: Layout) -> float:
    """Least seconds of matrix updates on the rank of stage 0 that has most of them.

    Hosted and shared: no less than a packing of whole matrices, or of a host's parts of shared ones, into owners times
    hosts can be, than the mean of the updates and of the packing around hosted ones' exchanges, and than the least that
    the rank with the largest does. Duplicated: of each owner alone, or of all ranks, the whole.
    """
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return 0.0
    layers, ranks = config.model.num_layers // layout.pp, layout.world_size // layout.tp
    alone = replace(layout.bare, pp=1, vpp=1, dp=ranks, global_batch_size=ranks)
    layer = _layer(config, alone)
    if execution.everywhere:
        return layers * layer.whole_s
    if execution is Execution.LAYERWISE:
        return layers * layer.whole_s / layout.owners
    cells = layout.owners * layout.tp
    factor = step_factor(config.cluster, "matrix_update", implementation(config))
    return max(layers * layer.all_s / cells, factor * _packed(layer.pieces, layers, cells), factor * layer.largest)


@lru_cache(maxsize=1024)
def _packed(costs: tuple[float, ...], layers: int, cells: int) -> float:
    return simple_bound(costs * layers, cells)


class _Layer(NamedTuple):
    """Seconds of one layer's updates."""

    whole_s: float
    """Where a rank does them all, gathering them first."""
    all_s: float
    """Of all ranks together at least, and of packing what is hosted."""
    pieces: tuple[float, ...]
    """Of each on one rank at least."""
    largest: float
    """Of a rank that has the largest, at least."""


@lru_cache(maxsize=64)
def _layer(config: RunConfig, layout: Layout) -> _Layer:
    members = matrices_of(replace(config.model, num_layers=1), layout, splitting_of(config))
    planned = execution_of(config) is Execution.PLANNED
    costs = update_costs(config, members, implementation(config))
    model = UpdateModel(config, layout, members, costs)
    factor = step_factor(config.cluster, "matrix_update", implementation(config))
    packing_s = model.pipeline.packing_s if layout.tp > 1 else 0.0
    together = planned and config.engine.mode != "hosted"
    possible = shares(config, layout, members) if together else HOSTED
    everything, pieces, largest = 0.0, [], 0.0
    for matrix, cost in zip(members, costs, strict=True):
        parts = [possible[matrix.index].each] if matrix.index in possible else []
        hosted = factor * cost + matrix.elements * packing_s
        everything += min([hosted, *(factor * layout.tp * each for each in parts)])
        pieces.append(min([cost, *parts]))
        largest = max(largest, pieces[-1])
    return _Layer(
        whole_s=0.0 if planned else model.duplicated(range(len(members))).seconds,
        all_s=everything,
        pieces=tuple(pieces),
        largest=largest,
    )
