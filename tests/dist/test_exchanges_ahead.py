"""Gradients that set out to their hosts before their norm is known: what comes of it, and of a step that ends there."""

from typing import NamedTuple

import pytest
import torch

from canzona_cli.core.engine import planned as engine
from canzona_cli.core.engine.canzona_optimizer import NonFiniteGradients
from canzona_cli.core.megatron.parallel import World
from canzona_cli.training.assemble import assemble
from tests.dist.engine_support import SMALL_GROUPS, Digests, engine_of, kept, resolve, weights
from tests.dist.jobs import on_ranks, planned
from tests.dist.synthetic import fill_gradients, noise, optimizer_step

SETTINGS = (
    *("gpus=4", "parallel.tp=2", "parallel.pp=1", "model.num_layers=1", "train.precision=fp32"),
    *("optimizer.clip_grad=0.01", *SMALL_GROUPS, "train.non_finite=skip"),
)
RUNS = {
    "muon": ("optimizer=muon",),
    "in bf16": ("optimizer=muon", "engine.exchange_dtype=bf16"),
    "soap": ("optimizer=soap",),
    "shared": ("optimizer=muon", "optimizer.form=gram", "engine.mode=shared"),
}
STEPS, BAD = 3, 1


class Case(NamedTuple):
    name: str
    ahead: bool
    """True for the engine's own order, False when every exchange comes after the norm."""
    broken: bool = False
    """True if gradients of step `BAD` are not finite."""


class Found(NamedTuple):
    ends: list[tuple[Digests, Digests]]
    """The weights and the optimizer state after each step."""
    order: list[list[str]]
    """The collectives over the TP ranks and the norm at each step, in the order in which this rank issued them."""
    begun: int
    """Groups whose gradients set out before the norm."""


CASES = [Case(name, ahead) for name in RUNS for ahead in (True, False)] + [Case("soap", ahead=True, broken=True)]


def _found(case: Case, world: World) -> Found:
    made = resolve(*SETTINGS, *RUNS[case.name])
    with pytest.MonkeyPatch.context() as patched:
        if not case.ahead:
            patched.setattr(engine, "entries_before_norm", lambda groups: 0)
        trainee = assemble(made[0], world, planned(*made))
        optimizer, ends, order = engine_of(trainee), list[tuple[Digests, Digests]](), list[list[str]]()
        for name in ("all_to_all_single", "all_reduce"):
            real = getattr(torch.distributed, name)

            def noted(*tensors: object, name: str = name, real: object = real, **options: object) -> object:
                if name == "all_reduce" or options["group"] is world.groups.tp:
                    order[-1].append(name)
                assert callable(real)
                return real(*tensors, **options)

            patched.setattr(torch.distributed, name, noted)
        for step in range(STEPS):
            order.append([])
            if case.broken and step == BAD:
                fill_gradients(trainee, step, lambda *what: noise(*what) * torch.inf)
                assert not optimizer.step()[0]
                trainee.schedule.step(increment=1)
            else:
                optimizer_step(trainee, step)
            ends.append((weights(trainee), kept(trainee)))
        if case.broken:
            optimizer._non_finite = "stop"
            fill_gradients(trainee, BAD, lambda *what: noise(*what) * torch.nan)
            order.append([])
            with pytest.raises(NonFiniteGradients):
                optimizer.step()
            ends.append((weights(trainee), kept(trainee)))
        matrices = optimizer.matrices
        assert isinstance(matrices, engine.PlannedOptimizer)
        assert matrices._begun == 0
        first = matrices.groups[: vars(engine)["entries_before_norm"](len(matrices.groups))]
        return Found(ends=ends, order=order, begun=sum(group._gradients.route.travels for group in first))


@pytest.fixture(scope="module")
def found() -> dict[Case, list[Found]]:
    return on_ranks({case: resolve(*SETTINGS, *RUNS[case.name]) for case in CASES}, _found)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_comes_out_otherwise_than_behind_the_norm(found: dict[Case, list[Found]], name: str) -> None:
    """Bitwise, with clipping: hosts multiply what arrives by the same number either way."""
    for early, late in zip(found[Case(name, True)], found[Case(name, False)], strict=True):
        assert early.ends == late.ends
        assert late.begun == 0
        # Of shared matrices no gradient travels.
        assert early.begun == (0 if name == "shared" else 2)


def test_all_ranks_come_to_their_collectives_in_one_order(found: dict[Case, list[Found]]) -> None:
    for case, ranks in found.items():
        for tp_group in (ranks[:2], ranks[2:]):
            assert tp_group[0].order == tp_group[1].order
        for one in ranks:
            for step in one.order:
                assert step[: one.begun + 1] == ["all_to_all_single"] * one.begun + ["all_reduce"], case


def test_what_is_under_way_when_a_gradient_is_not_finite_changes_nothing(found: dict[Case, list[Found]]) -> None:
    for broken, clean in zip(found[Case("soap", True, True)], found[Case("soap", True)], strict=True):
        assert broken.order[BAD][:2] == ["all_to_all_single"] * 2
        assert broken.ends[BAD] == broken.ends[BAD - 1] == clean.ends[BAD - 1]
        assert broken.ends[-1] == broken.ends[-2]
        # And what comes behind it is sent anew.
        assert broken.ends[BAD + 1] != broken.ends[BAD]
