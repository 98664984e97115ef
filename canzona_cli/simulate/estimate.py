"""A plain estimate of how long a run's step takes, in microseconds: it ranks layouts, of which the best are simulated.

It has the simulator's prices, but neither a plan nor a timeline: the slowest stage's passes and the pipeline's filling,
the traffic that passes do not hide, norm and clipping, and evenly divided updates.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.activations import stage_weights
from canzona_cli.costs.buffers import element_bytes
from canzona_cli.costs.links import Groups, Links
from canzona_cli.costs.model import NormClip, hop, passes
from canzona_cli.costs.sharing import HOSTED, shares
from canzona_cli.costs.update import adamw_seconds, implementation, step_factor, update_costs
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.planner.packing import simple_bound
from canzona_cli.simulate.buffers import after_reduction
from canzona_cli.simulate.update import UpdateModel


def estimated_step_seconds(config: RunConfig, layout: Layout) -> float:
    """Estimates a step's seconds in a layout, under the plan it would get."""
    execution, parallel = execution_of(config), config.parallel
    times, hop_s = passes(config, layout), hop(config, layout).seconds
    stages = [sum(forward + backward + 2 * hop_s for forward, backward in chunks) for chunks in times]
    passed = layout.num_microbatches * max(stages) + (sum(stages) - max(stages)) / layout.vpp
    traffic = _traffic(config, replace(layout.bare, vpp=1))
    forward_s, backward_s = times[0][0]
    reduced, gathered = traffic.reduce_s, traffic.gather_s
    if parallel.overlap_grad_reduce:
        reduced = max(traffic.last_s, reduced / layout.vpp - backward_s)
        if parallel.overlap_param_gather:
            gathered = max(0.0, gathered / layout.vpp - forward_s)
    weights, ranks = stage_weights(config, layout, 0), 1 if execution.everywhere else layout.owners
    clipped = NormClip.of(config, layout).seconds((weights.matrices + weights.others) / ranks, weights.others / ranks)
    elements = weights.others + (weights.matrices if execution is Execution.ADAMW else 0)
    factor = step_factor(config.cluster, "adamw_update", implementation(config))
    updated = factor * adamw_seconds(elements / ranks, config.cluster) + _updates(config, layout)
    return passed + reduced + gathered + after_reduction(config, layout, 0) + clipped + updated


class _Traffic(NamedTuple):
    """Seconds of stage 0's data-parallel traffic."""

    reduce_s: float
    last_s: float
    """The embedding's gradients, which are ready last."""
    gather_s: float


@lru_cache(maxsize=1024)
def _traffic(config: RunConfig, layout: Layout) -> _Traffic:
    cluster, own = config.cluster, implementation(config)
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).data
    if group.size == 1:
        return _Traffic(0.0, 0.0, 0.0)
    weights, (width, grad) = stage_weights(config, layout, 0), element_bytes(config)
    embedding = config.model.vocab_size * config.model.hidden_size // layout.tp
    reducing, gathering = (step_factor(cluster, phase, own) for phase in ("grad_reduce", "param_gather"))
    everywhere = execution_of(config).everywhere
    reduce = links.all_reduce if everywhere else links.reduce_scatter
    everything = weights.matrices + weights.others
    return _Traffic(
        reducing * reduce(everything * grad, group).seconds,
        reducing * reduce(embedding * grad, group).seconds,
        0.0 if everywhere else gathering * links.all_gather(everything * width, group).seconds,
    )


def _updates(config: RunConfig, layout: Layout) -> float:
    """Seconds of matrix updates on the rank of stage 0 that has most of them."""
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return 0.0
    layers, ranks = config.model.num_layers // layout.pp, layout.world_size // layout.tp
    layer = _layer(config, replace(layout.bare, pp=1, vpp=1, dp=ranks, global_batch_size=ranks))
    if execution.everywhere:
        return layers * layer.whole_s
    if execution is Execution.LAYERWISE:
        return layers * layer.whole_s / layout.owners
    cells = layout.owners * layout.tp
    return max(layers * layer.all_s / cells, _packed(layer.pieces, layers, cells))


@lru_cache(maxsize=1024)
def _packed(costs: tuple[float, ...], layers: int, cells: int) -> float:
    return simple_bound(costs * layers, cells)


class _Layer(NamedTuple):
    """Seconds of one layer's updates."""

    whole_s: float
    """The seconds on a rank that does them all, and gathers them first."""
    all_s: float
    """The seconds on all ranks together, hosted matrices' packing included."""
    pieces: tuple[float, ...]
    """Each matrix, on its host or on a rank of the TP group that shares it."""


@lru_cache(maxsize=64)
def _layer(config: RunConfig, layout: Layout) -> _Layer:
    members = matrices_of(replace(config.model, num_layers=1), layout, splitting_of(config))
    costs = update_costs(config, members, implementation(config))
    model = UpdateModel(config, layout, members, costs)
    if execution_of(config) is not Execution.PLANNED:
        return _Layer(model.duplicated(range(len(members))).seconds, 0.0, ())
    factor = step_factor(config.cluster, "matrix_update", implementation(config))
    packing_s = model.pipeline.packing_s if layout.tp > 1 else 0.0
    possible = HOSTED if config.engine.mode == "hosted" else shares(config, layout, members)
    everything, pieces = 0.0, []
    for matrix, cost in zip(members, costs, strict=True):
        parts = [factor * possible[matrix.index].each] if matrix.index in possible else []
        everything += min([factor * cost + matrix.elements * packing_s, *(layout.tp * part for part in parts)])
        pieces.append(min([factor * cost, *parts]))
    return _Layer(0.0, everything, tuple(pieces))
