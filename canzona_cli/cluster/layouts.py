"""Every layout a run could have, and the memory it needs: what the user set is kept,
everything null is tried."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from canzona_cli.config.layout_rules import divisors, layout_problems, possible_tp
from canzona_cli.config.schema import Layout, Recompute, RunConfig
from canzona_cli.config.settings import problem_with
from canzona_cli.costs.memory import MemoryEstimate, estimate
from canzona_cli.errors import ConfigError, Problem, refuse

BATCH_TOLERANCE = 0.125
"""The share by which a chosen batch may differ from `train.batch_tokens`:
no GPU count changes the job silently."""
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


def candidates(config: RunConfig) -> list[Candidate]:
    """Every possible layout of a run, in no particular order; at least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    return [Candidate(layout=layout, memory=estimate(config, layout)) for layout in possible_layouts(config)]


def any_fits(config: RunConfig) -> bool:
    """Returns True if one of the possible layouts fits.

    Raises:
        ConfigError: the settings are impossible.
    """
    # Those that need least memory come last.
    return any(estimate(config, layout).fits for layout in reversed(possible_layouts(config)))


def possible_layouts(config: RunConfig) -> list[Layout]:
    """Lists every layout that keeps what is set, whatever memory it needs; at least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    refuse(layout_problems(config))
    layouts = list(_layouts(config))
    if not layouts:
        raise ConfigError(_no_batch(config))
    return layouts


def fill(config: RunConfig, layout: Layout) -> RunConfig:
    """`config` with the values of `layout` in place of every null."""
    return replace(
        config,
        parallel=replace(
            config.parallel,
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp,
            cp=layout.cp,
            sequence_parallel=layout.sequence_parallel,
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
    for tp, pp, vpp, cp, dp in _meshes(config):
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            sequence_parallel = tp > 1 and config.cluster.fused_layers and train.seq_length % (tp * cp) == 0
        for micro in micro_batches:
            batch = _global_batch(config, _least_batch(pp, vpp, dp, micro))
            if batch is None:
                continue
            for recompute in recomputes:
                yield Layout(
                    tp=tp,
                    pp=pp,
                    vpp=vpp,
                    cp=cp,
                    dp=dp,
                    micro_batch_size=micro,
                    num_microbatches=batch // (dp * micro),
                    global_batch_size=batch,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                )


def _least_batch(pp: int, vpp: int, dp: int, micro: int) -> int:
    """Returns the divisor of a global batch. Model chunks take turns in groups of `pp` micro-batches."""
    return dp * micro * (pp if vpp > 1 else 1)


def _meshes(config: RunConfig) -> Iterator[tuple[int, int, int, int, int]]:
    """(tp, pp, vpp, cp, dp), whose ranks multiply to the GPUs.
    tp * cp crosses machines only when the user says so."""
    parallel, model, sequence = config.parallel, config.model, config.train.seq_length
    per_node = min(config.cluster.gpus_per_node, config.gpus)
    tps = tuple(tp for tp in possible_tp(model) if tp <= per_node) if parallel.tp is None else (parallel.tp,)
    pps = divisors(model.num_layers) if parallel.pp is None else (parallel.pp,)
    for tp in tps:
        cps: tuple[int, ...] = (parallel.cp or 1,)
        if parallel.cp is None:
            # A rank takes two slices of each sequence.
            cps = tuple(cp for cp in range(1, per_node // tp + 1) if cp == 1 or sequence % (2 * cp) == 0) or (1,)
        for cp in cps:
            if parallel.sequence_parallel and (tp == 1 or sequence % (tp * cp)):
                continue
            for pp in pps:
                if config.gpus % (tp * pp * cp) == 0:
                    for vpp in _model_chunks(config, pp):
                        yield tp, pp, vpp, cp, config.gpus // (tp * pp * cp)


def _model_chunks(config: RunConfig, pp: int) -> tuple[int, ...]:
    """Returns the possible numbers of model chunks of each of `pp` stages."""
    possible = divisors(config.model.num_layers // pp) if pp > 1 else (1,)
    return tuple(vpp for vpp in possible if config.parallel.vpp in (None, vpp))


def _global_batch(config: RunConfig, step: int) -> int | None:
    """Sequences of an optimizer step in multiples of `step`;
    None where that is too far from what was asked."""
    train = config.train
    if train.global_batch_size is not None:
        return train.global_batch_size if train.global_batch_size % step == 0 else None
    target = train.batch_tokens / train.seq_length
    batch = max(1, round(target / step)) * step
    return batch if abs(batch - target) <= BATCH_TOLERANCE * target else None


def _no_batch(config: RunConfig) -> Problem:
    """Explains why no layout can share out the batch: the only thing left once the rules hold."""
    train = config.train
    micro = train.micro_batch_size or 1
    steps = sorted({_least_batch(pp, vpp, dp, micro) for _, pp, vpp, _, dp in _meshes(config)})
    if not steps:
        reason = "no tensor and pipeline sizes that the model and the other settings allow divide it"
        return problem_with(config, "gpus", reason, "leave parallel.* null, or use another number of GPUs")
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
