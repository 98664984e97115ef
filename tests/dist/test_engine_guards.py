"""Values that are not finite stay out of the weights, on every rank alike, and are reported by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.canzona_optimizer import NonFiniteGradients
from canzona_cli.core.engine.hosted import HostedGroup, gather_masters
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.engine.wire import Wiring
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble as assemble_trainee
from canzona_cli.training.step import StepResult, train_step
from tests.dist.engine_support import (
    SMALL_GROUPS,
    Digests,
    batches,
    custom,
    engine_of,
    heard,
    kept,
    parameter,
    poisoned,
    resolve,
    weights,
)
from tests.dist.jobs import EXPERTS, Runs, build, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import optimizer_step, whole_gradients
from tests.dist.whole import Part, Weights, assemble, part_of

LAYOUTS = {
    "tp2 dp2": ("gpus=4", "parallel.tp=2", "parallel.pp=1", "train.micro_batch_size=4"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=4"),
    "tp1 dp4": ("gpus=4", "parallel.tp=1", "parallel.pp=1"),
    "tp2 ep4": ("gpus=4", "parallel.tp=2", "parallel.ep=4", *EXPERTS, "train.micro_batch_size=4"),
    "tp2 ep2": ("gpus=4", "parallel.tp=2", "parallel.ep=2", *EXPERTS, "train.micro_batch_size=4"),
}
FC1, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.pre_mlp_layernorm.weight"
EXPERT = "decoder.layers.1.mlp.experts.linear_fc2.weight3"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """One rank around a step that was refused."""

    told: str
    exit_code: int
    before: tuple[Digests, Digests]
    after: tuple[Digests, Digests]


OVERFLOWING = 1e30
"""Finite, and its square is not: the norm overflows, and no parameter is to blame."""
Bad = tuple[str, str, float, int]
"""A layout, the parameter whose gradient has one bad element there, that element, and the rank that has it."""
BAD: list[Bad] = [
    ("tp2 dp2", FC1, float("nan"), 3),
    ("tp2 dp2", FC1, float("inf"), 0),
    ("tp1 dp4", EMBEDDING, float("-inf"), 2),
    # The last stage: its only layer is the model's second.
    ("tp2 pp2", FC1, float("nan"), 3),
    # Every tensor-parallel rank has all of it, and only the first one's counts in the norm.
    ("tp2 dp2", NORM, float("nan"), 1),
    ("tp2 dp2", FC1, OVERFLOWING, 3),
    # No other rank has the expert.
    ("tp2 ep4", EXPERT, float("nan"), 3),
]


def _stopped(cases: Sequence[Bad]) -> list[list[Stopped]]:
    config, layout = resolve("optimizer=soap", *LAYOUTS[cases[0][0]])
    plan = planned(config, layout)

    def work(_: str, world: World) -> list[Stopped]:
        """Steps that are refused one after another, as each leaves everything as it was."""
        trainee = assemble_trainee(config, world, plan)
        stream = batches(trainee)
        train_step(trainee, stream)
        _wait(trainee)
        before, found = (weights(trainee), kept(trainee)), []
        for _, name, value, culprit in cases:
            target = parameter(trainee, name) if world.rank == culprit else None
            with pytest.raises(NonFiniteGradients) as caught, poisoned(target, value):
                train_step(trainee, stream)
            now = weights(trainee), kept(trainee)
            found.append(Stopped(told=str(caught.value), exit_code=caught.value.exit_code, before=before, after=now))
        return found

    return [[*ranks] for ranks in zip(*on_ranks({"": (config, layout)}, work)[""], strict=True)]


STOPPED = Runs(BAD, lambda case: case[0], _stopped)


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(map(str, case)))
def test_one_bad_element_stops_all_ranks_before_anything_changes(case: Bad) -> None:
    for stopped in STOPPED[case]:
        assert stopped.after == stopped.before
        assert any("exp_avg_sq" in key for key in stopped.before[1]), "there was no state to protect"
        blamed = "their global norm overflows fp32" if case[2] == OVERFLOWING else f"the first is {case[1]}"
        assert blamed in stopped.told
        assert stopped.exit_code == 70


def test_a_skipped_step_leaves_no_trace() -> None:
    """Good, bad, good is bitwise good, good; forward passes in between see whole parameters."""
    made = resolve("optimizer=shampoo", "train.non_finite=skip", *LAYOUTS["tp2 ep4"])
    plan = planned(*made)

    def work(bad: int | None, world: World) -> tuple[list[StepResult], tuple[Digests, Digests], int, bool]:
        trainee = assemble_trainee(made[0], world, plan)
        per_step = world.layout.num_microbatches
        good = [next(stream) for stream in [batches(trainee)] for _ in range(2 * per_step)]
        done, results, unchanged = 0, [], True
        for step in range(2 if bad is None else 3):
            data = iter(good[per_step * done : per_step * (done + 1)])
            target = parameter(trainee, EXPERT) if step == bad and world.rank == 3 else None
            _wait(trainee)
            before = weights(trainee), kept(trainee)
            with poisoned(target, float("nan")):
                results.append(train_step(trainee, data))
            if step == bad:
                unchanged = before == (weights(trainee), kept(trainee))
            else:
                done += 1
        _wait(trainee)
        return results, (weights(trainee), kept(trainee)), engine_of(trainee).skipped, unchanged

    found = on_ranks(dict.fromkeys((None, 1), made), work)
    for (clean, end, _, _), (results, last, skipped, unchanged) in zip(found[None], found[1], strict=True):
        assert [result.skipped for result in results] == [False, True, False]
        assert skipped == 1
        assert unchanged
        assert last == end
        assert [result.loss for result in results if not result.skipped] == [result.loss for result in clean]
        # The refused batch and the one after the skip are the same one, from the same weights.
        assert results[1].loss == results[2].loss


FAULTY = """
import torch

class Faulty(torch.optim.Optimizer):
    faults: dict = {}  # parameter -> the update of it, counted from 1, that goes wrong
    done: dict = {}

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average, alpha=group["lr"])
                Faulty.done[p] = Faulty.done.get(p, 0) + 1
                if Faulty.faults.get(p) == Faulty.done[p]:
                    p[-1, -1] = float("nan")
"""
# The first two are of one owner's first and last group; a later group's message lies over the first one's.
HITS = {
    "layers.0.proj": "model.layers.0.self_attn.o_proj.weight",
    "layers.1.down": "model.layers.1.mlp.down_proj.weight",
    "layers.1.q": "model.layers.1.self_attn.q_proj.weight",
    "layers.0.experts.1.gate": "model.layers.0.mlp.experts.1.gate_proj.weight",
    "layers.1.experts.2.down": "model.layers.1.mlp.experts.2.down_proj.weight",
}
OF_EXPERTS = tuple(name for name in HITS if "experts" in name)
OF_DENSE = tuple(name for name in HITS if name not in OF_EXPERTS)


@dataclass(frozen=True, kw_only=True)
class Faulted:
    """One rank of a run in which some matrices' second update is not finite."""

    parts: list[Part]
    """The weights after each step."""
    fallbacks: list[int]
    averages: list[dict[str, float]]
    """Largest moment of each matrix hosted here, after each step."""
    log: list[str]
    groups: int


Hit = tuple[str, tuple[str, ...], bool]
"""A layout, the matrices that are hit, and whether the host may look whether an update was finite."""
HIT: list[Hit] = [
    ("tp2 dp2", ("layers.0.proj",), True),
    ("tp2 dp2", OF_DENSE, False),
    # Two ranks have each expert, of which one updates it; the others' experts are on other ranks.
    *(("tp2 ep2", (*OF_EXPERTS, "layers.1.q"), on_host) for on_host in (True, False)),
]


def _unhit(where: str) -> Hit:
    return where, (), True


def _faulted(source: Path, cases: Sequence[Hit]) -> list[list[Faulted]]:
    config, layout = _faulty(source, cases[0][0])
    plan = planned(config, layout)

    def work(case: Hit, world: World) -> Faulted:
        _, hit, on_host = case
        trainee = assemble_trainee(config, world, plan)
        matrices = engine_of(trainee).matrices
        _break(trainee, hit)
        for group in matrices.groups:
            assert isinstance(group, HostedGroup)
            group._on_host = on_host
        parts, fallbacks, averages = [part_of(trainee.chunks, world)], [], []
        with heard("canzona_cli") as log:
            for step in range(4):
                optimizer_step(trainee, step)
                fallbacks.append(int(matrices.fallbacks()))
                parts.append(part_of(trainee.chunks, world))
                averages.append(_averages(trainee))
        return Faulted(parts=parts, fallbacks=fallbacks, averages=averages, log=log, groups=len(matrices.groups))

    return [*on_ranks(dict.fromkeys(cases, (config, layout)), work).values()]


def _averages(trainee: Trainee) -> dict[str, float]:
    matrices = engine_of(trainee).matrices
    found = {}
    for group in matrices.groups:
        assert group.optimizer is not None or not group.hosted
        for matrix in group.hosted:
            state = group.optimizer.state[matrices.masters[matrix.index]]  # type: ignore[union-attr]
            found[matrix.name] = float(state["average"].abs().max())
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "faulty.py"
    file.write_text(FAULTY)
    return file


def _faulty(source: Path, where: str) -> tuple[RunConfig, Layout]:
    config, layout = resolve("optimizer.clip_grad=0", *SMALL_GROUPS, *LAYOUTS[where])
    return custom(config, source, "Faulty"), layout


@pytest.fixture(scope="module")
def faulty_run(source: Path) -> tuple[RunConfig, Layout]:
    return _faulty(source, "tp2 dp2")


@pytest.fixture(scope="module")
def faulted(source: Path) -> Runs[Hit, list[Faulted]]:
    return Runs([*map(_unhit, ("tp2 dp2", "tp2 ep2")), *HIT], lambda case: case[0], partial(_faulted, source))


@pytest.mark.parametrize(
    "case", HIT, ids=lambda case: f"{case[0]} {'branch' if case[2] else 'where'} {' '.join(case[1])}"
)
def test_an_update_that_is_not_finite_is_left_out(source: Path, faulted: Runs[Hit, list[Faulted]], case: Hit) -> None:
    where, hit, _ = case
    config, _ = _faulty(source, where)
    found = faulted[case]
    healthy = [assemble([rank.parts[step] for rank in faulted[_unhit(where)]], config.model) for step in range(5)]
    # Experts are one group, besides those of dense matrices.
    least = 2 if where == "tp2 ep2" else 3
    assert all(rank.groups >= least for rank in found), "messages share no memory: less is tested than meant"
    # `assemble` asserts that all ranks agree, after every step.
    steps = [assemble([rank.parts[step] for rank in found], config.model) for step in range(5)]
    names = {HITS[name] for name in hit}
    for step, clean in enumerate(healthy):
        assert {name for name in clean if not torch.equal(clean[name], steps[step][name])} == (
            names if step >= 2 else set()
        )
    for name in names:
        assert torch.equal(steps[2][name], steps[1][name])
        assert torch.equal(steps[3][name], _one_fresh_update(config, steps[2], name, step=2))
        assert bool(steps[4][name].isfinite().all())
    assert [sum(rank.fallbacks[step] for rank in found) for step in range(4)] == [0, len(hit), 0, 0]
    said = [line for rank in found for line in rank.log]
    assert sorted(line.split()[0] for line in said) == sorted(hit)
    assert all("not finite" in line for line in said)


def _one_fresh_update(config: RunConfig, start: Weights, name: str, step: int) -> torch.Tensor:
    """Returns Faulty's update of a bf16 weight without any state."""
    lr, decay = config.optimizer.lr, config.optimizer.weight_decay
    gradient = whole_gradients(start, config.model, step)[name]
    return start[name].clone().mul_(1 - lr * decay).sub_(gradient, alpha=lr).bfloat16().float()


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """One rank of a run in which an update of a matrix at home went wrong, and others'."""

    owner: int
    silent: list[str]
    """The broken matrix among those hosted here whose flag is not sent to other ranks."""
    broken: list[str]
    """Hosted here."""
    repaired: list[list[str]]
    """The matrices of each repair."""
    left: int
    """Fallbacks after the last step."""


def test_tensor_parallel_ranks_repair_the_same_matrices_also_where_no_flag_travelled(
    faulty_run: tuple[RunConfig, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads lie whole on one rank each: groups of heads that are updated at home exchange nothing, flags included."""
    config, layout = faulty_run
    config = replace(config, engine=replace(config.engine, splitting="per_head"))
    plan = make_plan(config.setup, layout)
    single = [(group, index) for group in plan.groups for index in group.matrices]
    alone = replace(
        plan, groups=tuple(replace(group, matrices=(index,), index=n) for n, (group, index) in enumerate(single))
    )

    def rank() -> Repaired:
        trainee = build(config, layout, alone)
        matrices = engine_of(trainee).matrices
        assert isinstance(matrices, PlannedOptimizer)
        quiet = [group for group in matrices.groups if not group._weights.route.travels]
        silent = [matrix.name for group in quiet for matrix in group.hosted][:1]
        hit = (*silent, "layers.0.proj", "layers.1.down")
        _break(trainee, hit)
        repaired: list[list[str]] = []

        def gathering(wiring: Wiring, hosts: Mapping[int, int], broken: Sequence[Matrix]) -> None:
            repaired.append(sorted(matrix.name for matrix in broken))
            gather_masters(wiring, hosts, broken)

        monkeypatch.setattr("canzona_cli.core.engine.planned.gather_masters", gathering)
        for step in range(3):
            optimizer_step(trainee, step)
        return Repaired(
            owner=trainee.world.owner,
            silent=silent,
            broken=[matrix.name for group in matrices.groups for matrix in group.hosted if matrix.name in hit],
            repaired=repaired,
            left=int(matrices.fallbacks()),
        )

    found = run_ranks(layout.world_size, rank)
    assert any(rank.silent for rank in found), "no matrix is updated where it lies: nothing is tested"
    for owner in (0, 1):
        members = [rank for rank in found if rank.owner == owner]
        broken = sorted(name for rank in members for name in rank.broken)
        assert broken
        assert [rank.repaired for rank in members] == [[broken]] * 2
    assert all(rank.left == 0 for rank in found)


def test_a_fault_is_counted_once_also_when_the_next_step_is_skipped(faulty_run: tuple[RunConfig, Layout]) -> None:
    config, layout = faulty_run
    config = replace(config, train=replace(config.train, non_finite="skip"))
    plan = planned(config, layout)

    def rank() -> list[StepResult]:
        trainee = build(config, layout, plan)
        _break(trainee, ("layers.1.down",))
        stream = batches(trainee)
        results = [train_step(trainee, stream) for _ in range(2)]
        target = parameter(trainee, FC1) if trainee.world.rank == 0 else None
        with poisoned(target, float("nan")):
            results.append(train_step(trainee, stream))
        return [*results, train_step(trainee, stream)]

    for results in run_ranks(layout.world_size, rank):
        # Each step hears of the one before.
        assert [result.fallbacks for result in results] == [0, 0, 1, 0]
        assert [result.skipped for result in results] == [False, False, True, False]
        assert all(math.isfinite(result.loss) for result in results)


def test_a_failed_decomposition_is_counted_named_and_survived() -> None:
    """LAPACK gives up on every factor at step 3, a refresh: in fp32 and in fp64."""
    config, layout = resolve(
        "optimizer=shampoo", "optimizer.precondition_frequency=2", "optimizer.stagger=false", *LAYOUTS["tp2 dp2"]
    )

    plan = planned(config, layout)

    def give_up(matrix: torch.Tensor) -> object:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")  # type: ignore[attr-defined]

    def rank() -> tuple[list[StepResult], list[str], list[str], object]:
        trainee = build(config, layout, plan)
        matrices = engine_of(trainee).matrices
        stream = batches(trainee)
        results = [train_step(trainee, stream) for _ in range(2)]
        before = kept(trainee)
        with heard("canzona_cli") as log, pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.linalg, "eigh", give_up)
            results.append(train_step(trainee, stream))
        after = kept(trainee)
        roots = [before[key] == after[key] for key in before if ".root_" in key]
        factors = [before[key] == after[key] for key in before if key.endswith((".L", ".R"))]
        results += [train_step(trainee, stream) for _ in range(2)]
        hosted = [matrix.name for group in matrices.groups for matrix in group.hosted]
        return results, log, hosted, roots and all(roots) and factors and not any(factors)

    found = run_ranks(layout.world_size, rank)
    everything = sorted(name for _, _, hosted, _ in found for name in hosted)
    assert len(everything) == 2 * 7
    for results, log, hosted, same in found:
        # Both sides of every matrix, heard of a step later; and none at the next refresh.
        assert [result.fallbacks for result in results] == [0, 0, 0, 2 * len(everything), 0]
        assert sorted(line.split(":")[0] for line in log) == sorted(hosted * 2)
        assert all("the previous one is kept" in line for line in log)
        assert same, "roots changed, or factors did not"
        assert all(math.isfinite(result.loss) for result in results)


def _break(trainee: Trainee, hit: tuple[str, ...]) -> None:
    matrices = engine_of(trainee).matrices
    for group in matrices.groups:
        faults: dict[torch.Tensor, int] = getattr(type(group.optimizer), "faults", {})
        faults |= {matrices.masters[matrix.index]: 2 for matrix in group.hosted if matrix.name in hit}


def _wait(trainee: Trainee) -> None:
    """Waits until this rank has all its parameters."""
    if trainee.chunks[0].ddp_config.overlap_param_gather:
        for group in reversed(trainee.chunks[0].bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)
