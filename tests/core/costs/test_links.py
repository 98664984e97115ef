"""Transfers against hand-computed times, and what every link model must obey."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.costs.links import EFFICIENCY, Group, Groups, Links
from canzona_cli.core.model.families import parameter_count
from tests.sizes import H100, layout, model

IDEAL = replace(H100, intra_node_latency_us=0.0, inter_node_latency_us=0.0)
PAIR, MACHINE, MACHINES = (
    Group(size=2, per_machine=2),
    Group(size=8, per_machine=8),
    Group(size=32, per_machine=1),
)


def test_reducing_the_gradients_of_32b_over_32_machines_takes_353_ms() -> None:
    """15.9 GB of fp32 gradients a GPU at 45 GB/s."""
    size = 4 * parameter_count(model("32b")).total / 8
    group = Groups.of(layout(tp=8, dp=32), IDEAL).data
    assert size * 31 / 32 == pytest.approx(15.9e9, rel=0.01)
    assert Links(cluster=IDEAL).all_gather(size, group).seconds == pytest.approx(0.353, rel=0.01)


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "expected"),
    [
        (8, 32, 1, (8, 1)),  # TP fills a machine, so no two data-parallel ranks share one
        (2, 16, 1, (2, 4)),
        (1, 64, 1, (1, 8)),
        (16, 4, 1, (8, 1)),  # TP over two machines
        (2, 2, 2, (2, 2)),  # all in one machine
        (3, 8, 1, (1, 1)),  # does not tile machines: the worst group has nobody beside it
    ],
)
def test_groups_lie_on_machines_as_megatron_orders_ranks(tp: int, dp: int, pp: int, expected: tuple[int, int]) -> None:
    groups = Groups.of(layout(tp=tp, dp=dp, pp=pp), H100)
    assert (groups.tp.per_machine, groups.data.per_machine) == expected
    assert groups.stage_crosses == (tp * dp * pp > 8 and pp > 1)


def test_a_group_with_several_members_a_machine_uses_their_ports_together() -> None:
    links = Links(cluster=IDEAL)
    one, four, all_eight = (links.all_gather(1e9, Group(size=64, per_machine=k)).seconds for k in (1, 4, 8))
    assert one == pytest.approx(4 * four)
    # Eight ports together are as fast as the links inside the machine, never faster.
    assert all_eight == pytest.approx(1e9 * 63 / 64 / (EFFICIENCY["machine"] * 450e9))


def test_a_ring_takes_its_steps_latencies() -> None:
    cluster = replace(H100, intra_node_latency_us=2.0, inter_node_latency_us=10.0)
    links = Links(cluster=cluster)
    assert links.all_gather(1e-9, MACHINE).latency_s == pytest.approx(7 * 2e-6)
    assert links.all_gather(1e-9, MACHINES).latency_s == pytest.approx(31 * 10e-6)
    # Small all-reduces take the tree: five levels up and down.
    assert links.all_reduce(1e-9, MACHINES).latency_s == pytest.approx(2 * 5 * 10e-6)


SEVERAL_A_MACHINE = Group(size=128, per_machine=2)
HOPS = Links(cluster=replace(H100, intra_node_latency_us=3.4, inter_node_latency_us=14.0))


@pytest.mark.parametrize(
    ("group", "hops_us", "channels", "rate"),
    [
        (MACHINE, 7 * 3.4, 24, 360e9),
        (MACHINES, 31 * 14.0, 2, 45e9),
        (SEVERAL_A_MACHINE, 127 / 128 * (64 * 14.0 + 64 * 3.4), 4, 90e9),
    ],
)
def test_filling_a_chain_takes_time_for_each_hop(group: Group, hops_us: float, channels: int, rate: float) -> None:
    links = HOPS
    chunk_s = channels * (512 << 10) / rate
    chain, ring = links.rooted_collectives("reduce", [1e9], group, collectives=1), links.ring_pass(1e9, group)
    assert chain.latency_s == chain.fill_s == pytest.approx(1e-6 * hops_us + (group.size - 1) * chunk_s)
    assert chain.link_s == ring.link_s
    assert ring.latency_s == pytest.approx(1e-6 * hops_us), "a ring starts on every rank"
    assert links.reduce_scatter(1e9, group).latency_s == ring.latency_s
    small = links.rooted_collectives("broadcast", [1000.0], group, collectives=1)
    assert small.latency_s == pytest.approx(1e-6 * hops_us + (group.size - 1) * 1000 / rate), "less than a chunk"
    assert links.rooted_collectives("reduce", [1e9], Group(size=1, per_machine=1), collectives=1).seconds == 0


def test_an_all_to_all_floods_its_busiest_receiver_and_a_chain_does_not() -> None:
    links, n, size = Links(cluster=IDEAL), 8, 1e9
    share = size / n
    even = links.all_to_all([share * (n - 1)] * n, [share * (n - 1)] * n, MACHINE).seconds
    to_one = links.all_to_all([0.0, *[size] * (n - 1)], [size * (n - 1), *[0.0] * (n - 1)], MACHINE).seconds
    assert to_one == pytest.approx(n * even)
    # Reduced along a chain, the same fragments pass every rank once.
    assert links.ring_pass(size, MACHINE).seconds == pytest.approx(size / (EFFICIENCY["machine"] * 450e9))


def test_across_machines_an_all_to_all_uses_the_port_for_what_leaves() -> None:
    group = Group(size=16, per_machine=8)
    transfer = Links(cluster=IDEAL).all_to_all([15e6] * 16, [15e6] * 16, group)
    assert transfer.link == "network"
    assert transfer.link_s == pytest.approx(8e6 / (EFFICIENCY["network"] * 50e9))


def test_nothing_travels_alone() -> None:
    links, alone = Links(cluster=H100), Group(size=1, per_machine=1)
    for transfer in (
        links.all_gather(1e9, alone),
        links.all_reduce(1e9, alone),
        links.all_to_all([1e9], [1e9], alone),
    ):
        assert transfer.seconds == 0


@given(
    size=st.floats(1.0, 1e11),
    more=st.floats(1.0, 10.0),
    faster=st.floats(1.0, 10.0),
    group=st.sampled_from((PAIR, MACHINE, MACHINES, Group(size=64, per_machine=4))),
)
def test_more_bytes_take_no_less_faster_links_no_more(size: float, more: float, faster: float, group: Group) -> None:
    quick = replace(H100, intra_node_gb_per_s=450 * faster, inter_node_gb_per_s=50 * faster)
    for kind in ("all_gather", "all_reduce", "ring_pass"):
        seconds = getattr(Links(cluster=H100), kind)(size, group).seconds
        assert getattr(Links(cluster=H100), kind)(size * more, group).seconds >= seconds
        assert getattr(Links(cluster=quick), kind)(size, group).seconds <= seconds * (1 + 1e-12)
    gathered, reduced = (getattr(Links(cluster=H100), kind)(size, group) for kind in ("all_gather", "all_reduce"))
    assert reduced.link_s == pytest.approx(2 * gathered.link_s)


TABLE = (
    ("all_to_all", 2, 8.0, 1e-4, 0.5),
    ("all_to_all", 2, 1e6, 1e-3, 1.5),
    ("all_to_all", 2, 2e6, 3e-3, 2.0),
    ("all_to_all", 4, 1e6, 8e-3, 2.0),
    ("reduce", 2, 1e6, 2e-3, 1.0),
)
MEASURED = Links(cluster=replace(IDEAL, collectives=TABLE))


def test_a_measured_collective_counts_before_the_formula() -> None:
    exact = MEASURED.all_to_all([1e6, 1e6], [1e6, 1e6], PAIR)
    assert (exact.seconds, exact.cores) == (1e-3, 1.5)
    between = MEASURED.all_to_all([1.5e6, 1.5e6], [1.5e6, 1.5e6], PAIR)
    assert between.seconds == pytest.approx(2e-3)
    assert between.cores == 1.75
    # Beyond the table as between its last two; below it what the smallest takes.
    assert MEASURED.all_to_all([4e6, 4e6], [4e6, 4e6], PAIR).seconds == pytest.approx(7e-3)
    assert MEASURED.all_to_all([1.0, 1.0], [1.0, 1.0], PAIR).seconds == 1e-4
    assert MEASURED.all_to_all([0.0, 0.0], [0.0, 0.0], PAIR).seconds == 0.0


def test_what_was_not_measured_is_still_computed() -> None:
    plain = Links(cluster=IDEAL)
    assert MEASURED.all_reduce(1e6, PAIR) == plain.all_reduce(1e6, PAIR)
    assert MEASURED.all_to_all([1e6] * 32, [1e6] * 32, MACHINES) == plain.all_to_all([1e6] * 32, [1e6] * 32, MACHINES)
    # Three ranks take what four do, the nearest that was measured.
    three = Group(size=3, per_machine=3)
    assert MEASURED.all_to_all([1e6] * 3, [1e6] * 3, three).seconds == 8e-3


def test_an_uneven_exchange_takes_its_busiest_rank_unless_cores_are_too_few() -> None:
    sent, received = [1e6, 0.0], [0.0, 1e6]
    enough = MEASURED.all_to_all(sent, received, PAIR)
    assert (enough.seconds, enough.cores) == (1e-3, 0.75)
    few = Links(cluster=replace(IDEAL, collectives=TABLE, cores=1))
    half = few.all_to_all(sent, received, PAIR)
    assert half.seconds == few.all_to_all([5e5, 5e5], [5e5, 5e5], PAIR).seconds < enough.seconds


def test_reductions_to_several_owners_run_two_at_a_time_when_measured() -> None:
    gloo = Links(cluster=replace(MEASURED.cluster, device="cpu"))
    one, four = (gloo.rooted_collectives("reduce", [1e6] * count, PAIR, collectives=count) for count in (1, 4))
    assert (one.seconds, one.cores) == (2e-3, 1.0)
    assert (four.seconds, four.cores) == (4e-3, 2.0)
    assert MEASURED.rooted_collectives("broadcast", [1e6, 1e6], PAIR, collectives=2) == MEASURED.chains(1e6, PAIR)


@pytest.mark.parametrize("collectives", [(), (("reduce", 2, 8.0, 1e-5, 0.0), ("reduce", 2, 1e6, 1e-3, 0.0))])
def test_gpus_reductions_share_a_groups_latency(collectives: tuple[tuple[str, int, float, float, float], ...]) -> None:
    grouped = Links(cluster=replace(H100, collectives=collectives))
    serial = Links(cluster=replace(grouped.cluster, grouped_collectives=False))
    one, five, apart = (
        links.rooted_collectives("reduce", [1e8] * owners, PAIR, collectives=count)
        for links, owners, count in ((grouped, 1, 1), (grouped, 1, 5), (serial, 1, 5))
    )
    assert one == five, "a group has one latency"
    # Measured are two in a row, one for each rank.
    alone = one.latency_s / 2 if collectives else one.latency_s
    assert (apart.latency_s, apart.link_s) == (5 * alone, one.link_s)
    both = grouped.rooted_collectives("reduce", [1e8, 2e8, 2e8], PAIR, collectives=3)
    assert both.link_s == pytest.approx(5 * one.link_s, rel=0.02), "bytes never pass at the same time"
