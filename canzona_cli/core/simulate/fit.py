"""Chooses the layout of a run, and suggests changes if no layout fits in memory.

The user's settings are hard constraints. A search finds values for the settings that are null. Its result is
the same on every machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.settings import problem_with
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.core.costs.gpus import with_layers_here
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.errors import CanzonaError, ConfigError, DoesNotFit, Problem
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.setup import Execution, Layout, OptimizerConfig, RunConfig, Strategy
from canzona_cli.core.simulate.possible import expert_parallel_sizes, fill
from canzona_cli.core.simulate.search import Candidate, any_fits, candidates, search
from canzona_cli.records.words import plural

H200_GIB = 140.4
"""The memory, in GiB, of the next larger GPU that `suggestions` names, as in the built-in profile h200."""
SHORTEST_SUGGESTED_SEQUENCE = 512


def resolve(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Chooses a value for every layout setting that is null; returns the completed configuration and its
    layout.

    Resolving the returned configuration again changes nothing.

    Raises:
        ConfigError: the settings leave a matrix optimizer without matrices; or layout settings are
            impossible, which are all listed.
        DoesNotFit: no possible layout fits the profile's memory; the error lists changes that would make one
            fit.
    """
    routing(config)  # refuses a matrix optimizer without matrices before a search starts
    config = replace(config, cluster=with_layers_here(config.cluster))
    best = choose(config)
    if best is None:
        raise DoesNotFit(_memory_problem(config))
    return fill(config, best.layout), best.layout


def choose(config: RunConfig) -> Candidate | None:
    """Returns the layout with the shortest simulated time per sequence; None if no layout fits in memory.

    If the user set every layout setting, or if no plan fits, the layout that needs the least memory is
    returned instead.

    Raises:
        ConfigError: the settings are impossible.
    """
    parallel, train = config.parallel, config.train
    vpp = 1 if parallel.pp == 1 else parallel.vpp
    all_given = None not in (parallel.tp, parallel.pp, vpp, parallel.cp, train.micro_batch_size, train.recompute)
    ep_open = len(expert_parallel_sizes(config, config.gpus // (parallel.pp or 1))) > 1
    fastest = () if all_given and not ep_open else search(config).best
    if fastest:
        return Candidate(layout=fastest[0].layout, memory=estimate(config, fastest[0].layout))
    # Either there is nothing to search, or no plan fits. In the latter case planning reports the details.
    fitting = [candidate for candidate in candidates(config) if candidate.fits]
    return min(fitting, key=lambda candidate: candidate.memory.total, default=None)


def _memory_problem(config: RunConfig) -> Problem:
    """Describes a run that fits in no layout, and the changes that would make it fit."""
    least = min(candidates(config), key=lambda candidate: candidate.memory.total)
    memory, layout = least.memory, least.layout
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size >= GIB / 20)
    changes = [override for override, _ in suggestions(config)]
    # Enough digits that a narrow miss does not read as "needs 73.6 and has 73.6".
    digits = next(d for d in range(1, 11) if f"{memory.total / GIB:.{d}f}" != f"{memory.capacity / GIB:.{d}f}")
    chunks = f" vpp={layout.vpp}" if layout.vpp > 1 else ""
    experts = f" ep={layout.ep}" if layout.ep > 1 else ""
    needs, has = (f"{size / GIB:.{digits}f} GiB" for size in (memory.total, memory.capacity))
    reason = (
        f"{config.model.name} needs at least {needs} on {memory.worst_rank}, and {config.cluster.name} offers "
        f"{has}; the layout that needs the least memory is tp={layout.tp} pp={layout.pp}{chunks} dp={layout.dp}"
        f"{experts}, micro-batch {layout.micro_batch_size}, recompute {layout.recompute} (GiB: {parts})"
    )
    fix = "use a smaller model, or a cluster profile with more memory"
    if changes:
        fix = f"{'each of these changes makes it fit:' if len(changes) > 1 else 'use'} {'; '.join(changes)}"
    return problem_with(config, "gpus", reason, fix)


def suggestions(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields single changes that make `config` fit in memory, each as overrides and as the changed
    configuration.

    Changes that alter the job less come first. At most one number of GPUs is yielded, the smallest that fits,
    and one sequence length, the longest that fits.
    """
    for alternatives in _changes(config):
        for override, changed in alternatives:
            try:
                fits = any_fits(changed)
            except ConfigError:
                continue
            if fits:
                yield override, changed
                break


def _changes(config: RunConfig) -> Iterator[Iterable[tuple[str, RunConfig]]]:
    """Yields lists of changes; `suggestions` takes the first change of each list that fits."""
    parallel, train, cluster = config.parallel, config.train, config.cluster
    pinned = [name for name in ("tp", "pp", "vpp", "cp", "ep") if getattr(parallel, name) is not None]
    if pinned:
        overrides = " ".join(f"parallel.{name}=null" for name in pinned)
        open_parallel = replace(parallel, tp=None, pp=None, vpp=None, cp=None, ep=None)
        yield [(overrides, replace(config, parallel=open_parallel))]
    if train.micro_batch_size not in (None, 1):
        yield [("train.micro_batch_size=1", replace(config, train=replace(train, micro_batch_size=1)))]
    if train.recompute not in (None, "full"):
        yield [("train.recompute=full", replace(config, train=replace(train, recompute="full")))]
    if config.execution.everywhere:
        # Megatron's layerwise supports Muon only.
        sharded: Strategy = "layerwise" if config.execution is Execution.MEGATRON_SC else "canzona"
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
    """Yields larger numbers of GPUs: each number up to the size of one node, then the GPUs of 2, 3, 4, 6, 8,
    12, ... nodes."""
    yield from range(gpus + 1, per_node + 1)
    for power in range(10):
        for machines in (2**power, 3 * 2**power // 2) if power else (1,):
            if machines * per_node > max(gpus, per_node):
                yield machines * per_node


MIN_LR_RATIO = "optimizer.min_lr_ratio"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, with its resolved configuration and layout."""

    combination: Combination
    config: RunConfig
    layout: Layout


def swept_runs(arguments: Sequence[str], recipes_dirs: Sequence[Path]) -> tuple[SweptRun, ...]:
    """Composes and resolves every run of a sweep, so that none is refused hours later.

    Raises:
        CanzonaError: at least one run is refused. If only some runs have a problem, the error names the swept
            values of the first of them.
    """
    runs: list[SweptRun] = []
    failed: list[tuple[Combination, CanzonaError]] = []
    requested = combinations(arguments)
    recipe_of = cache(lambda overrides: compose_run(overrides, recipes_dirs=recipes_dirs).config.optimizer)
    for combination in requested:
        try:
            combination = _with_scaled_minimum(combination, recipe_of)
            config, layout = resolve(compose_run(combination.overrides, recipes_dirs=recipes_dirs).config)
        except CanzonaError as error:
            failed.append((combination, error))
        else:
            runs.append(SweptRun(combination=combination, config=config, layout=layout))
    if not failed:
        return tuple(runs)
    reported: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for combination, failure in failed:
        for problem in failure.problems:
            reported.setdefault((problem.key, problem.reason), []).append((problem, combination.words))
    _, first_failure = failed[0]
    raise type(first_failure)(*(_merge(occurrences, len(requested)) for occurrences in reported.values()))


def _with_scaled_minimum(
    combination: Combination, recipe_of: Callable[[tuple[str, ...]], OptimizerConfig]
) -> Combination:
    """Gives swept learning rates the recipe's ratio of minimum to peak, so that all schedules have the same
    shape. The ratio is added as an override, so that the printed overrides reproduce the run.
    """
    overrides = combination.overrides
    keys = {key_of(override) for override in overrides}
    if "optimizer.lr" not in combination.values or keys & {"optimizer.min_lr", MIN_LR_RATIO}:
        return combination
    recipe = recipe_of(tuple(override for override in overrides if key_of(override) != "optimizer.lr"))
    if recipe.min_lr_ratio is not None or recipe.min_lr == 0:
        return combination
    return replace(combination, overrides=(*overrides, f"{MIN_LR_RATIO}={recipe.min_lr / recipe.lr:.6g}"))


def _merge(occurrences: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """Merges occurrences of the same problem in several runs. If not all of the `runs` have the problem, the
    reason names the swept values of the first run that has it."""
    (problem, words), *more = occurrences
    if len(occurrences) == runs:
        return problem
    others = f" and {plural(len(more), 'other')}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
