"""The places where Megatron-core's step is cut into phases: the names we wrap, and that the cuts fall where they
should.

The first half pins what `canzona_cli.core.megatron.instrument` takes for granted about Megatron-core 0.19.2; the second
half trains on two real ranks and looks at the phases.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.utils import get_model_config

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.holdings import leaves
from canzona_cli.core.megatron.instrument import _PHASE_OF_TIMER
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.timers import StepTiming
from canzona_cli.core.phases import IN_STEP, Phase
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import SMALL, Runs, build, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.samples import samples_of

STEPS = 3
LAYOUTS = {
    "dp2": ("parallel.tp=1", "parallel.pp=1"),
    "tp2": ("parallel.tp=2", "parallel.pp=1"),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
}
STRATEGIES = {
    "adamw": ("optimizer=adamw",),
    "sc": ("optimizer=muon", "engine.strategy=sc"),
    "layerwise": ("optimizer=muon", "engine.strategy=layerwise"),
    "canzona": ("optimizer=muon", "engine.strategy=canzona"),
}
MEGATRONS_OWN = [strategy for strategy in STRATEGIES if strategy != "canzona"]


def _resolve(layout: str, strategy: str, *overrides: str) -> tuple[RunConfig, Layout]:
    fixed = (*SMALL, "gpus=2", "train.batch_tokens=256", f"train.steps={STEPS}")
    return jobs.resolve(*fixed, *LAYOUTS[layout], *STRATEGIES[strategy], *overrides)


def _batches(trainee: Trainee) -> BatchStream:
    config, layout = trainee.setup, trainee.world.layout
    samples = samples_of(config, STEPS * layout.global_batch_size)
    return BatchStream(samples, trainee.world)


def _each[K, T](cases: Mapping[K, tuple[RunConfig, Layout]], work: Callable[[K, Trainee], T]) -> dict[K, list[T]]:
    """Returns the results of `work` with each case's trainee, on every rank."""
    plans = {case: planned(*made) for case, made in cases.items()}
    return on_ranks(cases, lambda case, world: work(case, assemble(cases[case][0], world, plans[case])))


# --- What we take for granted ---------------------------------------------------------------------------------------


def test_bucket_groups_and_optimizers_have_the_methods_and_handles_we_wrap() -> None:
    """`start_*_sync` leaves a handle of `Work`s behind, `finish_*_sync` takes it away; optimizers are chains, whose
    leaves have a torch optimizer."""

    def work(strategy: str, trainee: Trainee) -> list[tuple[str, bool]]:
        groups = trainee.chunks[0].bucket_groups
        assert len(groups) > 2, "DistributedDataParallel.bucket_groups: several buckets were asked for"
        for kind, handle in [
            ("grad", "grad_reduce_handle"),
            *([] if strategy == "sc" else [("param", "param_gather_handle")]),
        ]:
            group = groups[0]
            for method in (f"start_{kind}_sync", f"finish_{kind}_sync"):
                assert method in vars(group), f"{type(group).__name__}.{method} is not wrapped"
            assert getattr(group, handle) is None, f"{handle} is set before anything was started"
            group.is_first_batch = False
            getattr(group, f"start_{kind}_sync")()
            works = getattr(getattr(group, handle), "works", [getattr(group, handle)])
            assert works, f"{handle} holds no collective after start_{kind}_sync"
            for each in works:
                assert callable(each.wait), f"{handle} cannot be waited for"
                assert isinstance(each.is_completed(), bool), f"{handle} does not tell whether it has completed"
            getattr(group, f"finish_{kind}_sync")()
            assert getattr(group, handle) is None, f"finish_{kind}_sync left {handle} behind"
        if strategy == "canzona":
            return []
        assert isinstance(trainee.optimizer, ChainedOptimizer)
        assert trainee.optimizer.chained_optimizers, "ChainedOptimizer.chained_optimizers is empty"
        found = list(leaves(trainee.optimizer))
        for leaf in found:
            assert "step_with_ready_grads" in vars(leaf), f"{type(leaf).__name__}.step_with_ready_grads is not wrapped"
        return [(type(leaf.optimizer).__name__, isinstance(leaf.optimizer, OrthogonalizedOptimizer)) for leaf in found]

    ranks_by_strategy = _each({strategy: _resolve("dp2", strategy) for strategy in STRATEGIES}, work)
    for strategy in MEGATRONS_OWN:
        for found in ranks_by_strategy[strategy]:
            assert {flag for _, flag in found} == ({False} if strategy == "adamw" else {True, False})
            assert {name for name, orthogonalises in found if not orthogonalises} <= {"AdamW", "Adam"}


@dataclass
class TimerNames:
    """Stands where Megatron expects its timers and remembers what it was asked for."""

    started: set[str] = field(default_factory=set)

    def __call__(self, name: str, log_level: int = 0) -> "TimerNames":
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        self.started.add(self._name)

    def stop(self, barrier: bool = False) -> None: ...


def test_megatron_starts_exactly_the_timers_we_know() -> None:
    """A timer that is renamed would silently move its time into another phase; a new one may deserve a phase."""
    names: set[str] = set()
    for layout_name in ("dp2", "pp2"):
        config, layout = _resolve(layout_name, "adamw")

        def rank(config: RunConfig = config, layout: Layout = layout) -> set[str]:
            trainee = build(config, layout)
            timers = get_model_config(trainee.chunks[0]).timers = TimerNames()
            train_step(trainee, _batches(trainee))
            return timers.started

        names |= set().union(*run_ranks(2, rank))
    outside_every_phase = {
        "forward-backward",  # the whole schedule
        "conditional-embedder-grads-all-reduce",  # diffusion models
    }
    assert set(_PHASE_OF_TIMER) - names == set(), "Megatron no longer starts these timers"
    assert names - set(_PHASE_OF_TIMER) - outside_every_phase == set(), "Megatron starts timers that we do not know"


@pytest.mark.parametrize(
    ("mode", "collectives"), [("duplicated", ["all_gather"]), ("distributed", ["all_reduce"] * (1 + 5))]
)
def test_newton_schulz_communicates_through_functions_of_torch_distributed(mode: str, collectives: list[str]) -> None:
    """`exchange` is timed there: any other collective would be counted as matrix update. The simulator counts them too:
    a norm, and a square in each of five steps."""
    config, layout = _resolve("tp2", "sc")

    def rank() -> int:
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp

        trainee = build(config, layout)
        calls: list[str] = []
        gather = torch.distributed.all_gather
        for name in dir(torch.distributed):
            original: object = getattr(torch.distributed, name)
            if callable(original) and name.startswith(("all_", "reduce", "broadcast", "gather", "scatter")):
                setattr(torch.distributed, name, _recording(calls, name, original))
        newton_schulz_tp(torch.ones(4, 8), 5, "quintic", trainee.world.groups.tp, 1, mode)
        assert gather is not torch.distributed.all_gather
        assert calls == collectives, f"newton_schulz_tp communicates by {calls}"
        return len(calls)

    assert run_ranks(2, rank) == [len(collectives)] * 2


def _recording(calls: list[str], name: str, original: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    return call


# --- Where the cuts fall --------------------------------------------------------------------------------------------


def _expected(layout: str, strategy: str) -> set[str]:
    phases: set[str] = {"data", "forward", "backward", "grad_reduce", "norm_clip", "adamw_update", "other"}
    if strategy != "adamw":
        phases |= {"matrix_update"} | ({"exchange"} if layout == "tp2" else set())
    if strategy != "sc":
        phases |= {"param_gather"}
    if layout == "pp2":
        phases |= {"pipeline"}
    return phases


def _steps(case: object, trainee: Trainee) -> list[StepTiming]:
    batches = _batches(trainee)
    for _ in range(STEPS):
        train_step(trainee, batches)
    return trainee.timer.timings()


def _phases(cases: Sequence[tuple[str, str]]) -> list[list[list[StepTiming]]]:
    return [*_each({strategy: _resolve(layout, strategy) for layout, strategy in cases}, _steps).values()]


PHASES = Runs([(layout, strategy) for layout in LAYOUTS for strategy in STRATEGIES], lambda case: case[0], _phases)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_phases_of_a_real_step(layout_name: str, strategy: str) -> None:
    """They add up to the step; exactly those of the strategy occur; what is exposed is part of the total."""
    expected = _expected(layout_name, strategy)
    for timings in PHASES[layout_name, strategy]:
        assert len(timings) == STEPS
        for timing in timings[1:]:
            in_step = {name: timing.phases[name] for name in IN_STEP if name in timing.phases}
            assert set(in_step) == expected
            assert min(in_step.values()) > 0
            assert sum(in_step.values()) == pytest.approx(timing.step_s, abs=1e-6)
            for phase in expected & {"grad_reduce", "param_gather", "exchange"}:
                total = timing.phases[f"{phase}_total"]
                # A transfer may land during the next step's forward, so the step is no bound from above, but of
                # exchanges, which begin and end within one step.
                assert timing.phases[phase] <= total + 1e-9, phase
                assert total < timing.step_s or phase != "exchange"
            assert {name for name in timing.phases if name.endswith("_total")} == {
                f"{phase}_total" for phase in expected & {"grad_reduce", "param_gather", "exchange"}
            }


def test_squares_that_tp_ranks_sum_are_exchanges() -> None:
    """Matrix updates wait for all-reduces in Megatron's mode `distributed`."""
    config, layout = _resolve("tp2", "sc", "engine.muon_tp_mode=distributed")
    for timings in _each({"": (config, layout)}, _steps)[""]:
        for timing in timings:
            assert timing.phases["exchange"] > 0
            assert timing.phases["matrix_update"] > 0


def test_without_overlap_the_step_waits_for_every_transfer_to_its_end() -> None:
    """Then exposed and total are the same; with overlap, transfers run beside the step, and a part may be hidden."""

    def resolved(flag: str) -> tuple[RunConfig, Layout]:
        settings = (f"parallel.overlap_grad_reduce={flag}", f"parallel.overlap_param_gather={flag}")
        return _resolve("dp2", "adamw", *settings)

    def work(case: object, trainee: Trainee) -> tuple[list[StepTiming], list[set[str]]]:
        timings = _steps(case, trainee)
        return timings, [{each.name for each in line.transfers} for line in trainee.timer.timelines()]

    for overlap, ranks in _each({True: resolved("true"), False: resolved("false")}, work).items():
        for timings, beside in ranks:
            for phase in ("grad_reduce", "param_gather"):
                exposed = sum(timing.phases[phase] for timing in timings[1:])
                total = sum(timing.phases[f"{phase}_total"] for timing in timings[1:])
                assert {phase in transfers for transfers in beside} == {overlap}, phase
                assert total == pytest.approx(exposed, abs=1e-9) or (overlap and total > exposed)
                # A gathering of weights may land before its start returns, on a busy machine. A reduction of
                # gradients ends no earlier than the wait for it.
                assert total > exposed or not overlap or phase == "param_gather", (phase, exposed, total)


Place = Literal["before forward", "before backward", "before the update"]


class _Late(Iterator[Batch]):
    """Batches that come late."""

    def __init__(self, batches: Iterator[Batch], delay_s: float) -> None:
        self._batches, self._delay_s = batches, delay_s

    def __next__(self) -> Batch:
        time.sleep(self._delay_s)
        return next(self._batches)


def _delay(trainee: Trainee, batches: Iterator[Batch], place: Place, delay_s: float) -> Iterator[Batch]:
    """Make this rank late at `place` in every step (in every micro-batch, where a step has several)."""
    if place == "before forward":
        return _Late(batches, delay_s)
    if place == "before backward":
        trainee.chunks[0].register_forward_hook(lambda *_: time.sleep(delay_s))
    else:
        (muon,) = (leaf for leaf in leaves(trainee.optimizer) if isinstance(leaf.optimizer, OrthogonalizedOptimizer))
        muon.optimizer.register_step_pre_hook(lambda *_: time.sleep(delay_s))
    return batches


@dataclass(frozen=True, kw_only=True)
class Late:
    """A rank that is late at a place, and the phase in which the other one waits for it."""

    strategy: str
    rank: int
    place: Place
    waits_in: Phase


LATE = {
    "dp2": {
        "parameters gathered": Late(strategy="adamw", rank=1, place="before forward", waits_in="param_gather"),
        "gradients reduced": Late(strategy="sc", rank=1, place="before backward", waits_in="grad_reduce"),
    },
    "pp2": {
        "activations sent": Late(strategy="sc", rank=0, place="before forward", waits_in="pipeline"),
        "gradients sent back": Late(strategy="sc", rank=1, place="before forward", waits_in="pipeline"),
    },
    "tp2": {"fragments exchanged": Late(strategy="sc", rank=1, place="before the update", waits_in="exchange")},
}


@pytest.mark.parametrize("layout_name", LATE)
def test_a_late_rank_makes_the_other_one_wait_where_it_says(layout_name: str) -> None:
    """The delay appears as exposed waiting on the punctual rank and not on the late one.

    It is several times what a step takes on this machine, however busy, as the step before has shown.
    """

    def work(what: str, trainee: Trainee) -> tuple[StepTiming, float]:
        one, batches = LATE[layout_name][what], iter(_batches(trainee))
        train_step(trainee, batches)
        # Steps of ranks that have trained before are short, and other processes may have their turn meanwhile.
        delay_s = max(1.2, 5 * trainee.timer.timings()[-1].step_s)
        if trainee.world.rank == one.rank:
            batches = _delay(trainee, batches, one.place, delay_s)
        train_step(trainee, batches)
        return trainee.timer.timings()[-1], delay_s

    # As few micro-batches as the layout allows: nothing else to do while the other rank is late.
    few = ("train.global_batch_size=2", "train.micro_batch_size=1")
    cases = {what: _resolve(layout_name, one.strategy, *few) for what, one in LATE[layout_name].items()}
    for what, ranks in _each(cases, work).items():
        one = LATE[layout_name][what]
        (punctual, _), (late, delay_s) = ranks[1 - one.rank], ranks[one.rank]
        assert punctual.phases[one.waits_in] > delay_s / 2, (what, punctual, late)
        assert punctual.phases[one.waits_in] > late.phases[one.waits_in] + delay_s / 4, what
