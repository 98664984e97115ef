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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Device, Layout, RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, Problem, refuse
from canzona_cli.run import codec
from canzona_cli.run.files import write_json_atomic
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import OverRanks, Quartiles, Speedup

Machine = Mapping[str, str | int | float]


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
class TurnsResult:
    """The facts that results of a bench and of a tuning have in common."""

    VERSION: ClassVar[int] = 1

    recipe: str
    overrides: tuple[str, ...]
    optimizer: str
    device: Device
    profile: str
    """Name of the cluster profile the predictions rest on."""
    calibrated: bool
    machine: Machine
    """Processor, cores, torch, ranks, and the load average before the bench began."""
    rounds: int
    """Measured rounds."""
    notes: tuple[str, ...] = ()
    """Choices made for the user: splitting, sittings, what was left out and why."""

    @staticmethod
    def header(config: RunConfig, overrides: Sequence[str], machine: Machine) -> dict[str, Any]:
        """Returns the facts that are known before anything is measured, by field."""
        return {
            "recipe": config.name,
            "overrides": tuple(overrides),
            "optimizer": config.optimizer.name,
            "device": config.cluster.device,
            "profile": config.cluster.name,
            "calibrated": config.cluster.calibrated,
            "machine": machine,
        }


@dataclass(frozen=True, kw_only=True)
class BenchResult(TurnsResult):
    """One recipe and layout, all strategies."""

    layout: Layout
    steps_per_turn: int
    warm_up_rounds: int
    reference: AnyStrategy
    """The others are compared with it: canzona where it ran, otherwise the first strategy."""
    strategies: Mapping[str, StrategyBench]
    references: tuple[Measured, ...]
    """The reference, by sitting. `strategies[reference]` is the first."""
    arithmetic: str = ""
    """The compared forms of the update, where Megatron's own takes part and canzona has another one."""

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
            reason = (
                f"{reference} has a loss of {theirs:.5f} there, with the same initial weights and data: they differ by "
                f"{difference:.2%}, and rounding explains at most {tolerance:.1%}"
            )
            fix = "no speed-up is shown for strategies that compute different things; bench.json has the losses of "
            fix += "every step"
            yield Problem(key=f"{name}, step {step}", value=f"loss {mine:.5f}", reason=reason, fix=fix)
            return


_FIX = "write it again with `canzona bench ... --out FILE.json`"


def content_of(result: BenchResult) -> dict[str, object]:
    """Returns the figures to read, and under `result` everything they are computed from.

    A speed-up that must not be claimed is null; `withheld` gives the reason.
    """
    disagreeing = disagreements(result)
    ratios = {name: _claim(speedup, bool(disagreeing)) for name, speedup in _speedups(result)}
    over_adamw = _claim(result.overhead(result.reference) or "adamw did not take part", bool(disagreeing))
    withheld = {name: why for name, why in ratios.items() if isinstance(why, str)}
    if isinstance(over_adamw, str):
        withheld["overhead_over_adamw"] = over_adamw
        overhead = None
    else:
        overhead = {name: getattr(over_adamw, name) - 1 for name in ("median", "low", "high")}
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "optimizer": result.optimizer,
        "layout": asdict(result.layout),
        "machine": dict(result.machine),
        "arithmetic": result.arithmetic,
        "notes": list(result.notes),
        "reference": result.reference,
        "speedup": {name: None if isinstance(ratio, str) else asdict(ratio) for name, ratio in ratios.items()},
        "overhead_over_adamw": overhead,
        "withheld": withheld,
        "disagreements": [f"{problem.key}: {problem.value}; {problem.reason}" for problem in disagreeing],
        "strategies": {name: _measured(bench) for name, bench in result.strategies.items()},
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
    """Yields optimizer step and iteration of every other strategy over the reference's, or why it is missing."""
    for name in STRATEGIES:
        if name in ("adamw", result.reference):
            continue
        missing = next((note for note in result.notes if note.startswith(f"without {name}:")), "")
        for what, speedup in (("optimizer", result.optimizer_speedup), ("iteration", result.iteration_speedup)):
            there = name in result.strategies
            yield f"{what}_vs_{name}", speedup(name) if there else missing or f"{name} did not take part"


def _claim(speedup: Speedup | str, disagree: bool) -> Quartiles | str:
    """Returns the ratio, or why it must not be claimed."""
    if isinstance(speedup, str):
        return speedup
    if disagree:
        return "strategies disagree in their losses"
    return speedup.ratio if speedup.distinct else "the interquartile ranges of the two times overlap"


def _measured(bench: StrategyBench) -> Mapping[str, object]:
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
        "sitting": bench.sitting,
        "alone": bench.alone,
    }


def save(result: BenchResult, path: Path) -> None:
    """Write `content_of`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, content_of(result))


def load(path: Path) -> BenchResult:
    """Read back what `save` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of another version.
    """
    try:
        return codec.load(path, BenchResult, key="bench result", fix=_FIX, inside="result")
    except FileNotFoundError:
        raise ConfigError(Problem(key="bench result", value=path, reason="there is no such file", fix=_FIX)) from None
