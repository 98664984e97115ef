"""The price of a shared matrix's update: all TP ranks of its owner work on their fragments of it.

The optimizer is one with a shared form (`optimizers.shared_muon`), in which the Gram form of Newton-Schulz is
divided between the ranks. Every rank makes its rows of each square of the short side, without a symmetric
product's gain, and the rows are gathered between products.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.config.execution import IN_ORDER
from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.costs.links import Group, Links, Transfer
from canzona_cli.costs.update import GRAM_MIN_SIDE, RULES, algorithm, duration, gram_holds, gram_scale, rounded
from canzona_cli.fields import Seconds
from canzona_cli.model.matrices import Matrix
from canzona_cli.optimizers.facts import Algorithm, Work
from canzona_cli.optimizers.muon_facts import product_bytes, segments

_TOLD = 16
"""Bytes of what fragments tell each other besides squares, at most."""
_AROUND = (9, 9, 11)
"""Kernels of a fragment before the first segment, between two, and after the last."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The price of a shared matrix's update."""

    fragment: tuple[Seconds, ...]
    """Seconds of every rank of the owner's TP group: before, between and after its exchanges
    (`sharing.shared_exchanges`)."""

    @property
    def each(self) -> float:
        """The seconds of every rank in all."""
        return sum(self.fragment)


HOSTED: Mapping[int, Share] = MappingProxyType({})
"""`Assignment.shares` where there are none."""


def shares(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """Prices every matrix that can be shared, by index."""
    how, asked = algorithm(config), config.engine
    if (
        asked.strategy in IN_ORDER
        or layout.tp == 1
        or how.custom
        or not RULES[how.name].shared
        or how.form == "standard"
    ):
        return HOSTED
    if how.form == "auto" and not gram_holds(how, config.cluster):
        return HOSTED
    return {
        matrix.index: share_of(how, matrix.rows, matrix.cols, layout.tp, config.cluster)
        for matrix in members
        if matrix.cut_long
        and (how.form == "gram" or min(matrix.shape) >= GRAM_MIN_SIDE)
        and min(matrix.shape) % layout.tp == 0
    }


@lru_cache(maxsize=1024)
def share_of(a: Algorithm, rows: int, cols: int, tp: int, cluster: ClusterConfig) -> Share:
    """The seconds of a (rows, cols) matrix's update, in parts between the exchanges of `shared_exchanges`."""
    m, n = sorted((rows, cols))
    scale = gram_scale(a, rows, cols, cluster)
    works = shared_works(a.ns_steps, m, n, tp, width=product_bytes(a))
    return Share(fragment=tuple(rounded(scale * duration(work, a.precision, cluster)) for work in works))


def shared_works(steps: int, m: int, n: int, tp: int, *, width: int) -> list[Work]:
    """Lists the work of every rank, in each part.

    Bytes: those of a tp-th of each square; parts of a sum are read once.
    """
    around = _around(m, n, tp, width=width)
    works = [around.before]
    begun = Work(traffic=2 * width * m * n // tp, launches=4)  # divided by the whole's norm
    for k in segments(steps):
        works.append(_both(begun, around.contributed))
        begun = _both(around.applied, Work(launches=_AROUND[1]))
        works.append(Work(traffic=(tp + 1) * width * m * m / tp, launches=5))
        number = 4 * k - 3
        product = Work(
            products=((1, m // tp, m, m),),
            traffic=width * (17 * k - 14) / number * m * m / tp,
            launches=(11 * k + 7 * min(k, 2) + 15) / number,
        )
        works += [product] * number
    return [*works, around.applied, around.after]


Exchange = Literal["all_reduce", "all_to_all", "all_gather"]


class Behind(NamedTuple):
    """The exchanges that start after a part of an update by rows."""

    exchanges: tuple[Exchange, ...] = ()
    under: int = 0
    """The number of parts that go on without it."""


def shared_exchanges(steps: int) -> tuple[Behind, ...]:
    """Lists the exchanges after each part of one update but the last: norms and what to trust, Gram matrices,
    and products' rows (`optimizers.shared_rows`). Each product of squares is a part."""
    flags, summed = Behind(("all_reduce",)), Behind(("all_reduce", "all_to_all"))
    gathered, hidden = Behind(("all_gather",)), Behind(("all_gather",), 1)
    exchanges = [flags]
    for k in segments(steps):
        exchanges += [summed, gathered]
        if k > 1:
            exchanges += [hidden, Behind(), gathered, *(hidden, Behind(), hidden, hidden) * (k - 2), Behind()]
        exchanges.append(gathered)
    return (*exchanges, flags)


def shared_collectives(steps: int) -> Mapping[Exchange, int]:
    """Counts the collectives of one matrix's update."""
    return Counter(one for behind in shared_exchanges(steps) for one in behind.exchanges)


def shared_bytes(matrix: Matrix, tp: int, steps: int, width: int) -> int:
    """Bytes of squares that every rank sends and receives of one matrix, `width` bytes an element."""
    collectives = shared_collectives(steps)
    return (collectives["all_to_all"] + collectives["all_gather"]) * width * min(matrix.shape) ** 2 * (tp - 1) // tp


def shared_transfers(side: int, steps: int, width: int, links: Links, group: Group) -> Sequence[Transfer]:
    """Each of `shared_exchanges`, of a matrix with this short side."""
    square = width * side**2
    parts = [square * (group.size - 1) / group.size] * group.size
    of: Mapping[Exchange, Transfer] = {
        "all_reduce": links.all_reduce(_TOLD, group),
        "all_to_all": links.all_to_all(parts, parts, group),
        "all_gather": links.all_gather(square, group),
    }
    return [
        reduce(Transfer.then, (of[one] for one in behind.exchanges), Transfer()) for behind in shared_exchanges(steps)
    ]


class _Around(NamedTuple):
    """The work of a rank on its fragment."""

    before: Work
    contributed: Work
    applied: Work
    after: Work


def _around(m: int, n: int, tp: int, *, width: int) -> _Around:
    """Bytes: around the iteration as `work.work` has it of Muon; an answer is applied to the fragment divided
    by what was answered, a copy of it, and what it is added to."""
    fragment = m * n // tp
    return _Around(
        before=Work(traffic=(32 + width) * fragment, launches=_AROUND[0]),
        contributed=Work(symmetric=((1, m, n // tp),), traffic=2 * width * m * m),
        applied=Work(products=((1, m, m, n // tp),), traffic=4 * width * fragment),
        after=Work(traffic=(24 + 2 * width) * fragment, launches=_AROUND[2]),
    )


def _both(a: Work, b: Work) -> Work:
    return Work(
        products=a.products + b.products,
        symmetric=a.symmetric + b.symmetric,
        traffic=a.traffic + b.traffic,
        launches=a.launches + b.launches,
    )
