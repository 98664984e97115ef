"""Fit a model to a number of GPUs: the fastest layout that fits, or what would make one fit.

What the user set is a hard constraint; everything null is searched, exhaustively and the same way on every
machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.cluster.gpus import with_layers_here
from canzona_cli.cluster.search import Candidate, any_fits, candidates, fill, search
from canzona_cli.config.compose import compose_run
from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import Layout, OptimizerConfig, RunConfig, Strategy
from canzona_cli.config.settings import problem_with
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.costs.memory import GIB, estimate
from canzona_cli.errors import CanzonaError, ConfigError, DoesNotFit, Problem
from canzona_cli.model.matrices import routing
from canzona_cli.run.words import plural

H200_GIB = 140.4
"""Memory of the next larger GPU, for `suggestions`; the built-in h200 profile has it."""
SHORTEST_SUGGESTED_SEQUENCE = 512


def resolve(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Choose every null of `config` and return it filled in, with its layout.
    Resolving the result changes nothing.

    Raises:
        ConfigError: the settings are impossible, or leaves a matrix optimizer no matrix; carries every
        problem. DoesNotFit: no possible layout fits the profile's memory; says what would.
    """
    routing(config)
    config = replace(config, cluster=with_layers_here(config.cluster))
    best = choose(config)
    if best is None:
        raise DoesNotFit(_does_not_fit(config))
    return fill(config, best.layout), best.layout


def choose(config: RunConfig) -> Candidate | None:
    """The candidate with the shortest simulated step per sequence of those that fit; None when none fits.

    What an earlier search found is asked for before anything is simulated.

    Raises:
        ConfigError: the settings are impossible.
    """
    parallel, train = config.parallel, config.train
    vpp = 1 if parallel.pp == 1 else parallel.vpp
    typed = None not in (parallel.tp, parallel.pp, vpp, parallel.cp, train.micro_batch_size, train.recompute)
    fastest = () if typed else search(config).best
    if fastest:
        return Candidate(layout=fastest[0].layout, memory=estimate(config, fastest[0].layout))
    # There is nothing to choose from; or no plan fits, which planning says in more detail than a search
    # could.
    fitting = [candidate for candidate in candidates(config) if candidate.fits]
    return min(fitting, key=lambda one: one.memory.total, default=None)


def _does_not_fit(config: RunConfig) -> Problem:
    least = min(candidates(config), key=lambda candidate: candidate.memory.total)
    memory, layout = least.memory, least.layout
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size >= GIB / 20)
    ways = [override for override, _ in suggestions(config)]
    # A narrow miss must not read as "needs 73.6 and has 73.6".
    digits = next(d for d in range(1, 11) if f"{memory.total / GIB:.{d}f}" != f"{memory.capacity / GIB:.{d}f}")
    chunks = f" vpp={layout.vpp}" if layout.vpp > 1 else ""
    needs, has = (f"{size / GIB:.{digits}f} GiB" for size in (memory.total, memory.capacity))
    reason = (
        f"{config.model.name} needs at least {needs} on {memory.worst_rank}, and {config.cluster.name} offers "
        f"{has}; that is with tp={layout.tp} pp={layout.pp}{chunks} dp={layout.dp}, micro-batch "
        f"{layout.micro_batch_size}, recompute {layout.recompute} (GiB: {parts})"
    )
    fix = (
        ("any one of these makes it fit: " if len(ways) > 1 else "use ") + "; ".join(ways)
        if ways
        else "use a smaller model, or a cluster profile with more memory"
    )
    return problem_with(config, "gpus", reason, fix)


def suggestions(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields single changes that make `config` fit, as overrides and as what they make of it, each tried out.

    What changes the job least comes first; of several GPU counts, or sequence lengths, only the nearest that fits.
    """
    for ladder in _changes(config):
        for override, changed in ladder:
            try:
                fits = any_fits(changed)
            except ConfigError:
                continue
            if fits:
                yield override, changed
                break


def _changes(config: RunConfig) -> Iterator[Iterable[tuple[str, RunConfig]]]:
    """Ladders of changes; the first rung of each that fits is suggested."""
    parallel, train, cluster = config.parallel, config.train, config.cluster
    pinned = [f"parallel.{name}=null" for name in ("tp", "pp", "vpp", "cp") if getattr(parallel, name) is not None]
    if pinned:
        yield [(" ".join(pinned), replace(config, parallel=replace(parallel, tp=None, pp=None, vpp=None, cp=None)))]
    if train.micro_batch_size not in (None, 1):
        yield [("train.micro_batch_size=1", replace(config, train=replace(train, micro_batch_size=1)))]
    if train.recompute not in (None, "full"):
        yield [("train.recompute=full", replace(config, train=replace(train, recompute="full")))]
    if execution_of(config).everywhere:
        # Megatron's layerwise has Muon only.
        sharded: Strategy = "layerwise" if execution_of(config) is Execution.MEGATRON_SC else "canzona"
        yield [(f"engine.strategy={sharded}", replace(config, engine=replace(config.engine, strategy=sharded)))]
    if train.grad_reduce_dtype == "fp32" and train.precision == "bf16":
        yield [("train.grad_reduce_dtype=bf16", replace(config, train=replace(train, grad_reduce_dtype="bf16")))]
    yield (
        (f"gpus={gpus}", replace(config, gpus=gpus, cluster=replace(cluster, nodes=None)))
        for gpus in _more_gpus(config.gpus, cluster.gpus_per_node)
    )
    if cluster.device == "cuda" and cluster.memory_gib < H200_GIB:
        yield [("cluster=h200", replace(config, cluster=replace(cluster, memory_gib=H200_GIB)))]
    lengths = (train.seq_length >> halvings for halvings in range(1, train.seq_length.bit_length()))
    yield (
        (f"train.seq_length={length}", replace(config, train=replace(train, seq_length=length)))
        for length in lengths
        if length >= SHORTEST_SUGGESTED_SEQUENCE
    )


def _more_gpus(gpus: int, per_node: int) -> Iterator[int]:
    """Counts above `gpus`, ascending: one by one up to a machine, then 1, 2, 3, 4, 6, 8, 12, ... machines."""
    yield from range(gpus + 1, per_node + 1)
    for power in range(10):
        for machines in (1 << power, 3 << power >> 1) if power else (1,):
            if machines * per_node > max(gpus, per_node):
                yield machines * per_node


MIN_LR_RATIO = "optimizer.min_lr_ratio"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, composed and fitted to the machine."""

    combination: Combination
    config: RunConfig
    layout: Layout


def swept_runs(arguments: Sequence[str], recipes_dirs: Sequence[Path]) -> tuple[SweptRun, ...]:
    """Compose every run of a sweep, so that none of them is refused hours later.

    Raises:
        CanzonaError: any of them is wrong; of a mistake that not all have, with the values that
        have it.
    """
    runs: list[SweptRun] = []
    failed: list[tuple[Combination, CanzonaError]] = []
    asked = combinations(arguments)
    recipe_of = cache(lambda others: compose_run(others, recipes_dirs=recipes_dirs).config.optimizer)
    for plain in asked:
        one = plain
        try:
            one = _with_own_minimum(plain, recipe_of)
            config, layout = resolve(compose_run(one.overrides, recipes_dirs=recipes_dirs).config)
        except CanzonaError as error:
            failed.append((one, error))
        else:
            runs.append(SweptRun(combination=one, config=config, layout=layout))
    if not failed:
        return tuple(runs)
    reported: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for one, failure in failed:
        for problem in failure.problems:
            reported.setdefault((problem.key, problem.reason), []).append((problem, one.words))
    raise type(failed[0][1])(*(_once(having, len(asked)) for having in reported.values()))


def _with_own_minimum(one: Combination, recipe_of: Callable[[tuple[str, ...]], OptimizerConfig]) -> Combination:
    """Keeps the recipe's ratio of the minimum to swept learning rates, so that all curves have one form.

    Said as an override: a run of the sweep is repeated by what is printed.
    """
    typed = {key_of(override) for override in one.overrides}
    if "optimizer.lr" not in one.values or typed & {"optimizer.min_lr", MIN_LR_RATIO}:
        return one
    recipe = recipe_of(tuple(override for override in one.overrides if key_of(override) != "optimizer.lr"))
    if recipe.min_lr_ratio is not None or recipe.min_lr == 0:
        return one
    return replace(one, overrides=(*one.overrides, f"{MIN_LR_RATIO}={recipe.min_lr / recipe.lr:.6g}"))


def _once(having: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """A problem that some of the runs have, or all."""
    (problem, words), *more = having
    if len(having) == runs:
        return problem
    others = f" and {plural(len(more), 'other')}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
