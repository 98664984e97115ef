"""Memory of a run's fullest GPU: what it keeps from step to step,
what it needs while it computes, what it may use.

`estimate` needs no plan and bounds memory from shapes alone: it ranks layouts, and is all there is for
strategies without a plan. `planner.memory.plan_memory` knows every rank's matrices, micro-groups and buckets.
Both add the same parts; they differ in who holds which matrices (`placement`, or the plan) and in the size of
the engine's buffers (`least_step_bytes`, or `step_buffers`). State follows from how Megatron-core 0.19 keeps
it.

Buffers of the communication library are no tensors: they are in the profile's `reserved_gib`.

Everything is bytes on one rank; (t, p, c, D) are tp, pp, cp and dp.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from canzona_cli.config.execution import IN_ORDER, Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import (
    BATCH_BYTES,
    FP32,
    Shape,
    StageWeights,
    bucket_elements,
    element_bytes,
    exchange_bytes,
    lay_out,
    matrix_shapes,
    stage_weights,
    transient,
    workspace_bytes,
)
from canzona_cli.costs.update import RULES, algorithm
from canzona_cli.model.families import family_of, parameter_count
from canzona_cli.model.matrices import layer_shapes
from canzona_cli.optimizers.facts import Algorithm
from canzona_cli.optimizers.shampoo_facts import factored_sides, packed_elements

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the rank that needs most, by part, and what its GPU has."""

    parts: Mapping[str, int]
    capacity: int
    """Memory of the cluster profile's GPU less what it reserves."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Memory):
    """Bytes on the rank that needs most, and what its GPU has."""

    parts: Mapping[str, int]
    """weights, gradients, optimizer, activations, logits, workspace, exchange. What is never alive together
    counts once: `workspace` is only what it needs beyond the memory that logits or activations have freed by
    then. `exchange` is the least of the engine's own buffers and its optimizers' lasting scratch; how much
    more a plan takes is known once there is one."""
    worst_rank: str
    """The rank that needs most: `every rank`, or `pp stage 0`."""

    @property
    def forward(self) -> int:
        """The bytes of a model that is not trained."""
        return sum(self.parts[part] for part in ("weights", "activations", "logits"))

    @property
    def state(self) -> int:
        """The bytes that stay from step to step: weights, gradient buffers, optimizer state and the engine's
        own buffers."""
        return sum(self.parts[part] for part in ("weights", "gradients", "optimizer", "exchange"))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The load of the worst rank."""

    worst: int
    """Elements of the matrices on the rank that holds most."""
    worst_shapes: Mapping[Shape, int]
    """The number of matrices of each (rows, columns) on that rank; empty where shapes do not matter."""
    padded: int
    """Elements of the buffer that stores all matrices, padding included; 0 when it is not padded."""


def capacity(config: RunConfig) -> int:
    """Bytes of one GPU a run may use."""
    return int((config.cluster.memory_gib - config.cluster.reserved_gib) * GIB)


def estimate(config: RunConfig, layout: Layout) -> MemoryEstimate:
    """Memory of the worst rank of `layout`.

    Only the first and the last stage can be the worst: the first has the embedding and the most micro-batches
    in flight, the last the output layer and the logits.
    """
    candidates = {stage: _stage_parts(config, layout, stage) for stage in sorted({0, layout.pp - 1})}
    stage = max(candidates, key=lambda s: sum(candidates[s].values()))
    return MemoryEstimate(
        parts=MappingProxyType(candidates[stage]),
        worst_rank="every rank" if layout.pp == 1 else f"pp stage {stage}",
        capacity=capacity(config),
    )


def _stage_parts(config: RunConfig, layout: Layout, stage: int) -> dict[str, int]:
    weights, gradients, optimizer, exchange = _lasting(config, layout.bare, stage)
    lasting = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return {**lasting, **transient(config, layout, stage).parts(), "exchange": exchange}


@lru_cache(maxsize=4096)
def _lasting(config: RunConfig, layout: Layout, stage: int) -> tuple[int, int, int, int]:
    """Weights, gradients, optimizer and exchange."""
    weights, held = stage_weights(config, layout, stage), placement(config, layout, stage)
    # Megatron pads its layer-wise buffers until whole parameters fit equal shards, and every rank stores
    # them.
    stored = weights.others + (weights.matrices if held is None else max(weights.matrices, held.padded))
    width, grad = element_bytes(config)
    state = sum(_bounded_state(config, layout, weights, held).values())
    return width * stored, grad * stored, state, least_step_bytes(config, layout, stage)


def _bounded_state(config: RunConfig, layout: Layout, weights: StageWeights, held: Placement | None) -> dict[str, int]:
    """State of the fullest rank by `placement`; with None,
    every rank keeps the state of all matrices it stores."""
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return optimizer_state(config, layout, weights.matrices + weights.others, 0, 0)
    if held is None:
        layers = config.model.num_layers // layout.pp
        counts: Mapping[Shape, int] = Counter(matrix_shapes(config) * layers)
        whole = weights.matrices * (layout.tp if execution is Execution.REDUNDANT else 1)
    else:
        counts, whole = held.worst_shapes, held.worst
    how = algorithm(config)
    factors = sum(count * factor_bytes(how, rows, cols) for (rows, cols), count in counts.items())
    return optimizer_state(config, layout, weights.others, whole, factors)


def placement(config: RunConfig, layout: Layout, stage: int) -> Placement | None:
    """Finds who holds the matrices' optimizer state on a stage,
    as far as that can be said before there is a plan.

    None where it is not divided by whole matrices. layerwise: Megatron's own packing of TP fragments over D *
    c ranks, padding included. canzona: whole matrices over the D * c * t cells of the grid, balanced by
    state. asc: the same cells in natural order, unbalanced.
    """
    execution = execution_of(config)
    if not execution.has_owners:
        return None
    shards, layers = layout.owners, config.model.num_layers // layout.pp
    if execution is Execution.LAYERWISE:
        sizes = tuple(rows * cols // layout.tp for rows, cols in layer_shapes(config.model, "fused"))
        # Megatron cuts the first stage's buffers only.
        limit = bucket_elements(config, layout) if stage == 0 else None
        held = layerwise_placement(sizes, layers // layout.vpp, shards, limit)
        return replace(held, worst=held.worst * layout.vpp, padded=held.padded * layout.vpp)
    in_order = config.engine.strategy in IN_ORDER
    return balanced_placement(matrix_shapes(config), layers, shards * layout.tp, in_order=in_order)


@lru_cache(maxsize=4096)
def layerwise_placement(sizes: tuple[int, ...], layers: int, shards: int, bucket: int | None) -> Placement:
    """Load and padding of `lay_out` for `layers` times `sizes` (elements of one layer's parameters)."""
    loads = [0] * shards
    padded = 0
    everything = sizes * layers
    for laid_out in lay_out(everything, shards, bucket):
        padded += laid_out.elements
        for shard, held in enumerate(laid_out.shards):
            loads[shard] += sum(everything[parameter] for parameter in held)
    return Placement(worst=max(loads), worst_shapes=MappingProxyType({}), padded=padded)


@lru_cache(maxsize=4096)
def balanced_placement(shapes: tuple[Shape, ...], layers: int, cells: int, *, in_order: bool) -> Placement:
    """`layers` times `shapes` over `cells`: largest first onto the least loaded, or cut in natural order.

    In natural order a cell is closed once it has reached the mean, so the worst holds up to a matrix more.
    """
    everything = [shape for _ in range(layers) for shape in shapes]
    held: list[Counter[Shape]] = [Counter() for _ in range(cells)]
    loads = [0] * cells
    if in_order:
        mean = sum(math.prod(shape) for shape in everything) / cells
        done = 0
        for shape in everything:
            cell = min(cells - 1, int(done / mean))
            held[cell][shape] += 1
            loads[cell] += math.prod(shape)
            done += math.prod(shape)
    else:
        heap = [(0, cell) for cell in range(cells)]
        for shape in sorted(everything, key=lambda s: (-math.prod(s), s)):
            load, cell = heap[0]
            heapq.heapreplace(heap, (load + math.prod(shape), cell))
            held[cell][shape] += 1
        for load, cell in heap:
            loads[cell] = load
    worst = max(range(cells), key=loads.__getitem__)
    return Placement(worst=loads[worst], worst_shapes=MappingProxyType(held[worst]), padded=0)


def optimizer_state(config: RunConfig, layout: Layout, others: int, whole: int, factors: int) -> dict[str, int]:
    """Bytes of masters, matrix_state and adamw_state on a rank.

    AdamW keeps an fp32 master and two moments, 12 bytes a parameter (8 with fp32 weights, which are their own
    masters), sharded over D * c by `DistributedOptimizer`. A matrix optimizer keeps a master, 4 bytes (0),
    its moments and its factors, see `moment_bytes` and `factor_bytes`:
    - sc: `Float16OptimizerWithFloat16Params` without any sharding, for matrices and AdamW parameters alike;
      where the engine does it, matrices are whole, with masters at fp32 weights too;
    - layerwise, asc, canzona: whole matrices on some rank, the AdamW parameters sharded. What asc and canzona
      host has a master with fp32 weights too: nowhere else is the matrix whole.

    Args:
        others: elements that AdamW updates, of all that a TP rank of the stage stores.
        whole: elements of the matrices whose state the rank keeps.
        factors: bytes of those matrices' preconditioners.
    """
    execution = execution_of(config)
    master = FP32 if config.train.precision == "bf16" else 0
    share = others if execution.everywhere else math.ceil(others / layout.owners)
    return {
        "masters": (FP32 if execution.ours else master) * whole + master * share,
        "matrix_state": moment_bytes(algorithm(config)) * whole + factors,
        "adamw_state": 2 * FP32 * share,
    }


def moment_bytes(algorithm: Algorithm) -> int:
    """Bytes of fp32 state per element of a matrix.

    Muon: momentum. Shampoo: momentum, and with Adam grafting its second moment. SOAP and AdamW: two moments.
    """
    return FP32 * (RULES[algorithm.name].moments + (algorithm.grafting == "adam"))


def factor_bytes(algorithm: Algorithm, rows: int, cols: int) -> int:
    """Bytes of a matrix's other fp32 state.

    Shampoo and SOAP: for each side that has them a statistic, packed, and Shampoo's root, packed, or SOAP's
    basis, a square; KL-Shampoo also its eigenvalues. NorMuon: a number for each row.
    """
    rule = RULES[algorithm.name]
    sides = factored_sides(algorithm, rows, cols)
    factors = sum(rule.packed * packed_elements(side) + rule.squares * side**2 + rule.vectors * side for side in sides)
    return FP32 * (rule.row_vectors * rows + factors)


def checkpoint_bytes(config: RunConfig) -> int:
    """Counts the bytes of a checkpoint's tensors, whatever the layout: fp32 masters and state, each once.
    Weights are not stored."""
    how, count = algorithm(config), parameter_count(config.model)
    adamw = 3 * FP32
    if execution_of(config) is Execution.ADAMW:
        return adamw * count.total
    factors = config.model.num_layers * sum(factor_bytes(how, *shape) for shape in matrix_shapes(config))
    others = count.total - count.layer_matrices
    return (FP32 + moment_bytes(how)) * count.layer_matrices + factors + adamw * others


def least_step_bytes(config: RunConfig, layout: Layout, stage: int) -> int:
    """Returns the part of `step_buffers` that every plan needs: groups of one matrix a host; with tp = 1 no
    plan has a choice."""
    return _least_workspace(config) + _least_buffers(config, layout, stage)


@lru_cache(maxsize=64)
def _least_workspace(config: RunConfig) -> int:
    return workspace_bytes(config, [(shape,) for shape in matrix_shapes(config)])


def _least_buffers(config: RunConfig, layout: Layout, stage: int) -> int:
    if execution_of(config) is Execution.REDUNDANT:
        return FP32 * _gathered_elements(config, layout)
    held = placement(config, layout, stage)
    if held is None or execution_of(config) is not Execution.PLANNED:
        return 0
    shapes = matrix_shapes(config)
    largest = max(math.prod(shape) for shape in shapes)
    if layout.tp > 1:
        travels = largest * (layout.tp - 1) // layout.tp  # out and in, as gradients and as weights, in two sets
        return 2 * 2 * sum(exchange_bytes(config)) * travels + FP32 * largest
    batch = min(FP32 * held.worst, max(BATCH_BYTES, FP32 * largest))
    if element_bytes(config)[1] != FP32:
        return batch
    if config.engine.splitting in ("fused", "per_head"):
        return 0
    weights = family_of(config.model).weights(config.model)
    interleaved = sum(weight.elements for weight in weights if weight.cut == "repeats")
    share = interleaved / sum(math.prod(shape) for shape in shapes)
    return min(int(FP32 * held.worst * share), batch)


def _gathered_elements(config: RunConfig, layout: Layout) -> int:
    """Counts the elements of sc by the engine, which gathers one matrix at a time: its fragment, all ranks'
    fragments, the whole they make.

    With tp = 1 only what does not lie whole in the gradient buffer is copied: all of it if reduced in bf16,
    else q, k and v where they are matrices.
    """
    largest = max(math.prod(shape) for shape in matrix_shapes(config))
    if layout.tp > 1:
        return largest // layout.tp + 2 * largest
    if element_bytes(config)[1] != FP32:
        return largest
    if config.engine.splitting not in ("qkv", "split"):
        return 0
    interleaved = [weight for weight in family_of(config.model).weights(config.model) if weight.cut == "repeats"]
    return max(weight.repeats * part.rows * weight.cols for weight in interleaved for part in weight.parts)
