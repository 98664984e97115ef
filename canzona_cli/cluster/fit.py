"""Fit a model to a number of GPUs: every possible layout, the memory it needs, and the fastest one that fits.

What the user set is a hard constraint; everything null is searched, exhaustively and the same way on every machine.
Arithmetic picks the few most promising layouts (`simulate.quick`), and where they are close the simulator decides.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.layout_rules import divisors, layout_problems, possible_tp
from canzona_cli.config.schema import Layout, Recompute, RunConfig, Strategy
from canzona_cli.config.settings import problem_with
from canzona_cli.errors import ConfigError, DoesNotFit, Problem
from canzona_cli.planner.memory import GIB, MemoryEstimate, estimate
from canzona_cli.planner.planner import make_plan
from canzona_cli.simulate.predict import simulate_run
from canzona_cli.simulate.quick import quick_step_seconds

BATCH_TOLERANCE = 0.125
"""How far a chosen batch may be from `train.batch_tokens`, so that no GPU count changes the job silently."""
H200_GIB = 140.4
"""Memory of the next larger GPU, for `suggestions`; the built-in h200 profile has it."""
SHORTEST_SUGGESTED_SEQUENCE = 512
HEADROOM = 0.95
"""Share of the usable memory to stay under where there is a choice: the estimate is good to a few per cent."""
NEAR = 0.05
"""How much slower than the best a layout may look and still be simulated: `quick_step_seconds` compares two layouts to
within that."""
MOST_SIMULATED = 3
TIE = 0.005
"""Share of a step below which the simulator does not overrule the arithmetic."""
MICRO_BATCHES = (8, 4, 2, 1)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One possible layout and the memory of its fullest rank."""

    layout: Layout
    memory: MemoryEstimate

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def roomy(self) -> bool:
        """Whether it fits with `HEADROOM`."""
        return self.memory.total <= HEADROOM * self.memory.capacity


def resolve(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Choose every null of `config` and return it filled in, with its layout. Resolving the result changes nothing.

    Raises:
        ConfigError: what is set is impossible; carries every problem.
        DoesNotFit: no possible layout fits the profile's memory; says what would.
    """
    best = choose(config)
    if best is None:
        raise DoesNotFit(_does_not_fit(config))
    return fill(config, best.layout), best.layout


def choose(config: RunConfig) -> Candidate | None:
    """The fastest candidate that fits, with `HEADROOM` to spare if any has it; None when none fits.

    Raises:
        ConfigError: what is set is impossible.
    """
    fitting = [candidate for candidate in candidates(config) if candidate.fits]
    if not fitting:
        return None
    best, *rivals = shortlist(config, [candidate for candidate in fitting if candidate.roomy] or fitting)
    if rivals:
        least = _simulated(config, best.layout)
        for rival in rivals:
            seconds = _simulated(config, rival.layout)
            if seconds < (1 - TIE) * least:
                best, least = rival, seconds
    return best


def candidates(config: RunConfig) -> list[Candidate]:
    """Every possible layout of a run, in no particular order; at least one.

    Raises:
        ConfigError: what is set is impossible.
    """
    problems = layout_problems(config)
    if problems:
        raise ConfigError(*problems)
    found = [Candidate(layout=layout, memory=estimate(config, layout)) for layout in _layouts(config)]
    if not found:
        raise ConfigError(_no_batch(config))
    return found


def shortlist(config: RunConfig, among: Iterable[Candidate]) -> list[Candidate]:
    """The quickest of each (tp, pp), quickest first: those that look `NEAR` the best, at most `MOST_SIMULATED`."""

    def order(candidate: Candidate) -> tuple[float, int, int, int, int]:
        layout = candidate.layout
        per_sequence = quick_step_seconds(config, layout) / layout.global_batch_size
        # Rounded, so that layouts that take the same time in another order of sums go by how plain they are.
        recompute = RECOMPUTE.index(layout.recompute)
        return float(f"{per_sequence:.5e}"), layout.pp, layout.tp, recompute, -layout.micro_batch_size

    scored = sorted(((order(candidate), candidate) for candidate in among), key=itemgetter(0))
    limit = (1 + NEAR) * scored[0][0][0]
    meshes: dict[tuple[int, int], Candidate] = {}
    for (per_sequence, *_), candidate in scored:
        if per_sequence <= limit:
            meshes.setdefault((candidate.layout.tp, candidate.layout.pp), candidate)
    return list(meshes.values())[:MOST_SIMULATED]


def _simulated(config: RunConfig, layout: Layout) -> float:
    """Seconds per sequence, on devices of their own: which cores this machine has must not decide. Infinite without a
    plan that fits."""
    run = fill(config, layout)
    try:
        plan = make_plan(run, layout) if execution_of(run) is Execution.PLANNED else None
    except (ConfigError, DoesNotFit):
        return math.inf
    return simulate_run(run, layout, plan).iteration_s / layout.global_batch_size


def fill(config: RunConfig, layout: Layout) -> RunConfig:
    """`config` with the values of `layout` in place of every null."""
    return replace(
        config,
        parallel=replace(
            config.parallel, tp=layout.tp, pp=layout.pp, cp=layout.cp, sequence_parallel=layout.sequence_parallel
        ),
        train=replace(
            config.train,
            micro_batch_size=layout.micro_batch_size,
            global_batch_size=layout.global_batch_size,
            recompute=layout.recompute,
        ),
        schedule=config.schedule.complete(config.train.steps),
        cluster=replace(config.cluster, nodes=config.cluster.nodes or -(-config.gpus // config.cluster.gpus_per_node)),
    )


def _layouts(config: RunConfig) -> Iterator[Layout]:
    parallel, train = config.parallel, config.train
    micro_batches = MICRO_BATCHES if train.micro_batch_size is None else (train.micro_batch_size,)
    recomputes = RECOMPUTE if train.recompute is None else (train.recompute,)
    for tp, pp, dp in _meshes(config):
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            sequence_parallel = tp > 1 and config.cluster.transformer_engine and _divides_sequence(config, tp)
        for micro in micro_batches:
            batch = _global_batch(config, dp * micro)
            if batch is None:
                continue
            for recompute in recomputes:
                yield Layout(
                    tp=tp,
                    pp=pp,
                    cp=parallel.cp,
                    dp=dp,
                    micro_batch_size=micro,
                    num_microbatches=batch // (dp * micro),
                    global_batch_size=batch,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                )


def _meshes(config: RunConfig) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) that multiply to the GPUs, cp given. tp crosses machines only when the user says so."""
    parallel, model = config.parallel, config.model
    per_node = min(config.cluster.gpus_per_node, config.gpus)
    tps = tuple(tp for tp in possible_tp(model) if tp <= per_node) if parallel.tp is None else (parallel.tp,)
    pps = divisors(model.num_layers) if parallel.pp is None else (parallel.pp,)
    for tp in tps:
        if parallel.sequence_parallel and (tp == 1 or not _divides_sequence(config, tp)):
            continue
        for pp in pps:
            if config.gpus % (tp * pp * parallel.cp) == 0:
                yield tp, pp, config.gpus // (tp * pp * parallel.cp)


def _divides_sequence(config: RunConfig, tp: int) -> bool:
    return config.train.seq_length % (tp * config.parallel.cp) == 0


def _global_batch(config: RunConfig, step: int) -> int | None:
    """Sequences of an optimizer step in multiples of `step`; None where that is too far from what was asked."""
    train = config.train
    if train.global_batch_size is not None:
        return train.global_batch_size if train.global_batch_size % step == 0 else None
    target = train.batch_tokens / train.seq_length
    batch = max(1, round(target / step)) * step
    return batch if abs(batch - target) <= BATCH_TOLERANCE * target else None


def _no_batch(config: RunConfig) -> Problem:
    """Why no layout can share out the batch: the only thing left once the rules hold."""
    train = config.train
    dps = sorted({dp for _, _, dp in _meshes(config)})
    if not dps:
        reason = "no tensor and pipeline sizes that the model and the other settings allow divide it"
        return problem_with(config, "gpus", reason, "leave parallel.* null, or use another number of GPUs")
    micro = train.micro_batch_size or 1
    steps = [dp * micro for dp in dps]
    if train.global_batch_size is not None:
        above = min(-(-train.global_batch_size // step) * step for step in steps)
        reason = f"is not a multiple of dp * micro-batch for any layout on {config.gpus} GPUs (smallest: {steps[0]})"
        return problem_with(config, "train.global_batch_size", reason, f"use {above}, or fewer GPUs")
    target = train.batch_tokens / train.seq_length
    nearest = min((max(1, round(target / step)) * step for step in steps), key=lambda batch: abs(batch - target))
    reason = (
        f"is {target:g} sequences of {train.seq_length} tokens: {config.gpus} GPUs cannot divide a batch within "
        f"{BATCH_TOLERANCE:.1%} of that (nearest: {nearest})"
    )
    fix = f"use train.batch_tokens={nearest * train.seq_length}, train.global_batch_size={nearest}, or fewer GPUs"
    return problem_with(config, "train.batch_tokens", reason, fix)


def _does_not_fit(config: RunConfig) -> Problem:
    least = min(candidates(config), key=lambda candidate: candidate.memory.total)
    memory, layout = least.memory, least.layout
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size >= GIB / 20)
    ways = [way.override for way in suggestions(config)]
    # A narrow miss must not read as "needs 73.6 and has 73.6".
    digits = next(d for d in range(1, 11) if f"{memory.total / GIB:.{d}f}" != f"{memory.capacity / GIB:.{d}f}")
    needs, has = (f"{size / GIB:.{digits}f} GiB" for size in (memory.total, memory.capacity))
    reason = (
        f"{config.model.name} needs at least {needs} on {memory.worst_rank}, and {config.cluster.name} offers "
        f"{has}; that is with tp={layout.tp} pp={layout.pp} dp={layout.dp}, micro-batch "
        f"{layout.micro_batch_size}, recompute {layout.recompute} (GiB: {parts})"
    )
    fix = (
        ("any one of these makes it fit: " if len(ways) > 1 else "use ") + "; ".join(ways)
        if ways
        else "use a smaller model, or a cluster profile with more memory"
    )
    return problem_with(config, "gpus", reason, fix)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change that makes a run fit."""

    override: str
    """What to add to the command line."""
    config: RunConfig


def suggestions(config: RunConfig) -> Iterator[Suggestion]:
    """Single changes that make `config` fit, each tried out; what changes the job least comes first.

    Of several GPU counts, or sequence lengths, only the nearest that fits.
    """
    for ladder in _changes(config):
        for override, changed in ladder:
            try:
                fits = any(candidate.fits for candidate in candidates(changed))
            except ConfigError:
                continue
            if fits:
                yield Suggestion(override=override, config=changed)
                break


def _changes(config: RunConfig) -> Iterator[Iterable[tuple[str, RunConfig]]]:
    """Ladders of changes; the first rung of each that fits is suggested."""
    parallel, train, cluster = config.parallel, config.train, config.cluster
    pinned = [f"parallel.{name}=null" for name in ("tp", "pp") if getattr(parallel, name) is not None]
    if pinned:
        yield [(" ".join(pinned), replace(config, parallel=replace(parallel, tp=None, pp=None)))]
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
