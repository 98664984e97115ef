"""What it takes to update a matrix together: its owner's TP ranks on fragments, its host on a square of the short side.

The optimizer is one with a shared form (`canzona_cli.optimizers.shared`), in which the Gram form of Newton-Schulz is
divided between the ranks. With u = 2 m^3, r = long / short and s its segments, 2 r u of each segment's products are
divided by tp, what is left of its (14 u in all of five steps) the host does alone. Or nobody is host: all ranks make
their rows of each square, without a symmetric product's gain, and gather them between products.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.cost import GRAM_MIN_SIDE, algorithm, duration, gram_holds, gram_scale, rounded
from canzona_cli.planner.exchange import square_bytes
from canzona_cli.planner.links import Group, Links, Transfer
from canzona_cli.planner.parts import HOSTED, Algorithm, Share
from canzona_cli.planner.work import RULES, Work, product_bytes, segments

_SUMMED = 8
"""Bytes of an fp32 sum that are moved for each contribution added to it."""
_TOLD = 16
"""Bytes of what fragments tell each other besides squares, at most."""
_AROUND = (9, 9, 11)
"""Kernels of a fragment before the first round, between two, and after the last."""


def shares(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """Of every matrix that can be shared, by index."""
    how, asked = algorithm(config), config.engine
    if layout.tp == 1 or how.custom or not RULES[how.name].shared or how.form == "standard" or asked.strategy == "asc":
        return HOSTED
    if how.form == "auto" and not gram_holds(how, config.cluster):
        return HOSTED
    width = square_bytes(config)
    able = [one for one in members if one.cut_long and (how.form == "gram" or min(one.shape) >= GRAM_MIN_SIDE)]
    by_shape = {shape: share_of(how, *shape, layout.tp, width, config.cluster) for shape in {one.shape for one in able}}
    return {matrix.index: by_shape[matrix.shape] for matrix in able}


def shares_by_rows(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """The same with squares cut by rows, where their side can be."""
    how = algorithm(config)
    return {
        index: share_by_rows(how, members[index].rows, members[index].cols, layout.tp, config.cluster)
        for index in shares(config, layout, members)
        if min(members[index].shape) % layout.tp == 0
    }


@lru_cache(maxsize=1024)
def share_by_rows(a: Algorithm, rows: int, cols: int, tp: int, cluster: ClusterConfig) -> Share:
    """As `share_of`, without the exchanges in between.

    Bytes: as there, of a tp-th of each square; parts of a sum are read once.
    """
    m, n = sorted((rows, cols))
    width = product_bytes(a)
    fragment, _ = _works(a.ns_steps, m, n, tp, width=width, sent=width)
    work = Work(traffic=2 * width * m * n // tp, launches=4)  # divided by the whole's norm
    for part in fragment:
        work = _both(work, part)
    for k in segments(a.ns_steps):
        done = Work(
            products=((4 * k - 3, m // tp, m, m),),
            traffic=(width * (17 * k - 14) + (tp + 1) * width) * m * m / tp,
            launches=11 * k + 5 + 7 * min(k, 2) + 15,
        )
        work = _both(work, done)
    return Share(
        fragment=(rounded(gram_scale(a, rows, cols, cluster) * duration(work, a.precision, cluster)),), host=()
    )


def collectives_by_rows(steps: int) -> Mapping[Literal["all_reduce", "all_to_all", "all_gather"], int]:
    """Of one matrix's update: norms and what to trust, Gram matrices, and products' rows (`optimizers.shared_rows`)."""
    parts = segments(steps)
    return {
        "all_reduce": 2 + len(parts),
        "all_to_all": len(parts),
        "all_gather": sum(max(2, 3 * k - 2) for k in parts),
    }


def sent_by_rows(matrix: Matrix, tp: int, steps: int, width: int) -> int:
    """Bytes of squares that every rank sends and receives of one matrix, `width` bytes an element."""
    found = collectives_by_rows(steps)
    return (found["all_to_all"] + found["all_gather"]) * width * min(matrix.shape) ** 2 * (tp - 1) // tp


def moved_by_rows(matrix: Matrix, steps: int, width: int, links: Links, group: Group) -> Transfer:
    """All of them, one behind the other."""
    square, found = width * min(matrix.shape) ** 2, collectives_by_rows(steps)
    parts = [square * (group.size - 1) / group.size] * group.size
    moved = Transfer()
    for number, transfer in (
        (found["all_reduce"], links.all_reduce(_TOLD, group)),
        (found["all_to_all"], links.all_to_all(parts, parts, group)),
        (found["all_gather"], links.all_gather(square, group)),
    ):
        moved = moved.then(transfer.times(number))
    return moved


@lru_cache(maxsize=1024)
def share_of(a: Algorithm, rows: int, cols: int, tp: int, width: int, cluster: ClusterConfig) -> Share:
    """Seconds of the parts of a (rows, cols) matrix.

    Args:
        width: bytes of an element of a contribution.
    """
    scale = gram_scale(a, rows, cols, cluster)
    m, n = sorted((rows, cols))
    fragment, host = _works(a.ns_steps, m, n, tp, width=product_bytes(a), sent=width)
    return Share(
        fragment=tuple(rounded(scale * duration(work, a.precision, cluster)) for work in fragment),
        host=tuple(rounded(scale * duration(work, a.precision, cluster)) for work in host),
    )


def _works(steps: int, m: int, n: int, tp: int, *, width: int, sent: int) -> tuple[list[Work], list[Work]]:
    """Of every rank before each round and after the last, and of the host in each round.

    Bytes: around the iteration as `work.work` has it of Muon; an answer is applied to the fragment divided by what was
    answered, a copy of it, and what it is added to. The host adds contributions up one by one, and copies its answer.
    """
    own = m * n // tp
    contributed = Work(symmetric=((1, m, n // tp),), traffic=2 * width * m * m)
    applied = Work(products=((1, m, m, n // tp),), traffic=4 * width * own)
    before = Work(traffic=(32 + width) * own, launches=_AROUND[0])
    after = Work(traffic=(24 + 2 * width) * own, launches=_AROUND[2])
    parts = segments(steps)
    fragment = [
        _both(before, contributed),
        *(_both(_both(applied, contributed), Work(launches=_AROUND[1])) for _ in parts[1:]),
        _both(applied, after),
    ]
    host = [
        Work(
            symmetric=((4 * k - 3, m, m),),
            traffic=(width * (8 * k - 5) + tp * (sent + _SUMMED) + 4 * width) * m * m,
            launches=13 * k + 10 * min(k, 2) + tp + 15,
        )
        for k in parts
    ]
    return fragment, host


def _both(a: Work, b: Work) -> Work:
    return Work(
        products=a.products + b.products,
        symmetric=a.symmetric + b.symmetric,
        traffic=a.traffic + b.traffic,
        launches=a.launches + b.launches,
    )
