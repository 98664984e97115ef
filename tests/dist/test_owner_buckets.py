"""Gradients reach their owners and parameters come back, in Megatron's own data-parallel wrapper on real ranks."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config

from canzona_cli.config.schema import Layout, Reduction, RunConfig
from canzona_cli.megatron import instrument
from canzona_cli.megatron.adamw import build_adamw
from canzona_cli.megatron.matrix_buffers import PlanMismatch, global_parameters, named_matrix_parameters
from canzona_cli.megatron.owner_bucket_group import adamw_groups, matrix_groups
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import COPIED
from canzona_cli.planner.rings import handovers
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

COMBINATIONS: list[tuple[str, Reduction]] = [
    ("owner", "reduce"),
    ("owner", "all_to_all"),
    ("owner", "padded"),
    ("owner", "ring"),
    ("contiguous", "reduce"),
    ("contiguous", "all_to_all"),
    ("contiguous", "ring"),
    ("aligned", "even"),
    ("aligned", "reduce"),
    ("aligned", "all_to_all"),
    ("aligned", "ring"),
]
WAYS: list[Reduction] = ["reduce", "all_to_all", "padded", "ring"]
OFTEN = ["reduce", "all_to_all", "ring", pytest.param("padded", marks=pytest.mark.sweep)]


def _two_steps(config: RunConfig, layout: Layout, plan: Plan, *, roundings: float | None = None) -> int:
    """Two iterations with new weights between them; how many matrix buckets this rank has.

    roundings: as many roundings of what is at most the magnitude of what was added up may matrices' sums be off; None
    for bitwise equality with a plain all-reduce.
    """
    world = start(config, layout)
    ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
    overlap = config.parallel.overlap_grad_reduce
    matrices = named_matrix_parameters(ddp, plan, world.pp_rank)
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
        for group in matrix_groups(ddp):
            for part in group.owned:
                data = group.buckets[0].param_data[part.start : part.end]
                data.add_(torch.randn(data.shape, generator=torch.Generator().manual_seed(part.start)), alpha=0.02)
                changed += data.double().sum().item()
        groups = adamw_groups(ddp) if overlap else adamw_groups(ddp) + matrix_groups(ddp)
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
            for group in matrix_groups(ddp)
            for part in group.owned
        )
        assert kept == changed, "gathering changed an owner's own weights"
        for (_, ours), (_, theirs) in zip(global_parameters(ddp), global_parameters(plain), strict=True):
            theirs.data.copy_(ours.data)
    return len(matrix_groups(ddp))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("buffers", "reduction"), COMBINATIONS)
def test_owners_get_the_sums_of_a_plain_all_reduce(buffers: str, reduction: Reduction, overlap: bool) -> None:
    """Bitwise: two numbers have one sum, and the scale is a power of two."""
    config, layout = case("gpus=2", f"engine.layout={buffers}", f"parallel.overlap_grad_reduce={overlap}".lower())
    assert layout.num_microbatches == 2
    plan = planned(config, layout, reduction)
    buckets = run_ranks(2, lambda: _two_steps(config, layout, plan))
    assert buckets == ([len(plan.buckets)] * 2)
    assert len(plan.buckets) > 2 or not overlap


BF16 = ("train.precision=bf16", "train.grad_reduce_dtype=bf16")


@pytest.mark.parametrize(("buffers", "reduction"), [*(("owner", way) for way in WAYS), ("aligned", "even")])
def test_bf16_gradients_are_reduced_without_a_detour(buffers: str, reduction: Reduction) -> None:
    """gloo adds bf16, too; the sum of two numbers, rounded once, is again the same whoever computes it."""
    config, layout = case("gpus=2", f"engine.layout={buffers}", *BF16)
    plan = planned(config, layout, reduction)
    run_ranks(2, lambda: _two_steps(config, layout, plan))


@pytest.mark.parametrize(
    ("reduction", "precision", "roundings"),
    # An exchange adds bf16 up in fp32, and rounds once.
    [
        *((way, (), 3) for way in WAYS),
        *((way, BF16, 1 if way == "all_to_all" else 3) for way in WAYS),
    ],
    ids=[f"{way} {precision}" for precision in ("fp32", "bf16") for way in WAYS],
)
def test_four_owners_get_sums_within_the_rounding_of_three_additions(
    reduction: Reduction, precision: tuple[str, ...], roundings: int
) -> None:
    config, layout = case("gpus=4", *precision)
    plan = planned(config, layout, reduction)
    run_ranks(4, lambda: _two_steps(config, layout, plan, roundings=roundings))


@pytest.mark.parametrize("reduction", WAYS)
def test_owners_whose_ranges_are_not_in_the_order_of_ranks(reduction: Reduction) -> None:
    """Several ranges of one owner in a bucket, neighbours of other owners': they are packed to be exchanged."""
    config, layout = case("gpus=2", "engine.layout=contiguous")
    plan = alternating(planned(config, layout, reduction))
    assert [part.owner for part in plan.buckets[1].ranges] == [1, 0, 1]
    assert len(handovers(plan.buckets[1], 2)) == 2, "one rank's part is not in the order of owners"
    run_ranks(2, lambda: _two_steps(config, layout, plan))


@pytest.mark.parametrize(
    "mesh",
    [
        ("gpus=4", "parallel.tp=2"),
        ("gpus=2", "parallel.tp=2"),
        ("gpus=4", "parallel.tp=2", "engine.splitting=per_head"),
        ("gpus=4", "parallel.pp=2"),
        ("gpus=4", "parallel.pp=2", "model.tied_embeddings=false"),
        ("gpus=1",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("reduction", OFTEN)
def test_every_mesh(mesh: tuple[str, ...], reduction: Reduction) -> None:
    """Also with one owner, where nothing travels, and with a tied embedding on two stages."""
    config, layout = case(*mesh)
    plan = planned(config, layout, reduction)
    run_ranks(layout.world_size, lambda: _two_steps(config, layout, plan))


def test_owners_are_numbered_over_data_and_context_parallel_ranks() -> None:
    config, layout = case("gpus=4")
    layout = replace(layout, dp=2, cp=2)
    plan = planned(config, layout)
    assert {part.owner for bucket in plan.buckets for part in bucket.ranges} == {0, 1, 2, 3}

    def rank() -> None:
        world = start(config, layout)
        ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
        for wrapped in (ddp, plain):
            generator = torch.Generator().manual_seed(world.rank)
            for _, param in global_parameters(wrapped):
                # Few bits, so that every order of adding gives the same.
                main_grad(param).copy_(torch.randint(-8, 9, param.shape, generator=generator))
        ddp.finish_grad_sync()
        expected = reference(plain, world).reduced
        for name, piece, values in owned_gradients(ddp):
            assert torch.equal(values, expected[name].view(-1)[piece]), name
        for cell in plan.assignment.cells:
            assert cell.owner < world.groups.dp_cp.size()
        assert plan.subject.layout.rank(0, world.groups.dp_cp.rank()) == world.rank

    run_ranks(4, rank)


@pytest.mark.parametrize("reduction", WAYS)
def test_reduction_runs_under_the_backward_pass(reduction: Reduction) -> None:
    """Once Megatron knows what a step looks like, the first bucket leaves before the last one has any gradient."""
    config, layout = case("gpus=2", "parallel.bucket_elements=10000")
    plan = planned(config, layout, reduction)

    def rank() -> list[tuple[int, int]]:
        world = start(config, layout)
        ddp = wrap(config, world, plan)
        groups = matrix_groups(ddp)
        seen: list[tuple[int, int]] = []
        for group in groups:

            def spied(*args: object, start: Callable[..., None] = group.start_grad_sync, **kwargs: object) -> None:
                start(*args, **kwargs)
                seen.append((len(groups[-1].per_param_grad_ready_counts), sum(bool(g.reducing.held) for g in groups)))

            group.start_grad_sync = spied  # type: ignore[method-assign]
        iterate(ddp, config, world, seed=0)
        seen.clear()
        iterate(ddp, config, world, seed=1)
        assert not any(group.reducing.held for group in groups), "copies outlive the step"
        return seen

    for seen in run_ranks(2, rank):
        assert len(seen) == len(plan.buckets) > 4
        ready, alive = zip(*seen, strict=True)
        assert ready[0] == 0
        assert ready[-1] > 0
        # What is copied whole is not held for more than two buckets; rings hold shares alone.
        assert max(alive) == (2 if reduction in COPIED else 0 if reduction == "reduce" else len(plan.buckets))


@pytest.mark.parametrize("reduction", WAYS)
def test_in_the_first_step_a_reduction_may_be_asked_for_twice(reduction: Reduction) -> None:
    """Megatron's finish_grad_sync starts every reduction of the first step, also one that somebody started before."""
    config, layout = case("gpus=2")
    plan = planned(config, layout, reduction)

    def rank() -> None:
        ddp = wrap(config, start(config, layout), plan)
        for group in matrix_groups(ddp):
            group.buckets[0].grad_data.fill_(3.0)
            group.start_grad_sync()
            group.finish_grad_sync()
            for part in group.owned:
                assert (group.buckets[0].grad_data[part.start : part.end] == 3.0).all()

    run_ranks(2, rank)


def test_parameters_are_gathered_one_bucket_ahead() -> None:
    """First layers first; AdamW's buckets are left to whoever steps AdamW."""
    config, layout = case("gpus=2")
    plan = planned(config, layout)

    def rank() -> None:
        ddp = wrap(config, start(config, layout), plan)
        *others, second, first = matrix_groups(ddp)
        first.finish_param_sync()
        assert second.param_gather_handle is not None
        assert not any(group.param_gather_dispatched for group in (*others, *adamw_groups(ddp)))
        second.finish_param_sync(skip_next_bucket_dispatch=True)
        assert not any(group.param_gather_dispatched for group in others)
        for group in adamw_groups(ddp):
            group.finish_param_sync()
        assert not any(group.param_gather_dispatched for group in others)

    run_ranks(2, rank)


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("reduction", OFTEN)
def test_an_all_reduce_can_be_forced(reduction: Reduction, overlap: str) -> None:
    config, layout = case("gpus=2", f"parallel.overlap_grad_reduce={overlap}")
    plan = planned(config, layout, reduction)

    def rank() -> None:
        world = start(config, layout)
        ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
        get_model_config(ddp).finalize_model_grads_func = None
        iterate(ddp, config, world, seed=0)
        iterate(plain, config, world, seed=0)
        ddp.finish_grad_sync(force_all_reduce=True)
        expected = reference(plain, world).reduced
        for name, param in global_parameters(ddp):
            assert torch.equal(main_grad(param), expected[name]), name

    run_ranks(2, rank)


@pytest.mark.parametrize("reduction", OFTEN)
def test_phase_timers_see_what_is_under_way(reduction: Reduction) -> None:
    config, layout = case("gpus=2")
    plan = planned(config, layout, reduction)

    def rank() -> list[dict[str, float]]:
        world = start(config, layout)
        ddp, timer = wrap(config, world, plan), PhaseTimer(torch.device("cpu"))
        instrument.attach(ddp, None, timer)
        for step in range(2):
            timer.begin_step()
            iterate(ddp, config, world, seed=step)
            for other in adamw_groups(ddp):
                other.start_param_sync()
            timer.end_step()
        return [timing.phases for timing in timer.timings()]

    for steps in run_ranks(2, rank):
        for phases in steps:
            assert phases["grad_reduce_total"] > 0
            assert phases["grad_reduce"] > 0
        assert steps[1]["param_gather_total"] > 0


def _mismatch(change: Callable[[Plan], Plan], *overrides: str) -> tuple[str, str]:
    """The first difference that a rank finds between its model and the plan as changed: its key, the whole of it."""
    config, layout = case("gpus=2")
    other, _ = case("gpus=2", *overrides)
    plan = change(planned(config, layout))

    def rank() -> tuple[str, str]:
        with pytest.raises(PlanMismatch) as raised:
            wrap(other, start(other, layout), plan)
        return raised.value.key, str(raised.value)

    first, second = run_ranks(2, rank)
    assert first == second
    return first


def _same(plan: Plan) -> Plan:
    return plan


def _without_last_layer(plan: Plan) -> Plan:
    return replace(plan, matrices=plan.matrices[: len(plan.matrices) // 2])


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


def _uneven_shards(plan: Plan) -> Plan:
    return replace(plan, buckets=tuple(replace(bucket, reduction="even") for bucket in plan.buckets))


@pytest.mark.parametrize(
    ("change", "overrides", "key", "said"),
    [
        (_same, ("model.num_layers=1",), "decoder.layers.1.self_attention.linear_proj.weight", "no such trainable"),
        (_without_last_layer, (), "decoder.layers.1.self_attention.linear_proj.weight", "planned nothing"),
        (
            _same,
            ("model.ffn_hidden_size=96",),
            "decoder.layers.0.mlp.linear_fc1.weight",
            "planned (384, 64), found (192, 64)",
        ),
        (_shorter, (), "", "on owner"),
        (_other_owner, (), "", "on owner"),
        (_overlapping, (), "bucket 0 of stage 0", "planned ordered ranges"),
        (_bucket_lost, (), "decoder.layers.0.self_attention.linear_proj.weight", "in 0 buckets"),
        (_larger_bucket, (), "bucket 0 of stage 0", "elements without padding"),
        (_buckets_swapped, (), "", "registered next to bucket"),
        (_more_ranks, (), "parallel", "dp=4"),
        (_uneven_shards, (), "bucket 0 of stage 0", "outside of their owner's shard"),
    ],
)
def test_a_plan_for_something_else_is_refused(
    change: Callable[[Plan], Plan], overrides: tuple[str, ...], key: str, said: str
) -> None:
    found, message = _mismatch(change, *overrides)
    assert found == key or not key
    assert said in message


def _adamw_step(config: RunConfig, layout: Layout, plan: Plan) -> list[int]:
    """One AdamW step against torch's own on the all-reduced gradients; elements in each of its parameter groups."""
    world = start(config, layout)
    ddp, plain = wrap(config, world, plan), wrap_plain(config, world)
    settings = {"lr": 0.01, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    optimizer = build_adamw(
        ddp,
        world,
        OptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=True,
            clip_grad=0.0,
            params_dtype=torch.float32,
            overlap_param_gather=config.parallel.overlap_grad_reduce,
            **settings,
        ),
    )
    for group in optimizer.param_groups:
        # As Megatron's scheduler does.
        group["weight_decay"] = 0.1 * group["wd_mult"]
    before = {name: param.detach().clone() for name, param in global_parameters(ddp)}
    iterate(ddp, config, world, seed=0)
    iterate(plain, config, world, seed=0)
    expected = reference(plain, world).reduced
    assert optimizer.step()[0]
    if config.parallel.overlap_grad_reduce:
        for group in adamw_groups(ddp):
            group.start_param_sync()
            group.finish_param_sync()
    matrices = {param for group in matrix_groups(ddp) for param in group.params}
    for name, param in global_parameters(ddp):
        if param in matrices:
            assert torch.equal(param, before[name]), f"AdamW touched {name}"
            continue
        alone = torch.nn.Parameter(before[name])
        alone.grad = expected[name]
        decay = 0.0 if alone.dim() == 1 else 0.1
        torch.optim.AdamW([alone], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay).step()
        torch.testing.assert_close(param.detach(), alone.detach(), rtol=1e-6, atol=1e-8, msg=name)
    return [sum(param.numel() for param in group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_adamw_updates_everything_but_matrices(overlap: str) -> None:
    config, layout = case("gpus=2", f"parallel.overlap_grad_reduce={overlap}")
    plan = planned(config, layout)
    for groups in run_ranks(2, lambda: _adamw_step(config, layout, plan)):
        # Embedding (its half), and norms.
        assert len(groups) == 2


def test_adamw_works_on_a_pipeline_stage_that_has_only_norms() -> None:
    config, layout = case("gpus=3", "parallel.pp=3", "model.num_layers=3")
    plan = planned(config, layout)
    first, middle, last = run_ranks(3, lambda: _adamw_step(config, layout, plan))
    assert middle[0] == 0
    assert min(first[0], last[0], middle[1]) > 0
