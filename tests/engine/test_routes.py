"""Every fragment goes from who has it to who needs it, once, and both ends agree where it lies."""

from itertools import product

import pytest

from canzona_cli.engine.fragments import Fragments
from canzona_cli.engine.routes import Route, from_hosts, to_hosts
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrix import Matrix
from tests.sizes import layout, model

SPLITTINGS = ("fused", "qkv", "split", "per_head")


def _members(splitting: str, tp: int) -> tuple[Matrix, ...]:
    return matrices_of(model("tiny"), layout(tp=tp), splitting)  # type: ignore[arg-type]


def _routes(splitting: str, tp: int, *, back: bool) -> list[Route]:
    members = _members(splitting, tp)
    hosts = [(3 * number) % tp for number in range(len(members))]
    found = []
    for rank in range(tp):
        fragments = Fragments(model("tiny"), tp, rank, {})
        if back:
            found.append(
                from_hosts(members, hosts, holders=fragments.holders, elements=fragments.elements, rank=rank, tp=tp)
            )
        else:
            found.append(
                to_hosts(members, hosts, senders=fragments.senders, elements=fragments.elements, rank=rank, tp=tp)
            )
    return found


@pytest.mark.parametrize(("splitting", "tp", "back"), list(product(SPLITTINGS, (1, 2, 4), (False, True))))
def test_what_one_rank_sends_the_other_expects(splitting: str, tp: int, back: bool) -> None:
    routes = _routes(splitting, tp, back=back)
    for source, target in product(range(tp), range(tp)):
        sent = [parcel for parcel in routes[source].sends if parcel.peer == target]
        expected = [parcel for parcel in routes[target].receives if parcel.peer == source]
        assert [(p.matrix.name, p.elements) for p in sent] == [(p.matrix.name, p.elements) for p in expected]
        assert routes[source].send_splits[target] == routes[target].receive_splits[source]
        # Both count offsets from the start of the message.
        start_out, start_in = sum(routes[source].send_splits[:target]), sum(routes[target].receive_splits[:source])
        assert [p.offset - start_out for p in sent] == [p.offset - start_in for p in expected]
    assert len({route.travels for route in routes}) == 1


@pytest.mark.parametrize(("splitting", "tp"), list(product(SPLITTINGS, (2, 4))))
def test_hosts_get_every_element_once(splitting: str, tp: int) -> None:
    members = _members(splitting, tp)
    routes = _routes(splitting, tp, back=False)
    for number, matrix in enumerate(members):
        host = (3 * number) % tp
        arrived = sum(p.elements for p in routes[host].receives if p.matrix is matrix or p.matrix.name == matrix.name)
        own = Fragments(model("tiny"), tp, host, {})
        kept = own.elements(matrix) if host in own.senders(matrix, host) else 0
        assert arrived + kept == matrix.elements


@pytest.mark.parametrize(("splitting", "tp"), list(product(SPLITTINGS, (2, 4))))
def test_messages_do_not_overlap_and_flags_reach_every_rank(splitting: str, tp: int) -> None:
    for back in (False, True):
        for route in _routes(splitting, tp, back=back):
            for parcels, size in ((route.sends, route.sent), (route.receives, route.received)):
                taken = [place for parcel in parcels for place in range(parcel.offset, parcel.offset + parcel.elements)]
                assert len(taken) == len(set(taken))
                assert all(place < size for place in taken)
    members = _members(splitting, tp)
    for rank, route in enumerate(_routes(splitting, tp, back=True)):
        elsewhere = {m.name for n, m in enumerate(members) if (3 * n) % tp != rank}
        assert {matrix.name for matrix, _ in route.receive_flags} == elsewhere
