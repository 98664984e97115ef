"""Megatron's buffers before there is a plan: bytes of an element, size of a bucket, padding, shards."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.config.execution import execution_of
from canzona_cli.config.schema import Layout, MomentumConfig, NorMuonConfig, RunConfig
from canzona_cli.costs.update import RULES, algorithm, form_of, stack_of
from canzona_cli.optimizers.muon_facts import BLOCK
from canzona_cli.optimizers.shampoo_facts import STACKED_SQUARES, factored_sides

BATCH_BYTES = 256 << 20
"""The most fp32 scratch of a batch of an owner's matrices, where tp = 1."""
FP32 = 4
"""Bytes of an element of masters, optimizer state and scratch."""
ALIGNMENT = 64
"""Elements a parameter's start is a multiple of (Megatron's `pad_param_start`)."""
_SHARD_ALIGNMENT = 128
"""Megatron pads bucket ends to multiples of the ranks and of this."""
_PADDING_FLOOR = 0.9
"""Megatron extends a bucket of equal shards until a dominant parameter fills at least this part of them."""


def element_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient buffer) bytes of a parameter."""
    width = 2 if config.train.precision == "bf16" else FP32
    return width, FP32 if config.train.grad_reduce_dtype == "fp32" else width


def default_bucket_elements(owners: int) -> int:
    """Size at which Megatron closes a bucket by default (`DistributedDataParallel`, 0.19)."""
    return max(40_000_000, 1_000_000 * owners)


def bucket_elements(config: RunConfig, layout: Layout) -> int | None:
    """Size at which Megatron closes a bucket of the first stage; None where all buffers are one bucket."""
    if not config.parallel.overlap_grad_reduce:
        return None
    return config.parallel.bucket_elements or default_bucket_elements(layout.owners)


def align(position: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Pads a bucket that ends at `position`: divisible by the ranks, and the next one starts aligned."""
    return align(position, math.lcm(shards, ALIGNMENT))


@dataclass(frozen=True, kw_only=True)
class PaddedBucket:
    """A bucket of `shards` equal shards that whole parameters were packed into."""

    shard_elements: int
    """Length of one shard, padding included."""
    shards: tuple[tuple[int, ...], ...]
    """Parameters of each shard in buffer order, as positions in the list of sizes."""

    @property
    def elements(self) -> int:
        return self.shard_elements * len(self.shards)


def lay_out(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[PaddedBucket]:
    """`LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` of megatron-core 0.19.

    Walks parameters of `sizes` elements (creation order) backwards, cuts a bucket at `bucket` elements (None:
    one bucket) or once the largest parameter no longer dominates, packs each bucket into `shards` by largest
    first onto the least loaded, and pads every shard to the fullest.
    """
    for chunk in _chunks(sizes, shards, bucket):
        yield _largest_first(sizes, chunk, shards)


def _chunks(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[list[int]]:
    """Cuts parameters into buckets, last created first."""
    chunk: list[int] = []
    chunk_total = chunk_max = 0
    for parameter in reversed(range(len(sizes))):
        size = sizes[parameter]
        chunk.append(parameter)
        chunk_total, chunk_max = chunk_total + size, max(chunk_max, size)
        if bucket is not None and chunk_total >= max(bucket, int(shards * chunk_max * _PADDING_FLOOR)):
            yield chunk
            chunk, chunk_total, chunk_max = [], 0, 0
    if chunk:
        yield chunk


def _largest_first(sizes: Sequence[int], chunk: Sequence[int], shards: int) -> PaddedBucket:
    heap = [(0, shard) for shard in range(shards)]
    held: list[list[int]] = [[] for _ in range(shards)]
    for parameter in sorted(chunk, key=lambda p: -sizes[p]):
        cursor, shard = heap[0]
        heapq.heapreplace(heap, (align(cursor) + sizes[parameter], shard))
        held[shard].append(parameter)
    fullest = max(cursor for cursor, _ in heap)
    return PaddedBucket(shard_elements=shard_elements(fullest, shards), shards=tuple(map(tuple, held)))


def shard_elements(fullest: int, shards: int) -> int:
    """Pads equal shards that hold `fullest` elements, so that their bucket ends on Megatron's alignment."""
    return align(fullest, math.lcm(ALIGNMENT, math.lcm(shards, _SHARD_ALIGNMENT) // shards))


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient) bytes of an element that travels between TP ranks; C_max limits the larger."""
    return element_bytes(config)[0], 2 if config.engine.exchange_dtype == "bf16" else FP32


Shape = tuple[int, int]
"""(rows, columns)."""


def workspace_bytes(
    config: RunConfig,
    together: Iterable[Sequence[Shape]],
    shared: Iterable[tuple[int, int]] = (),
    beside: Iterable[tuple[int, int]] = (),
) -> int:
    """Bytes that the optimizers of one rank keep as scratch; 0 where they are not canzona's own.

    Muon: two iterates and two squares of the short side (four in Gram form) in the type of its products, for
    all stacked matrices of one shape, and a direction in fp32 (with Nesterov's momentum; NorMuon always; on
    GPUs what the Gram form makes in fp16 of a matrix alone). Shampoo and SOAP, all fp32: one square, one
    whole matrix, and one for each preconditioned side. SOAP-Muon: both, in standard form and without
    stacking.

    Args:
        together: shapes of the matrices that one optimizer steps at once, for each optimizer.
        shared: the elements of the fragment and of a square, for each matrix that the TP group shares.
        beside: the same of each that takes turns with one of `shared`: it has iterates and squares of its
            own.
    """
    if not keeps_workspace(config):
        return 0
    if isinstance(config.optimizer, MomentumConfig):
        return _muon(config, config.optimizer, together, shared, beside)
    how = algorithm(config)
    if not RULES[how.name].preconditioned:
        return 0
    shapes = {shape for batch in together for shape in batch}
    sides = [side for shape in shapes for side in factored_sides(how, *shape)]
    # An Adam graft is put together in the left side's buffer, whether that side has a factor or not.
    left = [r * c for r, c in shapes if r <= how.max_preconditioner_dim or how.grafting == "adam"]
    right = [r * c for r, c in shapes if c <= how.max_preconditioner_dim]
    whole = max(map(math.prod, shapes), default=0)
    square = max((side**2 for side in sides), default=0)
    if sides and config.cluster.device != "cpu":
        square = max(square, STACKED_SQUARES)
    scratch = FP32 * (square + whole + sum(max(sizes, default=0) for sizes in (left, right)))
    if RULES[how.name].orthogonal:
        scratch += 2 * element_bytes(config)[0] * (whole + max((min(shape) ** 2 for shape in shapes), default=0))
    return scratch


def _muon(
    config: RunConfig,
    muon: MomentumConfig,
    together: Iterable[Sequence[Shape]],
    shared: Iterable[tuple[int, int]],
    beside: Iterable[tuple[int, int]],
) -> int:
    iterate = square = more = direction = wider = block = second = squares = 0
    half = config.cluster.device == "cuda" and element_bytes(config)[0] < FP32
    how = algorithm(config)
    for batch in together:
        for (rows, cols), count in Counter(batch).items():
            stacked = min(count, stack_of(how, rows, cols, config.cluster))
            iterate = max(iterate, stacked * rows * cols)
            square = max(square, stacked * min(rows, cols) ** 2)
            if form_of(how, rows, cols, config.cluster) == "gram":
                more = max(more, stacked * min(rows, cols) ** 2)
                # One may be left over from stacks.
                wider = max(wider, rows * cols if half and (stacked == 1 or count % stacked == 1) else 0)
            direction = max(direction, rows * cols)
            block = max(block, min(rows, max(1, BLOCK // cols)) * cols)
    for fragment, side in shared:
        iterate, direction = max(iterate, fragment), max(direction, fragment)
        square, more = max(square, side), max(more, side)
        block = max(block, min(fragment, BLOCK))
    for fragment, side in beside:
        second, squares = max(second, fragment), max(squares, side)
        direction, block = max(direction, fragment), max(block, min(fragment, BLOCK))
    fp32 = (direction if muon.nesterov or isinstance(muon, NorMuonConfig) else wider) + (
        block if config.cluster.device == "cpu" else 0
    )
    return element_bytes(config)[0] * 2 * (iterate + square + more + second + 2 * squares) + FP32 * fp32


def momentary_bytes(config: RunConfig, shapes: Sequence[Shape]) -> int:
    """Bytes that the update of the largest of `shapes` needs besides, given back when it is done.

    With a workspace: nothing for Muon; in a refresh, five squares of Shampoo's and SOAP's longest
    preconditioned side and one matrix. Without: for Newton-Schulz, per element of the largest matrix that is
    worked on whole, the fp32 update, its gathered copy and three iterates, and two Gram matrices of the short
    side; else three such matrices and four squares.
    """
    how, width = algorithm(config), element_bytes(config)[0]
    rows, cols = max(shapes, key=math.prod)
    keeps = keeps_workspace(config)
    if not RULES[how.name].preconditioned and how.name != "adamw":
        return 0 if keeps else (2 * FP32 + 3 * width) * rows * cols + 2 * width * min(rows, cols) ** 2
    if how.name == "adamw":
        return 3 * FP32 * rows * cols
    sides = [side for shape in shapes for side in factored_sides(how, *shape)]
    squares, matrices = (5, 1) if keeps else (4, 3)
    return FP32 * (matrices * rows * cols + squares * max(sides, default=0) ** 2)


def keeps_workspace(config: RunConfig) -> bool:
    """True where the matrices' optimizers are canzona's own."""
    return execution_of(config).ours and config.optimizer.name != "custom"
