"""The fastest layouts of a run: simulated one by one, in the order of what each takes at least, until nothing that is
left can be faster than what was found. All legal layouts are compared, few are simulated."""

from dataclasses import dataclass

from canzona_cli.cluster.layout_cache import Cache
from canzona_cli.cluster.layouts import RECOMPUTE, Candidate, candidates, fill
from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.planner import make_plan
from canzona_cli.simulate.bound import least_step_seconds
from canzona_cli.simulate.predict import simulate_run
from canzona_cli.simulate.spent import Spent, spent

ALIKE = 1e-5
"""Share of a step by which layouts that differ take the same time."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A layout, planned and simulated on devices of their own: which cores this machine has must not decide."""

    layout: Layout
    iteration_s: float
    memory_bytes: int
    """Of the fullest rank."""
    spent: Spent
    """What the iteration goes to on its slowest rank."""

    @property
    def per_sequence_s(self) -> float:
        """What layouts are compared by, for their batches may differ."""
        return self.iteration_s / self.layout.global_batch_size


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    best: tuple[Tried, ...]
    """The fastest that were asked for, the fastest first, of those that take the same time the plainest; none where no
    plan fits."""
    legal: int
    """How many layouts were compared."""
    simulated: int
    """Of how many of them that took a simulation; the others take longer at least than the last of `best`."""


def search(config: RunConfig, count: int = 1) -> Found:
    """The `count` fastest of all legal layouts that fit, by the simulator; remembered in the cache folder.

    Raises:
        ConfigError: what is set is impossible.
    """
    cache = Cache.of(config, count)
    found = cache.read(Found)
    if found is None:
        found = _search(config, count)
        cache.write(found)
    return found


def _search(config: RunConfig, count: int) -> Found:
    fitting = [candidate for candidate in candidates(config) if candidate.fits]
    waiting = sorted(((_least(config, candidate), candidate) for candidate in fitting), key=lambda pair: pair[0])
    best: dict[float, Tried] = {}
    simulated = 0
    for least, candidate in waiting:
        if len(best) >= count and least > max(sorted(best)[:count]) * (1 + ALIKE):
            break
        simulated += 1
        one = _try(config, candidate)
        if one is not None:
            # Alike where only the order of sums differs.
            seconds = float(f"{one.per_sequence_s:.5e}")
            best[seconds] = min(one, best.get(seconds, one), key=_plain)
    return Found(best=tuple(best[seconds] for seconds in sorted(best)[:count]), legal=len(fitting), simulated=simulated)


def _least(config: RunConfig, candidate: Candidate) -> float:
    return least_step_seconds(config, candidate.layout) / candidate.layout.global_batch_size


def _try(config: RunConfig, candidate: Candidate) -> Tried | None:
    """None without a plan that fits."""
    layout = candidate.layout
    run = fill(config, layout)
    try:
        plan = make_plan(run, layout) if execution_of(run) is Execution.PLANNED else None
    except (ConfigError, DoesNotFit):
        return None
    result = simulate_run(run, layout, plan)
    memory = candidate.memory if plan is None else plan_memory(run, layout, plan)
    return Tried(
        layout=layout,
        iteration_s=result.iteration_s,
        memory_bytes=memory.total,
        spent=spent(run, layout, result),
    )


def _plain(one: Tried) -> tuple[int, int, int, int, int]:
    """The plainest of layouts that take the same time is the least."""
    layout = one.layout
    return layout.pp, layout.cp, layout.tp, RECOMPUTE.index(layout.recompute), -layout.micro_batch_size
