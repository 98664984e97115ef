"""Steps of Qwen3-32B's structure on 256 ranks (TP 8 x DP 32), every side of its matrices divided by 64.

No network and no other process: a recorder stands in for the communicators. What is asserted is what only shows at
such sizes: every member of a communicator calls the same collectives in the same order, as many as the plan has, and
no host waits for a value or for a collective before it must.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.sharing import shared_collectives, shared_exchanges
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.optimizers import muon
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.measures import communication, exchanges
from canzona_cli.core.planner.order import shared_order
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.engine_support import batches
from tests.dist.jobs import Runs, planned
from tests.dist.ranks import run_ranks
from tests.dist.recorder import Event, Recorder, become

TP, DP = 8, 32
SHAPE = (
    *("recipe=qwen3-32b", f"gpus={TP * DP}", "cluster=cpu", f"parallel.tp={TP}", "parallel.pp=1"),
    *(
        "model.hidden_size=80",
        "model.ffn_hidden_size=400",
        "model.head_dim=2",
        "model.vocab_size=384",
        "data.tokenizer=byte",
    ),
    *("train.seq_length=16", "train.micro_batch_size=1", "train.batch_tokens=1024", "train.eval_interval=0"),
    "parallel.bucket_elements=10000",
)
OF_MATRICES = {"reduce", "broadcast", "all_to_all_single", "reduce_scatter_single", "all_gather_single"}
"""Collectives that Megatron's own buckets, of what AdamW updates, do not use: theirs are coalesced."""
READS = [("tolist", "norm_clip"), ("tolist", "other")]
"""The values that a host waits for in a step: the gradient norm before anything changes, and the step's loss at its
end."""
Recorded = dict[int, list[Event]]


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*SHAPE, *overrides)


def recorded(runs: Sequence[tuple[RunConfig, Layout]], ranks: list[int]) -> list[Recorded]:
    """Records the second step of these ranks, in which nothing happens for the first time, for several runs that are
    cut over ranks alike."""
    found = run_ranks(len(ranks), partial(_rank, runs, ranks))
    return [dict(zip(ranks, events, strict=True)) for events in zip(*found, strict=True)]


def _rank(runs: Sequence[tuple[RunConfig, Layout]], ranks: list[int]) -> list[list[Event]]:
    config, layout = runs[0]
    become(ranks[int(os.environ["RANK"])], layout.world_size)
    world = join(config, layout)
    return [_second_step(config, replace(world, layout=layout)) for config, layout in runs]


def _second_step(config: RunConfig, world: World) -> list[Event]:
    recorder = Recorder()
    with recorder.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "runs_in_blocks", lambda matrix: False)  # the way of a GPU: whole matrices at once
        patch.setattr(muon, "gram_dtype", lambda dtype, _: dtype)  # what nobody has sent is too large for fp16
        trainee = assemble(config, world, planned(config, world.layout))
        # Answers that no other rank has sent are not to be trusted.
        patch.setattr(muon.Muon, "untrusted_count", lambda self: None)
        for group in getattr(getattr(trainee.optimizer, "matrices", None), "groups", ()):
            group._on_host = False  # whether an update was finite is then read by nobody
        samples = batches(trainee)
        train_step(trainee, samples)
        trainee.timer.on_change = recorder.mark
        recorder.active = True
        train_step(trainee, samples)
    return recorder.events


def ranks_of_both_groups(layout: Layout, members: int = DP) -> list[int]:
    """All members of rank 0's tensor-parallel communicator, and the first ones of its data-parallel communicator."""
    return sorted({*range(layout.tp), *range(0, members * layout.tp, layout.tp)})


def launches(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "launch"]


def assert_members_agree(found: Recorded) -> None:
    """Asserts that all recorded members of a communicator call the same collectives in the same order."""
    calls: dict[tuple[int, ...], dict[int, list[tuple[object, ...]]]] = defaultdict(lambda: defaultdict(list))
    for rank, events in found.items():
        for event in launches(events):
            assert rank in event.group
            # Of an all-to-all each rank has its own share.
            size = None if event.name == "all_to_all_single" else event.elements
            calls[event.group][rank].append((event.name, event.root, event.dtype, size))
    compared = 0
    for group, members in calls.items():
        assert set(members) == set(group) & set(found), "a member calls nothing where others do"
        first, *others = members.values()
        for other in others:
            assert other == first
            compared += len(first)
    assert compared > len(found), "no two members were compared"


def assert_nothing_waits_early(events: list[Event], dp: int) -> None:
    """The host asks for no reduction before the backward pass is over."""
    places = {event.number: place for place, event in enumerate(events) if event.kind == "launch"}
    waits = {event.number: place for place, event in reversed([*enumerate(events)]) if event.kind == "wait"}
    last_backward = max(place for place, event in enumerate(events) if event.phase == "backward")
    reductions = [
        n for n, place in places.items() if events[place].phase == "grad_reduce" and len(events[place].group) == dp
    ]
    assert reductions
    assert all(waits[number] > last_backward for number in reductions)


def under_updates(events: list[Event]) -> list[bool]:
    """Returns, for each exchange, whether this rank updates matrices while it travels."""
    places = {event.number: place for place, event in enumerate(events) if event.kind == "launch"}
    waits = {event.number: place for place, event in reversed([*enumerate(events)]) if event.kind == "wait"}
    return [
        any(event.phase == "matrix_update" for event in events[place : waits[number]])
        for number, place in places.items()
        if events[place].phase == "exchange"
    ]


def gathered_beside_others(events: list[Event]) -> Iterator[bool]:
    """Yields, for each gather of squares, whether another collective starts before it is waited for."""
    waits = {event.number: place for place, event in reversed([*enumerate(events)]) if event.kind == "wait"}
    for place, event in enumerate(events):
        if (event.kind, event.phase, event.name) == ("launch", "exchange", "all_gather_single"):
            yield bool(launches(events[place + 1 : waits[event.number]]))


def beside_others(matrices: int) -> list[bool]:
    """The same of the plan's order."""
    behind, sent, due, found = shared_exchanges(5), 0, defaultdict[tuple[int, int], list[int]](list), dict[int, bool]()
    for matrix, part in shared_order([len(behind) + 1] * matrices):
        found |= {number: sent > number + 1 for number in due[matrix, part]}
        for exchange in behind[part].exchanges if part < len(behind) else ():
            if exchange == "all_gather":
                due[matrix, part + 1 + behind[part].overlapped_parts].append(sent)
            sent += 1
    assert len(found) == matrices * shared_collectives(5)["all_gather"]
    return [found[number] for number in sorted(found)]


CASES = {
    "canzona": (),
    "many micro-groups": ("gpus=32", "train.batch_tokens=128", "engine.c_max_mib=0.13"),
    "ring": ("engine.reduction=ring",),
    "shared": ("gpus=32", "train.batch_tokens=128", "optimizer.form=gram", "engine.mode=shared"),
    "asc": ("engine.strategy=asc",),
    "soap": ("optimizer=soap",),
}


Case = tuple[str, int, int]
"""Its name, how many layers its model has, how many ranks of rank 0's data-parallel communicator are recorded."""
NORMAL: list[Case] = [("canzona", 4, 4)]


def _resolve(case: Case) -> tuple[RunConfig, Layout]:
    name, layers, _ = case
    return resolve(f"model.num_layers={layers}", *CASES[name])


def _record(cases: Sequence[Case]) -> list[Recorded]:
    runs = [_resolve(case) for case in cases]
    return recorded(runs, ranks_of_both_groups(runs[0][1], cases[0][2]))


def _ranks(case: Case) -> tuple[bool, int]:
    return "gpus=32" in CASES[case[0]], case[2]


SWEPT: list[Case] = [(name, 16 if name in ("canzona", "many micro-groups") else 8, 4) for name in CASES]
STEPS = Runs(NORMAL, _ranks, _record, SWEPT)


@pytest.mark.parametrize("case", [*NORMAL, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT)], ids=str)
def test_a_step_of_256_ranks_is_the_plans(case: Case) -> None:
    config, layout = _resolve(case)
    plan = make_plan(config.setup, layout)
    counted = communication(config.setup, layout, plan)
    found = STEPS[case]
    assert_members_agree(found)
    for events in found.values():
        matrices = Counter(event.phase for event in launches(events) if event.name in OF_MATRICES)
        assert matrices["grad_reduce"] == counted.dp_reductions
        assert matrices["param_gather"] == counted.dp_gathers
        assert_nothing_waits_early(events, layout.dp)
        reads = [(event.name, event.phase) for event in events if event.kind == "read"]
        # In Gram form numbers of a matrix are the host's where it computes (`test_cuda_order` looks at a device's).
        assert [read for read in reads if case[0] != "shared" or read[1] != "matrix_update"] == READS
    under = {rank: under_updates(events) for rank, events in found.items()}
    of_owners = exchanges(plan)
    assert all(len(each) == of_owners[0, rank // layout.tp] for rank, each in under.items())
    one_owners = [under[rank] for rank in range(layout.tp)]
    # All but the first gradients out and the last weights back: somebody updates meanwhile.
    assert case[0] == "shared" or all(any(ranks) for ranks in list(zip(*one_owners, strict=True))[1:-1])
    if case[0] == "shared":
        cut = Counter(plan.assignment.cells[index].owner for index in plan.assignment.shared_costs)
        assert max(cut.values()) > 1
        for rank, events in found.items():
            assert [*gathered_beside_others(events)] == beside_others(cut[rank // layout.tp])
    assert case[0] != "many micro-groups" or len(one_owners[0]) >= 4
