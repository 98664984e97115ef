"""The cost of updating a shared matrix: every rank of the owner's TP group works on its fragment of the
matrix.

Only optimizers with a shared form (`optimizers.shared_muon`) can do this. The ranks divide the Gram form of
Newton-Schulz: each computes the Gram matrix of its fragment, then some rows of the sum over ranks and of
every further square, without the gain of symmetric kernels. Rows are gathered between matmuls. The side of a
square is the matrix's short side.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.core.costs.links import Group, Links, Transfer
from canzona_cli.core.costs.update import GRAM_MIN_SIDE, RULES, algorithm_of, duration, gram_holds, gram_scale, rounded
from canzona_cli.core.fields import Seconds
from canzona_cli.core.model.matrices import Matrix, matrices
from canzona_cli.core.optimizers.facts import Algorithm, Work
from canzona_cli.core.optimizers.muon_facts import matmul_bytes, segments
from canzona_cli.core.setup import ClusterConfig, Execution, Layout, Setup
from canzona_cli.core.setup.execution import IN_ORDER

_FLAG_BYTES = 16
"""The maximum size in bytes of an all-reduce of norms and flags."""
_FRAGMENT_KERNELS = (9, 9, 11)
"""The number of kernels that work on a fragment before the first segment, between two segments, and after the
last segment."""


@dataclass(frozen=True, kw_only=True)
class SharedCost:
    """The seconds of a shared matrix's update."""

    fragment: tuple[Seconds, ...]
    """The seconds of each part of the update, equal on all ranks of the owner's TP group. Exchanges may
    follow each part except the last (`shared_exchanges`)."""

    @property
    def each(self) -> float:
        """The seconds of all parts on one rank, excluding exchanges."""
        return sum(self.fragment)


SharedCosts = Mapping[int, SharedCost]
"""The costs of shared matrices, by index."""
HOSTED: SharedCosts = MappingProxyType({})
"""The value of `Assignment.shared_costs` if no matrix is shared."""


def shared_costs(setup: Setup, algorithm: Algorithm, layout: Layout, members: Sequence[Matrix]) -> SharedCosts:
    """Returns the costs of all matrices that can be shared, by index.

    No matrix can be shared if `engine.mode` is hosted or `why_hosted` gives a reason. Otherwise a matrix can
    be shared if TP cuts its long side and tp divides its short side. Unless `optimizer.form` is gram, the
    short side also has to be at least `GRAM_MIN_SIDE`.
    """
    if setup.engine.mode == "hosted" or why_hosted(setup, algorithm, layout) is not None:
        return HOSTED
    return {
        matrix.index: shared_cost_of(algorithm, matrix.rows, matrix.cols, layout.tp, setup.cluster)
        for matrix in members
        if matrix.cut_long
        and (algorithm.form == "gram" or min(matrix.shape) >= GRAM_MIN_SIDE)
        and min(matrix.shape) % layout.tp == 0
    }


def why_hosted(setup: Setup, algorithm: Algorithm, layout: Layout) -> str | None:
    """Returns the reason why no matrix of a run can be shared; None if it depends on a matrix's shape whether
    it can be shared."""
    engine = setup.engine
    if engine.strategy in IN_ORDER:
        return f"engine.strategy is {engine.strategy}, which updates each matrix on one host"
    if layout.tp == 1:
        return "parallel.tp is 1, but only several TP ranks can share a matrix"
    if layout.ep > 1:
        return f"parallel.ep is {layout.ep}, and experts fill the ranks that other matrices leave idle"
    if algorithm.custom or not RULES[algorithm.name].shared:
        return f"optimizer {setup.optimizer.name} updates whole matrices"
    if algorithm.form == "standard":
        return "optimizer.form is the standard form, but shared matrices need the Gram form"
    if engine.mode == "auto" and not setup.cluster.may_choose("shared"):
        return "shared matrices are not in cluster.verified"
    if algorithm.form == "auto" and not gram_holds(algorithm, setup.cluster):
        return "optimizer.form=auto avoids the Gram form, which shared matrices need, because matmuls are in bf16 here"
    return None


def mode_warnings(setup: Setup, layout: Layout, members: Sequence[Matrix] | None = None) -> Iterator[str]:
    """Yields a warning if `engine.mode` asks for shared matrices and no matrix of the run can be shared.

    Args:
        members: the run's matrices; None for those of `config.model`.
    """
    if setup.engine.mode != "shared" or setup.execution is not Execution.PLANNED:
        return
    if members is None:
        members = matrices(setup.model, layout, setup.engine.splitting)
    algorithm = algorithm_of(setup)
    reason = why_hosted(setup, algorithm, layout)
    if reason is None and not shared_costs(setup, algorithm, layout, members):
        reason = f"no matrix has a long side that TP cuts and a short side that is a multiple of {layout.tp}"
        if algorithm.form != "gram":
            reason += f" and at least {GRAM_MIN_SIDE} long (optimizer.form=gram shares shorter ones)"
    if reason is not None:
        yield f"engine.mode=shared is ignored: {reason}"


@lru_cache(maxsize=1024)
def shared_cost_of(algorithm: Algorithm, rows: int, cols: int, tp: int, cluster: ClusterConfig) -> SharedCost:
    """Returns the cost of the shared update of a (rows, cols) matrix."""
    m, n = sorted((rows, cols))
    works = shared_works(algorithm.ns_steps, m, n, tp, width=matmul_bytes(algorithm))
    scale = gram_scale(algorithm, rows, cols, cluster)
    parts = (duration(work, algorithm.precision, cluster) for work in works)
    return SharedCost(fragment=tuple(rounded(scale * part.alone_s) for part in parts))


def shared_works(steps: int, m: int, n: int, tp: int, *, width: int) -> list[Work]:
    """Lists the work of one rank in each part of a shared update.

    The memory traffic of each square, except the Gram matrix of the fragment, is divided by tp, and each term
    of a sum is read once.

    Args:
        steps: the number of Newton-Schulz steps.
        m: the short side of the matrix.
        n: the long side.
        width: the bytes of an element in matmuls.
    """
    # Per element, memory traffic before and after the iteration is that of a hosted update in standard form
    # (`muon_facts`).
    fragment = m * n // tp
    before = Work(traffic=(32 + width) * fragment, launches=_FRAGMENT_KERNELS[0])
    gram = Work(symmetric=((1, m, n // tp),), traffic=2 * width * m * m)
    applied = Work(matmuls=((1, m, m, n // tp),), traffic=4 * width * fragment)
    after = Work(traffic=(24 + 2 * width) * fragment, launches=_FRAGMENT_KERNELS[2])
    works = [before]
    pending = Work(traffic=2 * width * m * n // tp, launches=4)  # division by the whole matrix's norm
    for k in segments(steps):
        works.append(_add(pending, gram))
        pending = _add(applied, Work(launches=_FRAGMENT_KERNELS[1]))
        works.append(Work(traffic=(tp + 1) * width * m * m / tp, launches=5))
        product_count = 4 * k - 3
        product = Work(
            matmuls=((1, m // tp, m, m),),
            traffic=width * (17 * k - 14) / product_count * m * m / tp,
            launches=(11 * k + 7 * min(k, 2) + 15) / product_count,
        )
        works += [product] * product_count
    return [*works, applied, after]


Exchange = Literal["all_reduce", "all_to_all", "all_gather"]


class FollowingExchanges(NamedTuple):
    """The exchanges that follow a part of a shared update."""

    exchanges: tuple[Exchange, ...] = ()
    overlapped_parts: int = 0
    """The number of later parts that do not need the exchanged data and therefore overlap with the
    exchanges."""


def shared_exchanges(steps: int) -> tuple[FollowingExchanges, ...]:
    """Lists the exchanges after each part of a shared update except the last: norms and flags, Gram matrices,
    and the rows of matmuls (`optimizers.shared_rows`). Each matmul of squares is a separate part."""
    flags, summed = FollowingExchanges(("all_reduce",)), FollowingExchanges(("all_reduce", "all_to_all"))
    gathered, hidden = FollowingExchanges(("all_gather",)), FollowingExchanges(("all_gather",), overlapped_parts=1)
    exchanges = [flags]
    for k in segments(steps):
        exchanges += [summed, gathered]
        if k > 1:
            exchanges += [
                hidden,
                FollowingExchanges(),
                gathered,
                *(hidden, FollowingExchanges(), hidden, hidden) * (k - 2),
                FollowingExchanges(),
            ]
        exchanges.append(gathered)
    return (*exchanges, flags)


def shared_collectives(steps: int) -> Mapping[Exchange, int]:
    """Counts the collectives of one matrix's shared update, by kind."""
    return Counter(exchange for following in shared_exchanges(steps) for exchange in following.exchanges)


def shared_bytes(matrix: Matrix, tp: int, steps: int, width: int) -> int:
    """Counts the bytes of squares that each rank sends in one matrix's shared update; it receives as many.

    Args:
        width: the bytes of an element.
    """
    collectives = shared_collectives(steps)
    return (collectives["all_to_all"] + collectives["all_gather"]) * width * min(matrix.shape) ** 2 * (tp - 1) // tp


def shared_transfers(side: int, steps: int, width: int, links: Links, group: Group) -> Sequence[Transfer]:
    """Returns the transfers of `shared_exchanges` for a matrix whose short side is `side`.

    Args:
        width: the bytes of an element.
    """
    square_bytes = width * side**2
    sent_bytes = [square_bytes * (group.size - 1) / group.size] * group.size
    transfers: Mapping[Exchange, Transfer] = {
        "all_reduce": links.all_reduce(_FLAG_BYTES, group),
        "all_to_all": links.all_to_all(sent_bytes, sent_bytes, group),
        "all_gather": links.all_gather(square_bytes, group),
    }
    return [
        reduce(Transfer.followed_by, (transfers[exchange] for exchange in following.exchanges), Transfer())
        for following in shared_exchanges(steps)
    ]


def _add(a: Work, b: Work) -> Work:
    """Adds the work of two parts."""
    return Work(
        matmuls=a.matmuls + b.matmuls,
        symmetric=a.symmetric + b.symmetric,
        traffic=a.traffic + b.traffic,
        launches=a.launches + b.launches,
    )
