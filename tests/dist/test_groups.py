"""Process groups on real ranks: what a group's members add up is what they have, for every purpose that has a group."""

from dataclasses import fields, replace
from datetime import timedelta

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from canzona_cli.core.megatron import parallel
from canzona_cli.core.megatron.parallel import make_groups
from canzona_cli.core.setup import Layout
from tests.dist.ranks import run_ranks
from tests.faults.support import LAYOUT
from tests.waiting import PATIENCE_S

LAYOUTS = {"tp2 pp2": replace(LAYOUT, tp=2, pp=2, dp=1), "tp2 dp2": replace(LAYOUT, tp=2, pp=1, dp=2)}
MEMBERS = {
    # Ranks are numbered tensor-parallel ranks first, then data-parallel ones, then stages.
    "tp2 pp2": {"tp": ({0, 1}, {2, 3}), "pp": ({0, 2}, {1, 3}), "dp_cp": ({0}, {1}, {2}, {3}), "mp": ({0, 1, 2, 3},)},
    "tp2 dp2": {"tp": ({0, 1}, {2, 3}), "pp": ({0}, {1}, {2}, {3}), "dp_cp": ({0, 2}, {1, 3}), "mp": ({0, 1}, {2, 3})},
}

Sums = dict[str, dict[str, set[int]]]
"""The ranks whose numbers a sum over a group contains, by layout and purpose."""


def _sums() -> Sums:
    first, *others = LAYOUTS
    signs: list[None] = []
    world = parallel.initialize(LAYOUTS[first], "cpu", seed=1, alive=lambda: signs.append(None))
    assert signs, "no sign of life while groups are made"
    found = {first: _added_up(world.groups)}
    for name in others:
        parallel_state.destroy_model_parallel()
        found[name] = _added_up(_groups(LAYOUTS[name]))
    return found


def _groups(layout: Layout) -> ProcessGroupCollection:
    return make_groups(layout, timeout=timedelta(seconds=PATIENCE_S), alive=lambda: None)


def _added_up(groups: ProcessGroupCollection) -> dict[str, set[int]]:
    sums = {}
    for name in (field.name for field in fields(groups)):
        group = getattr(groups, name, None)
        if isinstance(group, ProcessGroup):
            members = torch.zeros(4)
            members[torch.distributed.get_rank()] = 1.0
            torch.distributed.all_reduce(members, group=group)
            sums[name] = set(members.nonzero().flatten().tolist())
    return sums


@pytest.fixture(scope="module")
def sums() -> list[Sums]:
    return run_ranks(4, _sums)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_group_joins_its_ranks_and_no_others(sums: list[Sums], layout: str) -> None:
    for rank, found in enumerate(sums):
        for purpose, groups in MEMBERS[layout].items():
            assert found[layout][purpose] == next(group for group in groups if rank in group), purpose
        # Experts' groups are those of everybody else.
        assert found[layout]["expt_tp"] == found[layout]["tp"]
        assert found[layout]["expt_dp"] == found[layout]["dp_cp"]
