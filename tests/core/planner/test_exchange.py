"""Fragments go from who has them to who needs them, once, and all who count an exchange count
what is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.links import Groups, Links, Transfer
from canzona_cli.core.costs.sharing import SharedCost, shared_bytes, shared_exchanges, shared_transfers
from canzona_cli.core.engine.wire import Messages
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.exchange import Route, from_hosts, group_traffic, senders, to_hosts
from canzona_cli.core.planner.make import subject
from canzona_cli.core.planner.measures import communication, exchange_sent
from canzona_cli.core.planner.memory import step_buffers
from canzona_cli.core.planner.plan import Assignment, Cell, MicroGroup, Plan
from canzona_cli.core.setup import Layout, Precision
from canzona_cli.core.simulate.update import UpdateModel
from tests import sizes
from tests.sizes import layout, model

SPLITTINGS = ("fused", "qkv", "split", "per_head")


def _members(splitting: str, tp: int) -> tuple[Matrix, ...]:
    return matrices_of(model("tiny"), layout(tp=tp), splitting)  # type: ignore[arg-type]


def _routes(members: Sequence[Matrix], hosts: Sequence[int], tp: int, *, back: bool) -> list[Route]:
    make = from_hosts if back else to_hosts
    return [make(members, hosts, rank=rank, tp=tp) for rank in range(tp)]


def _dealt(splitting: str, tp: int, *, back: bool) -> list[Route]:
    members = _members(splitting, tp)
    return _routes(members, [(3 * number) % tp for number in range(len(members))], tp, back=back)


@pytest.mark.parametrize(("splitting", "tp", "back"), list(product(SPLITTINGS, (1, 2, 4), (False, True))))
def test_what_one_rank_sends_the_other_expects(splitting: str, tp: int, back: bool) -> None:
    routes = _dealt(splitting, tp, back=back)
    for source, target in product(range(tp), range(tp)):
        sent = [parcel for parcel in routes[source].sends if parcel.peer == target]
        expected = [parcel for parcel in routes[target].receives if parcel.peer == source]
        assert [(p.matrix.name, p.elements) for p in sent] == [(p.matrix.name, p.elements) for p in expected]
        assert routes[source].send_splits[target] == routes[target].receive_splits[source]
        # Both count offsets from the start of the message.
        start_out, start_in = sum(routes[source].send_splits[:target]), sum(routes[target].receive_splits[:source])
        assert [p.offset - start_out for p in sent] == [p.offset - start_in for p in expected]
    assert len({route.travels for route in routes}) == 1


@pytest.mark.parametrize(("splitting", "tp"), [("fused", 4), ("qkv", 2), ("split", 4), ("per_head", 2)])
def test_hosts_get_every_element_once(splitting: str, tp: int) -> None:
    routes = _dealt(splitting, tp, back=False)
    for number, matrix in enumerate(_members(splitting, tp)):
        host = (3 * number) % tp
        arrived = sum(p.elements for p in routes[host].receives if p.matrix is matrix or p.matrix.name == matrix.name)
        kept = matrix.held_elements(tp) if host in senders(matrix, host, tp) else 0
        assert arrived + kept == matrix.elements


@pytest.mark.parametrize(("splitting", "tp"), [("fused", 2), ("qkv", 4), ("split", 2), ("per_head", 4)])
def test_messages_do_not_overlap_and_flags_reach_every_rank(splitting: str, tp: int) -> None:
    for back in (False, True):
        for route in _dealt(splitting, tp, back=back):
            sent_flags = [place for to_peer in route.send_flags for place in to_peer]
            received_flags = [place for _, place in route.receive_flags]
            sides = ((route.sends, sent_flags, route.sent), (route.receives, received_flags, route.received))
            for parcels, flags, size in sides:
                end = 0
                taken = [(parcel.offset, parcel.elements) for parcel in parcels]
                for place, elements in sorted([*taken, *((flag, 1) for flag in flags)]):
                    assert place == end
                    end += elements
                assert end == size
    members = _members(splitting, tp)
    for rank, route in enumerate(_dealt(splitting, tp, back=True)):
        elsewhere = {m.name for n, m in enumerate(members) if (3 * n) % tp != rank}
        assert {matrix.name for matrix, _ in route.receive_flags} == elsewhere


def test_by_hand() -> None:
    """Rank 0 of 2 hosts a cut matrix of 8 elements; rank 1 a replicated one of 6 and one of 5 stored by rank 0."""
    members = [
        replace(sizes.matrix(0, 4, 2), shard_dim=0),
        replace(sizes.matrix(1, 3, 2), shard_dim=None),
        replace(sizes.matrix(2, 5, 1), shard_dim=None, home=0),
    ]
    moved = group_traffic(members, [0, 1, 1], 2)
    assert (moved.gradients.sent, moved.gradients.received) == ((5, 4), (4, 5))
    # One flag from rank 0, two from rank 1.
    assert (moved.weights.sent, moved.weights.received) == ((4 + 1, 6 + 5 + 2), (6 + 5 + 2, 4 + 1))
    assert group_traffic(members[2:], [0], 2).weights.busiest == 0, "a matrix updated at home needs nobody"


# --- everybody's account of any plan ---


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and a plan nobody would make."""

    config: RunConfig
    layout: Layout
    plan: Plan

    def hosts(self, group: MicroGroup) -> list[int]:
        """Returns the hosts of the hosted matrices."""
        return [self.plan.assignment.cells[matrix.index].host for matrix in self.members(group)]

    def members(self, group: MicroGroup) -> list[Matrix]:
        """Returns the hosted matrices of a micro-group."""
        shared = self.plan.assignment.shared_costs
        return [self.plan.matrices[index] for index in group.matrices if index not in shared]

    def routes(self, group: MicroGroup, *, back: bool) -> list[Route]:
        return _routes(self.members(group), self.hosts(group), self.layout.tp, back=back)

    @property
    def widths(self) -> tuple[tuple[bool, int], ...]:
        """The bytes per element of messages to hosts (False) and back from hosts (True)."""
        width, grad = self.config.train.weight_bytes, self.config.engine.gradient_bytes
        return (False, grad), (True, width)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    config = sizes.run("tiny", tp * dp, strategy="canzona", precision=draw(st.sampled_from(["bf16", "fp32"])))
    exchange_dtype: Precision = draw(st.sampled_from(["bf16", "fp32"]))
    config = replace(config, engine=replace(config.engine, exchange_dtype=exchange_dtype))
    matrices, cells = [], []
    for index in range(draw(st.integers(1, 12))):
        drawn = sizes.matrix(index, tp * draw(st.integers(1, 5)), tp * draw(st.integers(1, 5)))
        stored: Literal[0, 1] | None = draw(st.sampled_from([0, 1, None]))
        home = draw(st.none() | st.integers(0, tp - 1)) if stored is None else None
        matrices.append(replace(drawn, shard_dim=stored, home=home))
        cells.append(Cell(owner=draw(st.integers(0, dp - 1)), host=draw(st.integers(0, tp - 1))))
    parts = len(shared_exchanges(subject(config.setup, layout(tp=tp, dp=dp)).optimizer.ns_steps)) + 1
    shared_costs = {
        matrix.index: SharedCost(fragment=(1.0,) * parts)
        for matrix in matrices
        if tp > 1 and matrix.cut_long and min(matrix.shape) % tp == 0 and draw(st.booleans())
    }
    groups: list[MicroGroup] = []
    for owner in range(dp):
        owned = [index for index, cell in enumerate(cells) if cell.owner == owner]
        while owned:
            size = draw(st.integers(1, len(owned)))
            number = sum(group.owner == owner for group in groups)
            groups.append(MicroGroup(stage=0, owner=owner, index=number, matrices=tuple(owned[:size])))
            owned = owned[size:]
    mesh = layout(tp=tp, dp=dp)
    plan = Plan(
        subject=subject(config.setup, mesh),
        matrices=tuple(matrices),
        costs=tuple(1.0 for _ in matrices),
        assignment=Assignment(cells=tuple(cells), shared_costs=shared_costs),
        buckets=(),
        groups=tuple(groups),
        lower_bounds=(1.0,),
    )
    return Case(config=config, layout=mesh, plan=plan)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_sizes_of_all_messages_are_those_of_the_engines_routes(case: Case) -> None:
    for group in case.plan.groups:
        moved = group_traffic(case.members(group), case.hosts(group), case.layout.tp)
        for traffic, back in ((moved.gradients, False), (moved.weights, True)):
            routes = case.routes(group, back=back)
            assert traffic.sent == tuple(route.sent for route in routes)
            assert traffic.received == tuple(route.received for route in routes)
            assert all(route.travels == (traffic.busiest > 0) for route in routes)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_the_plans_traffic_is_what_its_ranks_send(case: Case) -> None:
    tp = case.layout.tp
    wanted = [0] * case.layout.world_size
    for group in case.plan.groups:
        for back, size in case.widths:
            for host, route in enumerate(case.routes(group, back=back)):
                wanted[group.owner * tp + host] += route.sent * size
    steps, width = case.plan.subject.optimizer.ns_steps, case.config.train.weight_bytes
    for index in case.plan.assignment.shared_costs:
        owner = case.plan.assignment.cells[index].owner
        for host in range(tp):
            wanted[owner * tp + host] += shared_bytes(case.plan.matrices[index], tp, steps, width)
    assert exchange_sent(case.config.setup, case.plan) == wanted
    assert communication(case.config.setup, case.layout, case.plan).tp_exchange_bytes == max(wanted)


@given(case=cases())
@settings(max_examples=75, deadline=None)
def test_planned_buffers_are_the_engines_messages(case: Case) -> None:
    """The sizes are those `MatrixOptimizer` allocates: one direction's for all of an owner's groups."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    directions = ((False, case.config.engine.exchange_dtype), (True, case.config.train.precision))
    for cell, planned in enumerate(step_buffers(case.config.setup, case.plan, 0)):
        owner, host = divmod(cell, case.layout.tp)
        own = [group for group in case.plan.groups if group.owner == owner]
        held = 0
        for back, dtype in directions:
            routes = [case.routes(group, back=back)[host] for group in own]
            held += Messages(routes, dtypes[dtype], torch.device("cpu")).bytes
        assert planned.exchange == held


class _Recorder:
    """Ranks that only remember what travelled."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def work(self, host: int, phase: Literal["matrix_update", "exchange"], seconds: float) -> None: ...

    def wait(self, host: int, moment: None) -> None: ...

    def norm(self) -> None: ...

    def exchange(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)


@given(case=cases())
@settings(max_examples=75, deadline=None)
def test_simulated_transfers_are_those_of_the_engines_messages(case: Case) -> None:
    links, group_of = Links(cluster=case.config.cluster), Groups.of(case.layout, case.config.cluster).tp
    simulated = UpdateModel(case.config.setup, case.layout, case.plan.matrices, case.plan.costs)
    for owner in range(case.layout.dp):
        own = [group for group in case.plan.groups if group.owner == owner]
        recorder = _Recorder()
        simulated.run_hosted(own, case.plan.assignment, recorder)
        wanted = []
        steps, width = case.plan.subject.optimizer.ns_steps, case.config.train.weight_bytes
        for matrix in (case.plan.matrices[index] for group in own for index in group.matrices):
            if matrix.index in case.plan.assignment.shared_costs:
                moved = shared_transfers(min(matrix.shape), steps, width, links, group_of)
                wanted += [one for one, behind in zip(moved, shared_exchanges(steps), strict=True) if behind.exchanges]
        for group in own if case.layout.tp > 1 else []:
            for back, size in case.widths:
                routes = case.routes(group, back=back)
                sent, received = [r.sent * size for r in routes], [r.received * size for r in routes]
                wanted.append(links.all_to_all(sent, received, group_of))
        assert sorted(recorder.transfers, key=repr) == sorted(wanted, key=repr)
