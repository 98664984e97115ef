"""Chooses the layout of a run, and suggests changes if no layout fits in memory.

The user's settings are hard constraints. A search finds values for the settings that are null. Its result is
the same on every machine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from canzona_cli.core.costs.gpus import with_layers_here
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.errors import ConfigError, DoesNotFit, Problem, problem_with
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.setup import Execution, Layout, Setup, Strategy
from canzona_cli.core.simulate.possible import expert_parallel_sizes, fill
from canzona_cli.core.simulate.search import Candidate, any_fits, candidates, search

H200_GIB = 140.4
"""The memory, in GiB, of the next larger GPU that `suggestions` names, as in the built-in profile h200."""
SHORTEST_SUGGESTED_SEQUENCE = 512


def resolve(setup: Setup) -> tuple[Setup, Layout]:
    """Chooses a value for every layout setting that is null; returns the completed configuration and its
    layout.

    Resolving the returned configuration again changes nothing.

    Raises:
        ConfigError: the settings leave a matrix optimizer without matrices; or layout settings are
            impossible, which are all listed.
        DoesNotFit: no possible layout fits the profile's memory; the error lists changes that would make one
            fit.
    """
    routing(setup)  # refuses a matrix optimizer without matrices before a search starts
    setup = replace(setup, cluster=with_layers_here(setup.cluster))
    best = choose(setup)
    if best is None:
        raise DoesNotFit(_memory_problem(setup))
    return fill(setup, best.layout), best.layout


def choose(setup: Setup) -> Candidate | None:
    """Returns the layout with the shortest simulated time per sequence; None if no layout fits in memory.

    If the user set every layout setting, or if no plan fits, the layout that needs the least memory is
    returned instead.

    Raises:
        ConfigError: the settings are impossible.
    """
    parallel, train = setup.parallel, setup.train
    vpp = 1 if parallel.pp == 1 else parallel.vpp
    all_given = None not in (parallel.tp, parallel.pp, vpp, parallel.cp, train.micro_batch_size, train.recompute)
    ep_open = len(expert_parallel_sizes(setup, setup.gpus // (parallel.pp or 1))) > 1
    fastest = () if all_given and not ep_open else search(setup).best
    if fastest:
        return Candidate(layout=fastest[0].layout, memory=estimate(setup, fastest[0].layout))
    # Either there is nothing to search, or no plan fits. In the latter case planning reports the details.
    fitting = [candidate for candidate in candidates(setup) if candidate.fits]
    return min(fitting, key=lambda candidate: candidate.memory.total, default=None)


def _memory_problem(setup: Setup) -> Problem:
    """Describes a run that fits in no layout, and the changes that would make it fit."""
    least = min(candidates(setup), key=lambda candidate: candidate.memory.total)
    memory, layout = least.memory, least.layout
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size >= GIB / 20)
    changes = [override for override, _ in suggestions(setup)]
    # Enough digits that a narrow miss does not read as "needs 73.6 and has 73.6".
    digits = next(d for d in range(1, 11) if f"{memory.total / GIB:.{d}f}" != f"{memory.capacity / GIB:.{d}f}")
    chunks = f" vpp={layout.vpp}" if layout.vpp > 1 else ""
    experts = f" ep={layout.ep}" if layout.ep > 1 else ""
    needs, has = (f"{size / GIB:.{digits}f} GiB" for size in (memory.total, memory.capacity))
    reason = (
        f"{setup.model.name} needs at least {needs} on {memory.worst_rank}, and {setup.cluster.name} offers "
        f"{has}; the layout that needs the least memory is tp={layout.tp} pp={layout.pp}{chunks} dp={layout.dp}"
        f"{experts}, micro-batch {layout.micro_batch_size}, recompute {layout.recompute} (GiB: {parts})"
    )
    fix = "use a smaller model, or a cluster profile with more memory"
    if changes:
        fix = f"{'each of these changes makes it fit:' if len(changes) > 1 else 'use'} {'; '.join(changes)}"
    return problem_with(setup, "gpus", reason, fix)


def suggestions(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yields single changes that make `setup` fit in memory, each as overrides and as the changed
    configuration.

    Changes that alter the job less come first. At most one number of GPUs is yielded, the smallest that fits,
    and one sequence length, the longest that fits.
    """
    for alternatives in _changes(setup):
        for override, changed in alternatives:
            try:
                fits = any_fits(changed)
            except ConfigError:
                continue
            if fits:
                yield override, changed
                break


def _changes(setup: Setup) -> Iterator[Iterable[tuple[str, Setup]]]:
    """Yields lists of changes; `suggestions` takes the first change of each list that fits."""
    parallel, train, cluster = setup.parallel, setup.train, setup.cluster
    pinned = [name for name in ("tp", "pp", "vpp", "cp", "ep") if getattr(parallel, name) is not None]
    if pinned:
        overrides = " ".join(f"parallel.{name}=null" for name in pinned)
        open_parallel = replace(parallel, tp=None, pp=None, vpp=None, cp=None, ep=None)
        yield [(overrides, replace(setup, parallel=open_parallel))]
    if train.micro_batch_size not in (None, 1):
        yield [("train.micro_batch_size=1", replace(setup, train=replace(train, micro_batch_size=1)))]
    if train.recompute not in (None, "full"):
        yield [("train.recompute=full", replace(setup, train=replace(train, recompute="full")))]
    if setup.execution.everywhere:
        # Megatron's layerwise supports Muon only.
        sharded: Strategy = "layerwise" if setup.execution is Execution.MEGATRON_SC else "canzona"
        yield [(f"engine.strategy={sharded}", replace(setup, engine=replace(setup.engine, strategy=sharded)))]
    if train.grad_reduce_dtype == "fp32" and train.precision == "bf16":
        yield [("train.grad_reduce_dtype=bf16", replace(setup, train=replace(train, grad_reduce_dtype="bf16")))]
    yield (
        (f"gpus={gpus}", replace(setup, gpus=gpus, cluster=replace(cluster, nodes=None)))
        for gpus in _more_gpus(setup.gpus, cluster.gpus_per_node)
    )
    if cluster.device == "cuda" and cluster.memory_gib < H200_GIB:
        yield [("cluster=h200", replace(setup, cluster=replace(cluster, memory_gib=H200_GIB)))]
    lengths = (train.seq_length >> halvings for halvings in range(1, train.seq_length.bit_length()))
    yield (
        (f"train.seq_length={length}", replace(setup, train=replace(train, seq_length=length)))
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
