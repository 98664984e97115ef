"""The result of `canzona bench`: measured and predicted values, for the reports and for `--json`; the samples that it
is computed from, and the files through which ranks and launcher communicate. Does not import torch.

Times are in seconds. A turn is a few consecutive training steps of one strategy; its first step is not
measured. The strategies take turns on the same batches, in one process group; a round is one turn of each.

Strategies that compute the same update must have the same losses; otherwise their times are not compared. All
strategies start from the same weights and see the same batches, so the losses of the first step, before any
update, differ only by the order of sums in the forward pass. After that, rounding makes bf16 runs diverge
slowly.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from canzona_cli.core.errors import CanzonaError, Problem, refuse
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import Device, Layout
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.breakdown import describes_machine
from canzona_cli.records.files import RunFiles, write_json_atomic
from canzona_cli.records.statistics import (
    NOT_SIGNIFICANT,
    OverRanks,
    Quartiles,
    Speedup,
    by_phase,
    load_balance,
    mean_phases,
)

Machine = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one strategy."""

    iteration_s: tuple[float, ...]
    """The seconds of a complete training step on the slowest rank, by round, averaged over the measured steps
    of the turn."""
    optimizer_s: tuple[float, ...]
    """The seconds from reduced gradients to the next forward pass, by round: exchange, matrix updates and
    AdamW's update on the slowest rank, plus norm, clip and the wait for gathered parameters on the rank that
    arrives last. The other ranks' times include waiting for that rank."""
    processor_s: tuple[float, ...]
    """The processor seconds of one step by round, summed over ranks. With more ranks than cores, they show
    the amount of work better than wall time does."""
    phases: Mapping[str, OverRanks]
    """The seconds of each phase of a step, and of each `_total`, by name in the breakdown."""
    load_balance: float
    """The time of matrix updates on the slowest rank relative to the mean of all ranks; 1.0 without
    updates."""
    losses: tuple[float, ...]
    """The loss of each training step, including warm-up steps."""
    tensor_bytes: tuple[int, ...]
    """The bytes of buffers, masters, optimizer state, messages and scratch memory, by rank. Activations are
    not included."""
    update_s: tuple[float, ...] = ()
    """The seconds of matrix updates in one step by rank, averaged over the measured steps; empty if not
    recorded."""

    @property
    def means(self) -> dict[str, float]:
        """The seconds of each phase, averaged over ranks."""
        return {name: over_ranks.mean_s for name, over_ranks in self.phases.items()}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The simulator's predictions of the measured quantities (`simulate.predict`)."""

    iteration_s: float
    optimizer_s: float
    phases: Mapping[str, float]
    """The seconds of each phase, averaged over ranks."""
    load_balance: float
    tensor_bytes: int | None
    """The predicted maximum of `Measured.tensor_bytes` over ranks; None without a plan."""
    memory_bytes: int
    """The memory of the rank that uses the most, including activations."""


@dataclass(frozen=True, kw_only=True)
class StrategyBench:
    """A strategy with its measurements and its prediction."""

    measured: Measured
    predicted: Predicted
    arithmetic: str = ""
    """A key that is equal for strategies that compute the same updates, so that their losses must agree."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The result of a bench: all strategies of one recipe on one layout."""

    VERSION: ClassVar[int] = 2

    recipe: str
    overrides: tuple[str, ...]
    optimizer: str
    device: Device
    profile: str
    """The name of the cluster profile that the predictions use."""
    calibrated: bool
    machine: Machine
    """The processor, cores, torch version, ranks, and the load average before the measurement started."""
    rounds: int
    """The number of measured rounds."""
    layout: Layout
    steps_per_turn: int
    warm_up_rounds: int
    reference: AnyStrategy
    """The strategy with which all other strategies are compared: canzona if it ran, otherwise the first."""
    strategies: Mapping[str, StrategyBench]
    arithmetic: str = ""
    """A sentence for the user about the forms of the update, if canzona's strategies are compared with
    Megatron's, which have only the standard form; otherwise empty."""
    notes: tuple[str, ...] = ()
    """The remarks for the user: settings that the bench chose, omitted strategies with the reasons, a busy
    machine."""

    @property
    def planned(self) -> bool:
        """True if reports show predictions next to measurements."""
        return describes_machine(self.device, calibrated=self.calibrated)

    def optimizer_speedup(self, strategy: str) -> Speedup:
        """Returns the ratio of a strategy's optimizer step to the reference's."""
        measured, reference = (self.strategies[name].measured for name in (strategy, self.reference))
        return Speedup.of(measured.optimizer_s, reference.optimizer_s)

    def iteration_speedup(self, strategy: str) -> Speedup:
        """Returns the ratio of a strategy's complete step to the reference's."""
        measured, reference = (self.strategies[name].measured for name in (strategy, self.reference))
        return Speedup.of(measured.iteration_s, reference.iteration_s)

    def overhead(self, strategy: str) -> Speedup | None:
        """Returns the ratio of a strategy's iteration to AdamW's; None for AdamW, or if AdamW was not
        measured."""
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        measured, adamw = (self.strategies[name].measured for name in (strategy, "adamw"))
        return Speedup.of(measured.iteration_s, adamw.iteration_s)

    def predicted_overhead(self, strategy: str) -> float | None:
        """Returns the predicted overhead of a strategy's iteration over AdamW's; 0.01 is 1%."""
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        bench, adamw = self.strategies[strategy], self.strategies["adamw"]
        return bench.predicted.iteration_s / adamw.predicted.iteration_s - 1

    def error(self, strategy: str) -> float:
        """Returns the relative error of the predicted optimizer step; 0.1 means 10% too long."""
        bench = self.strategies[strategy]
        return bench.predicted.optimizer_s / Quartiles.of(bench.measured.optimizer_s).median - 1

    def iteration_error(self, strategy: str) -> float:
        """Returns the relative error of the predicted iteration; 0.1 means 10% too long."""
        bench = self.strategies[strategy]
        return bench.predicted.iteration_s / Quartiles.of(bench.measured.iteration_s).median - 1


FIRST_STEP = 1e-3
"""The tolerance for the relative difference of losses in the first step. All measured differences were 0,
because strategies run the same forward pass."""
LATER_STEPS = 0.03
"""The tolerance for the relative difference of losses in later steps. Measured over 21 steps of qwen3-tiny in
bf16, with one sequence on each data-parallel rank: at most 0.002 with Muon, 0.005 with Shampoo, 0.011 with
SOAP. A learning rate that is 10% too high or too low gives 0.034 within 8 steps."""
COMPARED_STEPS = 30
"""The number of steps whose losses are compared. After more steps, rounding alone makes equal runs differ."""


class StrategiesDisagree(CanzonaError):
    """The error for strategies that compute the same update but had different losses. Their times must not be
    compared."""

    headline = "Strategies disagree"


def check_losses(result: BenchResult) -> None:
    """Checks that strategies that compute the same update had the same losses.

    Raises:
        StrategiesDisagree: losses differ. The error lists every strategy with different losses.
    """
    refuse(disagreements(result), StrategiesDisagree)


def disagreements(result: BenchResult) -> list[Problem]:
    """Returns a problem for each strategy whose losses differ from those of the strategy that it must match
    (`loss_references`), with the first step at which they differ."""
    problems: list[Problem] = []
    for name, counterpart in loss_references(result).items():
        losses, expected = (result.strategies[strategy].measured.losses for strategy in (name, counterpart))
        problems += _loss_problems(name, losses, counterpart, expected)
    return problems


def loss_references(result: BenchResult) -> dict[str, str]:
    """Returns, for each strategy, the strategy whose losses it must match.

    It is the reference if both compute the same updates, and otherwise the first strategy with the same
    updates, which may be the strategy itself. AdamW need only match itself.
    """
    reference_of: dict[str, str] = {result.strategies[result.reference].arithmetic: result.reference}
    return {
        name: name if name == "adamw" else reference_of.setdefault(bench.arithmetic, name)
        for name, bench in result.strategies.items()
    }


def _loss_problems(
    name: str, losses: tuple[float, ...], reference: str, expected: tuple[float, ...]
) -> Iterator[Problem]:
    """Yields a problem for the first step at which two strategies' losses differ by more than the
    tolerance."""
    for step, (loss, expected_loss) in enumerate(
        zip(losses[:COMPARED_STEPS], expected[:COMPARED_STEPS], strict=True), 1
    ):
        tolerance = FIRST_STEP if step == 1 else LATER_STEPS
        difference = abs(loss - expected_loss) / abs(expected_loss)
        if not difference <= tolerance:  # NaN also fails
            reason = (
                f"{reference} has loss {expected_loss:.5f} at this step, with the same initial weights and data: the "
                f"losses differ by {difference:.2%}, but rounding explains at most {tolerance:.1%}"
            )
            fix = "no speed-ups are shown, because the strategies compute different updates; bench.json has the losses "
            fix += "of every step"
            yield Problem(key=f"{name}, step {step}", value=f"loss {loss:.5f}", reason=reason, fix=fix)
            return


def content_of(result: BenchResult) -> dict[str, object]:
    """Returns the contents of bench.json: the figures, and under `result` the data that they are computed
    from.

    A speed-up that is not significant is null, and `withheld` has the reason. With too few rounds to judge that,
    a speed-up has its numbers, and its `distinct` is null.
    """
    disagreeing = disagreements(result)
    speedups = {name: _claim(speedup, bool(disagreeing)) for name, speedup in _speedups(result)}
    over_adamw = _claim(result.overhead(result.reference) or "adamw did not take part", bool(disagreeing))
    withheld = {name: reason for name, reason in speedups.items() if isinstance(reason, str)}
    if isinstance(over_adamw, str):
        withheld["overhead_over_adamw"] = over_adamw
        overhead = None
    else:
        changes = {name: getattr(over_adamw.ratio, name) - 1 for name in ("median", "low", "high")}
        overhead = {**changes, **_judgement(over_adamw)}
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "optimizer": result.optimizer,
        "layout": asdict(result.layout),
        "machine": dict(result.machine),
        "arithmetic": result.arithmetic,
        "notes": list(result.notes),
        "reference": result.reference,
        "speedup": {
            name: None if isinstance(speedup, str) else {**asdict(speedup.ratio), **_judgement(speedup)}
            for name, speedup in speedups.items()
        },
        "overhead_over_adamw": overhead,
        "withheld": withheld,
        "disagreements": [f"{problem.key}: {problem.value}; {problem.reason}" for problem in disagreeing],
        "strategies": {name: _measured_json(bench) for name, bench in result.strategies.items()},
        "predicted": {
            name: {
                **asdict(bench.predicted),
                "optimizer_error": result.error(name),
                "iteration_error": result.iteration_error(name),
            }
            for name, bench in result.strategies.items()
        },
        "result": asdict(result),
    }


def _speedups(result: BenchResult) -> Iterator[tuple[str, Speedup | str]]:
    """Yields the speed-ups of the reference over every other strategy except AdamW, or the reason why one is
    missing."""
    for name in STRATEGIES:
        if name in ("adamw", result.reference):
            continue
        note = next((note for note in result.notes if note.startswith(f"without {name}:")), "")
        for part, speedup in (("optimizer", result.optimizer_speedup), ("iteration", result.iteration_speedup)):
            took_part = name in result.strategies
            yield f"{part}_vs_{name}", speedup(name) if took_part else note or f"{name} did not take part"


def _judgement(speedup: Speedup) -> dict[str, bool | float | None]:
    """Returns the result of the test of a speed-up for bench.json; null if there are too few rounds."""
    return {"distinct": speedup.distinct, "p": speedup.p}


def _claim(speedup: Speedup | str, disagree: bool) -> Speedup | str:
    """Returns a speed-up, or the reason why it must not be shown."""
    if isinstance(speedup, str):
        return speedup
    if disagree:
        return "the strategies' losses disagree"
    return f"not significant: {NOT_SIGNIFICANT}, p = {speedup.p:.2f}" if speedup.distinct is False else speedup


def _measured_json(bench: StrategyBench) -> Mapping[str, object]:
    """Returns the measured figures of a strategy for bench.json."""
    measured = bench.measured
    iteration, optimizer = Quartiles.of(measured.iteration_s), Quartiles.of(measured.optimizer_s)
    return {
        "phases": measured.means,
        "iteration_s": iteration.median,
        "optimizer_s": optimizer.median,
        "processor_s": Quartiles.of(measured.processor_s).median,
        "loss": measured.losses[-1],
        "spread": {
            "iteration_s": {**asdict(iteration), "relative": iteration.relative},
            "optimizer_s": {**asdict(optimizer), "relative": optimizer.relative},
        },
        "load_balance": measured.load_balance,
        "tensor_bytes": max(measured.tensor_bytes),
    }


def save(result: BenchResult, path: Path) -> None:
    """Writes a result as bench.json; creates missing folders.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, content_of(result))


_UPDATING: tuple[str, ...] = ("exchange", "matrix_update", "adamw_update")
"""The phases of the optimizer step in which a rank works alone or communicates with its TP group only."""
_WAITING: tuple[str, ...] = ("norm_clip", "param_gather")
"""The phases in which early ranks wait for late ranks: for the end of the last backward pass, or for the last
rank's gathering in the next forward pass. The last rank waits only for the communication."""


@dataclass(frozen=True)
class BenchFiles:
    """The paths in a bench directory. The folder of its ranks is a run directory."""

    root: Path

    @property
    def result(self) -> Path:
        return self.root / "bench.json"

    def config(self, strategy: str) -> Path:
        return self.root / f"config-{strategy}.yaml"

    def plan(self, strategy: str) -> Path:
        """Returns the path of a strategy's plan; only canzona, paper and asc have one."""
        return self.root / f"plan-{strategy}.json"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a bench: its strategies, their order and the number of steps."""

    names: tuple[str, ...]
    """The names in the order of the first round. Each round starts one name later than the previous round."""
    rounds: int
    """The number of rounds, including warm-up rounds."""
    steps_per_turn: int

    def order(self, round_: int) -> Sequence[str]:
        """Returns the names in the order of their turns in a round."""
        shift = round_ % len(self.names)
        return (*self.names[shift:], *self.names[:shift])

    def write(self, files: RunFiles) -> None:
        write_json_atomic(files.root / "sitting.json", asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Turns":
        return parse(cls, (files.root / "sitting.json").read_bytes())


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """The seconds of one training step on one rank."""

    step_s: float
    processor_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The raw measurements of one strategy."""

    losses: tuple[float, ...]
    """The loss of each training step."""
    tensor_bytes: tuple[int, ...]
    """The bytes of tensors that stay allocated between steps, by rank."""
    ranks: tuple[tuple[StepSample, ...], ...]
    """The samples of all steps of all turns, by rank."""


def write_samples(files: RunFiles, samples: Mapping[str, Samples]) -> None:
    """Writes the samples by strategy. Only rank 0 calls this."""
    write_text_atomic(_samples_path(files), json.dumps({name: asdict(each) for name, each in samples.items()}) + "\n")


def read_samples(files: RunFiles) -> dict[str, Samples]:
    return parse(dict[str, Samples], _samples_path(files).read_bytes())


def summarise(samples: Samples, *, warm_up_rounds: int, steps_per_turn: int) -> Measured:
    """Summarises a strategy's samples, excluding warm-up rounds and the first steps of each turn.

    In the first step of a turn, parameters are already gathered and the caches contain another strategy's
    data.
    """
    steps = list(zip(*samples.ranks, strict=True))  # the samples of all ranks, by step
    first_steps = range(warm_up_rounds * steps_per_turn, len(samples.losses), steps_per_turn)
    turns = [steps[first + 1 : first + steps_per_turn] for first in first_steps]
    ranks = range(len(samples.ranks))
    phases = by_phase([mean_phases([step[rank].phases for turn in turns for step in turn]) for rank in ranks])
    updates = phases.get("matrix_update", [0.0 for _ in ranks])

    def by_round(seconds: Callable[[Sequence[StepSample]], float]) -> tuple[float, ...]:
        """Returns the mean of `seconds` over the steps of each turn."""
        return tuple(statistics.fmean(map(seconds, turn)) for turn in turns)

    return Measured(
        iteration_s=by_round(lambda step: max(sample.step_s for sample in step)),
        optimizer_s=by_round(_optimizer_s),
        processor_s=by_round(lambda step: sum(sample.processor_s for sample in step)),
        phases={name: OverRanks.of(times) for name, times in phases.items()},
        load_balance=load_balance(updates),
        losses=samples.losses,
        tensor_bytes=samples.tensor_bytes,
        update_s=tuple(updates),
    )


def _optimizer_s(step: Sequence[StepSample]) -> float:
    """Returns the seconds of the optimizer step: the slowest rank's total over the `_UPDATING` phases, plus
    each `_WAITING` phase's minimum over ranks."""
    updating_s = max(sum(sample.phases.get(name, 0.0) for name in _UPDATING) for sample in step)
    return updating_s + sum(min(sample.phases.get(name, 0.0) for sample in step) for name in _WAITING)


def _samples_path(files: RunFiles) -> Path:
    return files.root / "samples.json"
