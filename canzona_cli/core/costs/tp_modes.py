"""The cost of the TP modes of Megatron's Muon in which no TP rank repeats another's work (`engine.muon_tp_mode`).

distributed (megatron-core 0.19, `newton_schulz_tp`): every rank keeps its fragment. The square of a step is that
of the side that TP does not cut, even if it is the longer side. Its products with fragments are divided by tp, but
every rank computes all of its square. Fragments' squares are all-reduced in every step, and nothing overlaps with
that. k and v, with few rows and many columns, take longer than whole.

layer_sharded (Megatron-LM's main branch, #6683): each weight has one home, the TP rank that updates it as a whole.
Homes are chosen longest first by n m^2, for sides m <= n. One all-to-all sends fp32 fragments to homes before the
updates, one sends fp32 updates back after them. Only the work of whole experts overlaps with the two.

Megatron-LM's main branch chooses between duplicated and distributed for each weight (`auto`, #6664), but only for
dense weights that a data-parallel group stores in shards, which neither canzona nor the supported release has.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace

from canzona_cli.core.costs.links import Group, Links, Transfer
from canzona_cli.core.costs.scratch import FP32
from canzona_cli.core.costs.update import MEGATRON_BYTES, UpdateTime, duration, rounded, seconds, work
from canzona_cli.core.model.matrices import Matrix, Shape
from canzona_cli.core.optimizers.facts import Algorithm, Work
from canzona_cli.core.optimizers.muon_facts import iteration_work, matmul_bytes
from canzona_cli.core.setup import ClusterConfig


def uncut_side(matrix: Matrix) -> int:
    """Returns the side of the squares of a distributed update.

    Megatron marks the dimension that TP cuts even in weights that it does not cut: those of experts that are
    divided among ranks.
    """
    cut = matrix.shard_dim
    if cut is None:
        cut = 1 if matrix.kind == "down" else 0
    return matrix.shape[1 - cut]


def distributed_time(algorithm: Algorithm, matrix: Matrix, parts: int, cluster: ClusterConfig) -> UpdateTime:
    """Returns the time of one rank's part of a distributed update, without its all-reduces.

    Args:
        parts: the number of ranks that have a fragment of the matrix: tp, or 1 for a whole expert.
    """
    return _distributed_time(algorithm, matrix.shape, uncut_side(matrix), parts, cluster)


@lru_cache(maxsize=1024)
def _distributed_time(algorithm: Algorithm, shape: Shape, side: int, parts: int, cluster: ClusterConfig) -> UpdateTime:
    algorithm = replace(algorithm, form="standard", stack=False, graph=False, spread=False)
    modelled = replace(cluster, measured_updates=())
    time = duration(distributed_work(algorithm, shape, side, parts), algorithm.precision, modelled)
    if cluster.measured_updates:  # of whole matrices, relative to the model
        measured_s, modelled_s = (seconds(algorithm, *shape, each, "megatron") for each in (cluster, modelled))
        time = UpdateTime(*(part * measured_s / modelled_s for part in time))
    return UpdateTime(*map(rounded, time))


def distributed_work(algorithm: Algorithm, shape: Shape, side: int, parts: int) -> Work:
    """Counts one rank's work in a distributed update: the elementwise passes over its fragment, and Newton-Schulz
    steps with squares of `side`."""
    rows, cols = shape
    steps, width = algorithm.ns_steps, matmul_bytes(algorithm)
    elements = rows * cols
    other = elements // side // parts
    whole = work(algorithm, rows, cols)[0]
    elementwise = whole.traffic - iteration_work(algorithm, rows, cols).traffic
    passes = elementwise + MEGATRON_BYTES[algorithm.precision] * elements
    return Work(
        matmuls=((steps, side, side, other),),
        symmetric=((steps, side, other), (steps, side, side)),
        traffic=passes / parts + 2 * width * steps * (side * other + side * side),
        launches=whole.launches,
    )


def all_reduces(algorithm: Algorithm, side: int, links: Links, group: Group) -> Transfer:
    """Returns the transfer of all all-reduces of a distributed update: one number, and a square in each step."""
    if group.size == 1:
        return Transfer()
    square = links.all_reduce(matmul_bytes(algorithm) * side**2, group)
    return square.scaled(algorithm.ns_steps).followed_by(links.all_reduce(FP32, group))


def homes(members: Sequence[Matrix], tp: int) -> list[list[Matrix]]:
    """Divides matrices among the TP ranks that update them in layer_sharded. Matrices of one weight have one
    home."""
    weights: dict[str, list[Matrix]] = {}
    for matrix in members:
        weights.setdefault(matrix.parameter, []).append(matrix)

    def cost(parts: Sequence[Matrix]) -> int:
        m, n = sorted((sum(matrix.rows for matrix in parts), parts[0].cols))
        return n * m * m

    homes_of: list[list[Matrix]] = [[] for _ in range(tp)]
    loads = [(0, home) for home in range(tp)]
    heapify(loads)
    for weight in sorted(weights.values(), key=cost, reverse=True):
        load, home = loads[0]
        homes_of[home] += weight
        heapreplace(loads, (load + cost(weight), home))
    return homes_of


def exchange_with_homes(homes_of: Sequence[Sequence[Matrix]], links: Links, group: Group) -> Transfer:
    """Returns the transfer of the all-to-all that sends fragments to homes, which takes as long as the one that
    sends updates back."""
    tp = group.size
    hosted = [FP32 * sum(matrix.fragment_elements(tp) for matrix in at_home) for at_home in homes_of]
    sent = [float(sum(hosted) - own) for own in hosted]
    received = [float((tp - 1) * own) for own in hosted]
    return links.all_to_all(sent, received, group)
