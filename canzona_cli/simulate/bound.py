"""How long a run's step takes at least under any plan: a proof, in microseconds, that a layout need not be simulated.

It follows the simulator from the first forward to the last updated weight and takes, wherever that depends on the plan
or on what runs at the same time, the least there can be. From the same prices: a time that changes there changes here.
"""

import math
from dataclasses import replace
from functools import lru_cache

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.planner.activations import stage_weights
from canzona_cli.planner.buckets import FP32, bucket_elements, element_bytes
from canzona_cli.planner.cost import adamw_seconds, implementation, memory_rate, step_factor
from canzona_cli.planner.links import Groups, Links
from canzona_cli.planner.packing import simple_bound
from canzona_cli.planner.planner import COST_DIGITS, update_costs
from canzona_cli.simulate.buffers import after_reduction
from canzona_cli.simulate.model_time import hop, passes
from canzona_cli.simulate.simulate import CLIP_BYTES, NORM_BYTES
from canzona_cli.simulate.update import UpdateModel

_ROUNDING = 1 - 100 * 10.0**-COST_DIGITS
"""Sums of the same numbers in another order are not below it."""


def least_step_seconds(config: RunConfig, layout: Layout) -> float:
    """No plan of the run has a shorter simulated iteration.

    Proof, from the times of stage 0, for nothing ends before its last rank:

    - *pipeline*: for every stage s, the first micro-batch reaches it through the stages before; it computes all
      forwards and backwards one after another; and the last backward goes back through the same stages. The first
      forward of stage 0 lasts as long as gathering the parameters that it waits for;
    - *reduction*: the gradients travel one bucket after another, from the beginning of the last backward on (from its
      end without overlap), and the one with the embedding's only behind it;
    - *norm and clip*: the rank with most gradients reads no less than the mean, the one with most to update at least
      AdamW's share;
    - *update*: see `_update`; and what is gathered behind it without overlap.
    """
    execution, parallel = execution_of(config), config.parallel
    rate, own = memory_rate(config.cluster), implementation(config)
    overlap_gather = parallel.overlap_grad_reduce and parallel.overlap_param_gather
    reduce_s, last_s, gather_s, behind_s = _transfers(config, layout.bare)
    weights, (_, grad) = stage_weights(config, layout, 0), element_bytes(config)
    world = Groups.of(layout, config.cluster).world
    agree_s = Links(cluster=config.cluster).all_reduce(8.0, world).seconds if world.size > 1 else 0.0

    times, count, hop_s = passes(config, layout), layout.num_microbatches, hop(config, layout).seconds
    forward_s, backward_s = times[0]
    filled = (weights.matrices + weights.others) * grad / rate
    filled += max(forward_s, gather_s if overlap_gather else 0.0)
    end, drained = filled + (count - 1) * forward_s + count * backward_s, 0.0
    for stage, (forward, backward) in enumerate(times[1:], start=1):
        filled, drained = filled + hop_s, drained + hop_s + times[stage - 1][1]
        end = max(end, filled + count * (forward + backward) + drained)
        filled += forward
    under_s = backward_s if parallel.overlap_grad_reduce else 0.0
    reduced = max(end + last_s, end - under_s + reduce_s) + after_reduction(config, layout, 0)

    shares = 1 if execution.everywhere else layout.owners
    norm = step_factor(config.cluster, "norm_clip", own) / rate
    normed = reduced + norm * NORM_BYTES * (weights.matrices + weights.others) / shares + agree_s
    clipped = normed + norm * CLIP_BYTES * weights.others / shares
    elements = weights.others + (weights.matrices if execution is Execution.ADAMW else 0)
    adamw_s = step_factor(config.cluster, "adamw_update", own) * adamw_seconds(elements / shares, config.cluster)
    gathered = 0.0 if overlap_gather else gather_s + behind_s
    ended = clipped + adamw_s + _update(config, layout) + gathered + agree_s
    return _ROUNDING * ended


@lru_cache(maxsize=1024)
def _transfers(config: RunConfig, layout: Layout) -> tuple[float, float, float, float]:
    """Least seconds of stage 0's data-parallel traffic: reducing all gradients; reducing the embedding's, which are
    ready last; gathering what the first forward cannot do without; and what a plan may gather before it.

    A rank sends all of a bucket but its own share, of which the mean is a whole bucket over the ranks: through a ring
    or chains, or, all-to-all, over its links inside the machine and out of it at once, with the copies then added up.
    What the profile has measured may be faster than its figures: nothing then.
    """
    execution, cluster = execution_of(config), config.cluster
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).data
    if group.size == 1 or (group.machines == 1 and cluster.collectives):
        return 0.0, 0.0, 0.0, 0.0
    weights, (width, grad) = stage_weights(config, layout, 0), element_bytes(config)
    own = implementation(config)
    reducing, gathering = (step_factor(cluster, phase, own) for phase in ("grad_reduce", "param_gather"))
    embedding = config.model.vocab_size * config.model.hidden_size // layout.tp
    everything = weights.matrices + weights.others
    if execution.everywhere:
        both = (links.all_reduce(size * grad, group) for size in (everything, embedding))
        whole, last = (reducing * transfer.link_s for transfer in both)
        return whole, last, 0.0, 0.0

    def ring(elements: int, bytes_each: int) -> float:
        """Without latency: in how many buckets is the plan's."""
        return links.reduce_scatter(float(elements * bytes_each), group).link_s

    last = reducing * links.reduce_scatter(float(embedding * grad), group).seconds
    if execution is not Execution.PLANNED:
        return reducing * ring(everything, grad), last, gathering * ring(everything, width), 0.0
    sent = weights.matrices * grad * (group.size - 1) / group.size
    remote = (group.size - group.per_machine) / (group.size - 1)
    at_once = max(sent * (1 - remote) / links.bandwidth("machine"), sent * remote / links.bandwidth("network"))
    added = weights.matrices / group.size * (group.size - 1) * (2 * FP32 + grad) / memory_rate(cluster)
    limit = bucket_elements(config, layout)
    buckets = 1 if limit is None else max(1, weights.matrices // (limit + weights.largest))
    latency = links.through(1.0, group).latency_s
    matrices = min(ring(weights.matrices, grad) + buckets * latency, at_once + added)
    return (
        reducing * (matrices + ring(weights.others, grad)),
        last,
        gathering * (ring(weights.matrices, width) + buckets * latency),
        gathering * ring(weights.others, width),
    )


def _update(config: RunConfig, layout: Layout) -> float:
    """Least seconds of matrix updates on the rank of stage 0 that has most of them.

    Hosted: no less than a packing of whole matrices into owners times hosts can be, and no less than the mean of the
    updates and of the packing around their exchanges. Duplicated: of each owner alone, or of all ranks, the whole.
    """
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return 0.0
    layers, ranks = config.model.num_layers // layout.pp, layout.world_size // layout.tp
    alone = replace(layout.bare, pp=1, dp=ranks, global_batch_size=ranks)
    layer_s, costs, elements, packing_s = _layer(config, alone)
    if execution.everywhere:
        return layers * layer_s
    if execution is Execution.LAYERWISE:
        return layers * layer_s / layout.owners
    cells = layout.owners * layout.tp
    factor = step_factor(config.cluster, "matrix_update", implementation(config))
    mean = layers * (factor * math.fsum(costs) + elements * packing_s) / cells
    return max(mean, factor * _packed(costs, layers, cells))


@lru_cache(maxsize=1024)
def _packed(costs: tuple[float, ...], layers: int, cells: int) -> float:
    return simple_bound(costs * layers, cells)


@lru_cache(maxsize=64)
def _layer(config: RunConfig, layout: Layout) -> tuple[float, tuple[float, ...], int, float]:
    """Seconds of one layer's updates where a rank does them all, gathering them first; of each on its own; its
    elements; and seconds of packing an element where it is hosted."""
    members = matrices_of(replace(config.model, num_layers=1), layout, splitting_of(config))
    planned = execution_of(config) is Execution.PLANNED
    costs = update_costs(config, members, "canzona" if planned else "megatron")
    model = UpdateModel(config, layout, members, costs)
    whole_s = 0.0 if planned else model.duplicated(range(len(members))).seconds
    packing_s = model.packing_s if layout.tp > 1 else 0.0
    return whole_s, costs, sum(matrix.elements for matrix in members), packing_s
