"""The search returns what simulating every legal layout would, without simulating them."""

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import capacity, estimate
from canzona_cli.core.errors import ConfigError, DoesNotFit
from canzona_cli.core.model.matrices import matrices
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Execution, Layout, ParallelConfig, Strategy
from canzona_cli.core.setup.execution import with_strategy
from canzona_cli.core.simulate import fit, possible, search
from canzona_cli.core.simulate.estimate import estimated_step_seconds, least_sequence_seconds, least_step_seconds
from canzona_cli.core.simulate.predict import simulate_run
from canzona_cli.core.simulate.search import candidates
from tests.sizes import Size, run


def per_sequence(config: RunConfig, layout: Layout) -> float:
    resolved = fill(config, layout)
    try:
        plan = make_plan(resolved.setup, layout) if resolved.execution is Execution.PLANNED else None
    except DoesNotFit:
        return float("inf")
    return simulate_run(resolved.setup, layout, plan).iteration_s / layout.global_batch_size


def test_another_strategy_is_fastest_in_a_layout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the search, which beyond some number of ranks is cut short, has missed that layout."""
    config = run("0.6b", 8)
    best = search.fastest_with(config.setup, "adamw", fit.resolve(config.setup)[1])
    assert best is not None
    assert best.layout == fit.resolve(with_strategy(config.setup, "adamw"))[1]
    slow = replace(best, layout=replace(best.layout, tp=8, dp=1), iteration_s=2 * best.iteration_s)
    monkeypatch.setattr(search, "search", lambda *_, **__: search.LayoutSearch(best=(slow,), legal=2, simulated=1))
    assert search.fastest_with(config.setup, "adamw", best.layout) == best
    assert search.fastest_with(run("32b", 8).setup, "adamw", best.layout) == slow, "the planned one does not fit"


@pytest.mark.parametrize(
    ("size", "gpus", "strategy"),
    [
        ("tiny", 4, "canzona"),
        pytest.param("tiny", 8, "sc", marks=pytest.mark.sweep),
        ("0.6b", 32, "canzona"),
        ("tiny", 8, "layerwise"),
        # Where model chunks are faster.
        pytest.param("8b", 1024, "canzona", marks=pytest.mark.sweep),
    ],
)
def test_no_legal_layout_is_simulated_faster_than_the_one_chosen(size: Size, gpus: int, strategy: Strategy) -> None:
    pp, tp = 1 if size == "0.6b" else None, 2 if size == "8b" else None  # fewer layouts to simulate
    config = run(size, gpus, strategy=strategy, micro_batch_size=1, pp=pp, tp=tp)
    legal = [candidate.layout for candidate in candidates(config.setup) if candidate.fits]
    assert size == "0.6b" or max(layout.vpp for layout in legal) > 1
    found = search.search(config.setup, 3)
    fastest = sorted({float(f"{per_sequence(config, layout):.5e}") for layout in legal})[:3]
    assert [one.per_sequence_s for one in found.best] == pytest.approx(fastest, rel=search.EQUAL_WITHIN)
    assert found.simulated < len(legal) <= found.legal
    assert fit.resolve(config.setup)[1] == found.best[0].layout
    for one in found.best:
        spent = one.spent
        assert sum(vars(spent).values()) == pytest.approx(one.iteration_s)
        assert spent.tensor_s > 0 or one.layout.tp == 1, "slices of a sequence may travel under attention"
        assert spent.tensor_s == 0 or one.layout.tp * one.layout.cp > 1
        assert (spent.recompute_s > 0) == (one.layout.recompute != "none")


@pytest.mark.parametrize(
    ("size", "gpus", "length"),
    [
        ("0.6b", 256, 131_072),
        *(
            pytest.param(size, gpus, length, marks=pytest.mark.sweep)
            for size in ("1.7b", "8b", "32b")
            for gpus in (256, 1024)
            for length in (4096, 32_768, 131_072)
        ),
    ],
)
def test_no_typed_context_parallelism_is_faster(size: Size, gpus: int, length: int) -> None:
    """A sequence may be cut over several nodes: 32B with 128k tokens takes a fifth of the time on 256 GPUs."""
    config = run(size, gpus, strategy="canzona")
    config = replace(config, train=replace(config.train, seq_length=length))
    best = search.search(config.setup).best[0]
    assert length < 131_072 or best.layout.tp * best.layout.cp > 8
    for cp in (1, 2, 4, 8, 16, 32, 64):
        with suppress(ConfigError):  # a batch of few sequences
            for typed in search.search(replace(config, parallel=ParallelConfig(cp=cp)).setup).best:
                assert typed.per_sequence_s >= best.per_sequence_s * (1 - search.EQUAL_WITHIN)


def test_a_larger_micro_batch_is_not_cut_into_slices() -> None:
    """It would be the same step with one more slice to send."""
    config = run("0.6b", 32, strategy="canzona")
    legal = possible.possible_layouts(config.setup)
    compared = {layout for group in possible.layout_groups(config.setup) for layout in group.layouts}
    for layout in set(legal) - compared:
        less = replace(layout, cp=layout.cp // 2, dp=2 * layout.dp, micro_batch_size=layout.micro_batch_size // 2)
        assert less in legal
        assert estimated_step_seconds(config.setup, less) <= estimated_step_seconds(config.setup, layout) * (1 + 1e-9)
        assert estimate(config.setup, less).total <= estimate(config.setup, layout).total
    cut = replace(config, train=replace(config.train, micro_batch_size=2))
    assert {layout.cp for group in possible.layout_groups(cut.setup) for layout in group.layouts} >= {1, 2, 4}


@pytest.mark.parametrize(
    "overrides", [("recipe=qwen3-8b", "gpus=64"), ("recipe=qwen3-30b-a3b", "gpus=8"), ("recipe=qwen3-tiny", "gpus=4")]
)
def test_layouts_come_in_the_order_of_their_estimates(overrides: tuple[str, ...]) -> None:
    """A lower bound says which layout is estimated next, so it must not exceed the estimate."""
    config = compose_run([*overrides, "parallel.pp=2"], training=False).config
    limit, groups = capacity(config.setup), possible.layout_groups(config.setup)
    found = list(islice(search._fastest_first(config.setup, groups, limit, lambda: math.inf), 6))
    assert all(estimate(config.setup, layout).total <= limit for _, layout in found)
    assert [seconds for seconds, _ in found] == sorted(seconds for seconds, _ in found)
    latest_s = found[1][0]
    assert list(search._fastest_first(config.setup, groups, limit, lambda: latest_s)) == found[:2]
    for layout in possible.possible_layouts(config.setup):
        least_s = least_step_seconds(config.setup, layout)
        assert least_sequence_seconds(config.setup, layout) * layout.global_batch_size <= least_s
        assert least_s <= estimated_step_seconds(config.setup, layout) * (1 + 1e-9)


def test_tensor_parallelism_need_not_divide_experts_that_are_whole() -> None:
    config = run("8b", 16)
    config = replace(config, model=replace(config.model, num_experts=8, ffn_hidden_size=12292))
    layouts = possible.possible_layouts(config.setup)
    eps = {(layout.tp, layout.ep) for layout in layouts}
    assert {tp for tp, ep in eps if ep == 1} == {1, 2, 4}
    assert {tp for tp, ep in eps if ep > 1} == {1, 2, 4, 8}
    for tp, ep in eps:
        layout = next(layout for layout in layouts if (layout.tp, layout.ep) == (tp, ep))
        assert len(matrices(config.model, layout, "split")) == 36 * (4 + 3 * 8)


@pytest.mark.sweep
def test_few_of_a_thousand_gpus_layouts_are_simulated() -> None:
    """It happens on a dry run: simulating all 1,000 takes minutes."""
    found = search.search(run("32b", 1024, strategy="canzona").setup)
    assert found.legal > 1000
    assert found.simulated <= 5


@pytest.mark.sweep
def test_beyond_a_thousand_gpus_the_most_promising_are_simulated() -> None:
    found = search.search(run("14b", 2048, strategy="canzona").setup)
    assert found.best
    assert found.simulated <= search.MAX_SIMULATIONS < found.legal


def test_shards_that_need_more_memory_than_there_is_are_not_chosen() -> None:
    """A plan needs more than the estimate that let its layout in."""
    config = run("8b", 64, strategy="canzona")
    (best,) = search.search(config.setup).best
    assert best.memory_bytes <= candidates(config.setup)[0].memory.capacity


@pytest.mark.parametrize("overrides", [("recipe=qwen3-8b",), ("recipe=qwen3-30b-a3b", "parallel.pp=2")], ids=" ".join)
def test_more_recomputation_needs_no_more_memory_and_is_not_estimated_faster(overrides: tuple[str, ...]) -> None:
    """A search relies on both to skip layouts with more recomputation."""
    config = compose_run([*overrides, "gpus=8"], training=False).config
    alike = defaultdict[Layout, list[Layout]](list)
    for layout in possible.possible_layouts(config.setup):
        alike[replace(layout, recompute="none")].append(layout)
    for several in alike.values():
        assert [layout.recompute for layout in several] == list(possible.RECOMPUTE)
        memory = [estimate(config.setup, layout).total for layout in several]
        assert memory == sorted(memory, reverse=True)
        seconds = [estimated_step_seconds(config.setup, layout) for layout in several]
        assert all(more >= less * (1 - 1e-9) for less, more in pairwise(seconds))
