"""The memory of a run's fullest GPU: state that is kept, memory needed during computation, and the GPU's
capacity.

`estimate` needs no plan: it works from shapes alone. The search of layouts uses it, and so do strategies
without a plan. `planner.memory.plan_memory` knows every rank's matrices, micro-groups and buckets. Commands
show `plan_memory` if there is a plan, otherwise the estimate (`planner.memory.memory_of`). The two differ in
the matrices that a rank keeps (`placement`, or the plan), in the padding of a plan's buckets, and in the size
of the engine's buffers (`least_buffer_bytes`, or `step_buffers`). State is counted as Megatron-core 0.19
keeps it.

Buffers of the communication library are not tensors; the profile's `reserved_gib` includes them.

All sizes are bytes on one rank; (t, p, c, D) are tp, pp, cp and dp.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from canzona_cli.core.costs.buffers import (
    StageWeights,
    bucket_elements,
    stage_weights,
    stored_shapes,
    transient,
    transients,
    weight_copies,
)
from canzona_cli.core.costs.padding import lay_out
from canzona_cli.core.costs.scratch import BATCH_BYTES, FP32, least_workspace_bytes
from canzona_cli.core.costs.update import RULES, algorithm_of
from canzona_cli.core.model.families import (
    LayerBlocks,
    all_layers,
    blocks_of_layers,
    family_of,
    layer_kinds,
    parameter_count,
    stage_blocks,
)
from canzona_cli.core.model.matrices import Shape, layer_on_rank, layer_runs, layer_shapes, matrix_shapes
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.optimizers.shampoo_facts import factored_sides, packed_elements
from canzona_cli.core.setup import Execution, Layout, ModelConfig, Setup
from canzona_cli.core.setup.execution import IN_ORDER, splitting_of, with_tp_mode
from canzona_cli.core.setup.stages import chunk_layers

GIB = 1 << 30
type Blocks[Item] = tuple[tuple[tuple[Item, ...], int], ...]
"""The contents of consecutive layers: those of one layer, and the number of layers like it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes on the rank that needs the most memory, by part, and the capacity of its GPU."""

    parts: Mapping[str, int]
    capacity: int
    """The bytes that a run may use: the memory of the profile's GPU minus its reserve."""
    worst_rank: str
    """The rank that needs the most: `rank 5`, or in an estimate `every rank` or a stage such as `pp stage
    0`."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    headroom: int
    """The bytes that the search of layouts leaves free, see `cluster.headroom_gib`."""

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Memory):
    """An estimate, without a plan, of the memory of the rank that needs the most.

    Its parts are weights, gradients, optimizer, activations, logits, workspace and exchange. Memory that is
    never needed at the same time counts once: `workspace` is only the excess over the logits and activations
    that were freed earlier. `exchange` is a lower bound, for every plan, on the engine's buffers and its
    optimizers' scratch.
    """

    @property
    def forward(self) -> int:
        """The bytes that the model needs without training: weights, activations and logits."""
        return sum(self.parts[part] for part in ("weights", "activations", "logits"))

    @property
    def state(self) -> int:
        """The bytes kept from step to step: weights, gradient buffers, optimizer state and the engine's
        buffers."""
        return sum(self.parts[part] for part in ("weights", "gradients", "optimizer", "exchange"))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The matrices whose optimizer state the fullest rank of a stage keeps."""

    worst: int
    """The elements of the matrices on the fullest rank."""
    worst_shapes: Mapping[Shape, int]
    """The number of matrices of each (rows, columns) on the fullest rank; empty for Megatron's layer-wise
    optimizer."""
    padded: int
    """The elements of the padded buffer that stores all matrices, on each rank; 0 if the buffer is not
    padded."""


def capacity(setup: Setup) -> int:
    """Returns the bytes of one GPU that a run may use."""
    return int((setup.cluster.memory_gib - setup.cluster.reserved_gib) * GIB)


def headroom(setup: Setup) -> int:
    """Returns the bytes of `capacity` that the search of layouts leaves free."""
    return int(setup.cluster.headroom_gib * GIB)


def estimate(setup: Setup, layout: Layout) -> MemoryEstimate:
    """Estimates the memory of the rank that needs the most in `layout`."""
    algorithm = algorithm_of(setup)
    candidates = {stage: _stage_parts(setup, algorithm, layout, stage) for stage in _fullest_stages(layout)}
    stage = max(candidates, key=lambda s: sum(candidates[s].values()))
    return MemoryEstimate(
        parts=MappingProxyType(candidates[stage]),
        worst_rank="every rank" if layout.pp == 1 else f"pp stage {stage}",
        capacity=capacity(setup),
        headroom=headroom(setup),
    )


def least_recomputed(setup: Setup, layouts: Sequence[Layout], limit: int) -> int | None:
    """Returns the place of the first layout whose `estimate` is at most `limit` bytes; None if there is none.

    Args:
        layouts: layouts that differ only in recomputation, in order of increasing recomputation, which never needs more
            memory.
    """
    algorithm, stages, left = algorithm_of(setup), _fullest_stages(layouts[0]), dict[int, int]()
    # What lasts is the same for all layouts, and usually too much for layouts that do not fit, often already the
    # weights, which are counted fastest.
    weights = [stage_weights(setup, layouts[0], stage) for stage in stages]
    if setup.train.weight_bytes * max(each.matrices + each.others for each in weights) > limit:
        return None
    for stage in stages:
        left[stage] = limit - sum(_lasting_parts(setup, algorithm, layouts[0], stage))
        if left[stage] < 0:
            return None

    def fits(layout: Layout) -> bool:
        needed = transients(setup, algorithm, layout, left)
        return all(sum(each.parts().values()) <= spare for each, spare in zip(needed, left.values(), strict=True))

    if not fits(layouts[-1]):
        return None
    return next((place for place, layout in enumerate(layouts[:-1]) if fits(layout)), len(layouts) - 1)


def _fullest_stages(layout: Layout) -> list[int]:
    """Lists the stages of which one needs the most memory: the first has the embedding and the most micro-batches in
    flight, the last has the output layer and the logits, and the second may have one layer more than either."""
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


def _stage_parts(setup: Setup, algorithm: Algorithm, layout: Layout, stage: int) -> dict[str, int]:
    weights, gradients, optimizer, exchange = _lasting_parts(setup, algorithm, layout, stage)
    lasting = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return {**lasting, **transient(setup, algorithm, layout, stage).parts(), "exchange": exchange}


def _lasting_parts(setup: Setup, algorithm: Algorithm, layout: Layout, stage: int) -> tuple[int, int, int, int]:
    # Cached for all modes of Megatron's Muon, on which only transient memory depends.
    return _lasting(with_tp_mode(setup, "duplicated"), algorithm, layout.bare, stage)


@lru_cache(maxsize=4096)
def _lasting(setup: Setup, algorithm: Algorithm, layout: Layout, stage: int) -> tuple[int, int, int, int]:
    """Counts the bytes of four parts of `MemoryEstimate`: weights, gradients, optimizer and exchange."""
    weights, fullest = stage_weights(setup, layout, stage), placement(setup, layout, stage)
    # Megatron pads its layer-wise buffers so that undivided parameters fit equal shards. Every rank stores
    # the padding.
    stored = weights.others + (weights.matrices if fullest is None else max(weights.matrices, fullest.padded))
    weight_bytes, gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
    state = sum(_state_on_fullest(setup, algorithm, layout, weights, fullest, stage).values())
    exchange = least_workspace_bytes(setup, algorithm)
    if setup.execution is Execution.PLANNED:
        exchange += least_buffer_bytes(setup, layout, stage)
    elif setup.execution is Execution.REDUNDANT:
        exchange += FP32 * _gathered_elements(setup, layout)
    return weight_bytes * stored + weight_copies(setup, layout, stage), gradient_bytes * stored, state, exchange


def _state_on_fullest(
    setup: Setup,
    algorithm: Algorithm,
    layout: Layout,
    weights: StageWeights,
    fullest: Placement | None,
    stage: int,
) -> dict[str, int]:
    """Counts the bytes of optimizer state on the fullest rank of a stage.

    Args:
        fullest: the matrices whose state the fullest rank keeps; None if matrices have no owners. In this
            case a rank keeps the state of its share of all parameters (AdamW), of every matrix that its TP
            group stores (canzona's sc), or of every fragment that it stores (Megatron's sc).
    """
    execution = setup.execution
    adamw = weights.adamw(execution, layout)
    if execution is Execution.ADAMW:
        return optimizer_state(setup, algorithm, adamw, 0, 0)
    if fullest is None:
        counts: Mapping[Shape, int] = stored_shapes(setup, layout, stage)
        copies = layout.tp if execution is Execution.REDUNDANT else 1
        elements = (weights.matrices - weights.experts) * copies + weights.experts
    else:
        counts, elements = fullest.worst_shapes, fullest.worst
    factors = sum(count * factor_bytes(algorithm, rows, cols) for (rows, cols), count in counts.items())
    return optimizer_state(setup, algorithm, adamw, elements, factors)


def placement(setup: Setup, layout: Layout, stage: int) -> Placement | None:
    """Estimates, without a plan, which matrices' state the fullest rank of a stage keeps.

    - layerwise: Megatron's packing of TP fragments over D * c ranks, and with ep > 1 of whole experts over
      their owners, padding included;
    - canzona: matrices over the D * c * t cells of the grid, balanced by elements;
    - asc, paper: matrices over the same cells in natural order;
    - other strategies, in which matrices have no owners: None.
    """
    execution, model = setup.execution, setup.model
    if not execution.has_owners:
        return None
    if execution is Execution.LAYERWISE:
        # Megatron cuts the first stage's buffers only.
        limit = bucket_elements(setup, layout) if stage == 0 else None
        chunks = [chunk_layers(model.num_layers, layout, stage, chunk) for chunk in range(layout.vpp)]
        buffers = [
            layerwise_placement(sizes, ranks, limit)
            for layers in chunks
            for sizes, ranks in _layerwise_buffers(blocks_of_layers(model, [layers]), layout)
        ]
        worst, padded = sum(buffer.worst for buffer in buffers), sum(buffer.padded for buffer in buffers)
        return Placement(worst=worst, worst_shapes=MappingProxyType({}), padded=padded)
    return _planned_placement(setup, layout, stage)


def _planned_placement(setup: Setup, layout: Layout, stage: int) -> Placement:
    """Returns the `placement` of a run with a plan."""
    in_order = setup.engine.strategy in IN_ORDER
    blocks = tuple(
        (layer_runs(kind, splitting_of(setup)), layers) for kind, layers in stage_blocks(setup.model, layout, stage)
    )
    return balanced_placement(blocks, layout.cells, natural_order=in_order)


def _layerwise_buffers(blocks: LayerBlocks, layout: Layout) -> list[tuple[Blocks[int], int]]:
    """Returns, for each of a rank's layer-wise buffers, the sizes in elements of the parameters of layers, and the
    number of ranks that share the buffer."""
    on_rank = [(layer_on_rank(kind, "fused", layout.ep), layers) for kind, layers in blocks]
    buffers = [
        (tuple((tuple(m.elements // layout.tp for m in cut), layers) for (cut, _), layers in on_rank), layout.owners),
        (
            tuple((tuple(m.elements for m in whole), layers) for (_, whole), layers in on_rank if whole),
            layout.expert_owners,
        ),
    ]
    return [(sizes, ranks) for sizes, ranks in buffers if sizes]


@lru_cache(maxsize=4096)
def layerwise_placement(blocks: Blocks[int], shards: int, bucket: int | None) -> Placement:
    """Returns the placement of layers in the buckets of `lay_out`.

    Args:
        blocks: the elements of each parameter of a layer.
    """
    loads = [0] * shards
    padded = 0
    parameters = tuple(size for sizes, layers in blocks for size in sizes * layers)
    for padded_bucket in lay_out(parameters, shards, bucket):
        padded += padded_bucket.elements
        for shard, places in enumerate(padded_bucket.shards):
            loads[shard] += sum(parameters[place] for place in places)
    return Placement(worst=max(loads), worst_shapes=MappingProxyType({}), padded=padded)


@lru_cache(maxsize=4096)
def balanced_placement(blocks: Blocks[tuple[Shape, int]], cells: int, *, natural_order: bool) -> Placement:
    """Returns the placement of the matrices of layers on `cells` cells.

    Without `natural_order`, the largest matrices are placed first, each on the least loaded cell. With it,
    the elements of all matrices, in natural order, are cut into equal slices, one for each cell. A matrix
    goes to the cell whose slice has its first element, so the fullest cell may exceed the mean by up to one
    matrix.

    Args:
        blocks: the shapes of a layer's matrices, see `layer_runs`.
    """
    contents: list[Counter[Shape]] = [Counter() for _ in range(cells)]
    loads = [0] * cells
    if natural_order:
        matrices = [
            shape for runs, layers in blocks for _ in range(layers) for shape, count in runs for _ in range(count)
        ]
        slice_elements = sum(math.prod(shape) for shape in matrices) / cells
        start = 0  # of the matrix, in elements
        for shape in matrices:
            cell = min(cells - 1, int(start / slice_elements))
            contents[cell][shape] += 1
            loads[cell] += math.prod(shape)
            start += math.prod(shape)
    else:
        counts = Counter[Shape]()
        for runs, layers in blocks:
            for shape, count in runs:
                counts[shape] += layers * count
        heap = [(0, cell) for cell in range(cells)]
        for shape, count in sorted(counts.items(), key=lambda item: (-math.prod(item[0]), item[0])):
            size, left, highest = math.prod(shape), count, max(heap)[0]
            while left:
                if left >= cells and highest - heap[0][0] < size:
                    # Every cell gets a matrix before any cell gets two.
                    rounds, left = divmod(left, cells)
                    heap = [(load + rounds * size, cell) for load, cell in heap]
                    for content in contents:
                        content[shape] += rounds
                else:
                    load, cell = heap[0]
                    heapq.heapreplace(heap, (load + size, cell))
                    contents[cell][shape] += 1
                    left -= 1
        for load, cell in heap:
            loads[cell] = load
    worst = max(range(cells), key=loads.__getitem__)
    return Placement(worst=loads[worst], worst_shapes=MappingProxyType(contents[worst]), padded=0)


def optimizer_state(setup: Setup, algorithm: Algorithm, adamw: int, elements: int, factors: int) -> dict[str, int]:
    """Counts the bytes of masters, matrix_state and adamw_state on a rank.

    AdamW keeps an fp32 master and two moments: 12 bytes per parameter, or 8 with fp32 weights, which need no
    masters. A matrix optimizer keeps a master (4 bytes per element), its moments (`moment_bytes`) and its
    factors (`factor_bytes`). The strategies differ in what is sharded, and in masters with fp32 weights:

    - sc: nothing is sharded, neither for matrices nor for AdamW's parameters
      (`Float16OptimizerWithFloat16Params`). In canzona's engine every rank keeps whole matrices;
    - layerwise, asc, paper, canzona: the state of each matrix is on one rank (that of each TP fragment for
      layerwise and shared matrices), and AdamW's parameters are sharded over D * c by `DistributedOptimizer`;
    - with fp32 weights, matrices have masters in canzona's engine only (its sc, asc, paper and canzona),
      because no other tensor holds the whole matrix.

    With `train.ema`, each master, or fp32 weight in its place, has an average.

    Args:
        adamw: the elements that AdamW updates on the rank.
        elements: the elements of the matrices whose state the rank keeps.
        factors: the bytes of these matrices' preconditioners.
    """
    execution = setup.execution
    master = FP32 if setup.train.precision == "bf16" else 0
    return {
        "masters": (FP32 if execution.ours else master) * elements + master * adamw,
        "matrix_state": moment_bytes(algorithm) * elements + factors,
        "adamw_state": 2 * FP32 * adamw,
        **({"average": FP32 * (elements + adamw)} if setup.train.ema else {}),
    }


def moment_bytes(algorithm: Algorithm) -> int:
    """Returns the bytes of fp32 moments per element of a matrix: the momentum of Muon, and both moments of SOAP,
    Shampoo and AdamW."""
    return FP32 * RULES[algorithm.name].moments


def factor_bytes(algorithm: Algorithm, rows: int, cols: int) -> int:
    """Counts the bytes of a matrix's fp32 state besides its moments.

    Shampoo and SOAP keep, for each preconditioned side, a packed statistic and a packed root (Shampoo) or a
    square basis (SOAP), and the intermediate results of a spread refresh. NorMuon keeps one number per row.
    """
    rule, spread = RULES[algorithm.name], algorithm.spread
    packed, squares = rule.packed + spread * rule.begun_packed, rule.squares + spread * rule.begun_squares
    sides = factored_sides(algorithm, rows, cols)
    factors = sum(packed * packed_elements(side) + squares * side**2 for side in sides)
    return FP32 * (rule.row_vectors * rows + factors)


def checkpoint_bytes(setup: Setup) -> int:
    """Counts the bytes of a checkpoint's tensors in any layout: one copy of all fp32 masters, averages and state.
    Weights are not stored."""
    algorithm, count = algorithm_of(setup), parameter_count(setup.model)
    adamw_bytes = 3 * FP32
    average_bytes = FP32 * count.total if setup.train.ema else 0
    if setup.execution is Execution.ADAMW:
        return adamw_bytes * count.total + average_bytes
    factors = sum(
        layers * count * factor_bytes(algorithm, *shape)
        for kind, layers in all_layers(setup.model)
        for shape, count in layer_runs(kind, splitting_of(setup))
    )
    adamw_elements = count.total - count.layer_matrices
    matrix_bytes = (FP32 + moment_bytes(algorithm)) * count.layer_matrices + factors
    return matrix_bytes + adamw_bytes * adamw_elements + average_bytes


def spare_bytes(setup: Setup, algorithm: Algorithm, layout: Layout, limit: int) -> int:
    """Returns the bytes that `limit` leaves for the optimizer state of matrices on a rank of the fullest
    stage, after subtracting all other memory that the rank needs under every plan."""
    spare_of_stages = []
    for stage in range(layout.pp):
        weights = stage_weights(setup, layout, stage)
        needed_bytes = sum(transient(setup, algorithm, layout, stage).parts().values())
        needed_bytes += least_workspace_bytes(setup, algorithm) + least_buffer_bytes(setup, layout, stage)
        adamw_bytes = sum(optimizer_state(setup, algorithm, weights.share(layout, matrices=False), 0, 0).values())
        stored_bytes = (setup.train.weight_bytes + setup.train.gradient_bytes) * (weights.matrices + weights.others)
        spare_of_stages.append(limit - stored_bytes - adamw_bytes - needed_bytes)
    return min(spare_of_stages)


def element_bytes(setup: Setup, algorithm: Algorithm, counts: Mapping[Shape, int], *, worst_case: bool) -> float:
    """Returns the bytes of optimizer state per element of the matrices.

    Args:
        counts: the number of matrices of each (rows, columns).
        worst_case: True to return the largest value of any shape, False for the mean over all matrices. They
            differ because preconditioners need more bytes per element for some shapes than for others.
    """
    sizes = [(factor_bytes(algorithm, *shape), math.prod(shape), count) for shape, count in counts.items()]
    if worst_case:
        factors = max(size / elements for size, elements, _ in sizes)
    else:
        elements = sum(size * count for _, size, count in sizes)
        factors = sum(size * count for size, _, count in sizes) / elements
    return sum(optimizer_state(setup, algorithm, 0, 1, 0).values()) + factors


def least_buffer_bytes(setup: Setup, layout: Layout, stage: int) -> int:
    """Estimates a lower bound, for any plan, on the bytes of the engine's message and gradient buffers in a
    stage.

    With tp > 1, these are the messages of two micro-groups with one matrix on each host, and the matrix's
    assembled fp32 gradient. With tp = 1 nothing is sent, but gradients are copied (`_copied_elements`), in
    batches of at most `BATCH_BYTES` or of one matrix.
    """
    blocks = stage_blocks(setup.model, layout, stage)
    runs = [(layer_runs(kind, splitting_of(setup)), layers) for kind, layers in blocks]
    largest = max(math.prod(shape) for of_layer, _ in runs for shape, _ in of_layer)
    if layout.tp == 1:
        copied_all = sum(layers * sum(_copied_elements(setup, kind)) for kind, layers in blocks)
        elements = sum(layers * count * math.prod(shape) for of_layer, layers in runs for shape, count in of_layer)
        copied = int(FP32 * _planned_placement(setup, layout, stage).worst * (copied_all / elements))
        return min(copied, max(BATCH_BYTES, FP32 * largest))
    message = largest * (layout.tp - 1) // layout.tp
    # Gradients and weights have send and receive buffers, in two sets.
    return 2 * 2 * (setup.train.weight_bytes + setup.engine.gradient_bytes) * message + FP32 * largest


def _gathered_elements(setup: Setup, layout: Layout) -> int:
    """Counts the elements of the engine's buffers under strategy sc. The engine gathers one matrix at a time,
    with buffers for the rank's fragment, all ranks' fragments, and the assembled matrix. With tp = 1 only
    copies are needed (`_copied_elements`)."""
    if layout.tp == 1:
        return max((size for kind in layer_kinds(setup.model) for size in _copied_elements(setup, kind)), default=0)
    largest = max(math.prod(shape) for shape in matrix_shapes(setup))
    return largest // layout.tp + 2 * largest


@lru_cache(maxsize=16)
def _copied_elements(setup: Setup, kind: ModelConfig) -> Sequence[int]:
    """Lists the sizes, in elements, of one layer's gradients that are copied with tp = 1, given a model all of whose
    layers are like it. Gradients are copied if they are not contiguous and in fp32 in the gradient buffer. If
    gradients are reduced in bf16, all are copied; otherwise only those of separate q, k and v, whose rows are
    interleaved in their parameter."""
    if setup.train.gradient_bytes != FP32:
        return [math.prod(shape) for shape in layer_shapes(kind, splitting_of(setup))]
    if setup.engine.splitting not in ("qkv", "split"):
        return []
    interleaved = [weight for weight in family_of(kind).weights(kind) if weight.cut == "repeats"]
    return [weight.repeats * part.rows * weight.cols for weight in interleaved for part in weight.parts]
