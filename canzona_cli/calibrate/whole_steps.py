"""Whole steps compared with the sum of their parts: the last part of a calibration. No torch.

A loop over one operation has warm caches, memory that was used a moment ago and ranks that arrive together; a
training step has none of these. So two short benches run on the profile just measured, one with data-parallel
ranks and one with pairs of tensor-parallel ones, with as many ranks as the run has, at most twice as many as
there are cores. The measured time of each phase over its predicted time becomes a factor of the profile.
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from canzona_cli.bench.launching import Say
from canzona_cli.bench.results import BenchResult, StrategyBench
from canzona_cli.bench.session import prepare, run
from canzona_cli.calibrate.calibrate import Calibration
from canzona_cli.calibrate.profile import significant, with_peak
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import ClusterConfig, RunConfig
from canzona_cli.errors import CanzonaError, ExitCode
from canzona_cli.run.machine import cores
from canzona_cli.run.phases import Phase
from canzona_cli.run.words import layout_code

BENCHED: tuple[AnyStrategy, ...] = ("canzona", "sc", "adamw")
"""canzona's engine, Megatron's Muon, Megatron's DistributedOptimizer."""
RANKS = 2
_LAYERS = 2
_ROUNDS, _STEPS = 3, 2
_REPLACED = ("gpus", "cluster", "parallel", "optimizer", "engine", "run", "train.steps")
"""Settings that the benches choose themselves, whatever the user set."""


@dataclass(frozen=True, kw_only=True)
class StepFactors:
    """Measured over predicted time."""

    computing: float
    """The factor of forward and backward, on top of the profile's own numbers."""
    phases: Mapping[str, float]
    """`ClusterConfig.step_factors`."""


class ShortBenches:
    """Short benches of the recipe's model with few layers.

    Args:
        overrides: the calibration's overrides.
        config: the run they compose to.
        profile: the file of the cluster profile to run on.
    """

    def __init__(
        self, overrides: Sequence[str], config: RunConfig, profile: Path, say: Say, recipes_dirs: Sequence[Path] = ()
    ) -> None:
        on_cpu = config.cluster.device == "cpu"
        # Ranks that take turns on a core find its caches full of each other's data, so a crowd is measured as
        # one.
        most = min(config.gpus, 2 * cores() if on_cpu else RANKS)
        self.ranks = most if most < RANKS else most // RANKS * RANKS
        self.overrides = [
            *(override for override in overrides if not _replaced(override)),
            *(f"cluster={profile.absolute()}", "parallel.pp=1", "optimizer=muon"),
            f"model.num_layers={min(_LAYERS, config.model.num_layers)}",
        ]
        self._say, self._recipes_dirs = say, recipes_dirs

    def bench(self, ranks: int, tp: int) -> BenchResult:
        """Run every strategy in `BENCHED` on that many ranks.

        Raises:
            CanzonaError: as `session.prepare` and `session.run`.
            KeyboardInterrupt: somebody stopped it.
        """
        folder = Path(tempfile.mkdtemp(prefix="canzona-calibrate-"))
        try:
            session = prepare(
                [*self.overrides, f"gpus={ranks}", f"parallel.tp={tp}"],
                strategies=BENCHED,
                rounds=_ROUNDS,
                steps_per_turn=_STEPS,
                recipes_dirs=self._recipes_dirs,
                directory=str(folder / "steps"),
            )
            return run(session, self._say)[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def with_steps(calibration: Calibration, benches: ShortBenches, write: Callable[[Calibration], None]) -> Calibration:
    """`found` with the factors of whole steps; where a bench failed or was stopped, with those of the one
    before it, and marked as lacking the rest.

    Args:
        write: writes a calibration to the profile that the benches run on, so that they predict from it.
    """
    begun = time.time()

    def with_profile(profile: ClusterConfig) -> Calibration:
        seconds = calibration.seconds + time.time() - begun
        measured_on = {**profile.measured_on, "seconds": round(seconds, 1)}
        return replace(calibration, seconds=seconds, profile=replace(profile, measured_on=measured_on))

    profile, outcome = calibration.profile, calibration.outcome
    results: list[BenchResult] = []
    for tp in dict.fromkeys((1, min(RANKS, benches.ranks))):
        try:
            results.append(benches.bench(benches.ranks, tp))
        except (KeyboardInterrupt, CanzonaError) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            outcome = replace(
                outcome,
                status="interrupted" if stopped else "failed",
                exit_code=ExitCode.INTERRUPTED if stopped else ExitCode.CRASH,
                message="" if stopped else f"whole steps of TP {tp}: {error}",
            )
            profile = replace(profile, not_measured=(*profile.not_measured, "steps"))
            break
    result = replace(with_profile(_fitted(profile, results) if results else profile), outcome=outcome)
    write(result)
    return result


def _fitted(profile: ClusterConfig, results: Sequence[BenchResult]) -> ClusterConfig:
    """The profile with the factors of its benches, at least one."""
    fitted = factors(results)
    return with_peak(
        replace(
            profile,
            forward_factor=significant(profile.forward_factor * fitted.computing),
            forward_module_us=significant(profile.forward_module_us * fitted.computing),
            backward_factor=significant(profile.backward_factor * fitted.computing),
            backward_module_us=significant(profile.backward_module_us * fitted.computing),
            step_factors=dict(fitted.phases),
            measured_on={**profile.measured_on, "fitted_on": fitted_on(results)},
        )
    )


def fitted_on(results: Sequence[BenchResult]) -> str:
    """The layouts whose steps a profile is fitted to, as its `measured_on` says it: `DP2, TP2 DP1`. Errors of
    its predictions are told of others."""
    return ", ".join(dict.fromkeys(layout_code(result.layout) for result in results))


def factors(results: Sequence[BenchResult]) -> StepFactors:
    """Computes factors from the data-parallel bench and, if there were two ranks,
    the tensor-parallel one after it.

    Forward and backward are the first one's: it has no collectives in them, which have prices of their own.
    They have one factor together, and with the waits for gradients and parameters, where ranks meet that were
    given the cores unevenly.
    """
    phases: dict[str, float] = {}
    for prefix, (updating, elementwise) in {"": ("canzona", "canzona"), "megatron/": ("sc", "adamw")}.items():
        of: dict[Phase, str] = {
            "matrix_update": updating,
            "exchange": updating,
            "norm_clip": elementwise,
            "adamw_update": elementwise,
        }
        for phase, strategy in of.items():
            # Ranks wait for one another in norm and clip; the last one waits least.
            rank: Literal["min", "mean"] = "min" if phase == "norm_clip" else "mean"
            factor = _factor([result.strategies[strategy] for result in results], (phase,), rank)
            if factor is not None:
                phases[f"{prefix}{phase}"] = factor
    met: tuple[Phase, ...] = ("forward", "backward", "grad_reduce", "param_gather")
    computing = _factor(results[0].strategies.values(), met, "mean")
    assert computing is not None
    return StepFactors(computing=computing, phases=phases)


def _factor(benches: Iterable[StrategyBench], phases: Sequence[Phase], rank: Literal["min", "mean"]) -> float | None:
    """Measured over predicted, all phases and benches together; None where no bench has them."""
    measured = predicted = 0.0
    for bench, phase in itertools.product(benches, phases):
        expected, seconds = bench.predicted.phases.get(phase, 0.0), bench.measured.phases.get(phase)
        if seconds is not None and expected > 0:
            measured += seconds.min_s if rank == "min" else seconds.mean_s
            predicted += expected
    return significant(measured / predicted) if predicted > 0 and measured > 0 else None


def _replaced(override: str) -> bool:
    key = key_of(override.lstrip("+~"))
    return any(key == name or key.startswith(f"{name}.") for name in _REPLACED)
