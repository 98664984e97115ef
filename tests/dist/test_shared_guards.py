"""Faults of a shared matrix: all its ranks leave it alike, update it in another way, or end together."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from unittest.mock import patch

import pytest
import torch

from canzona_cli.core.engine import shared
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.optimizers import muon, muon_facts, shared_rows
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.optimizers.shared_muon import SharedMuon
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Shape, Turns, run_turns
from canzona_cli.training.assemble import assemble as assemble_trainee
from tests.dist.engine_support import engine_of, heard, resolve
from tests.dist.jobs import build, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import noise, optimizer_step, single_process
from tests.dist.whole import Part, Weights, assemble, part_of

SETTINGS = (
    *("gpus=2", "parallel.tp=2", "parallel.pp=1", "optimizer=muon", "optimizer.form=gram"),
    *("model.num_layers=1", "train.precision=fp32", "optimizer.clip_grad=0", "engine.mode=shared"),
)
HIT, NAME = "layers.0.gate", "model.layers.0.mlp.gate_proj.weight"
STEPS, STANDARD = 4, 1
"""The number of steps, and of those that are made in standard form after a doubt."""
Fault = Literal["none", "nan", "doubt", "doubt on a device", "marked"]
"""A fault in the second step: momentum that is not a number on one rank; an update not to be trusted, which a GPU's
host does not learn in this step; the mark that such an update leaves, restored from an old checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Faulted:
    parts: list[Part]
    """The weights before the first step and after each step."""
    fallbacks: list[int]
    log: list[str]
    worked: list[int]
    """The number of times this rank updated `HIT` in Gram form, at each step."""


@contextmanager
def _around_updates(trainee: Trainee, around: Callable[[str, Turns[bool]], Turns[bool]]) -> Iterator[None]:
    """Hands every update in turns to `around`, with the matrix's name."""
    matrices = engine_of(trainee).matrices
    (form,) = (sharing.optimizer for sharing in matrices.sharing)
    assert isinstance(form, SharedMuon)
    names: dict[torch.Tensor, str] = {one.master: one.matrix.name for one in matrices.fragments}
    by_rows = form.update_together

    def together(p: torch.Tensor, *, whole: Shape, ranks: FragmentGroup) -> Turns[bool]:
        return around(names[p], by_rows(p, whole=whole, ranks=ranks))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(form, "update_together", together)
        yield


def _doubted(name: str, running: Turns[bool]) -> Turns[bool]:
    """All ranks find that the update of `HIT` is not to be trusted."""
    return run_turns(running, lambda: patch.object(shared_rows, "DOUBT", -1.0)) if name == HIT else running


def _break(trainee: Trainee, fault: Fault) -> None:
    matrices = engine_of(trainee).matrices
    (fragment,) = (one for one in matrices.fragments if one.matrix.name == HIT)
    if fault == "nan" and trainee.world.rank == 1:
        average = fragment.state["momentum_buffer"]
        assert isinstance(average, torch.Tensor)
        average[0, 0] = torch.nan
    if fault == "marked":
        fragment.replace_marks({muon_facts.DISTRUSTED: 1})


@pytest.fixture(scope="module")
def faulted() -> dict[Fault, list[Faulted]]:
    made = resolve(*SETTINGS)
    plan = planned(*made)

    def work(fault: Fault, world: World) -> Faulted:
        with pytest.MonkeyPatch.context() as patched, heard("canzona_cli") as log:
            patched.setattr(muon_facts, "STANDARD_STEPS", STANDARD)
            if fault == "doubt on a device":
                patched.setattr(muon, "runs_in_blocks", lambda matrix: False)
            trainee = assemble_trainee(made[0], world, plan)
            matrices = engine_of(trainee).matrices
            assert isinstance(matrices, PlannedOptimizer)
            parts, fallbacks, worked = [part_of(trainee.chunks, world)], [], []
            for step in range(STEPS):
                if step == 1:
                    _break(trainee, fault)
                updated, doubted = list[str](), step == 1 and fault.startswith("doubt")

                def around(
                    name: str, running: Turns[bool], updated: list[str] = updated, doubted: bool = doubted
                ) -> Turns[bool]:
                    updated.append(name)
                    return _doubted(name, running) if doubted else running

                with _around_updates(trainee, around):
                    optimizer_step(trainee, step)
                worked.append(updated.count(HIT))
                fallbacks.append(round(float(matrices.fallbacks())))
                parts.append(part_of(trainee.chunks, world))
                if step == 1 and fault == "doubt on a device":
                    matrices.repair()
        return Faulted(parts=parts, fallbacks=fallbacks, log=log, worked=worked)

    faults: tuple[Fault, ...] = ("none", "nan", "doubt", "doubt on a device", "marked")
    return on_ranks(dict.fromkeys(faults, made), work)


def test_taking_turns_changes_no_bit_of_a_matrix() -> None:
    """Matrices that take turns are compared with matrices updated one after another, with separate scratch too."""
    config, layout = resolve(*SETTINGS, "train.precision=bf16", "model.num_query_groups=8")
    plan = planned(config, layout)

    def one_by_one(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((place, part) for place, count in enumerate(parts) for part in range(count))

    def work(in_turns: bool, world: World) -> tuple[list[list[float]], list[str]]:
        trainee = assemble_trainee(config, world, plan)
        matrices = engine_of(trainee).matrices
        order = list[str]()

        def around(name: str, running: Turns[bool]) -> Turns[bool]:
            @contextmanager
            def noted() -> Iterator[None]:
                order.append(name)
                yield

            return run_turns(running, noted)

        with pytest.MonkeyPatch.context() as patched, _around_updates(trainee, around):
            if not in_turns:
                patched.setattr(shared, "shared_order", one_by_one)
            for step in range(2):
                optimizer_step(trainee, step)
        return [one.master.detach().flatten().tolist() for one in matrices.fragments], order

    found = on_ranks(dict.fromkeys((True, False), (config, layout)), work)
    for (masters, order), (others, one_after_another) in zip(found[True], found[False], strict=True):
        assert len(masters) > 2
        assert masters == others
        assert order == found[True][0][1], "on this rank in another order"
        assert sorted(order) == sorted(one_after_another)
        changes, fewest = (sum(a != b for a, b in pairwise(one)) for one in (order, one_after_another))
        assert fewest == 2 * len(masters) - 1
        assert changes > 0.8 * len(order)


def test_what_travels_of_products_in_fp16_is_not_rounded_to_the_messages_bf16() -> None:
    """Squares are fp16 on GPUs (`optimizers.gram_form`). Relative to bf16, updates of masters differ from those in fp32
    by a factor of 0.15, and by 0.20 to 0.23 where squares are rounded to bf16 on the way."""
    precisions = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
    settings = (*SETTINGS, "model.num_query_groups=8")
    made = {dtype: resolve(*settings, f"train.precision={name}") for dtype, name in precisions.items()}
    plans = {dtype: planned(*run) for dtype, run in made.items()}

    def work(dtype: torch.dtype, world: World) -> list[list[float]]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(muon, "gram_dtype", lambda *_: dtype)
            trainee = assemble_trainee(made[dtype][0], world, plans[dtype])
            fragments = engine_of(trainee).matrices.fragments
            before = [one.master.detach().clone() for one in fragments]
            optimizer_step(trainee, 0)
            return [(one.master.detach() - old).flatten().tolist() for one, old in zip(fragments, before, strict=True)]

    found = on_ranks(made, work)
    exact, bf16, fp16 = ([torch.tensor(part) for rank in found[dtype] for part in rank] for dtype in precisions)
    assert len(exact) > 2
    for right, rough, fine in zip(exact, bf16, fp16, strict=True):
        assert (fine - right).norm() < 0.175 * (rough - right).norm()


def _steps(found: list[Faulted]) -> list[Weights]:
    model = resolve(*SETTINGS)[0].model
    return [assemble([rank.parts[step] for rank in found], model) for step in range(STEPS + 1)]


def _others_are_untouched(found: list[Weights], healthy: list[Weights], since: int) -> None:
    for step, (mine, clean) in enumerate(zip(found, healthy, strict=True)):
        changed = {name for name in clean if not torch.equal(clean[name], mine[name])}
        assert changed == ({NAME} if step >= since else set())


def test_a_momentum_that_is_no_number_on_one_rank_leaves_the_weight_on_all(faulted: dict[Fault, list[Faulted]]) -> None:
    found, healthy = faulted["nan"], _steps(faulted["none"])
    steps = _steps(found)
    _others_are_untouched(steps, healthy, since=2)
    assert torch.equal(steps[2][NAME], steps[1][NAME])
    # The third step makes a new momentum of its gradient alone, on both ranks.
    fresh = single_process(
        steps[2], resolve(*SETTINGS)[0], 1,
        lambda params: Muon(params, 0.01, weight_decay=0.1, precision="fp32"),
        gradient=lambda name, shape, step: noise(name, shape, step + 2),
    )  # fmt: skip
    assert (steps[3][NAME] - fresh[NAME]).abs().max() < 1e-4 * 0.01
    assert sum(rank.fallbacks[1] for rank in found) == 2, "not trusted, and then not finite"
    assert sum(rank.fallbacks[2] for rank in found) == 0
    assert [line for rank in found for line in rank.log if "not finite" in line and HIT in line]


def test_an_update_that_is_not_trusted_is_made_up_for_in_standard_form(faulted: dict[Fault, list[Faulted]]) -> None:
    """The same step makes the update again in standard form; weights differ by rounding: 1e-4 of a step, as for other
    kinds of Muon."""
    found, healthy = faulted["doubt"], _steps(faulted["none"])
    steps = _steps(found)
    _others_are_untouched(steps, healthy, since=2)
    for step in (2, 3, 4):
        assert (steps[step][NAME] - healthy[step][NAME]).abs().max() < 1e-4 * 0.01
    assert [sum(rank.fallbacks[step] for rank in found) for step in range(STEPS)] == [0, 1, 0, 0]
    (line,) = [line for rank in found for line in rank.log]
    assert line.startswith(f"{HIT}: ")


def test_on_a_device_it_is_left_out_and_the_next_are_made_in_standard_form(
    faulted: dict[Fault, list[Faulted]],
) -> None:
    found, healthy = faulted["doubt on a device"], _steps(faulted["none"])
    steps = _steps(found)
    # Its weight decays, as in every step.
    assert torch.equal(steps[2][NAME], steps[1][NAME] * (1 - 0.01 * 0.1))
    # The momentum is that of all three gradients: what follows is the healthy run's third step.
    moved, meant = steps[3][NAME] - steps[2][NAME] * (1 - 0.001), healthy[3][NAME] - healthy[2][NAME] * (1 - 0.001)
    assert (moved - meant).abs().max() < 1e-4 * 0.01
    assert [sum(rank.fallbacks[step] for rank in found) for step in range(STEPS)] == [0, 1, 0, 0]
    assert any(line.startswith(f"{HIT}: the last update was skipped") for rank in found for line in rank.log)


@pytest.mark.parametrize(("fault", "alone"), [("doubt", 2), ("doubt on a device", 2), ("marked", 1)])
def test_what_is_updated_alone_for_a_time_is_no_fallback_and_nobody_works_for_it_else(
    faulted: dict[Fault, list[Faulted]], fault: Fault, alone: int
) -> None:
    """Both ranks update it in standard form alone; then the Gram form is tried again."""
    found, healthy = faulted[fault], _steps(faulted["none"])
    most = sum(rank.worked[0] for rank in faulted["none"])
    assert most == 2
    worked = [sum(rank.worked[step] for rank in found) for step in range(STEPS)]
    assert worked == [0 if step == alone else most for step in range(STEPS)]
    assert sum(rank.fallbacks[step] for rank in found for step in range(alone, STEPS)) == 0
    if fault == "marked":
        steps = _steps(found)
        for step in (2, 3, 4):
            assert (steps[step][NAME] - healthy[step][NAME]).abs().max() < 1e-4 * 0.01
        _others_are_untouched(steps, healthy, since=2)
        assert not [line for rank in found for line in rank.log]


def test_when_a_rank_dies_between_two_exchanges_the_others_end_too() -> None:
    """The launcher then names it, as any rank that is killed (`tests/faults/test_processes.py`)."""
    config, layout = resolve(*SETTINGS)
    plan = planned(config, layout)

    def rank() -> None:
        trainee = build(config, layout, plan)
        begun: list[str] = []

        def around(name: str, running: Turns[bool]) -> Turns[bool]:
            begun.append(name)
            if len(begun) == 3 and trainee.world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return running

        with _around_updates(trainee, around):
            optimizer_step(trainee, 0)

    with pytest.raises(AssertionError, match=r"rank 0:\n(.*\n)+.*(closed|reset|Broken pipe|peer)"):
        run_ranks(layout.world_size, rank)
