"""The fastest layouts of a run: simulated one by one in the order of a plain estimate, until that is longer
for all others than what was simulated. All legal layouts are compared, few are simulated."""

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import canzona_cli
from canzona_cli.cluster.layouts import RECOMPUTE, Candidate, candidates, fill, possible_layouts
from canzona_cli.cluster.machine import with_layers_here
from canzona_cli.config.caches import cache_root
from canzona_cli.config.execution import AnyStrategy, Execution, execution_of, with_strategy
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.memory import estimate
from canzona_cli.errors import ConfigError, DoesNotFit
from canzona_cli.planner.make import make_plan
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.plan import Plan
from canzona_cli.run.codec import load_if_sound, save
from canzona_cli.simulate.predict import Spent, estimated_step_seconds, simulate_run, spent
from canzona_cli.simulate.step import StrategyResult

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


ALIKE = 1e-5
"""Share of a step by which layouts that differ take the same time."""

MARGIN = 1.005
"""Layouts are simulated up to this many times the shortest simulated step:
estimates are hardly ever longer."""
EXHAUSTIVE_RANKS = 1024
"""Ranks up to which every layout within `MARGIN` is simulated."""
MOST_BEYOND = 10
"""Simulations with more ranks, of the layouts that may be the fastest:
there one takes a second and proves little."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A layout, planned and simulated on devices of their own:
    which cores this machine has must not decide."""

    layout: Layout
    iteration_s: float
    optimizer_s: float
    memory_bytes: int
    """The bytes of the fullest rank."""
    spent: Spent
    """The parts of the iteration on its slowest rank."""

    @property
    def per_sequence_s(self) -> float:
        """The seconds that layouts are compared by, because their batches may differ."""
        return self.iteration_s / self.layout.global_batch_size


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """The result of a search."""

    best: tuple[Tried, ...]
    """The fastest that were asked for, the fastest first, of those that take the same time the plainest; none
    where no plan fits."""
    legal: int
    """The number of layouts that were compared."""
    simulated: int
    """The number of these that took a simulation."""


def search(config: RunConfig, count: int = 1) -> LayoutSearch:
    """The `count` fastest of all legal layouts that fit, by the simulator; remembered in the cache folder.

    Raises:
        ConfigError: the settings are impossible.
    """
    config = replace(config, cluster=with_layers_here(config.cluster))
    cache = Cache.of(config, count)
    result = cache.read(LayoutSearch)
    if result is None or not _holds(config, result):
        result = _search(config, count)
        cache.write(result)
    return result


def fastest_with(config: RunConfig, strategy: AnyStrategy, planned: Layout) -> Tried | None:
    """The run under another strategy, in the layout that is fastest for that one; None where none fits.

    The layout that was planned takes part too: a search that is cut short may miss it.
    """
    other = with_strategy(config, strategy)
    here = Candidate(layout=planned, memory=estimate(other, planned))
    simulated = _try(other, here) if here.fits else None
    fastest = [*search(other).best, *([] if simulated is None else [simulated.tried()])]
    return min(fastest, key=lambda one: one.per_sequence_s, default=None)


def _holds(config: RunConfig, remembered: LayoutSearch) -> bool:
    """Checks remembered layouts against the run: everything that is set is as it is set, and they fit. A file
    may be another run's, or from before a rule changed, and the run trains what it says."""
    layouts = {tried.layout for tried in remembered.best}
    return layouts <= set(possible_layouts(config)) and all(estimate(config, layout).fits for layout in layouts)


def _search(config: RunConfig, count: int) -> LayoutSearch:
    fitting = [candidate for candidate in candidates(config) if candidate.fits]
    estimated = ((_estimate(config, candidate), candidate) for candidate in fitting)
    waiting = sorted(estimated, key=lambda pair: (pair[0], _plain(pair[1].layout)))
    best: dict[float, _Simulated] = {}
    known: set[tuple[Layout, float, float]] = set()
    repeating: dict[Layout, float] = {}
    """The time of a layout that repeats less of its forward passes: one that repeats more takes no less."""
    simulated = 0
    for estimate_s, candidate in waiting:
        slowest = max(sorted(best)[:count]) * (1 + ALIKE) if len(best) >= count else math.inf
        enough = config.gpus > EXHAUSTIVE_RANKS and best and simulated >= max(count, MOST_BEYOND)
        if estimate_s > MARGIN * slowest or enough:
            break
        # Slicing sequences and putting more of them into a micro-batch leaves tokens, messages and owners as
        # they were: where attention takes no longer for it, nothing does.
        layout = candidate.layout
        unsliced = replace(layout, cp=1, dp=layout.owners, micro_batch_size=1)
        same = (unsliced, layout.micro_batch_size / layout.cp, estimate_s)
        plain = replace(layout, recompute="none")
        if same in known or repeating.get(plain, 0.0) > slowest:
            continue
        simulated += 1
        one = _try(config, candidate)
        if one is not None:
            known.add(same)
            # Alike where only the order of sums differs.
            seconds = repeating[plain] = float(f"{one.result.iteration_s / candidate.layout.global_batch_size:.5e}")
            best[seconds] = min(one, best.get(seconds, one), key=lambda either: _plain(either.candidate.layout))
    fastest = tuple(best[seconds].tried() for seconds in sorted(best)[:count])
    return LayoutSearch(best=fastest, legal=len(fitting), simulated=simulated)


def _estimate(config: RunConfig, candidate: Candidate) -> float:
    return estimated_step_seconds(config, candidate.layout) / candidate.layout.global_batch_size


@dataclass(frozen=True, kw_only=True)
class _Simulated:
    candidate: Candidate
    run: RunConfig
    """The configuration with the candidate's layout."""
    plan: Plan | None
    """The plan, for strategies that have one."""
    result: StrategyResult

    def tried(self) -> Tried:
        """Returns the layout with what only the fastest are asked for."""
        layout, plan = self.candidate.layout, self.plan
        return Tried(
            layout=layout,
            iteration_s=self.result.iteration_s,
            optimizer_s=self.result.optimizer_s,
            memory_bytes=(self.candidate.memory if plan is None else plan_memory(self.run, layout, plan)).total,
            spent=spent(self.run, layout, self.result),
        )


def _try(config: RunConfig, candidate: Candidate) -> _Simulated | None:
    """None without a plan that fits."""
    layout = candidate.layout
    run = fill(config, layout)
    try:
        plan = make_plan(run, layout) if execution_of(run) is Execution.PLANNED else None
    except (ConfigError, DoesNotFit):
        return None
    return _Simulated(candidate=candidate, run=run, plan=plan, result=simulate_run(run, layout, plan))


def _plain(layout: Layout) -> tuple[int, ...]:
    """The plainest of layouts that take the same time is the least."""
    again = RECOMPUTE.index(layout.recompute)
    return layout.pp, layout.vpp, layout.cp, layout.tp, again, -layout.micro_batch_size


ASKED: Final = ("gpus", "model", "train", "optimizer", "engine", "cluster", "parallel")
"""The parts of a run that a layout may depend on."""
CODE: Final = ("config", "model", "costs", "planner", "simulate", "cluster")
"""The folders whose code may."""
KEPT: Final = 500
"""Files; the oldest go."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The place for the result of one search."""

    path: Path

    @classmethod
    def of(cls, config: RunConfig, count: int) -> "Cache":
        """Returns the cache of the search for the `count` best layouts."""
        asked = asdict(config)
        key = json.dumps([_code(), count, {name: asked[name] for name in ASKED}], sort_keys=True, default=str)
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        return cls(path=cache_root(config) / "layouts" / f"{name}.json")

    def read[T](self, kind: type[T]) -> T | None:
        """The result; None where it is not known."""
        return load_if_sound(self.path, kind)

    def write(self, found: "DataclassInstance") -> None:
        """Remember a result, if that is possible."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save(self.path, found, indented=False)
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-KEPT]:
                file.unlink(missing_ok=True)


@cache
def _code() -> str:
    """Hash of the sources that decide."""
    root, digest = Path(canzona_cli.__file__).parent, hashlib.sha256()
    for folder in CODE:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
