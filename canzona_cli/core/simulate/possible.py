"""The possible layouts of a run: all that keep the user's settings, follow Megatron's rules and divide the batch.
Whether they fit in memory is not asked here."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from canzona_cli.core.errors import ConfigError, Problem, problem_with, refuse, with_own_values
from canzona_cli.core.model.fp8 import divides_fp8, fp8_problems
from canzona_cli.core.setup import Layout, Recompute, Setup
from canzona_cli.core.setup.layout import batch_multiple
from canzona_cli.core.setup.layout_rules import (
    divisors,
    layout_problems,
    may_have_whole_experts,
    possible_tp,
)
from canzona_cli.core.setup.stages import possible_pp, possible_vpp

BATCH_TOLERANCE = 0.125
"""The largest relative difference between a chosen batch and `train.batch_tokens`. Without this limit,
another number of GPUs could silently change the training job."""
MICRO_BATCHES = (8, 4, 2, 1)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MESH = ("tp", "pp", "vpp", "cp", "ep", "sequence_parallel")
"""The settings of `parallel` that a layout fills in."""
BATCH = ("micro_batch_size", "global_batch_size", "recompute")
"""The settings of `train` that a layout fills in."""


class LayoutGroup(NamedTuple):
    """Layouts that differ only in recomputation. There are thousands, and a search needs the layouts of few."""

    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    ep: int
    micro_batch_size: int
    global_batch_size: int
    sequence_parallel: bool
    recomputes: tuple[Recompute, ...]
    """The values of `Layout.recompute`, in order of increasing recomputation."""

    @property
    def first(self) -> Layout:
        """The layout with the least recomputation."""
        return self._layout(self.recomputes[0])

    @property
    def layouts(self) -> list[Layout]:
        return list(map(self._layout, self.recomputes))

    def without(self, count: int) -> "LayoutGroup":
        """Returns the group without its first `count` layouts."""
        return self._replace(recomputes=self.recomputes[count:])

    def _layout(self, recompute: Recompute) -> Layout:
        return _layout(*self[:-1], recompute)


@lru_cache(maxsize=16_384)
def _layout(
    tp: int,
    pp: int,
    vpp: int,
    cp: int,
    dp: int,
    ep: int,
    micro_batch_size: int,
    global_batch_size: int,
    sequence_parallel: bool,
    recompute: Recompute,
) -> Layout:
    """Makes a layout once, because a search asks for it several times and it is a key of caches."""
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        dp=dp,
        ep=ep,
        micro_batch_size=micro_batch_size,
        num_microbatches=global_batch_size // (dp * micro_batch_size),
        global_batch_size=global_batch_size,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )


def possible_layouts(setup: Setup) -> list[Layout]:
    """Lists every layout that keeps the user's settings, even if it does not fit in memory. There is at
    least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    return [layout for group in layout_groups(setup, needless_cp=True) for layout in group.layouts]


def layout_groups(setup: Setup, *, needless_cp: bool = False) -> list[LayoutGroup]:
    """Returns the layouts that are compared, at least one.

    Args:
        needless_cp: see `_groups`.

    Raises:
        ConfigError: the settings are impossible.
    """
    refuse(with_own_values(setup, [*layout_problems(setup), *fp8_problems(setup)]))
    groups = list(_groups(setup, needless_cp=needless_cp))
    if not groups:
        raise ConfigError(_no_batch(setup))
    return groups


def fill(setup: Setup, layout: Layout) -> Setup:
    """Returns `setup` with the layout filled in and the schedule and the number of nodes completed."""
    mesh = {name: getattr(layout, name) for name in MESH}
    batch = {name: getattr(layout, name) for name in BATCH}
    return replace(
        setup,
        parallel=replace(setup.parallel, **mesh),
        train=replace(setup.train, **batch),
        schedule=setup.schedule.complete(setup.train.steps),
        cluster=replace(setup.cluster, nodes=setup.cluster.nodes or -(-setup.gpus // setup.cluster.gpus_per_node)),
    )


def _groups(setup: Setup, *, needless_cp: bool) -> Iterator[LayoutGroup]:
    """Yields every layout that keeps the user's settings and divides the batch.

    Args:
        needless_cp: False to leave out layouts whose micro-batch and cp have a common factor. Without this
            factor they have the same tokens, messages, owners and memory, and fewer slices to send, so they
            are never slower. Layouts in which the user set either size are always included.
    """
    parallel, train = setup.parallel, setup.train
    both_open = train.micro_batch_size is None and parallel.cp is None
    micro_batches = MICRO_BATCHES if train.micro_batch_size is None else (train.micro_batch_size,)
    recomputes = RECOMPUTE if train.recompute is None else (train.recompute,)
    for tp, pp, vpp, cp, dp in _meshes(setup):
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            supported = setup.cluster.fused_layers or setup.model.num_experts > 0
            sequence_parallel = tp > 1 and supported and train.seq_length % (tp * cp) == 0
        # Tensor parallelism cuts experts that are not divided among ranks.
        tp_divides_experts = setup.model.ffn_hidden_size % tp == 0
        eps = [ep for ep in expert_parallel_sizes(setup, tp * cp * dp) if ep > 1 or tp_divides_experts]
        for micro in micro_batches:
            if both_open and not needless_cp and math.gcd(micro, cp) > 1:
                continue
            batch = _global_batch(setup, batch_multiple(pp, vpp, dp, micro))
            if batch is None:
                continue
            for ep in eps:
                yield LayoutGroup(tp, pp, vpp, cp, dp, ep, micro, batch, sequence_parallel, recomputes)


def expert_parallel_sizes(setup: Setup, cells: int) -> tuple[int, ...]:
    """Returns the possible expert-parallel sizes of a stage with `cells` ranks.

    Unless the user sets `parallel.ep`, experts are divided only among GPUs. CPU ranks share their cores, so moving
    experts to other ranks would not make them faster.
    """
    if setup.parallel.ep is not None:
        return (setup.parallel.ep,)
    if not setup.model.num_experts or setup.cluster.device == "cpu":
        return (1,)
    return tuple(ep for ep in divisors(setup.model.num_experts) if cells % ep == 0)


def _meshes(setup: Setup) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields every possible (tp, pp, vpp, cp, dp) for the number of GPUs.

    Context parallelism may span nodes. tp exceeds the GPUs of a node only if the user sets it: its collectives
    are between any two products, and nothing hides them.
    """
    parallel, model, sequence = setup.parallel, setup.model, setup.train.seq_length
    per_node = min(setup.cluster.gpus_per_node, setup.gpus)
    cuts_sequence = parallel.sequence_parallel or model.num_experts > 0
    possible = possible_tp(model, whole_experts=may_have_whole_experts(setup))
    tps = tuple(tp for tp in possible if tp <= per_node) if parallel.tp is None else (parallel.tp,)
    pps = possible_pp(model.num_layers) if parallel.pp is None else (parallel.pp,)
    for tp in tps:
        cps: tuple[int, ...] = (parallel.cp or 1,)
        if parallel.cp is None:
            # A rank has two slices of each sequence, so 2 * cp has to divide its length.
            cps = tuple(cp for cp in divisors(setup.gpus) if cp == 1 or sequence % (2 * cp) == 0)
        for cp in cps:
            if parallel.sequence_parallel and tp == 1:
                continue
            if cuts_sequence and tp > 1 and sequence % (tp * cp):
                continue
            if not divides_fp8(setup, tp, cp):
                continue
            for pp in pps:
                if setup.gpus % (tp * pp * cp) == 0 and setup.gpus // pp % (parallel.ep or 1) == 0:
                    for vpp in possible_vpp(model.num_layers, pp):
                        if parallel.vpp in (None, vpp):
                            yield tp, pp, vpp, cp, setup.gpus // (tp * pp * cp)


def _global_batch(setup: Setup, step: int) -> int | None:
    """Returns the number of sequences in an optimizer step, which is a multiple of `step`; None if no
    multiple matches the settings."""
    train = setup.train
    if any(size % step for size, _ in train.batch_rampup):
        return None
    if train.global_batch_size is not None:
        return train.global_batch_size if train.global_batch_size % step == 0 else None
    target = train.batch_tokens / train.seq_length
    batch = max(1, round(target / step)) * step
    return batch if abs(batch - target) <= BATCH_TOLERANCE * target else None


def _no_batch(setup: Setup) -> Problem:
    """Describes why a run has no possible layout: no parallel sizes divide the number of GPUs, or no layout
    divides the batch. All other problems have been reported earlier (`layout_problems`)."""
    train = setup.train
    micro = train.micro_batch_size or 1
    steps = sorted({batch_multiple(pp, vpp, dp, micro) for _, pp, vpp, _, dp in _meshes(setup)})
    if not steps:
        reason = "no combination of parallel sizes that the model and the other settings allow divides this number"
        return problem_with(setup, "gpus", reason, "leave parallel.* null, or use another number of GPUs")
    for size, _ in train.batch_rampup:
        if all(size % step for step in steps):
            reason = f"{size} is not a multiple of dp * micro-batch for any layout on {setup.gpus} GPUs"
            return problem_with(setup, "train.batch_rampup", reason, f"use multiples of {steps[0]}, or fewer GPUs")
    if train.global_batch_size is not None:
        above = min(-(-train.global_batch_size // step) * step for step in steps)
        reason = f"is not a multiple of dp * micro-batch for any layout on {setup.gpus} GPUs (smallest: {steps[0]})"
        return problem_with(setup, "train.global_batch_size", reason, f"use {above}, or fewer GPUs")
    target = train.batch_tokens / train.seq_length
    nearest = min((max(1, round(target / step)) * step for step in steps), key=lambda batch: abs(batch - target))
    reason = (
        f"is {target:g} sequences of {train.seq_length} tokens, and no layout on gpus={setup.gpus} divides a batch "
        f"within {BATCH_TOLERANCE:.1%} of this number (nearest: {nearest})"
    )
    fewer = ", or fewer GPUs" if setup.gpus > 1 else ""
    fix = f"use train.batch_tokens={nearest * train.seq_length}, train.global_batch_size={nearest}{fewer}"
    return problem_with(setup, "train.batch_tokens", reason, fix)
