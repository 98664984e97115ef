"""The places where Megatron-core's step is cut into phases: the names we wrap, and that the cuts fall where they
should.

The first half pins what `canzona_cli.core.megatron.instrument` takes for granted about Megatron-core 0.19.2; the second
half trains on two real ranks and looks at the phases.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from megatron.core.utils import get_model_config

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.instrument import _PHASE_OF_TIMER
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.timers import StepTiming
from canzona_cli.core.phases import IN_STEP
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import SMALL, Runs, build, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.samples import samples_of

STEPS = 2
LAYOUTS = {
    "dp2": ("parallel.tp=1", "parallel.pp=1", "model.num_layers=1"),
    "tp2": ("parallel.tp=2", "parallel.pp=1", "model.num_layers=1"),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
}
STRATEGIES = {
    "adamw": ("optimizer=adamw",),
    "sc": ("optimizer=muon", "engine.strategy=sc"),
    "layerwise": ("optimizer=muon", "engine.strategy=layerwise"),
    "canzona": ("optimizer=muon", "engine.strategy=canzona"),
}


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


CASES = [("pp2", "canzona"), *((layout, strategy) for layout in ("dp2", "tp2") for strategy in STRATEGIES)]
"""Whatever the strategy, stages add one phase."""
PHASES = Runs(CASES, lambda case: case[0], _phases)


@pytest.mark.parametrize(("layout_name", "strategy"), CASES)
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
