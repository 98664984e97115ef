"""A first guess at a step's time, in microseconds instead of the simulator's tens of milliseconds: to rank layouts.

It adds up what the simulator lays on a timeline, from the same prices: one time model, two ways of asking it.
"""

import math
from functools import lru_cache

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.activations import matrix_shapes, stage_weights
from canzona_cli.planner.buckets import bucket_elements, element_bytes
from canzona_cli.planner.cost import adamw_seconds, algorithm, seconds
from canzona_cli.planner.links import Groups, Links
from canzona_cli.planner.memory import placement
from canzona_cli.simulate.model_time import slowest_passes


def quick_step_seconds(config: RunConfig, layout: Layout) -> float:
    """One optimizer step of the run's strategy, on its first stage.

    The pipeline of micro-batches; gradients reduced under the last backward and parameters gathered under the first
    forward, but for what does not fit and one bucket of each; the updates of the rank with most elements.
    """
    forward_s, backward_s = slowest_passes(config, layout)
    reduce_s, gather_s, buckets = _data_parallel(config, layout)
    under_backward = backward_s if config.parallel.overlap_grad_reduce else 0.0
    under_forward = forward_s if config.parallel.overlap_grad_reduce and config.parallel.overlap_param_gather else 0.0
    return (
        (layout.num_microbatches + layout.pp - 1) * (forward_s + backward_s)
        + _exposed(reduce_s, under_backward, buckets)
        + _exposed(gather_s, under_forward, buckets)
        + _update(config, layout)
    )


def _exposed(transfer_s: float, under_s: float, buckets: int) -> float:
    hidden = min(under_s, transfer_s * (1 - 1 / buckets))
    return transfer_s - hidden


def _data_parallel(config: RunConfig, layout: Layout) -> tuple[float, float, int]:
    """Seconds of gradient reduction and of parameter gathering, in how many buckets."""
    weights, (width, grad) = stage_weights(config, layout, 0), element_bytes(config)
    links, group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).data
    held = placement(config, layout, 0)
    elements = weights.others + max(weights.matrices, 0 if held is None else held.padded)
    limit = bucket_elements(config, layout)
    buckets = 1 if limit is None else -(-elements // limit)
    if execution_of(config).everywhere:
        return links.all_reduce(elements / buckets * grad, group).seconds * buckets, 0.0, buckets
    return (
        links.reduce_scatter(elements / buckets * grad, group).seconds * buckets,
        links.all_gather(elements / buckets * width, group).seconds * buckets,
        buckets,
    )


def _update(config: RunConfig, layout: Layout) -> float:
    weights, held = stage_weights(config, layout, 0), placement(config, layout, 0)
    execution, owners = execution_of(config), layout.owners
    if execution is Execution.ADAMW:
        return adamw_seconds((weights.matrices + weights.others) / owners, config.cluster)
    layer_s, layer_elements = _layer_updates(config)
    layers = config.model.num_layers // layout.pp
    if held is None:
        return layers * layer_s + adamw_seconds(weights.others, config.cluster)
    # Every TP rank of a layerwise owner repeats its updates.
    worst = held.worst * (layout.tp if execution is Execution.LAYERWISE else 1)
    return worst / layer_elements * layer_s + adamw_seconds(weights.others / owners, config.cluster)


@lru_cache(maxsize=16)
def _layer_updates(config: RunConfig) -> tuple[float, int]:
    """Seconds of the updates of one layer's matrices, and their elements."""
    how, shapes = algorithm(config), matrix_shapes(config)
    costs = (seconds(how, rows, cols, config.cluster) for rows, cols in shapes)
    return math.fsum(costs), sum(rows * cols for rows, cols in shapes)
