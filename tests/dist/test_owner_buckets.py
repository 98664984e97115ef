"""Gradients reach their owners and parameters come back, in Megatron's own data-parallel wrapper on real ranks."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

import pytest
import torch
from megatron.core.utils import get_model_config

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.matrix_buffers import PlanMismatch, global_parameters, matrix_parameters
from canzona_cli.core.megatron.owner_bucket_group import OwnerBucketGroup, adamw_groups, matrix_groups
from canzona_cli.core.megatron.parallel import World, duplicate_group
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.reduction import GATHERED_AHEAD, handovers
from canzona_cli.core.setup import Layout, Reduction
from canzona_cli.training.assemble import assemble as assemble_trainee
from tests.dist.jobs import Runs, on_ranks, ranks_of
from tests.dist.owner_support import (
    alternating,
    case,
    equal_on_all_replicas,
    iterate,
    main_grad,
    owned_gradients,
    planned,
    reference,
    start,
    wrap,
    wrap_plain,
)
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import fill_gradients, noise
from tests.waiting import PATIENCE_S

WAYS: list[Reduction] = ["reduce", "ring"]
APART = ("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false")
BF16 = ("train.precision=bf16", "train.grad_reduce_dtype=bf16")
TWO = ("gpus=2", "model.num_layers=1")
FOUR = ("gpus=4", "model.num_layers=1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two iterations with buckets that travel one way."""

    settings: tuple[str, ...]
    reduction: Reduction | None = None
    """None for what is planned."""
    alternating: bool = False
    apart: bool = False
    """Matrices' buckets have a communicator of their own, as on GPUs."""
    roundings: int | None = None
    """The error that matrices' sums may have, in roundings of a value of at most the sum of the terms' magnitudes; None
    for bitwise equality with a plain all-reduce."""


@cache
def _made(one: Case) -> tuple[RunConfig, Layout, Plan]:
    config, layout = case(*one.settings)
    plan = planned(config, layout, one.reduction)
    return config, layout, alternating(plan) if one.alternating else plan


def _two_steps(config: RunConfig, world: World, plan: Plan, roundings: int | None) -> int:
    """Two iterations with new weights between them; how many matrix buckets this rank has."""
    ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
    overlap = config.parallel.overlap_grad_reduce
    matrices = matrix_parameters([ddp], plan, world)
    for step in range(2):
        iterate(ddp, config, world, seed=step)
        iterate(plain, config, world, seed=step)
        expected = reference(plain, world)
        seen = 0
        for name, piece, values in owned_gradients(ddp):
            seen += values.numel()
            if roundings is None:
                assert torch.equal(values, expected.reduced[name].view(-1)[piece]), f"step {step}: {name}"
            else:
                # Megatron's reduce-scatter, which AdamW's gradients take, rounds after every addition.
                allowed = roundings if name in matrices else world.groups.dp_cp.size() - 1
                ulp = torch.finfo(values.dtype).eps
                error = (values.double() - expected.exact[name].view(-1)[piece]).abs()
                bound = 1.02 * allowed * ulp / 2 * expected.magnitude[name].view(-1)[piece]
                assert (error <= bound).all(), f"step {step}: {name}"
        # Every element has exactly one owner.
        total = torch.tensor(seen)
        torch.distributed.all_reduce(total, group=world.groups.dp_cp)
        assert total == sum(param.numel() for param in ddp.module.parameters())

        changed = 0.0
        for group in matrix_groups([ddp]):
            for part in group.owned:
                data = group.buckets[0].param_data[part.start : part.end]
                data.add_(torch.randn(data.shape, generator=torch.Generator().manual_seed(part.start)), alpha=0.02)
                changed += data.double().sum().item()
        groups = adamw_groups([ddp]) if overlap else adamw_groups([ddp]) + matrix_groups([ddp])
        for group in groups:
            group.start_param_sync()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*already been dispatched.*")
            if overlap and step == 0:
                # The forward pass gathers.
                iterate(ddp, config, world, seed=2)
            elif overlap:
                ddp.start_param_sync(force_sync=True)
        assert equal_on_all_replicas(ddp, world)
        kept = sum(
            group.buckets[0].param_data[part.start : part.end].double().sum().item()
            for group in matrix_groups([ddp])
            for part in group.owned
        )
        assert kept == changed, "gathering changed an owner's own weights"
        for (_, ours), (_, theirs) in zip(global_parameters([ddp]), global_parameters([plain]), strict=True):
            theirs.data.copy_(ours.data)
    return len(matrix_groups([ddp]))


CASES: dict[str, Case] = {
    "owner, reduce": Case(settings=TWO, reduction="reduce"),
    "not overlapped": Case(settings=(*TWO, *APART), reduction="ring"),
    "padded": Case(settings=("gpus=2", "model.hidden_size=36", "model.ffn_hidden_size=108"), reduction="ring"),
    **{
        f"owners not in the order of ranks, {way}": Case(
            settings=("gpus=2", "engine=paper"), reduction=way, alternating=True
        )
        for way in WAYS
    },
    "a communicator of their own": Case(settings=TWO, reduction="ring", apart=True),
    # gloo adds bf16, too: three additions of four numbers.
    **{f"four, {way} in bf16": Case(settings=(*FOUR, *BF16), reduction=way, roundings=3) for way in WAYS},
    "one owner": Case(settings=(*TWO, "parallel.tp=2", "train.micro_batch_size=4"), reduction="reduce"),
    "heads": Case(settings=(*FOUR, "parallel.tp=2", "engine.splitting=per_head"), reduction="ring"),
    "a tied embedding on two stages": Case(settings=("gpus=4", "parallel.pp=2"), reduction="reduce"),
}


def _each[T](cases: Sequence[Case], work: Callable[[Case, RunConfig, World, Plan], T]) -> list[list[T]]:
    """Returns the results of each case's `work` on every rank."""
    made = {one: _made(one) for one in cases}

    def with_plan(one: Case, world: World) -> T:
        config, _, plan = made[one]
        return work(one, config, world, plan)

    return [*on_ranks({one: (config, layout) for one, (config, layout, _) in made.items()}, with_plan).values()]


def _run(cases: Sequence[Case]) -> list[list[int]]:
    def two_steps(one: Case, config: RunConfig, world: World, plan: Plan) -> int:
        if one.apart:
            world = replace(world, owners=duplicate_group(world.groups.dp_cp, timedelta(seconds=PATIENCE_S)))
            assert world.owners is not world.groups.dp_cp
            assert (world.owners.rank(), world.owners.size()) == (world.owner, world.groups.dp_cp.size())
        return _two_steps(config, world, plan, one.roundings)

    return _each(cases, two_steps)


BUCKETS = Runs(CASES.values(), lambda one: ranks_of(one.settings), _run)
"""The number of buckets of matrices on each rank whose sums are all correct."""


@pytest.mark.parametrize("name", CASES)
def test_owners_get_the_sums_of_a_plain_all_reduce(name: str) -> None:
    """Sums of two ranks are bitwise equal, because two numbers have one sum and the scale is a power of two; sums of
    four are within the rounding of three additions."""
    _, _, plan = _made(CASES[name])
    assert min(BUCKETS[CASES[name]]) > 0
    assert (name == "padded") == any(bucket.padding for bucket in plan.buckets)
    if CASES[name].alternating:
        assert [part.owner for part in plan.buckets[1].ranges] == [1, 0, 1]
        assert len(handovers(plan.buckets[1], 2)) == 2, "one rank's part is not in the order of owners"


def test_reduction_runs_under_the_backward_pass() -> None:
    """Once Megatron knows what a step looks like, the first bucket leaves before the last one has any gradient."""

    def work(one: Case, config: RunConfig, world: World, plan: Plan) -> list[tuple[int, int]]:
        ddp = wrap(config, world, plan)
        groups = matrix_groups([ddp])
        seen: list[tuple[int, int]] = []
        for group in groups:

            def spied(*args: object, start: Callable[..., None] = group.start_grad_sync, **kwargs: object) -> None:
                start(*args, **kwargs)
                seen.append(
                    (len(groups[-1].per_param_grad_ready_counts), sum(bool(g.reducing.buffers) for g in groups))
                )

            group.start_grad_sync = spied  # type: ignore[method-assign]
        iterate(ddp, config, world, seed=0)
        seen.clear()
        iterate(ddp, config, world, seed=1)
        assert not any(group.reducing.buffers for group in groups), "copies outlive the step"
        return seen

    cases = [Case(settings=("gpus=2", "parallel.bucket_elements=10000"), reduction=way) for way in WAYS]
    for one, ranks in zip(cases, _each(cases, work), strict=True):
        for seen in ranks:
            assert len(seen) == len(_made(one)[2].buckets) > 4
            ready, alive = zip(*seen, strict=True)
            assert ready[0] == 0
            assert ready[-1] > 0
            # Rings hold what is handed over to this rank, of all buckets.
            most = sum(bool(handovers(bucket, 2)) for bucket in _made(one)[2].buckets)
            most = 0 if one.reduction == "reduce" else most
            assert max(alive) == most, one


@pytest.mark.parametrize("settings", [("gpus=2",), ("gpus=4", "parallel.pp=2", "parallel.vpp=2", "model.num_layers=4")])
def test_a_step_starts_gathering_what_the_forward_needs_first(settings: tuple[str, ...]) -> None:
    """AdamW's of the first model chunk, under the updates; then matrices, and what later chunks have of AdamW's."""
    config, layout = case(*settings, "parallel.bucket_elements=10000")
    plan = planned(config, layout)

    def rank() -> None:
        trainee = assemble_trainee(config, start(config, layout), plan)
        first, *later = ([*reversed(chunk.bucket_groups)] for chunk in trainee.chunks)
        under = [group for group in first if not isinstance(group, OwnerBucketGroup)]
        behind = [group for group in first if isinstance(group, OwnerBucketGroup)]
        for own in later:
            behind += [group for group in own if not isinstance(group, OwnerBucketGroup)]
            behind += [group for group in own if isinstance(group, OwnerBucketGroup)]
        started: list[object] = []
        for group in (*under, *behind):
            begin = group.start_param_sync

            def spied(*, begin: Callable[[], None] = begin, group: object = group) -> None:
                started.append(group)
                begin()

            group.start_param_sync = spied
        fill_gradients(trainee, 0, noise)
        trainee.optimizer.step()
        assert started == [*under, *behind[:GATHERED_AHEAD]]
        for group in behind:
            group.finish_param_sync()
        assert started == [*under, *behind], "each once, in order"

    run_ranks(layout.world_size, rank)


def test_an_all_reduce_can_be_forced() -> None:
    def work(one: Case, config: RunConfig, world: World, plan: Plan) -> None:
        ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
        get_model_config(ddp).finalize_model_grads_func = None
        iterate(ddp, config, world, seed=0)
        iterate(plain, config, world, seed=0)
        ddp.finish_grad_sync(force_all_reduce=True)
        expected = reference(plain, world).reduced
        for name, param in global_parameters([ddp]):
            assert torch.equal(main_grad(param), expected[name]), f"{one}: {name}"

    _each([Case(settings=("gpus=2", *overlap), reduction=way) for overlap in ((), APART) for way in WAYS], work)


def _first_range(plan: Plan, **changes: object) -> Plan:
    first, *others = plan.buckets
    changed = first.ranges[0]._replace(**changes)  # type: ignore[arg-type]
    return replace(plan, buckets=(replace(first, ranges=(changed, *first.ranges[1:])), *others))


def _shorter(plan: Plan) -> Plan:
    return _first_range(plan, end=plan.buckets[0].ranges[0].end - 64)


def _other_owner(plan: Plan) -> Plan:
    return _first_range(plan, owner=1 - plan.buckets[0].ranges[0].owner)


def _overlapping(plan: Plan) -> Plan:
    return _first_range(plan, end=plan.buckets[0].ranges[0].end + 64)


def _bucket_lost(plan: Plan) -> Plan:
    return replace(plan, buckets=plan.buckets[:-1])


def _larger_bucket(plan: Plan) -> Plan:
    return replace(plan, buckets=(replace(plan.buckets[0], elements=plan.buckets[0].elements + 128), *plan.buckets[1:]))


def _buckets_swapped(plan: Plan) -> Plan:
    first, second, *others = plan.buckets
    return replace(plan, buckets=(replace(second, index=0), replace(first, index=1), *others))


def _more_ranks(plan: Plan) -> Plan:
    return replace(plan, subject=replace(plan.subject, layout=replace(plan.subject.layout, dp=4)))


MISMATCHES: list[tuple[Callable[[Plan], Plan], str, str]] = [
    (_shorter, "", "on owner"),
    (_other_owner, "", "on owner"),
    (_overlapping, "bucket 0 of stage 0", "planned ordered ranges"),
    (_bucket_lost, "decoder.layers.0.self_attention.linear_proj.weight", "in 0 buckets"),
    (_larger_bucket, "bucket 0 of stage 0", "elements without padding"),
    (_buckets_swapped, "", "registered next to bucket"),
    (_more_ranks, "parallel", "dp=4"),
]


def test_a_plan_for_something_else_is_refused() -> None:
    """Every rank refuses it, with the first difference between its model and the plan as changed."""
    made = case("gpus=2")
    plan = planned(*made)

    def work(number: int, world: World) -> tuple[str, str]:
        change, _, _ = MISMATCHES[number]
        with pytest.raises(PlanMismatch) as raised:
            wrap(made[0], world, change(plan))
        return raised.value.key, str(raised.value)

    for number, (first, second) in on_ranks(dict.fromkeys(range(len(MISMATCHES)), made), work).items():
        change, key, said = MISMATCHES[number]
        assert first == second
        assert first[0] == key or not key, change.__name__
        assert said in first[1]
