"""The links of a run's machines: who is timed with whom, what counts as slow, and two real ranks."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.links import LinkCheck, LinkTime, rounds
from canzona_cli.cli.views.machines import LinksView
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.links import Group, Links
from canzona_cli.core.setup import ClusterConfig
from tests.cli.commands.support import canzona
from tests.cli.views.terminal import printed

BYTES = 128 << 20
H100 = compose_run(["recipe=qwen3-8b", "gpus=32"]).config.cluster
NAMES = ("n1", "n2", "n3", "n4")


def check(slow: Mapping[tuple[int, ...], float], *, overall: float = 1.0, cluster: ClusterConfig = H100) -> LinkCheck:
    """Returns a check of four machines of eight GPUs.

    Args:
        slow: the factors by which groups of machines take longer than the others.
        overall: the time over all ranks, in units of the profile's.
    """
    profile_s = Links(cluster=H100).all_reduce(BYTES, Group(size=32, per_machine=8)).seconds
    groups = [(0, 1, 2, 3), *(group for each in rounds(4, 8) for group in each)]
    seconds = {group: 0.01 * slow.get(group, 1.0) for group in groups} | {groups[0]: overall * profile_s}
    times = (LinkTime(machines=g, ranks=8 * len(g), bytes=BYTES, seconds=seconds[g]) for g in groups)
    return LinkCheck(cluster=cluster, names=NAMES, times=tuple(times))


@pytest.mark.parametrize("machines", range(1, 10))
def test_each_machine_is_timed_alone_and_with_both_neighbours_and_never_in_two_groups_at_once(machines: int) -> None:
    timed = [*rounds(machines, 8)]
    for groups in timed:
        members = [machine for group in groups for machine in group]
        assert len(members) == len(set(members))
        assert len({len(group) for group in groups}) == 1
    times = Counter((machine, len(group)) for groups in timed for group in groups for machine in group)
    alone, pairs = machines > 1, machines > 2
    assert times == {
        **{(machine, 1): 1 for machine in range(machines) if alone},
        **{(machine, 2): 2 for machine in range(machines) if pairs},
    }
    assert all(len(group) > 1 for groups in rounds(machines, 1) for group in groups), "one rank has no links"


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ({}, ()),
        ({(2,): 1.6}, ("n3",)),
        ({(2,): 1.4}, ()),
        ({(1, 2): 3.0, (2, 3): 3.0}, ("n3",)),
        ({(1, 2): 3.0}, ()),
        ({(3, 0): 3.0, (0, 1): 3.0, (1,): 9.0}, ("n1", "n2")),
    ],
)
def test_a_slow_machine_is_named(slow: dict[tuple[int, ...], float], expected: tuple[str, ...]) -> None:
    """A machine is slow by itself, or in both of its pairs; one slow pair may be the path between two machines."""
    result = check(slow)
    assert result.slow_machines == expected
    assert (result.ok, result.exit_code) == ((True, 0) if not expected else (False, 3))
    for name in expected:
        assert f"{name} takes more than 1.5 times as long as the fastest machines" in printed(LinksView(check=result))


PUBLISHED_US = {16: 748.3, 32: 990.7, 64: 1159.1}
"""Times of all-reduces of 128 MiB on healthy machines with eight H100 and eight ports of 400 Gb/s, by the number of
GPUs (nccl-tests, issue 309)."""


@pytest.mark.parametrize("gpus", PUBLISHED_US)
def test_published_times_of_healthy_links_pass_and_half_the_rate_fails(gpus: int) -> None:
    group = Group(size=gpus, per_machine=8)
    halved = replace(H100, inter_node_gb_per_s=H100.inter_node_gb_per_s / 2)
    for seconds, ok in (
        (PUBLISHED_US[gpus] / 1e6, True),
        (Links(cluster=halved).all_reduce(BYTES, group).seconds, False),
    ):
        machines = tuple(range(gpus // 8))
        time = LinkTime(machines=machines, ranks=gpus, bytes=BYTES, seconds=seconds)
        assert LinkCheck(cluster=H100, names=tuple(map(str, machines)), times=(time,)).ok is ok


@pytest.mark.parametrize(("factor", "ok"), [(0.9, True), (1.4, True), (1.6, False)])
def test_links_of_less_than_two_thirds_of_the_profiles_bandwidth_fail(factor: float, ok: bool) -> None:
    result = check({}, overall=factor)
    assert result.ok is ok
    shown = printed(LinksView(check=result))
    assert f"{1 / factor:.0%}" in shown
    assert ("the links are fast enough" in shown) is ok
    # The bus bandwidth by its definition, which nccl-tests documents: 2 (n - 1) / n * bytes / seconds.
    (measured,) = result.overall
    assert measured.bus_gb_per_s == pytest.approx(2 * 31 / 32 * BYTES / measured.seconds / 1e9)


def test_a_profile_of_no_real_machine_gives_no_verdict() -> None:
    cpu = check({(2,): 9.0}, overall=100.0, cluster=replace(H100, device="cpu"))
    assert cpu.ok
    assert "no verdict" in printed(LinksView(check=cpu))
    assert "fast enough" not in printed(LinksView(check=cpu))


@pytest.mark.sweep  # a launch; tests/dist/test_calibrate.py times collectives of forked ranks
def test_two_real_ranks_are_timed(tmp_path: Path) -> None:
    done = canzona("doctor", "--links", "recipe=qwen3-tiny", "gpus=2", "--json", cwd=tmp_path, code=0)
    report = json.loads(done.stdout)
    assert report["ok"] is True
    small, large = report["all_reduces"]
    assert [(time["machines"], time["ranks"]) for time in (small, large)] == [([0], 2)] * 2
    assert 0 < small["seconds"] < large["seconds"]
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=qwen3-tiny"], "only for --links"),
        (["--links", "recipe=qwen3-tiny", "gpus=1"], "has no links"),
        (["--links", "recipe=qwen3-tiny", "gpus=2", "cluster.nodes=2"], "cluster.rdzv_endpoint"),
    ],
)
def test_what_cannot_be_checked_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in canzona("doctor", *arguments, cwd=tmp_path, code=2).stderr
