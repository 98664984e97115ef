"""The checks before the first step: every rank refuses a plan that does not fit, by name; unusual plans work."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.agreement import OptimizerRefused, PlanRefused
from canzona_cli.core.errors import ExitCode, WorkerCrashed
from canzona_cli.core.megatron import model as models
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble
from canzona_cli.training.step import train_step
from tests.dist.engine_support import batches, custom, engine_of, resolve
from tests.dist.jobs import build, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import run_engine
from tests.dist.whole import Part, part_of
from tests.dist.whole import assemble as assemble_whole

TP2_DP2 = ("gpus=4", "parallel.tp=2", "parallel.pp=1")
TP1_DP4 = ("gpus=4", "parallel.tp=1", "parallel.pp=1")
TP2_PP2 = ("gpus=4", "parallel.tp=2", "parallel.pp=2")


# --- plans ---


Given = Callable[[int], Plan | None]
"""The plan that a rank is given."""


def _refusals(config: RunConfig, layout: Layout, given: Sequence[Given]) -> list[list[str]]:
    """Returns every rank's refusals of each plan it is given."""

    def work(number: int, world: World) -> str:
        with pytest.raises(PlanRefused) as caught:
            assemble(config, world, given[number](world.rank))
        assert caught.value.exit_code == ExitCode.CONFIG
        return str(caught.value)

    return [*on_ranks(dict.fromkeys(range(len(given)), (config, layout)), work).values()]


def _to_all(plan: Plan | None) -> Given:
    return lambda rank: plan


def _only_to(chosen: int, plan: Plan | None, others: Plan | None) -> Given:
    return lambda rank: plan if rank == chosen else others


FOR_OTHERS: list[tuple[tuple[str, ...], str]] = [
    (TP1_DP4, "it was made for tp = 1, but these ranks have tp = 2"),
    (TP2_PP2, "it was made for pp = 2, but these ranks have pp = 1"),
    (("gpus=2", "parallel.tp=2", "parallel.pp=1"), "it was made for dp = 1, but these ranks have dp = 2"),
    (
        (*TP2_DP2, "model.num_layers=1"),
        "decoder.layers.1.self_attention.linear_proj.weight: planned nothing, found a matrix of shape (64, 64)",
    ),
    (
        (*TP2_DP2, "model.num_layers=4"),
        "decoder.layers.2.self_attention.linear_proj.weight: planned a fragment of shape (64, 64), "
        "found no such trainable parameter",
    ),
    (
        (*TP2_DP2, "model.ffn_hidden_size=256"),
        "decoder.layers.0.mlp.linear_fc1.weight: planned (256, 64), found (192, 64)",
    ),
]


def _moved(plan: Plan) -> Plan:
    """Another host for one matrix; nothing else of it changes."""
    [number] = [matrix.index for matrix in plan.matrices if matrix.name == "layers.1.gate"]
    cells = list(plan.assignment.cells)
    cells[number] = replace(cells[number], host=1 - cells[number].host)
    return replace(plan, assignment=replace(plan.assignment, cells=tuple(cells)))


def test_plans_that_are_not_the_runs_are_refused_everywhere() -> None:
    """Those for something else, none at all, also if one rank has one, and one rank's that differs from the others'."""
    config, layout = resolve(*TP2_DP2)
    plan = make_plan(config.setup, layout)
    different, missing = "ranks 0 and 3 have different plans", "plan: there is no plan"
    given = [
        *((_to_all(planned(*resolve(*other))), (told,)) for other, told in FOR_OTHERS),
        (_to_all(None), (missing,)),
        (_only_to(2, plan, None), (missing,)),
        (
            _only_to(3, planned(*resolve(*TP2_DP2, "engine.mode=hosted")), plan),
            (different, "settings.mode: auto and hosted"),
        ),
        (_only_to(3, _moved(plan), plan), (different, "matrices[layers.1.gate].host")),
    ]
    refusals = _refusals(config, layout, [each for each, _ in given])
    for (_, words), (first, *others) in zip(given, refusals, strict=True):
        assert all(each in first for each in words)
        assert set(others) == {first}


def test_a_mismatch_on_one_stage_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen matrix of the last stage: the plan updates what the model does not train."""
    config, layout = resolve(*TP2_PP2)
    plan, frozen, original = (
        make_plan(config.setup, layout),
        "decoder.layers.0.mlp.linear_fc2.weight",
        models.build_model,
    )

    def build_frozen(config: RunConfig, world: object) -> list[torch.nn.Module]:
        [built] = original(config, world)  # type: ignore[arg-type]
        if world.pp_rank == 1:  # type: ignore[attr-defined]
            # Megatron numbers layers by stage.
            [param] = [param for name, param in built.named_parameters() if name.endswith(frozen)]
            param.requires_grad = False
        return [built]

    monkeypatch.setattr(models, "build_model", build_frozen)
    for words in _refusals(config, layout, [_to_all(plan)])[0]:
        assert "decoder.layers.1.mlp.linear_fc2.weight" in words
        assert "found no such trainable parameter" in words


# --- fewer matrices than ranks ---


def test_ranks_that_host_nothing_take_part() -> None:
    """One layer of four fused matrices on eight ranks equals one rank, bitwise."""
    settings = ("model.num_layers=1", "engine.splitting=fused", "train.precision=fp32", "optimizer.clip_grad=0")
    one = run_engine(*resolve(*settings, "gpus=1"), 2)
    where = ("gpus=8", "parallel.tp=2", "parallel.pp=1", "train.global_batch_size=16")
    many = run_engine(*resolve(*settings, *where), 2, look=lambda trainee: len(engine_of(trainee).matrices.masters))
    assert sorted(str(count) for count in many.kept) == ["0"] * 4 + ["1"] * 4
    matrices = [name for name in one.after if "_proj" in name]
    assert matrices
    assert [name for name in matrices if not torch.equal(one.after[name], many.after[name])] == []
    assert all(not torch.equal(one.before[name], one.after[name]) for name in matrices)


# --- a parameter outside of the loss ---

UNUSED = ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight")


def _without_mlp(trainee: Trainee) -> None:
    """The second layer's MLP is the identity, so that its matrices get no gradient."""
    for module in trainee.chunks[0].modules():
        if getattr(module, "layer_number", None) == 2 and hasattr(module, "mlp"):
            module.mlp.forward = lambda hidden, **_: (hidden, None)


def test_without_overlap_a_missing_gradient_is_zero() -> None:
    config, layout = resolve(
        *("gpus=2", "parallel.tp=1", "parallel.pp=1", "train.precision=fp32"),
        *("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
    )
    plan = make_plan(config.setup, layout)

    def rank() -> tuple[Part, Part]:
        trainee = build(config, layout, plan)
        _without_mlp(trainee)
        before, stream = part_of(trainee.chunks, trainee.world), batches(trainee)
        for _ in range(3):
            train_step(trainee, stream)
        return before, part_of(trainee.chunks, trainee.world)

    found = run_ranks(layout.world_size, rank)
    before = assemble_whole([first for first, _ in found], config.model)
    after = assemble_whole([last for _, last in found], config.model)
    decay = 1 - config.optimizer.lr * config.optimizer.weight_decay
    for name, start in before.items():
        if "_proj" not in name:
            continue
        decayed = start * decay * decay * decay
        unused = name.startswith("model.layers.1.mlp")
        # Three roundings of a product; a Muon update alone moves by lr * 0.2 * sqrt(192) / 14 or so.
        assert torch.allclose(after[name], decayed, rtol=1e-6, atol=0.0) == unused, name


def test_with_overlap_a_missing_gradient_is_named() -> None:
    """The missing gradient is named in the first step, in a step whose order Megatron knows, and also where a bucket
    holds nothing else."""
    alone = ("gpus=2", "parallel.tp=1", "parallel.pp=1", "train.micro_batch_size=4")

    def rank(setup: tuple[RunConfig, Layout, Plan], from_step: int) -> str:
        config, layout, plan = setup
        trainee = build(config, layout, plan)
        stream = batches(trainee)
        for _ in range(1, from_step):
            train_step(trainee, stream)
        _without_mlp(trainee)
        with pytest.raises(WorkerCrashed) as caught:
            train_step(trainee, stream)
        return str(caught.value)

    for settings, from_step in (((*TP2_DP2, "train.micro_batch_size=4"), 2), (alone, 1)):
        config, layout = resolve(*settings)
        setup = config, layout, make_plan(config.setup, layout)
        for words in run_ranks(layout.world_size, partial(rank, setup, from_step)):
            assert any(name in words for name in UNUSED)
            assert "overlap_grad_reduce=false" in words


# --- a user's own optimizer ---


def _source(folder: Path, name: str, body: str, arguments: str = "params, lr, weight_decay") -> Path:
    path = folder / f"{name.lower()}.py"
    path.write_text(
        f"import torch\n\nclass {name}(torch.optim.Optimizer):\n"
        f"    def __init__(self, {arguments}):\n        super().__init__(params, {{'lr': 0.1}})\n\n    {body}\n"
    )
    return path


def _optimizer_refusals(configs: Sequence[RunConfig], layout: Layout) -> list[list[str]]:
    """Returns every rank's refusals of each run's optimizer."""
    plans = [make_plan(config.setup, layout) for config in configs]

    def work(number: int, world: World) -> str:
        with pytest.raises(OptimizerRefused) as caught:
            assemble(configs[number], world, plans[number])
        [problem] = caught.value.problems
        assert problem.key == "optimizer.source"
        assert problem.fix
        assert caught.value.exit_code == ExitCode.CONFIG
        return f"{problem.value}: {problem.reason}"

    return [*on_ranks({number: (config, layout) for number, config in enumerate(configs)}, work).values()]


def test_an_optimizer_that_cannot_be_used_is_refused_everywhere(tmp_path: Path) -> None:
    """One that steps nothing, one that is called otherwise, and one that is not there."""
    config, layout = resolve("gpus=2", "parallel.tp=2", "parallel.pp=1")
    idle = _source(tmp_path, "Idle", "def step(self): pass")
    odd = _source(tmp_path, "Odd", "def step(self): pass", "params, lr, weight_decay, rank")
    configs = [custom(config, idle, "Idle"), custom(config, odd, "Odd"), custom(config, odd, "Od")]
    wanted = (
        "idle.py:Idle: two steps left a (4, 6) parameter unchanged",
        "missing 1 required positional argument: 'rank'",
        "did you mean Odd?",
    )
    for words, refusals in zip(wanted, _optimizer_refusals(configs, layout), strict=True):
        assert len(set(refusals)) == 1
        assert words in refusals[0]


def test_a_class_that_one_machine_does_not_have_is_refused_on_all(tmp_path: Path) -> None:
    """A file that was not copied everywhere: no rank goes on alone and waits for ever."""
    config, layout = resolve("gpus=2", "parallel.tp=2", "parallel.pp=1")
    toy = _source(tmp_path, "Toy", "def step(self): [p.data.sub_(0.1) for p in self.param_groups[0]['params']]")

    def rank() -> str:
        here = custom(config, toy if os.environ["RANK"] == "0" else tmp_path / "elsewhere.py", "Toy")
        with pytest.raises(OptimizerRefused) as caught:
            build(here, layout)
        return str(caught.value)

    first, second = run_ranks(layout.world_size, rank)
    assert first == second
    assert "there is no file" in first
