"""The result of `canzona bench`, measured and predicted,
as values that reports lay out and `--json` writes. No torch.

Times are seconds. A turn is a few consecutive training steps of one strategy; its first step is not counted.
A round is one turn of every strategy of a sitting. A sitting is one process group in which strategies take
turns on the same batches; where not all fit into memory together there are several, each with the reference
strategy in it.

Strategies that compute the same update must learn the same: a fast wrong answer is not a result. All start
from the same weights and see the same batches, so the first losses, before any update, agree except for the
order of sums in the forward pass. After that bf16 runs drift apart slowly: an update that is rounded
differently changes a weight's last bit, and so the next loss a little.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Device, Layout
from canzona_cli.errors import CanzonaError, ConfigError, Problem, refuse
from canzona_cli.run import codec
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import OverRanks, Quartiles, Speedup
from canzona_cli.run.words import json_text


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One strategy in one sitting."""

    iteration_s: tuple[float, ...]
    """Seconds of a whole training step by round, on the slowest rank, mean over the turn's measured steps."""
    optimizer_s: tuple[float, ...]
    """Seconds by round, from reduced gradients to the next forward. Exchange, matrix update and AdamW's
    update are those of the slowest rank; norm and clip, and the wait for gathered parameters, those of the
    rank that reaches them last (the others wait for it there, which is not part of the optimizer step)."""
    processor_s: tuple[float, ...]
    """Processor seconds by round, all ranks together, in one step;
    with more ranks than cores it shows the work."""
    phases: Mapping[str, OverRanks]
    """The in-step phases and `_total`s, by the breakdown's names."""
    load_balance: float
    """Max over mean of the ranks' matrix updates; 1.0 where there are none."""
    losses: tuple[float, ...]
    """The loss of each training step, warm-up included; every strategy saw the same batches."""
    tensor_bytes: tuple[int, ...]
    """Bytes of each rank's buffers, masters, optimizer state, messages and scratch; no activations."""
    update_s: tuple[float, ...] = ()
    """Seconds of each rank's matrix updates in one step, mean over the measured steps;
    empty if not recorded."""

    @property
    def means(self) -> dict[str, float]:
        """Seconds by phase, mean over ranks; phases that this strategy does not have are left out."""
        return {name: over_ranks.mean_s for name, over_ranks in self.phases.items()}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction of the same (`simulate.predict`)."""

    iteration_s: float
    optimizer_s: float
    phases: Mapping[str, float]
    """Mean over ranks."""
    load_balance: float
    tensor_bytes: int | None
    """Predicted bytes of what `Measured.tensor_bytes` counts, on the fullest rank;
    None where there is no plan."""
    memory_bytes: int
    """Predicted bytes of the fullest rank, activations included."""


@dataclass(frozen=True, kw_only=True)
class StrategyBench:
    """One strategy, measured and predicted."""

    measured: Measured
    predicted: Predicted
    sitting: int
    """The number of the sitting it was measured in, from 0."""
    arithmetic: str = ""
    """Strategies with equal values compute the same updates, so their losses must agree."""
    alone: bool = False
    """It did not fit into memory together with the reference, so they did not take turns."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One recipe and layout, all strategies."""

    VERSION: ClassVar[int] = 1

    recipe: str
    overrides: tuple[str, ...]
    optimizer: str
    layout: Layout
    device: Device
    profile: str
    """Name of the cluster profile the predictions rest on."""
    calibrated: bool
    machine: Mapping[str, str | int | float]
    """Processor, cores, torch, ranks, and the load average before the bench began."""
    rounds: int
    steps_per_turn: int
    warm_up_rounds: int
    reference: AnyStrategy
    """The others are compared with it: canzona where it ran, otherwise the first strategy."""
    strategies: Mapping[str, StrategyBench]
    references: tuple[Measured, ...]
    """The reference, by sitting. `strategies[reference]` is the first."""
    arithmetic: str = ""
    """The compared forms of the update, where Megatron's own takes part and canzona has another one."""
    notes: tuple[str, ...] = ()
    """Choices made for the user: splitting, sittings, which strategies were left out and why."""

    def optimizer_speedup(self, strategy: str) -> Speedup:
        """Returns how many times longer the optimizer step of `strategy` is than the reference's in that sitting."""
        bench = self.strategies[strategy]
        return Speedup.of(bench.measured.optimizer_s, self.references[bench.sitting].optimizer_s)

    def iteration_speedup(self, strategy: str) -> Speedup:
        """Returns how many times longer its whole step is."""
        bench = self.strategies[strategy]
        return Speedup.of(bench.measured.iteration_s, self.references[bench.sitting].iteration_s)

    def overhead(self, strategy: str) -> Speedup | None:
        """Returns its iteration as a multiple of AdamW's;
        None for AdamW itself and where AdamW was not measured.

        Strategies of different sittings are compared through the reference, which takes part in every
        sitting.
        """
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        mine, adamw = self.strategies[strategy], self.strategies["adamw"]
        if strategy == self.reference or mine.sitting == adamw.sitting:
            reference = self.references[adamw.sitting] if strategy == self.reference else mine.measured
            return Speedup.of(reference.iteration_s, adamw.measured.iteration_s)
        by_mine, by_adamw = self.iteration_speedup(strategy).ratio, self.iteration_speedup("adamw").ratio
        return Speedup(
            ratio=Quartiles(
                low=by_mine.low / by_adamw.median,
                median=by_mine.median / by_adamw.median,
                high=by_mine.high / by_adamw.median,
            ),
            distinct=not by_mine.overlaps(by_adamw),
        )

    def predicted_overhead(self, strategy: str) -> float | None:
        """Returns by how much its predicted iteration is longer than AdamW's; 0.01 is one per cent."""
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        mine, adamw = self.strategies[strategy], self.strategies["adamw"]
        return mine.predicted.iteration_s / adamw.predicted.iteration_s - 1

    def error(self, strategy: str) -> float:
        """Predicted over measured optimizer step, less 1: 0.1 is a prediction 10% too long."""
        bench = self.strategies[strategy]
        return bench.predicted.optimizer_s / Quartiles.of(bench.measured.optimizer_s).median - 1

    def iteration_error(self, strategy: str) -> float:
        """The same for the whole step."""
        bench = self.strategies[strategy]
        return bench.predicted.iteration_s / Quartiles.of(bench.measured.iteration_s).median - 1


FIRST_STEP = 1e-3
"""Largest relative difference of the first losses. Measured: none,
as all strategies run the same forward pass."""
LATER = 0.03
"""The same for later steps. Measured over 21 steps of qwen3-tiny in bf16, one sequence on each data-parallel
rank: at most 0.002 with Muon, 0.005 with Shampoo, 0.011 with SOAP; a learning rate 10% off led to 0.034
within 8 steps."""
COMPARED = 30
"""The number of compared steps; later even runs that compute the same drift apart by rounding alone."""


class StrategiesDisagree(CanzonaError):
    """Strategies that compute the same update did not learn the same: their times must not be compared."""

    headline = "Strategies disagree"


def check_losses(result: BenchResult) -> None:
    """Refuse a result whose strategies have not learnt the same.

    Raises:
        StrategiesDisagree: with every strategy whose losses differ from those of its kin.
    """
    refuse(disagreements(result), StrategiesDisagree)


def disagreements(result: BenchResult) -> list[Problem]:
    """One problem for each strategy whose losses differ from those of its kin, naming the first such step."""
    problems: list[Problem] = []
    for number, reference in enumerate(result.references):
        name = f"{result.reference} in sitting {number + 1}"
        problems += _apart(name, reference.losses, result.reference, result.references[0].losses)
    for name, like in kin(result).items():
        mine, theirs = (result.strategies[one].measured.losses for one in (name, like))
        problems += _apart(name, mine, like, theirs)
    return problems


def kin(result: BenchResult) -> dict[str, str]:
    """Returns for each strategy the first that computes the same updates,
    whose losses it must match; or itself."""
    firsts: dict[str, str] = {result.strategies[result.reference].arithmetic: result.reference}
    return {
        name: name if name == "adamw" else firsts.setdefault(bench.arithmetic, name)  # adamw has another rule
        for name, bench in result.strategies.items()
    }


def _apart(name: str, losses: tuple[float, ...], reference: str, expected: tuple[float, ...]) -> Iterator[Problem]:
    for step, (mine, theirs) in enumerate(zip(losses[:COMPARED], expected[:COMPARED], strict=True), 1):
        tolerance = FIRST_STEP if step == 1 else LATER
        difference = abs(mine - theirs) / abs(theirs)
        if not difference <= tolerance:  # also true of a NaN
            yield Problem(
                key=f"{name}, step {step}",
                value=f"loss {mine:.5f}",
                reason=(
                    f"{reference} has a loss of {theirs:.5f} there, with the same initial weights and data: they "
                    f"differ by {difference:.2%}, and rounding explains at most {tolerance:.1%}"
                ),
                fix="no speed-up is shown for strategies that compute different things; bench.json has the losses of "
                "every step",
            )
            return


_FIX = "write it again with `canzona bench ... --out FILE.json`"
_DISAGREE = "strategies disagree in their losses"
_OVERLAP = "the interquartile ranges of the two times overlap"


def content_of(result: BenchResult) -> dict[str, object]:
    """The figures to read, and under `result` everything they are computed from.

    A speed-up that must not be claimed is null; `withheld` gives the reason.
    """
    speedups, withheld = _speedups(result)
    overhead: object = None
    over_adamw = result.overhead(result.reference)
    if over_adamw is None:
        withheld["overhead_over_adamw"] = "adamw did not take part"
    elif disagreements(result):
        withheld["overhead_over_adamw"] = _DISAGREE
    elif not over_adamw.distinct:
        withheld["overhead_over_adamw"] = _OVERLAP
    else:
        ratio = over_adamw.ratio
        overhead = {"median": ratio.median - 1, "low": ratio.low - 1, "high": ratio.high - 1}
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "optimizer": result.optimizer,
        "layout": asdict(result.layout),
        "machine": dict(result.machine),
        "arithmetic": result.arithmetic,
        "notes": list(result.notes),
        "reference": result.reference,
        "speedup": speedups,
        "overhead_over_adamw": overhead,
        "withheld": withheld,
        "disagreements": [f"{problem.key}: {problem.value}; {problem.reason}" for problem in disagreements(result)],
        "strategies": {name: _measured(result, name) for name in result.strategies},
        "predicted": {name: _predicted(result, name) for name in result.strategies},
        "result": asdict(result),
    }


def save(result: BenchResult, path: Path) -> None:
    """Write `content_of`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json_text(content_of(result)) + "\n")


def load(path: Path) -> BenchResult:
    """Read back what `save` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of another version.
    """
    try:
        return codec.load(path, BenchResult, key="bench result", fix=_FIX, inside="result")
    except FileNotFoundError:
        raise ConfigError(Problem(key="bench result", value=path, reason="there is no such file", fix=_FIX)) from None


def _speedups(result: BenchResult) -> tuple[dict[str, object], dict[str, str]]:
    """Optimizer step and iteration of every other strategy over the reference's;
    the reasons why some are missing."""
    speedups: dict[str, object] = {}
    withheld: dict[str, str] = {}
    disagree = bool(disagreements(result))
    for name in STRATEGIES:
        if name in ("adamw", result.reference):
            continue
        for what in ("optimizer", "iteration"):
            key = f"{what}_vs_{name}"
            speedups[key] = None
            if name not in result.strategies:
                withheld[key] = next(
                    (note for note in result.notes if note.startswith(f"without {name}:")), f"{name} did not take part"
                )
                continue
            speedup = result.optimizer_speedup(name) if what == "optimizer" else result.iteration_speedup(name)
            if disagree:
                withheld[key] = _DISAGREE
            elif not speedup.distinct:
                withheld[key] = _OVERLAP
            else:
                speedups[key] = asdict(speedup.ratio)
    return speedups, withheld


def _measured(result: BenchResult, name: str) -> Mapping[str, object]:
    bench = result.strategies[name]
    measured = bench.measured
    iteration, optimizer = Quartiles.of(measured.iteration_s), Quartiles.of(measured.optimizer_s)
    return {
        "phases": {phase: seconds.mean_s for phase, seconds in measured.phases.items()},
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
        "sitting": bench.sitting,
        "alone": bench.alone,
    }


def _predicted(result: BenchResult, name: str) -> Mapping[str, object]:
    return {
        **asdict(result.strategies[name].predicted),
        "optimizer_error": result.error(name),
        "iteration_error": result.iteration_error(name),
    }
