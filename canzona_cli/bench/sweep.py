"""The same bench for several values of one setting: the paper's ablations, and scaling. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.bench.launching import Say
from canzona_cli.bench.options import AFFECTED, Options, SweepKind
from canzona_cli.bench.results import BenchResult
from canzona_cli.bench.session import Session, prepare, run
from canzona_cli.bench.simulated import Simulation, run_simulation
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import exchange_bytes, matrix_shapes
from canzona_cli.errors import ConfigError, Problem, gathered, refuse

_KEYS: Mapping[SweepKind, str] = {
    "alpha": "engine.alpha",
    "c_max": "engine.c_max_mib",
    "gpus": "gpus",
    "optimizer": "optimizer",
}
_AUTO = "auto"
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Benches that are ready to run, by the value of the setting."""

    kind: SweepKind
    sessions: Mapping[str, Session]


def prepare_sweep(overrides: Sequence[str], options: Options, recipes_dirs: Sequence[Path] = ()) -> Sweep:
    """Resolve and check the benches of all values before the first one runs.

    Raises:
        ConfigError: with the problems of all benches at once.
        EnvironmentProblem, DoesNotFit: as `session.prepare`.
    """
    kind = options.sweep
    assert kind is not None
    try:
        composed = compose_run(_without(overrides, kind), recipes_dirs=recipes_dirs)
        config, layout = resolve(composed.config)
    except ConfigError as error:
        raise ConfigError(*options.problems, *error.problems) from None
    problems = [*options.problems, *_pointless(kind, layout)]
    chosen = options.values or _values(kind, config, layout)
    sessions = {}
    for value in dict.fromkeys(chosen):
        with gathered(problems):
            sessions[value] = prepare(
                _with(overrides, kind, value),
                strategies=options.strategies or AFFECTED.get(kind),
                rounds=options.rounds,
                steps_per_turn=options.steps_per_turn,
                recipes_dirs=recipes_dirs,
                directory=None if config.run.dir is None else f"{config.run.dir}/{kind}-{value}",
            )
    refuse(dict.fromkeys(problems))
    return Sweep(kind=kind, sessions=sessions)


def run_sweep(sweep: Sweep, say: Say) -> dict[str, BenchResult]:
    """One bench after another, by value.

    Raises:
        CanzonaError: as `session.run`; results so far stay in their directories.
    """
    results = {}
    for value, session in sweep.sessions.items():
        say(f"{sweep.kind} {value}")
        results[value], _ = run(session, say)
    return results


def simulate_sweep(
    overrides: Sequence[str], options: Options, recipes_dirs: Sequence[Path] = ()
) -> dict[str, Simulation]:
    """Simulate the same runs once for each swept value; results by value.

    Raises:
        ConfigError: the options exclude each other, or runs are impossible; with the problems of all values
        at once.
    """
    kind = options.sweep
    assert kind is not None
    refuse(options.problems)
    values: Sequence[str] = options.values
    if not values:
        fewest = [*_without(overrides, kind), f"gpus={options.gpus[0]}"]
        values = _values(kind, *resolve(compose_run(fewest, recipes_dirs=recipes_dirs, training=False).config))
    problems: list[Problem] = []
    simulations = {}
    for value in dict.fromkeys(values):
        with gathered(problems):
            simulations[value] = run_simulation(_with(overrides, kind, value), options.gpus, recipes_dirs=recipes_dirs)
    refuse(dict.fromkeys(problems))
    return simulations


def _without(overrides: Sequence[str], kind: SweepKind) -> list[str]:
    """The overrides that do not set the swept setting."""
    return [word for word in overrides if key_of(word) != _KEYS[kind]]


def _with(overrides: Sequence[str], kind: SweepKind, value: str) -> list[str]:
    """The overrides of the run that takes this value."""
    return [*_without(overrides, kind), f"{_KEYS[kind]}={'null' if value == _AUTO else value}"]


def _pointless(kind: SweepKind, layout: Layout) -> list[Problem]:
    """Layouts on which the swept setting changes nothing."""
    if kind == "alpha" and layout.owners == 1:
        return [
            Problem(
                key="--sweep",
                value=kind,
                reason="alpha balances data-parallel ranks, and this layout has only one",
                fix="use more gpus, or a smaller parallel.tp",
            )
        ]
    if kind == "c_max" and layout.tp == 1:
        return [
            Problem(
                key="--sweep",
                value=kind,
                reason="C_max limits exchanges between tensor-parallel ranks, and this layout has none",
                fix="use parallel.tp=2 or more",
            )
        ]
    return []


def _values(kind: SweepKind, config: RunConfig, layout: Layout) -> tuple[str, ...]:
    """The values to sweep where the user names none; of C_max last the one that the planner finds."""
    if kind == "alpha":
        return ("0", "0.25", "0.5", "0.75", "1")
    if kind == "optimizer":
        return ("muon", "soap", "shampoo")
    if kind == "gpus":
        largest = config.cluster.gpus_per_node
        return tuple(str(1 << power) for power in range(1, largest.bit_length()) if 1 << power <= largest)
    return (*(f"{size:.6g}" for size in capacities_mib(config)), _AUTO)


def capacities_mib(config: RunConfig) -> tuple[float, ...]:
    """C_max from groups of one largest matrix to groups of eight."""
    largest = max(math.prod(shape) for shape in matrix_shapes(config)) * max(exchange_bytes(config))
    return tuple(times * largest / _MIB for times in (1, 2, 4, 8))
