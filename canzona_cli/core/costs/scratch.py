"""Counts the bytes of scratch that the updates of matrices need, on one rank."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from canzona_cli.core.costs.update import RULES, form_of, stack_of
from canzona_cli.core.model.matrices import Shape, matrix_shapes
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.optimizers.muon_facts import BLOCK
from canzona_cli.core.optimizers.shampoo_facts import factored_sides
from canzona_cli.core.setup import MomentumConfig, NorMuonConfig, Setup

BATCH_BYTES = 256 << 20
"""The limit on the bytes of fp32 gradients that a rank copies at once, of matrices that no other rank of its
TP group stores. A matrix larger than this is copied alone."""
FP32 = 4
"""The bytes of an fp32 element, such as those of masters, optimizer state and scratch."""


def batch_slices(elements: Sequence[int]) -> list[slice]:
    """Cuts a sequence of matrices into batches of at most `BATCH_BYTES` in fp32; a larger matrix gets a batch
    to itself.

    Args:
        elements: for each matrix, the number of elements that are copied.
    """
    starts: list[int] = []
    filled = 0
    for place, size in enumerate(elements):
        if not starts or filled + size > BATCH_BYTES // FP32:
            starts.append(place)
            filled = 0
        filled += size
    return [slice(start, end) for start, end in pairwise([*starts, len(elements)])]


def workspace_bytes(
    setup: Setup,
    algorithm: Algorithm,
    batches: Iterable[Sequence[Shape]],
    shared: Iterable[tuple[int, int]] = (),
    interleaved: Iterable[tuple[int, int]] = (),
) -> int:
    """Counts the bytes of scratch that the optimizers of one rank keep; 0 if they are not canzona's. Each
    part of the scratch has the size that the largest matrix, or stack of matrices, needs.

    - Muon, in the type of its matmuls: two iterates and two squares of the short side (four in Gram form),
      for all stacked matrices of one shape. In fp32: with Nesterov momentum or NorMuon, the update direction;
      with neither, on GPUs in bf16 with the fused kernel, a copy of a matrix that is updated alone in Gram form; and
      on CPUs, one block. A direction covers a whole stack, or, on CPUs and without NorMuon, only the matrices in a
      block.
    - Shampoo and SOAP, in fp32: one square, one matrix, and one
      matrix for each preconditioned side.

    Args:
        batches: for each optimizer, the shapes of the matrices that it updates in one call.
        shared: for each shared matrix, the elements of its fragment and of one square.
        interleaved: the same for each shared matrix that is interleaved with a matrix of `shared`, and
            therefore has separate iterates and squares.
    """
    if not keeps_workspace(setup):
        return 0
    if isinstance(setup.optimizer, MomentumConfig):
        return _muon(setup, setup.optimizer, algorithm, batches, shared, interleaved)
    if not RULES[algorithm.name].preconditioned:
        return 0
    shapes = {shape for batch in batches for shape in batch}
    sides = [side for shape in shapes for side in factored_sides(algorithm, *shape)]
    # Shampoo's Adam uses the left side's buffer, even if this side has no factor.
    left = [r * c for r, c in shapes if r <= algorithm.max_preconditioner_dim or algorithm.name == "shampoo"]
    right = [r * c for r, c in shapes if c <= algorithm.max_preconditioner_dim]
    largest = max(map(math.prod, shapes), default=0)
    square = max((side**2 for side in sides), default=0)
    return FP32 * (square + largest + sum(max(sizes, default=0) for sizes in (left, right)))


def _muon(
    setup: Setup,
    muon: MomentumConfig,
    algorithm: Algorithm,
    batches: Iterable[Sequence[Shape]],
    shared: Iterable[tuple[int, int]],
    interleaved: Iterable[tuple[int, int]],
) -> int:
    """Counts the bytes of scratch of Muon's updates, see `workspace_bytes`."""
    # All sizes are in elements. `second_...` belong to the second of two interleaved shared matrices.
    iterate = square = gram_square = direction = gram_copy = block = second_iterate = second_square = 0
    keeps_copy = setup.cluster.device == "cuda" and algorithm.fused and setup.train.weight_bytes < FP32
    for batch in batches:
        for (rows, cols), count in Counter(batch).items():
            stacked = min(count, stack_of(algorithm, rows, cols, setup.cluster))
            iterate = max(iterate, stacked * rows * cols)
            square = max(square, stacked * min(rows, cols) ** 2)
            if form_of(algorithm, rows, cols, setup.cluster) == "gram":
                gram_square = max(gram_square, stacked * min(rows, cols) ** 2)
                # One matrix may be left over from stacks and is then updated alone.
                gram_copy = max(gram_copy, rows * cols if keeps_copy and (stacked == 1 or count % stacked == 1) else 0)
            in_block = max(1, min(stacked, BLOCK // (rows * cols)))
            by_blocks = setup.cluster.device == "cpu" and not isinstance(muon, NorMuonConfig)
            direction = max(direction, (in_block if by_blocks else stacked) * rows * cols)
            block = max(block, min(in_block * rows, max(1, BLOCK // cols)) * cols)
    for fragment, shared_square in shared:
        iterate, direction = max(iterate, fragment), max(direction, fragment)
        square, gram_square = max(square, shared_square), max(gram_square, shared_square)
        block = max(block, min(fragment, BLOCK))
    for fragment, shared_square in interleaved:
        second_iterate, second_square = max(second_iterate, fragment), max(second_square, shared_square)
        direction, block = max(direction, fragment), max(block, min(fragment, BLOCK))
    fp32 = direction if muon.nesterov or isinstance(muon, NorMuonConfig) else gram_copy
    if setup.cluster.device == "cpu":
        fp32 += block
    products = iterate + square + gram_square + second_iterate + 2 * second_square
    return setup.train.weight_bytes * 2 * products + FP32 * fp32


@lru_cache(maxsize=64)
def least_workspace_bytes(setup: Setup, algorithm: Algorithm) -> int:
    """Counts the `workspace_bytes` of a rank that updates one matrix at a time."""
    return workspace_bytes(setup, algorithm, [(shape,) for shape in matrix_shapes(setup)])


@lru_cache(maxsize=64)
def momentary_bytes(setup: Setup, algorithm: Algorithm) -> int:
    """Counts the bytes that the update of the model's largest matrix needs temporarily, in addition to state
    and `workspace_bytes`.

    - canzona's optimizers, which have a workspace: for Muon, nothing; for a refresh of Shampoo or SOAP, five
      squares of the longest preconditioned side and one matrix, in fp32;
    - Muon in code that is not canzona's: the fp32 update, its gathered copy and three iterates of the largest
      matrix, and two Gram matrices of its short side;
    - Shampoo and SOAP in code that is not canzona's: four squares of the longest preconditioned side and
      three matrices, in fp32;
    - AdamW: three matrices in fp32.
    """
    shapes, width = set(matrix_shapes(setup)), setup.train.weight_bytes
    keeps = keeps_workspace(setup)
    orthogonal = not RULES[algorithm.name].preconditioned and algorithm.name != "adamw"
    if orthogonal and keeps:
        return 0
    rows, cols = max(shapes, key=math.prod)
    if orthogonal:
        return (2 * FP32 + 3 * width) * rows * cols + 2 * width * min(rows, cols) ** 2
    if algorithm.name == "adamw":
        return 3 * FP32 * rows * cols
    sides = [side for shape in shapes for side in factored_sides(algorithm, *shape)]
    squares, matrices = (5, 1) if keeps else (4, 3)
    return FP32 * (matrices * rows * cols + squares * max(sides, default=0) ** 2)


def keeps_workspace(setup: Setup) -> bool:
    """Returns True if canzona's optimizers update the run's matrices. They keep their scratch from step to
    step."""
    return setup.execution.ours and setup.optimizer.name != "custom"
