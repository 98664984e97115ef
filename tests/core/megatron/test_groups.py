"""Process groups: the ranks that Megatron itself would join for every purpose, and few groups for that.

torch's fake backend stands in for the other ranks: making groups sends nothing, here as with NCCL.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from canzona_cli.core.megatron.parallel import make_groups
from canzona_cli.core.setup import Layout
from tests.faults.support import LAYOUT
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


def layout(*, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, ep: int = 1) -> Layout:
    return replace(LAYOUT, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)


@dataclass(frozen=True, kw_only=True)
class Made:
    """The groups of one rank after they are made."""

    calls: int
    """The calls of `new_group`."""
    members: dict[str, list[int] | None]
    """Ranks of each purpose's group."""
    own: int
    """Different groups of more than one rank that this rank is in."""
    signs: int


def made(rank: int, wanted: Layout, make: Callable[[Layout], ProcessGroupCollection], signs: list[None]) -> Made:
    """Makes the groups of one of the ranks, where `make` makes them."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=wanted.world_size)
    calls = 0
    original = torch.distributed.new_group

    def new_group(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    torch.distributed.new_group = new_group  # type: ignore[assignment]
    try:
        found = make(wanted)
        groups = {field.name: getattr(found, field.name, None) for field in fields(found)}
        known = {name: group for name, group in groups.items() if isinstance(group, ProcessGroup)}
        return Made(
            calls=calls,
            members={name: torch.distributed.get_process_group_ranks(group) for name, group in known.items()},
            own=len({group for group in known.values() if group.size() > 1}),
            signs=len(signs),
        )
    finally:
        torch.distributed.new_group = original
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def ours(rank: int, wanted: Layout) -> Made:
    signs: list[None] = []
    return made(rank, wanted, lambda of: make_groups(of, timeout=TIMEOUT, alive=lambda: signs.append(None)), signs)


def megatrons(rank: int, wanted: Layout) -> Made:
    def make(of: Layout) -> ProcessGroupCollection:
        parallel_state.initialize_model_parallel(
            of.tp,
            of.pp,
            context_parallel_size=of.cp,
            expert_model_parallel_size=of.ep,
            expert_tensor_parallel_size=of.tp if of.ep == 1 else 1,
            create_gloo_process_groups=False,
        )
        return ProcessGroupCollection.use_mpu_process_groups()

    return made(rank, wanted, make, [])


LAYOUTS = (
    layout(),
    layout(dp=4),
    layout(tp=4),
    layout(tp=2, dp=2),
    layout(tp=2, pp=2),
    layout(pp=4, dp=2),
    layout(cp=2, dp=2),
    layout(tp=2, pp=3, cp=2, dp=2),
    layout(dp=4, ep=4),
    layout(dp=4, ep=2),
    layout(tp=2, dp=2, ep=2),
    layout(tp=2, dp=2, ep=4),
    layout(pp=2, cp=2, dp=2, ep=2),
)


@pytest.mark.parametrize("wanted", LAYOUTS, ids=lambda of: f"tp{of.tp}-pp{of.pp}-cp{of.cp}-dp{of.dp}-ep{of.ep}")
def test_every_purpose_has_the_ranks_that_megatron_gives_it(wanted: Layout) -> None:
    calls = set()
    for rank in range(wanted.world_size):
        found, expected = ours(rank, wanted), megatrons(rank, wanted)
        calls.add(found.calls)
        assert found.members == expected.members
    assert len(calls) == 1, "the ranks name as many groups each, so that those of one group agree on its name"


@pytest.mark.parametrize(
    ("wanted", "before", "calls", "own"),
    [
        # `own` counts the world as well; `calls` counts the group of a rank alone, and the groups of others.
        (layout(dp=8), 118, 2, 2),
        (layout(tp=8, dp=32), 2043, 41, 3),
        # Attention's keys and values do not wait behind gradients of the same ranks.
        (layout(tp=2, cp=4), 93, 10, 5),
        (layout(tp=8, dp=128), 8091, 137, 3),
        # Nor do experts' tokens.
        (layout(dp=8, ep=8), 97, 3, 3),
    ],
    ids=["8", "256", "8 of one sequence", "1024", "8 with an eighth of the experts each"],
)
def test_as_few_groups_as_there_are_sets_of_ranks(wanted: Layout, before: int, calls: int, own: int) -> None:
    assert megatrons(0, wanted).calls == before
    for rank in (0, wanted.world_size - 1):
        found = ours(rank, wanted)
        assert (found.calls, found.own) == (calls, own)
        assert found.signs == before, "a sign of life for every group that Megatron asks for"


@pytest.mark.parametrize("wanted", [of for of in LAYOUTS if of.ep > 1], ids=lambda of: f"tp{of.tp}-dp{of.dp}-ep{of.ep}")
def test_cells_are_numbered_among_experts_as_megatron_does(wanted: Layout) -> None:
    for rank in range(wanted.world_size):
        members, cell = megatrons(rank, wanted).members, rank % wanted.cells
        divided, same = members["ep"], members["expt_dp"]
        assert divided is not None
        assert same is not None
        assert (divided.index(rank), same.index(rank)) == (wanted.expert_rank(cell), wanted.expert_owner(cell))
        assert (len(divided), len(same)) == (wanted.ep, wanted.expert_owners)
