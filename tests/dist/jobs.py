"""Small real training jobs for tests, from the recipes people use."""

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from canzona_cli.config import resolve as config_resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Execution, Layout
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.training.assemble import assemble as assemble_trainee
from canzona_cli.training.assemble import join
from tests.dist.ranks import run_ranks

# A small qwen3-tiny that every layout of four ranks divides. Few micro-batches: four ranks on two cores spend
# milliseconds on each tensor-parallel all-reduce.
SMALL = (
    "recipe=qwen3-tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=192",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.head_dim=16",
    "train.seq_length=64",
    "train.batch_tokens=512",
    "train.micro_batch_size=2",
    # Several buckets, so that reduction and gathering really overlap.
    "parallel.bucket_elements=25000",
    # Ranks are data-parallel unless a test says otherwise. With nothing open there is nothing to search.
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.cp=1",
    "train.recompute=none",
)
EXPERTS = ("model.num_experts=4", "model.ffn_hidden_size=64")
"""The settings that make `SMALL` a model with experts."""


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    """A run as its launcher has it. Its plan is made here, where ranks forked from this process find it."""
    config, layout = _resolved(overrides)
    planned(config, layout)
    return config, layout


@cache
def _resolved(overrides: tuple[str, ...]) -> tuple[RunConfig, Layout]:
    return config_resolve.resolve(compose_run(list(overrides)).config)


def prepare(*overrides: str) -> tuple[RunConfig, Layout, PreparedCorpus]:
    """Prepares a run of `SMALL` as its launcher does, before workers start."""
    config, layout = resolve(*SMALL, *overrides)
    return config, layout, ensure_corpus(config)


def build(config: RunConfig, layout: Layout, plan: Plan | None = None) -> Trainee:
    """The model and all that updates it, as a worker builds them.

    Args:
        plan: the run's, where it was made before the ranks took the call; else it is made here.
    """
    logging.disable(logging.WARNING)
    return assemble_trainee(config, join(config, layout), plan or planned(config, layout))


def on_ranks[K, T](cases: Mapping[K, tuple[RunConfig, Layout]], work: Callable[[K, World], T]) -> dict[K, list[T]]:
    """Each case's `work`, one after another on the same ranks: what every rank came to, by case.

    Forking ranks, joining them and a process' first step take most of what a few small steps do. For cases that are
    cut over ranks alike: their process groups are the same, and nothing else is handed on from one to the next.
    """
    config, first = next(iter(cases.values()))
    assert len({(layout.tp, layout.cp, layout.pp, layout.dp, layout.ep) for _, layout in cases.values()}) == 1

    def rank() -> dict[K, T]:
        logging.disable(logging.WARNING)
        world, found = join(config, first), {}
        for case, (_, layout) in cases.items():
            gc.freeze()  # as every rank begins; training unfreezes what it found
            try:
                found[case] = work(case, replace(world, layout=layout))
            except BaseException as error:
                error.add_note(f"in case {case}")
                raise
        return found

    ranks = run_ranks(first.world_size, rank)
    return {case: [found[case] for found in ranks] for case in cases}


class Runs[K: Hashable, T]:
    """The results of runs: those on the same ranks are made together, once, when the first of them is requested."""

    def __init__(
        self,
        cases: Iterable[K],
        ranks: Callable[[K], Hashable],
        run: Callable[[Sequence[K]], Sequence[T]],
        swept: Iterable[K] = (),
    ) -> None:
        """Any other case is run by itself.

        Args:
            ranks: equal for cases that are cut over ranks alike.
            run: returns the results of some cases, in order.
            swept: cases that only sweeps ask for, which are made together apart from the others.
        """
        self._together: dict[K, list[K]] = {}
        for alike in (cases, swept):
            by_ranks = defaultdict[Hashable, list[K]](list)
            for case in dict.fromkeys(alike):
                if case not in self._together:
                    self._together[case] = by_ranks[ranks(case)]
                    by_ranks[ranks(case)].append(case)
        self._run, self._found = run, dict[K, T]()

    def __getitem__(self, case: K) -> T:
        if case not in self._found:
            together = self._together.get(case, [case])
            self._found |= zip(together, self._run(together), strict=True)
        return self._found[case]


CUT_BY = ("gpus", "parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep")


def ranks_of(settings: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Returns the settings that decide how a run is cut over ranks; the last value of a setting counts."""
    values = dict(each.split("=", 1) for each in settings)
    return frozenset((key, values[key]) for key in CUT_BY if key in values)


@cache
def planned(config: RunConfig, layout: Layout) -> Plan | None:
    """The run's plan; None for one that executes none. Kept for the session: `make_plan` keeps eight."""
    return make_plan(config.setup, layout) if config.execution is Execution.PLANNED else None
